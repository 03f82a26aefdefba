"""Ctrl-C in a user's process, its end, and clusters that outlive it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._waiting import until
from tests.contracts._gate import WAIT, Gate, hold
from tfd_notebook import errors

pytestmark = pytest.mark.integration

Range = tf.data.Dataset.range

#: Runs cells, and prints how each of them ended.
KERNEL = """
import json, sys, traceback
namespace = {}
for line in sys.stdin:
    try:
        exec(json.loads(line), namespace)
        print("done", flush=True)
    except BaseException as error:
        traceback.print_exc()
        print(type(error).__name__, flush=True)
"""


class Kernel:
    """A user's process in a separate process group, which runs cells."""

    def __init__(self, directory: Path) -> None:
        self._process: Any = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", KERNEL],
            env={**os.environ, "PYTHONPATH": str(directory)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid: int = self._process.pid

    def begin(self, cell: str) -> None:
        self._process.stdin.write(json.dumps(cell) + "\n")
        self._process.stdin.flush()

    def interrupt(self) -> None:
        """Send SIGINT to the process group once, as a terminal does for Ctrl-C."""
        os.killpg(self.pid, signal.SIGINT)

    def result(self) -> str:
        """Return the name of the error that ended the cell, or "done"."""
        return str(self._process.stdout.readline().strip())

    def run(self, cell: str) -> str:
        self.begin(cell)
        return self.result()

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._process.stdin.close()
        self._process.stdout.close()


IMPORTS = """
import tensorflow as tf
import tfd_notebook as tfd
from tests._waiting import until
from tests.contracts._gate import hold
cluster = tfd.Cluster(data_workers=1, name="own")
pids = [task.pid for task in cluster.tasks]
"""
#: Fails if Ctrl-C reached the cluster, or if the dataset cannot be read.
READ_AGAIN = """
assert sorted(int(number) for number in numbers) == [0, 1, 2, 3, 4]
assert [task.pid for task in cluster.tasks] == pids
until(lambda: cluster.state == "ready")
"""
#: Prints the pid of the data worker, and trains a model that is built before.
FIT = """
class Model(tf.keras.Model):
    def train_step(self, numbers):
        return {{"numbers": tf.size(numbers)}}

model = Model()
model.compile(jit_compile=False)
model.fit(tf.data.Dataset.range(5), verbose=0)
numbers = hold(tf.data.Dataset.range(5), {port}).apply(cluster.distribute("off"))
print(pids[1], flush=True)
model.fit(numbers, verbose=0)
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    directory = tmp_path_factory.mktemp("kernel")
    (directory / "tfd_waits.py").write_text(
        "import os; from tests.contracts._gate import pass_gate\n"
        "pass_gate(int(os.environ['TFD_GATE']))\n"
    )
    kernel = Kernel(directory)
    try:
        assert kernel.run(IMPORTS) == "done"
        yield kernel
    finally:
        kernel.close()


@pytest.mark.parametrize("cell", ["for number in numbers: pass", "list(observed)"])
def test_ctrl_c_ends_a_blocked_read(kernel: Kernel, cell: str) -> None:
    with Gate() as gate:
        kernel.begin(
            f"numbers = hold(tf.data.Dataset.range(5), {gate.port})\n"
            "numbers = numbers.apply(cluster.distribute('off'))\n"
            f"observed = cluster.observe(numbers)\n{cell}"
        )
        gate.reached()
        kernel.interrupt()
        assert kernel.result() == "KeyboardInterrupt"
    assert kernel.run(READ_AGAIN) == "done"


def test_ctrl_c_ends_a_fit_without_a_running_data_worker(kernel: Kernel) -> None:
    with Gate() as gate:
        kernel.begin(FIT.format(port=gate.port))
        data_worker = int(kernel.result())
        gate.reached()
        os.kill(data_worker, signal.SIGSTOP)
        try:
            kernel.interrupt()
            assert kernel.result() == "KeyboardInterrupt"
        finally:
            os.kill(data_worker, signal.SIGCONT)
    assert kernel.run(READ_AGAIN) == "done"


def test_ctrl_c_ends_a_wait_for_a_stream(kernel: Kernel) -> None:
    with Gate() as gate:
        kernel.begin(
            f"numbers = hold(tf.data.Dataset.range(5), {gate.port})\n"
            "numbers = numbers.apply(cluster.distribute('off'))\n"
            "stream = cluster.stream(numbers)\nstream.start()\nstream.wait(elements=5)"
        )
        gate.reached()
        kernel.interrupt()
        assert kernel.result() == "KeyboardInterrupt"
    assert kernel.run("assert stream.wait(elements=5)") == "done"
    assert kernel.run(READ_AGAIN) == "done"


def test_ctrl_c_ends_a_start_and_its_tasks(kernel: Kernel) -> None:
    with Gate() as gate:
        start = "tfd.Cluster(data_workers=1, name='waits', preload='tfd_waits', env={env})"
        kernel.begin(start.format(env={"TFD_GATE": str(gate.port)}))
        gate.reached()
        kernel.interrupt()
        assert kernel.result() == "KeyboardInterrupt"
    assert kernel.run("assert list(tfd.clusters()) == ['own']") == "done"
    assert kernel.run("assert cluster.state == 'ready'") == "done"
    assert kernel.run("with tfd.Cluster(data_workers=1, name='waits'): pass") == "done"


#: Starts clusters, detaches all but one, and reads a part of a data job.
DETACH = """
import itertools, json
clusters = {name: tfd.Cluster(data_workers=1, name=name) for name in ("kept", "leased", "spare")}
for each in clusters.values():
    each.detach(hours=1)
clusters["own"] = cluster
numbers = tf.data.Dataset.range(400).apply(
    clusters["kept"].distribute("dynamic", job_name="epoch", max_outstanding_requests=1)
)
read = [int(number) for number in itertools.islice(numbers, 50)]
pids = {name: [task.pid for task in each.tasks] for name, each in clusters.items()}
print(json.dumps([pids, read]), flush=True)
"""


@dataclass
class Killed:
    """The processes of the clusters of a killed kernel, and the elements that it had read."""

    pids: dict[str, list[int]]
    read: list[int]


@pytest.fixture(scope="module")
def killed(kernel: Kernel) -> Iterator[Killed]:
    kernel.begin(DETACH)
    report = json.loads(kernel.result())
    assert kernel.result() == "done"
    kernel.kill()
    yield Killed(*report)
    for name in names():
        tfd.attach(name, connect=False).stop()


def names() -> list[str]:
    return [str(record["name"]) for record in tfd.clusters().everywhere.records()]


def end(pids: list[int]) -> None:
    """Wait until these processes have ended."""
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), WAIT)


def test_only_detached_clusters_outlive_their_kernel(killed: Killed) -> None:
    end(killed.pids["own"])
    assert all(psutil.pid_exists(pid) for pid in killed.pids["kept"])
    until(lambda: sorted(names()) == ["kept", "leased", "spare"], WAIT)


def test_end_of_a_with_block_only_disconnects(killed: Killed) -> None:
    with tfd.attach("kept") as cluster:
        assert [task.pid for task in cluster.tasks] == killed.pids["kept"]
        assert cluster.detached
        assert tfd.attach("kept") is cluster
    assert cluster.state == "left"
    assert "kept" in names()
    with tfd.attach("kept") as cluster:
        assert cluster.state == "ready"


def test_another_process_continues_the_data_job(killed: Killed) -> None:
    with tfd.attach("kept") as cluster:
        numbers = Range(400).apply(
            cluster.distribute("dynamic", job_name="epoch", max_outstanding_requests=1)
        )
        rest = [int(number) for number in numbers]
    assert len(killed.read) == 50
    assert len(rest) == len(set(rest))
    assert not set(rest) & set(killed.read), "the job started again"
    # Only elements that were sent to the killed kernel are lost.
    assert len(rest) + len(killed.read) >= 380


def test_another_process_can_stop_the_cluster(killed: Killed) -> None:
    cluster = tfd.attach("spare")
    assert sorted(Range(5).apply(cluster.distribute("dynamic")).as_numpy_iterator()) == [*range(5)]
    cluster.stop()
    assert cluster.state == "stopped"
    end(killed.pids["spare"])
    until(lambda: "spare" not in names(), WAIT)


def test_expired_lease_ends_the_cluster(killed: Killed) -> None:
    cluster = tfd.attach("leased")
    cluster.detach(hours=0.5 / 3600)  # a new lease
    until(lambda: cluster.ended, WAIT)
    assert cluster.state == "stopped"
    assert any("lease expired" in notice.what for notice in cluster.snapshot().notices)
    end(killed.pids["leased"])


STOP = "import tfd_notebook as tfd; tfd.attach('kept', connect=False).stop()"


def test_stop_by_another_process_ends_a_read(killed: Killed) -> None:
    """This is the last test, because it stops the shared cluster."""
    cluster = tfd.attach("kept")
    with Gate() as gate:
        numbers = hold(Range(5), gate.port).apply(cluster.distribute("off"))

        def stop() -> None:
            gate.reached()
            subprocess.run([sys.executable, "-c", STOP], check=True)

        stopper = threading.Thread(target=stop)
        stopper.start()
        with pytest.raises(errors.TfdError, match="kept"):
            list(numbers)
        stopper.join(WAIT)
    until(lambda: cluster.ended, WAIT)
    assert cluster.state == "stopped"
    assert any("stopped from another process" in n.what for n in cluster.snapshot().notices)
    end(killed.pids["kept"])
    until(lambda: not names(), WAIT)
