"""Time from ``TFCluster.run`` to the first batch, against TensorFlowOnSpark 2.2.5.

Each figure comes from a new Spark with two executors, whose Python workers have already run. The
start of Spark does not count. The measurement ends when the first of two nodes has passed a batch
of fed rows to TensorFlow.

The first figure is for `tfd.spark.session`, whose executors import TensorFlow in the background
after their start. The second figure is for an external Spark without this import.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import _onspark
import _pairs
from _sides import Side

UNIT = "seconds from run to the first batch"
#: Seconds for a first batch on a busy machine.
LIMIT = 300.0


def first_batch(args: Any, ctx: Any) -> None:
    """Record the time of the first computed batch, and consume all others."""
    import time
    from pathlib import Path

    import tensorflow as tf

    if args.ours:
        from tfd_notebook.spark import TFNode
    else:
        from tensorflowonspark import TFNode
    feed = TFNode.DataFeed(ctx.mgr)
    first = True
    while not feed.should_stop():
        rows = feed.next_batch(16)
        if rows and first:
            float(tf.reduce_sum(tf.constant(rows)))
            (Path(args.directory) / f"{ctx.task_index}").write_text(repr(time.time()))
            first = False


def answer(side: _onspark.Child, kind: str) -> None:
    """Start a cluster for each request."""
    sc = side.session.sparkContext
    data = sc.parallelize([[float(n)] * 10 for n in range(1024)], 4).cache()
    data.count()
    print("ready", file=side.answers)
    for line in sys.stdin:
        if line.strip() != "start":
            continue
        with tempfile.TemporaryDirectory() as directory:
            arguments = argparse.Namespace(directory=directory, ours=kind != "theirs")
            mode = side.TFCluster.InputMode.SPARK
            began = time.time()
            cluster = side.TFCluster.run(sc, first_batch, arguments, 2, 0, False, mode)
            feeding = threading.Thread(target=cluster.train, args=(data, 1))
            feeding.start()
            while not (files := list(Path(directory).iterdir())) or not files[0].read_text():
                if time.time() - began > LIMIT:
                    sys.exit(f"no batch within {LIMIT:g} s")
                time.sleep(0.01)
            seconds = min(float(path.read_text()) for path in files) - began
            feeding.join()
            cluster.shutdown()
        print(seconds, file=side.answers)


def start(kind: str) -> float:
    side = Side(__file__, kind)
    try:
        return side.request("start")[0]
    finally:
        side.close()


def main() -> None:
    parser = _pairs.parser(__doc__)
    parser.add_argument("--child", choices=("ours", "cold", "theirs"))
    options = parser.parse_args()
    if options.child:
        with _onspark.child(options.child) as side:
            answer(side, options.child)
        return
    _onspark.peer()
    rounds = 2 if options.quick else 5
    figures = _pairs.interleave(
        {kind: functools.partial(start, kind) for kind in ("ours", "cold", "theirs")}, rounds
    )
    for name, kind in (("spark_start (another's Spark)", "cold"), ("spark_start", "ours")):
        result = _pairs.compare(figures[kind], figures["theirs"])
        print(result)
        _pairs.report(name, result, UNIT)


if __name__ == "__main__":
    main()
