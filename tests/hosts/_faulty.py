"""A consumer in the main thread during faults."""

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
    """Counter of a loop's elements in the main thread, while another thread causes faults.

    Attributes
    ----------
    count : int
        Number of elements so far.
    over : bool
        True if the loop has ended.
    """

    def __init__(self, cluster: tfd.Cluster) -> None:
        self.cluster = cluster
        self.count = 0
        self.over = False
        self._known = len(cluster.snapshot().notices)

    def loop(
        self, elements: Iterable[Any], story: Callable[[Reading], None], waits: bool = False
    ) -> None:
        """Read until `story`, which runs in another thread, has ended; then interrupt the loop.

        The story starts after the first elements have arrived. With `waits`, it starts at once.
        """
        with concurrent.futures.ThreadPoolExecutor(1, "tests-story") as pool:
            future = pool.submit(self._run_story, story, waits)
            try:
                for _ in elements:
                    self.count += 1
                    time.sleep(0.003)  # at full speed, the loop would use all processors
            except errors.Interrupted:
                future.result()
            finally:
                self.over = True

    def _run_story(self, story: Callable[[Reading], None], waits: bool) -> None:
        try:
            if not waits:
                self.moves()
            story(self)
        finally:
            self.cluster.interrupt()

    def moves(self, seconds: float = 60.0) -> None:
        """Wait for more elements."""
        before = self.count
        until(lambda: self.count > before + 10, seconds)

    def halts(self) -> None:
        """Wait until no more elements arrive."""
        quiet = threading.Event()

        def same() -> bool:
            before = self.count
            quiet.wait(1.0)
            return before == self.count

        until(same)

    def notices(self) -> list[str]:
        """Return the notices since the start."""
        return [str(notice) for notice in self.cluster.snapshot().notices[self._known :]]

    def wait_for_notice(self, *words: str, seconds: float = 45.0) -> str:
        """Wait for a notice with all of these words."""
        began = time.monotonic()
        try:
            return until(
                lambda: next((n for n in self.notices() if all(w in n for w in words)), None),
                seconds,
            )
        except AssertionError:
            raise AssertionError(
                f"no notice with {words} within {time.monotonic() - began:.0f} s: {self.notices()}"
            ) from None
