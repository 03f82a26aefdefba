"""`SlurmResolver` in the steps, allocations and jobs of a real Slurm of three hosts."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests._waiting import until
from tests.hosts._hosts import Hosts
from tests.hosts._slurm import Slurm
from tfd_notebook import errors
from tfd_notebook.resolvers import SlurmResolver, detection

Theirs = tf.distribute.cluster_resolver.SlurmClusterResolver

pytestmark = [pytest.mark.integration, pytest.mark.root]

#: A tf.distribute server in a Slurm step.
SERVE = """
import tensorflow as tf
from tfd_notebook.resolvers import SlurmResolver

resolver = SlurmResolver({"ps": 1, "worker": 2}, port_base=9100)
tf.distribute.Server(
    resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
).join()
"""
#: A coordinator outside an allocation, which looks up the Slurm job.
COORDINATE = """
import json, sys, time
import tensorflow as tf
from tfd_notebook.errors import TasksMissing
from tfd_notebook.resolvers import SlurmResolver

resolver = SlurmResolver({"ps": 1, "worker": 2}, port_base=9100, job=sys.argv[1])
deadline = time.monotonic() + 90
while True:
    try:
        resolver.check()
        break
    except TasksMissing:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.2)
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    variable = tf.Variable(20.0)
value = coordinator.schedule(tf.function(lambda: variable + 1.0))
results = {
    "spec": resolver.cluster_spec().as_dict(),
    "task": [resolver.task_type, resolver.master()],
    "accelerators": resolver.num_accelerators(),
    "of_the_ps": resolver.num_accelerators("ps", 0),
    "value": float(coordinator.fetch(value)),
    "device": variable.device,
}
# The servers keep running, as other tasks than this resolver describes.
wrong = SlurmResolver({"ps": 2, "worker": 1}, port_base=9100, job=sys.argv[1])
try:
    wrong.check()
except TasksMissing as error:
    results["wrong"] = str(error)
