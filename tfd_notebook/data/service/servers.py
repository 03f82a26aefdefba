"""A dispatcher and data workers that run in this process.

`Dispatcher` corresponds to ``tf.data.experimental.service.DispatchServer``, `DataWorker` to
``WorkerServer``. Each method works in each state, or raises an error that names the fix. Each
error is also a ``tf.errors.OpError``. A port is never shared with another server. Every wait ends.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

from tfd_notebook.agent import tf_servers
from tfd_notebook.agent.work_dir import check_usable
from tfd_notebook.data.op_errors import as_op_errors
from tfd_notebook.errors import FilterFailed, LaunchError, StateError, TimeLimit, UsageError
from tfd_notebook.model.handle import Handle
from tfd_notebook.model.spec import Role, check_count, check_protocol, check_seconds, check_timeout
from tfd_notebook.net.ports import reserve_port
from tfd_notebook.net.probe import dispatcher_workers, probe

_STOP_SECONDS = 10.0
_FINALIZER_SECONDS = 2.0
_PROBE_SECONDS = 5.0


class _Server(Handle, ABC):
    """Common base of both servers."""

    _role: ClassVar[Role]

    def __init__(self, config: Any, start: bool, allow: Iterable[str]) -> None:
        port = check_count("port", config.port or 0, 65535)
        check_protocol(config)
        self._allow = tuple(allow)
        reserved = reserve_port(port)
        self._port = reserved.getsockname()[1]
        self._config = config._replace(port=self._port)
        self._lock = threading.Lock()
        self._server = tf_servers.Server(self._role, self._port, reserved)
        # This also runs at exit, while the server's threads can still run Python functions.
        self._finalizer = weakref.finalize(self, self._server.stop, _FINALIZER_SECONDS)
        if start:
            try:
                self.start()
            except BaseException:
                self._finalizer()
                raise

    @property
    def target(self) -> str:
        """The address with its protocol, ``"grpc://localhost:port"``. Known before the start."""
        return f"{self._config.protocol}://{self.address}"

    @property
    def address(self) -> str:
        """The address, ``"localhost:port"``."""
        return f"localhost:{self._port}"

    @property
    def state(self) -> str:
        """``"planned"`` before the start, ``"ready"``, or ``"stopped"``."""
        if not self._finalizer.alive:
            return "stopped"
        return "ready" if self._server.running else "planned"

    @property
    def open_to(self) -> str:
        """Peers that can connect. Empty unless the server runs.

        ``"loopback"``, a list of networks, ``"everyone"`` or ``"unknown: why"``.
        """
        return self._server.open_to if self.state == "ready" else ""

    @property
    def _name(self) -> str:
        return f"{self._role} at {self.address}".replace("_", " ", 1)

    @as_op_errors()
    def start(self) -> None:
        """Start the server. No-op if it runs.

        Raises
        ------
        StateError
            The server was stopped. TensorFlow's servers start only once.
        WorkDirError
            The dispatcher's ``work_dir`` cannot be used.
        FilterFailed
            Its port cannot be closed to other hosts. The server was stopped.
        LaunchError
            The server did not start, or a worker's dispatcher does not answer.
        """
        with self._lock:
            if self.state == "stopped":
                raise StateError(
                    f"the {self._name} was stopped",
                    fix=f"create a new {type(self).__name__}",
                )
            if self.state == "ready":
                return
            self._check()
            try:
                self._server.start(self._config._asdict(), self._allow, "localhost")
            except (FilterFailed, KeyboardInterrupt):
                self._finalizer()
                raise

    @as_op_errors()
    def stop(self, timeout: float = _STOP_SECONDS) -> None:
        """Stop the server and release its port. No-op if it is stopped.

        Parameters
        ----------
        timeout : float
            Seconds to wait. Default 10.

        Raises
        ------
        TimeLimit
            The server still runs. It stops when its current elements are complete. TensorFlow's
            autotuning thread can delay that by up to 60 s if it misses the end of an iterator. Or
            another thread is still starting the server.
        StateError
            TensorFlow cannot stop the server.
        UsageError
            An invalid `timeout`.
        """
        check_seconds("timeout", timeout, 0)
        if not self._lock.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            raise TimeLimit(
                f"the {self._name} is still starting after {timeout:g} s",
                fix="call stop() again when start() has ended",
            )
        try:
            self._finalizer.detach()
        finally:
            self._lock.release()
        if not self._server.stop(timeout):
            self._raise_failure()
            raise TimeLimit(
                f"the {self._name} is still stopping after {timeout:g} s",
                fix="call join() to wait for it; TensorFlow's autotuning thread can delay the stop "
                "by up to 60 s",
            )

    @as_op_errors()
    def join(self, timeout: float | None = None) -> None:
        """Wait until the server has stopped. Ctrl-C ends the wait, not the server.

        Parameters
        ----------
        timeout : float, optional
            Seconds. Default: no timeout.

        Raises
        ------
        StateError
            The server was never started, or TensorFlow cannot stop it.
        TimeLimit
            The server still runs after `timeout` seconds.
        UsageError
            An invalid `timeout`.
        """
        check_timeout(timeout)
        if self.state == "planned":
            raise StateError(f"the {self._name} was not started", fix="call start() first")
        if not self._server.join(timeout):
            raise TimeLimit(f"the {self._name} still runs after {timeout:g} s", fix="call stop()")
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise the error of a stop that failed, if any."""
        if (failure := self._server.failure) is not None:
            raise StateError(
                f"stopping the {self._name} failed: {failure}",
                fix="restart the kernel to end it, or use another port",
            ) from failure

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.target} {self.state}>"

    @abstractmethod
    def _check(self) -> None:
        """Raise an error for conditions under which TensorFlow would hang or fail silently."""


