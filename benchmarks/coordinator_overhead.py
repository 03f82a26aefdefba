"""Closures through a coordinator that is observed, against TensorFlow's own.

A process can only use one cluster at a time, so each side is a process with a cluster of its own;
they take turns. Closures that do nothing, 10,000 of them, and 500 of about five milliseconds, on
two workers; wall time and the CPU time of the coordinating process. Then the same with the live
table drawn twice a second.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import _pairs


def child(kind: str) -> None:
    import contextlib
    import threading

    import _training
    import tensorflow as tf

    import tfd_notebook as tfd
    from tfd_notebook import views

    name = kind.partition("+")[0]
    with tfd.Cluster(workers=2, ps=1, name=f"overhead-{kind.replace('+', '-')}") as cluster:
        if name == "bare":
            strategy = tf.distribute.ParameterServerStrategy(cluster.resolver)
            coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        else:
            coordinator = cluster.coordinator()
        if kind.endswith("+gate"):
            coordinator.break_on(failure=True, function="never")
            coordinator.pause()
            coordinator.resume()
        over = threading.Event()

        def draw() -> None:
            while not over.wait(0.5):
                views.html(cluster.snapshot())

        drawing = threading.Thread(target=draw, daemon=True)
        if kind.endswith("+table"):
            drawing.start()
        print("ready", flush=True)
        for line in sys.stdin:
            function, count = line.split()
            wall, used = _training.run(coordinator, getattr(_training, function), int(count))
            print(wall, used, flush=True)
        over.set()
        with contextlib.suppress(RuntimeError):
            drawing.join(2)
    _training.end()


class Side:
    """A process with a cluster, which runs closures when it is asked to."""

    def __init__(self, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            sys.exit(f"the side {kind} did not start")

    def run(self, function: str, count: int) -> tuple[float, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{function} {count}\n")
        self._process.stdin.flush()
        wall, used = map(float, self._process.stdout.readline().split())
        return wall, used

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def compare(name: str, ours: str, options: object) -> None:
    """Run the rounds of one comparison with bare TensorFlow and report them."""
    rounds = 3 if getattr(options, "quick", False) else 15
    sides = {"ours": Side(ours), "bare": Side("bare")}
    share = 10 if rounds == 3 else 1
    counts = (("nothing", 10_000 // share), ("five_ms", 500 // share))
    for function, count in counts:
        for side in sides.values():
            side.run(function, count // 10)
        seen: dict[str, list[tuple[float, float]]] = {which: [] for which in sides}
        for number in range(rounds):
            order = list(sides) if number % 2 else list(sides)[::-1]
            for which in order:
                seen[which].append(sides[which].run(function, count))
        for column, unit in ((1, "seconds of CPU"), (0, "seconds")):
            result = _pairs.compare(
                [each[column] for each in seen["ours"]], [each[column] for each in seen["bare"]]
            )
            said = f"{name} ({count:,} x {function}, {unit})"
            print(f"{said}: {result}", flush=True)
            _pairs.report(said if column or function != "nothing" else name, result, unit)
    for side in sides.values():
        side.close()


def main() -> None:
    parser = _pairs.parser(__doc__)
    parser.add_argument("--child", metavar="KIND", help="be one side")
    parser.add_argument("--table", action="store_true", help="with the live table drawn")
    options = parser.parse_args()
    if options.child:
        child(options.child)
    elif options.table:
        compare("coordinator_overhead, with the table", "ours+table", options)
    else:
        compare("coordinator_overhead", "ours", options)
        compare("coordinator_overhead, with the table", "ours+table", options)


if __name__ == "__main__":
    main()