print(json.dumps(results))
"""


def running(slurm: Slurm) -> str:
    """Return the number of the running Slurm job."""
    return slurm.run("squeue", "-h", "-t", "RUNNING", "-o", "%i").stdout.strip()


def program(code: str, *words: str) -> list[str]:
    return [sys.executable, "-c", code, *words]


def environments(slurm: Slurm, path: Path, *command: str) -> list[dict[str, str]]:
    """Return the environment of each task that a command of Slurm starts, by rank."""
    # One file per task, because srun may mix the output of two tasks in a line.
    write = f"import json, os; file = open(f'{path}/{{os.getpid()}}', 'w')"
    write += "; json.dump(dict(os.environ), file); file.close()"
    slurm.run(*command, *program(write), check=True)
    matches = [json.loads(file.read_text()) for file in path.iterdir()]
    return sorted(matches, key=lambda env: int(env.get("SLURM_PROCID", 0)))


@pytest.fixture(scope="module")
def step(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return environments(slurm, tmp_path_factory.mktemp("step"), "srun", "-N3", "-n5")


@pytest.fixture
def within(
    monkeypatch: pytest.MonkeyPatch, plain_environment: None
) -> Callable[[dict[str, str]], None]:
    """Return a function that sets the environment of a Slurm task in this process."""

    def enter(env: dict[str, str]) -> None:
        for name in set(os.environ) - set(env):
            if name.startswith(("SLURM", "CUDA")):
                monkeypatch.delenv(name)
        for name, value in env.items():
            if name.startswith("SLURM"):
                monkeypatch.setenv(name, value)

    return enter


class TestStep:
    workers = ("n1:8888", "n1:8889", "n1:8890", "n2:8888", "n10:8888")

    def test_every_task_has_its_identity(
        self, step: list[dict[str, str]], within: Callable[[dict[str, str]], None]
    ) -> None:
        assert len(step) == 5
        for rank, env in enumerate(step):
            within(env)
            resolver = SlurmResolver()
            assert resolver.cluster_spec().as_dict() == {"worker": list(self.workers)}
            assert resolver.master() == f"grpc://{self.workers[rank]}"
            assert self.workers[rank].startswith(f"{env['SLURMD_NODENAME']}:")
            assert resolver.place == f"Slurm's step {env['SLURM_JOB_ID']}.0"

    def test_tensorflows_resolver_confuses_the_tasks(
        self, step: list[dict[str, str]], within: Callable[[dict[str, str]], None]
    ) -> None:
        wrong = set()
        for rank, env in enumerate(step):
            within(env)
            resolver = Theirs(gpus_per_node=8, auto_set_gpu=False)
            address = resolver.cluster_spec().task_address("worker", rank)
            if not address.startswith(f"{env['SLURMD_NODENAME']}:"):
                wrong.add(rank)
        assert wrong == {3, 4}

    def test_nodes_without_gpus(
        self, step: list[dict[str, str]], within: Callable[[dict[str, str]], None]
    ) -> None:
        within(step[0])
        with pytest.raises(FileNotFoundError, match="nvidia-smi"):
            Theirs()
        assert SlurmResolver().num_accelerators() == {}

    @pytest.mark.parametrize("method", ["block", "cyclic", "plane=2"])
    def test_distributions(
        self,
        slurm: Slurm,
        within: Callable[[dict[str, str]], None],
        tmp_path: Path,
        method: str,
    ) -> None:
        """Each task has the address from the resolver, for every placement of Slurm."""
        tasks = environments(slurm, tmp_path, "srun", "-N3", "-n5", "-m", method)
        assert len(tasks) == 5
        for env in tasks:
            within(env)
            port = 1 + int(env["SLURM_LOCALID"])
            place = f"grpc://{env['SLURMD_NODENAME']}:{port}"
            assert SlurmResolver(port_base=1).master() == place

    @pytest.mark.parametrize("start", ["salloc", "srun --overlap"])
    def test_allocation_is_resolved(
        self,
        slurm: Slurm,
        within: Callable[[dict[str, str]], None],
        tmp_path: Path,
        start: str,
    ) -> None:
        nested = [] if start == "salloc" else ["srun", "--overlap", "-n1", "-N1"]
        (env,) = environments(slurm, tmp_path, "salloc", "-Q", "-N2", "-n3", *nested)
        within(env)
        if nested:  # a separate step with one task
            assert SlurmResolver().tasks() == {"worker": {0: "n1:8888"}}
            _, verdict = detection.detect({})
            assert '"--nodes=2", "--ntasks=2"' in verdict.cell
        else:
            with pytest.raises(RuntimeError, match="not found in environment"):
                Theirs()
            assert SlurmResolver().cluster_spec().as_dict() == {
                "worker": ["n1:8888", "n1:8889", "n2:8888"]
            }
            assert SlurmResolver().master() == ""

    def test_heterogeneous_job_is_resolved(
        self, slurm: Slurm, within: Callable[[dict[str, str]], None], tmp_path: Path
    ) -> None:
        """Its allocation has no other variables. In its step, the ranks continue."""
        (tmp_path / "job").mkdir()
        job = ["salloc", "-Q", "-N1", "-n2", ":", "-N2", "-n3"]
        (env,) = environments(slurm, tmp_path / "job", *job)
        assert "SLURM_JOB_NODELIST" not in env
        workers = ["n1:8888", "n1:8889", "n2:8888", "n2:8889", "n10:8888"]
        within(env)
        assert SlurmResolver().cluster_spec().as_dict() == {"worker": workers}
        _, verdict = detection.detect({})
        assert '"--het-group=0,1"' in verdict.cell
        (tmp_path / "step").mkdir()
        job += ["srun", "--overlap", "--het-group=0,1"]
        tasks = environments(slurm, tmp_path / "step", *job)
        for rank, env in enumerate(tasks):
            within(env)
            assert SlurmResolver().cluster_spec().as_dict() == {"worker": workers}
            assert SlurmResolver().master() == f"grpc://{workers[rank]}"
        assert len(tasks) == 5


@pytest.fixture
def servers(slurm: Slurm) -> Iterator[str]:
    """Start a step with a parameter server and two workers; return the number of its Slurm job."""
    with slurm.start(
        "srun",
        "-N3",
        "-n3",
        *program(SERVE),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        job = until(lambda: running(slurm))
        yield job
        slurm.run("scancel", job, check=True)
        process.communicate(timeout=60)
    until(lambda: not slurm.run("squeue", "-h").stdout.strip())


def test_strategy_uses_another_job(slurm: Slurm, servers: str) -> None:
    completed = slurm.run(*program(COORDINATE, servers), timeout=170)
    assert completed.returncode == 0, completed.stderr[-4_000:]
    data = json.loads(completed.stdout.splitlines()[-1])
    assert data["spec"] == {"ps": ["n1:9100"], "worker": ["n2:9100", "n10:9100"]}
    assert data["task"] == [None, ""]
    assert (data["accelerators"], data["of_the_ps"]) == ({}, {})
    assert data["value"] == 21.0
    assert data["device"].startswith("/job:ps/replica:0/task:0")
    assert "ps:1 at n2:9100: worker:0 answers there" in data["wrong"]


#: In an allocation, the suggested cell starts tasks, which are then resolved.
ALLOCATION = """
import json, time
import tfd_notebook as tfd

