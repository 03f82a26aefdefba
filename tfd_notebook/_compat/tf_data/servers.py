"""Starting and stopping TensorFlow's tf.data servers without a crash or a frozen interpreter."""

from __future__ import annotations

import ctypes
import os
import sysconfig
from typing import Any

_STOP = "_ZN10tensorflow4data18GrpcDataServerBase4StopEv"
_VTABLES = {
    "DispatchGrpcDataServer": "_ZTVN10tensorflow4data22DispatchGrpcDataServerE",
    "WorkerGrpcDataServer": "_ZTVN10tensorflow4data20WorkerGrpcDataServerE",
}
_LIBRARIES = ("libtensorflow_cc.so.2", "libtensorflow_cc.2.dylib")


def start(server: Any) -> Any:
    """Start a ``DispatchServer`` or ``WorkerServer`` made with ``start=False``, and return it.

    If the start fails, the C++ server is leaked: its destructor stops parts that were never made,
    and ends the process with SIGSEGV.
    """
    try:
        server.start()
    except BaseException:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(server._server))
        raise
    return server


def stop(server: Any) -> None:
    """Stop a ``DispatchServer`` or ``WorkerServer``, and return when it has stopped.

    TensorFlow's own ``_stop`` holds the interpreter's lock while it waits for the elements in
    work; where one of them waits for that lock in a Python function, nothing ever moves again.
    So the same C++ method is called without the lock, where it can be found.
    """
    call = unlocked_stop(server._server)
    if call is None:
        server._stop()
    else:
        call()


def port_of(server: Any) -> int:
    """Return the port of a ``DispatchServer`` or ``WorkerServer``."""
    return int(server._address.rpartition(":")[2])


def is_readable(native: Any) -> bool:
    """Return True if pybind11 keeps the C++ object where `unlocked_stop` reads it.

    Builds without the GIL and other binding generators have another layout.
    """
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return False
    return type(type(native)).__name__ == "pybind11_type"


def unlocked_stop(native: Any) -> Any:
    """Return a callable that stops the C++ server without the lock, None if there is no way."""
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
        # pybind11 keeps the pointer to its C++ object right behind the head of the Python object;
        # the object begins with its class's table of methods, which proves that it is the one.
        pointer = ctypes.c_void_p.from_address(id(native) + object.__basicsize__).value
        methods = ctypes.addressof(table) + 2 * ctypes.sizeof(ctypes.c_void_p)
        if pointer and ctypes.c_void_p.from_address(pointer).value == methods:
            method.argtypes, method.restype = [ctypes.c_void_p], None
            return lambda: method(pointer)
    return None
