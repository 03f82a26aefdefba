"""What this process has connected to so far: TensorFlow never lets go of any of it."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfd_notebook.errors import StateError, Unsupported
from tfd_notebook.net import ports

#: Each connection keeps about 40 MB, 89 threads and a listening port until the process ends.
_WARN_AFTER = 5
_MOST = 15
#: Seconds for a coordinator that was stopped to find the worker that it had lost.
_CALM_SECONDS = 20.0
_lock = threading.Lock()
_count = 0
#: The last connection whose `arrival` was handled, and the port of the last that was counted.
_seen: Any = None
_port: int | None = None
#: Whether the next connection is counted already.
_counted = False


def require() -> None:
    """Check that this TensorFlow has the internals that a coordinator uses.

    Raises
    ------
    Unsupported
        It lacks one.
    """
    try:
        from tfd_notebook.coordinator import coordinator  # noqa: F401
    except (ImportError, AttributeError) as error:
        import tensorflow as tf

        raise Unsupported(
            f"TensorFlow {tf.__version__} cannot be coordinated from here: {error}",
            fix="use TensorFlow 2.15 to 2.21",
        ) from error


def await_readers() -> None:
    """Wait for threads that run TensorFlow operations; call this before anything is changed.

    Raises
    ------
    StateError
        An operation does not end; the error names its thread.
    """
    from tfd_notebook._compat.tf_coordinator import thread_parking

    with thread_parking.parked():
        pass


def prepare(spec: Mapping[str, Sequence[str]]) -> None:
    """Check that this process can connect to the cluster `spec` now, and count the connection.

    Raises
    ------
    StateError
        An earlier coordinator still waits for a worker that was lost, or there were too many
        connections.
    """
    from tfd_notebook._compat.tf_coordinator import connection

    if not connection.await_stopped(_CALM_SECONDS):
        raise StateError(
            "TensorFlow still waits for a worker that an earlier cluster of this process "
            "lost, and cannot connect meanwhile",
            fix="restart the kernel",
        )
    if connection.address_in(spec) is None:
        record_connection()


def hide_gpus_from_kernel() -> bool:
    """Leave the GPUs of this host to the tasks; False where this process has them already."""
    import tensorflow as tf

    try:
        tf.config.set_visible_devices([], "GPU")
    except RuntimeError:  # it is too late: their memory is taken when TensorFlow begins
        return False
    return True


def close(allow: Iterable[str], host: str | None = None) -> None:
    """Close the port of this process's server to hosts outside the cluster.

    `host` is the host name in all task addresses, or None if they differ.
    """
    from tfd_notebook._compat.tf_coordinator import connection

    port = connection.server_port()
    if port is not None:
        ports.restrict_port(port, allow, host)


def record_connection() -> None:
    """Count a connection to a cluster; to be called before it is made.

    Raises
    ------
    StateError
        There were too many.
    """
    global _counted
    with _lock:
        if _count >= _MOST:
            raise StateError(
                f"this process has connected to clusters {_count} times, and TensorFlow keeps "
                "40 MB, 89 threads and a port of each",
                fix="restart the kernel",
            )
        _counted = True
        _add()


@contextlib.contextmanager
def new_connection_event() -> Iterator[bool]:
    """Yield whether the connection of this process is new, and count it if it is not counted yet.

    It stays new until a block ends without an error: what failed is tried again.
    """
    global _seen, _port, _counted
    from tfd_notebook._compat.tf_coordinator import connection

    with _lock:
        present, port = connection.connection(), connection.server_port()
        is_new, is_elsewhere = present is not _seen, port != _port
        _port = port
        if is_elsewhere:
            counted, _counted = _counted, False
            if not counted:
                _add()
    yield is_new
    with _lock:
        _seen = present


def _add() -> None:
    global _count
    _count += 1
    if _count > _WARN_AFTER:
        warnings.warn(
            f"this is connection {_count} of this process; TensorFlow keeps 40 MB, 89 threads "
            f"and a port of each, and after {_MOST} none more is made: restart the kernel soon",
            ResourceWarning,
            stacklevel=5,
        )
