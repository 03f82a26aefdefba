"""Reader of the journal of a fault-tolerant dispatcher."""

from __future__ import annotations

import dataclasses
import os
import re
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from tfd_notebook.agent import work_dir as agent_work_dir
from tfd_notebook.errors import DataError
from tfd_notebook.net import tf_messages

#: Name of the journal's directory inside the dispatcher's ``work_dir``.
JOURNAL_DIR = "tf_data_dispatcher_journal"

_HEADER = struct.Struct("<QI")  # TFRecord: length and its checksum. Data and its checksum follow.
_TRAILER = 4
_BLOCK = 1 << 22
_LONGEST = 1 << 30
#: Start of the names that TensorFlow gives to jobs without a name.
_UNNAMED = "anonymous_job_"
#: Number of finished iterations of these jobs that are kept.
_KEPT = 1000
_PRODUCE_SPLIT = 0x42  # first byte of an Update with a produce_split, which is field 8


@dataclass(frozen=True)
class Job:
    """A job: a dataset, its sharding policy, and the name under which consumers join it.

    Parameters
    ----------
    id : int
    name : str
        The user's ``job_name``, or one that TensorFlow generated.
    dataset_id : str
    mode : str
        One of `tfd_notebook.net.tf_messages.SHARDING_POLICIES`.
    """

    id: int
    name: str
    dataset_id: str
    mode: str


@dataclass(frozen=True)
class Iteration:
    """One epoch of a job.

    Parameters
    ----------
    id, job_id : int
    repetition : int
        Number of the epoch: 1 for a consumer's first iteration, 2 for the second.
    finished : bool
        Whether all of its tasks have delivered their last element.
    collected : bool
        Whether the dispatcher has discarded it. A consumer then starts a new one.
    clients : int
        Number of consumers that read it now.
    splits : int
        Number of splits of the source assigned to workers. With ``"dynamic"`` over single
        elements, one split per element.
    expires : float, optional
        Time in seconds since the epoch at which the dispatcher discards it, because its last
        consumer has left it. The journal does not record that. None while it is read, and if it
        is finished.
    interrupted : tuple of str
        The data workers that stopped or restarted during it, see `Journal.interrupt`.
    """

    id: int
    job_id: int
    repetition: int
    finished: bool = False
    collected: bool = False
    clients: int = 0
    splits: int = 0
    expires: float | None = None
    interrupted: tuple[str, ...] = ()

    @property
    def discarded(self) -> bool:
        """True if the dispatcher has discarded it, or does so at its next check."""
        return self.collected or (self.expires is not None and time.time() >= self.expires)


@dataclass(frozen=True)
class JournalTask:
    """The part of an iteration that one data worker processes."""

    id: int
    iteration_id: int
    finished: bool = False


@dataclass(frozen=True)
class JournalState:
    """The state of the dispatcher, up to the last complete record of its journal.

    Parameters
    ----------
    jobs : tuple of Job
    iterations : tuple of Iteration
    tasks : tuple of JournalTask
        Without removed tasks.
    size_bytes : int
        Size of the journal's files.
    omitted : int
        Number of finished iterations of unnamed jobs that are not in `iterations`. It has the
        latest 1,000 of them.
    """

    jobs: tuple[Job, ...] = ()
    iterations: tuple[Iteration, ...] = ()
    tasks: tuple[JournalTask, ...] = ()
    size_bytes: int = 0
    omitted: int = 0

    @property
    def open_iterations(self) -> int:
        """Number of iterations that data workers still process, or keep for a consumer."""
        return sum(not (each.finished or each.discarded) for each in self.iterations)

    def job(self, name: str) -> Job | None:
        """Return the job of that name, or None."""
        return next((job for job in reversed(self.jobs) if job.name == name), None)

    def iteration(self, job_name: str, repetition: int = 1) -> Iteration | None:
        """Return the latest iteration of a job with this repetition, or None."""
        job = self.job(job_name)
        for iteration in reversed(self.iterations):
            if job and (iteration.job_id, iteration.repetition) == (job.id, repetition):
                return iteration
        return None

    def finished(self, job_name: str, repetition: int = 1) -> bool:
        """Return True if a consumer that joins this epoch of the job would get no elements."""
        iteration = self.iteration(job_name, repetition)
        return iteration is not None and iteration.finished and not iteration.collected


