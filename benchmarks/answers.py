"""Seconds from a fault to the answer that names it, against the 5 s that an answer may take.

Each fault happens to a separate cluster on this host. A Python function never returns, a consumer
of coordinated reads is missing, or a dispatcher hangs while an epoch starts. Others are a variable
that has changed, and a data worker that stops again and again. The answer is
the first notice, finding of the doctor, warning or advice that names the cause.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[1]))

import _pairs
import psutil
import tensorflow as tf

import tfd_notebook as tfd
from tests._stopping import stopping

#: Seconds that an answer may take, and after which the benchmark fails.
TARGET, LIMIT = 5.0, 60.0
ENDLESS = tf.data.Dataset.range(1 << 40).repeat()


def until(answered: Callable[[], Any]) -> float:
    """Return the seconds until an answer."""
    began = time.perf_counter()
    while not answered():
        if time.perf_counter() - began > LIMIT:
            raise TimeoutError(f"no answer within {LIMIT:g} s")
        time.sleep(0.05)
    return time.perf_counter() - began


def noticed(cluster: tfd.Cluster, text: str) -> bool:
    """Return True if a notice has the text."""
    return any(text in f"{each.what} {each.fix}" for each in cluster.snapshot().notices)


def process(cluster: tfd.Cluster, task: str) -> psutil.Process:
    """Return the process of a task."""
    row = cluster.snapshot().task(task)
    assert row is not None
    return psutil.Process(row.pid)


def function(cluster: tfd.Cluster) -> float:
    """Wait in a Python function that never returns."""

    def wait_for_nothing(number: Any) -> Any:
        time.sleep(1e6)
        return number

    waiting = ENDLESS.map(lambda x: tf.numpy_function(wait_for_nothing, [x], tf.int64))
    cluster.stream(waiting.apply(cluster.distribute("off", semantics="tensorflow"))).start()
    name = "wait_for_nothing"
    return until(lambda: noticed(cluster, name) or any(name in f.what for f in tfd.doctor(cluster)))


def consumer(cluster: tfd.Cluster) -> float:
    """Read with one of two consumers."""
    options = {"job_name": "pair", "num_consumers": 2, "consumer_index": 0}
    stream = cluster.stream(ENDLESS.apply(cluster.distribute("off", **options))).start()
    return until(lambda: "not with consumer_index=1" in stream.limit.advice)


def dispatcher(cluster: tfd.Cluster) -> float:
    """Start an epoch while the dispatcher is stopped."""
    dataset = tf.data.Dataset.range(9).apply(cluster.distribute("dynamic"))
    stopped = process(cluster, "dispatcher:0")
    stopped.suspend()
    reader = threading.Thread(target=lambda: list(dataset))
    reader.start()
    try:
        return until(lambda: noticed(cluster, "cluster.restart('dispatcher:0')"))
    finally:
        stopped.resume()
        reader.join()


def variable(cluster: tfd.Cluster) -> float:
    """Start an epoch after a variable has changed."""
    scale = tf.Variable(1, dtype=tf.int64, name="scale")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = tf.data.Dataset.range(9).map(lambda x: x * scale)
        dataset = dataset.apply(cluster.distribute("dynamic"))
        list(dataset)
    scale.assign(10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        began = time.perf_counter()
        next(iter(dataset))
        seconds = time.perf_counter() - began
    assert any("the variable scale has changed" in str(each.message) for each in caught)
    return seconds


def worker_of_rounds(cluster: tfd.Cluster) -> float:
    """Stop one of three data workers again and again, in coordinated reads."""
    numbers = ENDLESS.map(lambda x: x + tf.zeros([1_000], tf.int64))
    streams = []
    for index in range(2):
        options = {"job_name": "rounds", "num_consumers": 2, "consumer_index": index}
        streams.append(cluster.stream(numbers.apply(cluster.distribute("off", **options))).start())
    return stopped(cluster, streams)


def worker(cluster: tfd.Cluster) -> float:
    """Stop one of three data workers again and again, in mode ``"off"``."""

    def wait(number: Any) -> Any:
        time.sleep(0.01)
        return number

    waiting = ENDLESS.map(lambda x: tf.numpy_function(wait, [x], tf.int64)).batch(8)
    read = waiting.apply(cluster.distribute("off", semantics="tensorflow"))
    return stopped(cluster, [cluster.stream(read).start()])


def stopped(cluster: tfd.Cluster, streams: list[tfd.Stream]) -> float:
    """Return the seconds until the data worker is named that stops again and again."""
    for stream in streams:
        stream.wait(elements=100, timeout=LIMIT)
    with stopping(process(cluster, "data_worker:1")):
        return until(lambda: streams[0].limit.stage == "data_worker:1")


FAULTS = (function, consumer, dispatcher, variable, worker_of_rounds, worker)


def main() -> None:
    rounds = 2 if _pairs.arguments(__doc__).quick else 7

    def seconds(fault: Callable[[tfd.Cluster], float]) -> float:
        with tfd.Cluster(data_workers=3, name=fault.__name__) as cluster:
            return fault(cluster)

    figures = _pairs.interleave({f.__name__: lambda f=f: seconds(f) for f in FAULTS}, rounds, 0)
    for name, taken in figures.items():
        result = _pairs.compare(taken, [TARGET] * len(taken))
        print(f"{name}, the slowest: {max(taken):.2f} s")
        _pairs.report(f"answers, {name}", result, "s")
    sys.stdout.flush()
    # The thread of a blocked iterator would crash at the interpreter's exit.
    os._exit(0)


if __name__ == "__main__":
    main()
