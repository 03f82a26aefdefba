"""The fork server: a process with TensorFlow imported, from which tasks are forked in milliseconds.

It has a single thread (asserted), opens no channel and runs no op, so that a fork is safe. A task
is forked twice. The process in between exits at once. The task becomes a child of the agent, which
is a child subreaper. The agent is therefore notified of the task's end. A fork server can be ended
or replaced while its tasks run.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import random
import re
import signal
import socket
import struct
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfd_notebook.errors import LaunchError, TensorFlowMissing
from tfd_notebook.net.process_control import end_with_parent

_LENGTH = struct.Struct("!Q")
#: Limit of a request, in bytes.
_MAX_REQUEST_BYTES = 1 << 32
_MADV_DONTNEED = 4


def packed(request: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return `request` as a header, with which descriptors are sent, and a body."""
    body = json.dumps(request).encode()
    return _LENGTH.pack(len(body)), body


def send_request(channel: socket.socket, request: dict[str, Any], fds: list[int]) -> None:
    """Send `request` with file descriptors to a fork server."""
    head, body = packed(request)
    socket.send_fds(channel, [head], fds)
    channel.sendall(body)


def receive_request(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next request with its file descriptors, or None at the end.

    Raises
    ------
    OSError
        The connection broke, or the request is invalid.
    """
    head, fds, _, _ = socket.recv_fds(channel, _LENGTH.size, 2)
    if not head:
        return None
    try:
        head += _receive_exactly(channel, _LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        if length > _MAX_REQUEST_BYTES:
            raise ConnectionAbortedError("invalid request: too long")
        return _read_request(_receive_exactly(channel, length)), list(fds)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _receive_exactly(channel: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        chunk = channel.recv(min(1 << 20, size - len(received)))
        if not chunk:
            raise ConnectionResetError("the connection ended in the middle of a request")
        received += chunk
    return bytes(received)


def _read_request(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        raise ConnectionAbortedError("invalid request: expected a JSON object")
    return request


def double_fork(work: Callable[[], None]) -> int:
    """Run `work` in a process that is not a child of this one; return its pid."""
    read, write = os.pipe()
    intermediate = os.fork()
    if intermediate == 0:
        try:
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    os.close(read)
                    os.close(write)
                    work()
                    status = 0
                finally:
                    os._exit(status)
            os.write(write, b"%d" % pid)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(intermediate, 0)
    return int(answer)


def set_up_process(request: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Set the environment, directory and import path of a task, and seed the random generators.

    Raises
    ------
    LaunchError
        The directory does not exist, or cannot be entered.
    """
    os.environ.clear()
    os.environ.update(environment)
    try:
        os.chdir(request["directory"])
    except OSError as error:
        raise LaunchError(
            f"entering the working directory failed: {error}",
            task=request["name"],
            fix="change to a directory that exists before the cluster starts",
        ) from None
    sys.path[:] = request["path"]
    importlib.invalidate_caches()
    # Forked processes share the state of random generators: all would shuffle and augment alike.
    random.seed()
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed()


def _fork_task(channel: socket.socket, request: dict[str, Any], fds: list[int]) -> int:
    """Fork the task that `request` describes; return its pid."""

    def work() -> None:
        # Import time: only the fork server needs it, not the agent, which imports this module.
        from tfd_notebook.agent import task_process

        channel.close()
        task_process.run(request, socket.socket(fileno=fds[0]), fds[1])

    pid = double_fork(work)
    for fd in fds:
        os.close(fd)
    return pid


def main() -> None:
    """Serve fork requests until the agent closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # During the import of TensorFlow this process does not notice the end of the channel.
    end_with_parent(int(os.environ["TFD_FORK_OWNER"]))
    channel = socket.socket(fileno=int(os.environ["TFD_FORK_FD"]))
    imported = import_tensorflow("tfd_notebook.agent.task_process")
    send_reply(channel, imported)
    if "error" not in imported:
        while (received := receive_request(channel)) is not None:
            send_reply(channel, {"pid": _fork_task(channel, *received)})


def import_tensorflow(*modules: str) -> dict[str, Any]:
    """Import TensorFlow, and these modules, for the processes that are forked from this one.

    Returns
    -------
    dict
        ``tensorflow``, ``threads`` and ``seconds``; or ``error``, the reason of a failed import.
    """
    began = time.monotonic()
    gc.disable()  # garbage collection takes a fifth of the import time
    try:
        # Keras imports scikit-learn for its wrappers, which takes a fifth of the import time.
        with blocked_imports("pyarrow", "sklearn"):
            import tensorflow as tf

            for module in modules:
                importlib.import_module(module)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    _import_wrappers_on_use()
    gc.freeze()
    gc.enable()
    release_clean_pages()
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
    return {
        "tensorflow": getattr(tf, "__version__", ""),
        "threads": threads,
        "seconds": time.monotonic() - began,
    }


def check_import(imported: Mapping[str, Any], install_fix: str, threads_fix: str) -> None:
    """Raise an error if TensorFlow is missing, or if its import started threads.

    Parameters
    ----------
    imported : mapping
        The result of `import_tensorflow`.
    install_fix, threads_fix : str
        The next steps of the two errors.

    Raises
    ------
    TensorFlowMissing, LaunchError
    """
    if "error" in imported:
        raise TensorFlowMissing(
            f"TensorFlow cannot be imported: {imported['error']}", fix=install_fix
        )
    if imported["threads"] != 1:
        raise LaunchError(
            f"the import of TensorFlow has started {imported['threads'] - 1} threads, which a "
            "fork would lose",
            fix=threads_fix,
        )


def _import_wrappers_on_use() -> None:
    """Replace Keras's wrappers of scikit-learn with modules that are imported at first use.

    They were imported without scikit-learn.
    """
    keras = {name: m for name, m in sys.modules.items() if name.partition(".")[0] == "keras"}
    for name, imported in keras.items():
        spec = imported.__spec__
        if "wrappers" in name.split(".") and spec is not None and spec.loader is not None:
            module = sys.modules[name] = _ModuleOnUse(name)
            _LOCKS[name] = threading.RLock()
            # The attributes that the import system sets, which code that lists modules reads.
            vars(module).update(
                {key: value for key, value in vars(imported).items() if key in _SET}
            )
            attribute = name.rpartition(".")[2]
            for other in keras.values():
                if vars(other).get(attribute) is imported:
                    setattr(other, attribute, module)


#: Attributes of a module that are set before its code runs.
_SET = ("__file__", "__cached__", "__loader__", "__package__", "__path__", "__spec__")


#: The locks of modules that are imported at first use, by name.
_LOCKS: dict[str, threading.RLock] = {}


class _ModuleOnUse(types.ModuleType):
    """A module whose code runs when one of its names is read for the first time.

    The attributes of the import system are there before. Code that lists ``sys.modules``, like
    `inspect.getmodule`, runs a module of `importlib.util.LazyLoader`, but not this one.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        with _LOCKS[self.__name__]:
            # The code of the module reads its names too, in `from .name import ...`.
            if type(self) is _ModuleOnUse and not self.__dict__.get("_runs"):
                self.__dict__["_runs"] = True
                try:
                    self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
                    self.__class__ = types.ModuleType  # type: ignore[assignment]
                finally:
                    del self.__dict__["_runs"]
        return object.__getattribute__(self, name)


@contextlib.contextmanager
def blocked_imports(*names: str) -> Iterator[None]:
    """Prevent the import of these modules and of pandas; a task imports them on demand.

    Keras imports pandas if it is installed, pandas imports pyarrow, and pyarrow starts threads,
    which a fork would lose. Keras gets placeholders for the two pandas classes that it uses. They
    recognize real pandas objects once a task has imported pandas. A Keras wrapper that
    is imported here does not use the blocked module.
    """
    pandas = types.ModuleType("pandas")
    pandas.__dict__.update(
        {name: _PandasPlaceholder(name, (), {}) for name in ("DataFrame", "Series")}
    )
    pandas.__spec__ = importlib.util.find_spec("pandas")
    blocked = {**dict.fromkeys(names), "pandas": pandas if pandas.__spec__ else None}
    blocked = {name: module for name, module in blocked.items() if name not in sys.modules}
    sys.modules.update(blocked)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in blocked:
            del sys.modules[name]


class _PandasPlaceholder(type):
    """A placeholder for a class of pandas, which a task may import later."""

    def __instancecheck__(cls, instance: Any) -> bool:
        kind = getattr(sys.modules.get("pandas"), cls.__name__, cls)
        return kind is not cls and isinstance(instance, kind)


def release_clean_pages() -> None:
    """Unmap the unchanged pages of libraries that the import has read, hundreds of megabytes.

    The system keeps these pages in its cache. A task maps those that it uses; this process uses
    few.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/smaps") as smaps:
        regions = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps.read(), flags=re.M)
    for region in regions:
        mapping = re.match(r"(\w+)-(\w+) r-[-x]p \w+ \S+ (?!0 )\d+ ", region)
        # Pages changed by relocation must stay: their content would be lost.
        if mapping and re.search(r"^Anonymous: +0 kB", region, re.M):
            start, end = int(mapping[1], 16), int(mapping[2], 16)
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def send_reply(channel: socket.socket, message: Mapping[str, Any]) -> None:
    """Send the reply to a request."""
    channel.sendall(json.dumps(message).encode() + b"\n")
