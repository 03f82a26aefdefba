"""Datasets through a service: arguments, policies and refused values."""

from __future__ import annotations

import base64
import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.data.experimental import service as tf_service

import tfd_notebook as tfd
from tfd_notebook.data.consume.consumers import Consumers
from tfd_notebook.data.service import distribute, graph_inspection
from tfd_notebook.data.service.journal import Journal
from tfd_notebook.errors import (
    DispatcherLost,
    FinishedJob,
    NotSerializable,
    NoWorkers,
    TimeLimit,
    UnknownName,
    UsageError,
)
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import ClusterConfig, Policy, Role

pytestmark = pytest.mark.integration

Range = tf.data.Dataset.range
HINT = tf.data.experimental.SHARD_HINT

#: Starts a data worker in a fork for each socket, so that TensorFlow is imported once.
WORKERS = """
import base64, os, socket, sys
from tfd_notebook.data.service.py_functions import install
from tensorflow.data.experimental import service

def serve(fd):
    channel = socket.socket(fileno=fd).makefile("rw")
    worker = service.WorkerServer(service.WorkerConfig(
        sys.argv[1], heartbeat_interval_ms=200, dispatcher_timeout_ms=10_000))
    print(worker._address, file=channel, flush=True)
    for line in channel:
        try:
            print(len(install(base64.b64decode(line))), file=channel, flush=True)
        except Exception as error:
            print(error, file=channel, flush=True)
    os._exit(0)

sockets = [int(fd) for fd in sys.argv[2:]]
for fd in sockets:
    if not os.fork():
        for other in sockets:
            if other != fd:
                os.close(other)
        serve(fd)
for fd in sockets:
    os.close(fd)
for _ in sockets:
    os.wait()
"""


class Worker:
    """A data worker in a separate process, which ends when its socket is closed."""

    def __init__(self, channel: TextIO) -> None:
        self._channel = channel
        self.address = channel.readline().strip()
        assert self.address, "the worker has ended"

    def install(self, blob: bytes) -> str:
        self._channel.write(base64.b64encode(blob).decode() + "\n")
        self._channel.flush()
        return self._channel.readline().strip()


@contextlib.contextmanager
def workers_outside(dispatcher: str, count: int) -> Iterator[list[Worker]]:
    """Yield data workers in other processes, which end afterwards."""
    pairs = [socket.socketpair() for _ in range(count)]
    fds = [remote.fileno() for _, remote in pairs]
    command = [sys.executable, "-c", WORKERS, dispatcher, *map(str, fds)]
    process = subprocess.Popen(command, pass_fds=fds, start_new_session=True)
    channels = []
    for own, remote in pairs:
        remote.close()
        with own:
            channels.append(own.makefile("rw"))
    try:
        yield [Worker(channel) for channel in channels]
    finally:
        for channel in channels:
            channel.close()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Cluster:
    """The members of a cluster that the data package uses, without agents."""

    def __init__(self, dispatcher: tfd.Dispatcher, workers: list[Any], work_dir: str) -> None:
        self.name = uuid.uuid4().hex[:8]
        self.policy = Policy()
        self.consumers = Consumers()
        self.service_target = dispatcher.target
        self.journal: Journal | None = Journal(work_dir)
        self.registered: dict[str, Any] = {}
        self.workers = workers
        self.functions: dict[str, str] = {}
        self.static = False
        self.worker_tags = ()
        self.service_in_process = not isinstance(workers[0], Worker)

    service_on_this_host = True

    def data_workers(self) -> tuple[TaskRow, ...]:
        return tuple(
            TaskRow(f"data_worker:{i}", Role.DATA_WORKER, i, address=worker.address)
            for i, worker in enumerate(self.workers)
        )

    def restart_step(self, task: str, reason: str = "", logs: bool = False) -> str:
        return ClusterConfig(self.name).restart_step(task, reason, logs)

    def check_room(self, needed: int) -> None:
        """Accept every size."""

    def install_functions(
        self, functions: Mapping[str, str], blob: bytes, dataset: Any = None
    ) -> None:
        for worker in self.workers:
            answer = worker.install(blob)
            if answer != str(len(functions)):
                raise NotSerializable(answer)
        self.functions.update(functions)

    def enable_static_sharding(self) -> None:
        self.static = True


