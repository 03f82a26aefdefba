"""Hangs, crashes and silent losses of a bare tf.data service, for each kind of consumer."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._waiting import until
from tests.integration._consume import KINDS, Enough, consume
from tfd_notebook import errors
from tfd_notebook.cluster import data_service
from tfd_notebook.data.service import graph_inspection
from tfd_notebook.model.spec import TaskState

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(150),
    pytest.mark.filterwarnings("ignore:.shuffle=True.", "ignore:Your input ran out of data"),
]

Range = tf.data.Dataset.range
HINT = tf.data.experimental.SHARD_HINT
ENDLESS = 10**9


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of consumer: a plain loop, Keras or a stream."""
    return str(request.param)


@pytest.fixture(scope="module")
def _pair() -> Iterator[tfd.Cluster]:
    policy = tfd.Policy(restarts=100, hang_seconds=1.0, on_hang="restart")
    with tfd.Cluster(data_workers=2, name="pair", policy=policy) as cluster:
        yield cluster


@pytest.fixture
def pair(_pair: tfd.Cluster) -> Iterator[tfd.Cluster]:
    """Yield a cluster whose two data workers restart after every fault."""
    with repaired(_pair):
        yield _pair


@pytest.fixture(scope="module", params=["raise", "warn"])
def _mortal(request: pytest.FixtureRequest) -> Iterator[tfd.Cluster]:
    policy = tfd.Policy(restarts=0, on_loss=request.param)
    with tfd.Cluster(data_workers=2, name=f"mortal-{request.param}", policy=policy) as cluster:
        yield cluster


@pytest.fixture
def mortal(_mortal: tfd.Cluster) -> Iterator[tfd.Cluster]:
    """Yield a cluster whose two data workers are not restarted."""
    with repaired(_mortal):
        yield _mortal


@pytest.fixture(scope="module")
def growing() -> Iterator[tfd.Cluster]:
    """Yield a cluster that is scaled up and down."""
    with tfd.Cluster(data_workers=2, name="growing") as cluster:
        yield cluster


@contextlib.contextmanager
def repaired(cluster: tfd.Cluster) -> Iterator[None]:
    """Restart at the end all tasks that failed, or whose next restart would be delayed."""
    before = {task.task: task.restarts for task in cluster.snapshot().tasks}
    yield
    for task in cluster.snapshot().tasks:
        if task.state is not TaskState.READY or task.restarts != before.get(task.task, 0):
            cluster.restart(task.task)


def batches(count: int, size: int = 1) -> Any:
    return Range(count).batch(size)


def once(number: int, action: Callable[[], object]) -> Callable[[int], None]:
    """Return an `on_batch` that calls `action` after batch `number`."""

    def on_batch(batch: int) -> None:
        if batch == number:
            action()

    return on_batch


def enough_after(number: int, action: Callable[[], object], recovered: Callable[[], Any]) -> Any:
    """Return an `on_batch` that calls `action` after batch `number`.

    The read ends 30 batches after `recovered` returns True. Until then it is slow, because an
    infinite read uses a core.
    """
    last: list[int] = []

    def on_batch(batch: int) -> None:
        if batch == number:
            action()
        elif batch > number and not last:
            if recovered():
                last.append(batch + 30)
            else:
                time.sleep(0.01)
        elif last and batch >= last[0]:
            raise Enough

    return on_batch


def row(cluster: tfd.Cluster, task: str) -> Any:
    return cluster.snapshot().task(task)


def restart_check(cluster: tfd.Cluster, task: str) -> Callable[[], bool]:
    """Return a function that returns True once `task` is ready again after a restart."""
    before = row(cluster, task).restarts

    def back() -> bool:
        now = row(cluster, task)
        return now.restarts > before and now.state is TaskState.READY

    return back


