"""Failures, hangs and restarts of workers and parameter servers."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._waiting import until
from tests.coordinator._programs import Programs
from tfd_notebook._compat.tf_coordinator import fallback
from tfd_notebook.coordinator.coordinator import Coordinator
from tfd_notebook.errors import StateError, TasksMissing, Unsupported, UsageError
from tfd_notebook.model.spec import Role

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    # When TensorFlow's executors are collected, they log the expected errors.
    pytest.mark.filterwarnings("ignore:Exception ignored in. .*Executor.__del__"),
]


#: Hides the name while the package installs its hooks. TensorFlow can use it later.
WITHOUT_NAME = """
import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator
queue = cluster_coordinator._CoordinatedClosureQueue
del cluster_coordinator._CoordinatedClosureQueue
import tfd_notebook as tfd
from tfd_notebook.coordinator.coordinator import Coordinator
cluster_coordinator._CoordinatedClosureQueue = queue

@tf.function
def count_to(limit):
    start = tf.constant(0, tf.int64)
    return tf.while_loop(lambda number: number < limit, lambda number: number + 1, [start])

with tfd.Cluster(workers=1, ps=1, name="without") as cluster:
    coordinator = cluster.coordinator()
    assert isinstance(coordinator, Coordinator)
    print(coordinator.full)
    (three,) = coordinator.schedule(count_to, args=(tf.constant(3, tf.int64),)).fetch()
    print(three)
    values = [coordinator.schedule(count_to, args=(tf.constant(10**12, tf.int64),)) for _ in "12"]
    for wait in (lambda: coordinator.join(timeout=0.5), values[1].fetch):
        try:
            wait()
        except Exception as error:
            print(type(error).__name__)
        coordinator.stop()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[tfd.Cluster]:
    policy = tfd.Policy(on_hang="restart", hang_seconds=1.5)
    with tfd.Cluster(workers=2, ps=1, name="failing", policy=policy) as cluster:
        cluster.coordinator()
        yield cluster


def build(coordinator: Coordinator) -> tf.train.Checkpoint:
    with coordinator.strategy.scope():
        return tf.train.Checkpoint(total=tf.Variable(0.0))


def stepping(checkpoint: tf.train.Checkpoint) -> Any:
    @tf.function
    def step(loops: Any) -> Any:
        number = tf.constant(0, tf.int64)
        while number < loops:
            number += 1
        checkpoint.total.assign_add(1.0)
        return number

    return step


def pid_of(cluster: tfd.Cluster, task: str) -> int:
    row = cluster.snapshot().task(task)
    assert row is not None
    assert row.pid is not None
    return row.pid


def error_text(error: BaseException) -> str:
    """Return the displayed text of an error."""
    return "\n".join((str(error), *getattr(error, "__notes__", ())))


def loops(number: int) -> Any:
    return tf.constant(number, tf.int64)


