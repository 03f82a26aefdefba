"""The tf.data service: the elements of an epoch, streams, errors and crashes."""

from __future__ import annotations

import copy
import os
import pickle
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._ports import free_port
from tests._waiting import until
from tests.contracts._gate import WAIT, Gate, hold, pass_gate
from tfd_notebook import errors

pytestmark = pytest.mark.integration

Range = tf.data.Dataset.range
HINT = tf.data.experimental.SHARD_HINT


@pytest.fixture(scope="module")
def cluster() -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=2, name="service") as cluster:
        yield cluster


def python(dataset: Any, function: Any) -> Any:
    """Return `dataset` with the results of a Python function that returns an integer."""
    return dataset.map(lambda x: tf.numpy_function(lambda v: np.int64(function(v)), [x], tf.int64))


def kill(cluster: tfd.Cluster, task: str) -> Any:
    """Send SIGKILL to a task, and return its row once it is ready again."""
    before = row(cluster, task)
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: row(cluster, task).pid not in (before.pid, None), WAIT)
    until(lambda: row(cluster, task).state == "ready", WAIT)
    return row(cluster, task)


def row(cluster: tfd.Cluster, task: str) -> Any:
    return cluster.snapshot().task(task)


def worker_pids(cluster: tfd.Cluster) -> set[int | None]:
    return {task.pid for task in cluster.tasks if task.role == "data_worker"}


@pytest.mark.parametrize(
    ("mode", "times"),
    [
        ("off", 2),
        ("parallel_epochs", 2),
        ("dynamic", 1),
        ("distributed_epoch", 1),
        ("file", 1),
        ("data", 1),
        ("file_or_data", 1),
        ("hint", 1),
    ],
)
def test_epoch_has_each_element_as_often_as_promised(
    cluster: tfd.Cluster, mode: str, times: int, tmp_path: Path
) -> None:
    for number in range(2):
        np.arange(3 * number, 3 * number + 3).tofile(tmp_path / f"{number}.bin")
    names = [str(path) for path in sorted(tmp_path.glob("*.bin"))]
    dataset = tf.data.FixedLengthRecordDataset(names, 8)
    if mode == "hint":
        dataset = dataset.shard(HINT, HINT)
    dataset = dataset.map(lambda record: tf.io.decode_raw(record, tf.int64)[0])
    read = dataset.apply(cluster.distribute(mode))
    assert isinstance(read, tf.data.Dataset)
    assert Counter(read.as_numpy_iterator()) == dict.fromkeys(range(6), times)


def test_pairs_of_different_elements_are_refused(cluster: tfd.Cluster) -> None:
    pairs = tf.data.Dataset.zip((Range(6), Range(6)))
    with pytest.raises(errors.DataChanged, match=r'zip\(\).*mode "dynamic"'):
        pairs.apply(cluster.distribute("dynamic"))
    read = pairs.apply(cluster.distribute("data"))
    assert sorted(read.as_numpy_iterator()) == [(number, number) for number in range(6)]


