"""The data path of a cluster: what reads through it, and what that asks of its tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tfd_notebook import errors
from tfd_notebook.data.consumers import Consumers
from tfd_notebook.fleet import DISPATCHER, Fleet
from tfd_notebook.launch.base import Launcher
from tfd_notebook.monitor import Monitor
from tfd_notebook.snapshot import Snapshot, TaskRow
from tfd_notebook.spec import ClusterConfig, Policy, Role

if TYPE_CHECKING:
    from tfd_notebook.data.stream import Stream


class DataPath:
    """The part of `Cluster` that datasets meet; a `tfd_notebook.data.host.ServiceHost`."""

    def _make(self, config: ClusterConfig, launcher: Launcher) -> None:
        self._config = config
        self._consumers = Consumers(task_of=self._task_at)
        self._monitor = Monitor(config, self._consumers)
        self._fleet = Fleet(config, launcher, self._monitor)
        self._streams: dict[str, Stream] = {}
        #: The name that a stream got, by the name that was asked for.
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
    def state(self) -> str:
        """One of new, starting, ready, degraded, stopping, stopped, failed and lost."""
        return self._monitor.snapshot().state

    def snapshot(self) -> Snapshot:
        """Return the cluster at this moment."""
        return self._monitor.snapshot()

    @property
    def policy(self) -> Policy:
        """How the tasks are looked after."""
        return self._config.policy

    @property
    def streams(self) -> Mapping[str, Stream]:
        """The streams made by `stream`, by name."""
        return dict(self._streams)

    @property
    def consumers(self) -> Consumers:
        """What reads from the cluster in this process."""
        return self._consumers

    def distribute(
        self,
        processing_mode: Any,
        job_name: str | None = None,
        consumer_index: int | None = None,
        num_consumers: int | None = None,
        max_outstanding_requests: int | None = None,
        data_transfer_protocol: str | None = None,
        compression: str | None = "auto",
        cross_trainer_cache: Any = None,
        target_workers: str = "AUTO",
    ) -> Callable[[Any], Any]:
        """Return what ``Dataset.apply`` takes to read a dataset through this cluster.

        The arguments are those of ``tf.data.experimental.service.distribute`` without ``service``;
        see `tfd_notebook.data.service.distribute`.
        """
        from tfd_notebook.data import service

        self._must_run()
        return service.distribute(
            self,
            processing_mode,
            job_name,
            consumer_index,
            num_consumers,
            max_outstanding_requests,
            data_transfer_protocol,
            compression,
            cross_trainer_cache,
            target_workers,
        )

    def observe(self, dataset: Any, name: str | None = None) -> Any:
        """Return `dataset` with its figures shown under `name`; it stays a ``tf.data.Dataset``."""
        from tfd_notebook.data import watch

        self._must_run()
        return watch.watch(dataset, self._consumers, name)

    def stream(self, dataset: Any, name: str | None = None, **options: Any) -> Stream:
        """Return a `Stream` that iterates `dataset` in a background thread; not yet started.

        A stream of that name that has not ended is stopped first, so that a cell can be run
        again.
        """
        from tfd_notebook.data.stream import Stream

        self._must_run()
        with self._lock:
            if name is None:
                taken = self._streams
                name = next(n for i in range(1, 10**6) if (n := f"stream-{i}") not in taken)
            before = self._streams.pop(self._stream_names.pop(name, name), None)
            if before is not None:
                before.stop()
            made = Stream(dataset, self._consumers, name, **options)
            self._stream_names[name] = made.name
            self._streams[made.name] = made
            return made

    def register(
        self, dataset: Any, dataset_id: str | None = None, compression: str | None = "auto"
    ) -> str:
        """Register `dataset` with the service; see `tfd_notebook.data.service.register`."""
        from tfd_notebook.data import service

        self._must_run()
        return service.register(self, dataset, dataset_id, compression)

    def from_dataset_id(
        self,
        processing_mode: Any,
        dataset_id: Any,
        element_spec: Any = None,
        job_name: str | None = None,
        consumer_index: int | None = None,
        num_consumers: int | None = None,
        max_outstanding_requests: int | None = None,
        data_transfer_protocol: str | None = None,
        cross_trainer_cache: Any = None,
        target_workers: str = "AUTO",
    ) -> Any:
        """Read a registered dataset; see `tfd_notebook.data.service.from_dataset_id`."""
        from tfd_notebook.data import service

        self._must_run()
        return service.from_dataset_id(
            self,
            processing_mode,
            dataset_id,
            element_spec,
            job_name,
            consumer_index,
            num_consumers,
            max_outstanding_requests,
            data_transfer_protocol,
            cross_trainer_cache,
            target_workers,
        )

    def save(
        self, dataset: Any, path: str, compression: str | None = "AUTO", timeout: float = 600.0
    ) -> None:
        """Have the workers write `dataset` to `path`; see `tfd_notebook.data.service.save`."""
        from tfd_notebook.data import service

        self._must_run()
        service.save(self, dataset, path, compression, timeout)

    # What the data path asks of its cluster (`tfd_notebook.data.host.ServiceHost`)

    @property
    def service_target(self) -> str:
        """``"grpc://host:port"`` of the dispatcher."""
        self._must_run()
        return f"grpc://{self._fleet.row(DISPATCHER).address}"

    @property
    def service_work_dir(self) -> str | None:
        """Where the dispatcher keeps its journal, None without one."""
        return self._fleet.work_dir

    @property
    def service_in_process(self) -> bool:
        """Whether the data workers live in this process."""
        return self._fleet.in_process

    @property
    def service_on_this_host(self) -> bool:
        """Whether the data workers live on this host."""
        return self._fleet.on_this_host

    def data_workers(self) -> tuple[TaskRow, ...]:
        """The data workers that have not ended, by index; without rates."""
        rows = (row for row in self._monitor.rows() if row.role is Role.DATA_WORKER)
        living = (row for row in rows if not row.state.ended)
        return tuple(sorted(living, key=lambda row: row.index))

    def install_functions(self, functions: Mapping[str, str], blob: bytes) -> None:
        """Give every present and future data worker Python functions."""
        self._fleet.install(blob)

    def enable_static_sharding(self) -> None:
        """Have the dispatcher know its workers by address, restarting it if that is news."""
        with self._lock:
            if self._fleet.knows_workers():
                return
            if not self._config.service.fault_tolerant and self._consumers.reading():
                raise errors.StateError(
                    "sharding by file or data needs the dispatcher restarted, which without "
                    "fault_tolerant would end what is being read",
                    fix="finish reading first, or use Service(fault_tolerant=True)",
                )
            self._fleet.enable_static_sharding()

    def _must_run(self) -> None:
        if self.state not in ("ready", "degraded", "starting"):
            fix = "cluster.start()" if self.state == "new" else "make a new one: tfd.Cluster(...)"
            raise errors.StateError(f"cluster {self.name!r} is {self.state}", fix=fix)
