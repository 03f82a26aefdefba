"""Spark jobs in separate threads and job groups, so that each can be cancelled."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from tfd_notebook.errors import TfdError
from tfd_notebook.spark.driver.application import Application

Result = TypeVar("Result")


def in_background(work: Callable[[], Result], name: str) -> Future[Result]:
    """Run `work` in a thread; return the future of its result."""
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
    """A Spark job that runs in its own thread.

    Parameters
    ----------
    application : Application
    description : str
        Description of the job in the Spark UI.
    work : callable
        Calls actions and returns a result.
    """

    def __init__(self, application: Application, description: str, work: Callable[[], Any]) -> None:
        self._application = application
        self._group = f"tfd-{uuid.uuid4().hex[:12]}"
        self._cancelled = False

        def run() -> Any:
            application.begin_group(self._group, description)
            return work()

        self.future = in_background(run, "job")

    @property
    def cancelled(self) -> bool:
        """True after `cancel`."""
        return self._cancelled

    def cancel(self) -> None:
        """Cancel the job and all of its later actions; return at once."""
        self._cancelled = True
        if self.future.done():
            return
        # After the end of Spark, or of its JVM, the call raises: the job has ended as well.
        with contextlib.suppress(Exception):
            self._application.cancel_group(self._group)


def wait(future: Future[Result], interrupted: Callable[[], None]) -> Result:
    """Return the result of `future`; on Ctrl-C call `interrupted` and raise at once."""
    try:
        return future.result()
    except KeyboardInterrupt:
        interrupted()
        raise


class _Guarded:
    def __init__(self, work: Callable[[int, Iterator[Any]], Iterable[Any]]) -> None:
        self._work = work

    def __call__(self, index: int, rows: Iterator[Any]) -> Iterator[tuple[bool, Any]]:
        try:
            for result in self._work(index, rows):
                yield True, result
        except TfdError as error:
            yield False, error


def collect(rdd: Any, work: Callable[[int, Iterator[Any]], Iterable[Any]]) -> list[Any]:
    """Run `work` on all partitions and return the items that it yields, in order.

    Parameters
    ----------
    rdd : pyspark.RDD
    work : callable
        Takes a partition's number and its rows, and returns an iterable.

    Raises
    ------
    TfdError
        The first one that `work` raised. Spark retries and raises other errors.
    """
    results = []
    for good, result in rdd.mapPartitionsWithIndex(_Guarded(work)).collect():
        if not good:
            raise result
        results.append(result)
    return results
