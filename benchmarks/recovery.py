"""Interruption of a consumer when a data worker is killed, against plain TensorFlow.

A thread reads as fast as it can while a worker is killed: one of two, or the only one. The figure
is the longest time between two batches in the following seconds. A `Cluster` restarts the worker.
The alternative is a ``DispatchServer`` and a ``WorkerServer`` with a journal, in separate
processes. A script restarts this worker on the same port immediately after its death.

Every kill is in a new epoch, because TensorFlow's client increases its delay after each failure in
an epoch. "5 kills in one epoch" shows this effect. ``cluster.restart`` resets the worker's backoff
between the kills, except within "5 kills in one epoch". The backoff is for repeated failures.

The second part counts the missing elements of a ``"distributed_epoch"`` in which one of two workers
was killed. It uses the journal, and counts the reports of the loss. TensorFlow delivers each
element at most once. The journal does not have the elements that a worker has prepared or is
preparing.
"""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import _pairs
import tensorflow as tf

import tfd_notebook as tfd

service = tf.data.experimental.service

#: Seconds without a batch after which a consumer counts as hung.
HANG = 60.0
#: Seconds after the restart in which gaps count.
AFTER = 2.0

SERVER = """
import os, sys
import tensorflow as tf
service = tf.data.experimental.service
kind, port, address = sys.argv[1:]
if kind == "dispatcher":
    server = service.DispatchServer(
        service.DispatcherConfig(port=int(port), work_dir=address, fault_tolerant_mode=True)
    )
else:
    server = service.WorkerServer(
        service.WorkerConfig(
            dispatcher_address=address, worker_address=f"localhost:{port}", port=int(port)
        )
    )
print("ready", flush=True)
sys.stdin.read()
"""


