"""Connections of this process to clusters. TensorFlow never releases their resources."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfd_notebook.data.variable_names import variable_of
from tfd_notebook.errors import FilterFailed, StateError, Unsupported
from tfd_notebook.net import ports

#: Each connection keeps about 40 MB, 89 threads and a listening port until the process ends.
_WARN_AFTER = 5
_MAX_CONNECTIONS = 15
#: Seconds to wait until a stopped coordinator no longer waits for a worker that it had lost.
_STOP_SECONDS = 20.0
#: Interval in seconds to check if the server of a new connection listens.
_POLL_SECONDS = 0.01
_lock = threading.Lock()
_count = 0
#: The last connection that `consume_new_connection` handled, and the port of the last counted one.
_last_connection: Any = None
_last_port: int | None = None
#: Whether `record_connection` has already counted the next connection.
_counted = False


def require() -> None:
    """Check that this TensorFlow has the internals that a coordinator uses.

    Raises
    ------
    Unsupported
        An internal is missing.
    """
    try:
        # Imports TensorFlow.
        from tfd_notebook.coordinator import coordinator  # noqa: F401
    except (ImportError, AttributeError) as error:
        import tensorflow as tf

        raise Unsupported(
            f"the coordinator does not support TensorFlow {tf.__version__}: {error}",
            fix="use TensorFlow 2.15 to 2.21",
        ) from error


def await_readers() -> None:
    """Wait for threads that run TensorFlow operations. Call this before changing any state.

    A warning names loaded SavedModels that workers cannot use after the connection.

    Raises
    ------
    StateError
        An operation does not end, and the error names its thread. Or this process has an object
        that a connection would delete, and the error names its variable.
    """
    # Imports TensorFlow.
    from tfd_notebook._compat.tf_coordinator import tables, thread_parking

    with thread_parking.parked():
        tables.read(thread_parking.own_job(), lambda owner: variable_of(owner, ""))
        loaded = tables.loaded_with_variables()
    names = {repr(name) if (name := variable_of(each, "")) else "a SavedModel" for each in loaded}
    if names:
        warnings.warn(
            f"workers cannot use the variables of {', '.join(sorted(names))}, which this process "
            "loaded before it connected. Next: call tf.saved_model.load in strategy.scope()",
            RuntimeWarning,
            stacklevel=4,
        )


def prepare(spec: Mapping[str, Sequence[str]]) -> None:
    """Check that this process can connect to the cluster `spec` now, and count the connection.

    Raises
    ------
    StateError
        An earlier coordinator still waits for a lost worker, or this process has connected too
        often.
    """
    # Imports TensorFlow.
    from tfd_notebook._compat.tf_coordinator import connection

    if not connection.await_stopped(_STOP_SECONDS):
        raise StateError(
            "connecting failed: TensorFlow still waits for a lost worker of an earlier cluster of "
            "this process",
            fix="restart the kernel",
        )
    if connection.address_in(spec) is None:
        record_connection()


def hide_gpus_from_kernel() -> bool:
    """Hide the GPUs of this host from this process. Return False if it already uses them."""
    import tensorflow as tf

    try:
        tf.config.set_visible_devices([], "GPU")
    except RuntimeError:  # TensorFlow allocates GPU memory at its initialization
        return False
    return True


def close(allow: Iterable[str], host: str | None = None) -> None:
    """Close the port of this process's server to hosts outside the cluster.

    `host` is the host name in all task addresses, or None if they differ.

    Raises
    ------
    FilterFailed
        The port cannot be closed to other hosts. The server no longer listens, then.
    """
    # Imports TensorFlow.
    from tfd_notebook._compat.tf_coordinator import connection

    port = connection.server_port()
    if port is None:
        return
    try:
        ports.restrict_port(port, allow, host)
    except BaseException as error:  # also Ctrl-C: the server must not listen without a filter
        listened = ports.stop_listening(port)
        if isinstance(error, FilterFailed):
            # TensorFlow keeps the server for the same cluster, and starts one for another cluster.
            restart = "restart the kernel, or stop this cluster and create a new one"
            error.fix = f"{error.fix}. Then {restart}" if listened else restart
            error.what += ". The port was closed" if listened else ": the port was closed earlier"
        raise


@contextlib.contextmanager
def closing(allow: Iterable[str], host: str | None = None) -> Iterator[None]:
    """Close the port of the server that TensorFlow starts in this block, as soon as it listens.

    TensorFlow waits in the block for tasks that do not respond. Another thread closes the port,
    because TensorFlow releases the GIL then. See `close` for the parameters.

    Raises
    ------
    FilterFailed
        The port cannot be closed to other hosts. The server has not listened since then.
    """
    # Imports TensorFlow.
    from tfd_notebook._compat.tf_coordinator import connection

    before = connection.connection()
    ended = threading.Event()
    errors: list[BaseException] = []

    def close_soon() -> None:
        is_last = False
        while not is_last:
            is_last = ended.wait(_POLL_SECONDS)
            if connection.connection() is before:
                continue
            port = connection.server_port()
            if port is not None and ports.listening_fds(port):
                try:
                    close(allow, host)
                except BaseException as error:
                    errors.append(error)
                return

    thread = threading.Thread(target=close_soon, name="tfd-coordinator-port", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if errors:
            raise errors[0]


def open_port() -> int | None:
    """Return the port of this process's server if it has no filter (Linux), else None."""
    # Without an import: it changes TensorFlow's strategies.
    connection = sys.modules.get("tfd_notebook._compat.tf_coordinator.connection")
    port: int | None = None if connection is None else connection.server_port()
    return port if port is not None and ports.is_open(port) else None


def record_connection() -> None:
    """Count a connection to a cluster. Call this before connecting.

    Raises
    ------
    StateError
        This process has connected too often.
    """
    global _counted
    with _lock:
        if _count >= _MAX_CONNECTIONS:
            raise StateError(
                f"connecting failed: this process has connected to clusters {_count} times, and "
                "TensorFlow keeps 40 MB, 89 threads and a port for each",
                fix="restart the kernel",
            )
        _counted = True
        _increment()


@contextlib.contextmanager
def consume_new_connection() -> Iterator[bool]:
    """Yield True if the connection of this process is new, and count it if not counted yet.

    It stays new until a block ends without an error, so that failed work is retried.
    """
    global _last_connection, _last_port, _counted
    # Imports TensorFlow.
    from tfd_notebook._compat.tf_coordinator import connection

    with _lock:
        present, port = connection.connection(), connection.server_port()
        is_new, is_new_port = present is not _last_connection, port != _last_port
        _last_port = port
        if is_new_port:
            counted, _counted = _counted, False
            if not counted:
                _increment()
    yield is_new
    with _lock:
        _last_connection = present


def _increment() -> None:
    global _count
    _count += 1
    if _count > _WARN_AFTER:
        warnings.warn(
            f"this is connection {_count} of this process; TensorFlow keeps 40 MB, 89 threads "
            f"and a port for each. The maximum is {_MAX_CONNECTIONS}: restart the kernel soon",
            ResourceWarning,
            stacklevel=5,
        )