resolution = tfd.resolve()
before = resolution.last.counts
exec(resolution.cell)
try:
    deadline = time.monotonic() + 120
    while resolution.probe().counts != {"alive": 3}:
        assert time.monotonic() < deadline, resolution
        time.sleep(0.2)
    frame = resolution.to_frame()
    results = {
        "rule": resolution.rule,
        "before": before,
        "identity": list(frame["identity"]),
        "address": list(frame["address"]),
        "cell": resolution.cell,
    }
finally:
    step.terminate()
    step.wait()
print(json.dumps(results))
"""
#: In a step with one task, the cell starts others, and names the code that resolves them.
ONE_TASK = """
import json, time
import tfd_notebook as tfd

cell = tfd.resolve().cell
exec(cell)
try:
    deadline = time.monotonic() + 120
    while True:
        tasks = eval(cell.rpartition("# then: ")[2])
        if tasks.last.counts == {"alive": 3}:
            break
        assert time.monotonic() < deadline, tasks
        time.sleep(0.2)
    results = {"address": list(tasks.to_frame()["address"]), "cell": cell}
finally:
    step.terminate()
    step.wait()
print(json.dumps(results))
"""
#: Outside an allocation, the cell submits a Slurm job, which is resolved by its number.
CONTROLLER = """
import json, subprocess, time
import tfd_notebook as tfd

resolution = tfd.resolve()
exec(resolution.cell)
try:
    deadline = time.monotonic() + 120
    while True:
        assert time.monotonic() < deadline
        time.sleep(0.2)
        try:
            submitted = tfd.resolve("slurm", job=job)
        except tfd.errors.ResolveError:
            continue
        if submitted.last.counts == {"alive": 2}:
            break
    results = {"rule": resolution.rule, "identity": list(submitted.to_frame()["identity"])}
finally:
    subprocess.run(["scancel", job], check=True)
