"""Spark's jobs in threads of their own, each in a job group, so that one can be cancelled alone."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


def in_background(work: Callable[[], Result], name: str) -> Future[Result]:
    """Have a thread do `work`; return the future of its result."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=f"tfd-spark-{name}", daemon=True).start()
    return future


class Job:
    """A job of Spark that runs in a thread of its own.

    Parameters
    ----------
    sc : pyspark.SparkContext
    description : str
        What Spark's own pages show.
    work : callable
        Calls an action and returns its result.
    """

    def __init__(self, sc: Any, description: str, work: Callable[[], Any]) -> None:
        self._sc = sc
        self._group = f"tfd-{uuid.uuid4().hex[:12]}"
        self._cancelled = False

        def run() -> Any:
            sc.setJobGroup(self._group, description, interruptOnCancel=True)
            if self._cancelled:
                raise RuntimeError("the job was cancelled before it began")
            return work()

        self.future = in_background(run, "job")

    def cancel(self) -> None:
        """Have Spark end it; returns at once."""
        self._cancelled = True
        if self.future.done():
            return
        # Where Spark has ended, or its Java is gone, nothing is left to cancel.
        with contextlib.suppress(Exception):
            self._sc.cancelJobGroup(self._group)


def wait(future: Future[Result], interrupted: Callable[[], None]) -> Result:
    """Return the result of `future`; on Ctrl-C call `interrupted` and raise at once."""
    try:
        return future.result()
    except KeyboardInterrupt:
        interrupted()
        raise
