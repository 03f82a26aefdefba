"""TensorFlow's servers in this process: start, packet filter, stop and wait.

The task process, the in-process launcher, `tfd_notebook.Dispatcher` and Spark nodes use them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tfd_notebook._compat.tf_data import servers as compat
from tfd_notebook.agent import work_dir as agent_work_dir
from tfd_notebook.errors import FilterFailed, LaunchError, StateError, TfdError
from tfd_notebook.model.spec import SERVER_ROLES, Role
from tfd_notebook.net import ports
from tfd_notebook.net.runtime_dir import variables

#: Seconds for a server to stop after a failure.
STOP_SECONDS = 3.0
#: Seconds after which the dispatcher discards an epoch that no consumer reads. A training process
#: that shares a job can be started again in this time. TensorFlow's default is 5 minutes.
KEEP_SECONDS = 1800.0
#: Without ``gc_dynamic_sharding_jobs``, data workers keep the pipelines of epochs that were left
#: early in mode "dynamic" until the dispatcher stops. The interval also limits the time after which
#: the consumers of a killed process are noticed. TensorFlow's default is 10 minutes.
_DISPATCHER_DEFAULTS = {
    "gc_dynamic_sharding_jobs": True,
    "job_gc_check_interval_ms": 60_000,
    "job_gc_timeout_ms": int(KEEP_SECONDS * 1000),
}


class Server:
    """A TensorFlow server of this process, which starts once and may never stop.

    Parameters
    ----------
    role : Role
    port : int
        TCP port to listen on. A parameter server, worker or evaluator listens on the port of its
        entry in ``cluster``.
    reserved : socket.socket, optional
        The reservation of the port, which is closed when the server has stopped.

    Attributes
    ----------
    open_to : str
        Peers that can connect, see `ports.restrict_port`. Empty before the start.
    sent : ports.SentBytes
        Counts the bytes that the server has sent.
    why_not_stopped : str
        The reason why it may keep running after `stop`.
    unstoppable : bool
        True if it ends only with its process.
    failure : Exception or None
        The error with which its stop failed.
    """

    def __init__(self, role: Role, port: int, reserved: socket.socket | None = None) -> None:
        self.open_to = ""
        self.sent = ports.SentBytes(port)
        self.unstoppable = role in SERVER_ROLES
        self.failure: Exception | None = None
        self.why_not_stopped = (
            "TensorFlow cannot stop it, so it keeps its port until the kernel ends"
            if self.unstoppable
            else "TensorFlow keeps it until its last consumer ends"
        )
        self._role = role
        self._port = port
        self._reserved = reserved
        self._server: Any = None
        self._ended = threading.Event()
        self._stopping: threading.Thread | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def running(self) -> bool:
        """True after the start and before `stop`."""
        return self._server is not None

    def start(
        self, settings: Mapping[str, Any], allow: Iterable[str] | None = None, host: str = ""
    ) -> Server:
        """Start the server, close its port to other hosts, and return it.

        Parameters
        ----------
        settings : mapping
            Fields of TensorFlow's messages ``DispatcherConfig`` or ``WorkerConfig``
            (``service_config.proto``). For a ``tf.distribute.Server``: ``cluster`` (addresses by
            job), ``job`` and ``index``.
            ``gpus`` is true if it uses the visible GPUs (default true). ``threads`` is the number
            of ops that it runs at a time (default: TensorFlow's choice).
        allow : iterable of str, optional
            Networks that may connect in addition to this host. None: the port stays open.
        host : str
            The name or address that peers use.

        Raises
        ------
        LaunchError
            The server did not start. The message is TensorFlow's.
        FilterFailed
            The port cannot be closed to other hosts. The server no longer listens. It was stopped
            if possible.
        StateError
            This process runs too many servers that cannot be stopped.
        """
        try:
            self._server = _STARTERS[self._role](self._port, settings)
        except TfdError:
            raise
        except Exception as error:
            raise LaunchError(
                f"starting the {str(self._role).replace('_', ' ')} on port {self._port} failed: "
                f"{error}",
                fix="check its configuration and the log",
            ) from error
        try:
            if allow is not None:
                self.restrict(allow, host)
        except BaseException as error:  # also Ctrl-C in a kernel
            ports.stop_listening(self._port)  # the stop can take longer, or fail
            if not self.stop(STOP_SECONDS) and isinstance(error, FilterFailed):
                error.what += f". The server still runs: {self.why_not_stopped}"
            raise
        return self

    def restrict(self, allow: Iterable[str], host: str) -> None:
        """Close the port to hosts other than this one and those of `allow`; see `start`."""
        self.open_to = ports.restrict_port(self._port, allow, host)

    def stop(self, timeout: float | None) -> bool:
        """Stop the server; return False if it has not stopped after `timeout` seconds."""
        if os.getpid() != self._pid:
            return True  # a forked child has none of the server's threads
        if self.unstoppable:
            return not self.running
        # TensorFlow's method blocks while a client iterates, and holds the GIL while it blocks.
        # `compat.stop` runs it without the GIL.
        with self._lock:
            if self._stopping is None:
                self._stopping = threading.Thread(
                    target=self._stop, name="tfd-server-stop", daemon=True
                )
                self._stopping.start()
        self._stopping.join(timeout)
        return self._ended.is_set() and self.failure is None

    def _stop(self) -> None:
        server, self._server = self._server, None
        try:
            if server is not None:
                compat.stop(server)
        except Exception as error:
            self.failure, self.unstoppable, self._server = error, True, server
            self.why_not_stopped = f"stopping it failed: {error}"
        # TensorFlow's finalizer of a worker unregisters its address. It must run before another
        # server can use the port.
        del server
        if self._reserved is not None:
            self._reserved.close()
        self._ended.set()

    def join(self, timeout: float | None) -> bool:
        """Wait until the server has stopped, or its stop has failed. Return False on timeout."""
        return self._ended.wait(timeout)


def set_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a TensorFlow configuration that the user has set.

    In TensorFlow's classes, unset fields are 0. Their constructors change an explicit 0 to 1 ms.
    """
    return {name: value for name, value in config.items() if value}


def dispatcher_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a dispatcher, with defaults for those that are not set."""
    return {**_DISPATCHER_DEFAULTS, **set_fields(settings)}


def _dispatcher(port: int, settings: Mapping[str, Any]) -> Any:
    if work_dir := settings.get("work_dir"):
        agent_work_dir.make_private(work_dir)
    return compat.start(compat.dispatcher({**dispatcher_settings(settings), "port": port}))


def _data_worker(port: int, settings: Mapping[str, Any]) -> Any:
    return compat.start(compat.data_worker({**set_fields(settings), "port": port}))


def _task_server(port: int, settings: Mapping[str, Any]) -> Any:
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=settings.get("threads", 0))
    if not settings.get("gpus", True):
        config.device_count["GPU"] = 0
    # The server reads the variable in its constructor, to share the port with the socket that
    # reserves it. In the environment of a fork, the variable would require another fork server.
    with _counted(), variables({"TF_GRPC_REUSE_PORT": "1"}):
        return tf.distribute.Server(
            settings["cluster"], settings["job"], settings["index"], config=config
        )


#: The number of servers that end only with this process.
_unstoppable = 0
_unstoppable_lock = threading.Lock()
#: Limit of these servers. Each needs about 40 MB and 85 threads.
MAX_UNSTOPPABLE = 32


def unstoppable() -> int:
    """Return the number of servers that end only with this process."""
    return _unstoppable


def check_room(count: int) -> None:
    """Raise StateError if this process cannot run `count` more of these servers."""
    if _unstoppable + count > MAX_UNSTOPPABLE:
        raise StateError(
            f"{_unstoppable} workers and ps of this and earlier clusters run in this process, each "
            "with 40 MB and 85 threads. TensorFlow cannot stop them before the kernel ends, and "
            f"the limit is {MAX_UNSTOPPABLE}",
            fix='restart the kernel, or use launcher="local"',
        )


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    """Count a server that ends only with this process; raise StateError at the limit."""
    global _unstoppable
    with _unstoppable_lock:
        check_room(1)
        yield
        _unstoppable += 1


_STARTERS = {
    Role.DISPATCHER: _dispatcher,
    Role.DATA_WORKER: _data_worker,
    **dict.fromkeys(SERVER_ROLES, _task_server),
}
