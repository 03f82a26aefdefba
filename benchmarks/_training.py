"""Functions to schedule, and helpers, for the benchmarks of the coordinator."""

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
    # Computes, because a sleep in Python would run in the coordinating process.
    noise = tf.random.normal([300, 300])
    for _ in tf.range(3):
        noise = tf.matmul(noise, noise) / 300.0
    return tf.reduce_sum(noise)


def cpu() -> float:
    return time.process_time()


def run(coordinator: Any, function: Any, count: int) -> tuple[float, float]:
    """Schedule `count` closures and wait; return wall and CPU seconds of this process."""
    wall, used = time.perf_counter(), cpu()
    for _ in range(count):
        coordinator.schedule(function)
    coordinator.join()
    return time.perf_counter() - wall, cpu() - used


def end(code: int = 0) -> None:
    """End this process immediately, because TensorFlow's threads could block its exit."""
    sys.stdout.flush()
    os._exit(code)
