"""The tf.data service of a cluster: its consumers, its journal and its data workers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfd_notebook import errors, views
from tfd_notebook.agent import work_dir as agent_work_dir
from tfd_notebook.cluster import server_config
from tfd_notebook.cluster.context import ClusterContext
from tfd_notebook.cluster.task_manager import BLOCKED_SECONDS, DISPATCHER
from tfd_notebook.data.bottleneck.live_limit import NOTHING
from tfd_notebook.data.consume.consumers import Consumers
from tfd_notebook.data.consume.stream import Stream
from tfd_notebook.data.service.journal import Journal, JournalState
from tfd_notebook.data.service.protocols import Registered, TaskEnvironment
from tfd_notebook.data.service.py_functions import FunctionWatch
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import Policy, Role
from tfd_notebook.model.stacks import BlockedFunction

#: Bytes that must remain free for the journal's records.
_SPARE_BYTES = 100_000
#: Longer than the timeout of the agent's request to a task.
_INSPECT_SECONDS = 15.0


class ClusterDataService:
    """The tf.data service of a `Cluster`, a `data.service.protocols.DataServiceProtocol`.

    Parameters
    ----------
    context : ClusterContext
    owner : object
    on_change : callable
        Called after the configuration of the dispatcher has changed.
    """

    def __init__(
        self, context: ClusterContext, owner: object, on_change: Callable[[], None]
    ) -> None:
        self._context = context
        self._owner = weakref.ref(owner)
        self._on_change = on_change
        self._monitor, self._task_manager = context.monitor, context.task_manager
        self._journal: Journal | None = None
        self._registered: dict[str, Registered] = {}
        self._functions = FunctionWatch()
        self._streams: dict[str, Stream] = {}
        #: The actual name of each stream, by the requested name.
        self._stream_names: dict[str, str] = {}
        #: The environment of this process when it started the tasks, or None if it did not.
        self.task_environment: TaskEnvironment | None = None

    @property
    def owner(self) -> object:
        """The cluster, if it is still referenced."""
        return self._owner()

    @property
    def name(self) -> str:
        """The name of the cluster."""
        return self._context.name

    @property
    def policy(self) -> Policy:
        """The restarts, timeouts and other supervision of the tasks."""
        return self._context.policy

    @property
    def streams(self) -> Mapping[str, Stream]:
        """The streams that `stream` created, by name."""
        return dict(self._streams)

    @property
    def consumers(self) -> Consumers:
        """The consumers in this process that read from the cluster."""
        return self._context.consumers

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

        A running stream of that name is stopped first, so that a cell can be run again. The stream
        has the elements of `dataset`. If that reads through the service, `distribute` has examined
        it, and its `semantics` applies to the stream.

        Parameters
        ----------
        dataset : tf.data.Dataset
        name : str, optional
            Default ``"stream-1"`` and so on.
        buffer : int, optional
            Maximum number of elements that wait for a reader. By default, the buffer is full with
            64 elements or 128 MB. It holds at most 128 MB plus one element.
        sinks : sequence of callable
            Called with each element, in the stream's thread. An error in a sink fails the stream.
        discard : bool
            Whether elements are dropped until the stream is iterated for the first time.
            Default true.
        semantics : None
            An argument of `distribute`. Any value raises an error.

        Raises
        ------
        UsageError
            Invalid argument.
        StateError
            The cluster is not running.
        """
        self._context.require_running()
        if semantics is not None:
            raise errors.UsageError(
                f"invalid semantics={semantics!r} of a stream: it has the elements of its dataset, "
                "which distribute has examined",
                fix='pass it to distribute: dataset.apply(cluster.distribute("dynamic", '
                "semantics=...))",
            )
        with self._context.lock:
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
        work_dir = self._task_manager.work_dir
        if work_dir is None:
            return None
        keep_seconds = server_config.keep_seconds(self._context.config.service)
        if not self._task_manager.on_this_host and not agent_work_dir.is_url(work_dir):
            copy = self._task_manager.journal_copy
            if self._journal is None or self._journal.work_dir != copy.directory:
                self._journal = Journal(copy.directory, copy.refresh, keep_seconds)
        elif self._journal is None or self._journal.work_dir != work_dir:
            self._journal = Journal(work_dir, keep_seconds=keep_seconds)
        return self._journal

    @property
    def registered(self) -> dict[str, Registered]:
        """The datasets that this process registered, by id."""
        return self._registered

    @property
    def worker_tags(self) -> tuple[str, ...]:
        """The tags of its data workers."""
        return self._context.config.service.worker_tags

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

    def memory_cause(self) -> str:
        """Return a sentence about the largest buffer of the distributed datasets, or "".

        The sentence starts with a space.
        """
        buffers = [buffer for known in list(self.registered.values()) for buffer in known.buffers]
        if not buffers:
            return ""
        largest = max(buffers, key=lambda buffer: buffer.bytes or 0)
        return f" The likely cause is {largest.words}"

    def record_interruption(self, task: str) -> None:
        """Record in the journal's open iterations that a task of the service has stopped."""
        with contextlib.suppress(errors.TfdError):  # The host may be lost.
            if self.journal is not None:
                self.journal.interrupt(task)

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

    def readers(self, job_name: str | None) -> tuple[list[int], int]:
        """Return the indices of a job's coordinated consumers here, and the number of others."""
        states = [(c.meter.use, c.state) for _, c in self.consumers.running() if c.meter]
        mine = [(use.consumer, state) for use, state in states if use and use.job_name == job_name]
        local = [consumer[0] for consumer, state in mine if consumer and state == "running"]
        total = 0
        with contextlib.suppress(errors.TfdError):  # Another host may reply slowly.
            journal = self.journal if self.service_on_this_host else None
            state = JournalState() if journal is None else journal.read()
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
        with self._context.lock:
            if self._task_manager.has_current_workers():
                return
            if not self._context.config.service.fault_tolerant and self.consumers.reading():
                raise errors.StateError(
                    "sharding by file or data needs a restart of the dispatcher; without "
                    "fault_tolerant, this would end the current reads",
                    fix="finish reading first, or use Service(fault_tolerant=True)",
                )
            self._task_manager.enable_static_sharding()
        self._on_change()

    def require_service(self) -> None:
        """Raise StateError unless the cluster runs and has a dispatcher."""
        self._context.require_running()
        self._context.require_dispatcher()


def of(cluster: Any) -> ClusterDataService:
    """Return the data service of a `Cluster`, for packages above this one."""
    service: ClusterDataService = cluster._data_service
    return service
