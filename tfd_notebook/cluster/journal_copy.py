"""Local copy of the journal of a dispatcher on another host."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from tfd_notebook.errors import InvalidMessage, TfdError, WorkDirError
from tfd_notebook.net import messages, runtime_dir, validation

#: Bytes after which a refresh requests no more data. The next refresh continues.
MAX_REFRESH = 256_000_000
#: Maximum size of the copy in bytes.
MAX_TOTAL = 4_000_000_000
#: Bytes that remain free on the disk of the copy, which may be in memory.
MIN_FREE = 10_000_000
#: Maximum number of files. A dispatcher opens one at each start.
MAX_FILES = 10_000
#: Seconds after which a refresh requests no more data. The next refresh continues.
MAX_SECONDS = 30.0


class JournalCopy:
    """An incremental copy of a journal, refreshed before each read.

    Parameters
    ----------
    fetch : callable
        Takes the number of bytes of each file that are already copied. Returns that offset and the
        bytes that follow it, in base64, for each file.
    clock : callable
        Returns seconds. Default `time.monotonic`.

    Attributes
    ----------
    directory : str
    """

    def __init__(
        self,
        fetch: Callable[[dict[str, int]], Mapping[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetch = fetch
        self._clock = clock
        # Named after this process, so that it can be recognized as an orphan if that is killed.
        self.directory = tempfile.mkdtemp(
            prefix=runtime_dir.own_file(os.getpid(), "journal-").name, dir=runtime_dir.runtime_dir()
        )
        self._finalizer = weakref.finalize(self, _remove, self.directory, os.getpid())
        self._have: dict[str, int] = {}
        self._size = 0

    def refresh(self) -> None:
        """Fetch new data. If the host cannot be reached, the copy stays unchanged.

        Raises
        ------
        InvalidMessage
            The host sent data that is not part of a journal, or exceeds a limit.
        WorkDirError
            The disk of the copy is almost full, or cannot be written.
        """
        copied = 0
        deadline = self._clock() + MAX_SECONDS
        while copied < MAX_REFRESH and self._clock() < deadline:
            try:
                new = self._fetch(dict(self._have))
            except InvalidMessage:
                raise
            except TfdError:
                return
            size = self._store(messages.reply_value("journal", new))
            if not size:
                return
            copied += size

    def _store(self, new: Mapping[str, tuple[int, str]]) -> int:
        """Append to the files and return the number of bytes."""
        stored = 0
        if len(self._have.keys() | new.keys()) > MAX_FILES:
            raise InvalidMessage(f"the journal has more than {MAX_FILES} files")
        for name, (offset, packed) in new.items():
            have = self._have.get(name, 0)
            if offset != have:
                raise validation.invalid(f"offset of {name}", offset, str(have))
            try:
                data = base64.b64decode(packed, validate=True)
            except ValueError:
                raise validation.invalid(f"content of {name}", packed, "base64") from None
            if stored + len(data) > validation.MAX_JOURNAL_BYTES:
                most = f"{validation.MAX_JOURNAL_BYTES / 1e6:g} MB"
                raise InvalidMessage(f"one reply has more than {most} of the journal")
            if self._size + len(data) > MAX_TOTAL:
                raise InvalidMessage(f"the journal has more than {MAX_TOTAL / 1e9:g} GB")
            try:
                if shutil.disk_usage(self.directory).free < len(data) + MIN_FREE:
                    raise OSError(f"less than {MIN_FREE / 1e6:g} MB are free")
                self._append(name, data, have)
            except OSError as error:
                raise WorkDirError(
                    f"copying the journal of the dispatcher to {self.directory} failed: {error}",
                    fix="free space there",
                ) from None
            self._have[name] = have + len(data)
            self._size += len(data)
            stored += len(data)
        return stored

    def _append(self, name: str, data: bytes, have: int) -> None:
        """Write after `have` bytes. Raise OSError if the path contains a symbolic link."""
        folder, _, file = name.partition("/")
        directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700, dir_fd=directory)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            inner = os.open(folder, flags, dir_fd=directory)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
                descriptor = os.open(file, flags, 0o600, dir_fd=inner)
                with os.fdopen(descriptor, "wb") as opened:
                    opened.truncate(have)  # an incomplete write may have left more
                    opened.write(data)
            finally:
                os.close(inner)
        finally:
            os.close(directory)

    def close(self) -> None:
        """Remove the copy."""
        self._finalizer()


def _remove(directory: str, owner: int) -> None:
    # A forked child inherits the finalizer and calls it at exit.
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)
