"""The configurations of an agent's tunnels: which authorities each connection trusts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests._ports import free_port
from tfd_notebook.agent.stunnel import TunnelEnd

NAMES = [f"{number:012x}.tfd" for number in range(3)]
FIRST, SECOND, THIRD = (
    f"-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n"
    for body in ("QUJD", "REVG", "R0hJ")
)


class NoProcesses:
    """Starts nothing; each process seems to run until the test ends."""

    def run(self, *arguments: Any) -> tuple[int, asyncio.Future[int]]:
        return 1_000_000_000, asyncio.get_running_loop().create_future()


def trusted(directory: Path, process: str) -> str:
    """Return the authorities of the configuration of a process."""
    lines = (directory / f"{process}.conf").read_text().splitlines()
    (path,) = (line.partition(" = ")[2] for line in lines if line.startswith("CAfile"))
    assert os.stat(path).st_mode & 0o777 == 0o600
    return Path(path).read_text()


def test_each_client_trusts_the_authority_of_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append(number))

    async def main() -> None:
        processes: Any = NoProcesses()
        end = TunnelEnd(tmp_path, processes, lambda *notice: None, NAMES[0], FIRST, FIRST)
        one, two = free_port(), free_port()
        try:
            end.accept(FIRST)
            end.forward(one, "10.0.0.5:5000", NAMES[1], SECOND)
            end.forward(two, "10.0.0.6:5000", NAMES[2], FIRST)
            end.accept(THIRD)  # of a kernel that attaches
            end.accept(THIRD)
            assert trusted(tmp_path, "server") == FIRST + THIRD
            assert trusted(tmp_path, f"client-{one}") == SECOND
            assert trusted(tmp_path, f"client-{two}") == FIRST
            assert not signals
            # Same target: existing connections stay open.
            end.forward(one, "10.0.0.5:5000", NAMES[1], SECOND)
            assert not signals
            end.forward(one, "10.0.0.5:5000", NAMES[1], THIRD)
            assert trusted(tmp_path, f"client-{one}") == THIRD
            assert trusted(tmp_path, f"client-{two}") == FIRST
            assert signals == [signal.SIGKILL]
        finally:
            end.close()
        assert signals == [signal.SIGKILL] * 3

    asyncio.run(main())
