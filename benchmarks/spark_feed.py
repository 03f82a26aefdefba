"""Rows per second from an RDD into TensorFlow, against TensorFlowOnSpark 2.2.5.

Each side has its own Spark with two executors, which cache the same distinct rows. On two nodes, a
function passes every batch to a ``tf.function``. ``cluster.train`` feeds both sides. The function
for TensorFlowOnSpark converts the result of ``next_batch`` to a tensor. The function for
tfd-notebook iterates over ``as_dataset``.

The second figure is the rate as a share of Spark's own rate. For that rate, Spark sends the rows
from Java to Python, where they are discarded.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import _onspark
import _pairs
import psutil
from _sides import Side

UNIT = "rows/s, more is better"
PARTITIONS = 4
#: For each kind of rows: number of rows for tfd-notebook and for TensorFlowOnSpark, and batch size.
#: Each side gets rows for some seconds.
KINDS = {
    "10 floats": (1_500_000, 10_000, 1024),
    "28x28 bytes": (200_000, 12_000, 256),
    "150 KB blobs": (2_400, 900, 16),
}
QUICK = 4


def rows(kind: str, partition: int, numbers: Iterable[int]) -> Iterator[Any]:
    import random

    import numpy as np

    own = random.Random(partition)
    for _ in numbers:
        if kind == "10 floats":
            yield [own.random() for _ in range(10)]
        elif kind == "28x28 bytes":
            yield np.frombuffer(own.randbytes(784), np.uint8).reshape(28, 28)
        else:
            yield own.randbytes(150_000)


def drop(partition: Iterable[Any]) -> None:
    from collections import deque

    deque(partition, maxlen=0)


def step_of(tf: Any) -> Any:
    @tf.function(reduce_retracing=True)
    def step(batch: Any) -> Any:
        if batch.dtype == tf.string:
            return tf.reduce_sum(tf.strings.length(batch))
        return tf.reduce_sum(tf.cast(batch, tf.float32))

    return step


def consume_ours(args: Any, ctx: Any) -> None:
    import tensorflow as tf

    step = step_of(tf)
    for batch in ctx.get_data_feed().as_dataset(args.batch_size):
        step(batch)


def consume_theirs(args: Any, ctx: Any) -> None:
    import numpy as np
    import tensorflow as tf
    from tensorflowonspark import TFNode

    step = step_of(tf)
    feed = TFNode.DataFeed(ctx.mgr)
    while not feed.should_stop():
        taken = feed.next_batch(args.batch_size)
        if taken:
            numbers = not isinstance(taken[0], bytes)
            step(tf.constant(np.array(taken) if numbers else taken))


def answer(side: _onspark.Child, kind: str, quick: bool) -> None:
    consume = consume_theirs if kind == "theirs" else consume_ours
    sc = side.session.sparkContext
    print("ready", file=side.answers)
    cluster = data = None
    count = 0
    for line in sys.stdin:
        command, _, rows_kind = line.strip().partition(" ")
        if command == "open":
            ours, theirs, batch_size = KINDS[rows_kind]
            count = (theirs if kind == "theirs" else ours) // (QUICK if quick else 1)
            # Spark creates the numbers in Java, without a transfer from Python.
            data = sc.range(0, count, 1, PARTITIONS)
            data = data.mapPartitionsWithIndex(functools.partial(rows, rows_kind)).cache()
            data.count()
            arguments = argparse.Namespace(batch_size=batch_size)
            mode = side.TFCluster.InputMode.SPARK
            cluster = side.TFCluster.run(sc, consume, arguments, 2, 0, False, mode)
        began = time.perf_counter()
        if command == "feed":
            cluster.train(data, 1)
        elif command == "floor":
            data.foreachPartition(drop)
        seconds = time.perf_counter() - began
        if command == "close":
            cluster.shutdown()
            data.unpersist(blocking=True)
        print(count / seconds if command in ("feed", "floor") else 0.0, file=side.answers)


def cpu_seconds() -> Counter[str]:
    """Return the CPU time of all running processes by the part of the feed to which they belong."""
    used: Counter[str] = Counter()
    for process in psutil.process_iter(["name", "cmdline", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is None or not (command := process.info["cmdline"]):
            continue
        if process.info["name"] == "java":
            part = "Java"
        else:
            part = "Spark's Python" if "pyspark.daemon" in command else "nodes"
        used[part] += times.user + times.system
    return used


def measured(side: Side, command: str, used: Counter[str]) -> float:
    """Return rows per second, and add the CPU time to `used`."""
    before = cpu_seconds()
    rate = side.request(command)[0]
    used.update(cpu_seconds() - before)
    return rate


def main() -> None:
    parser = _pairs.parser(__doc__)
    parser.add_argument("--child", choices=("ours", "theirs"))
    options = parser.parse_args()
    if options.child:
        with _onspark.child(options.child) as side:
            answer(side, options.child, "TFD_QUICK" in os.environ)
        return
    _onspark.peer()
    if options.quick:
        os.environ["TFD_QUICK"] = "1"
    ours, theirs = Side(__file__, "ours"), Side(__file__, "theirs")
    results = {}
    for kind in KINDS:
        for side in (ours, theirs):
            side.request(f"open {kind}")
        feed: Counter[str] = Counter()
        floor: Counter[str] = Counter()
        rounds = 2 if options.quick else 5
        figures = _pairs.interleave(
            {
                "ours": lambda feed=feed: measured(ours, "feed", feed),
                "theirs": lambda: theirs.request("feed")[0],
                "floor": lambda floor=floor: measured(ours, "floor", floor),
            },
            rounds,
        )
        for side in (ours, theirs):
            side.request("close")
        results[kind] = _pairs.compare(figures["ours"], figures["theirs"])
        share = _pairs.compare(figures["ours"], figures["floor"])
        print(f"{kind}: {results[kind]}; of Spark's own rate: {share}", flush=True)
        count = (rounds + 1) * KINDS[kind][0] // (QUICK if options.quick else 1)
        for name, used in (("feed", feed), ("Spark's own", floor)):
            parts = ", ".join(f"{part} {used[part] / count * 1e6:.2f}" for part in sorted(used))
            print(f"{kind}, CPU time per row, {name}: {parts} \N{MICRO SIGN}s", flush=True)
        _pairs.report(f"spark_feed ({kind}, share of Spark's own rate)", share, UNIT)
    for kind, result in list(results.items())[::-1]:
        _pairs.report("spark_feed" if kind == "10 floats" else f"spark_feed ({kind})", result, UNIT)
    ours.close()
    theirs.close()


if __name__ == "__main__":
    main()