class Journal:
    """Thread-safe, incremental reader of a dispatcher's journal.

    Parameters
    ----------
    work_dir : str
        The dispatcher's ``work_dir``, a path or a URL. It need not exist yet.
    refresh : callable, optional
        Called before each read, if `work_dir` is a copy of a directory of another host.
    keep_seconds : float, optional
        Seconds after which the dispatcher discards an iteration without consumers. None: never.
    """

    def __init__(
        self,
        work_dir: str | os.PathLike[str],
        refresh: Callable[[], None] | None = None,
        keep_seconds: float | None = None,
    ) -> None:
        self._refresh = refresh
        self.work_dir = os.fspath(work_dir)
        self._directory = f"{self.work_dir}/{JOURNAL_DIR}"
        self._lock = threading.Lock()
        self._file, self._offset = -1, 0
        self._keep_seconds = keep_seconds
        self._tables = _Tables()
        self._state = JournalState()

    def read(self) -> JournalState:
        """Return the current state.

        An incomplete record at the end is left for the next call.

        Raises
        ------
        DataError
            The journal is damaged.
        """
        with self._lock:
            if self._refresh is not None:
                self._refresh()
            files = _journal_files(self._directory)
            try:
                sizes = {number: agent_work_dir.size_of(path) for number, path in files.items()}
            except FileNotFoundError:  # the cluster stopped in the meantime
                return self._state
            if self._file >= 0 and sizes.get(self._file, -1) < self._offset:
                # Another journal has replaced it.
                self._file, self._offset = -1, 0
                self._tables = _Tables()
            before = self._file, self._offset
            for number, path in files.items():
                if number > self._file:
                    # A restarted dispatcher opens a new file and keeps the old one.
                    self._file, self._offset = number, 0
                if number == self._file and sizes[number] > self._offset:
                    self._read_file(path)
            size = sum(sizes.values())
            if before != (self._file, self._offset) or size != self._state.size_bytes:
                self._state = self._tables.summary(size, self._keep_seconds)
            return self._state

    def interrupt(self, task: str) -> None:
        """Record in all open iterations that `task` has stopped. The journal does not.

        Raises
        ------
        DataError
            The journal is damaged.
        """
        state = self.read()
        with self._lock:
            self._tables.interrupt(state, task)
            self._state = self._tables.summary(state.size_bytes, self._keep_seconds)

    def _read_file(self, path: str) -> None:
        """Apply the complete records after the last position, and advance the position."""
        rest, read_to = b"", self._offset
        while block := agent_work_dir.read_from(path, read_to, _BLOCK):
            read_to += len(block)
            data, position = rest + block, 0
            while len(data) - position >= _HEADER.size:
                length, _ = _HEADER.unpack_from(data, position)
                start = position + _HEADER.size
                end = start + length + _TRAILER
                if length > _LONGEST:
                    raise _damaged(path, self._offset)
                if end > len(data):
                    break
                try:
                    self._tables.apply(data[start : start + length])
                except (DecodeError, LookupError):
                    raise _damaged(path, self._offset) from None
                self._offset += end - position
                position = end
            rest = data[position:]


