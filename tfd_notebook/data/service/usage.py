"""What a dataset through a cluster was made from, kept on the dataset for those who explain it."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tfd_notebook._compat.tf_data.pipeline_model import Splits, stages_of
from tfd_notebook.agent.cgroups import MINE, ROOT, Quota, quotas, share
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import Role

if TYPE_CHECKING:
    from tfd_notebook.data.service.protocols import DataServiceProtocol


def processors(file: Path = MINE, root: Path = ROOT) -> int:
    """Return the number of cores that this process may use.

    The CPU affinity and the CPU quotas of its control groups limit it.

    Parameters
    ----------
    file : Path
        The control groups of this process, as `tfd_notebook.agent.cgroups.quotas` reads them.
    root : Path
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota = min((one.cores for one in quotas(file, root)), default=float("inf"))
    return min(count, math.ceil(quota)) if math.isfinite(quota) else count


class Machine:
    """Samples how many of the cores that this process may use are busy, with any process.

    The cores are busy, too, if a control group of this process has used its CPU quota.
    """

    def __init__(self) -> None:
        self._before = self._times()
        self._at, self._used = time.perf_counter(), self._quotas()
        self._busy = 0.0

    def busy(self) -> float:
        """Return the average since the last call; 0 in the first instant."""
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


@dataclass(frozen=True)
class Delivery:
    """What a pass through a service should deliver; holds no dataset.

    Parameters
    ----------
    host : weakref.ref of ServiceHost
    cardinality : int
        Elements of the dataset; negative where that is not known.
    mode : str
        One of `tfd_notebook.net.tf_messages.SHARDING_POLICIES`.
    job_name : str, optional
    endless : bool
        Whether it is read in a way that needs a dataset without an end.
    splits : Splits, optional
        Splits that the dispatcher assigns under dynamic sharding; None if not known.
    """

    host: weakref.ref[DataServiceProtocol]
    cardinality: int
    mode: str
    job_name: str | None
    endless: bool = False
    splits: Splits | None = None

    def can_use(self, workers: int) -> int:
        """Return how many of `workers` data workers can work at the same time."""
        return workers if self.shared is None else min(workers, self.shared.count)

    @property
    def shared(self) -> Splits | None:
        """The splits that data workers share; None if each reads all, or that is not known."""
        return self.splits if self.mode == "DYNAMIC" else None

    def account(self, delivered: int) -> str:
        """Return in words how a pass that delivered so many elements differs from the dataset."""
        count, host = self.cardinality, self.host()
        if count < 0 or delivered == count or host is None:
            return ""
        said = f"the last pass delivered {delivered:,} elements of a dataset of {count:,}"
        if self.job_name and delivered < count:
            return f"{said}: job {self.job_name!r} is shared, others may have the rest"
        workers = len(host.data_workers())
        if self.mode == "OFF":
            if delivered == count * workers:
                return f"{said}: with off each of the {workers} data workers delivers all of it"
            if self.job_name or delivered % count == 0:  # shared, or there were others then
                return f"{said}: with off each data worker delivers all of it"
            return f"{said}, where {workers} data workers should each deliver all of it"
        if delivered > count:
            return f"{said}: some came again when a data worker was restarted"
        return f"{said}: the rest was lost with a data worker"


@dataclass(frozen=True)
class ServiceReadOptions:
    """How a dataset came to be read through a service.

    Parameters
    ----------
    delivery : Delivery
    origin : tf.data.Dataset, optional
        The pipeline that the workers run; None where it was not distributed here.
    compressed : bool
        Whether elements travel compressed, or TensorFlow may choose so.
    again : callable
        Distributes a dataset in the same way, with other options where these are given.
    joined : callable
        Returns True if a reader in this process joined the named job before it was finished.
    """

    delivery: Delivery
    origin: Any = None
    compressed: bool = False
    again: Callable[..., Any] | None = None
    joined: Callable[[], bool] = lambda: False


def use_in(dataset: Any) -> ServiceReadOptions | None:
    """Return how `dataset` is read through a service of this package; None if it is not."""
    used = (stage.service for stage in stages_of(dataset).walk() if stage.service is not None)
    return next(used, None)


@dataclass(frozen=True)
class WorkerUtilization:
    """What a data worker did in a span of time.

    Parameters
    ----------
    task : str
    state : str
    cpu : float, optional
        Processors that it used, on average; None where that is not known.
    bytes_per_s : float, optional
        What it sent; None where that is not known.
    rates : tuple of float
        Bytes per second in each measurement of the last seconds, the latest last.
    working : float, optional
        Share of the last seconds in which it worked, 0 to 1; None where that is not known.
    """

    task: str
    state: str
    cpu: float | None
    bytes_per_s: float | None
    rates: tuple[float, ...] = ()
    working: float | None = None


def workers_of(tasks: Sequence[TaskRow]) -> tuple[WorkerUtilization, ...]:
    """Return what the data workers among `tasks` did lately."""
    return tuple(
        WorkerUtilization(
            row.task,
            str(row.state),
            None if row.cpu_percent is None else row.cpu_percent / 100,
            row.bytes_per_s,
            row.rates,
            row.working,
        )
        for row in tasks
        if row.role is Role.DATA_WORKER and not row.state.ended
    )


class Workers:
    """Measures the data workers from its making on.

    Parameters
    ----------
    host : ServiceHost
    """

    def __init__(self, host: DataServiceProtocol) -> None:
        self._host = host
        self._began = time.perf_counter()
        self._before = {row.task: row for row in host.data_workers()}
        self._cpu = {task: _cpu_seconds(row.pid) for task, row in self._before.items()}

    def read(self) -> tuple[WorkerUtilization, ...]:
        """Return what each worker did up to now; in this process they cannot be told apart."""
        seconds = time.perf_counter() - self._began
        found = []
        for row in self._host.data_workers():
            before, begun = self._before.get(row.task), self._cpu.get(row.task)
            cpu = sent = None
            if before is not None and not self._host.service_in_process:
                now = _cpu_seconds(row.pid) if self._host.service_on_this_host else None
                if now is not None and begun is not None and row.pid == before.pid:
                    cpu = (now - begun) / seconds
                elif row.cpu_percent is not None:
                    cpu = row.cpu_percent / 100
                if row.bytes_sent is not None and before.bytes_sent is not None:
                    sent = max(0, row.bytes_sent - before.bytes_sent) / seconds
            found.append(
                WorkerUtilization(row.task, str(row.state), cpu, sent, row.rates, row.working)
            )
        return tuple(found)


def _cpu_seconds(pid: int | None) -> float | None:
    if pid is None:
        return None
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)
