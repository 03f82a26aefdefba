"""Reports of a cluster: tasks, logs, bottlenecks, data jobs and scaling estimates."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tfd_notebook import errors, views
from tfd_notebook._compat.tf_data import source_locations
from tfd_notebook.cluster.context import ClusterContext
from tfd_notebook.cluster.data_service import ClusterDataService
from tfd_notebook.data.bottleneck.advice import few_splits
from tfd_notebook.data.bottleneck.classification import is_busy
from tfd_notebook.data.bottleneck.live_limit import ProcessSampler
from tfd_notebook.data.bottleneck.live_limit import worker_limit as limit_of_worker
from tfd_notebook.data.bottleneck.scaling_estimate import forecast
from tfd_notebook.data.bottleneck.usage import Workers, processors, workers_of
from tfd_notebook.data.consume import sampler
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.spec import check_count
from tfd_notebook.model.stacks import stack_records

if TYPE_CHECKING:
    from tfd_notebook.data.bottleneck.scaling_estimate import Forecast
    from tfd_notebook.views import Table

#: Seconds for which a consumer is measured before an estimate.
_FORECAST_SECONDS = 3


class ClusterReports:
    """The reports of a `Cluster`.

    Parameters
    ----------
    context : ClusterContext
    data_service : ClusterDataService
    """

    def __init__(self, context: ClusterContext, data_service: ClusterDataService) -> None:
        self._context = context
        self._data_service = data_service
        self._monitor, self._task_manager = context.monitor, context.task_manager
        self._consumers = context.consumers

    def gpus(self) -> Table:
        """Return the table of the GPUs available to tasks, used or not.

        Returns
        -------
        Table
            Displays itself. ``to_frame()`` returns a DataFrame with the columns
            `model.snapshot.GPU_COLUMNS`. Utilization and memory are those of the whole GPU, by all
            processes. Empty if no worker or evaluator can get a GPU.
        """
        return views.gpus_table(self._monitor.snapshot().gpus)

    def logs(
        self, task: str | None = None, lines: int = 100, follow: bool = False
    ) -> str | Iterator[str]:
        """Return the standard output and error of tasks.

        Parameters
        ----------
        task : str, optional
            Name of a task. Default: all tasks, each under a heading.
        lines : int
            Number of lines of each task. Default 100.
        follow : bool
            Return an iterator over these and all later lines instead. It ends with the task or
            at Ctrl-C. Needs `task`.
        """
        if follow:
            if task is None:
                raise errors.UsageError(
                    "follow=True needs a task", fix='logs("data_worker:0", ...)'
                )
            return self._task_manager.follow(task, lines)
        if task is not None:
            return self._task_manager.log(task, lines)
        names = [row.task for row in self._monitor.snapshot().tasks]
        return "\n".join(f"--- {name}\n{self._task_manager.log(name, lines)}" for name in names)

    def stacks(self, task: str | None = None) -> Table:
        """Return the Python stacks of tasks at this moment.

        Parameters
        ----------
        task : str, optional
            Name of a task. Default: all tasks.

        Returns
        -------
        Table
            One row for each thread that runs Python code. Columns: ``task thread function file
            line seconds note``. Records and ``to_frame()`` also have ``stack``, the frames from
            the outermost to the innermost.

            - ``thread``: ``tf.data`` for a thread that runs a Python function of a dataset. Its
              stack starts with that function.
            - ``function``, ``file``, ``line``: of the innermost frame of the user's code, or else
              of the innermost frame.
            - ``seconds``: seconds since this call of ``function`` was first observed. Data workers
              are observed once a second while they run, so a call may be one second older. None
              outside of functions of datasets, in a generator that the user's code iterates, and
              under a debugger.
            - ``note``: the reason if a task has no stacks, for example because a thread holds the
              GIL.

            Threads of ``launcher="inprocess"`` have the task ``kernel``: the data workers of a
            kernel share them. Only those that run functions of datasets are shown.

        Raises
        ------
        UnknownName
            The cluster has no such task.
        StateError
            The cluster does not run.
        """
        self._context.require_running()
        if task is not None:
            self._task_manager.row(task)  # raises UnknownName
        names = [row.task for row in self._monitor.rows()] if task is None else [task]
        stacks = self._task_manager.stacks(names)
        return views.stacks_table(stack_records(stacks, source_locations.cell_of))

    def limits(self, name: str | None = None) -> tuple[tuple[float, Limit], ...]:
        """Return the bottlenecks of a consumer in the last hour.

        Parameters
        ----------
        name : str, optional
            A stream or an observed dataset, as in the table of streams. Default: the one that was
            served last.

        Returns
        -------
        tuple of (float, Limit)
            Time in seconds since the epoch and bottleneck, for every 5 seconds, the latest last.
            `tfd_notebook.compare` compares two of them.

        Raises
        ------
        UnknownName
            No consumer has or had that name.
        """
        source = self._consumers.latest() if name is None else self._consumers.named(name)
        return tuple(source.live.history) if source is not None else ()

    def worker_limit(self, task: str) -> Limit:
        """Return the bottleneck of one data worker."""
        latest = self._consumers.latest()
        return limit_of_worker(
            task,
            workers_of(self._monitor.snapshot().tasks),
            self._data_service.service_on_this_host and is_busy(sampler.busy_cores(), processors()),
            None if latest is None else latest.live.delivery,
            None if latest is None else latest.live.limit,
        )

    def jobs(self) -> Table:
        """Return the iterations of all data jobs, from the dispatcher's journal.

        Of jobs without a name, the latest 1,000 finished iterations are listed.

        Returns
        -------
        Table
            One row for each iteration (pass) of a data job, with the columns ``job mode pass state
            readers read_here_by splits splits_total workers_done note``. A line below the rows has
            the number of open passes and the size of the journal.

            - ``state``: ``"running"``, ``"finished"``, ``"left"`` by its last reader, or
              ``"discarded"`` by the dispatcher some time later.
            - ``readers``: number of consumers that read it now, in all processes.
            - ``read_here_by``: the consumers of this process that read it.
            - ``splits``: number of source splits assigned to workers. With ``"dynamic"`` over
              single elements, each element is a split.
            - ``splits_total``: number of all splits, or None if unknown.
            - ``workers_done``: number of workers that have finished.
            - ``note``: the reason for which a pass does not deliver each element once. Empty if
              it does. Tasks that restarted before this process attached are not included.

        Raises
        ------
        StateError
            The dispatcher keeps no journal.
        """
        self._context.require_dispatcher()
        journal = self._data_service.journal
        if journal is None:
            raise errors.StateError(
                "listing the jobs failed: this cluster's dispatcher keeps no journal",
                fix="start the cluster with service=tfd.Service(fault_tolerant=True)",
            )
        readers: dict[str, list[str]] = {}
        for row in self._monitor.snapshot().streams:
            if row.state == "running" and row.job:
                readers.setdefault(row.job, []).append(row.name)
        registered = self._data_service.registered
        splits = {key: known.splits.count for key, known in registered.items() if known.splits}
        return views.jobs_table(journal.read(), readers, splits)

    def what_if(self, *data_workers: int) -> Table:
        """Estimate the current consumer's throughput with other numbers of data workers.

        Measures the consumer for 3 seconds first.

        Parameters
        ----------
        *data_workers : int
            Numbers of data workers. Default 2, 4, 8.

        Returns
        -------
        Table
            One row for each number and for the current number. Columns: ``data_workers``,
            ``elements_per_s``, its expected range ``low`` to ``high``, and the bottleneck
            ``because``. New workers on this host share its processors. Waiting Python code is
            not modeled. If the source has fewer splits than workers, a line below the rows
            reports it.

        Raises
        ------
        StateError
            No consumer reads through the data workers.
        """
        for count in data_workers:
            check_count("data_workers", count)
        self._context.require_running()
        return views.forecast_table(*self._forecast(data_workers or (2, 4, 8)))

    def _forecast(self, counts: Sequence[int]) -> tuple[list[Forecast], str]:
        """Return an estimate for each of `counts`, and advice if more workers cannot help."""
        source = self._consumers.latest()
        if source is None or not self._data_service.data_workers():
            raise errors.StateError(
                "estimate failed: no consumer reads from the cluster",
                fix="start a stream, cluster.stream(dataset).start(), and try again",
            )
        if not source.live.through_service:
            raise errors.StateError(
                "estimate failed: the current dataset does not read from the data workers",
                fix="read dataset.apply(cluster.distribute('dynamic')), and try again",
            )
        workers, process = Workers(self._data_service), ProcessSampler()
        readings = [self._consumers.measure(source)]
        for _ in range(_FORECAST_SECONDS):
            time.sleep(1.0)
            readings.append(self._consumers.measure(source))
        process.sample()
        used = workers.read()
        first, last = readings[0], readings[-1]
        if last.elements == first.elements:
            raise errors.StateError(
                f"estimate failed: no element was delivered for {_FORECAST_SECONDS} s",
                fix="see cluster.limit for the cause",
            )
        rates = [b.elements - a.elements for a, b in itertools.pairwise(readings)]
        delivery = source.live.delivery
        forecasts = forecast(
            sorted({*counts, len(used)}),
            workers=len(used),
            rates=[float(rate) for rate in rates],
            wait_fraction=min(1.0, (last.waited - first.waited) / _FORECAST_SECONDS),
            worker_cpu=sum(worker.cpu or 0.0 for worker in used) or process.cpu,
            consumer_cpu=0.0 if self._data_service.service_in_process else process.cpu,
            cores=processors() if self._data_service.service_on_this_host else None,
            behind=source.live.limit.kind in ("source", "stage", "python", "device_copy"),
            useful=delivery.can_use if delivery is not None else lambda count: count,
        )
        limited = any(row.because == "splits" for row in forecasts)
        return forecasts, few_splits(delivery) if delivery is not None and limited else ""
