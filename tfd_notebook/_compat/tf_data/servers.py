"""Starts and stops TensorFlow's tf.data servers without crashes and deadlocks."""

from __future__ import annotations

import ctypes
import os
import sysconfig
from collections.abc import Mapping
from typing import Any

_STOP = "_ZN10tensorflow4data18GrpcDataServerBase4StopEv"
_VTABLES = {
    "DispatchGrpcDataServer": "_ZTVN10tensorflow4data22DispatchGrpcDataServerE",
    "WorkerGrpcDataServer": "_ZTVN10tensorflow4data20WorkerGrpcDataServerE",
}
_LIBRARIES = ("libtensorflow_cc.so.2", "libtensorflow_cc.2.dylib")


def dispatcher(fields: Mapping[str, Any]) -> Any:
    """Return a ``DispatchServer`` that was not started, from the fields of its configuration."""
    from tensorflow.data.experimental import service

    return service.DispatchServer(config_message(service.DispatcherConfig, fields), start=False)


def data_worker(fields: Mapping[str, Any]) -> Any:
    """Return a ``WorkerServer`` that was not started, from the fields of its configuration."""
    from tensorflow.data.experimental import service

    return service.WorkerServer(config_message(service.WorkerConfig, fields), start=False)


def config_message(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Return the message of a server's configuration, with the defaults of its class `kind`.

    The classes lack some fields of the messages, such as ``gc_dynamic_sharding_jobs``.
    """
    from tensorflow.core.protobuf import service_config_pb2

    config = kind(**{name: value for name, value in fields.items() if name in kind._fields})
    defaults = {name: value for name, value in config._asdict().items() if value}
    return getattr(service_config_pb2, kind.__name__)(**{**defaults, **fields})


def start(server: Any) -> Any:
    """Start a ``DispatchServer`` or ``WorkerServer`` created with ``start=False``, and return it.

    If the start fails, the C++ server is leaked on purpose. Its destructor would stop parts that
    do not exist, and end the process with SIGSEGV.
    """
    try:
        server.start()
    except BaseException:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(server._server))
        raise
    return server


def stop(server: Any) -> None:
    """Stop a ``DispatchServer`` or ``WorkerServer``, and wait until it has stopped.

    TensorFlow's ``_stop`` holds the GIL while it waits for the current elements. A Python
    function of such an element waits for the GIL, which is a deadlock. Therefore the same C++
    method is called without the GIL if possible.
    """
    call = unlocked_stop(server._server)
    if call is None:
        server._stop()
    else:
        call()


def is_readable(native: Any) -> bool:
    """Return True if pybind11 stores the C++ object where `unlocked_stop` reads it.

    Builds without the GIL and other binding generators have a different layout.
    """
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return False
    return type(type(native)).__name__ == "pybind11_type"


def unlocked_stop(native: Any) -> Any:
    """Return a callable that stops the C++ server without the GIL, or None."""
    import tensorflow as tf

    if not is_readable(native):
        return None
    for name in _LIBRARIES:
        path = os.path.join(tf.sysconfig.get_lib(), name)
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            method = getattr(library, _STOP)
            table = ctypes.c_char.in_dll(library, _VTABLES[type(native).__name__])
        except (OSError, AttributeError, KeyError, ValueError):
            continue
        # pybind11 stores the pointer to the C++ object after the head of the Python object. The
        # C++ object begins with the method table of its class, which confirms its type.
        pointer = ctypes.c_void_p.from_address(id(native) + object.__basicsize__).value
        methods = ctypes.addressof(table) + 2 * ctypes.sizeof(ctypes.c_void_p)
        if pointer and ctypes.c_void_p.from_address(pointer).value == methods:
            method.argtypes, method.restype = [ctypes.c_void_p], None
            return lambda: method(pointer)
    return None
