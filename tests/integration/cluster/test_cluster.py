"""Settings, directories, the contract of the dispatcher, and the stop of a cluster."""

from __future__ import annotations

import os
import re
import signal
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook.cluster import data_service
from tfd_notebook.errors import DataError, NoWorkers, StateError, TimeLimit, UnknownName, UsageError
from tfd_notebook.net.probe import probe

pytestmark = pytest.mark.integration

Range = tf.data.Dataset.range
service = tf.data.experimental.service


def test_user_settings_do_not_change_other_settings() -> None:
    # TensorFlow's class stores 0 for every interval that is not set, and 0 means 1 ms.
    settings = tfd.Service(
        worker_config=service.WorkerConfig("ignored:1", heartbeat_interval_ms=250),
        dispatcher_config=service.DispatcherConfig(job_gc_check_interval_ms=500),
    )
    with tfd.Cluster(data_workers=1, name="settings", service=settings) as cluster:
        dataset = Range(20).apply(cluster.distribute("dynamic"))
        assert len(list(dataset)) == 20
        time.sleep(1.0)  # with an interval of 1 ms, the job would be removed in this time
        assert len(list(dataset)) == 20


@pytest.fixture(scope="module")
def forgetful() -> Iterator[tfd.Cluster]:
    """Yield a cluster that discards epochs without consumers after half a second."""
    dispatcher = service.DispatcherConfig(job_gc_check_interval_ms=100, job_gc_timeout_ms=500)
    settings = tfd.Service(dispatcher_config=dispatcher)
    with tfd.Cluster(data_workers=1, name="forgetful", service=settings) as cluster:
        yield cluster


def assigned(cluster: tfd.Cluster) -> tuple[Any, ...]:
    """Return the tasks that the data worker holds for iterations."""
    (worker,) = data_service.of(cluster).data_workers()
    return probe(worker.address, 10.0, expect="data_worker").tasks


def test_epoch_that_was_left_is_discarded(forgetful: tfd.Cluster) -> None:
    dataset = Range(1_000_000).apply(forgetful.distribute("dynamic"))
    iterator = iter(dataset)
    next(iterator)
    assert len(assigned(forgetful)) == 1
    assert forgetful.jobs().records()[-1]["state"] == "running"
    del iterator
    until(lambda: not assigned(forgetful))
    until(lambda: forgetful.jobs().records()[-1]["state"] == "discarded")


def test_paused_epoch_is_kept(forgetful: tfd.Cluster) -> None:
    stream = forgetful.stream(Range(1000).apply(forgetful.distribute("dynamic")), buffer=2)
    elements = iter(stream.start())
    first = int(next(elements))
    stream.pause()
    # Another epoch, which is left later, is discarded while the stream is paused.
    left = iter(Range(1_000_000).apply(forgetful.distribute("dynamic")))
    next(left)
    assert len(assigned(forgetful)) == 2
    del left
    until(lambda: len(assigned(forgetful)) == 1)
    stream.resume()
    assert sorted([first, *map(int, elements)]) == list(range(1000))


def test_named_job_that_starts_again_is_reported(forgetful: tfd.Cluster) -> None:
    dataset = Range(100).batch(1).apply(forgetful.distribute("dynamic", job_name="resumed"))
    iterator = iter(dataset)
    next(iterator)
    del iterator
    until(lambda: forgetful.jobs().records()[-1]["state"] == "discarded")
    until(lambda: not assigned(forgetful))
    again = Range(100).batch(1).apply(forgetful.distribute("dynamic", job_name="resumed"))
    with pytest.warns(UserWarning, match="'resumed' had no reader .* start again"):
        assert len(list(again)) == 100


def test_work_dir_can_be_reused(tmp_path: Path) -> None:
    kept = tfd.Service(work_dir=str(tmp_path))
    for number in range(2):
        with tfd.Cluster(data_workers=1 + number, name="kept", service=kept) as cluster:
            dataset = Range(20).apply(cluster.distribute("dynamic", "epoch"))
            assert sorted(dataset.as_numpy_iterator()) == list(range(20))
            assert len(cluster.jobs()) == 1
    journals = list(tmp_path.iterdir())
    assert len(journals) == 2
    assert {stat.S_IMODE(journal.stat().st_mode) for journal in journals} == {0o700}