class Bare:
    """TensorFlow's servers, each in a separate process."""

    def __init__(self, workers: int, stack: ExitStack) -> None:
        self._stack = stack
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tfd-bench-"))
        self._dispatcher = f"localhost:{free_port()}"
        self._start("dispatcher", self._dispatcher.split(":")[1], directory)
        self._ports = [str(free_port()) for _ in range(workers)]
        self._workers = [self._start("worker", port, self._dispatcher) for port in self._ports]

    def _start(self, kind: str, port: str, address: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, kind, port, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._stack.callback(end, process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", f"the {kind} at port {port} did not start"
        return process

    def distribute(self, mode: str) -> Any:
        return service.distribute(mode, f"grpc://{self._dispatcher}", compression=None)

    def kill(self, worker: int) -> None:
        """Kill a worker and wait for its restart."""
        end(self._workers[worker])
        self._workers[worker] = self._start("worker", self._ports[worker], self._dispatcher)

    def settle(self) -> None:
        """Do nothing, because the script has no backoff."""

    def report(self) -> str:
        return ""


class Ours:
    """The same servers in a `Cluster`."""

    def __init__(self, workers: int, stack: ExitStack) -> None:
        self._cluster = stack.enter_context(
            tfd.Cluster(data_workers=workers, policy=tfd.Policy(restarts=1000), name="recovery")
        )
        self._killed = 0.0

    def distribute(self, mode: str) -> Any:
        return self._cluster.distribute(mode)

    def kill(self, worker: int) -> None:
        """Kill a worker and wait for its restart."""
        self._killed = time.time()
        name = f"data_worker:{worker}"
        before = self._row(name).restarts
        self._cluster.kill(name)
        deadline = time.monotonic() + HANG
        while (row := self._row(name)).restarts == before or row.state != "ready":
            assert time.monotonic() < deadline, f"{name} is {row.state}: {row.reason}"
            time.sleep(0.01)

    def settle(self) -> None:
        """Reset the backoff of every worker."""
        for task in self._cluster.tasks:
            if self._row(task.name).restarts:
                self._cluster.restart(task.name)

    def report(self) -> str:
        """Return the kind of report about the loss since the last kill, or an empty string."""
        notices = (e for e in self._cluster.snapshot().events if e.time >= self._killed)
        return "notice" if any("is lost" in str(notice) for notice in notices) else ""

    def _row(self, task: str) -> Any:
        return self._cluster.snapshot().task(task)


class Reader:
    """A thread that reads an infinite dataset and records the time of each batch."""

    def __init__(self, dataset: Any) -> None:
        self.times: list[float] = []
        self._stop = False
        self._thread = threading.Thread(target=self._read, args=(dataset,), daemon=True)
        self._thread.start()
        wait(lambda: len(self.times) > 20)

    def _read(self, dataset: Any) -> None:
        for _ in dataset:
            self.times.append(time.monotonic())
            if self._stop:
                return

    def gap_after(self, kill: Callable[[], None]) -> float:
        """Kill a worker; return the longest time between batches from then on."""
        before = len(self.times) - 1
        kill()
        restarted = time.monotonic()
        time.sleep(AFTER)
        # Wait for the end of the last gap.
        if not wait(lambda: self.times[-1] > restarted + AFTER):
            return float("inf")
        times = self.times[before:]
        return max(later - sooner for sooner, later in itertools.pairwise(times))

    def close(self) -> None:
        self._stop = True
        self._thread.join(5)


def wait(until: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + HANG
    while not until():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def gaps(side: Ours | Bare, kills: int = 1) -> list[float]:
    """Kill a worker `kills` times in one epoch; return the longest gap after each kill."""
    reader = Reader(
        tf.data.Dataset.range(10**9).batch(100).apply(side.distribute("parallel_epochs"))
    )
    seconds = [reader.gap_after(lambda: side.kill(0)) for _ in range(kills)]
    reader.close()
    side.settle()
    return seconds


def row(name: str, seconds: list[float]) -> None:
    print(
        f"{name:45} median {statistics.median(seconds):6.2f} s, worst {max(seconds):6.2f} s, "
        f"{seconds.count(float('inf'))} of {len(seconds)} hung",
        flush=True,
    )


def busy(element: Any) -> Any:
    """Compute for some milliseconds."""
    noise = tf.random.normal([400, 400])
    return element + tf.cast(0 * tf.reduce_sum(noise @ noise), tf.int64)


#: Number of elements of an epoch, and its pipeline.
EPOCHS: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "single elements": (6_000, lambda numbers: numbers.map(lambda number: number)),
    "batches of 10": (20_000, lambda numbers: numbers.batch(10)),
    "single elements, slow": (1_000, lambda numbers: numbers.map(busy)),
    "batches of 10, slow": (1_000, lambda numbers: numbers.map(busy).batch(10)),
}


def loss(side: Ours | Bare, epoch: str) -> tuple[int, int, str]:
    """Kill one of two workers in an epoch; return losses, duplicates, and the reports."""
    count, prepare = EPOCHS[epoch]
    dataset = prepare(tf.data.Dataset.range(count)).apply(side.distribute("distributed_epoch"))
    delivered: Counter[int] = Counter()
    reports = []

    def read() -> None:
        try:
            for batch in dataset:
                delivered.update(batch.numpy().ravel().tolist())
        except (tf.errors.OpError, tfd.errors.TfdError) as error:
            reports.append(type(error).__name__)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    wait(lambda: len(delivered) > count // 3)
    side.kill(0)
    thread.join(HANG)
    reports.append("hung" if thread.is_alive() else side.report())
    side.settle()
    lost, duplicates = count - len(delivered), delivered.total() - len(delivered)
    return lost, duplicates, " and ".join(filter(None, reports))


def main() -> None:
    quick = _pairs.arguments(__doc__).quick
    compared = {}
    for workers, name in ((2, "one of two"), (1, "the only worker")):
        with ExitStack() as stack:
            ours, bare = Ours(workers, stack), Bare(workers, stack)
            figures = _pairs.interleave(
                {"ours": lambda ours=ours: gaps(ours)[0], "bare": lambda bare=bare: gaps(bare)[0]},
                rounds=4 if quick else 8,
                warm_up=0,
            )
            row(f"{name}, ours", figures["ours"])
            row(f"{name}, plain TensorFlow", figures["bare"])
            row(f"{name}, ours, 5 kills in one epoch", gaps(ours, 5))
            compared[name] = _pairs.compare(figures["ours"], figures["bare"])
            if workers == 1:
                continue
            for epoch, side in itertools.product(EPOCHS, (ours, bare)):
                label = "ours" if side is ours else "plain TensorFlow"
                losses = [loss(side, epoch) for _ in range(2 if quick else 3)]
                lost, duplicates, reports = zip(*losses, strict=True)
                print(
                    f"{epoch}, {label}: {list(lost)} of {EPOCHS[epoch][0]} lost, "
                    f"{list(duplicates)} duplicated, reported by {list(reports)}",
                    flush=True,
                )
    _pairs.report("recovery (one of two)", compared["one of two"], "seconds, longest gap")
    _pairs.report("recovery", compared["the only worker"], "seconds, longest gap, only worker")


if __name__ == "__main__":
    main()
