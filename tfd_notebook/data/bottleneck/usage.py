"""Metadata of a dataset that is read through a cluster, for the diagnosis of bottlenecks."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from tfd_notebook._compat.tf_data.pipeline_model import Shares, Splits, stages_of
from tfd_notebook.agent.cgroups import MINE, ROOT, Quota, quotas, share
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import Role
from tfd_notebook.model.stacks import BlockedFunction
from tfd_notebook.views.formatting import plural


def processors(file: Path = MINE, root: Path = ROOT) -> int:
    """Return the number of cores that this process may use.

    The CPU affinity and the CPU quotas of its control groups limit it.

    Parameters
    ----------
    file : Path
        Path of this process's control groups, as `tfd_notebook.agent.cgroups.quotas` reads it.
    root : Path
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota = min((quota.cores for quota in quotas(file, root)), default=float("inf"))
    return min(count, math.ceil(quota)) if math.isfinite(quota) else count


class Machine:
    """Samples the number of busy cores among those that this process may use.

    The load includes all processes. All cores count as busy while a control group of this process
    has used up its CPU quota.
    """

    def __init__(self) -> None:
        self._before = self._times()
        self._at, self._used = time.perf_counter(), self._quotas()
        self._busy = 0.0

    def busy(self) -> float:
        """Return the average since the previous call. 0 right after the start."""
        idle, total = self._times()
        passed = total - self._before[1]
        if passed > 0.1:
            now, used = time.perf_counter(), self._quotas()
            of_cores = 1 - (idle - self._before[0]) / passed
            self._busy = max(of_cores, share(self._used, used, now - self._at)) * processors()
            self._before, self._at, self._used = (idle, total), now, used
        return self._busy

    @staticmethod
    def _quotas() -> dict[Quota, float]:
        return {quota: quota.used() for quota in quotas()}

    @staticmethod
    def _times() -> tuple[float, float]:
        every = psutil.cpu_times(percpu=True)
        if hasattr(os, "sched_getaffinity"):
            every = [every[cpu] for cpu in os.sched_getaffinity(0) if cpu < len(every)] or every
        idle = sum(cpu.idle + getattr(cpu, "iowait", 0.0) for cpu in every)
        return idle, sum(sum(cpu[:8]) for cpu in every)


class DataWorkers(Protocol):
    """The data workers of a tf.data service, whose resource use is measured."""

    @property
    def owner(self) -> object:
        """The object that a user's variable holds, for suggested code."""

    @property
    def service_in_process(self) -> bool:
        """True if the data workers run in this process."""

    @property
    def service_on_this_host(self) -> bool:
        """True if all data workers run on this host."""

    def data_workers(self) -> tuple[TaskRow, ...]:
        """Return the data workers that have not ended, by index."""

    def readers(self, job_name: str | None) -> tuple[list[int], int | None]:
        """Return the consumers of a coordinated read.

        They are the indices of those that read in this process, and the number in other processes.
        Without a journal of the dispatcher on this host, that number is None.
        """

    def blocked_functions(self, seconds: float) -> Sequence[BlockedFunction]:
        """Return the Python functions that have not returned for `seconds`."""


@dataclass(frozen=True)
class Delivery:
    """The expected result of an epoch through a service. Holds no reference to the dataset.

    Parameters
    ----------
    cluster : weakref.ref of DataWorkers
    cardinality : int
        Number of elements of the dataset. Negative if unknown.
    mode : str
        One of `tfd_notebook.net.tf_messages.SHARDING_POLICIES`.
    job_name : str, optional
    infinite : bool
        Whether the read mode needs an infinite dataset.
    splits : Splits, optional
        Splits of its source. None if unknown.
    shares : Shares, optional
        The units that a static mode divides among the data workers. None if unknown or infinite.
    consumer : tuple of int, optional
        Index and number of the consumers of a coordinated read.
    one_worker : bool
        Whether a second data worker would join elements wrongly, or lose some.
    cached : bool
        Whether each data worker repeats its cached share, which ends with it.
    """

    cluster: weakref.ref[DataWorkers]
    cardinality: int
    mode: str
    job_name: str | None
    infinite: bool = False
    splits: Splits | None = None
    consumer: tuple[int, int] | None = None
    one_worker: bool = False
    cached: bool = False
    shares: Shares | None = None

    def can_use(self, workers: int) -> int:
        """Return the number of data workers, of `workers`, that can work at the same time."""
        if self.one_worker:
            return min(workers, 1)
        if self.mode == "DATA":  # each of them computes all elements and sends its share
            return min(workers, 1)
        if self.shares is not None:
            workers = min(workers, *self.shares.counts)
        return workers if self.shared is None else min(workers, self.shared.count)

    def too_few(self, workers: int) -> str:
        """Return the number of files or elements if an epoch of `workers` fails, otherwise ""."""
        shares = self.shares
        if shares is None or min(shares.counts) >= workers:
            return ""
        least = plural(min(shares.counts), shares.unit)
        if len(shares.counts) == 1 and shares.complete:
            return least
        if not shares.complete:
            return f"{least} in one of its sources"
        return f"{plural(sum(shares.counts), shares.unit)}, of which one source has {least}"

    def failure(self, workers: int) -> str:
        """Return why an epoch of this number of data workers fails, as a clause; otherwise ""."""
        count = self.too_few(workers)
        return count and (
            f"with {workers} data workers an epoch fails, because the dataset has {count}, and "
            f'mode "{self.mode.lower()}" needs at least one for each data worker'
        )

    @property
    def shared(self) -> Splits | None:
        """The splits that data workers share. None if each reads all, or if unknown."""
        return self.splits if self.mode in ("DYNAMIC", "FILE", "FILE_OR_DATA") else None

    def account(self, delivered: int) -> str:
        """Describe how an epoch of `delivered` elements differs from the dataset."""
        count, cluster = self.cardinality, self.cluster()
        if count < 0 or delivered == count or cluster is None:
            return ""
        text = f"the last epoch delivered {delivered:,} elements of a dataset of {count:,}"
        if self.job_name and delivered < count:
            return f"{text}: job {self.job_name!r} is shared, other consumers may have the rest"
        workers = len(cluster.data_workers())
        if self.mode == "OFF":
            if delivered == count * workers:
                return f"{text}: with off each of the {workers} data workers delivers all of it"
            # A shared job, or one whose number of workers has changed.
            if self.job_name or delivered % count == 0:
                return f"{text}: with off each data worker delivers all of it"
            return f"{text}, but each of the {workers} data workers should deliver all of it"
        if delivered > count:
            return f"{text}: some were delivered again after a data worker was restarted"
        return f"{text}: the rest was lost with a data worker"


