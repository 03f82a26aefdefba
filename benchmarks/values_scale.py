"""The record of 1,000,000 ended closures: bytes for each, and time of a page and of a sort.

The RemoteValues are discarded, as in most programs. A page is the first message to a view, which
has the latest 100,000 closures. Another one is `values.table` for one worker. The sort is of the
same 100,000 closures by duration, in `values.to_frame`.
"""

from __future__ import annotations

import gc
import statistics
import time
import weakref
from collections.abc import Callable

import _pairs
import psutil

from tfd_notebook.bus.closure_feed import MAX_ROWS, ColumnFeed
from tfd_notebook.coordinator.values import Values
from tfd_notebook.model.closure_store import READY, Store

MAX_BYTES = 350
MAX_MS = 50


class RemoteValue:
    """The result of a closure."""


def record(store: Store, count: int) -> None:
    for number in range(count):
        value, worker = RemoteValue(), number % 2
        key = store.add("step", "__inference_step_1", weakref.ref(value))
        store.dispatched(key, worker)
        store.running(key)
        store.fetch(key)
        store.end(key, READY, worker)


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    """Return the median time of `work`."""
    figures = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        figures.append((time.perf_counter() - began) * 1e3)
    return statistics.median(figures)


def main() -> None:
    quick = _pairs.arguments(__doc__).quick
    count, rounds = (100_000, 5) if quick else (1_000_000, 15)
    store = Store()
    record(store, 20_000)  # allocate one-time memory first
    values, process = Values(store, lambda: False), psutil.Process()
    values.to_frame()
    gc.collect()
    before = process.memory_full_info().uss
    record(store, count)
    gc.collect()
    size = (process.memory_full_info().uss - before) / count
    work = {
        "page of the live table": lambda: ColumnFeed(store).full(),
        "page of values.table": lambda: values.table(worker=1),
        "sort": lambda: values.to_frame(MAX_ROWS).sort_values("run_ms"),
    }
    for name, do in work.items():
        figure = milliseconds(do, rounds)
        print(f"values_scale, {name}: ratio {figure / MAX_MS:.3f} (A {figure:.4g}, B {MAX_MS}, ms)")
    print(f"values_scale: ratio {size / MAX_BYTES:.3f} (A {size:.4g}, B {MAX_BYTES}, bytes each)")


if __name__ == "__main__":
    main()
