"""TensorFlow's servers, created from JSON settings, as they run in a task."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tfd_notebook._compat.tf_data import servers as compat
from tfd_notebook.agent import work_dir as agent_work_dir
from tfd_notebook.errors import LaunchError, StateError, TfdError
from tfd_notebook.model.spec import SERVER_ROLES, Role
from tfd_notebook.net.runtime_dir import variables


class Server(ABC):
    """A running TensorFlow server in this process.

    Attributes
    ----------
    port : int
        The port on which it listens.
    why_not_stopped : str
        The reason for which it may continue after `stop`, as a sentence.
    unstoppable : bool
        True if it ends only with its process.
    """

    port: int
    why_not_stopped: ClassVar[str] = "TensorFlow keeps it until its last consumer ends"
    unstoppable: ClassVar[bool] = False

    @abstractmethod
    def stop(self, timeout: float | None) -> bool:
        """Stop the server; return False if it still stops in the background after `timeout` s."""


class _DataServer(Server):
    """A dispatcher or data worker of the tf.data service."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._stopping: threading.Thread | None = None
        self.port = compat.port_of(server)

    def stop(self, timeout: float | None) -> bool:
        # TensorFlow's method blocks while a client iterates, and holds the GIL while it blocks.
        # `compat.stop` runs it without the GIL.
        if self._stopping is None:
            self._stopping = threading.Thread(
                target=compat.stop, args=(self._server,), name="tfd-server-stop", daemon=True
            )
            self._stopping.start()
        self._stopping.join(timeout)
        return not self._stopping.is_alive()


def _dispatcher(port: int, settings: Mapping[str, Any]) -> Server:
    from tensorflow.data.experimental import service

    if work_dir := settings.get("work_dir"):
        agent_work_dir.make_private(work_dir)
    config = service.DispatcherConfig(port=port, **settings)
    return _DataServer(compat.start(service.DispatchServer(config, start=False)))


def _data_worker(port: int, settings: Mapping[str, Any]) -> Server:
    from tensorflow.data.experimental import service

    config = service.WorkerConfig(port=port, **settings)
    return _DataServer(compat.start(service.WorkerServer(config, start=False)))


class _TaskServer(Server):
    """A ``tf.distribute.Server``: parameter server, worker or evaluator."""

    why_not_stopped = "TensorFlow cannot stop it, so it keeps its port until the kernel ends"
    unstoppable = True

    def __init__(self, server: Any) -> None:
        self._server = server
        self.port = int(server.target.rpartition(":")[2])

    def stop(self, timeout: float | None) -> bool:
        return False


def _task_server(port: int, settings: Mapping[str, Any]) -> Server:
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=settings.get("threads", 0))
    if not settings.get("gpus", True):
        config.device_count["GPU"] = 0
    # The server reads the variable in its constructor, to share the port with the socket that
    # reserves it. In the environment of a fork, the variable would require another fork server.
    with _counted(), variables({"TF_GRPC_REUSE_PORT": "1"}):
        return _TaskServer(
            tf.distribute.Server(
                settings["cluster"], settings["job"], settings["index"], config=config
            )
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


def start(role: Role, port: int, settings: Mapping[str, Any]) -> Server:
    """Start the server of a task in this process.

    Parameters
    ----------
    role : Role
    port : int
        TCP port to listen on, 0 for a free one. A parameter server, worker or evaluator listens on
        the port of its entry in ``cluster``.
    settings : mapping
        Fields of ``tf.data.experimental.service.DispatcherConfig`` or ``WorkerConfig``. For a
        ``tf.distribute.Server``: ``cluster`` (addresses by job), ``job`` and ``index``. ``gpus`` is
        true if it uses the visible GPUs (default true). ``threads`` is the number of ops that it
        runs at a time (default: TensorFlow's choice).

    Raises
    ------
    LaunchError
        With TensorFlow's message.
    StateError
        This process runs too many servers that cannot be stopped.
    """
    if role not in _STARTERS:
        raise StateError(f"invalid role {role}: it has no server")
    try:
        return _STARTERS[role](port, settings)
    except TfdError:
        raise
    except Exception as error:
        raise LaunchError(
            f"starting TensorFlow's server for {role} failed: {error}",
            fix="see the task's log",
        ) from error
