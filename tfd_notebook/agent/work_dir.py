"""Directories of the dispatcher's journal: local, or on a file system that TensorFlow supports.

A path with ``://`` is a URL such as ``gs://bucket/journals``, which `tf.io.gfile` reads and writes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from tfd_notebook.errors import WorkDirError

_PER_PROCESS = "ram://"
_TRIAL_BYTES = b"\0" * 65536


def is_url(work_dir: str) -> bool:
    """Return True if only TensorFlow can read and write `work_dir`."""
    return "://" in plain(work_dir)


def plain(work_dir: str | os.PathLike[str]) -> str:
    """Return `work_dir` as text, a URL of the local file system as the path that it names."""
    scheme, separator, path = os.fspath(work_dir).partition("://")
    return path if separator and scheme == "file" else os.fspath(work_dir)


def check_shared(work_dir: str) -> None:
    """Raise WorkDirError if other processes cannot read what this one writes to `work_dir`."""
    if work_dir.startswith(_PER_PROCESS):
        raise WorkDirError(
            f"work_dir {work_dir!r} cannot be used: each task runs in its own process, and "
            "ram:// is the memory of one process",
            fix='use launcher="inprocess", or a directory',
        )


def check_usable(work_dir: str) -> None:
    """Create the directory `work_dir` if necessary, and write to it once.

    Raises
    ------
    WorkDirError
        It cannot be created or written, or is full.
    """
    try:
        if is_url(work_dir):
            with _os_errors() as gfile:
                gfile.makedirs(work_dir)
                trial = f"{work_dir}/.tfd-{os.urandom(4).hex()}"
                with gfile.GFile(trial, "wb") as file:
                    file.write(_TRIAL_BYTES)
                gfile.remove(trial)
        else:
            os.makedirs(work_dir, exist_ok=True)
            write_trial(work_dir)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise WorkDirError(
            f"work_dir {work_dir!r} {'is full' if full else 'cannot be written'}: {error.strerror}",
            fix="free space there, or choose another work_dir"
            if full
            else "choose another work_dir",
        ) from error


def make_private(work_dir: str) -> None:
    """Create the directory of a journal, which only this user can read, unless it exists."""
    # The server reports a directory that cannot be created.
    with contextlib.suppress(OSError):
        if not is_url(work_dir):
            os.makedirs(work_dir, 0o700, exist_ok=True)


def write_trial(directory: str | os.PathLike[str], data: bytes = _TRIAL_BYTES) -> None:
    """Write a file to a local directory and remove it; raise OSError if that fails.

    Its name cannot be predicted, and no link is followed.
    """
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".tfd-") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def names_in(directory: str) -> list[str]:
    """Return the names of the entries of `directory`; raise OSError if it cannot be read."""
    if not is_url(directory):
        return os.listdir(directory)
    with _os_errors() as gfile:
        return [name.rstrip("/") for name in gfile.listdir(directory)]


def size_of(path: str) -> int:
    """Return the bytes of the file `path`; raise OSError if it cannot be read."""
    if not is_url(path):
        return os.stat(path).st_size
    with _os_errors() as gfile:
        return int(gfile.stat(path).length)


def read_from(path: str, offset: int, size: int) -> bytes:
    """Return up to `size` bytes of the file `path` from `offset` on."""
    if not is_url(path):
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(size)
    with _os_errors() as gfile, gfile.GFile(path, "rb") as remote:
        remote.seek(offset)
        data: bytes = remote.read(size)
        return data


def total_bytes(directory: str) -> int:
    """Return the bytes of all files below `directory`; raise OSError if it cannot be read."""
    if is_url(directory):
        with _os_errors() as gfile:
            return sum(
                int(gfile.stat(f"{parent}/{name}").length)
                for parent, _, names in gfile.walk(directory)
                for name in names
            )
    return sum(
        os.stat(os.path.join(parent, name)).st_size
        for parent, _, names in os.walk(directory)
        for name in names
    )


@contextlib.contextmanager
def _os_errors() -> Iterator[Any]:
    """Yield ``tf.io.gfile``; raise its errors as OSError."""
    import tensorflow as tf

    numbers = {
        tf.errors.NotFoundError: errno.ENOENT,
        tf.errors.PermissionDeniedError: errno.EACCES,
        tf.errors.ResourceExhaustedError: errno.ENOSPC,
    }
    try:
        yield tf.io.gfile
    except tf.errors.OpError as error:
        raise OSError(numbers.get(type(error), errno.EIO), error.message) from error
