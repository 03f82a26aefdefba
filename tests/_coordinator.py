"""A fake coordinator that counts its live controls, which could resume it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tfd_notebook.model.closure_store import Store
from tfd_notebook.model.snapshot import CoordinatorRow


class FakeCoordinator:
    def __init__(self) -> None:
        self.present = 0
        self.stopped = False
        self.store = Store()
        self.build = None

    def row(self, tasks: Any) -> CoordinatorRow:
        return CoordinatorRow("running")

    @contextlib.contextmanager
    def control(self) -> Iterator[None]:
        self.present += 1
        try:
            yield
        finally:
            self.present -= 1

    def stop(self) -> None:
        self.stopped = True
