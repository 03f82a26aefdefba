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


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 20_000 + b"\n",
        b"not JSON\n",
        b"[1]\n",
        b"{}\n",
        b'{"reply_to": 1}\n',
        b'{"reply_to": []}\n',
        b'{"failed": 1}\n',
        b'"' + b"a" * 2**24 + b'"\n',
    ],
    ids=["deep", "text", "list", "empty", "without result", "no number", "no error", "long"],
)
def test_invalid_message_ends_requests(line: bytes) -> None:
    async def request() -> None:
        local, remote = socket.socketpair()
        process = Process(0, local, asyncio.get_running_loop().create_future())
        with remote:
            reply = asyncio.ensure_future(process.request("start", timeout=20.0))
            while not process.has_pending_requests:
                await asyncio.sleep(0)
            await asyncio.to_thread(remote.sendall, line)
            for each in (reply, process.request("start", timeout=None)):
                with pytest.raises(errors.LaunchError, match="invalid message"):
                    await each
        with contextlib.suppress(OSError):
            await process.close()

    asyncio.run(request())