class _Tables:
    """The tables that result from the records, with one method per type of record."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}
        self._iterations: dict[int, Iteration] = {}
        self._tasks: dict[int, JournalTask] = {}
        self._open_tasks: dict[int, set[int]] = {}
        self._tasks_of: dict[int, list[int]] = {}
        self._clients: dict[int, int] = {}
        #: Time at which the latest consumer has left an iteration.
        self._left: dict[int, float] = {}
        #: Finished iterations of unnamed jobs, the latest last. No consumer can join such a job.
        self._ended: deque[int] = deque()
        self._omitted = 0
        self._splits: Counter[int] = Counter()
        self._interrupted: dict[int, tuple[str, ...]] = {}
        self._split_records: Counter[bytes] = Counter()

    def interrupt(self, state: JournalState, task: str) -> None:
        """Record that `task` has stopped during the open iterations of `state`."""
        for iteration in state.iterations:
            before = self._interrupted.get(iteration.id, ())
            if not (iteration.finished or iteration.discarded or task in before):
                self._interrupted[iteration.id] = (*before, task)

    def apply(self, record: bytes) -> None:
        """Apply one serialized ``Update``. Raises DecodeError if it is invalid."""
        if record and record[0] == _PRODUCE_SPLIT:
            # The most frequent record, with few different values: check each once, parse later.
            if record not in self._split_records:
                tf_messages.Update.FromString(record)
            self._split_records[record] += 1
            return
        kinds = tf_messages.Update.FromString(record).ListFields()
        if kinds and (handler := getattr(self, f"_{kinds[0][0].name}", None)):
            handler(kinds[0][1])

    def _create_job(self, update: Any) -> None:
        self._jobs[update.job_id] = Job(
            update.job_id,
            update.job_name,
            update.dataset_id,
            tf_messages.SHARDING_POLICIES[update.processing_mode_def.sharding_policy],
        )

    def _create_iteration(self, update: Any) -> None:
        self._iterations[update.iteration_id] = Iteration(
            update.iteration_id, update.job_id, update.repetition
        )

    def _create_task(self, update: Any) -> None:
        self._tasks[update.task_id] = JournalTask(update.task_id, update.iteration_id)
        self._open_tasks.setdefault(update.iteration_id, set()).add(update.task_id)
        self._tasks_of.setdefault(update.iteration_id, []).append(update.task_id)

    _create_pending_task = _create_task

    def _finish_task(self, update: Any) -> None:
        if task := self._tasks.get(update.task_id):
            self._tasks[task.id] = dataclasses.replace(task, finished=True)
            still_open = self._open_tasks[task.iteration_id]
            still_open.discard(task.id)
            iteration = self._iterations.get(task.iteration_id)
            if iteration is not None and not iteration.finished and not still_open:
                self._change_iteration(iteration.id, finished=True)
                self._omit_old(iteration)

    def _remove_task(self, update: Any) -> None:
        if task := self._tasks.pop(update.task_id, None):
            self._open_tasks[task.iteration_id].discard(task.id)

    def _garbage_collect_iteration(self, update: Any) -> None:
        self._change_iteration(update.iteration_id, finished=True, collected=True)
        for task_id in self._open_tasks.pop(update.iteration_id, ()):
            self._tasks[task_id] = dataclasses.replace(self._tasks[task_id], finished=True)

    def _acquire_iteration_client(self, update: Any) -> None:
        self._clients[update.iteration_client_id] = update.iteration_id

    def _release_iteration_client(self, update: Any) -> None:
        iteration_id = self._clients.pop(update.iteration_client_id, None)
        if iteration_id in self._iterations:
            self._left[iteration_id] = update.time_micros / 1e6

    def _change_iteration(self, iteration_id: int, **changes: Any) -> None:
        if iteration := self._iterations.get(iteration_id):
            self._iterations[iteration_id] = dataclasses.replace(iteration, **changes)

    def _omit_old(self, finished: Iteration) -> None:
        """Remove the oldest finished iteration of an unnamed job if there are too many."""
        job = self._jobs.get(finished.job_id)
        if job is None or not job.name.startswith(_UNNAMED):
            return
        self._ended.append(finished.id)
        if len(self._ended) > _KEPT:
            oldest = self._ended.popleft()
            self._omitted += 1
            self._jobs.pop(self._iterations.pop(oldest).job_id, None)
            self._open_tasks.pop(oldest, None)
            self._left.pop(oldest, None)
            self._splits.pop(oldest, None)
            self._interrupted.pop(oldest, None)
            for task in self._tasks_of.pop(oldest, ()):
                self._tasks.pop(task, None)

    def summary(self, size: int, keep_seconds: float | None) -> JournalState:
        """Return the tables as an immutable state."""

        def expires(iteration: Iteration) -> float | None:
            left = self._left.get(iteration.id)
            if keep_seconds is None or left is None or iteration.finished or clients[iteration.id]:
                return None
            return left + keep_seconds

        for record, count in self._split_records.items():
            split = tf_messages.Update.FromString(record).produce_split
            if not split.finished and split.iteration_id in self._iterations:
                self._splits[split.iteration_id] += count
        self._split_records.clear()
        clients = Counter(self._clients.values())
        return JournalState(
            jobs=tuple(self._jobs.values()),
            iterations=tuple(
                dataclasses.replace(
                    i,
                    clients=clients[i.id],
                    splits=self._splits[i.id],
                    expires=expires(i),
                    interrupted=self._interrupted.get(i.id, ()),
                )
                for i in self._iterations.values()
            ),
            tasks=tuple(self._tasks.values()),
            size_bytes=size,
            omitted=self._omitted,
        )


def _journal_files(directory: str) -> dict[int, str]:
    try:
        names = agent_work_dir.names_in(directory)
    except OSError:
        return {}
    numbers = sorted(int(m[1]) for name in names if (m := re.fullmatch(r"journal_(\d+)", name)))
    return {number: f"{directory}/journal_{number}" for number in numbers}


def _damaged(path: str, offset: int) -> DataError:
    return DataError(
        f"the dispatcher's journal {path} is damaged at byte {offset}",
        fix="stop the cluster and start it with another work_dir",
    )
