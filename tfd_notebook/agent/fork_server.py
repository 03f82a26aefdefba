"""A process that has imported TensorFlow and run nothing: tasks are forked from it in milliseconds.

It holds a single thread (asserted), opens no channel and starts no op, so that a fork of it is
safe. A task is forked twice: the process in between ends at once, and the task becomes the child
of the agent (a child subreaper), which thereby learns of its end and outlives no task. Thus a fork
server can end, or be replaced, without its tasks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import re
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

_LENGTH = struct.Struct("!Q")
#: Bytes of a request.
_MOST_REQUEST = 1 << 32
_PR_SET_PDEATHSIG = 1
_MADV_DONTNEED = 4


def packed(request: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return `request` as a head, with which descriptors are sent, and a body."""
    body = json.dumps(request).encode()
    return _LENGTH.pack(len(body)), body


def send_request(channel: socket.socket, request: dict[str, Any], fds: list[int]) -> None:
    """Send `request` with file descriptors to a fork server."""
    head, body = packed(request)
    socket.send_fds(channel, [head], fds)
    channel.sendall(body)


def receive_request(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next request with its file descriptors, None at the end.

    Raises
    ------
    OSError
        The connection broke, or what arrived is no request.
    """
    head, fds, _, _ = socket.recv_fds(channel, _LENGTH.size, 2)
    if not head:
        return None
    try:
        head += _take(channel, _LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        if length > _MOST_REQUEST:
            raise ConnectionAbortedError("what arrived is no request")
        return _read_request(_take(channel, length)), list(fds)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _take(channel: socket.socket, size: int) -> bytes:
    taken = bytearray()
    while len(taken) < size:
        chunk = channel.recv(min(1 << 20, size - len(taken)))
        if not chunk:
            raise ConnectionResetError("the connection ended in the middle of a request")
        taken += chunk
    return bytes(taken)


def _read_request(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        raise ConnectionAbortedError("what arrived is no request")
    return request


def double_fork(work: Callable[[], None]) -> int:
    """Have `work` done by a process that is no child of this one; return its pid."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
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
    os.waitpid(between, 0)
    return int(answer)


def _fork_task(channel: socket.socket, request: dict[str, Any], fds: list[int]) -> int:
    """Fork the task that `request` describes; return its pid."""

    def work() -> None:
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
    if sys.platform == "linux":
        # While TensorFlow is imported it would not see that the channel has ended.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(os.environ["TFD_FORK_OWNER"]):
            return
    channel = socket.socket(fileno=int(os.environ["TFD_FORK_FD"]))
    began = time.monotonic()
    gc.disable()  # looking for garbage is a fifth of the time that the import takes
    try:
        # Keras wraps scikit-learn's estimators, and to import it is a fifth of the time.
        with blocked_imports("pyarrow", "sklearn"):
            import tensorflow as tf

            from tfd_notebook.agent import task_process  # noqa: F401 - loaded here, used after the fork
    except ImportError as error:
        _answer(channel, {"error": str(error)})
        return
    gc.freeze()
    gc.enable()
    release_clean_pages()
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
    _answer(
        channel,
        {"tensorflow": tf.__version__, "threads": threads, "seconds": time.monotonic() - began},
    )
    while (received := receive_request(channel)) is not None:
        _answer(channel, {"pid": _fork_task(channel, *received)})


@contextlib.contextmanager
def blocked_imports(*names: str) -> Iterator[None]:
    """Have these modules and pandas not imported meanwhile; a task that uses them imports them.

    Keras imports pandas where it is installed, pandas pyarrow, and pyarrow starts threads, which a
    fork would lose. Of pandas Keras gets the two classes that it asks for: later they tell pandas'
    own objects, once a task has imported it. What wraps a module that is hidden stays without it:
    with ``"sklearn"`` that are the classes of ``keras.wrappers``.
    """
    pandas = types.ModuleType("pandas")
    pandas.__dict__.update({name: _Later(name, (), {}) for name in ("DataFrame", "Series")})
    pandas.__spec__ = importlib.util.find_spec("pandas")
    meanwhile = {**dict.fromkeys(names), "pandas": pandas if pandas.__spec__ else None}
    meanwhile = {name: module for name, module in meanwhile.items() if name not in sys.modules}
    sys.modules.update(meanwhile)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in meanwhile:
            del sys.modules[name]


class _Later(type):
    """Stands for a class of pandas, which may be imported by whoever asks what is one of these."""

    def __instancecheck__(cls, instance: Any) -> bool:
        kind = getattr(sys.modules.get("pandas"), cls.__name__, cls)
        return kind is not cls and isinstance(instance, kind)


def release_clean_pages() -> None:
    """Unmap what the import has read of libraries without changing it, hundreds of megabytes.

    The system still has these pages, and a task maps those that it uses; this process uses few.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/smaps") as smaps:
        regions = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps.read(), flags=re.M)
    for region in regions:
        found = re.match(r"(\w+)-(\w+) r-[-x]p \w+ \S+ (?!0 )\d+ ", region)
        # What was changed after all, by relocation, would be lost.
        if found and re.search(r"^Anonymous: +0 kB", region, re.M):
            start, end = int(found[1], 16), int(found[2], 16)
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _answer(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")
