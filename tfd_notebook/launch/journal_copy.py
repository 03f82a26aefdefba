"""A copy on this host of the journal that a dispatcher on another host keeps."""

from __future__ import annotations

import base64
import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from tfd_notebook.errors import TfdError
from tfd_notebook.launch import runtime


class JournalCopy:
    """Fetches what is new, each time somebody reads.

    Parameters
    ----------
    fetch : callable
        Takes how many bytes are here by file, returns what comes after them, in base64.

    Attributes
    ----------
    directory : str
    """

    def __init__(self, fetch: Callable[[dict[str, int]], dict[str, str]]) -> None:
        self._fetch = fetch
        # Named after this process, so that it is known as left over when that was killed.
        self._temporary = tempfile.TemporaryDirectory(
            prefix=f"{os.getpid()}.journal-", dir=runtime.runtime_dir()
        )
        self.directory = self._temporary.name
        self._have: dict[str, int] = {}

    def refresh(self) -> None:
        """Fetch what is new; where the host cannot be reached the copy stays as it is."""
        with contextlib.suppress(TfdError):
            while new := self._fetch(self._have):
                for name, packed in new.items():
                    path = Path(self.directory, name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    data = base64.b64decode(packed)
                    with path.open("ab") as file:
                        file.write(data)
                    self._have[name] = self._have.get(name, 0) + len(data)

    def close(self) -> None:
        """Remove it."""
        self._temporary.cleanup()
