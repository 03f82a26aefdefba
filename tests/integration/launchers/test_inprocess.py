"""Servers in the process of the test: their functions, their limits, and no hangs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._reading import Reader, read
from tests._waiting import until
from tests.integration._consume import KINDS, Enough, consume
from tfd_notebook.agent import error_server
from tfd_notebook.data.service.options import ReadOptions
from tfd_notebook.errors import (
    Interrupted,
    PipelineError,
    PortInUse,
    StateError,
    UsageError,
    WorkDirError,
)
from tfd_notebook.launchers import InProcess, inprocess
from tfd_notebook.launchers.client.orphans import sweep
from tfd_notebook.model.spec import ClusterConfig
from tfd_notebook.net.probe import probe
from tfd_notebook.testing import check_launcher

pytestmark = [
    pytest.mark.integration,
    # Keras warns about every dataset that it does not shuffle, and about its end.
    pytest.mark.filterwarnings("ignore:.shuffle=True.", "ignore:Your input ran out of data"),
]

ENDLESS = 1 << 40


@pytest.mark.timeout(340)  # all checks
def test_launcher_conforms() -> None:
    report = check_launcher(InProcess)
    refused = {outcome.check for outcome in report.outcomes if outcome.state == "refused"}
    assert refused == {"kill", "training", "run", "connection", "detach"}


def batches(count: int = 60) -> Any:
    return tf.data.Dataset.range(count).batch(5)


@pytest.fixture
def cluster() -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=2, launcher="inprocess", name="inside") as cluster:
        yield cluster


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_consumer_gets_all_elements(cluster: tfd.Cluster, kind: str) -> None:
    dataset = batches().apply(cluster.distribute("dynamic"))
    assert consume(kind, cluster, dataset) == dict.fromkeys(range(60), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_next_epoch_is_complete_after_scaling(cluster: tfd.Cluster, kind: str) -> None:
    # A dispatcher keeps every worker, and TensorFlow's consumers would wait for a removed one.
    dataset = batches().apply(cluster.distribute("dynamic"))
    assert consume(kind, cluster, dataset) == dict.fromkeys(range(60), 1)
    cluster.scale(data_workers=1)
    assert consume(kind, cluster, dataset) == dict.fromkeys(range(60), 1)
    cluster.scale(data_workers=2)
    assert [task.name for task in cluster.tasks][1:] == ["data_worker:0", "data_worker:1"]
    assert consume(kind, cluster, dataset) == dict.fromkeys(range(60), 1)


def test_snapshot_after_a_loop_has_its_final_counts(cluster: tfd.Cluster) -> None:
    for count in [*range(1, 12), *range(1, 12)]:
        iterator = iter(cluster.observe(batches(), name=f"loop {count}"))
        for _ in range(count):
            next(iterator)
        del iterator
        row = cluster.snapshot().streams[-1]
        assert (row.name, row.elements) == (f"loop {count}", count)


def test_failed_start_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(WorkDirError):
        InProcess().connect(ClusterConfig("unstarted"), lambda event: None)
    assert not [thread for thread in threading.enumerate() if "unstarted" in thread.name]


ENDED = """
import os
from tfd_notebook.launchers import InProcess
from tfd_notebook.launchers.client.orphans import sweep
from tfd_notebook.model.spec import ClusterConfig

