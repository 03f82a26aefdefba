"""What a cluster can tell: its tasks and their logs, its limit, its jobs, what more would bring."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tfd_notebook import errors
from tfd_notebook.cluster.data_service import ClusterDataService
from tfd_notebook.data.service.usage import processors
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.snapshot import Snapshot
from tfd_notebook.model.spec import check_count

if TYPE_CHECKING:
    import pandas as pd

    from tfd_notebook.data.explain.scaling_estimate import Forecast
    from tfd_notebook.data.service.protocols import Registered
    from tfd_notebook.views import Table

#: Seconds for which a consumer is watched before an estimate.
_FORECAST_SECONDS = 3


class ClusterReports(ClusterDataService):
    """The part of `Cluster` that explains."""

    def to_frame(self) -> pd.DataFrame:
        """Return the tasks as a DataFrame with the columns `model.snapshot.TASK_COLUMNS`."""
        return self.snapshot().to_frame()

    def gpus(self) -> Table:
        """Return the table of the GPUs that tasks may be given, also of those that no task sees.

        Returns
        -------
        Table
            It shows itself, and its ``to_frame()`` is a DataFrame with the columns
            `model.snapshot.GPU_COLUMNS`: host, number, name, the task that sees it, and use and
            memory of the whole GPU, whoever uses it. Empty where no worker or evaluator could
            be given any.
        """
        from tfd_notebook import views

        return views.gpus_table(self.snapshot().gpus)

    def subscribe(self, subscriber: Callable[[Snapshot], None]) -> Callable[[], None]:
        """Call `subscriber` with a fresh snapshot about twice a second, from another thread.

        Returns
        -------
        callable
            Ends the subscription.
        """
        return self._monitor.subscribe(subscriber)

    def logs(
        self, task: str | None = None, lines: int = 100, follow: bool = False
    ) -> str | Iterator[str]:
        """Return what tasks wrote to their standard output and error.

        Parameters
        ----------
        task : str, optional
            One task; default all, each under a heading.
        lines : int
            How many lines of each task. Default 100.
        follow : bool
            Return an iterator over these and all later lines instead, until the task ends or
            Ctrl-C. Needs `task`.
        """
        if follow:
            if task is None:
                raise errors.UsageError(
                    "follow=True needs a task", fix='logs("data_worker:0", ...)'
                )
            return self._task_manager.follow(task, lines)
        if task is not None:
            return self._task_manager.log(task, lines)
        names = [row.task for row in self.snapshot().tasks]
        return "\n".join(f"--- {name}\n{self._task_manager.log(name, lines)}" for name in names)

    def log_from(self, task: str, offset: int | None = None, lines: int = 100) -> tuple[str, int]:
        """Return what a task's log has from a place on, and the place to go on from.

        Parameters
        ----------
        task : str
        offset : int, optional
            What the call before returned. Default: the last `lines` lines.
        lines : int
            Used without `offset`. Default 100.

        Returns
        -------
        str, int
            At most about 64 kB of text, and the offset behind it.
        """
        return self._task_manager.log_from(task, offset, lines)

    def limits(self, name: str | None = None) -> tuple[tuple[float, Limit], ...]:
        """Return what limited a consumer in the last hour.

        Parameters
        ----------
        name : str, optional
            A stream or an observed dataset, as in the table of streams. Default: the one that was
            served last.

        Returns
        -------
        tuple of (float, Limit)
            When, in seconds since the epoch, and what, for every 5 seconds; the latest last. Two of
            them can be given to `tfd_notebook.compare`.

        Raises
        ------
        UnknownName
            Nothing of that name is or was read.
        """
        source = self._consumers.latest() if name is None else self._consumers.named(name)
        return tuple(source.live.history) if source is not None else ()

    def _worker_limit(self, task: str) -> Limit:
        from tfd_notebook.data.explain.live_limit import worker_limit
        from tfd_notebook.data.service.usage import workers_of

        latest = self._consumers.latest()
        return worker_limit(
            task,
            workers_of(self.snapshot().tasks),
            self.service_on_this_host and self._consumers.machine_is_busy(),
            None if latest is None else latest.live.delivery,
        )

    def jobs(self) -> Table:
        """Return what the dispatcher's journal says of each pass of each job.

        Returns
        -------
        Table
            A row for each pass, with ``job mode pass state readers read_here_by splits splits_total
            workers_done``: how many consumers read it now, in whatever process, and which of this
            one; how many splits of the source were handed out, which with ``"dynamic"`` over single
            elements is one for each element, and of how many, None where that is not known; and how
            many workers are through.

        Raises
        ------
        StateError
            The dispatcher keeps no journal.
        """
        from tfd_notebook import views

        self._require_dispatcher()
        journal = self.journal
        if journal is None:
            raise errors.StateError(
                "this cluster's dispatcher keeps no journal, and nobody else knows its jobs",
                fix="start the cluster with service=tfd.Service(fault_tolerant=True)",
            )
        readers: dict[str, list[str]] = {}
        for row in self.snapshot().streams:
            if row.state == "running" and row.job:
                readers.setdefault(row.job, []).append(row.name)
        return views.jobs_table(journal.read(), readers, _split_counts(self.registered))

    def what_if(self, *data_workers: int) -> Table:
        """Estimate what the consumer that reads now would get with other numbers of data workers.

        Watches it for 3 seconds first.

        Parameters
        ----------
        *data_workers : int
            Default 2, 4, 8.

        Returns
        -------
        Table
            A row for each, and for the present number, with ``data_workers``, ``elements_per_s``,
            ``low`` and ``high`` (between which it should be) and ``because``: what sets it. New
            workers on this machine share its processors; Python that waits is not modelled. If
            the source has fewer splits than workers, a line below the rows reports it.

        Raises
        ------
        StateError
            Nothing reads through the data workers, so that nothing is known.
        """
        from tfd_notebook import views

        for count in data_workers:
            check_count("data_workers", count)
        self._require_running()
        return views.forecast_table(*self._forecast(data_workers or (2, 4, 8)))

    def _forecast(self, counts: Sequence[int]) -> tuple[list[Forecast], str]:
        """Return an estimate for each of `counts`, and advice where they cannot help."""
        from tfd_notebook.data.explain.advice import few_splits
        from tfd_notebook.data.explain.live_limit import ProcessSampler
        from tfd_notebook.data.explain.scaling_estimate import forecast
        from tfd_notebook.data.service.usage import Workers

        source = self._consumers.latest()
        if source is None or not self.data_workers():
            raise errors.StateError(
                "nothing reads from the cluster, so nothing is known",
                fix="start a stream, cluster.stream(dataset).start(), and ask again",
            )
        if not source.live.through_service:
            raise errors.StateError(
                "what is read now does not come from the data workers, so they cannot change it",
                fix="read dataset.apply(cluster.distribute('dynamic')), and ask again",
            )
        workers, sampler = Workers(self), ProcessSampler()
        readings = [source.reading()]
        for _ in range(_FORECAST_SECONDS):
            time.sleep(1.0)
            readings.append(source.reading())
        sampler.sample()
        used = workers.read()
        first, last = readings[0], readings[-1]
        if last.elements == first.elements:
            raise errors.StateError(
                f"no element came for {_FORECAST_SECONDS} s, so nothing is known",
                fix="see cluster.limit for what it waits for",
            )
        rates = [b.elements - a.elements for a, b in itertools.pairwise(readings)]
        delivery = source.live.delivery
        found = forecast(
            sorted({*counts, len(used)}),
            workers=len(used),
            rates=[float(rate) for rate in rates],
            wait_fraction=min(1.0, (last.waited - first.waited) / _FORECAST_SECONDS),
            worker_cpu=sum(worker.cpu or 0.0 for worker in used) or sampler.cpu,
            consumer_cpu=0.0 if self.service_in_process else sampler.cpu,
            cores=processors() if self.service_on_this_host else None,
            behind=source.live.limit.kind in ("source", "stage", "python", "device_copy"),
            useful=delivery.can_use if delivery is not None else lambda count: count,
        )
        shared = None if delivery is None else delivery.shared
        limited = shared is not None and any(one.because == "splits" for one in found)
        return found, few_splits(shared) if shared is not None and limited else ""


def _split_counts(registered: Mapping[str, Registered]) -> dict[str, int]:
    return {key: one.splits.count for key, one in registered.items() if one.splits is not None}
