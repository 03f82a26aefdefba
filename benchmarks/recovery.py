"""What a consumer notices when a data worker is killed, beside bare TensorFlow.

A thread reads as fast as it can while a worker is killed: one of two, or the only one. The figure
is the longest time between two batches in the seconds after that. Ours restarts the worker by
itself; beside it stand a ``DispatchServer`` and ``WorkerServer`` with a journal, in processes of
their own, whose worker a script starts again on the same port the moment it is dead.

Every kill meets a fresh epoch, because TensorFlow's client waits longer after each failure within
one: "5 kills in one epoch" shows that. For the same reason the worker's back-off, which is for
tasks that die again and again, is set back by ``cluster.restart`` between the kills, but not
within "5 kills in one epoch".

Then the elements that are missing at the end of a ``"distributed_epoch"`` in which one of two
workers was killed, with the journal, and whether anybody said so. TensorFlow delivers each
element at most once: what a worker has prepared or is preparing when it dies is in no journal.
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
#: Seconds for which gaps are looked for after the worker is back.
AFTER = 2.0

SERVER = """
import os, sys
import tensorflow as tf
service = tf.data.experimental.service
kind, port, other = sys.argv[1:]
if kind == "dispatcher":
    server = service.DispatchServer(
        service.DispatcherConfig(port=int(port), work_dir=other, fault_tolerant_mode=True)
    )
else:
    server = service.WorkerServer(
        service.WorkerConfig(
            dispatcher_address=other, worker_address=f"localhost:{port}", port=int(port)
        )
    )
print("ready", flush=True)
sys.stdin.read()
"""


class Bare:
    """TensorFlow's own servers, each in a process of its own."""

    def __init__(self, workers: int, stack: ExitStack) -> None:
        self._stack = stack
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tfd-bench-"))
        self._dispatcher = f"localhost:{free_port()}"
        self._start("dispatcher", self._dispatcher.split(":")[1], directory)
        self._ports = [str(free_port()) for _ in range(workers)]
        self._workers = [self._start("worker", port, self._dispatcher) for port in self._ports]

    def _start(self, kind: str, port: str, other: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, kind, port, other],
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
        """Kill a worker and return when it is back."""
        end(self._workers[worker])
        self._workers[worker] = self._start("worker", self._ports[worker], self._dispatcher)

    def settle(self) -> None:
        """Nothing backs off here."""

    def told(self) -> str:
        return ""


class Ours:
    """The same in a Cluster."""

    def __init__(self, workers: int, stack: ExitStack) -> None:
        self._cluster = stack.enter_context(
            tfd.Cluster(data_workers=workers, policy=tfd.Policy(restarts=1000), name="recovery")
        )
        self._heard = 0.0

    def distribute(self, mode: str) -> Any:
        return self._cluster.distribute(mode)

    def kill(self, worker: int) -> None:
        """Kill a worker and return when it is back."""
        self._heard = time.time()
        name = f"data_worker:{worker}"
        before = self._row(name).restarts
        self._cluster.kill(name)
        deadline = time.monotonic() + HANG
        while (row := self._row(name)).restarts == before or row.state != "ready":
            assert time.monotonic() < deadline, f"{name} is {row.state}: {row.reason}"
            time.sleep(0.01)

    def settle(self) -> None:
        """Have the next death of each worker count as its first."""
        for task in self._cluster.tasks:
            if self._row(task.name).restarts:
                self._cluster.restart(task.name)

    def told(self) -> str:
        """What was said of the loss since the last kill."""
        notices = (e for e in self._cluster.snapshot().events if e.time >= self._heard)
        return "notice" if any("is lost" in str(notice) for notice in notices) else ""

    def _row(self, task: str) -> Any:
        return self._cluster.snapshot().task(task)


class Reader:
    """A thread that reads an endless dataset and notes when each batch came."""

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
        """Kill somebody; return the longest time between batches from then on."""
        before = len(self.times) - 1
        kill()
        back = time.monotonic()
        time.sleep(AFTER)
        # The last gap counts to its end.
        if not wait(lambda: self.times[-1] > back + AFTER):
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
    """Kill a worker so many times in one epoch; return the longest gap after each kill."""
    reader = Reader(
        tf.data.Dataset.range(10**9).batch(100).apply(side.distribute("parallel_epochs"))
    )
    found = [reader.gap_after(lambda: side.kill(0)) for _ in range(kills)]
    reader.close()
    side.settle()
    return found


def row(name: str, found: list[float]) -> None:
    print(
        f"{name:45} median {statistics.median(found):6.2f} s, worst {max(found):6.2f} s, "
        f"{found.count(float('inf'))} of {len(found)} hung",
        flush=True,
    )


def busy(element: Any) -> Any:
    """Take some milliseconds."""
    noise = tf.random.normal([400, 400])
    return element + tf.cast(0 * tf.reduce_sum(noise @ noise), tf.int64)


#: How many elements an epoch has, and what its workers do with them.
EPOCHS: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "single elements": (6_000, lambda numbers: numbers.map(lambda number: number)),
    "batches of 10": (20_000, lambda numbers: numbers.batch(10)),
    "single elements, slow": (1_000, lambda numbers: numbers.map(busy)),
    "batches of 10, slow": (1_000, lambda numbers: numbers.map(busy).batch(10)),
}


def loss(side: Ours | Bare, epoch: str) -> tuple[int, int, str]:
    """Kill one of two workers in an epoch; return what was lost, what came twice, who said so."""
    count, prepare = EPOCHS[epoch]
    dataset = prepare(tf.data.Dataset.range(count)).apply(side.distribute("distributed_epoch"))
    seen: Counter[int] = Counter()
    told = []

    def read() -> None:
        try:
            for batch in dataset:
                seen.update(batch.numpy().ravel().tolist())
        except (tf.errors.OpError, tfd.errors.TfdError) as error:
            told.append(type(error).__name__)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    wait(lambda: len(seen) > count // 3)
    side.kill(0)
    thread.join(HANG)
    told.append("hung" if thread.is_alive() else side.told())
    side.settle()
    return count - len(seen), seen.total() - len(seen), " and ".join(filter(None, told))


def main() -> None:
    quick = _pairs.arguments(__doc__).quick
    compared = {}
    for workers, name in ((2, "one of two"), (1, "the only worker")):
        with ExitStack() as stack:
            ours, bare = Ours(workers, stack), Bare(workers, stack)
            figures = _pairs.interleave(
                {"ours": lambda ours=ours: gaps(ours)[0], "bare": lambda bare=bare: gaps(bare)[0]},
                rounds=4 if quick else 20,
                warm_up=0,
            )
            row(f"{name}, ours", figures["ours"])
            row(f"{name}, bare TensorFlow", figures["bare"])
            row(f"{name}, ours, 5 kills in one epoch", gaps(ours, 5))
            compared[name] = _pairs.compare(figures["ours"], figures["bare"])
            if workers == 1:
                continue
            for epoch, side in itertools.product(EPOCHS, (ours, bare)):
                whose = "ours" if side is ours else "bare TensorFlow"
                found = [loss(side, epoch) for _ in range(2 if quick else 5)]
                lost, twice, told = zip(*found, strict=True)
                print(
                    f"{epoch}, {whose}: {list(lost)} of {EPOCHS[epoch][0]} lost, "
                    f"{list(twice)} twice, told by {list(told)}",
                    flush=True,
                )
    _pairs.report("recovery (one of two)", compared["one of two"], "seconds, longest gap")
    _pairs.report("recovery", compared["the only worker"], "seconds, longest gap, only worker")


if __name__ == "__main__":
    main()
