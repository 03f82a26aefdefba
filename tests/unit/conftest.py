"""Unit tests start no process. Tests that need one are slow, or in `tests/contracts`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

#: git lists the files of the repository. `ctypes.util` and `platform` call the others.
_ALLOWED = {"git", "ldconfig", "gcc", "ld", "uname"}
#: Events of `sys.addaudithook` for a new process, and the position of its arguments.
_EVENTS = {"subprocess.Popen": 1, "os.posix_spawn": 1, "os.system": 0, "os.fork": None}
_started: list[str] = []


@sys.addaudithook
def _record(event: str, arguments: tuple[object, ...]) -> None:
    if event in _EVENTS:
        position = _EVENTS[event]
        command = event if position is None else arguments[position]
        words = command if isinstance(command, list) else [command]
        if Path(str(words[0])).name not in _ALLOWED:
            _started.append(f"{event}: {words}")


@pytest.fixture(autouse=True)
def _no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that starts a process and is not marked as slow."""
    _started.clear()
    yield
    if _started and request.node.get_closest_marker("slow") is None:
        pytest.fail(f"a unit test that is not marked as slow started a process: {_started[0]}")