def _check_kind(config: Any, kind: type) -> None:
    if not isinstance(config, kind):
        raise UsageError(
            f"invalid config={config!r}: expected a {kind.__name__}",
            fix=f"use tf.data.experimental.service.{kind.__name__}",
        )


class Dispatcher(_Server):
    """A tf.data service dispatcher in this process.

    It stops with `stop`, when the last reference to it is deleted, and when the interpreter exits.
    Its port is closed to other hosts.

    Parameters
    ----------
    config : tf.data.experimental.service.DispatcherConfig, optional
        Default: a free port, no journal. As in a `Cluster`, epochs that no consumer has read for 30
        minutes are discarded, unless ``job_gc_timeout_ms`` is set.
    start : bool
        Whether to start the server at once. Default true. The port is reserved and `target` is
        known in either case.
    allow : iterable of str
        Networks in CIDR form that may connect in addition to this host. Default: none.

    Raises
    ------
    PortInUse
        Another process uses the port. The error names it.
    UsageError
        ``fault_tolerant_mode`` without ``work_dir``, or an invalid port.
    WorkDirError, LaunchError
        See `start`.

    See Also
    --------
    tf.data.experimental.service.DispatchServer
    """

    _role = Role.DISPATCHER

    @as_op_errors()
    def __init__(
        self, config: Any = None, start: bool = True, *, allow: Iterable[str] = ()
    ) -> None:
        from tensorflow.data.experimental.service import DispatcherConfig

        config = DispatcherConfig() if config is None else config
        _check_kind(config, DispatcherConfig)
        if config.fault_tolerant_mode and not config.work_dir:
            raise UsageError(
                "fault_tolerant_mode needs a directory for the journal", fix="also set work_dir"
            )
        super().__init__(config, start, allow)

    @property
    @as_op_errors()
    def workers(self) -> tuple[str, ...]:
        """Addresses of all data workers that have registered. Empty unless the server runs.

        Raises
        ------
        DispatcherLost, TimeLimit
            The server does not answer.
        """
        if self.state != "ready":
            return ()
        return dispatcher_workers(self.address, timeout=_PROBE_SECONDS)

    def _check(self) -> None:
        if self._config.work_dir:
            check_usable(self._config.work_dir)


class DataWorker(_Server):
    """A tf.data service worker in this process.

    Parameters
    ----------
    config : tf.data.experimental.service.WorkerConfig
        ``dispatcher_address`` is ``"host:port"``, as in TensorFlow.
    start : bool
        Whether to start the server at once. Default true.
    allow : iterable of str
        Networks in CIDR form that may connect in addition to this host. Default: none.

    Raises
    ------
    PortInUse
        Another process uses the port. The error names it.
    UsageError
        No ``dispatcher_address``, or an invalid port.
    LaunchError
        See `start`.

    See Also
    --------
    tf.data.experimental.service.WorkerServer
    """

    _role = Role.DATA_WORKER

    @as_op_errors()
    def __init__(self, config: Any, start: bool = True, *, allow: Iterable[str] = ()) -> None:
        from tensorflow.data.experimental.service import WorkerConfig

        _check_kind(config, WorkerConfig)
        if not config.dispatcher_address:
            raise UsageError(
                "a data worker needs a dispatcher",
                fix="set dispatcher_address to dispatcher.address",
            )
        super().__init__(config, start, allow)

    def _check(self) -> None:
        # TensorFlow would wait for the dispatcher inside the constructor and block the GIL.
        address = self._config.dispatcher_address
        result = probe(address, _PROBE_SECONDS, via_proxy=True, expect="dispatcher")
        if result.alive and result.kind == "dispatcher":
            return
        direct = probe(address, _PROBE_SECONDS, expect="dispatcher")
        if direct.alive and direct.kind == "dispatcher":
            raise LaunchError(
                f"the dispatcher at {address} answers, but not through the proxy that "
                f"TensorFlow takes from http_proxy: {result.reason}",
                fix=f"add {address.rpartition(':')[0]} to the environment variable no_proxy",
            )
        what = result.reason or f"a {(result.kind or 'server').replace('_', ' ')} answers"
        raise LaunchError(
            f"no dispatcher at {address}: {what}",
            fix="start the dispatcher first, and pass its address",
        )
