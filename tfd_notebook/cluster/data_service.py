"""The tf.data service of a cluster: its consumers, its journal and its data workers."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from tfd_notebook import errors
from tfd_notebook._compat.tf_data import graph
from tfd_notebook.agent import work_dir as agent_work_dir
from tfd_notebook.cluster.monitor import Monitor
from tfd_notebook.cluster.task_manager import DISPATCHER, TaskManager
from tfd_notebook.data.consume.consumers import Consumers
from tfd_notebook.data.service import distribute as service_distribute
from tfd_notebook.data.service.journal import Journal
from tfd_notebook.data.service.protocols import DataServiceProtocol, Registered, TaskEnvironment
from tfd_notebook.data.service.py_functions import FunctionWatch
from tfd_notebook.launchers.base import Launcher
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.snapshot import Snapshot, TaskRow
from tfd_notebook.model.spec import ClusterConfig, Policy, Role

if TYPE_CHECKING:
    from tfd_notebook.data.consume.stream import Stream


#: Bytes that must remain free for the journal's records.
_SPARE_BYTES = 100_000
#: Longer than the timeout of the agent's request to a task.
_INSPECT_SECONDS = 5.0

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _of_cluster(
    function: Callable[Concatenate[DataServiceProtocol, _P], _R],
) -> Callable[Concatenate[ClusterDataService, _P], _R]:
    """Return a method that calls a function of `data.service.distribute` with the cluster."""

    def method(self: ClusterDataService, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        self._require_service()
        return function(self, *args, **kwargs)

    functools.update_wrapper(method, function)
    signature = inspect.signature(function)
    _, *rest = signature.parameters.values()
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = signature.replace(parameters=[itself, *rest])  # type: ignore[attr-defined]
    graph.keep_unconverted(method)
    return method


class ClusterDataService:
    """The tf.data service of a `Cluster`, a `data.service.protocols.DataServiceProtocol`."""

    def _initialize(self, config: ClusterConfig, launcher: Launcher) -> None:
        self._config = config
        self._consumers = Consumers(task_of=self._task_at)
        self._monitor = Monitor(config, self._consumers)
        self._monitor.memory_cause = self.memory_cause
        self._task_manager = TaskManager(config, launcher, self._monitor)
        self._journal: Journal | None = None
        self._registered: dict[str, Registered] = {}
        self._functions = FunctionWatch()
        self._environment: TaskEnvironment | None = None
        self._streams: dict[str, Stream] = {}
        #: The actual name of each stream, by the requested name.
        self._stream_names: dict[str, str] = {}
        self._lock = threading.RLock()

    def _task_at(self, address: str) -> str | None:
        rows = self._monitor.rows()
        return next((row.task for row in rows if row.address == address), None)

    @property
    def name(self) -> str:
        """The name of the cluster."""
        return self._config.name

    @property
    def config(self) -> ClusterConfig:
        """The checked configuration of the cluster."""
        return self._config

    @property
    def state(self) -> str:
        """One of new, starting, ready, degraded, stopping, stopped, failed, lost and left."""
        return self._monitor.snapshot().state

    def snapshot(self) -> Snapshot:
        """Return the current state of the cluster."""
        return self._monitor.snapshot()

    @property
    def policy(self) -> Policy:
        """The restarts, timeouts and other supervision of the tasks."""
        return self._config.policy

    @property
    def streams(self) -> Mapping[str, Stream]:
        """The streams that `stream` created, by name."""
        return dict(self._streams)

    @property
    def consumers(self) -> Consumers:
        """The consumers in this process that read from the cluster."""
        return self._consumers

    distribute = _of_cluster(service_distribute.distribute)
    register = _of_cluster(service_distribute.register)
    from_dataset_id = _of_cluster(service_distribute.from_dataset_id)
    save = _of_cluster(service_distribute.save)

    def observe(self, dataset: Any, name: str | None = None) -> Any:
        """Return `dataset` with its throughput shown under `name`.

        The result is still a ``tf.data.Dataset``.
        """
        from tfd_notebook.data.consume import observe as consume_observe

        self._require_running()
        return consume_observe.watch(dataset, self._consumers, name)

    def stream(
        self,
        dataset: Any,
        name: str | None = None,
        *,
        buffer: int | None = None,
        sinks: Sequence[Callable[[Any], object]] = (),
        discard: bool = True,
    ) -> Stream:
        """Return a `Stream` that iterates `dataset` in a background thread. It is not started yet.

        A running stream of that name is stopped first, so that a cell can be run again.

        Parameters
        ----------
        dataset : tf.data.Dataset
        name : str, optional
            Default ``"stream-1"`` and so on.
        buffer : int, optional
            Maximum number of elements that wait for a reader. Default: the number that fits into
            64 MB, from 2 to 64.
        sinks : sequence of callable
            Called with each element, in the stream's thread. An error in a sink fails the stream.
        discard : bool
            Whether elements are dropped until the stream is iterated for the first time.
            Default true.

        Raises
        ------
        UsageError
            Invalid argument.
        StateError
            The cluster is not running.
        """
        from tfd_notebook.data.consume.stream import Stream

        self._require_running()
        with self._lock:
            if name is None:
                taken = self._streams
                name = next(n for i in range(1, 10**6) if (n := f"stream-{i}") not in taken)
            previous = self._streams.pop(self._stream_names.pop(name, name), None)
            if previous is not None:
                previous.stop()
            stream = Stream(
                dataset, self._consumers, name, buffer=buffer, sinks=sinks, discard=discard
            )
            self._stream_names[name] = stream.name
            self._streams[stream.name] = stream
            return stream

    # `DataServiceProtocol`

    @property
    def service_target(self) -> str:
        """``"grpc://host:port"`` of the dispatcher."""
        self._require_service()
        return f"grpc://{self._task_manager.row(DISPATCHER).address}"

    @property
    def journal(self) -> Journal | None:
        """The dispatcher's journal, or None if it keeps none."""
        work_dir = self._task_manager.work_dir
        if work_dir is None:
            return None
        if not self._task_manager.on_this_host and not agent_work_dir.is_url(work_dir):
            copy = self._task_manager.journal_copy
            if self._journal is None or self._journal.work_dir != copy.directory:
                self._journal = Journal(copy.directory, copy.refresh)
        elif self._journal is None or self._journal.work_dir != work_dir:
            self._journal = Journal(work_dir)
        return self._journal

    @property
    def registered(self) -> dict[str, Registered]:
        """The datasets that this process registered, by id."""
        return self._registered

    @property
    def service_in_process(self) -> bool:
        """True if the data workers run in this process."""
        return self._task_manager.in_process

    @property
    def service_on_this_host(self) -> bool:
        """True if the data workers run on this host."""
        return self._task_manager.on_this_host

    @property
    def surroundings(self) -> TaskEnvironment | None:
        """The environment of this process when it started the tasks, or None if it did not."""
        return self._environment

    @property
    def removed_addresses(self) -> frozenset[str]:
        """The addresses of tasks that `scale` removed."""
        return self._task_manager.removed_addresses()

    @property
    def reconnects(self) -> Mapping[str, int]:
        """The number of reconnects to each host."""
        return dict(self._monitor.reconnects)

    def memory_cause(self) -> str:
        """Return a sentence about the largest buffer of the distributed datasets, or "".

        The sentence starts with a space.
        """
        buffers = [buffer for known in list(self.registered.values()) for buffer in known.buffers]
        if not buffers:
            return ""
        largest = max(buffers, key=lambda buffer: buffer.bytes or 0)
        return f" The likely cause is {largest.words}"

    def inspect_tasks(self) -> dict[str, dict[str, list[str]]]:
        """Return stale modules (``stale``) and loaded ops (``ops``) of each responding task."""
        try:
            reports: dict[str, dict[str, list[str]]] = self._task_manager.ask(
                "inspect", timeout=_INSPECT_SECONDS
            )
        except errors.TfdError:
            return {}
        return reports

    @property
    def limit(self) -> Limit:
        """The bottleneck of the current consumer. If there are several, of the one served last."""
        from tfd_notebook.data.explain.live_limit import NOTHING

        latest = self._consumers.latest()
        return latest.live.limit if latest is not None else NOTHING

    def data_workers(self) -> tuple[TaskRow, ...]:
        """Return the data workers that have not ended, by index."""
        rows = (row for row in self._monitor.rows() if row.role is Role.DATA_WORKER)
        running = (row for row in rows if not row.state.ended)
        return tuple(sorted(running, key=lambda row: row.index))

    def check_room(self, needed: int) -> None:
        """Raise WorkDirError unless the journal's disk has room for `needed` bytes.

        If TensorFlow's dispatcher cannot write a dataset definition, it serves an empty dataset.
        """
        free = self._task_manager.room()
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
        """Send Python functions to every present and future data worker."""
        unused = self._functions.gone(len(blob))
        try:
            self._task_manager.install(functions, blob, unused)
        except BaseException:
            self._functions.gone_again(unused)
            raise
        self._functions.watch(functions, dataset)

    def enable_static_sharding(self) -> None:
        """Give the dispatcher the addresses of its workers. Restart it if they have changed."""
        with self._lock:
            if self._task_manager.knows_workers():
                return
            if not self._config.service.fault_tolerant and self._consumers.reading():
                raise errors.StateError(
                    "sharding by file or data needs a restart of the dispatcher; without "
                    "fault_tolerant, this would end the current reads",
                    fix="finish reading first, or use Service(fault_tolerant=True)",
                )
            self._task_manager.enable_static_sharding()

    def _require_running(self) -> None:
        if self.state not in ("ready", "degraded", "starting"):
            fix = {
                "new": "cluster.start()",
                "left": "tfd.attach(...) connects to it again",
            }.get(self.state, "create a new one: tfd.Cluster(...)")
            raise errors.StateError(f"cluster {self.name!r} is {self.state}", fix=fix)

    def _require_service(self) -> None:
        """Raise StateError unless the cluster runs and has a dispatcher."""
        self._require_running()
        self._require_dispatcher()

    def _require_dispatcher(self) -> None:
        if not self._monitor.snapshot().planned.get(Role.DISPATCHER):
            raise errors.StateError(
                f"cluster {self.name!r} has no dispatcher, because it has no data worker",
                fix="cluster.scale(data_workers=2) starts both",
            )
