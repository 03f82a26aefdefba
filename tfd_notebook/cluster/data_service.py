"""The tf.data service of a cluster: its consumers, its journal and its data workers."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfd_notebook import errors, views
from tfd_notebook.cluster.servers import ClusterServers
from tfd_notebook.cluster.task_manager import BLOCKED_SECONDS, DISPATCHER
from tfd_notebook.data.bottleneck.advice import few_splits, waits_for
from tfd_notebook.data.bottleneck.classification import is_busy
from tfd_notebook.data.bottleneck.live_limit import NOTHING, ProcessSampler
from tfd_notebook.data.bottleneck.live_limit import worker_limit as limit_of_worker
from tfd_notebook.data.bottleneck.scaling_estimate import forecast
from tfd_notebook.data.bottleneck.usage import Workers, processors, workers_of
from tfd_notebook.data.consume import sampler
from tfd_notebook.data.consume.stream import Stream
from tfd_notebook.data.service.journal import Journal
from tfd_notebook.data.service.protocols import TaskEnvironment
from tfd_notebook.data.service.py_functions import FunctionWatch
from tfd_notebook.data.service.stream_semantics import with_semantics
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import Policy, Role, check_count
from tfd_notebook.model.stacks import BlockedFunction

if TYPE_CHECKING:
    from tfd_notebook.data.bottleneck.scaling_estimate import Forecast
    from tfd_notebook.views import Table

#: Bytes that must remain free for the journal's records.
_SPARE_BYTES = 100_000
#: Longer than the timeout of the agent's request to a task.
_INSPECT_SECONDS = 15.0
#: Seconds for which a consumer is measured before an estimate.
_FORECAST_SECONDS = 3


class ClusterDataService:
    """The tf.data service of a `Cluster`, a `data.service.protocols.DataServiceProtocol`.

    Parameters
    ----------
    servers : ClusterServers
    """

    def __init__(self, servers: ClusterServers) -> None:
        self._servers = servers
        self._monitor, self._task_manager = servers.monitor, servers.task_manager
        #: The consumers in this process that read from the cluster.
        self.consumers = servers.consumers
        #: The datasets that this process registered, by id.
        self.registered = servers.monitor.registered
        self._functions = FunctionWatch()
        self._streams: dict[str, Stream] = {}
        #: The actual name of each stream, by the requested name.
        self._stream_names: dict[str, str] = {}
        #: The environment of this process when it started the tasks, or None if it did not.
        self.task_environment: TaskEnvironment | None = None

    @property
    def owner(self) -> object:
        """The cluster, if it is still referenced."""
        return self._servers.cluster

    @property
    def name(self) -> str:
        """The name of the cluster."""
        return self._servers.name

    @property
    def policy(self) -> Policy:
        """The restarts, timeouts and other supervision of the tasks."""
        return self._servers.policy

    @property
    def streams(self) -> Mapping[str, Stream]:
        """The streams that `stream` created, by name."""
        return dict(self._streams)

    def stream(
        self,
        dataset: Any,
        name: str | None = None,
        *,
        buffer: int | None = None,
        sinks: Sequence[Callable[[Any], object]] = (),
        discard: bool = True,
        semantics: str | None = None,
    ) -> Stream:
        """Return a `Stream` that iterates `dataset` in a background thread. It is not started yet.

        A running stream of that name is stopped first, so that a cell can be run again. If
        `dataset` reads through the service, `distribute` has examined it.

        Parameters
        ----------
        dataset : tf.data.Dataset
        name : str, optional
            Default ``"stream-1"`` and so on.
        buffer : int, optional
            Maximum number of elements that wait for a reader. By default, the buffer is full with
            64 elements or 128 MB. It holds at most 128 MB plus one element. A slice
            ``x[0]`` counts with its own size, but keeps the whole tensor in memory.
        sinks : sequence of callable
            Called with each element, in the stream's thread. An error in a sink fails the stream.
        discard : bool
            Whether elements are dropped until the stream is iterated for the first time.
            Default true.
        semantics : {"checked", "same", "tensorflow"}, optional
            As in `distribute`, for the pipeline that `dataset` reads through the service. With
            ``"same"``, the stream reads another distribution of it if elements would change.
            Default: that of `distribute`.

        Raises
        ------
        UsageError
            Invalid argument.
        DataChanged
            As in `distribute`, if `semantics` is given.
        StateError
            The cluster is not running.
        """
        self._servers.require_running()
        if semantics is not None:
            dataset = with_semantics(self, dataset, semantics)
        with self._servers.lock:
            if name is None:
                taken = self._streams
                name = next(n for i in range(1, 10**6) if (n := f"stream-{i}") not in taken)
            previous = self._streams.pop(self._stream_names.pop(name, name), None)
            if previous is not None:
                previous.stop()
            stream = Stream(
                dataset, self.consumers, name, buffer=buffer, sinks=sinks, discard=discard
            )
            self._stream_names[name] = stream.name
            self._streams[stream.name] = stream
            return stream

    # `DataServiceProtocol`

    @property
    def service_target(self) -> str:
        """``"grpc://host:port"`` of the dispatcher."""
        self.require_service()
        return f"grpc://{self._task_manager.row(DISPATCHER).address}"

    @property
    def journal(self) -> Journal | None:
        """The dispatcher's journal, or None if it keeps none."""
        return self._task_manager.journal

    def restart_step(self, task: str, reason: str = "", logs: bool = False) -> str:
        """Return the next step for a task that does not run; see `ClusterConfig.restart_step`."""
        return self._servers.config.restart_step(task, reason, logs)

    @property
    def worker_tags(self) -> tuple[str, ...]:
        """The tags of its data workers."""
        return self._servers.config.service.worker_tags

    @property
    def service_in_process(self) -> bool:
        """True if the data workers run in this process."""
        return self._task_manager.in_process

    @property
    def service_on_this_host(self) -> bool:
        """True if the data workers run on this host."""
        return self._task_manager.on_this_host

    @property
    def removed_addresses(self) -> frozenset[str]:
        """The addresses of tasks that `scale` removed."""
        return self._task_manager.removed_addresses()

    @property
    def reconnects(self) -> Mapping[str, int]:
        """The number of reconnects to each host."""
        return self._monitor.reconnects

    def kept(self) -> str:
        """Return the open passes and the size of the journal as text. Empty without a journal."""
        with contextlib.suppress(errors.TfdError):
            if self.service_on_this_host and self.journal is not None:
                return views.kept_text(self.journal.read())
        return ""

    def inspect_tasks(self) -> dict[str, dict[str, list[str]]]:
        """Return stale modules (``stale``) and loaded ops (``ops``) of each responding task."""
        try:
            return self._task_manager.task_host.inspect(timeout=_INSPECT_SECONDS)
        except errors.TfdError:
            return {}

    def blocked_functions(self, seconds: float = BLOCKED_SECONDS) -> list[BlockedFunction]:
        """Return the Python functions of datasets that have not returned for `seconds`.

        Waits up to this time if a function runs.
        """
        return self._task_manager.blocked_functions(seconds)

    @property
    def limit(self) -> Limit:
        """The bottleneck of the current consumer. If there are several, of the one served last."""
        latest = self.consumers.latest()
        return latest.live.limit if latest is not None else NOTHING

    def data_workers(self) -> tuple[TaskRow, ...]:
        """Return the data workers that have not ended, by index."""
        rows = self._task_manager.rows_of(Role.DATA_WORKER)
        return tuple(row for row in rows if not row.state.ended)

    def readers(self, job_name: str | None) -> tuple[list[int], int | None]:
        """Return the indices of a job's coordinated consumers here, and the number of others."""
        states = [(c.meter.use, c.state) for _, c in self.consumers.running() if c.meter]
        mine = [(use.consumer, state) for use, state in states if use and use.job_name == job_name]
        local = [consumer[0] for consumer, state in mine if consumer and state == "running"]
        # Another host may reply slowly.
        journal = self.journal if self.service_on_this_host else None
        if journal is None:
            return local, None
        try:
            state = journal.read()
        except errors.TfdError:
            return local, None
        job = state.job(job_name or "")
        open_iterations = (i for i in state.iterations if job and i.job_id == job.id)
        total = sum(i.clients for i in open_iterations if not i.finished)
        return local, max(0, total - len(mine))

    def check_room(self, needed: int) -> None:
        """Raise WorkDirError unless the journal's disk has room for `needed` bytes.

        If TensorFlow's dispatcher cannot write a dataset definition, it serves an empty dataset.
        """
        free = self._task_manager.free_disk_space()
        if free is not None and free < needed + _SPARE_BYTES:
            raise errors.WorkDirError(
                f"the disk with the dispatcher's journal ({self._task_manager.work_dir} on "
                f"{self._task_manager.row(DISPATCHER).host}) has only {free / 1e6:.1f} MB free",
                task=DISPATCHER,
                fix="free disk space, or start the cluster with another Service(work_dir=...)",
            )

    def install_functions(
        self, functions: Mapping[str, str], blob: bytes, dataset: Any = None
    ) -> None:
        """Send Python functions to every current and future data worker."""
        unused = self._functions.unused(len(blob))
        try:
            self._task_manager.install(functions, blob, unused)
        except BaseException:
            self._functions.restore_unused(unused)
            raise
        self._functions.watch(functions, dataset)

    def enable_static_sharding(self) -> None:
        """Give the dispatcher the addresses of its workers. Restart it if they have changed."""
        with self._servers.lock:
            if self._task_manager.has_current_workers():
                return
            if not self._servers.config.service.fault_tolerant and self.consumers.reading():
                raise errors.StateError(
                    "sharding by file or data needs a restart of the dispatcher; without "
                    "fault_tolerant, this would end the current reads",
                    fix="finish reading first, or use Service(fault_tolerant=True)",
                )
            self._task_manager.enable_static_sharding()
        self._servers.store_description()

    # Reports

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
        source = self.consumers.latest() if name is None else self.consumers.named(name)
        return tuple(source.live.history) if source is not None else ()

    def worker_limit(self, task: str) -> Limit:
        """Return the bottleneck of one data worker."""
        latest = self.consumers.latest()
        return limit_of_worker(
            task,
            workers_of(self._monitor.snapshot().tasks),
            self.service_on_this_host and is_busy(sampler.busy_cores(), processors()),
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
        self._servers.require_dispatcher()
        journal = self.journal
        if journal is None:
            raise errors.StateError(
                "listing the jobs failed: this cluster's dispatcher keeps no journal",
                fix="start the cluster with service=tfd.Service(fault_tolerant=True)",
            )
        readers: dict[str, list[str]] = {}
        for row in self._monitor.snapshot().streams:
            if row.state == "running" and row.job:
                readers.setdefault(row.job, []).append(row.name)
        registered = list(self.registered.items())  # other threads add some
        splits = {key: known.splits.count for key, known in registered if known.splits}
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
            reports it. ``because`` is ``"failure"`` if the mode needs a file or element for each
            data worker, and there are fewer. It is ``"slow_worker"`` if `limit` names one data
            worker. More data workers then bring no gain, and the line names it.

        Raises
        ------
        StateError
            No consumer reads through the data workers.
        """
        for count in data_workers:
            check_count("data_workers", count)
        self._servers.require_running()
        return views.forecast_table(*self._forecast(data_workers or (2, 4, 8)))

    def _forecast(self, counts: Sequence[int]) -> tuple[list[Forecast], str]:
        """Return an estimate for each of `counts`, and advice if more workers cannot help."""
        source = self.consumers.latest()
        if source is None or not self.data_workers():
            raise errors.StateError(
                "estimate failed: no consumer reads from the cluster",
                fix="start a stream, cluster.stream(dataset).start(), and try again",
            )
        if not source.live.through_service:
            raise errors.StateError(
                "estimate failed: the current dataset does not read from the data workers",
                fix="read dataset.apply(cluster.distribute('dynamic')), and try again",
            )
        workers, process = Workers(self), ProcessSampler()
        readings = [self.consumers.measure(source)]
        for _ in range(_FORECAST_SECONDS):
            time.sleep(1.0)
            readings.append(self.consumers.measure(source))
        process.sample()
        used = workers.read()
        first, last = readings[0], readings[-1]
        if last.elements == first.elements:
            raise errors.StateError(
                f"estimate failed: no element was delivered for {_FORECAST_SECONDS} s",
                fix="see cluster.limit for the cause",
            )
        rates = [b.elements - a.elements for a, b in itertools.pairwise(readings)]
        delivery, limit = source.live.delivery, source.live.limit
        # Without the state of the task.
        slow = limit.stage.partition(" (")[0] if limit.kind == "workers" else ""
        forecasts = forecast(
            sorted({*counts, len(used)}),
            workers=len(used),
            rates=[float(rate) for rate in rates],
            wait_fraction=min(1.0, (last.waited - first.waited) / _FORECAST_SECONDS),
            worker_cpu=sum(worker.cpu or 0.0 for worker in used) or process.cpu,
            consumer_cpu=0.0 if self.service_in_process else process.cpu,
            cores=processors() if self.service_on_this_host else None,
            behind=limit.kind in ("source", "stage", "python", "device_copy"),
            slow=bool(slow),
            useful=delivery.can_use if delivery is not None else lambda count: count,
            fails=delivery.failure if delivery is not None else lambda count: False,
        )
        causes = {row.because for row in forecasts}
        if delivery is not None and causes & {"splits", "failure"}:
            return forecasts, few_splits(delivery)
        return forecasts, waits_for(slow) if "slow_worker" in causes else ""

    # Requirements

    def require_service(self) -> None:
        """Raise StateError unless the cluster runs and has a dispatcher."""
        self._servers.require_running()
        self._servers.require_dispatcher()


def of(cluster: Any) -> ClusterDataService:
    """Return the data service of a `Cluster`, for packages above this one."""
    service: ClusterDataService = cluster._data_service
    return service
