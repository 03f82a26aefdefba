"""Sequences of faults in a tf.data service, each on servers, child processes and in-process.

They are the sequences of TensorFlow's tests of fault tolerance, coordinated reads and
cross-trainer caches.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.data.experimental import service

import tfd_notebook as tfd
from tests._reading import Reader, read
from tests.conformance._services import BACK_ENDS, DataService, Servers, Tasks, started
from tfd_notebook.errors import DataLoss

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(150),
    pytest.mark.filterwarnings("ignore:job .* has delivered this epoch to other readers"),
]

RESTARTS = 3
_numbers = itertools.count()


@pytest.fixture(scope="module", params=BACK_ENDS)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DataService]:
    """Return a service that the module shares."""
    with started(request.param, tmp_path_factory.mktemp("journal")) as service:
        yield service


@pytest.fixture(params=BACK_ENDS)
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DataService]:
    """Return a service for one test, which may change its workers."""
    with started(request.param, tmp_path) as service:
        yield service


@pytest.fixture
def job() -> str:
    """Return the name of a new job."""
    return f"job-{next(_numbers)}"


def numbers(count: int) -> Any:
    return tf.data.Dataset.range(count)


def endless() -> Any:
    return numbers(1 << 30).repeat()


# The dispatcher restarts


def test_restart_between_creation_and_reading_of_a_dataset(running: DataService) -> None:
    dataset = numbers(20).apply(running.distribute("off"))
    running.restart_dispatcher()
    for _ in range(2):
        assert Counter(read(dataset)) == dict.fromkeys(range(20), running.workers)


def test_restarts_while_datasets_are_registered(running: DataService) -> None:
    datasets = []
    for count in range(RESTARTS):
        datasets.append(numbers(count).apply(running.distribute("off")))
        running.restart_dispatcher()
    for count, dataset in enumerate(datasets):
        assert Counter(read(dataset)) == dict.fromkeys(range(count), running.workers)


def test_restarts_while_each_worker_reads_everything(running: DataService) -> None:
    with Reader(numbers(3000).apply(running.distribute("off"))) as reader:
        for _ in range(RESTARTS):
            reader.first(10)
            running.restart_dispatcher()
        assert Counter(reader.all()) == dict.fromkeys(range(3000), running.workers)


def test_restarts_while_workers_share_the_splits(running: DataService) -> None:
    """A split that is in the journal but not sent is lost. Each worker can lose one request."""
    with Reader(numbers(600).apply(running.distribute("dynamic"))) as reader:
        for restart in range(RESTARTS):
            reader.first(50 * restart)
            running.restart_dispatcher()
        with suppress(DataLoss):  # raised where the cluster counts the elements
            reader.all()
        counts = Counter(reader.elements)
    assert set(counts.values()) == {1}
    assert len(counts) >= 600 - RESTARTS * running.workers


def test_restart_between_the_epochs_of_one_dataset(running: DataService) -> None:
    dataset = numbers(30).apply(running.distribute("dynamic"))
    for _ in range(RESTARTS):
        assert Counter(read(dataset)) == dict.fromkeys(range(30), 1)
        running.restart_dispatcher()


def test_restart_while_a_repeated_dataset_is_shared(running: DataService) -> None:
    with Reader(numbers(200).repeat(2).apply(running.distribute("dynamic"))) as reader:
        reader.first(20)
        running.restart_dispatcher()
        counts = Counter(reader.all())
    assert max(counts.values()) <= 2
    assert counts.total() >= 400 - running.workers


def test_restart_while_two_consumers_share_a_named_job(running: DataService, job: str) -> None:
    with ExitStack() as stack:
        readers = [
            stack.enter_context(
                Reader(numbers(600).apply(running.distribute("dynamic", job_name=job)))
            )
            for _ in range(2)
        ]
        readers[0].first(5)
        running.restart_dispatcher()
        counts = Counter(itertools.chain(*(reader.all() for reader in readers)))
    assert set(counts.values()) == {1}
    assert len(counts) >= 600 - running.workers


def test_restart_of_dispatcher_and_worker(running: DataService) -> None:
    with Reader(endless().apply(running.distribute("off"))) as reader:
        reader.first(10)
        running.restart_dispatcher()
        running.restart_worker()
        assert len(reader.more(500)) >= 510


def test_restart_with_an_empty_dataset(running: DataService) -> None:
    dataset = numbers(0).apply(running.distribute("off"))
    assert read(dataset) == []
    running.restart_dispatcher()
    assert read(dataset) == []


def test_job_keeps_its_mode_after_a_restart(running: DataService, job: str) -> None:
    with Reader(endless().apply(running.distribute("off", job_name=job))) as reader:
        reader.first(5)
        running.restart_dispatcher()
        with pytest.raises((tfd.errors.UsageError, tf.errors.InvalidArgumentError)):
            read(endless().apply(running.distribute("dynamic", job_name=job)))


# A data worker restarts


def test_worker_restarts_before_the_next_epoch(running: DataService) -> None:
    dataset = numbers(20).apply(running.distribute("off"))
    for _ in range(RESTARTS):
        assert Counter(read(dataset)) == dict.fromkeys(range(20), running.workers)
        running.restart_worker()


def test_worker_restarts_during_reading(running: DataService) -> None:
    with Reader(endless().apply(running.distribute("off"))) as reader:
        for _ in range(RESTARTS):
            reader.more(100)
            running.restart_worker()
        assert len(reader.more(500)) >= 100 * RESTARTS + 500


# Coordinated reads


def coordinated(running: DataService, job: str, dataset: Any, count: int) -> list[Any]:
    return [
        dataset.apply(
            running.distribute("off", job_name=job, consumer_index=index, num_consumers=count)
        )
        for index in range(count)
    ]


def test_round_has_one_bucket_of_lengths(running: DataService, job: str) -> None:
    def rounds(start: Any) -> Any:
        """Return a batch for each of two consumers, with sequences of one bucket."""
        return numbers(2).map(lambda consumer: tf.fill([start % 3 + 1], start))

    dataset = numbers(1 << 30).flat_map(rounds).repeat()
    with ExitStack() as stack:
        readers = [
            stack.enter_context(Reader(part)) for part in coordinated(running, job, dataset, 2)
        ]
        first, second = (reader.first(60)[:60] for reader in readers)
    assert [len(part) for part in first] == [len(part) for part in second]
    assert {len(part) for part in first} == {1, 2, 3}


def test_worker_restarts_between_rounds(running: DataService, job: str) -> None:
    with ExitStack() as stack:
        readers = [
            stack.enter_context(Reader(part)) for part in coordinated(running, job, endless(), 2)
        ]
        for reader in readers:
            reader.first(20)
        running.restart_worker()
        for reader in readers:
            assert len(reader.more(200)) >= 220


def test_dispatcher_restarts_between_rounds(running: DataService, job: str) -> None:
    with ExitStack() as stack:
        readers = [
            stack.enter_context(Reader(part)) for part in coordinated(running, job, endless(), 2)
        ]
        for reader in readers:
            reader.first(20)
        running.restart_dispatcher()
        for reader in readers:
            assert len(reader.more(200)) >= 220


def test_restarted_consumer_gets_an_error(running: DataService, job: str) -> None:
    with ExitStack() as stack:
        readers = [
            stack.enter_context(Reader(part)) for part in coordinated(running, job, endless(), 2)
        ]
        for reader in readers:
            reader.first(20)
        with pytest.raises(tfd.errors.PipelineError, match="current round has already reached"):
            read(coordinated(running, job, endless(), 2)[1])


def test_incomplete_rounds_at_the_end_of_an_epoch(running: DataService, job: str) -> None:
    with ExitStack() as stack:
        readers = [
            stack.enter_context(Reader(part))
            for part in coordinated(running, job, numbers(7).repeat(), 3)
        ]
        for reader in readers:
            assert set(reader.first(100)) == set(range(7))


# Cross-trainer caches


def trainer(running: DataService, job: str, name: str) -> Any:
    cache = service.CrossTrainerCache(trainer_id=name)
    return endless().apply(running.distribute("off", job_name=job, cross_trainer_cache=cache))


def test_trainers_share_a_cache_while_tasks_restart(running: DataService, job: str) -> None:
    with (
        Reader(trainer(running, job, "first")) as first,
        Reader(trainer(running, job, "second")) as second,
    ):
        first.first(20)
        second.first(20)
        running.restart_dispatcher()
        first.more(20)
        if isinstance(running, Tasks):  # a `DataWorker` ends after the readers of its cache
            running.restart_worker()
        assert len(first.more(500)) >= 540
        assert len(second.more(500)) >= 520
    running.restart_worker()
    with Reader(trainer(running, f"{job}-next", "first")) as first:
        first.first(20)


# Data workers join


def test_worker_joins_during_reading(own: DataService, job: str) -> None:
    own.restart_dispatcher()
    own.add_worker()
    assert Counter(read(numbers(20).apply(own.distribute("off")))) == dict.fromkeys(range(20), 2)
    with ExitStack() as stack:
        readers = [
            stack.enter_context(Reader(part))
            for part in (
                endless().apply(own.distribute("off")),
                *coordinated(own, job, endless(), 2),
            )
        ]
        for reader in readers:
            reader.first(20)
        own.add_worker()
        for reader in readers:
            reader.more(500)


# Differences between the back ends


def test_readers_wait_for_the_first_worker(own: DataService) -> None:
    """TensorFlow's consumers wait for a worker. Consumers of a cluster get an error at once."""
    if isinstance(own, Servers):
        dispatcher = tfd.Dispatcher()
        with Reader(
            numbers(5).apply(service.distribute("parallel_epochs", dispatcher.target))
        ) as reader:
            worker = tfd.DataWorker(service.WorkerConfig(dispatcher.address))
            assert reader.all() == [0, 1, 2, 3, 4]
        worker.stop()
        dispatcher.stop()
        return
    assert isinstance(own, Tasks)
    own.cluster.scale(data_workers=0)
    with pytest.raises(tfd.errors.NoWorkers):
        numbers(5).apply(own.distribute("off"))
    own.cluster.scale(data_workers=1)
    assert read(numbers(5).apply(own.distribute("off"))) == [0, 1, 2, 3, 4]


def test_service_stops_during_reading(own: DataService) -> None:
    """Readers of a cluster get an error. Readers of TensorFlow's plain servers keep waiting."""
    if isinstance(own, Tasks):
        dataset = endless().apply(own.distribute("off"))
        with own.cluster.stream(dataset).start() as stream:
            stream.wait(elements=10, timeout=60)
            own.cluster.stop()
            with pytest.raises(tfd.errors.Interrupted):
                stream.wait(timeout=60)
        return
    assert isinstance(own, Servers)
    with Reader(endless().apply(own.distribute("off"))) as reader:
        reader.first(10)
        own.stop()
