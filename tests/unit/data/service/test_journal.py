"""The journal, from records in TensorFlow's format."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tfd_notebook.agent import work_dir
from tfd_notebook.data.service.journal import JOURNAL_DIR, Journal, JournalState
from tfd_notebook.errors import DataError
from tfd_notebook.net import tf_messages


class Writer:
    """Writer that appends to a journal in `work_dir`."""

    def __init__(self, work_dir: Path, number: int = 0) -> None:
        directory = work_dir / JOURNAL_DIR
        directory.mkdir(exist_ok=True)
        self.path = directory / f"journal_{number}"

    def raw(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)

    def add(self, **update: Any) -> None:
        self.raw(framed(**update))


def framed(**update: Any) -> bytes:
    record = tf_messages.Update(**update).SerializeToString()
    return struct.pack("<QI", len(record), 0) + record + bytes(4)


def a_job(writer: Writer, iteration: int = 2000, mode: int = 1, workers: int = 2) -> None:
    for index in range(workers):
        writer.add(register_worker={"worker_address": f"localhost:{index + 1}"})
    writer.add(register_dataset={"dataset_id": "1000"})
    writer.add(
        create_job={
            "job_id": 5000,
            "job_name": "train",
            "dataset_id": "1000",
            "processing_mode_def": {"sharding_policy": mode},
        }
    )
    writer.add(create_iteration={"iteration_id": iteration, "job_id": 5000, "repetition": 1})
    for index in range(workers):
        writer.add(
            create_task={
                "task_id": 4000 + index,
                "iteration_id": iteration,
                "worker_address": f"localhost:{index + 1}",
            }
        )
    writer.add(acquire_iteration_client={"iteration_id": iteration, "iteration_client_id": 3000})


def test_missing_journal_is_empty(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.read() == JournalState()
    a_job(Writer(tmp_path))
    assert [job.name for job in journal.read().jobs] == ["train"]


def test_state_follows_from_the_records(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    a_job(writer)
    state = Journal(tmp_path).read()
    job = state.job("train")
    assert job is not None
    assert (job.id, job.dataset_id, job.mode) == (5000, "1000", "dynamic")
    assert state.job("other") is None
    assert [(t.id, t.iteration_id, t.finished) for t in state.tasks] == [
        (4000, 2000, False),
        (4001, 2000, False),
    ]
    assert [iteration.clients for iteration in state.iterations] == [1]
    assert state.size_bytes == writer.path.stat().st_size


def test_iteration_finishes_with_its_last_task(tmp_path: Path) -> None:
    writer, journal = Writer(tmp_path), Journal(tmp_path)
    a_job(writer)
    writer.add(finish_task={"task_id": 4000})
    state = journal.read()
    assert not state.finished("train")
    assert [t.id for t in state.tasks if not t.finished] == [4001]
    writer.add(finish_task={"task_id": 4001})
    writer.add(release_iteration_client={"iteration_client_id": 3000})
    state = journal.read()
    assert state.finished("train")
    assert [iteration.clients for iteration in state.iterations] == [0]
    assert not state.finished("train", repetition=2)
    assert not state.finished("other")


@pytest.mark.parametrize(("keep_seconds", "is_discarded"), [(100.0, True), (None, False)])
def test_epoch_without_consumers_is_discarded_later(
    tmp_path: Path, keep_seconds: float | None, is_discarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    writer, journal = Writer(tmp_path), Journal(tmp_path, keep_seconds=keep_seconds)
    a_job(writer)
    assert journal.read().open_iterations == 1
    writer.add(release_iteration_client={"iteration_client_id": 3000, "time_micros": 1_000_000_000})
    now[0] = 1099.0
    assert [each.discarded for each in journal.read().iterations] == [False]
    assert journal.read().open_iterations == 1
    now[0] = 1100.0
    assert [each.discarded for each in journal.read().iterations] == [is_discarded]
    assert journal.read().open_iterations == 1 - is_discarded
    # TensorFlow does not record it, and gives the next consumer a new iteration.
    writer.add(create_iteration={"iteration_id": 2001, "job_id": 5000, "repetition": 1})
    writer.add(acquire_iteration_client={"iteration_id": 2001, "iteration_client_id": 3001})
    latest = journal.read().iteration("train")
    assert latest is not None
    assert (latest.id, latest.discarded) == (2001, False)


def test_epoch_that_another_consumer_reads_is_kept(tmp_path: Path) -> None:
    writer, journal = Writer(tmp_path), Journal(tmp_path, keep_seconds=0.001)
    a_job(writer)
    writer.add(acquire_iteration_client={"iteration_id": 2000, "iteration_client_id": 3001})
    writer.add(release_iteration_client={"iteration_client_id": 3000, "time_micros": 1})
    assert [each.discarded for each in journal.read().iterations] == [False]


@pytest.mark.parametrize("name", ["anonymous_job_5000_7", "train"])
def test_tables_do_not_grow_with_finished_epochs(tmp_path: Path, name: str) -> None:
    writer, journal = Writer(tmp_path), Journal(tmp_path)
    for number in range(1100):
        job, iteration, task = 5000 + number, 20_000 + number, 40_000 + number
        is_new = name != "train" or not number
        job_id = job if is_new else 5000
        if is_new:
            writer.add(create_job={"job_id": job_id, "job_name": name})
        writer.add(
            create_iteration={"iteration_id": iteration, "job_id": job_id, "repetition": number}
        )
        client = {"iteration_client_id": task}
        writer.add(acquire_iteration_client={"iteration_id": iteration, **client})
        writer.add(create_task={"task_id": task, "iteration_id": iteration})
        writer.add(produce_split={"iteration_id": iteration})
        if number:  # The first one is still read.
            writer.add(finish_task={"task_id": task})
            writer.add(release_iteration_client=client)
        if number == 600:
            journal.read()
    state = journal.read()
    kept = 1001 if name != "train" else 1100
    assert state.open_iterations == 1
    assert state.omitted == 1100 - kept
    assert len(state.iterations) == len(state.tasks) == kept
    assert len(state.jobs) == (kept if name != "train" else 1)
    assert {each.splits for each in state.iterations} == {1}
    assert [each.id for each in state.iterations][:2] == [20_000, 20_000 + 1100 - kept + 1]
    assert Journal(tmp_path).read() == state


def test_removed_task_is_not_listed(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    a_job(writer)
    writer.add(remove_task={"task_id": 4000})
    writer.add(finish_task={"task_id": 4001})
    state = Journal(tmp_path).read()
    assert [t.id for t in state.tasks] == [4001]
    assert state.finished("train")


def test_collected_iteration_starts_again(tmp_path: Path) -> None:
    writer, journal = Writer(tmp_path), Journal(tmp_path)
    a_job(writer)
    writer.add(garbage_collect_iteration={"iteration_id": 2000})
    state = journal.read()
    assert all(task.finished for task in state.tasks)
    assert not state.finished("train")
    writer.add(create_iteration={"iteration_id": 2001, "job_id": 5000, "repetition": 1})
    iteration = journal.read().iteration("train")
    assert iteration is not None
    assert iteration.id == 2001


def test_splits_are_counted_by_iteration(tmp_path: Path) -> None:
    writer, journal = Writer(tmp_path), Journal(tmp_path)
    a_job(writer)
    writer.add(create_iteration={"iteration_id": 2001, "job_id": 5000, "repetition": 2})
    for round_ in range(1, 3):
        for iteration, count in ((2000, 5), (2001, 3)):
            for _ in range(count):
                writer.add(produce_split={"iteration_id": iteration})
            writer.add(produce_split={"iteration_id": iteration, "finished": True})
        splits = {i.id: i.splits for i in journal.read().iterations}
        assert splits == {2000: 5 * round_, 2001: 3 * round_}


def test_partial_record_is_read_later(tmp_path: Path) -> None:
    writer, journal = Writer(tmp_path), Journal(tmp_path)
    record = framed(create_job={"job_id": 1, "job_name": "train"})
    for cut in (1, 11, 12, 20, len(record) - 1):
        writer.path.unlink(missing_ok=True)
        journal = Journal(tmp_path)
        writer.raw(record[:cut])
        assert journal.read().jobs == ()
        writer.raw(record[cut:])
        assert journal.read().job("train") is not None


def test_unchanged_journal_returns_the_same_state(tmp_path: Path) -> None:
    a_job(Writer(tmp_path))
    journal = Journal(tmp_path)
    assert journal.read() is journal.read()


def test_next_dispatcher_writes_the_next_file(tmp_path: Path) -> None:
    first, journal = Writer(tmp_path, 9), Journal(tmp_path)
    a_job(first)
    first.raw(b"\x07half")  # a record that its killed predecessor has not completed
    assert len(journal.read().tasks) == 2
    second = Writer(tmp_path, 10)
    second.add(finish_task={"task_id": 4000})
    second.add(finish_task={"task_id": 4001})
    state = journal.read()
    assert state.finished("train")
    assert state == Journal(tmp_path).read()
    assert state.size_bytes == first.path.stat().st_size + second.path.stat().st_size


def test_replaced_journal_is_read_again(tmp_path: Path) -> None:
    writer, journal = Writer(tmp_path), Journal(tmp_path)
    a_job(writer)
    assert journal.read().jobs
    writer.path.unlink()
    writer.add(register_worker={"worker_address": "localhost:9"})
    state = journal.read()
    assert not state.jobs


@pytest.mark.parametrize(
    "damage", [b"\xff" * 40, struct.pack("<QI", 3, 0) + b"\xff\xff\xff" + bytes(4)]
)
def test_damaged_journal_is_reported(tmp_path: Path, damage: bytes) -> None:
    writer = Writer(tmp_path)
    a_job(writer)
    offset = writer.path.stat().st_size
    writer.raw(damage)
    with pytest.raises(DataError, match=f"damaged at byte {offset}"):
        Journal(tmp_path).read()


def test_unknown_records_are_skipped(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    record = b"\xfa\x01\x02\x08\x01"  # field 31, of a later version
    writer.raw(struct.pack("<QI", len(record), 0) + record + bytes(4))
    a_job(writer)
    assert Journal(tmp_path).read().jobs


def test_long_journal_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, journal = Writer(tmp_path), Journal(tmp_path)
    a_job(writer)
    split = framed(produce_split={"iteration_id": 2000})
    writer.raw(split * 300_000)  # more than one block
    read, parsed = count_bytes(monkeypatch), mock.Mock(wraps=tf_messages.Update)
    monkeypatch.setattr(tf_messages, "Update", parsed)
    assert journal.read().iterations[0].splits == 300_000
    assert sum(read) == writer.path.stat().st_size
    assert parsed.FromString.call_count < 20
    read.clear()
    writer.raw(split)
    assert journal.read().iterations[0].splits == 300_001
    assert sum(read) == len(split)


def count_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each read of a file adds its number of bytes."""
    read: list[int] = []

    def read_from(path: str, offset: int, size: int) -> bytes:
        block = original(path, offset, size)
        read.append(len(block))
        return block

    original = work_dir.read_from
    monkeypatch.setattr(work_dir, "read_from", read_from)
    return read
