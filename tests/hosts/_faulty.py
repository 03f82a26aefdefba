"""A consumer in the main thread, to which something happens meanwhile."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook import errors


class Reading:
    """Counts what a loop in the main thread gets, while another thread makes things happen.

    Attributes
    ----------
    count : int
        Elements so far.
    over : bool
        Whether the loop has ended.
    """

    def __init__(self, cluster: tfd.Cluster) -> None:
        self.cluster = cluster
        self.count = 0
        self.over = False
        self._seen = len(cluster.snapshot().notices)

    def loop(
        self, elements: Iterable[Any], story: Callable[[Reading], None], waits: bool = False
    ) -> None:
        """Read until `story`, told in another thread, is over; then the loop is interrupted.

        The story begins when the first elements have come; with `waits`, at once.
        """
        with concurrent.futures.ThreadPoolExecutor(1, "tests-story") as pool:
            told = pool.submit(self._tell, story, waits)
            try:
                for _ in elements:
                    self.count += 1
            except errors.Interrupted:
                told.result()
            finally:
                self.over = True

    def _tell(self, story: Callable[[Reading], None], waits: bool) -> None:
        try:
            if not waits:
                self.moves()
            story(self)
        finally:
            self.cluster.interrupt()

    def moves(self, seconds: float = 60.0) -> None:
        """Wait until more has come."""
        before = self.count
        until(lambda: self.count > before + 10, seconds)

    def halts(self) -> None:
        """Wait until nothing comes any more."""
        quiet = threading.Event()

        def same() -> bool:
            before = self.count
            quiet.wait(1.0)
            return before == self.count

        until(same, 30)

    def notices(self) -> list[str]:
        """Return what was said since the beginning."""
        return [str(notice) for notice in self.cluster.snapshot().notices[self._seen :]]

    def hears(self, *words: str, seconds: float = 45.0) -> str:
        """Wait for a notice with all of these words."""
        began = time.monotonic()
        try:
            return until(
                lambda: next((n for n in self.notices() if all(w in n for w in words)), None),
                seconds,
            )
        except AssertionError:
            raise AssertionError(
                f"{words} not said within {time.monotonic() - began:.0f} s, but {self.notices()}"
            ) from None
