"""TensorFlow's servers, made from JSON settings: what a task is once it has started."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from tfd_notebook._compat import servers as compat
from tfd_notebook.errors import LaunchError, StateError
from tfd_notebook.spec import Role


class Server(ABC):
    """A running server of TensorFlow in this process.

    Attributes
    ----------
    port : int
        Where it listens.
    """

    port: int

    @abstractmethod
    def stop(self, timeout: float | None) -> bool:
        """Stop serving; False if it did not stop within `timeout` seconds. Goes on stopping."""


class _DataServer(Server):
    """A dispatcher or data worker of the tf.data service."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._stopping: threading.Thread | None = None
        self.port = int(server._address.rsplit(":", 1)[1])

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

    config = service.DispatcherConfig(port=port, **settings)
    return _DataServer(service.DispatchServer(config))


def _data_worker(port: int, settings: Mapping[str, Any]) -> Server:
    from tensorflow.data.experimental import service

    config = service.WorkerConfig(port=port, **settings)
    return _DataServer(service.WorkerServer(config))


_STARTERS = {Role.DISPATCHER: _dispatcher, Role.DATA_WORKER: _data_worker}


def start(role: Role, port: int, settings: Mapping[str, Any]) -> Server:
    """Start the server of a task in this process.

    Parameters
    ----------
    role : Role
    port : int
        TCP port to listen at, 0 for a free one.
    settings : mapping
        Fields of ``tf.data.experimental.service.DispatcherConfig`` or ``WorkerConfig``.

    Raises
    ------
    LaunchError
        With TensorFlow's own words.
    """
    if role not in _STARTERS:
        raise StateError(f"there is no server for the role {role}")
    try:
        return _STARTERS[role](port, settings)
    except Exception as error:
        raise LaunchError(
            f"TensorFlow could not start the {role}: {error}",
            fix="see the task's log",
        ) from error
