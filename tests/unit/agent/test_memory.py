"""Limits of control groups for memory and CPU, in the file layouts of versions 1 and 2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfd_notebook.agent import cgroups, memory
from tfd_notebook.data.bottleneck.usage import processors

FILES = {
    2: ("", "memory.max", "memory.peak", "memory.events", "0::"),
    1: (
        "memory",
        "memory.limit_in_bytes",
        "memory.max_usage_in_bytes",
        "memory.oom_control",
        "4:cpu,memory:",
    ),
}


class Tree:
    """A process with the id 7 in the group ``/job/task`` of a tree of control groups."""

    def __init__(self, root: Path, version: int) -> None:
        directory, *self.names, line = FILES[version]
        self.top = root / "cgroup" / directory
        self.root, self.proc = root / "cgroup", root / "proc"
        (self.proc / "7").mkdir(parents=True)
        (self.proc / "7" / "cgroup").write_text(f"9:name=systemd:/\n{line}/job/task\n")
        (self.top / "job" / "task").mkdir(parents=True)
        self.version = version

    def write(self, group: str, limit: int | None, peak: int, kills: int) -> None:
        nothing = "max" if self.version == 2 else str((1 << 63) - 4096)
        values = (nothing if limit is None else limit, peak, f"low 0\noom_kill {kills}")
        for name, value in zip(self.names, values, strict=True):
            (self.top / group / name).write_text(f"{value}\n")

    def allow(self, group: str, cores: float | None, used: float = 0.0) -> None:
        """Write the CPU quota of a group and the CPU seconds that it used."""
        cpu, accounting = ("", "") if self.version == 2 else ("cpu", "cpuacct")
        quota = None if cores is None else int(cores * 100_000)
        if self.version == 2:
            files = {
                "cpu.max": f"{'max' if quota is None else quota} 100000",
                "cpu.stat": f"usage_usec {int(used * 1e6)}\nuser_usec 0",
            }
        else:
            files = {
                "cpu.cfs_quota_us": str(-1 if quota is None else quota),
                "cpu.cfs_period_us": "100000",
                "cpuacct.usage": str(int(used * 1e9)),
            }
        for name, text in files.items():
            place = accounting if name.startswith("cpuacct") else cpu
            path = self.root / place / group / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    @property
    def file(self) -> Path:
        return self.proc / "7" / "cgroup"

    def history(self) -> memory.GroupHistory:
        """Return a history with one sample."""
        history = memory.GroupHistory(self.root, self.proc)
        history.sample(7)
        return history


@pytest.fixture(params=[1, 2])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Tree:
    return Tree(tmp_path, request.param)


def test_limit_of_the_task_is_used(tree: Tree) -> None:
    tree.write("job/task", 10**9, 5 * 10**8, 0)
    tree.write("job", 4 * 10**9, 5 * 10**8, 0)
    history = tree.history()
    tree.write("job/task", 10**9, 10**9, 1)
    reason = history.reached()
    assert "1.00 GB, was reached (peak 1.00 GB" in reason
    assert reason.endswith("job/task)")
    assert memory.is_reason(reason)


def test_limit_of_a_parent_group_is_used(tree: Tree) -> None:
    """Version 1 counts the kill in the group of the process that was killed."""
    tree.write("job/task", None, 10**8, 3)
    tree.write("job", 2 * 10**9, 10**9, 3)
    history = tree.history()
    tree.write("job/task", None, 10**9, 4)
    tree.write("job", 2 * 10**9, 2 * 10**9, 3 if tree.version == 1 else 4)
    assert "2.00 GB, was reached" in history.reached()


def test_other_ends_are_not_memory_limits(tree: Tree) -> None:
    tree.write("job/task", 10**9, 10**9, 2)
    assert tree.history().reached() == ""
    assert memory.GroupHistory(tree.root, tree.proc).reached() == ""
    assert not memory.is_reason("killed by signal 9 (SIGKILL)")


def test_a_process_that_has_ended(tree: Tree) -> None:
    assert memory.groups(8, tree.root, tree.proc) == ()


class TestSamples:
    @pytest.fixture
    def history(self, tree: Tree) -> memory.GroupHistory:
        tree.write("job/task", 10**9, 5 * 10**8, 2)
        tree.write("job", None, 5 * 10**8, 2)
        return tree.history()

    def test_a_kill_before_the_last_sample_is_found(
        self, tree: Tree, history: memory.GroupHistory
    ) -> None:
        tree.write("job/task", 10**9, 10**9, 3)
        history.sample(7)
        history.sample(8)  # has ended
        assert "1.00 GB, was reached (peak 1.00 GB" in history.reached()

    def test_the_peak_of_all_samples_is_used(
        self, tree: Tree, history: memory.GroupHistory
    ) -> None:
        tree.write("job/task", 10**9, 9 * 10**8, 2)
        history.sample(7)
        tree.write("job/task", 10**9, 10**8, 3)
        assert "(peak 0.90 GB" in history.reached()

    def test_an_old_kill_is_not_the_reason(self, tree: Tree, history: memory.GroupHistory) -> None:
        tree.write("job/task", 10**9, 10**9, 3)
        for _ in range(4):
            history.sample(7)
        assert history.reached() == ""

    def test_a_kill_in_a_former_group_is_not_the_reason(
        self, tree: Tree, history: memory.GroupHistory
    ) -> None:
        tree.write("job/task", 10**9, 10**9, 3)
        (tree.top / "other").mkdir()
        tree.write("other", 10**9, 10**8, 0)
        for line in tree.file.read_text().splitlines()[1:]:
            tree.file.write_text(line.replace("/job/task", "/other") + "\n")
        history.sample(7)
        assert history.reached() == ""


@pytest.fixture
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a host with many cores, because the quotas must be below their number."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.usefixtures("_eight_cores")
class TestCores:
    @pytest.mark.parametrize(
        ("task", "job", "top", "cores"),
        [
            (2.0, None, None, 2),
            (4.0, 3.0, None, 3),
            (3.0, 4.0, None, 3),
            (None, None, 2.0, 2),
            (1.5, None, None, 2),
            (0.25, None, None, 1),
        ],
    )
    def test_smallest_quota_limits_the_cores(
        self, tree: Tree, task: float | None, job: float | None, top: float | None, cores: int
    ) -> None:
        for group, quota in (("job/task", task), ("job", job), (".", top)):
            tree.allow(group, quota)
        assert processors(tree.file, tree.root) == cores

    def test_without_a_smaller_quota_all_cores_count(self, tree: Tree) -> None:
        assert processors(tree.file, tree.root) == 8
        tree.allow("job/task", None)
        tree.allow("job", 16.0)
        assert processors(tree.file, tree.root) == 8
        assert processors(tree.proc / "8" / "cgroup", tree.root) == 8

    def test_quota_of_an_unrelated_group_is_ignored(self, tree: Tree) -> None:
        tree.allow("job/other", 1.0)
        assert processors(tree.file, tree.root) == 8

    def test_a_used_quota_makes_the_cores_busy(self, tree: Tree) -> None:
        def read() -> dict[cgroups.Quota, float]:
            return {quota: quota.used() for quota in cgroups.quotas(tree.file, tree.root)}

        tree.allow("job/task", 4.0, used=10.0)
        tree.allow("job", 2.0, used=50.0)
        before = read()
        assert cgroups.share(before, read(), 5.0) == 0.0
        tree.allow("job/task", 4.0, used=12.0)
        tree.allow("job", 2.0, used=59.0)
        assert cgroups.share(before, read(), 5.0) == pytest.approx(0.9)
        tree.allow("job", 2.0, used=99.0)
        assert cgroups.share(before, read(), 5.0) == 1.0

    def test_without_a_quota_no_share_is_used(self, tree: Tree) -> None:
        tree.allow("job/task", None, used=10.0)
        assert cgroups.quotas(tree.file, tree.root) == ()
        assert cgroups.share({}, {}, 5.0) == 0.0