def test_python_function_runs_in_the_data_workers(cluster: tfd.Cluster) -> None:
    factor = 1 << 40
    read = python(Range(5), lambda v: v * factor + os.getpid())
    numbers = list(read.apply(cluster.distribute("off")).as_numpy_iterator())
    assert Counter(number // factor for number in numbers) == dict.fromkeys(range(5), 2)
    assert {number % factor for number in numbers} == worker_pids(cluster)


def test_generator_runs_in_the_data_workers(cluster: tfd.Cluster) -> None:
    def pids() -> Iterator[int]:
        yield os.getpid()

    signature = tf.TensorSpec((), tf.int64)
    read = tf.data.Dataset.from_generator(pids, output_signature=signature)
    read = read.apply(cluster.distribute("off"))
    assert set(read.as_numpy_iterator()) == worker_pids(cluster)


def fail(value: int) -> int:
    raise ValueError(f"label {value} is invalid")


def test_failing_python_function_raises_its_message(cluster: tfd.Cluster) -> None:
    read = python(Range(7, 8), fail).apply(cluster.distribute("dynamic"))
    with pytest.raises(errors.PipelineError, match="label 7 is invalid") as caught:
        list(read)
    assert str(caught.value.task).startswith("data_worker:")
    assert isinstance(caught.value, tf.errors.OpError)


def test_stacks_show_a_function_that_does_not_return(cluster: tfd.Cluster) -> None:
    with Gate() as gate:
        read = hold(Range(5), gate.port).apply(cluster.distribute("off"))
        with cluster.stream(read):
            gate.reached(2)
            rows = {row["task"]: row for row in cluster.stacks().records()}
            gate.open()
    for task in ("data_worker:0", "data_worker:1"):
        assert (rows[task]["function"], Path(rows[task]["file"]).name) == ("pass_gate", "_gate.py")
        assert "wait" in [frame["function"] for frame in rows[task]["stack"]]


def test_stream_raises_the_error_of_its_data(cluster: tfd.Cluster) -> None:
    read = python(Range(8, 9), fail).apply(cluster.distribute("dynamic"))
    stream = cluster.stream(read).start()
    with pytest.raises(errors.PipelineError, match="label 8 is invalid"):
        stream.wait(timeout=WAIT)
    assert stream.state == "failed"


def test_function_that_cannot_be_sent_is_named(cluster: tfd.Cluster) -> None:
    lock = threading.Lock()

    def locked(value: int) -> int:
        with lock:
            return value

    with pytest.raises(errors.NotSerializable, match=r"locked .*test_data_service\.py:\d+.*lock"):
        Range(5).map(lambda x: tf.numpy_function(locked, [x], tf.int64)).apply(
            cluster.distribute("dynamic")
        )


def test_stream_pauses_resumes_and_waits(cluster: tfd.Cluster) -> None:
    in_sink, proceed = threading.Event(), threading.Event()

    def sink(element: Any) -> None:
        in_sink.set()
        assert proceed.wait(WAIT)

    read = Range(10).apply(cluster.distribute("dynamic"))
    with cluster.stream(read, name="paused", sinks=[sink]) as stream:
        assert in_sink.wait(WAIT)
        stream.pause()
        proceed.set()
        assert stream.wait(elements=1, timeout=WAIT)
        with pytest.raises(errors.TimeLimit, match=r"resume"):
            stream.wait(elements=2, timeout=0.3)
        assert (stream.state, stream.elements) == ("paused", 1)
        stream.resume()
        assert stream.wait(elements=2, timeout=WAIT)
        assert stream.wait(timeout=WAIT)
        assert (stream.state, stream.elements) == ("finished", 10)
        with pytest.raises(errors.DataError, match="10 of 11"):
            stream.wait(elements=11, timeout=WAIT)


def test_restored_stream_continues_at_its_checkpoint(cluster: tfd.Cluster, tmp_path: Path) -> None:
    position = str(tmp_path / "position")
    with cluster.stream(Range(10), discard=False, buffer=2) as stream:
        reader = iter(stream)
        assert [int(next(reader)) for _ in range(4)] == [0, 1, 2, 3]
        stream.checkpoint(position)
    rest = cluster.stream(Range(10)).restore(position)
    assert [int(x) for x in rest] == [4, 5, 6, 7, 8, 9]


def test_observed_dataset_is_complete_and_has_a_row(cluster: tfd.Cluster) -> None:
    observed = cluster.observe(Range(7).map(lambda x: x * x), name="squares")
    assert list(observed.as_numpy_iterator()) == [0, 1, 4, 9, 16, 25, 36]

    def finished() -> Any:
        rows = [row for row in cluster.snapshot().streams if row.name == "squares"]
        return rows and rows[0].state == "finished" and rows[0]

    shown = until(finished, WAIT)
    assert (shown.kind, shown.elements, shown.bytes) == ("dataset", 7, 56)


def test_registered_dataset_is_read_by_its_id(cluster: tfd.Cluster) -> None:
    dataset_id = cluster.register(Range(6).map(lambda x: x + 1))
    read = cluster.from_dataset_id("dynamic", dataset_id)
    assert sorted(read.as_numpy_iterator()) == [1, 2, 3, 4, 5, 6]


def test_copy_of_a_distributed_dataset_is_the_dataset(cluster: tfd.Cluster) -> None:
    dataset = Range(6).apply(cluster.distribute("dynamic"))
    copied = copy.deepcopy({"train": dataset, "cluster": cluster})
    assert copied["train"] is dataset
    assert copied["cluster"] is cluster
    with pytest.raises(errors.UsageError, match=r"the id from cluster\.register"):
        pickle.dumps(dataset)
    dataset_id = pickle.loads(pickle.dumps(cluster.register(Range(6))))
    for read in (copied["train"], cluster.from_dataset_id("dynamic", dataset_id)):
        assert sorted(read.as_numpy_iterator()) == [0, 1, 2, 3, 4, 5]


def test_saved_dataset_can_be_loaded(cluster: tfd.Cluster, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    cluster.save(Range(6), path, timeout=WAIT)
    assert sorted(tf.data.Dataset.load(path).as_numpy_iterator()) == [0, 1, 2, 3, 4, 5]


def test_name_of_a_finished_job_is_refused(cluster: tfd.Cluster) -> None:
    read = Range(4).apply(cluster.distribute("dynamic", job_name="epoch"))
    assert sorted(read.as_numpy_iterator()) == [0, 1, 2, 3]
    with pytest.raises(errors.FinishedJob) as caught:
        Range(4).apply(cluster.distribute("dynamic", job_name="epoch"))
    assert "job_name='epoch-2'" in str(caught.value.fix)


def test_dynamic_epoch_is_exact_after_a_dispatcher_crash(cluster: tfd.Cluster) -> None:
    """Both data workers have a split and request none, so that no split is in transit."""
    received: list[int] = []
    with Gate() as gate:
        read = hold(Range(40), gate.port).apply(cluster.distribute("dynamic"))
        stream = cluster.stream(read, sinks=[lambda x: received.append(int(x))]).start()
        gate.reached(2)
        before = row(cluster, "dispatcher:0")
        after = kill(cluster, "dispatcher:0")
        assert (after.address, after.restarts) == (before.address, before.restarts + 1)
        gate.open()
        assert stream.wait(timeout=WAIT)
    assert sorted(received) == list(range(40))


def test_restarted_data_worker_joins_the_read(cluster: tfd.Cluster) -> None:
    pids: list[int] = []
    with Gate() as gate:
        port = gate.port

        def pid(value: int) -> int:
            pass_gate(port)
            return os.getpid()

        read = python(Range(1 << 40), pid).apply(cluster.distribute("off"))
        with cluster.stream(read, sinks=[lambda x: pids.append(int(x))]):
            gate.reached(2)
            after = kill(cluster, "data_worker:0")
            gate.reached()  # by the new process
            gate.open()
            until(lambda: after.pid in pids, WAIT)


def test_loss_of_a_data_worker_is_an_error_with_the_reason() -> None:
    def crash(value: int) -> int:
        print("the disk is on fire", flush=True)
        os._exit(3)

    policy = tfd.Policy(restarts=0)
    with tfd.Cluster(data_workers=1, name="fragile", policy=policy) as cluster:
        read = python(Range(50), crash).apply(cluster.distribute("dynamic"))
        with pytest.raises(errors.DataLoss, match="data_worker:0"):
            list(read)
        until(lambda: row(cluster, "data_worker:0").state == "failed", WAIT)
        assert row(cluster, "data_worker:0").reason == "ended with exit status 3"
        # The notice also has the last lines of its log.
        assert any("the disk is on fire" in str(notice) for notice in cluster.snapshot().notices)


def test_stop_of_the_cluster_interrupts_a_blocked_read() -> None:
    with tfd.Cluster(data_workers=1, name="stopped") as cluster, Gate() as gate:
        read = hold(Range(5), gate.port).apply(cluster.distribute("off"))

        def stop() -> None:
            gate.reached()
            cluster.stop()

        stopper = threading.Thread(target=stop)
        stopper.start()
        with pytest.raises(errors.Interrupted, match="stopped"):
            list(read)
        stopper.join(WAIT)
        assert cluster.state == "stopped"


def test_read_without_data_workers_is_refused() -> None:
    with tfd.Cluster(name="empty") as cluster:
        with pytest.raises(errors.NoWorkers, match="no data worker") as caught:
            Range(5).apply(cluster.distribute("dynamic"))
        assert "scale" in str(caught.value.fix)
        cluster.scale(data_workers=1)
        assert len(list(Range(5).apply(cluster.distribute("dynamic")))) == 5


def test_explain_names_the_cause_and_the_stage() -> None:
    explain = tfd.explain  # its first use records the lines of later stages

    def count(number: int) -> int:
        """Hold the GIL much longer than TensorFlow's part of an element takes."""
        return sum(step & 3 for step in range(150_000)) + number

    def prepare(number: Any) -> Any:
        return tf.numpy_function(count, [number], tf.int64)

    limit = explain(Range(1 << 40).map(prepare, num_parallel_calls=2), seconds=6)
    assert limit.kind == "python"
    assert re.fullmatch(r"map\(prepare\) \(test_data_service\.py:\d+\)", limit.stage)
    assert str(limit).startswith(f"Bottleneck: the GIL, held by {limit.stage}")
    assert "use TensorFlow ops, or data workers" in limit.advice


def test_servers_are_safe_before_their_start_and_after_their_stop() -> None:
    dispatcher = tfd.Dispatcher(start=False)
    assert dispatcher.workers == ()
    dispatcher.start()
    config = tf.data.experimental.service.WorkerConfig(dispatcher.address)
    worker = tfd.DataWorker(config)
    assert dispatcher.workers == (worker.address,)
    for server in (worker, dispatcher):
        server.stop()
        server.stop()
        server.join(timeout=WAIT)
    assert dispatcher.workers == ()


def test_data_worker_without_a_dispatcher_is_refused() -> None:
    address = f"localhost:{free_port()}"
    with pytest.raises(errors.TfdError, match=address):
        tfd.DataWorker(tf.data.experimental.service.WorkerConfig(address))