@dataclass
class ServiceReadOptions:
    """The options with which a dataset is read through a service.

    Parameters
    ----------
    delivery : Delivery
    origin : tf.data.Dataset, optional
        The pipeline that the workers run. None if another process distributed it.
    compressed : bool
        Whether elements may be sent compressed, although they can be sent without compression.
    distribute_again : callable
        Distributes a dataset with the same options, or with a different compression or
        ``semantics``.
    joined : callable
        Returns True if a reader in this process joined the named job before it was finished.
    captured : tuple of CapturedState
        Variables and tables that `origin` uses, as they were sent.
    pipeline : Semantics, optional
        The changes that the service makes to the elements. None if they are unknown.
    warned : bool
        Whether they were checked, with a warning.
    """

    delivery: Delivery
    origin: Any = None
    compressed: bool = False
    distribute_again: Callable[..., Any] | None = None
    joined: Callable[[], bool] = lambda: False
    captured: tuple[Any, ...] = ()
    pipeline: Any = None
    warned: bool = False


def use_in(dataset: Any) -> ServiceReadOptions | None:
    """Return the service options with which `dataset` is read, or None without a service."""
    uses = (stage.service for stage in stages_of(dataset).walk() if stage.service is not None)
    return next(uses, None)


@dataclass(frozen=True)
class WorkerUtilization:
    """Resource use of a data worker over a period.

    Parameters
    ----------
    task : str
    state : str
    cpu : float, optional
        Average number of cores used. None if unknown.
    bytes_per_s : float, optional
        Bytes sent. None if unknown.
    rates : tuple of float
        Bytes per second in each measurement of the last seconds, latest last.
    working : float, optional
        Share of the last seconds in which it was busy, 0 to 1. None if unknown.
    late : int
        Number of late ones among its last three replies.
    """

    task: str
    state: str
    cpu: float | None
    bytes_per_s: float | None
    rates: tuple[float, ...] = ()
    working: float | None = None
    late: int = 0


def workers_of(tasks: Sequence[TaskRow]) -> tuple[WorkerUtilization, ...]:
    """Return the recent resource use of the data workers among `tasks`."""
    return tuple(
        WorkerUtilization(
            row.task,
            str(row.state),
            None if row.cpu_percent is None else row.cpu_percent / 100,
            row.bytes_per_s,
            row.rates,
            row.working,
            row.late,
        )
        for row in tasks
        if row.role is Role.DATA_WORKER and not row.state.ended
    )


class Workers:
    """Measures the resource use of the data workers since its creation.

    Parameters
    ----------
    cluster : DataWorkers
    """

    def __init__(self, cluster: DataWorkers) -> None:
        self._cluster = cluster
        self._began = time.perf_counter()
        self._before = {row.task: row for row in cluster.data_workers()}
        self._cpu = {task: _cpu_seconds(row.pid) for task, row in self._before.items()}

    def read(self) -> tuple[WorkerUtilization, ...]:
        """Return the resource use up to now. Workers in this process have no separate CPU time."""
        seconds = time.perf_counter() - self._began
        result = []
        for row in self._cluster.data_workers():
            before, begun = self._before.get(row.task), self._cpu.get(row.task)
            cpu = sent = None
            if before is not None and not self._cluster.service_in_process:
                now = _cpu_seconds(row.pid) if self._cluster.service_on_this_host else None
                if now is not None and begun is not None and row.pid == before.pid:
                    cpu = (now - begun) / seconds
                elif row.cpu_percent is not None:
                    cpu = row.cpu_percent / 100
                sent = row.bytes_per_s  # of a worker that had not been measured at the beginning
                if row.bytes_sent is not None and before.bytes_sent is not None:
                    sent = max(0, row.bytes_sent - before.bytes_sent) / seconds
            result.append(
                WorkerUtilization(
                    row.task, str(row.state), cpu, sent, row.rates, row.working, row.late
                )
            )
        return tuple(result)


def _cpu_seconds(pid: int | None) -> float | None:
    if pid is None:
        return None
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)
