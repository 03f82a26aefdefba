"""One process for each executor that has imported TensorFlow and run nothing: nodes are its forks.

It has a single Python thread, and listens at a unix socket to processes of its own user. It ends
with its executor's JVM, or when nobody has asked for a node for ten minutes; the nodes that
were forked from it stay.
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

#: Marks the process in its environment.
VARIABLE = "TFD_SPARK_ZYGOTE"
_IDLE_SECONDS = 600.0
#: Seconds for the import of TensorFlow on a busy host.
_IMPORT_SECONDS = 300.0
#: Seconds without progress in the middle of a request, while which all others wait.
_REQUEST_SECONDS = 10.0
#: What is read when TensorFlow is imported, so that nodes that differ in it cannot share one.
_READ_AT_IMPORT = ("TF_", "KERAS_", "OMP_", "MKL_", "XLA_", "LD_LIBRARY_PATH", "PYTHONPATH")


class ForkServerClient:
    """A connection to the process; use it from one thread.

    Parameters
    ----------
    executor : Executor
        Whose it is. Where it has none yet, one is started, which then imports TensorFlow.
    environment : mapping
        Of the nodes.
    """

    def __init__(self, executor: Executor, environment: Mapping[str, str]) -> None:
        if sys.platform != "linux":
            raise Unsupported(
                f"nodes on Spark are forked with TensorFlow, which {sys.platform} cannot",
                fix="run the executors on Linux",
            )
        self._executor = executor
        self._environment = environment
        self._channel = _connect(executor, environment)

    def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        """Have a node forked; return the pid of its supervisor.

        Parameters
        ----------
        request : dict
            What `node.run` takes, as JSON has it.
        fds : list of int
            Two descriptors for it: the socket that holds its port, and where its log goes.

        Raises
        ------
        TensorFlowMissing
            There is none in the executors' Python.
        LaunchError
            The process ended, does not answer, or has threads.
        """
        where = f"executor {self._executor.id} on {self._executor.host}"
        try:
            line = self._ask(request, fds)
            if not line:  # it ended for want of work just then
                self.close()
                self._channel = _connect(self._executor, self._environment)
                line = self._ask(request, fds)
        except OSError as error:
            raise LaunchError(
                f"the process on {where} that nodes are forked from does not answer: {error}",
                fix="is the host overloaded, or short of memory?",
            ) from None
        if not line:
            raise LaunchError(
                f"the process on {where} that nodes are forked from has ended",
                fix="is the host short of memory? see the executor's log",
            )
        answer = json.loads(line)
        if "error" in answer:
            problem = agent_protocol.unpack_error(answer["error"])
            raise type(problem)(f"{where}: {problem.what}", fix=problem.fix)
        return int(answer["pid"])

    def _ask(self, request: dict[str, Any], fds: list[int]) -> str:
        try:
            fork_server.send_request(self._channel, request, fds)
            with self._channel.makefile("r") as answers:
                return answers.readline()
        except (BrokenPipeError, ConnectionResetError):
            return ""

    def close(self) -> None:
        """Let go of the connection."""
        self._channel.close()


def _address(executor: Executor, environment: Mapping[str, str]) -> str:
    """Return where the process of an executor listens, for nodes of this environment.

    The name is one of the system's, not of a file: it is free again whenever its process ends.
    """
    read = {k: v for k, v in environment.items() if k.startswith(_READ_AT_IMPORT)}
    identity = [executor.pid, executor.started, os.getuid(), sys.executable, sorted(read.items())]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    return f"\0tfd-zygote-{digest}"


def _connect(executor: Executor, environment: Mapping[str, str]) -> socket.socket:
    """Return a connection to the process, which is started where there is none."""
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
        if is_ours(channel):
            return channel
        channel.close()
        raise LaunchError(
            "another user listens where the process that nodes are forked from should",
            fix="stop that user's process: nothing was sent to it",
        )


def _start(address: str, executor: Executor, environment: Mapping[str, str]) -> None:
    """Start the process, unless somebody else is doing that."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            time.sleep(0.01)  # it is bound, and will listen
            return
        listener.listen(64)
        # Beside a notebook it is of use for one start only.
        idle = 0.0 if executor.pid == os.getpid() else _IDLE_SECONDS
        # The session of its own keeps it from the signals that Spark sends to its workers.
        subprocess.Popen(
            interpreter.command("tfd_notebook.spark.executor.fork_server"),
            env={
                **interpreter.environment(environment),
                # NumPy's library would start threads, which a fork loses.
                "OPENBLAS_NUM_THREADS": "1",
                VARIABLE: json.dumps([listener.fileno(), executor.pid, executor.started, idle]),
            },
            pass_fds=[listener.fileno()],
            cwd=runtime_dir.runtime_dir(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ).returncode = 0  # it is init's to wait for, not this worker's


def main() -> None:
    """Be the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    fd, pid, started, idle = json.loads(os.environ[VARIABLE])
    with socket.socket(fileno=fd) as listener:
        _serve(listener, Watch(pid, started), _import_tensorflow(), idle)


def _import_tensorflow() -> TfdError | None:
    """Import what nodes need; return why no node can be forked then, if so."""
    gc.disable()
    try:
        with fork_server.blocked_imports("pyarrow"):
            import cloudpickle  # noqa: F401
            import tensorflow  # noqa: F401 - loaded here, used after the fork

            from tfd_notebook.spark.executor import node_supervisor  # noqa: F401
    except Exception as error:
        return TensorFlowMissing(
            f"TensorFlow cannot be imported: {type(error).__name__}: {error}",
            fix="install it for the executors' Python: tfd.spark.check(spark) shows how",
        )
    gc.freeze()
    gc.enable()
    threads = len(os.listdir("/proc/self/task"))
    if threads == 1:
        return None
    return LaunchError(
        f"the import of TensorFlow has left {threads - 1} threads, which a fork would lose",
        fix="keep what starts them, such as a sitecustomize, from the executors' Python",
    )


def _serve(listener: socket.socket, jvm: Watch, problem: TfdError | None, idle: float) -> None:
    """Answer requests until the executor ends, or nobody asks any more."""
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
        _sweep(forked)
        if not channels and not ready and time.monotonic() - idle_since > idle:
            return
        for descriptor in ready:
            if descriptor == listener.fileno():
                channel, _ = listener.accept()
                if is_ours(channel):
                    channel.settimeout(_REQUEST_SECONDS)
                    channels[channel.fileno()] = channel
                    poll.register(channel, select.POLLIN)
                else:
                    channel.close()
            elif descriptor in channels:
                idle_since = time.monotonic()
                open_here = [listener, *channels.values()]
                if not _answer(channels[descriptor], open_here, problem, forked):
                    poll.unregister(descriptor)
                    channels.pop(descriptor).close()


def is_ours(channel: socket.socket) -> bool:
    """Whether the other end of a unix socket is a process of this user."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _sweep(forked: set[int]) -> None:
    """Forget supervisors that have ended, and what they may have left behind."""
    from tfd_notebook.spark.executor import node_supervisor

    for pid in [pid for pid in forked if not os.path.exists(f"/proc/{pid}")]:
        forked.discard(pid)
        node_supervisor.sweep(pid)


def _answer(
    channel: socket.socket,
    open_here: list[socket.socket],
    problem: TfdError | None,
    forked: set[int],
) -> bool:
    """Answer one request; False when there is none any more. Adds to `forked`."""
    try:
        received = fork_server.receive_request(channel)
        if received is None:
            return False
        request, fds = received
        answer: dict[str, Any]
        if problem is not None:
            answer = {"error": agent_protocol.pack_error(problem)}
        else:
            answer = {"pid": _fork(request, fds, open_here)}
            forked.add(answer["pid"])
        for fd in fds:
            os.close(fd)
        channel.sendall(json.dumps(answer).encode() + b"\n")
    except OSError:
        return False
    return True


def _fork(request: dict[str, Any], fds: list[int], open_here: list[socket.socket]) -> int:
    from tfd_notebook.spark.executor import node_supervisor

    def work() -> None:
        for other in open_here:
            other.close()
        os.environ.pop(VARIABLE, None)
        node_supervisor.run(request, *fds)

    return fork_server.double_fork(work)