class TestNoWorkers:
    def test_ctrl_c_ends_a_read_from_a_silent_worker(self, kind: str) -> None:
        """The process gets a real signal in its main thread, as a notebook does."""
        with tfd.Cluster(data_workers=1, name="silent") as cluster:
            dataset = batches(ENDLESS).apply(cluster.distribute("off"))
            pid = row(cluster, "data_worker:0").pid

            def press() -> None:
                until(lambda: data_service.of(cluster).consumers.stuck(0.3))
                os.kill(os.getpid(), signal.SIGINT)

            def silence() -> None:
                os.kill(pid, signal.SIGSTOP)
                presser.start()
                rescue.start()

            presser = threading.Thread(target=press)
            rescue = threading.Timer(15, os.kill, (pid, signal.SIGCONT))
            try:
                with pytest.raises(KeyboardInterrupt):
                    consume(kind, cluster, dataset, once(10, silence))
                assert rescue.is_alive(), "the signal was only handled after the worker continued"
            finally:
                rescue.cancel()
                os.kill(pid, signal.SIGCONT)
                presser.join()
            assert row(cluster, "data_worker:0").pid == pid
            consume(kind, cluster, dataset.take(5))

    def test_stop_ends_all_reads(self, kind: str) -> None:
        with tfd.Cluster(data_workers=1, name="stopped") as cluster:
            dataset = batches(ENDLESS).apply(cluster.distribute("off"))
            stopper = threading.Thread(target=cluster.stop)
            with pytest.raises(errors.Interrupted, match="stopped"):
                consume(kind, cluster, dataset, once(10, stopper.start))
            stopper.join()


