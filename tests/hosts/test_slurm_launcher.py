"""``launcher="slurm"`` on a real Slurm of three hosts. The kernel is on home, outside of Slurm."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import tfd_notebook as tfd
from tests._waiting import until
from tests.hosts._conformance import (
    OWNER,
    Conformance,
    Make,
    close_connections,
    numbers,
    pids_on,
    row,
)
from tests.hosts._hosts import Hosts
from tests.hosts._slurm import Slurm
from tfd_notebook import errors
from tfd_notebook.launchers.client import orphans
from tfd_notebook.model.spec import TaskState
from tfd_notebook.net.runtime_dir import variables

pytestmark = [pytest.mark.integration, pytest.mark.root, pytest.mark.timeout(240)]

#: The simulated hosts share the file system, so these differ from home's.
PROLOGUE = "export TFD_RUNTIME_DIR=/run/tfd TMPDIR=/run/tmp HOME=/run/home"


@pytest.fixture(scope="module", autouse=True)
def at_home(slurm: Slurm) -> Iterator[None]:
    with variables(slurm.home_env):
        yield


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("output"))


def job_names(slurm: Slurm) -> list[str]:
    return slurm.run("squeue", "--noheader", "--format=%j").stdout.split()


@pytest.fixture(scope="module")
def make(slurm: Slurm, output: str) -> Make:
    def make(nodes: Any = 2, **options: object) -> tfd.launchers.Slurm:
        # Of the three nodes, the conformance tests use n1 and n2.
        extra = ("--exclude=n10",)
        options = {"prologue": PROLOGUE, "output": output, "extra": extra, **options}
        return tfd.launchers.Slurm(nodes, **options)

    return make


@pytest.fixture(scope="module")
def written(output: str) -> str:
    return (
        f"tfd.launchers.Slurm(2, prologue={PROLOGUE!r}, output={output!r}, "
        "extra=('--exclude=n10',), grace={grace})"
    )


@pytest.fixture(scope="module")
def cut(hosts: Hosts) -> Callable[[], None]:
    return lambda: close_connections(hosts.north)


@pytest.fixture(scope="module")
def shared(make: Make) -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=2, name="shared", launcher=make()) as cluster:
        yield cluster


class TestSlurm(Conformance):
    def test_secret_is_private(self, slurm: Slurm, shared: tfd.Cluster, output: str) -> None:
        (task_host,) = {shared._task_manager.task_host}
        secret = task_host.hosts[0].remote._rendezvous.secret.hex()[200:400]
        assert secret not in slurm.run("scontrol", "-dd", "show", "job").stdout
        assert secret not in shared.job_script()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                assert secret not in " ".join(process.cmdline())
                assert secret not in str(process.environ())
        for directory in Path(output).iterdir():
            assert directory.stat().st_mode & 0o077 == 0

    def test_end_of_the_allocation_is_the_time_limit(self, shared: tfd.Cluster) -> None:
        snapshot = shared.snapshot()
        assert snapshot.expires is not None
        assert 0 < snapshot.expires - snapshot.time <= 3600


def test_each_role_has_its_job(make: Make, slurm: Slurm) -> None:
    launcher = make({"dispatcher": 1, "data_worker": 1})
    with tfd.Cluster(data_workers=1, name="roles", launcher=launcher) as cluster:
        assert cluster.job_script().count("#!/bin/sh") == 2
        names = slurm.run("squeue", "--noheader", "--format=%j").stdout.split()
        assert {"tfd-roles-dispatcher", "tfd-roles-data_worker"} <= set(names)
        assert row(cluster, "dispatcher:0").host.endswith("/dispatcher")
        assert row(cluster, "data_worker:0").host.endswith("/data_worker")
        assert numbers(cluster) == list(range(100))
    until(lambda: not any("roles" in name for name in job_names(slurm)), 60)


def await_free_nodes(slurm: Slurm) -> None:
    """Wait until no job is ending: Slurm does not allocate its node."""
    ending = ("squeue", "--noheader", "--states=COMPLETING")
    until(lambda: not slurm.run(*ending).stdout.strip(), 60)


@pytest.fixture
def drain(slurm: Slurm) -> Iterator[Callable[..., None]]:
    """Make nodes unavailable to new jobs; the test or its end makes them available again."""

    def set_state(state: str, *nodes: str) -> None:
        update = ("scontrol", "update", f"NodeName={','.join(nodes)}", f"State={state}")
        slurm.run(*update, *(["Reason=maintenance"] if state == "DRAIN" else []), check=True)
        drained.update(nodes) if state == "DRAIN" else drained.difference_update(nodes)

    drained: set[str] = set()
    yield set_state
    if drained:
        set_state("RESUME", *drained)


def test_nodes_that_are_free_later_join_the_cluster(
    make: Make, slurm: Slurm, drain: Callable[..., None]
) -> None:
    await_free_nodes(slurm)
    drain("DRAIN", "n2", "n10")
    launcher = make(3, minimum=1, cpus=2, extra=())
    with tfd.Cluster(data_workers=3, name="fewer", launcher=launcher) as cluster:
        assert "--nodes=1-3" in cluster.job_script()
        before = row(cluster, "data_worker:0")
        assert before.host == "n1"
        until(lambda: "is pending" in row(cluster, "data_worker:1").reason, 60)
        assert row(cluster, "data_worker:2").state == TaskState.PLANNED
        notices = [notice.what for notice in cluster.snapshot().notices]
        assert "has 1 of 3 nodes, and 2 may join later" in " ".join(notices)
        assert numbers(cluster) == list(range(100))
        for node, task, host in (("n2", 1, "n2"), ("n10", 2, "n10")):
            drain("RESUME", node)
            until(lambda: row(cluster, f"data_worker:{task}").state == TaskState.READY, 90)  # noqa: B023
            assert row(cluster, f"data_worker:{task}").host == host
            assert numbers(cluster) == list(range(100))
        assert cluster.state == "ready"
        assert row(cluster, "data_worker:0").pid == before.pid
        assert row(cluster, "dispatcher:0").restarts == 0
        pids = [row(cluster, f"data_worker:{index}").pid for index in (1, 2)]
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 60)
    until(lambda: "tfd-fewer" not in job_names(slurm), 60)


def test_stop_cancels_the_job_of_missing_nodes(
    make: Make, slurm: Slurm, drain: Callable[..., None]
) -> None:
    await_free_nodes(slurm)
    drain("DRAIN", "n2", "n10")
    launcher = make({"data_worker": 2, "dispatcher": 1}, minimum=1, cpus=2, extra=())
    with tfd.Cluster(data_workers=2, name="waits", launcher=launcher) as cluster:
        until(lambda: "is pending" in row(cluster, "data_worker:1").reason, 60)
        assert job_names(slurm).count("tfd-waits-data_worker") == 2
        cluster.scale(data_workers=1)
        assert cluster.state == "ready"
    until(lambda: not any("waits" in name for name in job_names(slurm)), 60)


def test_cancelled_job_is_explained(make: Make, slurm: Slurm) -> None:
    cluster = tfd.Cluster(data_workers=1, name="cancelled", launcher=make(1))
    slurm.run("scancel", "--name=tfd-cancelled", check=True)
    until(lambda: cluster.ended, 90)
    assert cluster.state in ("lost", "stopped")  # the bridge or the agent reports the end first
    assert "was cancelled" in " ".join(notice.what for notice in cluster.snapshot().notices)


def test_refused_and_broken_jobs_are_explained(make: Make, slurm: Slurm) -> None:
    with pytest.raises(errors.LaunchError, match="invalid partition") as caught:
        tfd.Cluster(data_workers=1, name="refused", launcher=make(partition="gpu"))
    assert "the partitions are all" in str(caught.value)
    with pytest.raises(errors.LaunchError, match="/no/python"):
        tfd.Cluster(data_workers=1, name="refused", launcher=make(1, python="/no/python"))
    policy = tfd.Policy(start_timeout=3.0)
    with pytest.raises(errors.StartTimeout, match=r"longer than partition all allows \(1:00:00\)"):
        tfd.Cluster(data_workers=1, name="refused", launcher=make(time="2:00:00"), policy=policy)
    until(lambda: "tfd-refused" not in job_names(slurm), 60)


def test_stop_cancels_a_pending_job(make: Make, slurm: Slurm) -> None:
    launcher = make(1, extra=("--begin=now+1hour",))
    cluster = tfd.Cluster(data_workers=1, name="pending", launcher=launcher, start=False)
    caught: list[BaseException] = []

    def start() -> None:
        try:
            cluster.start()
        except errors.LaunchError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    until(lambda: "BeginTime" in str([task.reason for task in cluster.snapshot().tasks]), 60)
    assert "tfd-pending" in job_names(slurm)
    cluster.stop()
    thread.join(60)
    assert caught
    until(lambda: "tfd-pending" not in job_names(slurm), 60)


def test_job_of_a_killed_kernel_ends_when_it_starts(
    hosts: Hosts, slurm: Slurm, output: str
) -> None:
    before = {host: host.pids() for host in hosts}
    options = f"prologue={PROLOGUE!r}, output={output!r}, extra=('--exclude=n10', '--hold')"
    code = OWNER.format(launcher=f"tfd.launchers.Slurm(2, {options})").replace("orphan", "queued")
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    listed = ("squeue", "--noheader", "--states=all", "--name=tfd-queued")
    try:
        until(lambda: "PENDING" in slurm.run(*listed, "--format=%T").stdout, 60)
    finally:
        owner.kill()
        owner.communicate()
    jobs = slurm.run(*listed, "--states=PENDING", "--format=%i").stdout.split()
    slurm.run("scontrol", "release", *jobs, check=True)
    ended = {"COMPLETED", "FAILED"}
    until(lambda: set(slurm.run(*listed, "--format=%T").stdout.split()) <= ended, 60)
    until(lambda: not any(pids_on(host, before[host]) for host in hosts), 60)
    orphans.sweep()  # removes the files of the killed process


def test_interrupt_during_submission_cancels_the_job(
    make: Make, slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch, submitting = tmp_path / "sbatch", tmp_path / "submitting"
    real = shutil.which("sbatch")
    sbatch.write_text(f'#!/bin/sh\ntouch {submitting}\nsleep 2\nexec {real} "$@"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def interrupt() -> None:
        until(submitting.exists, 60)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    launcher = make(1, extra=("--begin=now+1hour",))
    with pytest.raises(KeyboardInterrupt):
        tfd.Cluster(data_workers=1, name="hasty", launcher=launcher)
    thread.join()
    listed = ("squeue", "--noheader", "--states=all", "--name=tfd-hasty", "--format=%T")
    until(lambda: slurm.run(*listed).stdout.split() == ["CANCELLED"])
    assert "hasty" not in tfd.clusters()


def test_drained_nodes_are_named(make: Make, slurm: Slurm) -> None:
    update = ("scontrol", "update", "NodeName=n10")
    slurm.run(*update, "State=DRAIN", "Reason=maintenance", check=True)
    try:
        policy = tfd.Policy(start_timeout=5.0)
        launcher = make(1, extra=("--nodelist=n10",))
        with pytest.raises(errors.StartTimeout, match=r"ReqNodeNotAvail|DRAINED"):
            tfd.Cluster(data_workers=1, name="drained", launcher=launcher, policy=policy)
    finally:
        slurm.run(*update, "State=RESUME", check=True)
    until(lambda: "tfd-drained" not in job_names(slurm), 60)


def test_preempted_job_is_explained(make: Make, slurm: Slurm) -> None:
    launcher = make(1, extra=("--nodelist=n10",))
    cluster = tfd.Cluster(data_workers=1, name="preempted", launcher=launcher)
    urgent = ("srun", "--partition=urgent", "--nodelist=n10", "--exclusive", "sleep", "1")
    with slurm.start(*urgent) as program:
        until(lambda: cluster.ended, 90)
        assert program.wait(60) == 0
    assert "was preempted" in " ".join(notice.what for notice in cluster.snapshot().notices)


def test_missing_container_runtime_is_explained(make: Make) -> None:
    launcher = make(1, container="registry.example/train:1")
    with pytest.raises(errors.LaunchError, match="container-image"):
        tfd.Cluster(data_workers=1, name="contained", launcher=launcher)


ALLOCATED = """
import tfd_notebook as tfd
launcher = tfd.launchers.Slurm(3, minimum=2, output={output!r})
with tfd.Cluster(data_workers=2, name="inside", launcher=launcher) as cluster:
    print(cluster.to_frame()["host"].nunique(), cluster.state)
