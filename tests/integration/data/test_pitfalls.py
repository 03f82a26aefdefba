"""What hangs, crashes or lies in a bare tf.data service, for each way to read from a cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

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
    """A plain loop, Keras or a Stream."""
    return str(request.param)


@pytest.fixture(scope="module")
def _pair() -> Iterator[tfd.Cluster]:
    policy = tfd.Policy(restarts=100, hang_seconds=1.0, on_hang="restart")
    with tfd.Cluster(data_workers=2, name="pair", policy=policy) as cluster:
        yield cluster


@pytest.fixture
def pair(_pair: tfd.Cluster) -> Iterator[tfd.Cluster]:
    """Two data workers that come back whatever happens to them."""
    with mended(_pair):
        yield _pair


@pytest.fixture(scope="module", params=["raise", "warn"])
def _mortal(request: pytest.FixtureRequest) -> Iterator[tfd.Cluster]:
    policy = tfd.Policy(restarts=0, on_loss=request.param)
    with tfd.Cluster(data_workers=2, name=f"mortal-{request.param}", policy=policy) as cluster:
        yield cluster


@pytest.fixture
def mortal(_mortal: tfd.Cluster) -> Iterator[tfd.Cluster]:
    """Two data workers that stay dead."""
    with mended(_mortal):
        yield _mortal


@pytest.fixture(scope="module")
def growing() -> Iterator[tfd.Cluster]:
    """A cluster that is scaled up and down again."""
    with tfd.Cluster(data_workers=2, name="growing") as cluster:
        yield cluster


@contextlib.contextmanager
def mended(cluster: tfd.Cluster) -> Iterator[None]:
    """Restart at the end what is down, or would be slow to come back another time."""
    before = {task.task: task.restarts for task in cluster.snapshot().tasks}
    yield
    for task in cluster.snapshot().tasks:
        if task.state is not TaskState.READY or task.restarts != before.get(task.task, 0):
            cluster.restart(task.task)


def batches(count: int, size: int = 1) -> Any:
    return Range(count).batch(size)


def once(number: int, action: Callable[[], object]) -> Callable[[int], None]:
    """Return an `on_batch` that acts after batch `number`."""

    def on_batch(batch: int) -> None:
        if batch == number:
            action()

    return on_batch


def enough_after(number: int, action: Callable[[], object], done: Callable[[], Any]) -> Any:
    """Return an `on_batch` that acts after batch `number`, and reads on until `done` and more."""
    last: list[int] = []

    def on_batch(batch: int) -> None:
        if batch == number:
            action()
        elif batch > number and not last and done():
            last.append(batch + 30)
        elif last and batch >= last[0]:
            raise Enough

    return on_batch


def row(cluster: tfd.Cluster, task: str) -> Any:
    return cluster.snapshot().task(task)


def comes_back(cluster: tfd.Cluster, task: str) -> Callable[[], bool]:
    """Return what tells whether `task` was restarted since now and is ready."""
    before = row(cluster, task).restarts

    def back() -> bool:
        now = row(cluster, task)
        return now.restarts > before and now.state is TaskState.READY

    return back


class TestNobodyServes:
    def test_no_worker_is_refused_before_it_hangs(self) -> None:
        with (
            tfd.Cluster(name="empty") as cluster,
            pytest.raises(errors.NoWorkers, match="no data worker") as caught,
        ):
            batches(5).apply(cluster.distribute("dynamic"))
        assert "scale" in str(caught.value.fix)

    def test_ctrl_c_while_the_only_worker_says_nothing(self, kind: str) -> None:
        """A real signal, in the main thread: this process is as a notebook's."""
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

    def test_stopping_the_cluster_ends_who_reads_from_it(self, kind: str) -> None:
        with tfd.Cluster(data_workers=1, name="stopped") as cluster:
            dataset = batches(ENDLESS).apply(cluster.distribute("off"))
            stopper = threading.Thread(target=cluster.stop)
            with pytest.raises(errors.Interrupted, match="stopped"):
                consume(kind, cluster, dataset, once(10, stopper.start))
            stopper.join()


