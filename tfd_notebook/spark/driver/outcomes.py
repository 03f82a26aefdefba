"""Spark jobs whose errors keep their type: Spark does not try again what we know will fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tfd_notebook.errors import TfdError


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
    """Run `work` on all partitions and return what it yields, in order.

    Parameters
    ----------
    rdd : pyspark.RDD
    work : callable
        Takes a partition's number and its rows, and returns an iterable.

    Raises
    ------
    TfdError
        The first that `work` raised; other errors are Spark's to try again and to raise.
    """
    results = []
    for good, result in rdd.mapPartitionsWithIndex(_Guarded(work)).collect():
        if not good:
            raise result
        results.append(result)
    return results