def dispatcher_in(work_dir: Path) -> tfd.Dispatcher:
    return tfd.Dispatcher(
        tf_service.DispatcherConfig(
            work_dir=str(work_dir),
            fault_tolerant_mode=True,
            worker_addresses=["localhost:%port%"] * 2,
        )
    )


@pytest.fixture(scope="module")
def _outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    work_dir = tmp_path_factory.mktemp("outside")
    dispatcher = dispatcher_in(work_dir)
    try:
        with workers_outside(dispatcher.address, 2) as workers:
            yield Cluster(dispatcher, workers, str(work_dir))
    finally:
        dispatcher.stop()


@pytest.fixture(scope="module")
def _inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    work_dir = tmp_path_factory.mktemp("inside")
    dispatcher = dispatcher_in(work_dir)
    config = tf_service.WorkerConfig(dispatcher.address, heartbeat_interval_ms=200)
    workers = [tfd.DataWorker(config) for _ in range(2)]
    yield Cluster(dispatcher, workers, str(work_dir))
    for server in (*workers, dispatcher):
        server.stop()


@pytest.fixture
def outside(_outside: Cluster) -> Cluster:
    """Return a cluster with two data workers in other processes."""
    _outside.consumers, _outside.static, _outside.policy = Consumers(), False, Policy()
    return _outside


@pytest.fixture
def inside(_inside: Cluster) -> Cluster:
    """Return a cluster with two data workers in this process."""
    _inside.consumers, _inside.static = Consumers(), False
    return _inside


def values(dataset: Any) -> list[int]:
    return sorted(int(x) for x in dataset.as_numpy_iterator())


def at_once(*datasets: Any) -> list[list[int]]:
    """Return the `values` of all datasets, read concurrently.

    TensorFlow takes a second to detect the end of each.
    """
    with ThreadPoolExecutor(len(datasets)) as pool:
        return list(pool.map(values, datasets))


def through(cluster: Cluster, dataset: Any, mode: Any, **options: Any) -> Any:
    return dataset.apply(distribute.distribute(cluster, mode, **options))


@pytest.fixture
def files(tmp_path: Path) -> Any:
    """Return a dataset of six files with five numbers each, which can be sharded by file."""
    for number in range(6):
        np.arange(5 * number, 5 * number + 5).tofile(tmp_path / f"{number}.bin")
    names = [str(path) for path in sorted(tmp_path.iterdir())]
    return tf.data.FixedLengthRecordDataset(names, 8).map(
        lambda record: tf.io.decode_raw(record, tf.int64)[0]
    )