class TestWorkerGone:
    def test_for_good(
        self, mortal: tfd.Cluster, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A consumer of TensorFlow's would wait for ever for what the dead worker held."""
        dataset = batches(600).apply(mortal.distribute("dynamic"))
        kill = once(10, lambda: mortal.kill("data_worker:1"))
        with caplog.at_level(logging.WARNING, "tfd_notebook"):
            if mortal.policy.on_loss == "raise":
                with pytest.raises(errors.DataLoss, match="data_worker:1") as caught:
                    consume(kind, mortal, dataset, kill)
                assert "SIGKILL" in str(caught.value)
                assert "cluster.restart('data_worker:1')" in str(caught.value.fix)
                assert isinstance(caught.value, tf.errors.DataLossError)
            else:
                seen = consume(kind, mortal, dataset, kill)
                assert set(seen.values()) == {1}
                assert 300 < len(seen) <= 600
        until(lambda: "data_worker:1" in caplog.text)
        assert "SIGKILL" in caplog.text
        assert len(consume(kind, mortal, dataset)) == 600, "the next epoch is whole"

    @pytest.mark.parametrize("mode", ["off", "dynamic"])
    def test_until_it_is_restarted(self, pair: tfd.Cluster, kind: str, mode: str) -> None:
        dataset = batches(ENDLESS).apply(pair.distribute(mode))
        back = comes_back(pair, "data_worker:0")
        consume(kind, pair, dataset, enough_after(10, lambda: pair.kill("data_worker:0"), back))

    @pytest.mark.parametrize("countable", [True, False])
    def test_no_element_is_missing_unsaid(
        self, pair: tfd.Cluster, kind: str, countable: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What a worker had prepared dies with it; where elements can be counted, they are."""
        numbers = Range(600).map(lambda i: tf.reshape(i, [1])) if countable else batches(600)
        dataset = numbers.apply(pair.distribute("dynamic"))
        raised: list[errors.DataLoss] = []
        seen = {}
        with caplog.at_level(logging.WARNING, "tfd_notebook"):
            try:
                seen = consume(kind, pair, dataset, once(10, lambda: pair.kill("data_worker:0")))
            except errors.DataLoss as error:
                raised.append(error)
        assert set(seen.values()) <= {1}
        if countable:
            assert len(seen) == 600 or "of 600 elements arrived" in str(raised[0])
        else:
            assert not raised
            assert "Elements that it had prepared for the current epoch are lost" in caplog.text

    def test_a_worker_given_up_comes_back_at_once_and_can_be_given_up_again(self) -> None:
        with tfd.Cluster(data_workers=1, name="again", policy=tfd.Policy(restarts=0)) as cluster:
            for _ in range(2):
                cluster.kill("data_worker:0")
                until(lambda: row(cluster, "data_worker:0").state is TaskState.FAILED)
                cluster.restart("data_worker:0")

    def test_the_only_one(self, kind: str) -> None:
        policy = tfd.Policy(restarts=0)
        with tfd.Cluster(data_workers=1, name="lone", policy=policy) as cluster:
            dataset = batches(ENDLESS).apply(cluster.distribute("off"))
            with pytest.raises(errors.DataLoss, match="data_worker:0"):
                consume(kind, cluster, dataset, once(10, lambda: cluster.kill("data_worker:0")))
            with pytest.raises(errors.NoWorkers):
                batches(5).apply(cluster.distribute("off"))

    def test_it_hangs_and_is_restarted(
        self, pair: tfd.Cluster, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        dataset = batches(ENDLESS).apply(pair.distribute("off"))
        back = comes_back(pair, "data_worker:1")
        pid = row(pair, "data_worker:1").pid
        with caplog.at_level(logging.WARNING, "tfd_notebook"):
            stop = enough_after(10, lambda: os.kill(pid, signal.SIGSTOP), back)
            consume(kind, pair, dataset, stop)
        assert "data_worker:1: hung, no reply for" in caplog.text

    def test_it_leaves_with_the_cluster_scaled_down(self, pair: tfd.Cluster, kind: str) -> None:
        dataset = batches(ENDLESS).apply(pair.distribute("off"))
        scaled = threading.Event()

        def scale() -> None:
            pair.scale(data_workers=1)
            scaled.set()

        try:
            consume(kind, pair, dataset, enough_after(10, scale, scaled.is_set))
        finally:
            pair.scale(data_workers=2)


class TestDispatcherGone:
    def test_until_it_is_restarted(self, pair: tfd.Cluster, kind: str) -> None:
        dataset = batches(600).apply(pair.distribute("dynamic"))
        before = row(pair, "dispatcher:0").restarts
        seen = consume(kind, pair, dataset, once(10, lambda: pair.kill("dispatcher:0")))
        assert row(pair, "dispatcher:0").restarts > before
        # A split that is in the journal and not yet sent is lost: one request of each data worker.
        assert set(seen.values()) == {1}
        assert 598 <= len(seen) <= 600

    def test_for_good(self, mortal: tfd.Cluster, kind: str) -> None:
        dataset = batches(ENDLESS).apply(mortal.distribute("dynamic"))
        with pytest.raises(errors.DispatcherLost, match="dispatcher:0") as caught:
            consume(kind, mortal, dataset, once(10, lambda: mortal.kill("dispatcher:0")))
        assert "cluster.restart('dispatcher:0')" in str(caught.value.fix)

    def test_without_a_journal_it_forgets(self, kind: str) -> None:
        service = tfd.Service(fault_tolerant=False)
        with tfd.Cluster(data_workers=1, name="forgetful", service=service) as cluster:
            dataset = batches(ENDLESS).apply(cluster.distribute("dynamic"))
            with pytest.raises(errors.DispatcherLost, match="fault_tolerant=True"):
                consume(kind, cluster, dataset, once(10, lambda: cluster.kill("dispatcher:0")))


class TestPythonFunctions:
    """Tokens of functions are counted in each process: a worker knows none, or another's."""

    def test_in_present_restarted_and_added_workers(self, growing: tfd.Cluster, kind: str) -> None:
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
        back = comes_back(growing, "data_worker:0")
        kill = enough_after(10, lambda: growing.kill("data_worker:0"), back)
        assert set(consume(kind, growing, endless, kill)) == expected
        dataset = numbers.apply(growing.distribute("off"))
        growing.scale(data_workers=3)
        try:
            assert consume(kind, growing, dataset) == dict.fromkeys(expected, 3), "once by each"
        finally:
            growing.scale(data_workers=2)

    def test_another_process_never_runs_them(self, pair: tfd.Cluster) -> None:
        def ours(x: Any) -> Any:
            return x + 1000

        dataset = Range(4).map(lambda i: tf.numpy_function(ours, [i], tf.int64)).batch(1)
        read = dataset.apply(pair.distribute("dynamic"))
        assert set(consume("for", pair, read)) == {1000, 1001, 1002, 1003}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", STRANGER, pair.dispatcher.target],
            capture_output=True,
            text=True,
            timeout=50,
        )
        assert "Could not find callback with key=" in done.stdout, done.stdout + done.stderr
        assert "DELIVERED" not in done.stdout


STRANGER = """
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
    """What TensorFlow answers with nothing at all, or with an error that names nothing."""

    def test_a_finished_job(self, pair: tfd.Cluster, kind: str) -> None:
        name = f"epoch-{kind}"
        dataset = batches(10).apply(pair.distribute("dynamic", job_name=name))
        assert len(consume(kind, pair, dataset)) == 10
        with pytest.raises(errors.FinishedJob, match=name) as caught:
            batches(10).apply(pair.distribute("dynamic", job_name=name))
        assert f"job_name='{name}-2'" in str(caught.value.fix)

    def test_a_finite_dataset_where_rounds_are_coordinated(self, pair: tfd.Cluster) -> None:
        reader = pair.distribute("off", job_name="rounds", consumer_index=0, num_consumers=2)
        with pytest.raises(errors.UsageError, match=r"(?s)has 5 elements.*\.repeat\(\)"):
            batches(5).apply(reader)

    def test_what_belongs_to_this_process(self, pair: tfd.Cluster) -> None:
        table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, -1, -2, -3)
        with pytest.raises(errors.NotSerializable, match="a lookup table that can change"):
            Range(5).map(table.lookup).apply(pair.distribute("dynamic"))
        lock = threading.Lock()

        def locked(x: Any) -> Any:
            with lock:
                return x

        dataset = Range(5).map(lambda i: tf.numpy_function(locked, [i], tf.int64))
        with pytest.raises(errors.NotSerializable, match=r"locked .*test_traps\.py:\d+.*uses lock"):
            dataset.apply(pair.distribute("dynamic"))

    def test_a_definition_that_is_too_large(
        self, pair: tfd.Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(graph_inspection, "LARGEST", 50_000)
        dataset = tf.data.Dataset.from_tensor_slices(np.zeros((10, 1000)))
        with pytest.raises(errors.NotSerializable, match="contains the data"):
            dataset.apply(pair.distribute("dynamic"))


class TestSaid:
    def test_static_shares_with_a_worker_that_has_left(self) -> None:
        with tfd.Cluster(data_workers=2, name="left") as cluster:
            cluster.scale(data_workers=1)
            dataset = batches(50).apply(cluster.distribute("data"))
            with pytest.raises(errors.DataError, match="worker that has left"):
                consume("for", cluster, dataset)
            cluster.scale(data_workers=2)
            dataset = batches(50).apply(cluster.distribute("data"))
            assert len(consume("for", cluster, dataset)) == 50

    def test_a_hint_that_is_missing(self, pair: tfd.Cluster, kind: str) -> None:
        with pytest.warns(UserWarning, match='works like "off"'):
            dataset = batches(10).apply(pair.distribute("hint"))
        assert consume(kind, pair, dataset) == dict.fromkeys(range(10), 2)
        hinted = batches(10).shard(HINT, HINT).apply(pair.distribute("hint"))
        assert consume(kind, pair, hinted) == dict.fromkeys(range(10), 1)

    @pytest.mark.parametrize("mode", ["data", "file_or_data"])
    def test_static_shares_need_no_list_of_workers(
        self, pair: tfd.Cluster, kind: str, mode: str
    ) -> None:
        dataset = batches(50).apply(pair.distribute(mode))
        assert consume(kind, pair, dataset) == dict.fromkeys(range(50), 1)

    def test_which_element_broke_where(self, pair: tfd.Cluster, kind: str) -> None:
        def check(i: Any) -> Any:
            assertion = tf.debugging.assert_less(i, tf.constant(1000, tf.int64), "label too big")
            with tf.control_dependencies([assertion]):
                return tf.identity(i)

        dataset = batches(ENDLESS).map(check).apply(pair.distribute("off"))
        with pytest.raises(errors.PipelineError, match="label too big") as caught:
            consume(kind, pair, dataset)
        assert str(caught.value.task) in ("data_worker:0", "data_worker:1")
        assert "stage map" in str(caught.value)
        assert isinstance(caught.value, tf.errors.InvalidArgumentError)