class TestWorkers:
    def test_closure_of_a_hung_worker_migrates(self, cluster: tfd.Cluster) -> None:
        coordinator = cluster.coordinator()
        step = stepping(build(coordinator))
        coordinator.schedule(step, args=(loops(1),)).fetch()
        coordinator.pause_worker(0)
        hung = psutil.Process(pid_of(cluster, "worker:1"))
        hung.suspend()
        value = coordinator.schedule(step, args=(loops(10),))
        until(lambda: coordinator.values.counts()["running"] == 1)
        coordinator.resume_worker(0)
        assert value.fetch() == 10
        assert coordinator.values.records(1)[0]["worker"] == 0
        until(lambda: cluster.snapshot().observed.get(Role.WORKER) == 2)
        assert not hung.is_running()

    def test_frozen_kernel_loses_no_task(self, cluster: tfd.Cluster) -> None:
        coordinator = cluster.coordinator()
        step = stepping(build(coordinator))
        coordinator.schedule(step, args=(loops(1),)).fetch()
        before = {task.name: task.pid for task in cluster.tasks}
        # While C code holds the GIL for 30 s, no thread of this process can run.
        killer = subprocess.Popen(["sh", "-c", f"sleep 3; kill -9 {before['worker:1']}"])
        ctypes.PyDLL(None).sleep(30)
        assert killer.wait(60) == 0
        values = [coordinator.schedule(step, args=(loops(9),)) for _ in range(20)]
        assert set(coordinator.fetch(values)) == {9}
        after = {task.name: task.pid for task in cluster.tasks}
        assert {name for name, pid in after.items() if pid != before[name]} == {"worker:1"}
        coordinator.pause_worker(0)
        assert coordinator.schedule(step, args=(loops(4),)).fetch() == 4  # by the restarted worker
        coordinator.resume_worker(0)

    def test_workers_are_added_and_removed_while_closures_run(self, cluster: tfd.Cluster) -> None:
        coordinator = cluster.coordinator()
        step = stepping(build(coordinator))
        values = [coordinator.schedule(step, args=(loops(100),)) for _ in range(50)]
        cluster.scale(workers=3)
        for worker in (0, 1):
            coordinator.pause_worker(worker)
        third = coordinator.schedule(step, args=(loops(7),))
        assert third.fetch() == 7
        assert coordinator.values.records(1)[0]["worker"] == 2
        for worker in (0, 1):
            coordinator.resume_worker(worker)
        coordinator.join(timeout=60)
        assert all(value.fetch() == 100 for value in values)
        cluster.scale(workers=2)
        more = [coordinator.schedule(step, args=(loops(5),)) for _ in range(20)]
        assert set(coordinator.fetch(more)) == {5}
        assert {row["worker"] for row in coordinator.values.records(20)} <= {0, 1}
        with pytest.raises(StateError, match="the coordinator needs one"):
            cluster.scale(workers=0)

    def test_worker_is_removed_while_it_runs_a_closure(self, cluster: tfd.Cluster) -> None:
        coordinator = cluster.coordinator()
        step = stepping(build(coordinator))
        coordinator.pause_worker(0)
        endless = coordinator.schedule(step, args=(loops(10**12),))
        until(lambda: coordinator.values.counts()["running"] == 1)
        cluster.scale(workers=1)
        # The closure is queued for the remaining worker, which is paused.
        until(lambda: coordinator.values.records(1)[0]["state"] in ("queued", "retrying"))
        assert coordinator.cancel(endless)
        coordinator.join(timeout=60)
        with pytest.raises(tf.errors.CancelledError):
            endless.fetch()
        coordinator.resume_worker(0)
        assert coordinator.schedule(step, args=(loops(3),)).fetch() == 3
        cluster.scale(workers=2)
        coordinator.pause_worker(0)
        assert coordinator.schedule(step, args=(loops(4),)).fetch() == 4  # by the new worker
        coordinator.resume_worker(0)


