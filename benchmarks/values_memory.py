"""Memory of a coordinator per ended closure, in bytes, for 100,000 closures.

The RemoteValues are discarded, as in most programs, so that only the store is left.
"""

from __future__ import annotations

import gc

import _pairs
import _training
import psutil

import tfd_notebook as tfd


def main() -> None:
    count = 5_000 if _pairs.arguments(__doc__).quick else 100_000
    with tfd.Cluster(workers=2, ps=1, name="memory") as cluster:
        ours = cluster.coordinator()
        _training.run(ours, _training.nothing, 3_000)  # allocate one-time memory first
        gc.collect()
        process, per_value = psutil.Process(), []
        before, known = process.memory_full_info().uss, len(ours.values)
        for _ in range(5):
            _training.run(ours, _training.nothing, count // 5)
            gc.collect()
            more = process.memory_full_info().uss - before
            per_value.append(more / (len(ours.values) - known))
        print(f"bytes per value as they grow: {', '.join(f'{each:.0f}' for each in per_value)}")
        figure = per_value[-1]
        print(
            f"values_memory: ratio {figure / 500:.3f} (A {figure:.4g}, B 500, bytes per value)",
            flush=True,
        )
    _training.end()


if __name__ == "__main__":
    main()
