"""Logs of tasks, without a task."""

from __future__ import annotations

from pathlib import Path

from tfd_notebook.agent.task_supervisor import trim_log


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