class TestParameterServers:
    def test_lost_parameter_server_raises_one_error(
        self, cluster: tfd.Cluster, tmp_path: Path
    ) -> None:
        coordinator = cluster.coordinator()
        checkpoint = build(coordinator)
        step = stepping(checkpoint)
        for _ in range(5):
            coordinator.schedule(step, args=(loops(1),))
        coordinator.join()
        path = checkpoint.save(str(tmp_path / "ck"))
        os.kill(pid_of(cluster, "ps:0"), signal.SIGKILL)

        def train() -> None:
            for _ in range(1_000):
                coordinator.schedule(step, args=(loops(1),))
            coordinator.join(timeout=60)

        with pytest.raises((tf.errors.UnavailableError, tf.errors.AbortedError)) as caught:
            train()
        assert "cluster.recover" in error_text(caught.value)
        assert any("ps:0" in str(notice) for notice in cluster.snapshot().notices)
        restored: list[tf.train.Checkpoint] = []

        def again(coordinator: Coordinator) -> tf.train.Checkpoint:
            restored.append(build(coordinator))
            return restored[-1]

        fresh = cluster.recover(path, again)
        assert fresh is not coordinator
        assert coordinator.stopped
        assert restored[0].total.numpy() == 5.0
        step = stepping(restored[0])
        assert fresh.schedule(step, args=(loops(3),)).fetch() == 3
        with pytest.raises(UsageError, match="no checkpoint"):
            cluster.recover(str(tmp_path / "nothing"), again)
        fresh.schedule(step, args=(loops(1),)).fetch()
        assert cluster.recover(path) is not fresh  # uses the earlier build function
        assert restored[1].total.numpy() == 5.0

    def test_object_of_an_earlier_strategy_is_explained(self, cluster: tfd.Cluster) -> None:
        stale = stepping(build(cluster.coordinator()))
        cluster.coordinator().schedule(stale, args=(loops(1),)).fetch()
        cluster.strategy()
        coordinator = cluster.coordinator()

        def join() -> None:
            coordinator.schedule(stale, args=(loops(1),))
            coordinator.join(timeout=60)

        def fetch() -> None:
            coordinator.schedule(stale, args=(loops(1),)).fetch()

        for use in (join, fetch):
            with pytest.raises(Exception) as caught:  # noqa: PT011 - TensorFlow's own, of any kind
                use()
            assert not isinstance(caught.value, TimeoutError)
            assert "create it again" in error_text(caught.value)
        coordinator.stop()

    def test_recover_without_a_build_function_explains_the_restore(self, tmp_path: Path) -> None:
        with tfd.Cluster(workers=1, ps=1, name="unbuilt") as cluster:
            checkpoint = build(cluster.coordinator())
            checkpoint.total.assign(7.0)
            path = checkpoint.save(str(tmp_path / "ck"))
            assert cluster.coordinator().build is None
            with pytest.raises(UsageError, match="no checkpoint"):
                cluster.recover(str(tmp_path / "nothing"))
            coordinator = cluster.recover(str(tmp_path))  # the latest checkpoint
            assert coordinator is cluster.coordinator()
            (notice,) = (n for n in cluster.snapshot().notices if path in n.what)
            assert path in notice.fix
            checkpoint = build(coordinator)
            checkpoint.restore(path)
            assert checkpoint.total.numpy() == 7.0

    def test_stop_cancels_datasets_that_workers_create(self, cluster: tfd.Cluster) -> None:
        cluster.strategy()
        coordinator = cluster.coordinator()

        @tf.function
        def count(number: Any) -> Any:
            while number < 10**12:
                number += 1
            return number

        dataset = coordinator.create_per_worker_dataset(
            lambda: tf.data.Dataset.from_tensors(count(loops(0)))
        )
        iterator = iter(dataset)
        worker = psutil.Process(pid_of(cluster, "worker:0"))
        until(lambda: worker.cpu_percent(0.1) > 20)
        threads = [t for t in threading.enumerate() if t.name.startswith("WorkerClosure")]
        assert len(threads) >= 2
        coordinator.stop()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        del iterator


class TestTrainingLoop:
    def test_training_continues_after_the_loss_of_both(
        self, cluster: tfd.Cluster, tmp_path: Path
    ) -> None:
        def work(coordinator: Coordinator) -> tfd.Work:
            checkpoint = build(coordinator)
            return tfd.Work(stepping(checkpoint), checkpoint, (loops(100),))

        rounds: list[int] = []

        def on_round(progress: Any) -> None:
            rounds.append(progress.steps)
            if rounds == [10]:
                cluster.kill("worker:0")
                cluster.kill("ps:0")

        result = tfd.training_loop(
            cluster, work, 40, str(tmp_path / "ck"), every=10, on_round=on_round
        )
        assert (result.steps, result.losses, result.finished) == (40, 1, True)
        assert rounds == [10, 20, 30, 40]
        assert result.work is not None
        assert result.work.checkpoint.total.numpy() >= 40
        cluster.recover(str(tmp_path / "ck"))  # uses the build function of the loop
        again = tfd.training_loop(cluster, work, 50, str(tmp_path / "ck"), every=10)
        assert (again.steps, again.losses) == (50, 0)
        assert again.checkpoint.endswith("-50")
        with pytest.raises(UsageError, match="every"):
            tfd.training_loop(cluster, work, 50, str(tmp_path), every=0)
        with pytest.raises(UsageError, match=r"tfd\.Work"):
            tfd.training_loop(cluster, lambda coordinator: None, 5, str(tmp_path / "x"))  # type: ignore[arg-type, return-value]

    def test_error_of_a_step_reaches_the_caller(self, cluster: tfd.Cluster, tmp_path: Path) -> None:
        @tf.function
        def fail() -> Any:
            tf.debugging.assert_equal(1, tf.constant(2), message="wrong")

        def work(coordinator: Coordinator) -> tfd.Work:
            return tfd.Work(fail, build(coordinator))

        with pytest.raises(Exception, match="wrong"):
            tfd.training_loop(cluster, work, 5, str(tmp_path / "ck"))


