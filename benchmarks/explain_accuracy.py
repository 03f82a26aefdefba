"""Accuracy of `tfd.explain`: twelve pipelines, each with a known bottleneck.

Each pipeline is explained ten times. Then the suggested change is made and its gain is measured.
The original and the changed pipeline alternate, and the best rate of each counts. A predicted gain
is right if it is within 25 % of the measured gain. Answers without a figure do not count for the
gains.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import _pairs
import numpy as np
import tensorflow as tf

import tfd_notebook as tfd
from tfd_notebook.data.explain.measurement import measure

ENDLESS = 1 << 40


@dataclass
class Case:
    """A pipeline, its bottleneck, and the pipeline after the change."""

    kind: str
    dataset: Any
    stage: str = ""
    changed: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    #: Number of original elements in one element of the changed pipeline.
    times: int = 1
    #: True if the change makes the first element arrive earlier.
    first: bool = False


def steps(number: Any, size: int = 700) -> Any:
    """Use some milliseconds of one core.

    Random numbers keep TensorFlow from parallelizing the stage, because they are stateful.
    """
    noise = tf.random.normal([size, size])
    return tf.cast(number, tf.float32) + 0 * tf.reduce_sum(tf.cumsum(noise, axis=1))


def in_python(number: Any) -> Any:
    total = int(number)
    for step in range(60_000):
        total += step & 3
    return np.int64(total)


@contextlib.contextmanager
def slow_map(directory: Path) -> Iterator[Case]:
    numbers = tf.data.Dataset.range(ENDLESS)
    yield Case(
        "stage",
        numbers.map(steps).prefetch(2),
        "map(steps)",
        numbers.map(steps, num_parallel_calls=tf.data.AUTOTUNE).prefetch(2),
    )


@contextlib.contextmanager
def slow_read(directory: Path) -> Iterator[Case]:
    near, far = socket.socketpair()
    over = threading.Event()

    def send() -> None:
        with contextlib.suppress(OSError):
            while not over.wait(0.01):
                far.sendall(bytes(4096))

    def records() -> Iterator[bytes]:
        while True:
            yield near.recv(4096, socket.MSG_WAITALL)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    dataset = tf.data.Dataset.from_generator(records, output_signature=tf.TensorSpec((), tf.string))
    yield Case("source", dataset.map(tf.strings.length), "from_generator(records)")
    over.set()
    sender.join()


@contextlib.contextmanager
def one_thread_source(directory: Path) -> Iterator[Case]:
    names = [str(directory / f"{number}.gz") for number in range(8)]
    noise = np.random.default_rng(1)
    for name in names:
        words = noise.integers(97, 123, 20_000_000, dtype=np.uint8).tobytes()
        with gzip.open(name, "wb", compresslevel=1) as file:
            file.write(words)

    def read(parallel: Any) -> Any:
        return (
            tf.data.Dataset.from_tensor_slices(names)
            .repeat()
            .interleave(
                lambda name: tf.data.FixedLengthRecordDataset(
                    name, 1_000_000, compression_type="GZIP"
                ),
                cycle_length=4,
                num_parallel_calls=parallel,
            )
            .map(tf.strings.length)
        )

    yield Case("source", read(None), "interleave", read(tf.data.AUTOTUNE))


@contextlib.contextmanager
def python_function(directory: Path) -> Iterator[Case]:
    def preprocess(number: Any) -> Any:
        return tf.numpy_function(in_python, [number], tf.int64)

    dataset = tf.data.Dataset.range(ENDLESS).map(preprocess, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.batch(8)
    with tfd.Cluster(data_workers=2, name="python") as cluster:
        yield Case("python", dataset, "map(preprocess)", dataset.apply(cluster.distribute("off")))


@contextlib.contextmanager
def small_elements(directory: Path) -> Iterator[Case]:
    numbers = tf.data.Dataset.range(ENDLESS).map(lambda number: number * 2)
    with tfd.Cluster(data_workers=2, name="small") as cluster:
        distribute = cluster.distribute("off")
        yield Case(
            "transfer",
            numbers.apply(distribute),
            changed=numbers.batch(64).apply(distribute),
            times=64,
        )


def noise_of(size: int) -> Any:
    block = tf.random.uniform([size], maxval=256, dtype=tf.int32)
    block = tf.cast(block, tf.uint8)
    return tf.data.Dataset.range(ENDLESS).map(lambda number: block)


@contextlib.contextmanager
def compression(directory: Path) -> Iterator[Case]:
    with tfd.Cluster(data_workers=2, name="compression") as cluster:
        yield Case(
            "transfer",
            noise_of(500_000).apply(cluster.distribute("off", compression="snappy")),
            changed=noise_of(500_000).apply(cluster.distribute("off", compression=None)),
        )


@contextlib.contextmanager
def transfer(directory: Path) -> Iterator[Case]:
    with (
        tfd.Cluster(data_workers=2, name="transfer") as cluster,
        tfd.Cluster(data_workers=2, name="inside", launcher="inprocess") as inside,
    ):
        yield Case(
            "transfer",
            noise_of(3_000_000).apply(cluster.distribute("off")),
            changed=noise_of(3_000_000).apply(inside.distribute("off")),
        )


@contextlib.contextmanager
def shuffle_buffer(directory: Path) -> Iterator[Case]:
    mapped = tf.data.Dataset.range(ENDLESS).map(steps, num_parallel_calls=tf.data.AUTOTUNE)
    yield Case("stage", mapped.shuffle(450), "shuffle(450)", mapped.shuffle(45), first=True)


@contextlib.contextmanager
def slow_worker(directory: Path) -> Iterator[Case]:
    dataset = tf.data.Dataset.range(ENDLESS).map(lambda n: steps(n, 300)).batch(16)
    with tfd.Cluster(data_workers=4, name="four") as cluster:
        pid = cluster.snapshot().task("data_worker:2").pid
        over = threading.Event()

        def hinder() -> None:
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                over.wait(0.09)
                os.kill(pid, signal.SIGCONT)
                over.wait(0.01)

        thread = threading.Thread(target=hinder, daemon=True)
        thread.start()
        try:
            yield Case("workers", dataset.apply(cluster.distribute("off")), "data_worker:2")
        finally:
            over.set()
            thread.join()


@contextlib.contextmanager
def slow_consumer(directory: Path) -> Iterator[Case]:
    dataset = tf.data.Dataset.range(ENDLESS).map(lambda n: steps(n, 200)).batch(4)

    def step(batch: Any) -> None:
        time.sleep(0.03)

    yield Case("consumer", dataset, changed=dataset, options={"step": step})


@contextlib.contextmanager
def device_copy(directory: Path) -> Iterator[Case]:
    copy = tf.data.experimental.copy_to_device("/cpu:1")
    dataset = tf.data.Dataset.range(ENDLESS).batch(64).apply(copy)
    yield Case("device_copy", dataset, "copy_to_device", dataset.prefetch(2))


@contextlib.contextmanager
def nothing(directory: Path) -> Iterator[Case]:
    dataset = tf.data.Dataset.range(ENDLESS).map(lambda n: steps(n, 200)).batch(4)
    yield Case("none", dataset, options={"step_time": 0.03})


CASES = {
    "slow map": slow_map,
    "slow read": slow_read,
    "source with one thread": one_thread_source,
    "function in Python": python_function,
    "small elements": small_elements,
    "compression that hurts": compression,
    "transfer": transfer,
    "shuffle buffer": shuffle_buffer,
    "slow worker among four": slow_worker,
    "slow consumer": slow_consumer,
    "copy to a device": device_copy,
    "nothing": nothing,
}


def speed(dataset: Any, case: Case, step: Any, seconds: float) -> float:
    """Return elements per second, or the inverse latency of the first element."""
    measurement = measure(dataset, seconds, step, warm_up=0.0 if case.first else 1.0)
    return 1 / measurement.first if case.first else measurement.rate


def main() -> None:
    parser = _pairs.parser(__doc__)
    parser.add_argument("--only", metavar="NAME", help="one pipeline")
    options = parser.parse_args()
    runs, seconds = (2, 6.0) if options.quick else (10, 8.0)
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    right, accurate, predicted, alarms = 0, 0, 0, 0
    total = 0
    for name, make in CASES.items():
        if options.only not in (None, name):
            continue
        with (
            tempfile.TemporaryDirectory(prefix="tfd-bench-") as directory,
            make(Path(directory)) as case,
        ):
            answers = []
            for _ in range(runs):
                answers.append(tfd.explain(case.dataset, seconds, **case.options))
            total += runs
            good = [a for a in answers if a.kind == case.kind and case.stage in a.stage]
            right += len(good)
            if case.kind == "none":
                alarms += runs - len(good)
            counts = Counter(answer.kind for answer in answers)
            kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
            print(f"{name}: {kinds}; right {len(good)} of {runs}\n    {answers[-1]}", flush=True)
            gains = [answer.expected_gain for answer in good if answer.expected_gain]
            if case.changed is None or not gains:
                continue
            before, after = [], []
            for _ in range(1 if options.quick else 3):
                before.append(speed(case.dataset, case, case.options.get("step"), seconds / 2))
                after.append(speed(case.changed, case, None, seconds / 2) * case.times)
            # Other load on the machine can only reduce the rates.
            gain = max(after) / max(before)
            near = sum(abs(each / gain - 1) <= 0.25 for each in gains)
            predicted += len(gains)
            accurate += near
            print(
                f"    gain measured {gain:.2f}, predicted {min(gains):.2f} to {max(gains):.2f}: "
                f"{near} of {len(gains)} within a quarter",
                flush=True,
            )
    share = accurate / predicted if predicted else 1.0
    print(f"false alarms without a bottleneck: {alarms}")
    print(
        f"explain_accuracy, gains: ratio {share:.3f} "
        f"(A {accurate}, B {predicted}, within a quarter)"
    )
    print(f"explain_accuracy: ratio {right / total:.3f} (A {right}, B {total}, right causes)")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