"""


def test_steps_run_in_the_allocation(hosts: Hosts, slurm: Slurm, output: str) -> None:
    code = ALLOCATED.format(output=output)
    command = ["salloc", "-Q", "-N2", "--exclude=n10", sys.executable, "-c", code]
    completed = slurm.run(*command, timeout=150)
    assert "2 ready" in completed.stdout, completed.stderr[-4000:]
    completed = slurm.run(*["salloc", "-Q", "-N1", *command[3:]], timeout=150)
    assert "has 1 nodes, and the cluster needs 2-3" in completed.stderr
    for host in (hosts.north, hosts.east):
        runtime = host.tmp / "tfd_notebook-0"  # steps do not run the prologue
        until(lambda: not list(runtime.glob("agent-*")), 60)  # noqa: B023
        shutil.rmtree(runtime)


@pytest.mark.parametrize(
    "options",
    [
        {"nodes": 0},
        {"nodes": {"cook": 1}},
        {"partition": "-x"},
        {"account": "a\n#SBATCH --wrap=id"},
        {"time": "soon"},
        {"extra": ["--output=/etc/passwd"]},
        {"extra": ["id; true"]},
        {"cpus": True},
        {"nodes": 2, "minimum": 0},
        {"nodes": {"data_worker": 4, "ps": 1}, "minimum": 3},
        {"extra": ["--ntasks-per-node=1"]},
    ],
)
def test_invalid_option_is_an_error(options: dict[str, object]) -> None:
    with pytest.raises(errors.UsageError, match="invalid"):
        tfd.launchers.Slurm(**options)
