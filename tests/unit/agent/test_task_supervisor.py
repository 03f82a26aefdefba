"""Logs and measurements of tasks, without a task."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfd_notebook.agent.task_supervisor import busy_share, trim_log


@pytest.mark.parametrize(
    ("working", "seconds", "share"),
    [(None, 0.5, None), (0.6, 0.05, 0.6), (0.0, 0.15, 0.0), (0.6, 0.5, 0.95), (0.2, 0.25, 0.73)],
)
def test_a_task_that_replies_late_was_busy(
    working: float | None, seconds: float, share: float | None
) -> None:
    assert busy_share(working, seconds, False) == (share and pytest.approx(share, abs=0.01))
    assert busy_share(working, seconds, True) == (None if working is None else 1.0)


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