(task_host,) = InProcess().connect(ClusterConfig("unclosed"), lambda event: None)
assert not sweep()
print(task_host.directory, flush=True)
os._exit(0)
"""


def test_directory_of_an_ended_process_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path))
    directory = subprocess.check_output([sys.executable, "-c", ENDED], text=True).strip()
    assert [orphan.what for orphan in sweep()] == [directory]
    assert not Path(directory).exists()


@pytest.mark.parametrize("kind", KINDS)
def test_stop_interrupts_a_running_read(cluster: tfd.Cluster, kind: str) -> None:
    dataset = batches(ENDLESS).apply(cluster.distribute("off"))
    stopper = threading.Thread(target=cluster.stop)

    def on_batch(number: int) -> None:
        if number == 10:
            stopper.start()

    with pytest.raises(Interrupted):
        consume(kind, cluster, dataset, on_batch)
    stopper.join(60)
    assert cluster.state == "stopped"


def test_static_sharding_restarts_the_dispatcher(cluster: tfd.Cluster) -> None:
    dataset = batches().apply(cluster.distribute("data"))
    assert consume("for", cluster, dataset) == dict.fromkeys(range(60), 1)
    assert cluster.snapshot().task("dispatcher:0").restarts == 1


def test_kill_is_refused_and_restart_works(cluster: tfd.Cluster) -> None:
    with pytest.raises(StateError, match="cannot be killed"):
        cluster.kill("data_worker:0")
    assert "output of the kernel" in cluster.logs("data_worker:0")
    cluster.restart("data_worker:0")
    assert cluster.snapshot().task("data_worker:0").state == "ready"


def test_worker_restarts_during_a_read(cluster: tfd.Cluster) -> None:
    dataset = batches(ENDLESS).apply(cluster.distribute("off"))
    with cluster.stream(dataset).start() as stream:
        stream.wait(elements=5, timeout=60)
        cluster.restart("data_worker:0")
        stream.wait(elements=stream.elements + 20, timeout=60)
    assert cluster.snapshot().task("data_worker:0").state == "ready"


@pytest.mark.parametrize("again", ["restart", "scale"])
def test_next_epoch_is_complete_after_a_worker_was_replaced(again: str) -> None:
    """TensorFlow's finalizer of the old server would unregister the new one."""
    with tfd.Cluster(data_workers=1, launcher="inprocess", name="back") as cluster:
        dataset = batches().apply(cluster.distribute("off"))
        expected = [list(range(start, start + 5)) for start in range(0, 60, 5)]
        for _ in range(3):
            assert read(dataset) == expected
            if again == "restart":
                cluster.restart("data_worker:0")
            else:
                cluster.scale(data_workers=0)
                cluster.scale(data_workers=1)


def first_waits(started: threading.Event, proceed: threading.Event) -> Any:
    """Return an infinite dataset whose first element waits for `proceed`."""

    def wait(x: Any) -> Any:
        if not started.is_set():
            started.set()
            assert proceed.wait(60)
        return x

    return tf.data.Dataset.range(ENDLESS).map(lambda x: tf.numpy_function(wait, [x], tf.int64))


def test_restart_waits_until_the_old_server_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    started, proceed = threading.Event(), threading.Event()
    with tfd.Cluster(data_workers=1, launcher="inprocess", name="late") as cluster:
        dataset = first_waits(started, proceed).apply(cluster.distribute("off"))
        with Reader(dataset) as reader, monkeypatch.context() as patch:
            patch.setattr(inprocess, "_STOP_SECONDS", 0.0)
            assert started.wait(60)
            host = cluster._task_manager.task_host
            with pytest.raises(StateError, match=r"did not stop within 0\.1 s"):
                host.restart("data_worker:0", {}, timeout=0.1)
            assert cluster.snapshot().task("data_worker:0").state == "failed"
            timer = threading.Timer(0.5, proceed.set)
            timer.start()
            host.restart("data_worker:0", {}, timeout=90)
            timer.join()
            assert cluster.snapshot().task("data_worker:0").state == "ready"
            assert reader.first(10)


def test_worker_can_be_removed_while_its_old_server_stops() -> None:
    started, proceed = threading.Event(), threading.Event()
    with (
        tfd.Cluster(data_workers=1, launcher="inprocess", name="twice") as cluster,
        Reader(first_waits(started, proceed).apply(cluster.distribute("off"))),
    ):
        assert started.wait(60)
        first = cluster.snapshot().task("data_worker:0").address
        cluster.scale(data_workers=0)  # its server stops once the function has returned
        cluster.scale(data_workers=1)
        assert cluster.snapshot().task("data_worker:0").address != first
        cluster.scale(data_workers=0)
        cluster.scale(data_workers=1)
        with Reader(batches().apply(cluster.distribute("dynamic"))) as reader:
            assert len(reader.first(12)) == 12
            proceed.set()  # the old server, which still got a task of this epoch, stops
            assert len(reader.all()) == 12


