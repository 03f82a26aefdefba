"""One tf.data service behind three back ends: servers, child processes and this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from tensorflow.data.experimental import service

import tfd_notebook as tfd
from tests._waiting import SERVER_STOP_SECONDS
from tfd_notebook.cluster import data_service

BACK_ENDS = ("servers", "local", "inprocess")


class DataService(Protocol):
    """Operations of the fault sequences. Every restart keeps the port."""

    @property
    def workers(self) -> int:
        """The number of data workers."""

    def distribute(self, mode: str, **options: Any) -> Callable[[Any], Any]: ...

    def restart_dispatcher(self) -> None: ...

    def restart_worker(self, index: int = 0) -> None: ...

    def add_worker(self) -> None: ...


class Servers:
    """`tfd.Dispatcher` and `tfd.DataWorker`, read by TensorFlow's own ``distribute``."""

    def __init__(self, work_dir: Path) -> None:
        self._config = service.DispatcherConfig(work_dir=str(work_dir), fault_tolerant_mode=True)
        self.dispatcher = tfd.Dispatcher(self._config)
        self._data_workers: list[tfd.DataWorker] = []
        self.add_worker()

    @property
    def workers(self) -> int:
        return len(self._data_workers)

    def distribute(self, mode: str, **options: Any) -> Callable[[Any], Any]:
        policy = service.ShardingPolicy[mode.upper()]
        dataset: Callable[[Any], Any] = service.distribute(
            policy, self.dispatcher.target, **options
        )
        return dataset

    def restart_dispatcher(self) -> None:
        self.dispatcher.stop()
        port = _port(self.dispatcher)
        self.dispatcher = tfd.Dispatcher(self._config._replace(port=port))

    def restart_worker(self, index: int = 0) -> None:
        before = self._data_workers[index]
        before.stop(SERVER_STOP_SECONDS)
        self._data_workers[index] = self._worker(_port(before))

    def add_worker(self) -> None:
        self._data_workers.append(self._worker(0))

    def _worker(self, port: int) -> tfd.DataWorker:
        config = service.WorkerConfig(self.dispatcher.address, port=port, heartbeat_interval_ms=200)
        return tfd.DataWorker(config)

    def stop(self) -> None:
        for worker in self._data_workers:
            worker.stop(SERVER_STOP_SECONDS)
        self.dispatcher.stop()


class Tasks:
    """The dispatcher and data workers of a `tfd.Cluster`."""

    def __init__(self, launcher: str) -> None:
        settings = tfd.Service(
            worker_config=service.WorkerConfig("unused", heartbeat_interval_ms=200)
        )
        self.cluster = tfd.Cluster(
            data_workers=1, launcher=launcher, name=f"faults-{launcher}", service=settings
        )

    @property
    def workers(self) -> int:
        return len(data_service.of(self.cluster).data_workers())

    def distribute(self, mode: str, **options: Any) -> Callable[[Any], Any]:
        return self.cluster.distribute(mode, **options)

    def restart_dispatcher(self) -> None:
        self.cluster.restart("dispatcher:0")

    def restart_worker(self, index: int = 0) -> None:
        self.cluster.restart(f"data_worker:{index}")

    def add_worker(self) -> None:
        self.cluster.scale(data_workers=self.workers + 1)

    def stop(self) -> None:
        self.cluster.stop()


@contextmanager
def started(back_end: str, work_dir: Path) -> Iterator[Servers | Tasks]:
    """Yield a service with one data worker, and stop it afterwards."""
    service = Servers(work_dir) if back_end == "servers" else Tasks(back_end)
    try:
        yield service
    finally:
        service.stop()


def _port(server: tfd.Dispatcher | tfd.DataWorker) -> int:
    return int(server.address.rpartition(":")[2])