class TestPolicies:
    def test_dynamic_delivers_each_element_once(self, outside: Cluster) -> None:
        modes = ("dynamic", "DYNAMIC", "distributed_epoch", tf_service.ShardingPolicy.DYNAMIC)
        read = at_once(*(through(outside, Range(50), mode) for mode in modes))
        assert read == [list(range(50))] * len(modes)
        assert not outside.static

    def test_off_delivers_each_element_from_each_worker(self, outside: Cluster) -> None:
        modes = ("off", "parallel_epochs", tf_service.ShardingPolicy.OFF)
        read = at_once(*(through(outside, Range(50), mode) for mode in modes))
        assert list(map(Counter, read)) == [dict.fromkeys(range(50), 2)] * len(modes)

    def test_static_policies_deliver_each_element_once(self, outside: Cluster, files: Any) -> None:
        modes = ("file", "data", "file_or_data")
        read = at_once(*(through(outside, files, mode) for mode in modes))
        assert read == [list(range(30))] * len(modes)
        assert outside.static

    def test_mode_hint_shards_the_dataset(self, outside: Cluster) -> None:
        dataset = Range(20).shard(HINT, HINT).map(lambda x: x * 2)
        assert values(through(outside, dataset, "hint")) == list(range(0, 40, 2))
        assert outside.static

    def test_mode_hint_without_a_hint_warns(self, outside: Cluster) -> None:
        with pytest.warns(UserWarning, match='works like "off"'):
            dataset = through(outside, Range(5), "hint")
        assert values(dataset) == sorted([*range(5), *range(5)])

    def test_modes_work_with_workers_of_this_process(self, inside: Cluster, files: Any) -> None:
        plans = ((Range(20), "dynamic"), (files, "file"), (Range(20), "off"))
        read = at_once(*(through(inside, dataset, mode) for dataset, mode in plans))
        assert read == [list(range(20)), list(range(30)), sorted([*range(20)] * 2)]

    def test_deliveries_per_epoch_are_printed_once(
        self, outside: Cluster, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cluster = Cluster.__new__(Cluster)
        vars(cluster).update(vars(outside), name="fresh")
        for mode in ("off", "parallel_epochs", "dynamic", "off"):
            through(cluster, Range(5), mode)
        captured = capsys.readouterr()
        lines = (captured.out + captured.err).splitlines()  # out if a test left IPython running
        assert len(lines) == 2
        assert "'fresh': mode \"off\"" in lines[0]
        assert "each of the 2 data workers" in lines[0]
        assert "'fresh': mode \"dynamic\"" in lines[1]


class TestArguments:
    @pytest.mark.parametrize(
        ("mode", "fix"),
        [("dynamik", "'dynamic'"), ("file_or_date", "'file_or_data'"), (1, "off, dynamic")],
    )
    def test_unknown_mode_suggests_the_nearest_one(
        self, outside: Cluster, mode: Any, fix: str
    ) -> None:
        with pytest.raises(UnknownName) as caught:
            distribute.distribute(outside, mode)
        assert fix in str(caught.value.fix)

    @pytest.mark.parametrize(
        ("options", "what"),
        [
            ({"job_name": ""}, "job_name"),
            ({"job_name": 3}, "job_name"),
            ({"consumer_index": 0}, "need each other"),
            ({"consumer_index": 0, "num_consumers": 1}, "needs a job"),
            ({"consumer_index": 2, "num_consumers": 2, "job_name": "j"}, "expected 0 to 1"),
            ({"consumer_index": -1, "num_consumers": 2, "job_name": "j"}, "consumer_index=-1"),
            ({"consumer_index": 0, "num_consumers": 0, "job_name": "j"}, "num_consumers=0"),
            ({"cross_trainer_cache": tf_service.CrossTrainerCache("t")}, "needs a job"),
            ({"max_outstanding_requests": 0}, "max_outstanding_requests=0"),
            ({"target_workers": "LOKAL"}, "target_workers"),
            ({"compression": "gzip"}, "compression"),
        ],
    )
    def test_invalid_options_are_refused(
        self, outside: Cluster, options: dict[str, Any], what: str
    ) -> None:
        with pytest.raises(UsageError, match=what):
            distribute.distribute(outside, "dynamic", **options)

    @pytest.mark.parametrize("place", ["outside", "inside"])
    def test_valid_options_do_not_change_the_elements(
        self, place: str, request: pytest.FixtureRequest
    ) -> None:
        cluster = request.getfixturevalue(place)
        options: list[dict[str, Any]] = [
            *({"compression": word} for word in ("auto", "AUTO", "snappy", "SNAPPY", None)),
            *({"target_workers": word} for word in ("AUTO", "ANY")),
            {"max_outstanding_requests": 1},
            {"data_transfer_protocol": "grpc"},
        ]
        if place == "inside":
            options += [{"target_workers": "LOCAL"}, {"data_transfer_protocol": "local"}]
        read = at_once(*(through(cluster, Range(9), "dynamic", **given) for given in options))
        assert read == [list(range(9))] * len(options)

    def test_local_options_need_workers_of_this_process(self, outside: Cluster) -> None:
        for options in ({"target_workers": "LOCAL"}, {"data_transfer_protocol": "local"}):
            with pytest.raises(NoWorkers, match="in this process"):
                through(outside, Range(9), "dynamic", **options)

    def test_values_other_than_datasets_are_refused(self, outside: Cluster) -> None:
        with pytest.raises(UsageError, match="expected a tf"):
            distribute.distribute(outside, "dynamic")([1, 2])

    def test_distribute_works_in_a_tf_function(self, outside: Cluster) -> None:
        @tf.function(autograph=False)
        def total() -> Any:
            dataset = through(outside, Range(9), "dynamic")
            return dataset.reduce(tf.constant(0, tf.int64), lambda total, number: total + number)

        assert int(total()) == 36

    def test_autograph_converts_no_function_of_the_package(
        self, inside: Cluster, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = Range(9)
        distributed = distribute.distribute(inside, "dynamic")
        registered = distribute.register(inside, before)

        @tf.function
        def total(created: Any) -> Any:
            read = [distributed(before), distributed(Range(9)), distributed(created)]
            read.append(distribute.from_dataset_id(inside, "dynamic", registered, spec))
            return [
                dataset.reduce(tf.constant(0, tf.int64), lambda total, number: total + number)
                for dataset in read
            ]

        spec = before.element_spec
        assert [int(each) for each in total(Range(9))] == [36] * 4
        assert values(tf.function(distributed)(before)) == list(range(9))
        assert caplog.messages == []  # AutoGraph warns of functions that it failed to convert

    def test_dataset_from_outside_is_registered_in_a_tf_function(self, inside: Cluster) -> None:
        before, registered = Range(9), []

        @tf.function
        def register() -> None:
            registered.append(distribute.register(inside, before))

        register()
        assert values(distribute.from_dataset_id(inside, "dynamic", *registered)) == list(range(9))


class TestCardinality:
    def test_known_cardinality_is_exact(self, outside: Cluster) -> None:
        dataset = Range(20).map(lambda x: x + 1).shuffle(5).prefetch(1)
        read = through(outside, dataset, "dynamic")
        assert int(read.cardinality()) == 20
        assert values(read) == list(range(1, 21))
        assert int(through(outside, Range(3).repeat(), "dynamic").cardinality()) == -1
        assert int(through(outside, Range(3).repeat(), "off").cardinality()) == -1

    @pytest.mark.parametrize("mode", ["dynamic", "off"])
    def test_complete_epoch_of_unknown_length_raises_no_error(
        self, outside: Cluster, mode: str
    ) -> None:
        datasets = [
            Range(21).batch(4).map(lambda x: x[0]),
            Range(21).filter(lambda x: x % 3 == 0),
            Range(7).repeat(3),
            Range(7).flat_map(lambda x: Range(3)),
            tf.data.Dataset.zip(Range(9), Range(9)).map(lambda x, y: x),
        ]
        read = [through(outside, each, mode, semantics="tensorflow") for each in datasets]
        assert {int(dataset.cardinality()) for dataset in read} == {tf.data.UNKNOWN_CARDINALITY}
        assert all(at_once(*read))

    def test_consumers_of_one_job_share_the_elements(self, outside: Cluster) -> None:
        name = uuid.uuid4().hex
        first, second = (through(outside, Range(100), "dynamic", job_name=name) for _ in range(2))
        assert int(first.cardinality()) == tf.data.UNKNOWN_CARDINALITY
        iterators = [iter(first), iter(second)]
        elements = [int(next(iterator)) for iterator in iterators]
        elements += [int(x) for iterator in iterators for x in iterator]
        assert sorted(elements) == list(range(100))

    def test_on_loss_warn_makes_the_cardinality_unknown(self, outside: Cluster) -> None:
        outside.policy = Policy(on_loss="warn")
        read = through(outside, Range(5), "dynamic")
        assert int(read.cardinality()) == tf.data.UNKNOWN_CARDINALITY


class TestJobs:
    def test_second_epoch_does_not_count_as_a_finished_job(self, outside: Cluster) -> None:
        dataset = through(outside, Range(5), "dynamic", job_name=uuid.uuid4().hex)
        assert values(dataset) == values(dataset) == list(range(5))

    def test_late_reader_of_a_job_is_warned(self, outside: Cluster) -> None:
        name = uuid.uuid4().hex
        first = through(outside, Range(5), "dynamic", job_name=name)
        second = through(outside, Range(5), "dynamic", job_name=name)
        assert len(values(first)) == 5
        with pytest.warns(UserWarning, match="no element is left"):
            assert values(second.map(lambda number: number)) == []
        assert len(values(second)) == 5  # its next epoch is complete and has no warning

    @pytest.mark.parametrize("journal", [True, False])
    def test_finished_job_is_refused_with_a_new_name(
        self, outside: Cluster, journal: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not journal:
            monkeypatch.setattr(outside, "journal", None)
        name = uuid.uuid4().hex
        dataset = through(outside, Range(5), "dynamic", job_name=name)
        unread = through(outside, Range(5), "dynamic", job_name=name)
        assert len(values(dataset)) == 5
        del unread
        with pytest.raises(FinishedJob) as caught:
            through(outside, Range(5), "dynamic", job_name=name)
        assert f"job_name='{name}-2'" in str(caught.value.fix)
        fresh = through(outside, Range(5), "dynamic", job_name=f"{name}-2")
        assert len(values(fresh)) == 5

    def test_job_of_another_mode_is_refused(self, outside: Cluster) -> None:
        name = uuid.uuid4().hex
        iterator = iter(through(outside, Range(5).repeat(), "dynamic", job_name=name))
        assert next(iterator) is not None
        with pytest.raises(UsageError, match="processing_mode='dynamic'"):
            through(outside, Range(5).repeat(), "off", job_name=name)

    def test_coordinated_consumers_read_in_rounds(self, outside: Cluster) -> None:
        name = uuid.uuid4().hex
        readers = [
            through(
                outside,
                Range(10).repeat(),
                "off",
                job_name=name,
                consumer_index=index,
                num_consumers=2,
            ).take(4)
            for index in range(2)
        ]
        with ThreadPoolExecutor(2) as pool:
            read = list(pool.map(lambda reader: [int(x) for x in reader], readers))
        # A round is one element for each consumer, all from one data worker.
        assert read[0] == [0, 0, 2, 2]
        assert read[1] == [1, 1, 3, 3]

    def test_cross_trainer_cache_repeats_the_elements(self, outside: Cluster) -> None:
        name = uuid.uuid4().hex
        firsts = []
        for trainer in ("a", "b"):
            cache = tf_service.CrossTrainerCache(trainer)
            dataset = Range(1_000_000_000).repeat()
            read = through(outside, dataset, "off", job_name=name, cross_trainer_cache=cache)
            firsts.append([int(x) for x in read.take(4)])
        # Without the cache, the second read would continue after the first.
        assert min(firsts[0]) == min(firsts[1]) == 0

    @pytest.mark.parametrize(
        "options",
        [
            {"consumer_index": 0, "num_consumers": 1},
            {"cross_trainer_cache": tf_service.CrossTrainerCache("t")},
        ],
    )
    def test_finite_dataset_is_refused_for_shared_reads(
        self, outside: Cluster, options: dict[str, Any]
    ) -> None:
        with pytest.raises(UsageError, match=r"(?s)has 5 elements.*\.repeat\(\)"):
            through(outside, Range(5), "off", job_name="finite", **options)


class TestRegistered:
    def test_registered_dataset_can_be_read(self, outside: Cluster) -> None:
        dataset = Range(6).map(lambda x: (x, tf.strings.as_string(x)))
        dataset_id = distribute.register(outside, dataset)
        read = distribute.from_dataset_id(outside, "dynamic", dataset_id)
        assert read.element_spec == dataset.element_spec
        assert sorted(int(x) for x, _ in read.as_numpy_iterator()) == list(range(6))

    def test_dataset_id_can_be_chosen(self, outside: Cluster) -> None:
        name = uuid.uuid4().hex
        assert distribute.register(outside, Range(6), dataset_id=name) == name
        assert distribute.register(outside, Range(6), dataset_id=name) == name
        spec = tf.TensorSpec((), tf.int64)
        assert values(distribute.from_dataset_id(outside, "dynamic", name, spec)) == list(range(6))
        with pytest.raises(UsageError, match=name):
            distribute.register(outside, Range(7), dataset_id=name)

    @pytest.mark.parametrize("spec", [None, tf.TensorSpec((), tf.int64)])
    def test_unknown_dataset_id_is_refused(self, outside: Cluster, spec: Any) -> None:
        with pytest.raises(UsageError, match="nowhere"):
            distribute.from_dataset_id(outside, "dynamic", "nowhere", spec)

    def test_finished_job_of_a_registered_dataset_is_refused(self, outside: Cluster) -> None:
        dataset_id = distribute.register(outside, Range(6))
        read = distribute.from_dataset_id(outside, "dynamic", dataset_id, job_name="epoch")
        assert len(values(read)) == 6
        with pytest.raises(FinishedJob, match="'epoch'"):
            distribute.from_dataset_id(outside, "dynamic", dataset_id, job_name="epoch")


class TestSave:
    def test_save_returns_after_the_last_write(self, outside: Cluster, tmp_path: Path) -> None:
        path = str(tmp_path / "saved")
        distribute.save(
            outside, Range(10).map(lambda x: tf.numpy_function(abs, [x], x.dtype)), path
        )
        assert values(tf.data.Dataset.load(path)) == list(range(10))
        with pytest.raises(UsageError, match="already"):
            distribute.save(outside, Range(10), path)

    def test_save_has_a_timeout(self, outside: Cluster, tmp_path: Path) -> None:
        with pytest.raises(TimeLimit, match="not complete"):
            distribute.save(outside, Range(10), str(tmp_path / "saved"), timeout=0)

    def test_save_needs_a_journal(self, outside: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(outside, "journal", None)
        with pytest.raises(UsageError, match="journal"):
            distribute.save(outside, Range(10), "nowhere")


class TestRefused:
    def test_missing_data_workers_are_an_error(
        self, outside: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(outside, "workers", [])
        with pytest.raises(NoWorkers, match="no data worker"):
            through(outside, Range(5), "dynamic")
        with pytest.raises(NoWorkers):
            distribute.from_dataset_id(outside, "dynamic", "some")

    def test_missing_dispatcher_is_an_error(
        self, outside: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(outside, "service_target", "grpc://localhost:1")
        monkeypatch.setattr("tfd_notebook.data.service.validation._DISPATCHER_SECONDS", 0.2)
        with pytest.raises(DispatcherLost, match="connection refused"):
            through(outside, Range(5), "dynamic")

    def test_hung_dispatcher_is_named_during_the_wait(
        self,
        outside: Cluster,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        """Before, the call was silent for 15 s."""
        with socket.create_server(("localhost", 0)) as hung:
            monkeypatch.setattr(outside, "service_target", f"localhost:{hung.getsockname()[1]}")
            monkeypatch.setattr("tfd_notebook.data.service.validation._NOTE_SECONDS", 0.5)
            monkeypatch.setattr("tfd_notebook.data.service.validation._DISPATCHER_SECONDS", 1.5)
            with pytest.raises(DispatcherLost, match="accepts connections, no answer"):
                through(outside, Range(5), "dynamic")
        notes = [each for each in capfd.readouterr().err.splitlines() if "dispatcher:0" in each]
        assert len(notes) == 1
        assert re.search(r"has not answered for \d+ s \(accepts connections, no answer", notes[0])
        assert notes[0].endswith("cluster.restart('dispatcher:0')")

    def test_mutable_tables_and_iterators_are_refused(
        self, outside: Cluster, inside: Cluster
    ) -> None:
        table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, -1, -2, -3)
        table.insert(tf.range(5, dtype=tf.int64), tf.range(5, dtype=tf.int64))
        with pytest.raises(NotSerializable, match="a lookup table that can change"):
            through(outside, Range(5).map(table.lookup), "dynamic")
        iterator = iter(Range(9))
        with pytest.raises(NotSerializable, match="an iterator"):
            through(outside, Range(5).map(lambda x: next(iterator)), "dynamic")
        with pytest.raises(NotSerializable, match="a lookup table that can change"):
            through(inside, Range(5).map(table.lookup), "dynamic")

    def test_static_tables_and_variables_are_copied(self, outside: Cluster) -> None:
        keys = tf.range(5, dtype=tf.int64)
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, keys * 2), -1)
        increment = tf.Variable(1, dtype=tf.int64)
        dataset = Range(5).map(lambda x: table.lookup(x) + increment)
        with pytest.warns(UserWarning, match="variables keep the value"):
            read = through(outside, dataset, "dynamic")
        increment.assign(100)
        with pytest.warns(UserWarning, match="the variable Variable has changed since"):
            assert values(read) == [1, 3, 5, 7, 9]

    def test_deleted_variable_is_kept_and_deleted_table_is_named(self, outside: Cluster) -> None:
        def with_variable() -> Any:
            variable = tf.Variable(3, dtype=tf.int64)
            return Range(4).map(lambda x: x + variable)

        dataset = with_variable()
        gc.collect()
        read = through(outside, dataset, "dynamic", semantics="tensorflow")
        assert values(read) == [3, 4, 5, 6]
        keys = tf.range(5, dtype=tf.int64)
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, keys * 2), -1)
        mapped = Range(4).map(table.lookup)
        tf.raw_ops.DestroyResourceOp(resource=table.resource_handle)
        with pytest.raises(NotSerializable, match="was deleted") as caught:
            through(outside, mapped, "dynamic")
        assert "again" in str(caught.value.fix)

    def test_dataset_of_a_service_is_refused(self, outside: Cluster, inside: Cluster) -> None:
        plain = Range(6).apply(tf_service.distribute("parallel_epochs", inside.service_target))
        for dataset in (through(inside, Range(6), "dynamic").map(lambda x: x + 1), plain):
            for cluster in (outside, inside):
                with pytest.raises(NotSerializable, match="already reads a"):
                    through(cluster, dataset, "dynamic")
                with pytest.raises(NotSerializable, match="already reads a"):
                    distribute.register(cluster, dataset)
        assert len(values(plain)) == 12  # it remains usable
        inner = Range(2).flat_map(lambda _: through(inside, Range(3), "dynamic"))
        with pytest.raises(NotSerializable, match="already reads a"):
            through(outside, inner, "dynamic")

        def twice() -> Any:
            return through(outside, through(inside, Range(6), "dynamic"), "dynamic").cardinality()

        with pytest.raises(NotSerializable, match="already reads a"):
            tf.function(twice, autograph=False)()

    def test_elements_that_are_datasets_need_local_workers(
        self, outside: Cluster, inside: Cluster
    ) -> None:
        with pytest.raises(NotSerializable, match="elements are datasets"):
            through(outside, Range(5).window(2), "dynamic")
        with pytest.warns(UserWarning, match="join elements that are not neighbors"):
            read = through(inside, Range(5).window(2), "dynamic")
        assert sorted(x for window in read for x in values(window)) == list(range(5))

    def test_type_of_elements_is_checked_before_functions_are_sent(self, outside: Cluster) -> None:
        def windows() -> Any:
            return Range(6).map(lambda x: tf.numpy_function(abs, [x], tf.int64)).window(2)

        outside.functions = {}
        with pytest.raises(NotSerializable, match="elements are datasets"):
            through(outside, windows(), "data")
        with pytest.raises(NotSerializable, match="elements are datasets"):
            tf.function(lambda: through(outside, windows(), "data"), autograph=False)()
        with pytest.raises(NotSerializable, match="elements are datasets"):
            distribute.register(outside, windows())
        with pytest.raises(NotSerializable, match="elements are datasets"):
            distribute.save(outside, windows(), "/tmp/unused")
        assert (outside.functions, outside.static) == ({}, False)

    def test_external_state_policy_fail_is_respected(self, outside: Cluster) -> None:
        options = tf.data.Options()
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.FAIL
        dataset = Range(5).map(lambda x: tf.random.uniform(())).with_options(options)
        with pytest.raises(NotSerializable, match="cannot be sent"):
            through(outside, dataset, "dynamic")

    def test_too_large_graph_is_refused(
        self, outside: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dataset = tf.data.Dataset.from_tensor_slices(np.zeros((10, 1000)))
        monkeypatch.setattr("tfd_notebook.data.service.validation.LARGE", 50_000)
        with pytest.warns(UserWarning, match="contains the data"):
            through(outside, dataset, "dynamic")
        monkeypatch.setattr(graph_inspection, "LARGEST", 50_000)
        with pytest.raises(NotSerializable, match="contains the data"):
            through(outside, dataset, "dynamic")
        # TensorFlow returns this for a graph of more than 2 GB.
        monkeypatch.setattr(graph_inspection, "LARGEST", 1 << 30)
        monkeypatch.setattr("tfd_notebook._compat.tf_data.graph.serialized", lambda dataset: b"")
        with pytest.raises(NotSerializable, match="more than 2 GB"):
            through(outside, dataset, "dynamic")


KERNEL = """
import os, sys
import tfd_notebook as tfd
import tensorflow as tf
tfd.Cluster  # the first use
from tfd_notebook.data.service.py_functions import pack
from tfd_notebook.data.service.graph_inspection import examine
factor = int(sys.argv[1])
def scale(x):
    return x * factor
dataset = tf.data.Dataset.range(4).map(lambda x: tf.numpy_function(scale, [x], tf.int64))
names, blob = pack(examine(dataset).tokens)
print(*names, blob.hex(), flush=True)
dataset_id = tf.data.experimental.service.register_dataset(sys.argv[2], dataset, compression=None)
print(dataset_id.numpy().decode(), flush=True)
sys.stdin.read()
os._exit(0)
"""


class TestFunctions:
    def test_numpy_function_runs_in_the_workers(self, outside: Cluster) -> None:
        offset = 7

        def shift(x: Any) -> Any:
            return x + offset

        dataset = Range(4).map(lambda x: tf.numpy_function(shift, [x], tf.int64))
        assert values(through(outside, dataset, "dynamic")) == [7, 8, 9, 10]
        assert "shift" in next(reversed(outside.functions.values()))

    def test_py_function_with_a_gradient_runs_in_the_workers(self, outside: Cluster) -> None:
        def gradient(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.py_function(lambda v: v**2, [x], tf.float32)
            return tape.gradient(y, x)

        dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0]).map(gradient)
        assert values(through(outside, dataset, "dynamic")) == [2, 4]

    def test_function_that_cannot_be_serialized_is_named(
        self, outside: Cluster, inside: Cluster
    ) -> None:
        stack = contextlib.ExitStack()
        stack.push(threading.Lock())

        def bad(x: Any) -> Any:
            return x if stack is not None else -x

        dataset = Range(4).map(lambda x: tf.numpy_function(bad, [x], tf.int64))
        with pytest.raises(NotSerializable, match=r"bad .*test_distribute\.py:\d+.* uses stack"):
            through(outside, dataset, "dynamic")
        assert values(through(inside, dataset, "dynamic")) == [0, 1, 2, 3]

    def test_kernels_run_their_own_functions_only(self, outside: Cluster) -> None:
        """TensorFlow counts the functions of each kernel from zero, even after a restart."""
        kernels = [
            subprocess.Popen(
                [sys.executable, "-c", KERNEL, factor, outside.service_target],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for factor in ("10", "100")
        ]
        tokens, ids = [], []
        try:
            for kernel in kernels:
                assert kernel.stdout is not None
                token, blob = kernel.stdout.readline().split()
                for worker in outside.workers:
                    assert worker.install(bytes.fromhex(blob)) == "1"
                tokens.append(token)
                ids.append(kernel.stdout.readline().strip())
        finally:
            for kernel in kernels:
                kernel.communicate(timeout=60)
        assert len(set(tokens)) == 2
        read = [values(distribute.from_dataset_id(outside, "dynamic", i)) for i in ids]
        assert read == [[0, 10, 20, 30], [0, 100, 200, 300]]
