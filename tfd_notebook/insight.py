"""What a cluster can tell of its data path: its limit, its jobs, what more workers would bring."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfd_notebook import errors
from tfd_notebook.data.using import processors
from tfd_notebook.datapath import DataPath
from tfd_notebook.limit import Limit
from tfd_notebook.spec import check_count

if TYPE_CHECKING:
    from tfd_notebook.data.forecast import Forecast
    from tfd_notebook.views import Table

#: Seconds that an estimate waits for the first figures of a consumer.
_FORECAST_SECONDS = 5.0


class Insight(DataPath):
    """The part of `Cluster` that explains."""

    @property
    def limit(self) -> Limit:
        """What limits the consumer that reads now; of several, the one that was served last."""
        from tfd_notebook.data.live import NOTHING

        latest = self._consumers.latest()
        return latest.live.limit if latest is not None else NOTHING

    def _worker_limit(self, task: str) -> Limit:
        from tfd_notebook.data.live import worker_limit
        from tfd_notebook.data.using import workers_of

        return worker_limit(task, workers_of(self.snapshot().tasks))

    def jobs(self) -> Table:
        """Return what the dispatcher's journal says of each pass of each job.

        Returns
        -------
        Table
            A row for each pass, with ``job mode pass state readers read_here_by splits
            workers_done``: how many consumers read it now, in whatever process, and which of this
            one; how many splits of the source were handed out, which with ``"dynamic"`` over single
            elements is one for each element; and how many workers are through.

        Raises
        ------
        StateError
            The dispatcher keeps no journal.
        """
        from tfd_notebook import views
        from tfd_notebook.data.journal import Journal

        work_dir = self._fleet.work_dir
        if work_dir is None:
            raise errors.StateError(
                "this cluster's dispatcher keeps no journal, and nobody else knows its jobs",
                fix="start the cluster with service=tfd.Service(fault_tolerant=True)",
            )
        readers: dict[str, list[str]] = {}
        for row in self.snapshot().streams:
            if row.state == "running" and row.job:
                readers.setdefault(row.job, []).append(row.name)
        return views.jobs_table(Journal(work_dir).read(), readers)

    def what_if(self, *data_workers: int) -> Table:
        """Estimate what the consumer that reads now would get with other numbers of data workers.

        Parameters
        ----------
        *data_workers : int
            Default 2, 4, 8.

        Returns
        -------
        Table
            A row for each, with ``data_workers``, ``elements_per_s``, ``low`` and ``high`` (between
            which it should be) and ``because``: what sets it. New workers on this machine share its
            processors; Python that waits is not foreseen.

        Raises
        ------
        StateError
            Nothing reads from the cluster, so that nothing is known; where somebody has only just
            begun to, it waits up to 5 seconds.
        """
        from tfd_notebook import views

        for count in data_workers:
            check_count("data_workers", count)
        self._must_run()
        return views.forecast_table(self._forecast(data_workers or (2, 4, 8)))

    def _forecast(self, counts: Sequence[int]) -> list[Forecast]:
        from tfd_notebook.data.forecast import forecast
        from tfd_notebook.data.using import workers_of

        deadline = time.monotonic() + _FORECAST_SECONDS
        while True:
            latest = self._consumers.latest()
            known = latest is not None and latest.live.limit.figures["elements_per_s"] > 0
            if known or latest is None or time.monotonic() > deadline:
                break
            time.sleep(0.1)  # whoever reads has only just begun
        workers = workers_of(self.snapshot().tasks)
        if latest is None or not known or not workers:
            raise errors.StateError(
                "nothing reads from the cluster, so nothing is known",
                fix="start a stream, cluster.stream(dataset).start(), and ask again",
            )
        figures = latest.live.limit.figures
        recent = [second.elements_per_s for second in latest.series.history()[-5:]]
        if self.service_in_process:
            worker_cpu, consumer_cpu = figures["cpu_cores"], 0.0
        else:
            worker_cpu = sum(worker.cpu or 0.0 for worker in workers)
            consumer_cpu = figures["cpu_cores"]
        return forecast(
            counts,
            workers=len(workers),
            rates=recent or [figures["elements_per_s"]],
            wait_fraction=figures["wait_fraction"],
            worker_cpu=worker_cpu,
            consumer_cpu=consumer_cpu,
            cores=processors() if self.service_on_this_host else None,
        )
