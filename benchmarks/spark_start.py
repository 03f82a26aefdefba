"""From ``TFCluster.run`` to the first batch: TensorFlowOnSpark 2.2.5 and ours.

Each figure comes from a fresh Spark with two executors, in which nobody has imported TensorFlow
yet, and whose Python workers have run. Its start is in none of them. The clock stops when the first
of two nodes has put a batch of fed rows through TensorFlow.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import _pairs
import _peers
from _sides import Side
from spark_feed import PEER

UNIT = "seconds from run to the first batch"
#: Seconds for a first batch on a busy machine.
LIMIT = 300.0


def first_batch(args: Any, ctx: Any) -> None:
    """Note when the first batch has been computed with, and take all others."""
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


def child(kind: str) -> None:
    """Start once, and answer on standard output, where nobody else may write."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    config: dict[str, object] = {}
    if kind == "theirs":
        directory = str(_peers.installed("tensorflowonspark-2.2.5", PEER))
        sys.path.insert(0, directory)
        config["spark.executorEnv.PYTHONPATH"] = directory
        from tensorflowonspark import TFCluster
    else:
        from tfd_notebook.spark import TFCluster
    from tfd_notebook.spark import sessions

    spark = sessions.session(executors=2, cores=1, memory="1536m", name=kind, config=config)
    data = spark.sparkContext.parallelize([[float(n)] * 10 for n in range(1024)], 4).cache()
    data.count()
    print("ready", file=answers)
    for line in sys.stdin:
        if line.strip() != "start":
            continue
        with tempfile.TemporaryDirectory() as seen:
            arguments = argparse.Namespace(directory=seen, ours=kind == "ours")
            mode = TFCluster.InputMode.SPARK
            began = time.time()
            cluster = TFCluster.run(spark.sparkContext, first_batch, arguments, 2, 0, False, mode)
            feeding = threading.Thread(target=cluster.train, args=(data, 1))
            feeding.start()
            while not (found := list(Path(seen).iterdir())) or not found[0].read_text():
                if time.time() - began > LIMIT:
                    sys.exit(f"no batch within {LIMIT:g} s")
                time.sleep(0.01)
            seconds = min(float(path.read_text()) for path in found) - began
            feeding.join()
            cluster.shutdown()
        print(seconds, file=answers)
    sessions.end()
    answers.flush()
    os._exit(0)


def start(kind: str) -> float:
    side = Side(__file__, kind)
    try:
        return side.ask("start")[0]
    finally:
        side.close()


def main() -> None:
    parser = _pairs.parser(__doc__)
    parser.add_argument("--child", choices=("ours", "theirs"))
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    _peers.installed("tensorflowonspark-2.2.5", PEER)
    rounds = 2 if options.quick else 5
    result = _pairs.measure(lambda: start("ours"), lambda: start("theirs"), rounds)
    print(result)
    _pairs.report("spark_start", result, UNIT)


if __name__ == "__main__":
    main()