def test_documented_arguments_can_be_positional(tmp_path: Path) -> None:
    with tfd.Cluster(data_workers=1, name="positions") as cluster:
        read = Range(5).apply(cluster.distribute("dynamic", "named"))
        assert len(list(read)) == 5
        dataset_id = cluster.register(Range(6), "six")
        spec = tf.TensorSpec((), tf.int64)
        assert len(list(cluster.from_dataset_id("off", dataset_id, spec))) == 6
        saved = str(tmp_path / "saved")
        cluster.save(Range(7), saved, None, 60)
        assert sorted(tf.data.Dataset.load(saved).as_numpy_iterator()) == list(range(7))
        with pytest.raises(TypeError, match="job_nam"):
            cluster.distribute("dynamic", job_nam="x")


def test_dispatcher_follows_the_contract_of_tensorflow() -> None:
    cluster = tfd.Cluster(name="contract", start=False)
    dispatcher = cluster.dispatcher
    for call in (dispatcher.join, lambda: dispatcher.target):
        with pytest.raises(StateError, match="was not started"):
            call()
    with pytest.raises(tf.errors.FailedPreconditionError):
        dispatcher.join()
    assert dispatcher.workers == ()
    assert repr(dispatcher) == "<dispatcher of cluster 'contract', new>"
    dispatcher.stop()  # no-op, as in TensorFlow
    dispatcher.start()
    assert cluster.state == "ready"
    target = dispatcher.target
    pid = cluster.tasks[0].pid
    dispatcher.start()  # no-op, because the dispatcher runs
    assert cluster.tasks[0].pid == pid
    for kind in (TimeLimit, tf.errors.DeadlineExceededError):
        with pytest.raises(kind):
            dispatcher.join(timeout=0.1)
    waiter = threading.Thread(target=dispatcher.join, args=(30,))
    waiter.start()
    dispatcher.stop()
    waiter.join(60)
    assert not waiter.is_alive()
    assert (dispatcher.join(1), dispatcher.target, dispatcher.workers) == (True, target, ())
    assert repr(dispatcher).endswith(f"at {target}, stopped>")


def test_scaling_restarts_failed_workers() -> None:
    policy = tfd.Policy(restarts=0)
    with tfd.Cluster(data_workers=2, name="given-up", policy=policy) as cluster:
        pid = cluster.snapshot().task("data_worker:0").pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: cluster.snapshot().task("data_worker:0").state == "failed")
        cluster.scale(data_workers=2)
        assert [task.state for task in cluster.tasks] == ["ready"] * 3
        dataset = Range(20).apply(cluster.distribute("dynamic"))
        assert sorted(dataset.as_numpy_iterator()) == list(range(20))


@pytest.mark.parametrize("mode", ["off", "dynamic"])
def test_loop_without_data_workers_raises_an_error(mode: str) -> None:
    with tfd.Cluster(data_workers=1, name="none-left") as cluster:
        dataset = Range(50).filter(lambda x: x >= 0).apply(cluster.distribute(mode))
        assert len(list(dataset)) == 50
        cluster.scale(data_workers=0)
        for _ in range(2):
            with pytest.raises(NoWorkers):
                list(dataset)
        with pytest.raises(NoWorkers):
            list(cluster.observe(dataset.map(lambda x: x + 1)))
        cluster.scale(data_workers=1)
        assert len(list(dataset)) == 50


def test_dataset_of_a_stopped_cluster_raises_an_error() -> None:
    with tfd.Cluster(data_workers=1, name="gone") as cluster:
        dataset = Range(50).apply(cluster.distribute("off"))
    with pytest.raises(StateError, match="is stopped"):
        next(iter(dataset))
    with tfd.Cluster(data_workers=1, name="gone"), pytest.raises(StateError, match="is stopped"):
        list(dataset.batch(2))


def test_values_other_than_datasets_are_refused() -> None:
    with tfd.Cluster(name="wrong-kind") as cluster:
        for call in (cluster.stream, cluster.observe):
            with pytest.raises(UsageError, match="got list"):
                call([1, 2])


