"""Slurm's environment variables. The tests between hosts use a real Slurm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tensorflow as tf

from tfd_notebook import errors
from tfd_notebook.net.slurm_queue import Partition
from tfd_notebook.resolvers import SlurmResolver, suggestions
from tfd_notebook.resolvers.slurm import expand

tf_resolvers = tf.distribute.cluster_resolver

pytestmark = pytest.mark.usefixtures("plain_environment")


def step(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Set the variables of a task in a Slurm step."""
    given = {
        "JOB_ID": "7",
        "STEP_ID": "0",
        "STEP_NODELIST": "n[1-2,10]",
        "STEP_TASKS_PER_NODE": "1(x3)",
        "STEP_NUM_TASKS": "3",
        "PROCID": "1",
        **variables,
    }
    for name, value in given.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


class TestSlurm:
    def test_hosts_are_in_slurms_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step(monkeypatch)
        expected = tf_resolvers.SlurmClusterResolver(gpus_per_node=1, auto_set_gpu=False)
        assert expected.cluster_spec().task_address("worker", 1) == "n10:8888"  # and runs on n2
        resolver = SlurmResolver()
        assert resolver.cluster_spec().as_dict() == {"worker": ["n1:8888", "n2:8888", "n10:8888"]}
        assert resolver.master() == "grpc://n2:8888"

    @pytest.mark.slow
    def test_nodes_without_gpus(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        step(monkeypatch)
        with pytest.raises(FileNotFoundError, match="nvidia-smi"):
            tf_resolvers.SlurmClusterResolver()
        assert SlurmResolver().cluster_spec().num_tasks("worker") == 3

    def test_missing_gpu_count_is_probed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step(monkeypatch)
        with pytest.raises(ValueError, match="must not be zero"):
            tf_resolvers.SlurmClusterResolver(gpus_per_node=0).cluster_spec()
        resolver = SlurmResolver(gpus_per_node=0)
        assert resolver.cluster_spec().num_tasks("worker") == 3
        assert resolver.num_accelerators() == {}

    def test_hidden_devices_do_not_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step(monkeypatch)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert tf_resolvers.SlurmClusterResolver().num_accelerators() == {"GPU": 1}
        assert SlurmResolver().num_accelerators() == {}

    def test_resolver_changes_no_environment_variable(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step(monkeypatch)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        tf_resolvers.SlurmClusterResolver(gpus_per_node=1).cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        before = dict(os.environ)
        SlurmResolver(gpus_per_node=1).cluster_spec()
        assert dict(os.environ) == before

    def test_own_task_is_available_before_cluster_spec(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step(monkeypatch)
        assert tf_resolvers.SlurmClusterResolver(gpus_per_node=1).task_id is None
        assert (SlurmResolver().task_type, SlurmResolver().task_id) == ("worker", 1)

    def test_jobs_get_ranks_as_in_tensorflow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step(monkeypatch, STEP_NODELIST="n[1-2]", STEP_TASKS_PER_NODE="2,1", PROCID="2")
        jobs = {"worker": 1, "ps": 1, "chief": 1}
        resolver = SlurmResolver(jobs, port_base=1000)
        expected = tf_resolvers.SlurmClusterResolver(
            jobs, 1000, gpus_per_node=2, auto_set_gpu=False
        )
        assert resolver.cluster_spec() == expected.cluster_spec()
        assert (
            (resolver.task_type, resolver.task_id)
            == (expected.task_type, expected.task_id)
            == ("worker", 0)
        )
        assert resolver.tasks() == {
            "chief": {0: "n1:1000"},
            "ps": {0: "n1:1001"},
            "worker": {0: "n2:1000"},
        }

    @pytest.mark.parametrize(
        ("method", "more", "order"),
        [
            ("block", {}, "n1:1 n1:2 n1:3 n2:1"),
            ("cyclic", {}, "n1:1 n2:1 n1:2 n1:3"),
            ("cyclic:block,Pack", {}, "n1:1 n2:1 n1:2 n1:3"),
            ("plane=2", {"DIST_PLANESIZE": "2"}, "n1:1 n1:2 n2:1 n1:3"),
        ],
    )
    def test_distributions_of_tasks_are_followed(
        self, monkeypatch: pytest.MonkeyPatch, method: str, more: dict[str, str], order: str
    ) -> None:
        layout = {"STEP_NODELIST": "n[1-2]", "STEP_TASKS_PER_NODE": "3,1", "PROCID": "0"}
        step(monkeypatch, DISTRIBUTION=method, **layout, **more)
        assert SlurmResolver(port_base=1).cluster_spec().as_dict()["worker"] == order.split()

    def test_wrong_host_of_a_rank_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step(monkeypatch)
        monkeypatch.setenv("SLURMD_NODENAME", "n10")
        with pytest.raises(errors.Malformed, match="rank 1 is on n10, and should be on n2"):
            SlurmResolver().task_id  # noqa: B018

    @pytest.mark.parametrize(
        ("hosts", "expected"),
        [
            ("n1", ["n1"]),
            ("n[08-10],m", ["n08", "n09", "n10", "m"]),
            ("r[1-2]n[3,5]x", ["r1n3x", "r1n5x", "r2n3x", "r2n5x"]),
            ("a-b.example", ["a-b.example"]),
        ],
    )
    def test_lists_of_hosts_are_expanded(
        self, monkeypatch: pytest.MonkeyPatch, hosts: str, expected: list[str]
    ) -> None:
        step(monkeypatch, STEP_NODELIST=hosts)
        tasks = SlurmResolver(tasks_per_node=1, port_base=1).tasks()["worker"]
        assert [address.rpartition(":")[0] for address in tasks.values()] == expected

    @pytest.mark.parametrize(
        "hosts", ["n[1-2", "n1-2]", "n[2-1]", "n[x]", "a,,b", "n[1-99999999]", "a,", "n[[1]]"]
    )
    def test_invalid_lists_of_hosts_are_refused(
        self, monkeypatch: pytest.MonkeyPatch, hosts: str
    ) -> None:
        step(monkeypatch, STEP_NODELIST=hosts)
        with pytest.raises(errors.Malformed, match="invalid list of hosts"):
            SlurmResolver().cluster_spec()

    def test_lists_of_hosts_have_limits(self) -> None:
        assert len(expand("n[1-100000]", "Slurm")) == 100_000
        assert expand("n" * 255, "Slurm") == ["n" * 255]
        for hosts in ("n[1-100001]", "n[1-50000],m[1-50001]", "n[1-400]m[1-400]", "n" * 256):
            with pytest.raises(errors.Malformed, match="invalid list of hosts"):
                expand(hosts, "Slurm")

    @pytest.mark.parametrize(
        ("tasks", "message"),
        [
            ("100001", "100001 tasks: expected at most 100000"),
            ("1(x100001)", "invalid SLURM_STEP_TASKS_PER_NODE"),
            ("1(x50000),1(x50001)", "invalid SLURM_STEP_TASKS_PER_NODE"),
        ],
    )
    def test_numbers_of_tasks_have_limits(
        self, monkeypatch: pytest.MonkeyPatch, tasks: str, message: str
    ) -> None:
        step(monkeypatch, STEP_NODELIST="n1", STEP_TASKS_PER_NODE=tasks)
        with pytest.raises(errors.Malformed, match=message):
            SlurmResolver().cluster_spec()

    @pytest.mark.parametrize(
        ("variables", "message"),
        [
            ({"STEP_TASKS_PER_NODE": "two"}, "invalid SLURM_STEP_TASKS_PER_NODE='two'"),
            ({"STEP_TASKS_PER_NODE": "1(x2)"}, "3 hosts, but the number of tasks of 2"),
            ({"PROCID": "x"}, "SLURM_PROCID='x': expected a number"),
            ({"PROCID": "3"}, "invalid rank 3: expected less than 3"),
            ({"DISTRIBUTION": "arbitrary"}, "'arbitrary': the hosts of the ranks are unknown"),
        ],
    )
    def test_invalid_variables_are_refused(
        self, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
    ) -> None:
        step(monkeypatch, **variables)
        with pytest.raises(errors.Malformed, match=message):
            SlurmResolver().task_id  # noqa: B018

    def test_invalid_arguments_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for options, message in (
            ({"jobs": {"worker": -1}}, "invalid .*=-1"),
            ({"jobs": {"worker": "2"}}, "expected an integer"),
            ({"port_base": 0}, "port_base=0"),
            ({"gpus_per_node": -1}, "gpus_per_node"),
            ({"gpus_per_task": 1.5}, "gpus_per_task"),
            ({"tasks_per_node": -1}, "tasks_per_node"),
            ({"job": "x; rm"}, "expected the number of a Slurm job"),
        ):
            with pytest.raises(errors.UsageError, match=message):
                SlurmResolver(**options)  # type: ignore[arg-type]
        step(monkeypatch)
        with pytest.raises(
            errors.UsageError, match=r"expected 3 tasks as in Slurm's step 7\.0, got 2"
        ):
            SlurmResolver({"worker": 2}).cluster_spec()
        with pytest.raises(errors.UsageError, match="65536: expected 1 to 65535"):
            SlurmResolver(port_base=65535, tasks_per_node=2).cluster_spec()
        with pytest.raises(errors.NoTasks, match="has no tasks"):
            SlurmResolver(tasks_per_node=0).cluster_spec()

    def test_allocation_without_a_step_is_resolved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
        monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x2)")
        monkeypatch.setenv("SLURM_PROCID", "0")
        resolver = SlurmResolver({"ps": 1, "worker": 3})
        assert resolver.cluster_spec().num_tasks("worker") == 3
        assert (resolver.task_type, resolver.master()) == (None, "")

    @pytest.mark.parametrize("first", [{}, {"NODELIST": "n1"}])
    def test_all_components_of_a_heterogeneous_job_are_resolved(
        self, monkeypatch: pytest.MonkeyPatch, first: dict[str, str]
    ) -> None:
        """Outside a step, salloc sets no other variables. sbatch sets those of the first."""
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        for name, value in first.items():
            monkeypatch.setenv(f"SLURM_JOB_{name}", value)
            monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2")
        for component, (hosts, tasks) in enumerate([("n1", "2"), ("n[2,10]", "2,1")]):
            monkeypatch.setenv(f"SLURM_JOB_NODELIST_HET_GROUP_{component}", hosts)
            monkeypatch.setenv(f"SLURM_TASKS_PER_NODE_HET_GROUP_{component}", tasks)
        workers = ["n1:8888", "n1:8889", "n2:8888", "n2:8889", "n10:8888"]
        assert SlurmResolver().cluster_spec().as_dict() == {"worker": workers}
        monkeypatch.setenv("SLURM_TASKS_PER_NODE_HET_GROUP_1", "2(")
        with pytest.raises(errors.Malformed, match="invalid SLURM_TASKS_PER_NODE_HET_GROUP_1"):
            SlurmResolver().cluster_spec()

    def test_components_can_share_a_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        for component in range(2):
            monkeypatch.setenv(f"SLURM_JOB_NODELIST_HET_GROUP_{component}", "n1")
            monkeypatch.setenv(f"SLURM_TASKS_PER_NODE_HET_GROUP_{component}", "1")
        assert SlurmResolver().cluster_spec().as_dict() == {"worker": ["n1:8888", "n1:8889"]}

    def test_missing_allocation_or_command_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        with pytest.raises(errors.NotThere, match="not in a Slurm allocation"):
            SlurmResolver().cluster_spec()
        assert SlurmResolver().task_type is None
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(errors.NotThere, match="command squeue not found"):
            SlurmResolver(job=7).cluster_spec()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("does", "kind", "message"),
        [
            ("echo RUNNING 3 N/A 'n[1-3]'", None, ""),
            ("echo RUNNING 2 1 'n[2-3]'; echo RUNNING 1 0 n1", None, ""),
            ("echo RUNNING 1 N/A n1; echo RUNNING 1 N/A n2", errors.NoTasks, "array of 2 jobs"),
            ("echo RUNNING", errors.Malformed, "output of squeue 'RUNNING'"),
            ("echo RUNNING N/A N/A 'n[1-3]'", errors.Malformed, "output of squeue 'RUNNING N/A"),
            ("echo RUNNING 3 N/A 'n[1-'", errors.Malformed, "invalid list of hosts"),
            ("echo wrong >&2; exit 1", errors.NoAnswer, "squeue failed: wrong"),
            ("exec sleep 60", errors.NoAnswer, "squeue did not answer within 0.5 s"),
        ],
    )
    def test_invalid_output_of_squeue_is_an_error(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        does: str,
        kind: type[Exception] | None,
        message: str,
    ) -> None:
        command = tmp_path / "squeue"
        command.write_text(f"#!/bin/sh\n{does}\n")
        command.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr("tfd_notebook.resolvers.slurm.REQUEST_SECONDS", 0.5)
        resolver = SlurmResolver(job=7)
        if kind is None:
            workers = {"worker": [f"n{n}:8888" for n in (1, 2, 3)]}
            assert resolver.cluster_spec().as_dict() == workers
            return
        with pytest.raises(kind, match=message):
            resolver.cluster_spec()

    def test_gpus_come_from_the_arguments(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step(monkeypatch, STEP_TASKS_PER_NODE="2,1,1")
        assert SlurmResolver(gpus_per_node=8).num_accelerators() == {"GPU": 4}
        assert SlurmResolver(gpus_per_task=2).num_accelerators("worker", 3) == {"GPU": 2}


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [("1:00:00", 60), ("30:00", 30), ("1-01:00:00", 1500), ("infinite", None), ("n/a", None)],
)
def test_suggested_cell_respects_the_partition_limits(limit: str, minutes: int | None) -> None:
    small = Partition("small", False, True, limit, 1, 1)
    assert small.minutes == minutes
    cell = suggestions.sbatch(small)
    minutes_limit = 60 if minutes is None else min(minutes, 60)
    assert f'"--ntasks=1", "--time={minutes_limit}", "--partition=small"' in cell
    assert '"--ntasks=2", "--time=60", "--wrap"' in suggestions.sbatch(None)