class TestConnecting:
    def test_dead_task_is_named_without_a_hang(self) -> None:
        policy = tfd.Policy(restarts=0)
        with tfd.Cluster(workers=1, ps=1, name="dead", policy=policy) as cluster:
            cluster.kill("worker:0")
            until(lambda: str(cluster.snapshot().task("worker:0").state) == "failed")
            with pytest.raises(TasksMissing, match=r"worker:0.*failed"):
                cluster.strategy()
            cluster.restart("worker:0")
            assert cluster.coordinator().schedule(tf.function(lambda: tf.constant(4))).fetch() == 4

    def test_missing_workers_or_servers_are_an_error(self) -> None:
        with (
            tfd.Cluster(workers=1, name="half") as cluster,
            pytest.raises(StateError, match="no parameter server"),
        ):
            cluster.strategy()

    def test_unknown_coordinator_of_tensorflow_has_fewer_figures(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fallback, "KNOWN", {})
        with tfd.Cluster(workers=1, ps=1, name="unknown") as cluster:
            coordinator = cluster.coordinator()
            assert any("version is untested" in n.what for n in cluster.snapshot().notices)
            step = stepping(build(coordinator))
            values = [coordinator.schedule(step, args=(loops(n),)) for n in range(3)]
            coordinator.join()
            assert coordinator.fetch(values) == [0, 1, 2]
            until(lambda: coordinator.values.counts()["ready"] == 3)
            coordinator.join(timeout=60)
            for use in (coordinator.pause, coordinator.step, coordinator.join_in_background):
                with pytest.raises(Unsupported, match="requires TensorFlow internals"):
                    use()
            assert coordinator.limit.kind == "none"
            fail = tf.function(lambda x: tf.debugging.check_numerics(x, "not a number"))
            coordinator.schedule(fail, args=(tf.constant(float("nan")),))
            with pytest.raises(tf.errors.InvalidArgumentError):
                coordinator.join()

    def test_missing_name_of_the_queue_is_tolerated(self, programs: Programs) -> None:
        completed = programs.run(WITHOUT_NAME, timeout=150)
        assert completed.returncode == 0, completed.stderr[-3_000:]
        assert completed.stdout.split()[-4:] == ["False", "3", "TimeLimit", "CancelledError"]

    def test_evaluator_is_a_separate_cluster(self) -> None:
        with tfd.Cluster(workers=1, ps=1, evaluator=True, name="with-evaluator") as cluster:
            assert sorted(cluster.resolver.cluster_spec().jobs) == ["ps", "worker"]
            coordinator = cluster.coordinator()
            assert repr(coordinator) == "<Coordinator on: 1 worker, <0 RemoteValues: none yet>>"
            step = stepping(build(coordinator))
            assert coordinator.schedule(step, args=(loops(2),)).fetch() == 2
            assert repr(coordinator) == "<Coordinator on: 1 worker, <1 RemoteValue: 1 ready>>"

    def test_new_strategies_leak_no_memory_on_the_servers(self) -> None:
        with tfd.Cluster(workers=1, ps=1, name="again") as cluster:
            sizes = []
            for _ in range(5):
                with cluster.coordinator(cluster.strategy()).strategy.scope():
                    large = tf.Variable(tf.zeros((8_000_000,)))
                large.assign_add(tf.ones((8_000_000,)))
                assert float(large[0].numpy()) == 1.0
                process = psutil.Process(pid_of(cluster, "ps:0"))
                sizes.append(process.memory_info().rss / 1e6)
                del large
            assert sizes[-1] - sizes[0] < 64, sizes  # four variables of 32 MB would be 128

    def test_local_variables_survive_two_successive_clusters(self) -> None:
        kept = tf.Variable(41.0)
        iterators: list[Any] = []
        for name in ("first", "second"):
            with tfd.Cluster(workers=1, ps=1, name=name) as cluster:
                coordinator = cluster.coordinator()
                take = tf.function(lambda iterator: next(iterator))
                first = tf.function(lambda parts: next(parts["a"][0]))
                for foreign in iterators:
                    with pytest.raises(UsageError, match="belongs to another coordinator"):
                        coordinator.schedule(take, args=(foreign,))
                    with pytest.raises(UsageError, match="belongs to another coordinator"):
                        coordinator.schedule(first, args=({"a": [foreign]},))
                dataset = coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.range(3))
                iterators.append(iter(dataset))
                assert coordinator.schedule(take, args=(iterators[-1],)).fetch() == 0
                checkpoint = build(coordinator)
                step = stepping(checkpoint)
                assert cluster.coordinator().schedule(step, args=(loops(2),)).fetch() == 2
                kept.assign_add(0.5)
        assert kept.numpy() == 42.0

    def test_earlier_traced_functions_run_on_every_cluster(self) -> None:
        triple = tf.function(lambda x: 3 * x)
        more = tf.function(lambda x: triple(x) + 1)
        take = tf.function(lambda iterator: triple(next(iterator)))
        assert more(tf.constant(1)).numpy() == 4
        for name in ("one", "two"):
            with tfd.Cluster(workers=1, ps=1, name=name) as cluster:
                for _ in range(2):
                    coordinator = cluster.coordinator(cluster.strategy())
                    dataset = coordinator.create_per_worker_dataset(
                        lambda: tf.data.Dataset.range(3)
                    )
                    values = [
                        coordinator.schedule(more, args=(tf.constant(2),)),
                        coordinator.schedule(take, args=(iter(dataset),)),
                    ]
                    coordinator.join(timeout=60)
                    assert coordinator.fetch(values) == [7, 0]

    def test_stopped_coordinator_releases_all_waiters(self, cluster: tfd.Cluster) -> None:
        cluster.strategy()
        coordinator = cluster.coordinator()
        step = stepping(build(coordinator))
        running = [coordinator.schedule(step, args=(loops(10**12),)) for _ in range(4)]
        until(lambda: coordinator.values.counts()["running"] == 2)
        ended: list[type] = []

        def fetch(value: Any) -> None:
            try:
                value.fetch()
            except tf.errors.OpError as error:
                ended.append(type(error))

        waiting = [threading.Thread(target=fetch, args=(value,)) for value in running]
        for thread in waiting:
            thread.start()
        coordinator.stop()
        for thread in waiting:
            thread.join(60)
        assert ended == [tf.errors.CancelledError] * 4
        with pytest.raises(StateError, match="stopped"):
            coordinator.schedule(step, args=(loops(1),))
        assert cluster.coordinator() is not coordinator

    def test_failed_worker_does_not_block_the_others(self) -> None:
        with tfd.Cluster(workers=2, ps=1, name="one-less", policy=tfd.Policy(restarts=0)) as few:
            coordinator = few.coordinator()
            step = stepping(build(coordinator))
            coordinator.pause_worker(1)
            value = coordinator.schedule(step, args=(loops(200_000),))
            until(lambda: coordinator.values.counts()["running"] == 1)
            coordinator.resume_worker(1)
            few.kill("worker:0")
            assert value.fetch() == 200_000
            row = coordinator.values.records(1)[0]
            assert (row["state"], row["worker"], row["attempts"]) == ("ready", 1, 2)
            assert few.snapshot().task("worker:0").state == "failed"
            few.scale(workers=3)
            coordinator.pause_worker(1)
            assert coordinator.schedule(step, args=(loops(3),)).fetch() == 3  # by the new worker
            strategy = few.strategy()  # restarts all of them
            again = few.coordinator(strategy)
            values = [again.schedule(stepping(build(again)), args=(loops(1),)) for _ in range(9)]
            assert set(again.fetch(values)) == {1}
            few.kill("worker:0")
            again.schedule(step := stepping(build(again)), args=(loops(5),)).fetch()
            until(lambda: few.snapshot().task("worker:0").state == "failed")
            again.pause_worker(1)
            again.schedule(step, args=(loops(1),))
            again.stop()