def test_stopping_cluster_is_not_returned() -> None:
    cluster = tfd.Cluster(data_workers=2, name="again")
    stopper = threading.Thread(target=cluster.stop)
    stopper.start()
    until(lambda: cluster.state in ("stopping", "stopped"))
    with tfd.Cluster(data_workers=2, name="again") as fresh:
        assert fresh is not cluster
        assert fresh.state == "ready"
        assert cluster.state == "stopped"
    stopper.join(60)
    cluster.stop()


def test_stream_gets_a_name_distinct_from_an_observed_dataset() -> None:
    with tfd.Cluster(data_workers=1, name="names") as cluster:
        endless = Range(1 << 40).batch(10).apply(cluster.distribute("off"))
        reading = iter(cluster.observe(endless, name="train"))
        next(reading)
        first = cluster.stream(endless, name="train").start()
        assert list(cluster.streams) == [first.name] == ["train-2"]
        second = cluster.stream(endless, name="train").start()
        assert first.state == "stopped"
        assert list(cluster.streams) == [second.name]
        # A stop while TensorFlow opens an iterator would leave its thread behind.
        assert second.wait(elements=1, timeout=60)
        with pytest.raises(UnknownName):
            cluster.logs("train")


@pytest.mark.root
def test_full_disk_is_named(tmp_path: Path) -> None:
    import subprocess

    small = tmp_path / "small"
    small.mkdir()
    options = ["-t", "tmpfs", "-o", "size=400k", "tmpfs", str(small)]
    subprocess.run(["mount", *options], check=True)
    try:
        full = tfd.Service(work_dir=str(small))
        with tfd.Cluster(data_workers=1, name="small", service=full) as cluster:
            dataset = Range(1 << 20).apply(cluster.distribute("dynamic"))
            with pytest.raises(tfd.errors.TfdError) as caught:
                for _ in dataset:
                    pass
            assert isinstance(caught.value, tfd.errors.WorkDirError)
            assert str(small) in str(caught.value)
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


def test_cache_smaller_than_an_element_is_named() -> None:
    settings = tfd.Service(cross_trainer_cache_size_bytes=10)
    with tfd.Cluster(data_workers=1, name="small", service=settings) as cluster:
        cache = service.CrossTrainerCache("trainer")
        shared = cluster.distribute("off", "shared", cross_trainer_cache=cache)
        with pytest.raises(DataError, match=r"Service\(cross_trainer_cache_size_bytes=") as caught:
            next(iter(Range(1000).repeat().batch(100).apply(shared)))
        assert re.search(r"an element has \d+ bytes, and the .* only 10\b", str(caught.value))


def test_data_workers_get_the_settings_of_the_service() -> None:
    settings = tfd.Service(worker_tags=["colocated"], cross_trainer_cache_size_bytes=10**6)
    with tfd.Cluster(data_workers=1, name="tagged", service=settings) as cluster:
        read = cluster.distribute("dynamic")
        with pytest.raises(NoWorkers, match=r"'COLOCATED'.*own process"):
            Range(5).apply(read)
        dataset_id = cluster.register(Range(5))
        with pytest.raises(NoWorkers, match="'COLOCATED'"):
            cluster.from_dataset_id("dynamic", dataset_id)
        # TensorFlow's own function waits for workers without the tag.
        plain = service.distribute("distributed_epoch", data_service.of(cluster).service_target)
        stream = cluster.stream(Range(5).apply(plain)).start()
        with pytest.raises(TimeLimit):
            stream.wait(elements=1, timeout=3.0)
        stream.stop()
        every = Range(5).apply(cluster.distribute("dynamic", target_workers="ANY"))
        assert sorted(every.as_numpy_iterator()) == list(range(5))
        coordinated = cluster.distribute("off", "c", consumer_index=0, num_consumers=1)
        assert int(next(iter(Range(5).repeat().apply(coordinated)))) == 0


def test_size_of_chunks_limits_the_files_of_a_saved_dataset(tmp_path: Path) -> None:
    settings = tfd.Service(snapshot_max_chunk_size_bytes=1000)
    with tfd.Cluster(data_workers=1, name="chunks", service=settings) as cluster:
        cluster.save(Range(1000), str(tmp_path / "saved"), None)
    files = list((tmp_path / "saved" / "chunks").iterdir())
    # Several threads write, each to a file of this size.
    assert len(files) > 5
    saved = tf.data.Dataset.load(str(tmp_path / "saved"))
    assert sorted(saved.as_numpy_iterator()) == list(range(1000))
