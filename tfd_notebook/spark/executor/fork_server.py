"""Fork server of an executor: a process that has imported TensorFlow, from which nodes are forked.

It has a single Python thread, and listens on a Unix socket for processes of the same user. It ends
with its executor's JVM, or after ten minutes without a request. The nodes that were forked from it
keep running.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from tfd_notebook.agent import fork_server, interpreter
from tfd_notebook.errors import LaunchError, TensorFlowMissing, TfdError, Unsupported
from tfd_notebook.net import agent_protocol, runtime_dir
from tfd_notebook.spark.executor.executor import Executor, Watch

#: Environment variable that marks the process and holds its arguments.
VARIABLE = "TFD_SPARK_FORK_SERVER"
_IDLE_SECONDS = 600.0
#: Timeout in seconds for the import of TensorFlow on a busy host.
_IMPORT_SECONDS = 300.0
#: Timeout in seconds for progress within a request; other requests wait meanwhile.
_REQUEST_SECONDS = 10.0
#: Prefixes of variables that the import of TensorFlow reads: nodes that differ need another server.
_IMPORT_VARIABLES = ("TF_", "KERAS_", "OMP_", "MKL_", "XLA_", "LD_LIBRARY_PATH", "PYTHONPATH")


class ForkServerClient:
    """A connection to the fork server of an executor; use it from one thread.

    Parameters
    ----------
    executor : Executor
        The owner. If it has no fork server yet, one is started, which imports TensorFlow.
    environment : mapping
        Environment of the nodes.
    """

    def __init__(self, executor: Executor, environment: Mapping[str, str]) -> None:
        if sys.platform != "linux":
            raise Unsupported(
                f"nodes on Spark are forked after the import of TensorFlow, which {sys.platform} "
                "does not support",
                fix="run the executors on Linux",
            )
        self._executor = executor
        self._environment = environment
        self._channel = _connect(executor, environment)

    def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        """Fork a node; return the pid of its supervisor.

        Parameters
        ----------
        request : dict
            The JSON argument of `node_supervisor.run`.
        fds : list of int
            Two descriptors for it: the socket that reserves its port, and its log file.

        Raises
        ------
        TensorFlowMissing
            The executors' Python has no TensorFlow.
        LaunchError
            The fork server ended, does not answer, or has threads.
        """
        where = f"executor {self._executor.id} on {self._executor.host}"
        try:
            answer_line = self._request(request, fds)
            if not answer_line:  # its idle timeout expired just before
                self.close()
                self._channel = _connect(self._executor, self._environment)
                answer_line = self._request(request, fds)
        except OSError as error:
            raise LaunchError(
                f"the fork server of {where} does not answer: {error}",
                fix="check load and free memory of the host",
            ) from None
        if not answer_line:
            raise LaunchError(
                f"the fork server of {where} has ended",
                fix="check the free memory of the host and the executor's log",
            )
        answer = json.loads(answer_line)
        if "error" in answer:
            problem = agent_protocol.unpack_error(answer["error"])
            raise type(problem)(f"{where}: {problem.what}", fix=problem.fix)
        return int(answer["pid"])

    def _request(self, request: dict[str, Any], fds: list[int]) -> str:
        try:
            fork_server.send_request(self._channel, request, fds)
            with self._channel.makefile("r") as answers:
                return answers.readline()
        except (BrokenPipeError, ConnectionResetError):
            return ""

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def _address(executor: Executor, environment: Mapping[str, str]) -> str:
    """Return the socket address of an executor's fork server for nodes of this environment.

    The abstract name is free again when the process ends, unlike a file.
    """
    import_variables = {k: v for k, v in environment.items() if k.startswith(_IMPORT_VARIABLES)}
    identity = [
        executor.pid,
        executor.started,
        os.getuid(),
        sys.executable,
        sorted(import_variables.items()),
    ]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    return f"\0tfd-fork-server-{digest}"


def _connect(executor: Executor, environment: Mapping[str, str]) -> socket.socket:
    """Connect to the fork server, and start it if it does not run."""
    address = _address(executor, environment)
    while True:
        channel = socket.socket(socket.AF_UNIX)
        channel.settimeout(_IMPORT_SECONDS)
        try:
            channel.connect(address)
        except ConnectionRefusedError:
            channel.close()
            _start(address, executor, environment)
            continue
        except BaseException:
            channel.close()
            raise
        if is_same_user(channel):
            return channel
        channel.close()
        raise LaunchError(
            "another user listens on the address of the fork server",
            fix="stop that user's process; nothing was sent to it",
        )


def _start(address: str, executor: Executor, environment: Mapping[str, str]) -> None:
    """Start the fork server, unless another process is starting it."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            time.sleep(0.01)  # another process has bound the address, and will listen
            return
        listener.listen(64)
        # On the driver's host it serves the nodes of one start only.
        idle = 0.0 if executor.pid == os.getpid() else _IDLE_SECONDS
        # A separate session: Spark sends signals to the process group of its workers.
        subprocess.Popen(
            interpreter.command("tfd_notebook.spark.executor.fork_server"),
            env={
                **interpreter.environment(environment),
                # OpenBLAS would start threads, which a fork loses.
                "OPENBLAS_NUM_THREADS": "1",
                VARIABLE: json.dumps([listener.fileno(), executor.pid, executor.started, idle]),
            },
            pass_fds=[listener.fileno()],
            cwd=runtime_dir.runtime_dir(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ).returncode = 0  # prevents Popen's ResourceWarning: the process outlives this worker


def main() -> None:
    """Run the fork server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    fd, pid, started, idle = json.loads(os.environ[VARIABLE])
    with socket.socket(fileno=fd) as listener:
        _serve(listener, Watch(pid, started), _import_tensorflow(), idle)


def _import_tensorflow() -> TfdError | None:
    """Import the modules that nodes need; return the error that prevents forks, or None."""
    gc.disable()
    try:
        with fork_server.blocked_imports("pyarrow"):
            import cloudpickle  # noqa: F401
            import tensorflow  # noqa: F401 - loaded here, used after the fork

            # Import time: clients of the fork server do not need the supervisor.
            from tfd_notebook.spark.executor import node_supervisor  # noqa: F401
    except Exception as error:
        return TensorFlowMissing(
            f"TensorFlow cannot be imported: {type(error).__name__}: {error}",
            fix="install it for the executors' Python; tfd.spark.check(spark) shows the commands",
        )
    gc.freeze()
    gc.enable()
    threads = len(os.listdir("/proc/self/task"))
    if threads == 1:
        return None
    return LaunchError(
        f"the import of TensorFlow has started {threads - 1} threads, which a fork would lose",
        fix="remove the module that starts them, such as a sitecustomize, from the executors' "
        "Python",
    )


def _serve(listener: socket.socket, jvm: Watch, problem: TfdError | None, idle: float) -> None:
    """Answer requests until the executor ends, or the idle timeout expires."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    handle = jvm.fileno()
    if handle is not None:
        poll.register(handle, select.POLLIN)
    idle_since = time.monotonic()
    channels: dict[int, socket.socket] = {}
    forked: set[int] = set()
    while not jvm.ended:
        ready = [descriptor for descriptor, _ in poll.poll(1000)]
        _remove_ended(forked)
        if not channels and not ready and time.monotonic() - idle_since > idle:
            return
        for descriptor in ready:
            if descriptor == listener.fileno():
                channel, _ = listener.accept()
                if is_same_user(channel):
                    channel.settimeout(_REQUEST_SECONDS)
                    channels[channel.fileno()] = channel
                    poll.register(channel, select.POLLIN)
                else:
                    channel.close()
            elif descriptor in channels:
                idle_since = time.monotonic()
                open_sockets = [listener, *channels.values()]
                if not _answer(channels[descriptor], open_sockets, problem, forked):
                    poll.unregister(descriptor)
                    channels.pop(descriptor).close()


def is_same_user(channel: socket.socket) -> bool:
    """Return True if the peer of a Unix socket is a process of this user."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _remove_ended(forked: set[int]) -> None:
    """Remove supervisors that have ended, and the directories of killed ones."""
    # Import time, as in `_import_tensorflow`.
    from tfd_notebook.spark.executor import node_supervisor

    for pid in [pid for pid in forked if not os.path.exists(f"/proc/{pid}")]:
        forked.discard(pid)
        node_supervisor.sweep(pid)


def _answer(
    channel: socket.socket,
    open_sockets: list[socket.socket],
    problem: TfdError | None,
    forked: set[int],
) -> bool:
    """Answer one request and add the pid to `forked`; return False at the end of the channel."""
    try:
        received = fork_server.receive_request(channel)
        if received is None:
            return False
        request, fds = received
        answer: dict[str, Any]
        if problem is not None:
            answer = {"error": agent_protocol.pack_error(problem)}
        else:
            answer = {"pid": _fork(request, fds, open_sockets)}
            forked.add(answer["pid"])
        for fd in fds:
            os.close(fd)
        channel.sendall(json.dumps(answer).encode() + b"\n")
    except OSError:
        return False
    return True


def _fork(request: dict[str, Any], fds: list[int], open_sockets: list[socket.socket]) -> int:
    # Import time, as in `_import_tensorflow`.
    from tfd_notebook.spark.executor import node_supervisor

    def work() -> None:
        for other in open_sockets:
            other.close()
        os.environ.pop(VARIABLE, None)
        node_supervisor.run(request, *fds)

    return fork_server.double_fork(work)
