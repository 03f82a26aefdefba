"""The agent's processes: forked from a fork server (or spawned), waited for, talked to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfd_notebook.agent import fork_server, interpreter
from tfd_notebook.errors import LaunchError, TensorFlowMissing, TfdError, TimeLimit
from tfd_notebook.net import agent_protocol
from tfd_notebook.net.runtime_dir import AGENT_VARIABLE

#: Variables that TensorFlow, its libraries or the loader read when they are loaded.
_READ_AT_IMPORT = ("TF_", "XLA_", "OMP_", "MKL_", "OPENBLAS_", "GRPC_", "LD_")
#: Of these, the ones that scikit-learn sets when it is imported, and Keras imports scikit-learn:
#: they are for Intel's OpenMP, and no reason to import TensorFlow again.
_SET_IN_PASSING = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
#: Seconds after which a fork server without any cluster ends.
IDLE_SECONDS = 600.0


class Process:
    """A task's process.

    Attributes
    ----------
    pid : int
    ended : asyncio.Future of int
        Its status as ``os.waitpid`` tells it.
    failed : TfdError, optional
        Why the task could not be prepared.
    """

    def __init__(self, pid: int, channel: socket.socket, ended: asyncio.Future[int]) -> None:
        self.pid = pid
        self.ended = ended
        self._channel = channel
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.failed: TfdError | None = None
        self._last = 0
        self._writer: asyncio.StreamWriter | None = None
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._channel, limit=2**24)
        while line := await reader.readline():
            message = json.loads(line)
            if "failed" in message:
                self.failed = agent_protocol.unpack_error(message["failed"])
                break
            answer = self._answers.pop(message["re"], None)
            if answer is None or answer.done():
                continue
            if message["ok"]:
                answer.set_result(message["value"])
            else:
                answer.set_exception(agent_protocol.unpack_error(message["error"]))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self.failed or LaunchError("the process ended"))
        self._answers.clear()

    async def request(self, do: str, timeout: float, **arguments: Any) -> Any:
        """Have the task do something; raise what it raised, or TimeLimit."""
        while self._writer is None and not self._reading.done():
            await asyncio.sleep(0)
        if self.failed is not None or self._writer is None or self._reading.done():
            raise self.failed or LaunchError("the process ended")
        self._last += 1
        message = {"id": self._last, "do": do, "arguments": arguments}
        answer = self._answers[self._last] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps(message).encode() + b"\n")
        try:
            return await asyncio.wait_for(answer, timeout)
        except asyncio.TimeoutError:
            raise TimeLimit(f"no answer to {do!r} within {timeout:g} s") from None

    @property
    def is_asked(self) -> bool:
        """Whether somebody still waits for an answer, such as for functions to be installed."""
        return any(not answer.done() for answer in self._answers.values())

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, unless the process has ended."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def let_go(self) -> None:
        """Close the channel, at once."""
        if self._writer is not None:
            self._writer.close()
        else:
            self._reading.add_done_callback(lambda _: self._channel.close())
        self._reading.cancel()

    async def close(self) -> None:
        """Let go of the channel."""
        self.let_go()
        await asyncio.gather(self._reading, return_exceptions=True)


class Processes:
    """Starts processes for tasks and learns of their end.

    Parameters
    ----------
    agent : str
        Id of the agent, put into each process's environment.
    directory : Path
        The agent's own: working directory of its helpers, and where the fork server's log is.
    """

    def __init__(self, agent: str, directory: Path) -> None:
        self._agent = agent
        self._directory = directory
        self._log = directory / "forkserver.log"
        self._server: _ForkServer | None = None
        self._lock = asyncio.Lock()
        self._ended: dict[int, int] = {}
        self._waited: dict[int, asyncio.Future[int]] = {}
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    @property
    def server_pid(self) -> int | None:
        """Pid of the fork server, None while there is none."""
        return self._server.pid if self._server else None

    async def preload(self, environment: Mapping[str, str], path: list[str]) -> list[str]:
        """Have a fork server that has imported TensorFlow.

        Returns
        -------
        list of str
            The variables whose change made it a new one.
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
        # The answer of the fork server has to be read, or the next one would be taken for it: a
        # start that nobody waits for any more goes on to its end, and is taken back.
        starting = asyncio.ensure_future(self._start(request, log))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_take_back)
            raise

    async def _start(self, request: dict[str, Any], log: Path) -> Process:
        environment = dict(request["environment"], **{AGENT_VARIABLE: self._agent})
        request = dict(request, environment=environment, parent=os.getpid())
        ours, theirs = socket.socketpair()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            async with self._lock:
                # Pids are used again: what ended before the fork is not what is forked now.
                self._ended.clear()
                if _can_fork():
                    server = await self._fork_server(environment, request["path"])
                    try:
                        pid = await server.fork(request, [theirs.fileno(), descriptor])
                    except BaseException:
                        # Half a request, or an answer to come, would spoil the next one.
                        self.close_server()
                        raise
                else:
                    pid = self._spawn(request, theirs.fileno(), descriptor)
                return Process(pid, ours, self._wait(pid))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(descriptor)

    def run(
        self, module: str, environment: Mapping[str, str], log: Path, fds: Iterable[int] = ()
    ) -> tuple[int, asyncio.Future[int]]:
        """Run ``main()`` of a module of this package; return its pid, and its status to come.

        Parameters
        ----------
        module : str
        environment : mapping of str to str
            On top of this process's own.
        log : Path
            What it says is appended there.
        fds : iterable of int
            Descriptors that it inherits.
        """
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            pid = _popen(
                module, {**os.environ, **environment}, None, tuple(fds), descriptor, self._directory
            )
        finally:
            os.close(descriptor)
        # Nobody has waited for it yet; what is known of that pid is of an earlier one.
        self._ended.pop(pid, None)
        return pid, self._wait(pid)

    def _spawn(self, request: dict[str, Any], control: int, log: int) -> int:
        environment = dict(
            request["environment"],
            TFD_TASK_FD=str(control),
            TFD_TASK_REQUEST=json.dumps(request),
        )
        fds = (control,)
        return _popen("task_process", environment, request["path"], fds, log, self._directory)

    async def _fork_server(self, environment: Mapping[str, str], path: list[str]) -> _ForkServer:
        wanted = _read_at_import(environment)
        if self._server is not None and (self._changed(wanted) or self._server.ended.done()):
            self.close_server()
        if self._server is None:
            self._server = await _ForkServer.start(
                self._agent, dict(environment), wanted, path, self._directory, self._log, self._wait
            )
        return self._server

    def _changed(self, wanted: Mapping[str, str]) -> list[str]:
        """Which variables are others than those the fork server was started with."""
        if self._server is None:
            return []
        had = self._server.wanted
        return sorted(n for n in wanted.keys() | had.keys() if wanted.get(n) != had.get(n))

    def close_server(self) -> None:
        """End the fork server; tasks that came from it live on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _wait(self, pid: int) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if pid in self._ended:
            future.set_result(self._ended.pop(pid))
        else:
            self._waited[pid] = future
        return future

    def _reap(self) -> None:
        # As a subreaper this process also inherits what tasks leave behind, hence -1.
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            future = self._waited.pop(pid, None)
            if future is None:
                self._ended[pid] = status
            elif not future.done():
                future.set_result(status)


class _ForkServer:
    """The agent's end of a fork server."""

    def __init__(self, pid: int, wanted: dict[str, str], ended: asyncio.Future[int]) -> None:
        self.pid = pid
        self.wanted = wanted
        self.ended = ended
        self.hello: dict[str, Any] = {}
        self.used = time.monotonic()
        self._channel: socket.socket

    @classmethod
    async def start(
        cls,
        agent: str,
        environment: dict[str, str],
        wanted: dict[str, str],
        path: list[str],
        directory: Path,
        log: Path,
        wait: Callable[[int], asyncio.Future[int]],
    ) -> _ForkServer:
        ours, theirs = socket.socketpair()
        environment = dict(
            environment,
            TFD_FORK_FD=str(theirs.fileno()),
            TFD_FORK_OWNER=str(os.getpid()),
            # Without it NumPy's BLAS starts a thread at import, and a fork would not be safe.
            OPENBLAS_NUM_THREADS="1",
            **{AGENT_VARIABLE: agent},
        )
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fds = (theirs.fileno(),)
            pid = _popen("fork_server", environment, path, fds, descriptor, directory)
        finally:
            os.close(descriptor)
            theirs.close()
        server = cls(pid, wanted, wait(pid))
        server._channel = ours
        try:
            server.hello = await server._answer(timeout=300.0)
            if "error" in server.hello:
                raise TensorFlowMissing(
                    f"the tasks' Python cannot import TensorFlow: {server.hello['error']}",
                    fix='pip install "tfd-notebook[tensorflow]", then start the cluster again',
                )
            if server.hello["threads"] != 1:
                raise LaunchError(
                    f"TensorFlow started {server.hello['threads'] - 1} threads while it was "
                    "imported, so tasks cannot be forked safely",
                    fix="set TFD_START_METHOD=spawn before the extension is loaded",
                )
        except BaseException:
            server.close()
            raise
        return server

    async def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        self.used = time.monotonic()
        await self._send(*fork_server.packed(request), fds, timeout=60.0)
        answer = await self._answer(timeout=60.0)
        return int(answer["pid"])

    async def _send(self, head: bytes, body: bytes, fds: list[int], timeout: float) -> None:
        """Send a request without blocking: the server may be stopped or swapped out."""
        self._channel.setblocking(False)
        try:
            # The server has read all earlier requests, so there is room for the first bytes.
            socket.send_fds(self._channel, [head], fds)
            loop = asyncio.get_running_loop()
            await asyncio.wait_for(loop.sock_sendall(self._channel, body), timeout)
        except (asyncio.TimeoutError, BlockingIOError):
            raise LaunchError(
                f"the fork server did not read a request within {timeout:g} s",
                fix="is it stopped, or the host overloaded? Start the cluster again",
            ) from None

    async def _answer(self, timeout: float) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        self._channel.setblocking(False)
        line = b""
        try:
            while not line.endswith(b"\n"):
                chunk = await asyncio.wait_for(loop.sock_recv(self._channel, 1 << 16), timeout)
                if not chunk:
                    raise LaunchError(
                        "the fork server ended", fix="tfd support takes its log along"
                    )
                line += chunk
        except asyncio.TimeoutError:
            raise LaunchError(f"the fork server did not answer within {timeout:g} s") from None
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def close(self) -> None:
        self._channel.close()
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _take_back(starting: asyncio.Future[Process]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        process = starting.result()
        process.kill()
        process.let_go()


def _can_fork() -> bool:
    return sys.platform == "linux" and os.environ.get("TFD_START_METHOD", "fork") == "fork"


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        key: value
        for key, value in environment.items()
        if key.startswith(_READ_AT_IMPORT) and key not in _SET_IN_PASSING
    }


def _popen(
    module: str,
    environment: Mapping[str, str],
    path: Sequence[str] | None,
    fds: tuple[int, ...],
    log: int,
    directory: Path,
) -> int:
    process = subprocess.Popen(
        interpreter.command(f"tfd_notebook.agent.{module}"),
        env=interpreter.environment(environment, path),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=fds,
        cwd=directory,
        start_new_session=False,
    )
    # The agent waits for its children itself, in one place.
    process.returncode = 0
    return process.pid