class TestLostWorker:
    def test_lost_worker_ends_the_epoch(
        self, mortal: tfd.Cluster, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """TensorFlow's consumers would wait without end for elements of the dead worker."""
        dataset = batches(600).apply(mortal.distribute("dynamic"))
        kill = once(10, lambda: mortal.kill("data_worker:1"))
        with caplog.at_level(logging.WARNING, "tfd_notebook"):
            if mortal.config.policy.on_loss == "raise":
                with pytest.raises(errors.DataLoss, match="data_worker:1") as caught:
                    consume(kind, mortal, dataset, kill)
                assert "SIGKILL" in str(caught.value)
                assert "cluster.restart('data_worker:1')" in str(caught.value.fix)
                assert isinstance(caught.value, tf.errors.DataLossError)
            else:
                counts = consume(kind, mortal, dataset, kill)
                assert set(counts.values()) == {1}
                assert 300 < len(counts) <= 600
        until(lambda: "data_worker:1" in caplog.text)
        assert "SIGKILL" in caplog.text
        assert len(consume(kind, mortal, dataset)) == 600, "the next epoch is complete"

    @pytest.mark.parametrize("mode", ["off", "dynamic"])
    def test_reads_continue_after_a_restart_of_a_worker(
        self, pair: tfd.Cluster, kind: str, mode: str
    ) -> None:
        dataset = batches(ENDLESS).apply(pair.distribute(mode))
        back = restart_check(pair, "data_worker:0")
        kill = enough_after(10, lambda: pair.kill("data_worker:0"), back)
        assert consume(kind, pair, dataset, kill).total() >= 40

    @pytest.mark.parametrize("end", ["kill", "restart"])
    @pytest.mark.parametrize("countable", [True, False])
    def test_missing_elements_are_reported(
        self, pair: tfd.Cluster, kind: str, countable: bool, end: str, caplog: Any
    ) -> None:
        """Elements that a worker had prepared are lost with it. The rest can be counted."""
        numbers = Range(600).map(lambda i: tf.reshape(i, [1])) if countable else batches(600)
        dataset = numbers.apply(pair.distribute("dynamic"))
        raised: list[errors.DataLoss] = []
        counts = {}
        with caplog.at_level(logging.WARNING, "tfd_notebook"):
            try:
                lose = once(10, lambda: getattr(pair, end)("data_worker:0"))
                counts = consume(kind, pair, dataset, lose)
            except errors.DataLoss as error:
                raised.append(error)
        assert set(counts.values()) <= {1}
        note = pair.jobs().records()[-1]["note"]
        assert note == "data_worker:0 stopped or restarted: elements may be missing"
        if countable:
            assert len(counts) == 600 or "of 600 elements arrived" in str(raised[0])
        else:
            assert not raised
            assert "Elements that it had prepared for the current epoch are lost" in caplog.text

    def test_failed_worker_restarts_at_once_and_may_fail_again(self) -> None:
        with tfd.Cluster(data_workers=1, name="again", policy=tfd.Policy(restarts=0)) as cluster:
            for _ in range(2):
                cluster.kill("data_worker:0")
                until(lambda: row(cluster, "data_worker:0").state is TaskState.FAILED)
                cluster.restart("data_worker:0")

    def test_loss_of_the_only_worker_is_an_error(self, kind: str) -> None:
        policy = tfd.Policy(restarts=0)
        with tfd.Cluster(data_workers=1, name="lone", policy=policy) as cluster:
            dataset = batches(ENDLESS).apply(cluster.distribute("off"))
            with pytest.raises(errors.DataLoss, match="data_worker:0"):
                consume(kind, cluster, dataset, once(10, lambda: cluster.kill("data_worker:0")))
            with pytest.raises(errors.NoWorkers):
                batches(5).apply(cluster.distribute("off"))

    def test_hung_worker_is_restarted(
        self, pair: tfd.Cluster, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        dataset = batches(ENDLESS).apply(pair.distribute("off"))
        back = restart_check(pair, "data_worker:1")
        pid = row(pair, "data_worker:1").pid
        with caplog.at_level(logging.WARNING, "tfd_notebook"):
            stop = enough_after(10, lambda: os.kill(pid, signal.SIGSTOP), back)
            consume(kind, pair, dataset, stop)
        assert "data_worker:1: hung, no reply for" in caplog.text

    def test_reads_continue_after_a_scale_down(self, pair: tfd.Cluster, kind: str) -> None:
        dataset = batches(ENDLESS).apply(pair.distribute("off"))
        scaled = threading.Event()

        def scale() -> None:
            pair.scale(data_workers=1)
            scaled.set()

        try:
            counts = consume(kind, pair, dataset, enough_after(10, scale, scaled.is_set))
            assert counts.total() >= 40
        finally:
            pair.scale(data_workers=2)


class TestLostDispatcher:
    def test_epoch_ends_after_a_restart_of_the_dispatcher(
        self, pair: tfd.Cluster, kind: str
    ) -> None:
        dataset = batches(600).apply(pair.distribute("dynamic"))
        before = row(pair, "dispatcher:0").restarts
        counts = consume(kind, pair, dataset, once(10, lambda: pair.kill("dispatcher:0")))
        assert row(pair, "dispatcher:0").restarts > before
        # A split in the journal that was not sent is lost, one for each data worker.
        assert set(counts.values()) == {1}
        assert 598 <= len(counts) <= 600

    def test_lost_dispatcher_is_an_error(self, mortal: tfd.Cluster, kind: str) -> None:
        dataset = batches(ENDLESS).apply(mortal.distribute("dynamic"))
        with pytest.raises(errors.DispatcherLost, match="dispatcher:0") as caught:
            consume(kind, mortal, dataset, once(10, lambda: mortal.kill("dispatcher:0")))
        assert "cluster.restart('dispatcher:0')" in str(caught.value.fix)

    def test_dispatcher_that_hangs_at_the_start_of_an_epoch_is_named(
        self, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The notice comes long before the task counts as hung, after 30 seconds."""
        with tfd.Cluster(data_workers=1, name="hanging") as cluster:
            dataset = batches(20).apply(cluster.distribute("dynamic"))
            pid = row(cluster, "dispatcher:0").pid
            notices: list[Any] = []
            codes: list[str] = []

            def resume() -> None:
                def named() -> list[Any]:
                    every = cluster.snapshot().notices
                    return [each for each in every if each.task == "dispatcher:0"]

                try:
                    notices.extend(until(named))
                    codes.extend(tfd.doctor(cluster).codes)
                finally:
                    os.kill(pid, signal.SIGCONT)

            thread = threading.Thread(target=resume)
            os.kill(pid, signal.SIGSTOP)
            thread.start()
            try:
                counts = consume(kind, cluster, dataset)
            finally:
                thread.join()
            assert len(counts) == 20
            assert "does not answer" in notices[0].what
            assert "waits for data" in notices[0].what
            assert "cluster.restart('dispatcher:0')" in notices[0].fix
            assert "TFD809" in codes

    def test_dispatcher_without_a_journal_loses_the_job(self, kind: str) -> None:
        service = tfd.Service(fault_tolerant=False)
        with tfd.Cluster(data_workers=1, name="forgetful", service=service) as cluster:
            dataset = batches(ENDLESS).apply(cluster.distribute("dynamic"))
            with pytest.raises(errors.DispatcherLost, match="fault_tolerant=True"):
                consume(kind, cluster, dataset, once(10, lambda: cluster.kill("dispatcher:0")))


class TestPythonFunctions:
    """Python functions have tokens that are valid in one process only."""

    def test_functions_run_in_restarted_and_added_workers(
        self, growing: tfd.Cluster, kind: str
    ) -> None:
        offset = 1000

        def generate() -> Iterator[int]:
            yield from range(8)

        signature = tf.TensorSpec((), tf.int64)
        numbers = (
            tf.data.Dataset.from_generator(generate, output_signature=signature)
            .map(lambda i: tf.numpy_function(lambda x: x + offset, [i], tf.int64))
            .map(lambda i: tf.py_function(lambda x: x * 2, [i], tf.int64))
            .map(lambda i: tf.ensure_shape(i, []))
            .batch(2)
        )
        expected = {2 * (i + offset) for i in range(8)}
        endless = numbers.repeat().apply(growing.distribute("off"))
        back = restart_check(growing, "data_worker:0")
        kill = enough_after(10, lambda: growing.kill("data_worker:0"), back)
        assert set(consume(kind, growing, endless, kill)) == expected
        dataset = numbers.apply(growing.distribute("off"))
        growing.scale(data_workers=3)
        try:
            assert consume(kind, growing, dataset) == dict.fromkeys(expected, 3), (
                "once by each worker"
            )
        finally:
            growing.scale(data_workers=2)

    def test_functions_of_another_process_are_not_run(self, pair: tfd.Cluster) -> None:
        def add(x: Any) -> Any:
            return x + 1000

        dataset = Range(4).map(lambda i: tf.numpy_function(add, [i], tf.int64)).batch(1)
        read = dataset.apply(pair.distribute("dynamic"))
        assert set(consume("for", pair, read)) == {1000, 1001, 1002, 1003}
        completed = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", OTHER_PROCESS, pair.dispatcher.target],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "Could not find callback with key=" in completed.stdout, (
            completed.stdout + completed.stderr
        )
        assert "DELIVERED" not in completed.stdout


OTHER_PROCESS = """
import sys
import tfd_notebook as tfd
import tensorflow as tf
dataset = tf.data.Dataset.range(4).map(lambda i: tf.numpy_function(lambda x: x * 2, [i], tf.int64))
dataset = dataset.apply(tf.data.experimental.service.distribute("distributed_epoch", sys.argv[1]))
try:
    print("DELIVERED", [int(x) for x in dataset])
except tf.errors.OpError as error:
    print(error.message)
"""


class TestRefused:
    """Uses that TensorFlow answers with no element, or with an error without names."""

    def test_finished_job_is_refused(self, pair: tfd.Cluster, kind: str) -> None:
        name = f"epoch-{kind}"
        dataset = batches(10).apply(pair.distribute("dynamic", job_name=name))
        assert len(consume(kind, pair, dataset)) == 10
        with pytest.raises(errors.FinishedJob, match=name) as caught:
            batches(10).apply(pair.distribute("dynamic", job_name=name))
        assert f"job_name='{name}-2'" in str(caught.value.fix)

    def test_finite_dataset_in_coordinated_reads_is_refused(self, pair: tfd.Cluster) -> None:
        reader = pair.distribute("off", job_name="rounds", consumer_index=0, num_consumers=2)
        with pytest.raises(errors.UsageError, match=r"(?s)has 5 elements.*\.repeat\(\)"):
            batches(5).apply(reader)

    def test_objects_of_this_process_are_refused(self, pair: tfd.Cluster) -> None:
        table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, -1, -2, -3)
        with pytest.raises(errors.NotSerializable, match="a lookup table that can change"):
            Range(5).map(table.lookup).apply(pair.distribute("dynamic"))
        lock = threading.Lock()

        def locked(x: Any) -> Any:
            with lock:
                return x

        dataset = Range(5).map(lambda i: tf.numpy_function(locked, [i], tf.int64))
        with pytest.raises(
            errors.NotSerializable, match=r"locked .*test_pitfalls\.py:\d+.*uses lock"
        ):
            dataset.apply(pair.distribute("dynamic"))

    def test_too_large_graph_is_refused(
        self, pair: tfd.Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(graph_inspection, "LARGEST", 50_000)
        dataset = tf.data.Dataset.from_tensor_slices(np.zeros((10, 1000)))
        with pytest.raises(errors.NotSerializable, match="contains the data"):
            dataset.apply(pair.distribute("dynamic"))


class TestReported:
    def test_static_sharding_needs_all_its_workers(self) -> None:
        with tfd.Cluster(data_workers=2, name="left") as cluster:
            cluster.scale(data_workers=1)
            dataset = batches(50).apply(cluster.distribute("data"))
            with pytest.raises(errors.DataError, match="worker that has left"):
                consume("for", cluster, dataset)
            cluster.scale(data_workers=2)
            dataset = batches(50).apply(cluster.distribute("data"))
            assert len(consume("for", cluster, dataset)) == 50

    def test_mode_hint_without_a_hint_warns(self, pair: tfd.Cluster, kind: str) -> None:
        with pytest.warns(UserWarning, match='works like "off"'):
            dataset = batches(10).apply(pair.distribute("hint"))
        assert consume(kind, pair, dataset) == dict.fromkeys(range(10), 2)
        hinted = batches(10).shard(HINT, HINT).apply(pair.distribute("hint"))
        assert consume(kind, pair, hinted) == dict.fromkeys(range(10), 1)

    @pytest.mark.parametrize("mode", ["data", "file_or_data"])
    def test_static_sharding_needs_no_list_of_workers(
        self, pair: tfd.Cluster, kind: str, mode: str
    ) -> None:
        dataset = batches(50).apply(pair.distribute(mode))
        assert consume(kind, pair, dataset) == dict.fromkeys(range(50), 1)

    def test_pipeline_error_names_worker_and_stage(self, pair: tfd.Cluster, kind: str) -> None:
        def check(i: Any) -> Any:
            assertion = tf.debugging.assert_less(i, tf.constant(100, tf.int64), "label too big")
            with tf.control_dependencies([assertion]):
                return tf.identity(i)

        dataset = batches(ENDLESS).map(check).apply(pair.distribute("off"))
        with pytest.raises(errors.PipelineError, match="label too big") as caught:
            consume(kind, pair, dataset)
        assert str(caught.value.task) in ("data_worker:0", "data_worker:1")
        assert "stage map" in str(caught.value)
        assert isinstance(caught.value, tf.errors.InvalidArgumentError)


@pytest.mark.parametrize("later", [False, True])
def test_epochs_that_keras_ends_early_are_named(
    later: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """It counts the batches of the first epoch, which more data workers can exceed."""
    examples = tf.data.Dataset.range(100).map(lambda x: (tf.ones([2]), tf.ones([1])))
    with tfd.Cluster(launcher="inprocess", data_workers=1, name="counted") as cluster:
        parts = [tf.data.Dataset.batch, tf.data.Dataset.apply]
        arguments = [10, cluster.distribute("dynamic")]
        dataset = examples
        for number in (1, 0) if later else (0, 1):
            dataset = parts[number](dataset, arguments[number])
        network = keras.Sequential([keras.layers.Dense(1)])
        network.compile("sgd", "mse")
        scale = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, _: epoch == 1 and cluster.scale(data_workers=4)
        )
        network.fit(dataset, epochs=4, verbose=0, callbacks=[scale])
        texts = [str(each.message) for each in recwarn if "Keras" in str(each.message)]
        assert len(texts) == (not later)
        if texts:
            assert "at most 11 batches" in texts[0]
            assert "4 data workers" in texts[0]
