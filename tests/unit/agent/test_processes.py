"""Requests to the process of a task."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess

import pytest

from tfd_notebook import errors
from tfd_notebook.agent.processes import Process


@pytest.mark.slow
def test_request_fails_if_the_process_is_killed_before_it_reads() -> None:
    """The kernel then reports a reset connection instead of its end."""

    async def request() -> None:
        local, remote = socket.socketpair()
        with remote:
            child = subprocess.Popen(["sleep", "60"], pass_fds=[remote.fileno()])
        process = Process(child.pid, local, asyncio.get_running_loop().create_future())
        try:
            reply = asyncio.ensure_future(process.request("start", timeout=20.0))
            while not process.has_pending_requests:
                await asyncio.sleep(0.01)
            process.kill()
            with pytest.raises(errors.LaunchError, match="the process ended"):
                await reply
        finally:
            child.kill()
            child.wait()
            with contextlib.suppress(OSError):
                await process.close()

    asyncio.run(request())
