"""Fork server of an executor: a process that has imported TensorFlow, from which nodes are forked.

It has a single Python thread, and listens on a Unix socket for processes of the same user. It ends
with its executor's JVM, or after ten minutes without such a client. On the driver's host, it ends
after a second without one. The nodes that were forked from it keep running.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from tfd_notebook.agent import fork_server, interpreter
from tfd_notebook.errors import LaunchError, TfdError, Unsupported
from tfd_notebook.net import agent_protocol, runtime_dir, unix_socket
from tfd_notebook.spark.executor.executor import Executor

#: Environment variable that marks the process and holds its arguments.
VARIABLE = "TFD_SPARK_FORK_SERVER"
_IDLE_SECONDS = 600.0
#: Interval in seconds of its checks without a client.
_CHECK_SECONDS = 1.0
#: Timeout in seconds for the import of TensorFlow on a busy host.
_IMPORT_SECONDS = 300.0
#: Timeout in seconds for progress within a request; other requests wait meanwhile.
_REQUEST_SECONDS = 10.0
#: Prefixes of variables that the import of TensorFlow reads: nodes that differ need another server.
_IMPORT_VARIABLES = ("TF_", "KERAS_", "OMP_", "MKL_", "XLA_", "LD_LIBRARY_PATH", "PYTHONPATH")


def start(executor: Executor, environment: Mapping[str, str]) -> None:
    """Start the fork server of an executor, which imports TensorFlow, unless it runs.

    Parameters
    ----------
    executor : Executor
        The owner.
    environment : mapping
        Environment of the nodes.
    """
    _connect(executor, environment).close()


def check_platform() -> None:
    """Raise Unsupported if processes cannot be forked after the import of TensorFlow."""
    if sys.platform != "linux":
        raise Unsupported(
            f"nodes on Spark are forked after the import of TensorFlow, which {sys.platform} "
            "does not support",
            fix="run the executors on Linux",
        )


def fork(
    executor: Executor, environment: Mapping[str, str], request: dict[str, Any], fds: list[int]
) -> int:
    """Fork a node from the fork server of an executor; return the pid of its supervisor.

    Parameters
    ----------
    executor : Executor
    environment : mapping
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
    where = f"executor {executor.id} on {executor.host}"
    try:
        with _connect(executor, environment) as channel, channel.makefile("r") as answers:
            fork_server.send_request(channel, request, fds)
            answer_line = answers.readline()
    except (BrokenPipeError, ConnectionResetError):
        answer_line = ""
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
        if unix_socket.is_this_user(channel):
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
        idle = _CHECK_SECONDS if executor.pid == os.getpid() else _IDLE_SECONDS
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
    fd, pid, started, idle = json.loads(os.environ.pop(VARIABLE))
    with socket.socket(fileno=fd) as listener:
        imported = fork_server.import_tensorflow(
            "cloudpickle", "tfd_notebook.spark.executor.node_supervisor"
        )
        listener.settimeout(_CHECK_SECONDS)
        idle_since = time.monotonic()
        forked: set[int] = set()
        while runtime_dir.runs(pid, started) and time.monotonic() - idle_since < idle:
            _remove_ended(forked)
            try:
                channel, _ = listener.accept()
            except TimeoutError:
                continue
            # Any user can connect to an abstract name.
            with channel:
                if unix_socket.is_this_user(channel):
                    channel.settimeout(_REQUEST_SECONDS)
                    with contextlib.suppress(OSError):
                        _answer(listener, channel, imported, forked)
                    idle_since = time.monotonic()


def _remove_ended(forked: set[int]) -> None:
    """Remove supervisors that have ended, and the directories of killed ones."""
    # Import time: clients of the fork server do not need the supervisor.
    from tfd_notebook.spark.executor import node_supervisor

    for pid in [pid for pid in forked if not os.path.exists(f"/proc/{pid}")]:
        forked.discard(pid)
        node_supervisor.sweep(pid)


def _answer(
    listener: socket.socket, channel: socket.socket, imported: dict[str, Any], forked: set[int]
) -> None:
    """Fork the node that a client requests, and add its pid to `forked`."""
    received = fork_server.receive_request(channel)
    if received is None:
        return
    request, fds = received

    def work() -> None:
        # Import time, as in `_remove_ended`.
        from tfd_notebook.spark.executor import node_supervisor

        listener.close()
        channel.close()
        node_supervisor.run(request, *fds)

    try:
        fork_server.check_import(
            imported,
            "install it for the executors' Python; tfd.spark.check(spark) shows the commands",
            "remove the module that starts them, such as a sitecustomize, from the executors' "
            "Python",
        )
        pid = fork_server.double_fork(work)
        forked.add(pid)
        answer: dict[str, Any] = {"pid": pid}
    except TfdError as error:
        answer = {"error": agent_protocol.pack_error(error)}
    finally:
        for fd in fds:
            os.close(fd)
    fork_server.send_reply(channel, answer)
