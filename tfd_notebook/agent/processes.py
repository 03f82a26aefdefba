"""The agent's child processes: start them by fork or spawn, wait for them, and send requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tfd_notebook.agent import fork_server, interpreter
from tfd_notebook.errors import LaunchError, TfdError, TimeLimit
from tfd_notebook.net import agent_protocol
from tfd_notebook.net.runtime_dir import AGENT_VARIABLE

#: Variables that TensorFlow, its libraries or the loader read at import.
_READ_AT_IMPORT = ("TF_", "XLA_", "OMP_", "MKL_", "OPENBLAS_", "GRPC_", "LD_")
#: Exceptions to these, which scikit-learn sets at its import, and Keras imports scikit-learn. They
#: concern Intel's OpenMP and do not require another import of TensorFlow.
_IGNORED_AT_IMPORT = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
#: Seconds after which a fork server without a cluster ends.
IDLE_SECONDS = 600.0


class Process:
    """The process of a task.

    Attributes
    ----------
    pid : int
    ended : asyncio.Future of int
        The status as ``os.waitpid`` returns it.
    failed : TfdError, optional
        The reason for which the task could not be prepared, or for which no reply is read.
    """

    def __init__(self, pid: int, channel: socket.socket, ended: asyncio.Future[int]) -> None:
        self.pid = pid
        self.ended = ended
        self._channel = channel
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self.failed: TfdError | None = None
        self._last_id = 0
        self._writer: asyncio.StreamWriter | None = None
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._channel, limit=2**24)
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if "failed" in message:
                    self.failed = agent_protocol.unpack_error(message["failed"])
                    break
                reply = self._replies.get(message["reply_to"])
                if reply is not None and not reply.done():
                    if message["ok"]:
                        reply.set_result(message["value"])
                    else:
                        reply.set_exception(agent_protocol.unpack_error(message["error"]))
                self._replies.pop(message["reply_to"], None)
        except OSError:
            pass  # a reset instead of the end: the process was killed before it read a request
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            # A process that has imported the user's code is as untrusted as another host.
            self.failed = LaunchError(
                f"the process sent an invalid message: {type(error).__name__}: {error}",
                fix="read its log, and start it again with cluster.restart()",
            )
        finally:
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(self.failed or LaunchError("the process ended"))
            self._replies.clear()

    async def request(self, method: str, timeout: float | None, **arguments: Any) -> Any:
        """Send a request to the task; raise the error of its reply, or TimeLimit.

        Without a timeout, wait until the process ends.
        """
        while self._writer is None and not self._reading.done():
            await asyncio.sleep(0)
        if self.failed is not None or self._writer is None or self._reading.done():
            raise self.failed or LaunchError("the process ended")
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "arguments": arguments}
        reply = self._replies[self._last_id] = asyncio.get_running_loop().create_future()
        line = json.dumps(message, default=agent_protocol.encode_bytes)
        self._writer.write(line.encode() + b"\n")
        try:
            return await asyncio.wait_for(reply, timeout)
        except asyncio.TimeoutError:
            raise TimeLimit(f"no reply to {method!r} within {timeout:.3g} s") from None

    @property
    def has_pending_requests(self) -> bool:
        """True if a request is pending, such as the installation of functions."""
        return any(not reply.done() for reply in self._replies.values())

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, unless the process has ended."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close_channel(self) -> None:
        """Close the channel without waiting."""
        if self._writer is not None:
            self._writer.close()
        else:
            self._reading.add_done_callback(lambda _: self._channel.close())
        self._reading.cancel()

    async def close(self) -> None:
        """Close the channel and wait for its reader."""
        self.close_channel()
        await asyncio.gather(self._reading, return_exceptions=True)


class Processes:
    """Starts processes for tasks and waits for their end.

    Parameters
    ----------
    agent : str
        Id of the agent, which each process has in its environment.
    directory : Path
        Directory of the agent: its helpers run there, and it contains the fork server's log.
    """

    def __init__(self, agent: str, directory: Path) -> None:
        self._agent = agent
        self._directory = directory
        self._log = directory / "forkserver.log"
        self._server: _ForkServer | None = None
        self._lock = asyncio.Lock()
        self._ended: dict[int, int] = {}
        self._waiting: dict[int, asyncio.Future[int]] = {}
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    async def preload(self, environment: Mapping[str, str], path: list[str]) -> list[str]:
        """Start a fork server with TensorFlow imported, unless a suitable one runs.

        Returns
        -------
        list of str
            The variables that differ from those of the fork server that was replaced.
        """
        if not _can_fork():
            return []
        environment = {**environment, AGENT_VARIABLE: self._agent}
        async with self._lock:
            changed = self._changed(_read_at_import(environment))
            await self._fork_server(environment, path)
        return changed

    async def start(self, request: dict[str, Any], log: Path) -> Process:
        """Start the process of a task; see `tfd_notebook.agent.task_process.run` for `request`.

        Raises
        ------
        TensorFlowMissing, LaunchError
        """
        # The reply of the fork server must be read, or the next start would get it. A cancelled
        # start therefore runs to its end, and its process is killed.
        starting = asyncio.ensure_future(self._start(request, log))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_kill_started)
            raise

    async def _start(self, request: dict[str, Any], log: Path) -> Process:
        environment = dict(request["environment"], **{AGENT_VARIABLE: self._agent})
        request = dict(request, environment=environment, parent=os.getpid())
        local, remote = socket.socketpair()
        try:
            async with self._lock:
                # Pids are reused: discard the statuses of processes that ended before this fork.
                self._ended.clear()
                if _can_fork():
                    server = await self._fork_server(environment, request["path"])
                    with _open_log(log) as file:
                        fds = [remote.fileno(), file.fileno()]
                        try:
                            pid = await server.fork(request, fds)
                        except BaseException:
                            # The rest of a request or a late reply would corrupt the next exchange.
                            self.close_server()
                            raise
                else:
                    pid = self._spawn(request, remote.fileno(), log)
                return Process(pid, local, self._wait(pid))
        except BaseException:
            local.close()
            raise
        finally:
            remote.close()

    def run(
        self, module: str, environment: Mapping[str, str], log: Path, fds: Iterable[int] = ()
    ) -> tuple[int, asyncio.Future[int]]:
        """Run ``main()`` of a module of `tfd_notebook.agent`; return its pid and future status.

        Parameters
        ----------
        module : str
        environment : mapping of str to str
            In addition to the environment of this process.
        log : Path
            Its output is appended to this file.
        fds : iterable of int
            Descriptors that the process inherits.
        """
        environment = {**os.environ, **environment}
        pid = _popen(module, environment, None, tuple(fds), log, self._directory)
        # A status recorded under this pid belongs to an earlier process.
        self._ended.pop(pid, None)
        return pid, self._wait(pid)

    def _spawn(self, request: dict[str, Any], control: int, log: Path) -> int:
        environment = dict(
            request["environment"],
            TFD_TASK_FD=str(control),
            TFD_TASK_REQUEST=json.dumps(request),
        )
        fds = (control,)
        return _popen("task_process", environment, request["path"], fds, log, self._directory)

    async def _fork_server(self, environment: Mapping[str, str], path: list[str]) -> _ForkServer:
        variables = _read_at_import(environment)
        if self._server is not None and (self._changed(variables) or self._server.ended.done()):
            self.close_server()
        if self._server is None:
            self._server = await _ForkServer.start(
                environment, variables, path, self._directory, self._log, self._wait
            )
        return self._server

    def _changed(self, variables: Mapping[str, str]) -> list[str]:
        """Return the variables that differ from those of the fork server."""
        if self._server is None:
            return []
        current = self._server.variables
        return sorted(
            n for n in variables.keys() | current.keys() if variables.get(n) != current.get(n)
        )

    def close_server(self) -> None:
        """End the fork server; its tasks keep running."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _wait(self, pid: int) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if pid in self._ended:
            future.set_result(self._ended.pop(pid))
        else:
            self._waiting[pid] = future
        return future

    def _reap(self) -> None:
        # -1: a subreaper also becomes the parent of the orphans of its tasks.
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            future = self._waiting.pop(pid, None)
            if future is None:
                self._ended[pid] = status
            elif not future.done():
                future.set_result(status)


