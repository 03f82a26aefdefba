"""What the benchmarks of the coordinator share: a cluster, and functions to schedule."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import logging

import tensorflow as tf

logging.getLogger("tensorflow").setLevel(logging.CRITICAL)


@tf.function
def nothing() -> Any:
    return tf.constant(1)


@tf.function
def five_ms() -> Any:
    # A sleep in Python would need the kernel: some milliseconds of one processor instead.
    noise = tf.random.normal([300, 300])
    for _ in tf.range(3):
        noise = tf.matmul(noise, noise) / 300.0
    return tf.reduce_sum(noise)


def cpu() -> float:
    times = os.times()
    return times.user + times.system


def run(coordinator: Any, function: Any, count: int) -> tuple[float, float]:
    """Schedule so many closures and wait for them; return wall seconds and CPU seconds here."""
    wall, used = time.perf_counter(), cpu()
    for _ in range(count):
        coordinator.schedule(function)
    coordinator.join()
    return time.perf_counter() - wall, cpu() - used


def end(code: int = 0) -> None:
    """End this process without TensorFlow's threads in the way."""
    sys.stdout.flush()
    os._exit(code)
