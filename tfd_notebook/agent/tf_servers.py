"""TensorFlow's servers, made from JSON settings: what a task is once it has started."""

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
    """A running server of TensorFlow in this process.

    Attributes
    ----------
    port : int
        Where it listens.
    kept : str
        Why it may go on after `stop`, in words.
    endless : bool
        Whether it can only end with its process.
    """

    port: int
    kept: ClassVar[str] = "TensorFlow keeps it until its last consumer ends"
    endless: ClassVar[bool] = False

    @abstractmethod
    def stop(self, timeout: float | None) -> bool:
        """Stop serving; False if it did not stop within `timeout` seconds. Goes on stopping."""


class _DataServer(Server):
    """A dispatcher or data worker of the tf.data service."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._stopping: threading.Thread | None = None
        self.port = compat.port_of(server)

    def stop(self, timeout: float | None) -> bool:
        # It does not return while a client iterates, and TensorFlow's own method would keep the
        # interpreter lock meanwhile.
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

    kept = "TensorFlow cannot stop it: it keeps its port and ends with the kernel"
    endless = True

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
    # The server reads it when it is made, and listens beside the socket that holds its port. In the
    # environment that a task is forked with, it would take a new import of TensorFlow.
    with _one_more(), variables({"TF_GRPC_REUSE_PORT": "1"}):
        return _TaskServer(
            tf.distribute.Server(
                settings["cluster"], settings["job"], settings["index"], config=config
            )
        )


#: Servers of this process that end with it.
_endless = 0
_endless_lock = threading.Lock()
#: Each takes about 40 MB and 85 threads.
MOST_ENDLESS = 32


def endless() -> int:
    """Return how many servers of this process can only end with it."""
    return _endless


def check_room(count: int) -> None:
    """Raise StateError unless this process may have so many more of them."""
    if _endless + count > MOST_ENDLESS:
        raise StateError(
            f"{_endless} workers and ps of this and earlier clusters run in this process, each "
            "with 40 MB and 85 threads; TensorFlow cannot stop them before the kernel ends, and "
            f"more than {MOST_ENDLESS} are not started",
            fix='restart the kernel, or use launcher="local"',
        )


@contextlib.contextmanager
def _one_more() -> Iterator[None]:
    """Count a server that can only end with this process, unless there are too many."""
    global _endless
    with _endless_lock:
        check_room(1)
        yield
        _endless += 1


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
        TCP port to listen at, 0 for a free one; a parameter server, worker or evaluator listens
        where its own entry in ``cluster`` says.
    settings : mapping
        Fields of ``tf.data.experimental.service.DispatcherConfig`` or ``WorkerConfig``; for a
        ``tf.distribute.Server`` ``cluster`` (addresses by job), ``job`` and ``index``, and
        ``gpus``: whether it takes the GPUs that this process sees (default true), ``threads``:
        how many ops it runs at a time (default: TensorFlow's choice).

    Raises
    ------
    LaunchError
        With TensorFlow's own words.
    StateError
        Too many servers that cannot be stopped run in this process.
    """
    if role not in _STARTERS:
        raise StateError(f"there is no server for the role {role}")
    try:
        return _STARTERS[role](port, settings)
    except TfdError:
        raise
    except Exception as error:
        raise LaunchError(
            f"TensorFlow could not start the {role}: {error}",
            fix="see the task's log",
        ) from error