print(json.dumps(results))
"""


class TestDetection:
    def test_step_is_resolved(
        self,
        step: list[dict[str, str]],
        within: Callable[[dict[str, str]], None],
    ) -> None:
        within(step[1])
        considered, verdict = detection.detect({})
        assert (considered[-1].rule, verdict.resolver) == ("slurm", "slurm")
        assert considered[-1].why == "in a Slurm step with 5 tasks"

    def test_step_of_one_task_is_resolved(
        self, slurm: Slurm, within: Callable[[dict[str, str]], None], tmp_path: Path
    ) -> None:
        (env,) = environments(slurm, tmp_path, "srun", "-n1", "-N1")
        within(env)
        considered, _ = detection.detect({})
        close = [item.rule for item in considered if item.outcome == "partial"]
        assert close == ["slurm", "slurm_allocation", "slurm_controller"]
        assert considered[-1].rule == "local"
        assert env["SLURM_JOB_CPUS_PER_NODE"].isdecimal()

    def test_the_cell_of_an_allocation_starts_its_tasks(self, slurm: Slurm) -> None:
        completed = slurm.run("salloc", "-Q", "-N3", "-n3", *program(ALLOCATION), timeout=170)
        assert completed.returncode == 0, completed.stderr[-4_000:]
        data = json.loads(completed.stdout.splitlines()[-1])
        assert data["rule"] == "slurm_allocation"
        assert data["before"] == {"refused": 3}
        assert data["address"] == ["n1:8888", "n2:8888", "n10:8888"]
        assert data["identity"] == ["worker:0", "worker:1", "worker:2"]
        assert data["cell"] == "cluster = tfd.resolve().attach()"

    def test_the_cell_of_a_step_starts_tasks_in_all_components(self, slurm: Slurm) -> None:
        job = ["salloc", "-Q", "-N1", "-n2", ":", "-N2", "-n3", "srun", "--overlap", "-N1", "-n1"]
        completed = slurm.run(*job, *program(ONE_TASK), timeout=170)
        assert completed.returncode == 0, completed.stderr[-4_000:]
        data = json.loads(completed.stdout.splitlines()[-1])
        assert data["address"] == ["n1:8888", "n2:8888", "n10:8888"]
        assert '":", "--het-group=1", "--nodes=2"' in data["cell"]

    def test_the_cell_for_a_controller_submits_a_job(self, slurm: Slurm) -> None:
        completed = slurm.run(*program(CONTROLLER), timeout=170)
        assert completed.returncode == 0, completed.stderr[-4_000:]
        data = json.loads(completed.stdout.splitlines()[-1])
        assert data["rule"] == "slurm_controller"
        assert data["identity"] == ["worker:0", "worker:1"]
        until(lambda: not slurm.run("squeue", "-h").stdout.strip())

    def test_the_cell_respects_the_limits_of_the_partition(self, slurm: Slurm) -> None:
        cell = program("import tfd_notebook as tfd; print(tfd.resolve().cell)")
        assert '"--ntasks=2", "--time=60"' in slurm.run(*cell, timeout=100).stdout
        change = ("scontrol", "update", "PartitionName=all")
        slurm.run(*change, "MaxTime=30", check=True)
        try:
            assert '"--ntasks=2", "--time=30"' in slurm.run(*cell, timeout=100).stdout
        finally:
            slurm.run(*change, "MaxTime=60", check=True)


class TestJobs:
    @pytest.fixture(autouse=True)
    def _squeue_of_a_host(
        self, slurm: Slurm, hosts: Hosts, plain_environment: None, tmp_path: Path, monkeypatch: Any
    ) -> None:
        """Use ``squeue`` and ``sinfo`` of ``east``, which is not the controller."""
        for name in ("squeue", "sinfo"):
            command, path = tmp_path / name, shutil.which(name)
            assert path
            there = shlex.join(
                hosts.east.command(["env", f"SLURM_CONF={slurm.env['SLURM_CONF']}", path])
            )
            command.write_text(f'#!/bin/sh\nexec {there} "$@"\n')
            command.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def test_unknown_job_is_an_error(self) -> None:
        with pytest.raises(errors.NotThere, match="Slurm's job 99999 has ended or never existed"):
            SlurmResolver(job=99999).cluster_spec()

    def test_held_job_is_explained(self, slurm: Slurm) -> None:
        held = slurm.run("sbatch", "--parsable", "--hold", "--wrap", "true").stdout.strip()
        with pytest.raises(errors.NoTasks, match=f"job {held} does not run: it is PENDING") as why:
            SlurmResolver(job=held).cluster_spec()
        assert "JobHeldUser: it is held by its user" in str(why.value)
        assert f"scontrol release {held}" in str(why.value)
        slurm.run("scancel", held, check=True)
        with pytest.raises(errors.ResolveError, match=f"job {held} (has ended|does not run)"):
            SlurmResolver(job=held).cluster_spec()

    def test_components_of_a_heterogeneous_job_are_resolved(self, slurm: Slurm) -> None:
        submit = ("sbatch", "--parsable", "-N1", "-n2", "--wrap", "sleep 60", ":", "-N2", "-n2")
        job = slurm.run(*submit, check=True).stdout.strip()

        def workers() -> dict[int, str] | None:
            try:
                return SlurmResolver(job=job).tasks()["worker"]
            except errors.NoTasks:
                return None

        hosts = {0: "n1:8888", 1: "n1:8889", 2: "n2:8888", 3: "n10:8888"}
        assert until(workers, 120.0) == hosts
        slurm.run("scancel", job, check=True)
        until(lambda: not slurm.run("squeue", "-h").stdout.strip())

    def test_excessive_time_limit_is_explained(self, slurm: Slurm) -> None:
        submit = ("sbatch", "--parsable", "--time=120", "--wrap", "sleep 60")
        job = slurm.run(*submit, check=True).stdout.strip()

        def error_text() -> str:
            with pytest.raises(errors.NoTasks) as caught:
                SlurmResolver(job=job).cluster_spec()
            return str(caught.value)

        text = until(lambda: (text := error_text()) if "PartitionTimeLimit" in error_text() else "")
        assert "PartitionTimeLimit: its time limit is longer than partition all allows" in text
        assert f"#SBATCH --time=1:00:00, or: scontrol update JobId={job}" in text
        slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=1:00:00", check=True)
        until(lambda: running(slurm) == job)
        assert SlurmResolver(job=job).tasks() == {"worker": {0: "n1:8888"}}
        slurm.run("scancel", job, check=True)
        until(lambda: not slurm.run("squeue", "-h").stdout.strip())

    def test_hosts_in_use_are_explained(self, slurm: Slurm) -> None:
        fill = ("sbatch", "--parsable", "--exclusive", "-N3", "--wrap", "sleep 60")
        first = slurm.run(*fill, check=True).stdout.strip()
        until(lambda: running(slurm) == first)
        second = slurm.run(*fill, check=True).stdout.strip()

        def error_text() -> str:
            with pytest.raises(errors.NoTasks) as caught:
                SlurmResolver(job=second).cluster_spec()
            return str(caught.value)

        until(lambda: "Resources: the hosts that it needs are in use" in error_text())
        slurm.run("scancel", first, second, check=True)
        until(lambda: not slurm.run("squeue", "-h").stdout.strip())

    def test_running_job_is_resolved(self, slurm: Slurm) -> None:
        with slurm.start("srun", "-N2", "-n3", "sleep", "60") as process:
            job = until(lambda: running(slurm))
            with pytest.raises(errors.Malformed, match="3 tasks on 2 hosts"):
                SlurmResolver(job=job).cluster_spec()
            resolver = SlurmResolver(job=job, tasks_per_node={"n1": 2, "n2": 1})
            assert resolver.cluster_spec().as_dict() == {
                "worker": ["n1:8888", "n1:8889", "n2:8888"]
            }
            assert (resolver.task_type, resolver.master()) == (None, "")
            assert SlurmResolver(job=job, tasks_per_node=1).tasks() == {
                "worker": {0: "n1:8888", 1: "n2:8888"}
            }
            slurm.run("scancel", job, check=True)
            process.wait(60)
        until(lambda: not slurm.run("squeue", "-h").stdout.strip())

    def test_unreachable_controller_is_an_error(self, hosts: Hosts) -> None:
        hosts.partition(hosts.north, hosts.east)
        with pytest.raises(errors.NoAnswer, match="Slurm's job 1: squeue") as caught:
            SlurmResolver(job=1).cluster_spec()
        assert "scontrol ping" in str(caught.value)
