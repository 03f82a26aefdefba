"""The memory limits of control groups, as versions 1 and 2 lay out their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfd_notebook.launch import memory

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
    """A process 7 in the group ``/job/task`` of a tree of control groups."""

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

    def groups(self) -> tuple[memory.Group, ...]:
        return memory.groups(7, self.root, self.proc)

    def reached(self, before: tuple[memory.Group, ...]) -> str:
        return memory.reached(before, self.root)


@pytest.fixture(params=[1, 2])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Tree:
    return Tree(tmp_path, request.param)


def test_the_limit_of_the_task_itself(tree: Tree) -> None:
    tree.write("job/task", 10**9, 5 * 10**8, 0)
    tree.write("job", 4 * 10**9, 5 * 10**8, 0)
    before = tree.groups()
    tree.write("job/task", 10**9, 10**9, 1)
    said = tree.reached(before)
    assert "1.00 GB, was reached (peak 1.00 GB" in said
    assert said.endswith("job/task)")
    assert memory.is_reason(said)


def test_the_limit_of_a_group_around_it(tree: Tree) -> None:
    """Version 1 counts the kill in the group of the process that was killed."""
    tree.write("job/task", None, 10**8, 3)
    tree.write("job", 2 * 10**9, 10**9, 3)
    before = tree.groups()
    tree.write("job/task", None, 10**9, 4)
    tree.write("job", 2 * 10**9, 2 * 10**9, 3 if tree.version == 1 else 4)
    assert "2.00 GB, was reached" in tree.reached(before)


def test_a_task_that_ended_for_another_reason(tree: Tree) -> None:
    tree.write("job/task", 10**9, 10**9, 2)
    assert tree.reached(tree.groups()) == ""
    assert tree.reached(()) == ""
    assert not memory.is_reason("killed by signal 9 (SIGKILL)")


def test_a_process_that_has_ended(tree: Tree) -> None:
    assert memory.groups(8, tree.root, tree.proc) == ()
