"""Slurm's variables, read as Slurm means them; tests between hosts have a real Slurm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tensorflow as tf

from tfd_notebook import errors
from tfd_notebook.resolution import suggestions
from tfd_notebook.resolvers import SlurmResolver
from tfd_notebook.resolvers.slurm_queue import Partition

theirs = tf.distribute.cluster_resolver

pytestmark = pytest.mark.usefixtures("nowhere")


def step(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Set what Slurm sets in a task of a step; tests between hosts have a real one."""
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
        other = theirs.SlurmClusterResolver(gpus_per_node=1, auto_set_gpu=False)
        assert other.cluster_spec().task_address("worker", 1) == "n10:8888"  # and runs on n2
        ours = SlurmResolver()
        assert ours.cluster_spec().as_dict() == {"worker": ["n1:8888", "n2:8888", "n10:8888"]}
        assert ours.master() == "grpc://n2:8888"

    def test_nodes_without_gpus(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        step(monkeypatch)
        with pytest.raises(FileNotFoundError, match="nvidia-smi"):
            theirs.SlurmClusterResolver()
        assert SlurmResolver().cluster_spec().num_tasks("worker") == 3

    def test_no_gpus_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step(monkeypatch)
        with pytest.raises(ValueError, match="must not be zero"):
            theirs.SlurmClusterResolver(gpus_per_node=0).cluster_spec()
        ours = SlurmResolver(gpus_per_node=0)
        assert ours.cluster_spec().num_tasks("worker") == 3
        assert ours.num_accelerators() == {}

    def test_no_visible_device_is_no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step(monkeypatch)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert theirs.SlurmClusterResolver().num_accelerators() == {"GPU": 1}
        assert SlurmResolver().num_accelerators() == {}

    def test_asking_changes_no_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step(monkeypatch)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        theirs.SlurmClusterResolver(gpus_per_node=1).cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        before = dict(os.environ)
        SlurmResolver(gpus_per_node=1).cluster_spec()
        assert dict(os.environ) == before

    def test_who_it_is_is_known_before_it_is_asked_for_the_cluster(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step(monkeypatch)
        assert theirs.SlurmClusterResolver(gpus_per_node=1).task_id is None
        assert (SlurmResolver().task_type, SlurmResolver().task_id) == ("worker", 1)

    def test_jobs_get_ranks_as_tensorflow_has_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step(monkeypatch, STEP_NODELIST="n[1-2]", STEP_TASKS_PER_NODE="2,1", PROCID="2")
        jobs = {"worker": 1, "ps": 1, "chief": 1}
        ours = SlurmResolver(jobs, port_base=1000)
        other = theirs.SlurmClusterResolver(jobs, 1000, gpus_per_node=2, auto_set_gpu=False)
        assert ours.cluster_spec() == other.cluster_spec()
        assert (ours.task_type, ours.task_id) == (other.task_type, other.task_id) == ("worker", 0)
        assert ours.tasks() == {
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
    def test_distributions(
        self, monkeypatch: pytest.MonkeyPatch, method: str, more: dict[str, str], order: str
    ) -> None:
        layout = {"STEP_NODELIST": "n[1-2]", "STEP_TASKS_PER_NODE": "3,1", "PROCID": "0"}
        step(monkeypatch, DISTRIBUTION=method, **layout, **more)
        assert SlurmResolver(port_base=1).cluster_spec().as_dict()["worker"] == order.split()

    def test_a_place_that_is_another_ones_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
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
    def test_lists_of_hosts(
        self, monkeypatch: pytest.MonkeyPatch, hosts: str, expected: list[str]
    ) -> None:
        step(monkeypatch, STEP_NODELIST=hosts)
        found = SlurmResolver(tasks_per_node=1, port_base=1).tasks()["worker"]
        assert [address.rpartition(":")[0] for address in found.values()] == expected

    @pytest.mark.parametrize(
        "hosts", ["n[1-2", "n1-2]", "n[2-1]", "n[x]", "a,,b", "n[1-99999999]", "a,", "n[[1]]"]
    )
    def test_lists_that_are_none(self, monkeypatch: pytest.MonkeyPatch, hosts: str) -> None:
        step(monkeypatch, STEP_NODELIST=hosts)
        with pytest.raises(errors.Malformed, match="is no list of hosts"):
            SlurmResolver().cluster_spec()

    @pytest.mark.parametrize(
        ("variables", "said"),
        [
            ({"STEP_TASKS_PER_NODE": "two"}, "STEP_TASKS_PER_NODE='two' cannot be read"),
            ({"STEP_TASKS_PER_NODE": "1(x2)"}, "3 hosts, but the tasks of 2"),
            ({"PROCID": "x"}, "SLURM_PROCID='x' is no number"),
            ({"PROCID": "3"}, "this is rank 3, and there are 3 tasks"),
            ({"DISTRIBUTION": "arbitrary"}, "'arbitrary': which rank is on which host"),
        ],
    )
    def test_variables_that_cannot_be_meant(
        self, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
    ) -> None:
        step(monkeypatch, **variables)
        with pytest.raises(errors.Malformed, match=said):
            SlurmResolver().task_id  # noqa: B018

    def test_arguments_that_cannot_be_meant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for options, said in (
            ({"jobs": {"worker": -1}}, "out of range"),
            ({"jobs": {"worker": "2"}}, "whole number"),
            ({"port_base": 0}, "port_base=0"),
            ({"gpus_per_node": -1}, "gpus_per_node"),
            ({"gpus_per_task": 1.5}, "gpus_per_task"),
            ({"tasks_per_node": -1}, "tasks_per_node"),
            ({"job": "x; rm"}, "no number of a Slurm job"),
        ):
            with pytest.raises(errors.UsageError, match=said):
                SlurmResolver(**options)  # type: ignore[arg-type]
        step(monkeypatch)
        with pytest.raises(errors.UsageError, match=r"has 2 tasks, but Slurm's step 7\.0 has 3"):
            SlurmResolver({"worker": 2}).cluster_spec()
        with pytest.raises(errors.UsageError, match="65536 is out of range"):
            SlurmResolver(port_base=65535, tasks_per_node=2).cluster_spec()
        with pytest.raises(errors.NoTasks, match="has no tasks"):
            SlurmResolver(tasks_per_node=0).cluster_spec()

    def test_in_an_allocation_without_a_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
        monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x2)")
        monkeypatch.setenv("SLURM_PROCID", "0")
        resolver = SlurmResolver({"ps": 1, "worker": 3})
        assert resolver.cluster_spec().num_tasks("worker") == 3
        assert (resolver.task_type, resolver.master()) == (None, "")

    def test_outside_of_slurm(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        with pytest.raises(errors.NotThere, match="in no allocation of Slurm"):
            SlurmResolver().cluster_spec()
        assert SlurmResolver().task_type is None
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(errors.NotThere, match="no command squeue"):
            SlurmResolver(job=7).cluster_spec()

    @pytest.mark.parametrize(
        ("does", "kind", "said"),
        [
            ("echo RUNNING 3 'n[1-3]'", None, ""),
            ("echo RUNNING", errors.Malformed, "squeue says 'RUNNING'"),
            ("echo RUNNING N/A 'n[1-3]'", errors.Malformed, "squeue says 'RUNNING N/A"),
            ("echo RUNNING 3 'n[1-'", errors.Malformed, "is no list of hosts"),
            ("echo wrong >&2; exit 1", errors.NoAnswer, "squeue failed: wrong"),
            ("exec sleep 60", errors.NoAnswer, "squeue did not answer within 0.5 s"),
        ],
    )
    def test_a_command_that_is_not_slurms(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        does: str,
        kind: type[Exception] | None,
        said: str,
    ) -> None:
        command = tmp_path / "squeue"
        command.write_text(f"#!/bin/sh\n{does}\n")
        command.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr("tfd_notebook.resolvers.slurm._ASK_SECONDS", 0.5)
        resolver = SlurmResolver(job=7)
        if kind is None:
            assert resolver.cluster_spec().num_tasks("worker") == 3
            return
        with pytest.raises(kind, match=said):
            resolver.cluster_spec()

    def test_gpus_that_are_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step(monkeypatch, STEP_TASKS_PER_NODE="2,1,1")
        assert SlurmResolver(gpus_per_node=8).num_accelerators() == {"GPU": 4}
        assert SlurmResolver(gpus_per_task=2).num_accelerators("worker", 3) == {"GPU": 2}


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [("1:00:00", 60), ("30:00", 30), ("1-01:00:00", 1500), ("infinite", None), ("n/a", None)],
)
def test_the_cell_asks_for_what_the_partition_allows(limit: str, minutes: int | None) -> None:
    small = Partition("small", False, True, limit, 1, 1)
    assert small.minutes == minutes
    cell = suggestions.sbatch(small)
    asked = 60 if minutes is None else min(minutes, 60)
    assert f'"--ntasks=1", "--time={asked}", "--partition=small"' in cell
    assert '"--ntasks=2", "--time=60", "--wrap"' in suggestions.sbatch(None)
