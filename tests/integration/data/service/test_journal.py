"""The journal of TensorFlow's dispatcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfd_notebook.data.service.journal import Journal, JournalState
from tfd_notebook.net import probe

pytestmark = pytest.mark.integration


def test_journal_matches_the_dispatcher(tmp_path: Path) -> None:
    import tensorflow as tf

    service = tf.data.experimental.service
    journal = Journal(tmp_path)
    config = service.DispatcherConfig(work_dir=str(tmp_path), fault_tolerant_mode=True)
    dispatcher = service.DispatchServer(config)
    assert journal.read() == JournalState()
    target = dispatcher.target.partition("://")[2]
    workers = [
        service.WorkerServer(service.WorkerConfig(target, heartbeat_interval_ms=100))
        for _ in range(2)
    ]
    assert not journal.read().jobs

    dataset = tf.data.Dataset.range(100).apply(
        service.distribute("distributed_epoch", dispatcher.target, job_name="train")
    )
    iterator = iter(dataset)
    next(iterator)
    state = journal.read()
    job = state.job("train")
    assert job is not None
    assert job.mode == "dynamic"
    assert not state.finished("train")
    assert [iteration.clients for iteration in state.iterations] == [1]
    probes = map(probe.probe, probe.dispatcher_workers(target))
    running = {(t.task_id, t.iteration_id) for result in probes for t in result.tasks}
    assert running == {(t.id, t.iteration_id) for t in state.tasks if not t.finished}

    assert sum(1 for _ in iterator) == 99
    del iterator
    state = journal.read()
    iteration = state.iteration("train")
    assert iteration is not None
    assert iteration.splits == 100
    assert state.finished("train")
    assert iteration.clients == 0
    assert not state.finished("train", repetition=2)
    # A consumer that joins the finished job gets no element.
    late = tf.data.Dataset.range(100).apply(
        service.distribute("distributed_epoch", dispatcher.target, job_name="train")
    )
    assert list(late) == []

    shared = tf.data.Dataset.range(100).repeat()
    shared = shared.apply(
        service.distribute(
            "parallel_epochs", dispatcher.target, job_name="both", consumer_index=0, num_consumers=1
        )
    )
    iterator = iter(shared)
    next(iterator)
    job = journal.read().job("both")
    assert job is not None
    assert job.mode == "off"
    del iterator

    whole = Journal(tmp_path).read()
    assert whole == journal.read()
    del workers
    del dispatcher
    # The next dispatcher continues in a new file.
    dispatcher = service.DispatchServer(config)
    worker = service.WorkerServer(service.WorkerConfig(dispatcher.target.partition("://")[2]))
    assert journal.read().finished("train")
    del worker, dispatcher