class _ForkServer:
    """Client of a fork server."""

    def __init__(self, pid: int, variables: dict[str, str], ended: asyncio.Future[int]) -> None:
        self.pid = pid
        self.variables = variables
        self.ended = ended
        self.hello: dict[str, Any] = {}
        self._channel: socket.socket

    @classmethod
    async def start(
        cls,
        environment: Mapping[str, str],
        variables: dict[str, str],
        path: list[str],
        directory: Path,
        log: Path,
        wait: Callable[[int], asyncio.Future[int]],
    ) -> _ForkServer:
        local, remote = socket.socketpair()
        environment = dict(
            environment,
            TFD_FORK_FD=str(remote.fileno()),
            TFD_FORK_OWNER=str(os.getpid()),
            # Otherwise NumPy's BLAS starts a thread at import, and forking would not be safe.
            OPENBLAS_NUM_THREADS="1",
        )
        with remote:
            pid = _popen("fork_server", environment, path, (remote.fileno(),), log, directory)
        server = cls(pid, variables, wait(pid))
        server._channel = local
        try:
            server.hello = await server._receive_reply(timeout=300.0)
            fork_server.check_import(
                server.hello,
                'pip install "tfd-notebook[tensorflow]", then start the cluster again',
                "set TFD_START_METHOD=spawn before the extension is loaded",
            )
        except BaseException:
            server.close()
            raise
        return server

    async def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        await self._send(*fork_server.packed(request), fds, timeout=60.0)
        reply = await self._receive_reply(timeout=60.0)
        return int(reply["pid"])

    async def _send(self, header: bytes, body: bytes, fds: list[int], timeout: float) -> None:
        """Send a request without blocking: the server may be suspended or swapped out."""
        self._channel.setblocking(False)
        try:
            # The server has read all earlier requests, so the socket accepts the header.
            socket.send_fds(self._channel, [header], fds)
            loop = asyncio.get_running_loop()
            await asyncio.wait_for(loop.sock_sendall(self._channel, body), timeout)
        except (asyncio.TimeoutError, BlockingIOError):
            raise LaunchError(
                f"the fork server did not read a request within {timeout:g} s",
                fix="check if it is suspended or the host overloaded, then start the cluster again",
            ) from None

    async def _receive_reply(self, timeout: float) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        self._channel.setblocking(False)
        line = b""
        try:
            while not line.endswith(b"\n"):
                chunk = await asyncio.wait_for(loop.sock_recv(self._channel, 1 << 16), timeout)
                if not chunk:
                    raise ConnectionResetError
                line += chunk
        except asyncio.TimeoutError:
            raise LaunchError(f"the fork server did not reply within {timeout:g} s") from None
        except OSError:  # it was killed before it read a request
            raise LaunchError("the fork server ended", fix="tfd support includes its log") from None
        reply = json.loads(line)
        assert isinstance(reply, dict)
        return reply

    def close(self) -> None:
        self._channel.close()
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _kill_started(starting: asyncio.Future[Process]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        process = starting.result()
        process.kill()
        process.close_channel()


def _can_fork() -> bool:
    return sys.platform == "linux" and os.environ.get("TFD_START_METHOD", "fork") == "fork"


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        key: value
        for key, value in environment.items()
        if key.startswith(_READ_AT_IMPORT) and key not in _IGNORED_AT_IMPORT
    }


def _open_log(log: Path) -> BinaryIO:
    """Open a log, which only this user can read, to append to it."""
    return open(log, "ab", opener=functools.partial(os.open, mode=0o600))


def _popen(
    module: str,
    environment: Mapping[str, str],
    path: Sequence[str] | None,
    fds: tuple[int, ...],
    log: Path,
    directory: Path,
) -> int:
    with _open_log(log) as file:
        process = subprocess.Popen(
            interpreter.command(f"tfd_notebook.agent.{module}"),
            env=interpreter.environment(environment, path),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            pass_fds=fds,
            cwd=directory,
        )
    # `Processes._reap` waits for all children, so Popen must not.
    process.returncode = 0
    return process.pid
