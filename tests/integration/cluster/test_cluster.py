"""A cluster's life at its edges: settings, directories, the dispatcher's contract, stopping."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from pathlib import Path

import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook.errors import NoWorkers, StateError, TimeLimit, UnknownName, UsageError

pytestmark = pytest.mark.integration

Range = tf.data.Dataset.range
service = tf.data.experimental.service


def test_settings_of_the_user_leave_the_others_alone() -> None:
    # TensorFlow's class writes 0 for every interval that is not set, and takes 0 for 1 ms.
    settings = tfd.Service(
        worker_config=service.WorkerConfig("ignored:1", heartbeat_interval_ms=250),
        dispatcher_config=service.DispatcherConfig(job_gc_check_interval_ms=500),
    )
    with tfd.Cluster(data_workers=1, name="settings", service=settings) as cluster:
        dataset = Range(20).apply(cluster.distribute("dynamic"))
        assert len(list(dataset)) == 20
        time.sleep(1.0)  # a job that is collected after 1 ms would be forgotten by now
        assert len(list(dataset)) == 20


def test_a_work_dir_is_used_again(tmp_path: Path) -> None:
    kept = tfd.Service(work_dir=str(tmp_path))
    for number in range(2):
        with tfd.Cluster(data_workers=1 + number, name="kept", service=kept) as cluster:
            dataset = Range(20).apply(cluster.distribute("dynamic", "epoch"))
            assert sorted(dataset.as_numpy_iterator()) == list(range(20))
            assert len(cluster.jobs()) == 1
    journals = list(tmp_path.iterdir())
    assert len(journals) == 2
    assert {stat.S_IMODE(journal.stat().st_mode) for journal in journals} == {0o700}


def test_promised_arguments_by_position(tmp_path: Path) -> None:
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


def test_the_dispatcher_keeps_its_contract() -> None:
    cluster = tfd.Cluster(name="contract", start=False)
    dispatcher = cluster.dispatcher
    for call in (dispatcher.join, lambda: dispatcher.target):
        with pytest.raises(StateError, match="was not started"):
            call()
    assert dispatcher.workers == ()
    assert repr(dispatcher) == "<dispatcher of cluster 'contract', new>"
    dispatcher.stop()  # as TensorFlow's own: nothing to stop
    dispatcher.start()
    assert cluster.state == "ready"
    target = dispatcher.target
    pid = cluster.tasks[0].pid
    dispatcher.start()  # it runs, and goes on
    assert cluster.tasks[0].pid == pid
    with pytest.raises(TimeLimit):
        dispatcher.join(timeout=0.1)
    waiter = threading.Thread(target=dispatcher.join, args=(30,))
    waiter.start()
    dispatcher.stop()
    waiter.join(20)
    assert not waiter.is_alive()
    assert (dispatcher.join(1), dispatcher.target, dispatcher.workers) == (True, target, ())
    assert repr(dispatcher).endswith(f"at {target}, stopped>")


def test_scaling_brings_back_what_was_given_up() -> None:
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
def test_no_worker_left_is_an_error_in_every_loop(mode: str) -> None:
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


def test_a_dataset_outlives_its_cluster_and_says_so() -> None:
    with tfd.Cluster(data_workers=1, name="gone") as cluster:
        dataset = Range(50).apply(cluster.distribute("off"))
    with pytest.raises(StateError, match="is stopped"):
        next(iter(dataset))
    with tfd.Cluster(data_workers=1, name="gone"), pytest.raises(StateError, match="is stopped"):
        list(dataset.batch(2))


def test_only_datasets_are_read() -> None:
    with tfd.Cluster(name="wrong-kind") as cluster:
        for call in (cluster.stream, cluster.observe):
            with pytest.raises(UsageError, match="got list"):
                call([1, 2])


def test_a_cluster_that_stops_is_not_handed_out() -> None:
    cluster = tfd.Cluster(data_workers=2, name="again")
    stopper = threading.Thread(target=cluster.stop)
    stopper.start()
    until(lambda: cluster.state in ("stopping", "stopped"))
    with tfd.Cluster(data_workers=2, name="again") as fresh:
        assert fresh is not cluster
        assert fresh.state == "ready"
        assert cluster.state == "stopped"
    stopper.join(20)
    cluster.stop()


def test_streams_beside_a_dataset_of_the_same_name() -> None:
    with tfd.Cluster(data_workers=1, name="names") as cluster:
        endless = Range(1 << 40).batch(10).apply(cluster.distribute("off"))
        reading = iter(cluster.observe(endless, name="train"))
        next(reading)
        first = cluster.stream(endless, name="train").start()
        assert list(cluster.streams) == [first.name] == ["train-2"]
        second = cluster.stream(endless, name="train").start()
        assert first.state == "stopped"
        assert list(cluster.streams) == [second.name]
        # TensorFlow cannot be stopped while it opens an iterator: that thread would be left.
        assert second.wait(elements=1, timeout=30)
        with pytest.raises(UnknownName):
            cluster.logs("train")


@pytest.mark.root
def test_a_disk_that_fills_up_is_named(tmp_path: Path) -> None:
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
