"""Logs, measurements and stacks of tasks, without a task."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tfd_notebook.agent.task_supervisor import TaskSupervisor, busy_share, trim_log
from tfd_notebook.errors import LaunchError, TfdError, TimeLimit
from tfd_notebook.model.spec import Role, TaskSpec, TaskState


@pytest.mark.parametrize(
    ("working", "seconds", "share"),
    [(None, 0.5, None), (0.6, 0.05, 0.6), (0.0, 0.15, 0.0), (0.6, 0.5, 0.95), (0.2, 0.25, 0.73)],
)
def test_a_task_that_replies_late_was_busy(
    working: float | None, seconds: float, share: float | None
) -> None:
    assert busy_share(working, seconds, False) == (share and pytest.approx(share, abs=0.01))
    assert busy_share(working, seconds, True) == (None if working is None else 1.0)


class SilentProcess:
    """A process that answers each request with an error."""

    pid = os.getpid()

    def __init__(self, error: TfdError) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._error = error

    async def request(self, method: str, timeout: float, **arguments: Any) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("error", "state", "note"),
    [
        (TimeLimit("late"), TaskState.HUNG, "a thread holds the GIL, or another request runs"),
        (TimeLimit("late"), TaskState.STARTING, "it is starting"),
        (LaunchError("the process ended"), TaskState.READY, "the process ended"),
        (None, TaskState.RESTARTING, "no process: the task is restarting"),
    ],
)
def test_task_that_does_not_answer_has_the_reason_instead_of_stacks(
    tmp_path: Path, error: TfdError | None, state: TaskState, note: str
) -> None:
    async def read() -> Any:
        context: Any = SimpleNamespace(name="c", directory=tmp_path)
        task = TaskSupervisor(context, TaskSpec(Role.DATA_WORKER, 0, host="localhost"))
        task.state = state
        if error is not None:
            task.process = SilentProcess(error)  # type: ignore[assignment]
        stacks = await task.stacks()
        task.release()
        return stacks

    stacks = asyncio.run(read())
    assert stacks["threads"] == []
    assert stacks["note"].endswith(note)
    if isinstance(error, TimeLimit):
        assert stacks["note"].startswith("no reply within 2 s: ")


def test_a_trimmed_log_keeps_its_last_megabyte(tmp_path: Path) -> None:
    log = tmp_path / "task.log"
    with log.open("a") as writer:
        writer.writelines(f"line {number:>94}\n" for number in range(90_000))
        writer.flush()
        trim_log(log)
        print("the end", file=writer, flush=True)
    lines = log.read_text().splitlines()
    assert lines[0] == "[earlier output dropped]"
    assert len(lines[1]) == 99
    assert lines[-2:] == [f"line {89_999:>94}", "the end"]
    assert 900_000 < log.stat().st_size < 1_001_000


def test_a_short_log_is_not_trimmed(tmp_path: Path) -> None:
    log = tmp_path / "task.log"
    log.write_text("received 1\n")
    trim_log(log)
    assert log.read_text() == "received 1\n"