def coordinated(cluster: tfd.Cluster, dataset: Any, count: int) -> list[Any]:
    """Return the datasets of `count` consumers that take elements in rounds."""
    return [
        dataset.apply(
            cluster.distribute("off", job_name="rounds", consumer_index=i, num_consumers=count)
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("count", [2, 3])
def test_coordinated_rounds_may_span_two_epochs(cluster: tfd.Cluster, count: int) -> None:
    """Data workers of this process stop after the iterators of their readers are deleted."""
    endless = tf.data.Dataset.range(2 * count + 1).repeat()
    with contextlib.ExitStack() as stack:
        readers = [
            stack.enter_context(Reader(dataset)) for dataset in coordinated(cluster, endless, count)
        ]
        for reader in readers:
            elements = reader.first(200)
            assert len(elements) >= 200
            assert set(elements) <= set(range(2 * count + 1))


def test_coordinated_reads_use_grpc() -> None:
    coordinated = ReadOptions("OFF", job_name="rounds", consumer_index=0, num_consumers=2)
    assert coordinated.transfer(in_process=True) == "grpc"
    assert ReadOptions("OFF").transfer(in_process=True) == "local"


def test_coordinated_reads_include_an_added_worker(cluster: tfd.Cluster) -> None:
    with contextlib.ExitStack() as stack:
        endless = tf.data.Dataset.range(ENDLESS).repeat()
        readers = [
            stack.enter_context(Reader(dataset)) for dataset in coordinated(cluster, endless, 2)
        ]
        for reader in readers:
            reader.first(10)
        cluster.scale(data_workers=3)
        for reader in readers:
            assert len(reader.more(200)) >= 210


@pytest.mark.parametrize("removed", ["before", "during"])
def test_coordinated_read_continues_without_a_removed_worker(
    cluster: tfd.Cluster, removed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dispatcher adds a task for the removed worker, with which the read must not end."""
    called = threading.Semaphore(0)
    get_element = error_server.ErrorServer._get_element

    def record(self: Any, request: bytes, context: Any) -> bytes:
        called.release()
        return get_element(self, request, context)

    monkeypatch.setattr(error_server.ErrorServer, "_get_element", record)
    endless = tf.data.Dataset.range(ENDLESS).repeat()
    if removed == "before":
        cluster.scale(data_workers=1)
    with contextlib.ExitStack() as stack:
        readers = [
            stack.enter_context(Reader(dataset)) for dataset in coordinated(cluster, endless, 2)
        ]
        if removed == "during":
            for reader in readers:
                reader.first(10)
            cluster.scale(data_workers=1)
        for _ in readers:
            assert called.acquire(timeout=60)
        for reader in readers:
            reader.more(200)


def test_coordinated_read_ends_with_its_last_worker(cluster: tfd.Cluster) -> None:
    endless = tf.data.Dataset.range(ENDLESS).repeat()
    with contextlib.ExitStack() as stack:
        readers = [
            stack.enter_context(Reader(dataset)) for dataset in coordinated(cluster, endless, 2)
        ]
        for reader in readers:
            reader.first(10)
        cluster.scale(data_workers=0)
        for reader in readers:
            assert reader.all()


def test_late_consumer_of_a_coordinated_read_gets_an_error(cluster: tfd.Cluster) -> None:
    """TensorFlow's in-memory transfer would wait without end; gRPC raises an error."""
    endless = tf.data.Dataset.range(ENDLESS).repeat()
    with contextlib.ExitStack() as stack:
        readers = [
            stack.enter_context(Reader(dataset)) for dataset in coordinated(cluster, endless, 2)
        ]
        for reader in readers:
            reader.first(20)
        _, restarted = coordinated(cluster, endless, 2)
        with pytest.raises(PipelineError, match="current round has already reached"):
            read(restarted)


def test_coordinated_read_refuses_the_memory_transfer(cluster: tfd.Cluster) -> None:
    with pytest.raises(UsageError, match="coordinated read") as caught:
        cluster.distribute(
            "off",
            job_name="rounds",
            consumer_index=0,
            num_consumers=2,
            data_transfer_protocol="local",
        )
    assert "data_transfer_protocol" in str(caught.value.fix)


def test_port_in_use_is_refused(cluster: tfd.Cluster) -> None:
    port = int(cluster.dispatcher.target.rpartition(":")[2])
    with pytest.raises(PortInUse, match=str(port)):
        tfd.Cluster(launcher="inprocess", name="other", service=tfd.Service(port=port))
    assert probe(cluster.dispatcher.target).alive


def test_memory_transfer_does_not_count_as_sent_bytes(cluster: tfd.Cluster) -> None:
    dataset = tf.data.Dataset.range(ENDLESS).batch(10_000).apply(cluster.distribute("off"))
    began = time.monotonic()

    def on_batch(number: int) -> None:
        if time.monotonic() > began + 2.5:
            raise Enough

    consume("for", cluster, dataset, on_batch)
    rows = [row for row in cluster.snapshot().tasks if row.role == "data_worker"]
    assert [row.bytes_sent for row in rows] == [None, None]
    until(lambda: cluster.snapshot().streams)
