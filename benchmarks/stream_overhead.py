"""CPU per batch of an observed consumer, against a plain loop over the same data.

Three consumers are compared to ``for batch in dataset``. One is the same loop over the observed
dataset. The others are a `Stream` that discards its elements, and a `Stream` that the main thread
reads. Batches of 64 bytes show the absolute cost, batches of 5 MB its share.

With gRPC, the servers are separate processes. The figure is the CPU of this process with all
threads of TensorFlow. With local transfer, the workers are in this process, and their CPU is in
both figures. Each round has two plain loops. Consumers are compared to their mean, and the second
one, compared to the first, shows the noise of the machine.

The last line has the worst of the three consumers, which is the claim.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import _pairs
import tensorflow as tf

from tfd_notebook.data.consume.consumers import Consumers
from tfd_notebook.data.consume.observe import watch
from tfd_notebook.data.consume.stream import Stream

service = tf.data.experimental.service

#: Without these, glibc returns the memory of large batches to the system at irregular times. Two
#: plain loops over 5 MB batches differ by 20 %.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "64000000",
}

#: Items of an element, and elements per measurement, by transfer. A measurement takes 60 ms or
#: more, so that the ticks of the CPU's clock do not matter.
SIZES = {
    "64 B": (64, {"local": 2000, "grpc": 1000}),
    "5 MB": (5_000_000, {"local": 2000, "grpc": 100}),
}

SERVERS = """
import sys
import tensorflow as tf
service = tf.data.experimental.service
dispatcher = service.DispatchServer()
worker = service.WorkerServer(
    service.WorkerConfig(dispatcher_address=dispatcher.target.split("://")[1])
)
print(dispatcher.target, flush=True)
sys.stdin.read()
"""


@contextmanager
def in_this_process() -> Iterator[str]:
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    yield dispatcher.target
    del worker, dispatcher


@contextmanager
def in_another_process() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVERS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def cpu_per_batch(consume: Callable[[], int]) -> float:
    """Return the CPU of the process per batch that `consume` reads, in microseconds.

    It includes the prefetch that replaces the consumed batches.
    """
    began = settled()
    batches = consume()
    return (settled() - began) / batches * 1e6


def settled() -> float:
    """Wait until this process is idle; return its CPU time."""
    used, quiet, deadline = time.process_time(), 0, time.monotonic() + 5
    while quiet < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
        used, before = time.process_time(), used
        quiet = quiet + 1 if used - before < 0.0005 else 0
    return used


def loop(iterator: Any, batches: int) -> int:
    for _ in range(batches):
        next(iterator)
    return batches


def drain(stream: Stream, batches: int) -> int:
    before = stream.elements
    stream.resume()
    stream.wait(elements=before + batches, timeout=60)
    stream.pause()
    return stream.elements - before


def measurements(dataset: Any, batches: int, stack: ExitStack) -> dict[str, Callable[[], float]]:
    consumers = Consumers()
    bare, control = iter(dataset), iter(dataset)
    watched = iter(watch(dataset, consumers))
    drained = stack.enter_context(Stream(dataset, consumers))
    read = stack.enter_context(Stream(dataset, consumers, discard=False))
    reader = iter(read)
    drained.wait(elements=10, timeout=60)
    drained.pause()
    return {
        "bare loop": lambda: cpu_per_batch(lambda: loop(bare, batches)),
        "bare loop again": lambda: cpu_per_batch(lambda: loop(control, batches)),
        "watched loop": lambda: cpu_per_batch(lambda: loop(watched, batches)),
        "stream, drained": lambda: cpu_per_batch(lambda: drain(drained, batches)),
        "stream, read": lambda: cpu_per_batch(lambda: loop(reader, batches)),
    }


def main() -> None:
    if not ALLOCATOR.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})
    rounds = 5 if _pairs.arguments(__doc__).quick else 31
    worst: _pairs.Result | None = None
    for transfer, servers in (("local", in_this_process), ("grpc", in_another_process)):
        for size, (items, batches) in SIZES.items():
            with servers() as target, ExitStack() as stack:
                dataset = tf.data.Dataset.from_tensors(tf.zeros([items], tf.uint8)).repeat()
                dataset = dataset.apply(
                    service.distribute(
                        "parallel_epochs",
                        target,
                        compression=None,
                        data_transfer_protocol=transfer,
                    )
                )
                figures = _pairs.interleave(measurements(dataset, batches[transfer], stack), rounds)
            bare = figures.pop("bare loop")
            both = list(map(statistics.mean, zip(bare, figures["bare loop again"], strict=True)))
            for name, ours in figures.items():
                result = _pairs.compare(ours, bare if name == "bare loop again" else both)
                print(f"{transfer:5} {size} {name:15} {result}", flush=True)
                if name != "bare loop again" and (worst is None or result.ratio > worst.ratio):
                    worst = result
    assert worst is not None
    _pairs.report("stream_overhead", worst, "microseconds of CPU per batch")


if __name__ == "__main__":
    main()
