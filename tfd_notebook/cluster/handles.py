"""Handles for a cluster's tasks and its dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tfd_notebook import errors
from tfd_notebook.cluster.lifecycle import Lifecycle
from tfd_notebook.cluster.servers import ClusterServers
from tfd_notebook.cluster.task_manager import DISPATCHER, TaskManager
from tfd_notebook.data.op_errors import as_op_errors
from tfd_notebook.model.handle import Handle
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.spec import Role, TaskState, check_timeout
from tfd_notebook.net import probe


@dataclass(frozen=True)
class TaskHandle(Handle):
    """A task of a cluster. The fields have the state at the time ``Cluster.tasks`` was read."""

    _instead = "send its name, address or pid"

    name: str
    role: Role
    state: TaskState
    address: str
    pid: int | None
    _task_manager: TaskManager = field(repr=False)
    _limit: Callable[[str], Limit] = field(repr=False)

    @property
    def limit(self) -> Limit:
        """The current bottleneck of this data worker."""
        return self._limit(self.name)

    def logs(self, lines: int = 100) -> str:
        """Return the last `lines` lines of the task's output."""
        return self._task_manager.log(self.name, lines)


class ClusterDispatcher(Handle):
    """The dispatcher of a cluster, with the contract of ``DispatchServer``."""

    _instead = "send its target"

    def __init__(self, servers: ClusterServers, lifecycle: Lifecycle) -> None:
        self._servers, self._lifecycle = servers, lifecycle

    @property
    def target(self) -> str:
        """The current or last address: ``"grpc://host:port"``.

        Raises
        ------
        StateError
            The cluster was never started, so the dispatcher has no address yet.
        """
        if not (address := self._address):
            raise self._not_started()
        return f"grpc://{address}"

    @property
    @as_op_errors()
    def workers(self) -> tuple[str, ...]:
        """Addresses of all data workers ever registered. Empty once the dispatcher has ended."""
        return () if not self._runs else probe.dispatcher_workers(self.target)

    @as_op_errors()
    def start(self) -> None:
        """Start the cluster, or restart the dispatcher on its port if it has ended."""
        if self._servers.monitor.state == "new":
            self._lifecycle.start()
            return
        row = self._servers.monitor.snapshot().task(DISPATCHER)
        if row is None or row.state.ended:
            self._lifecycle.restart(DISPATCHER)

    @as_op_errors()
    def stop(self) -> None:
        """Stop the cluster, because it cannot work without its dispatcher."""
        if self._servers.monitor.state != "new":
            self._lifecycle.stop()

    @as_op_errors()
    def join(self, timeout: float | None = None) -> bool:
        """Wait until the dispatcher has ended. Ctrl-C interrupts the wait.

        Raises
        ------
        StateError
            The dispatcher was never started.
        TimeLimit
            The dispatcher still runs after `timeout` seconds.
        """
        check_timeout(timeout)
        if self._servers.monitor.state == "new":
            raise self._not_started()
        if not self._lifecycle.wait_ended(timeout):
            raise errors.TimeLimit(
                f"the dispatcher of cluster {self._servers.name!r} still runs after {timeout:g} s",
                fix="cluster.stop() ends it",
            )
        return True

    def _not_started(self) -> errors.StateError:
        what = f"the dispatcher of cluster {self._servers.name!r} was not started"
        return errors.StateError(what, fix="cluster.start()")

    @property
    def _address(self) -> str:
        row = self._servers.monitor.snapshot().task(DISPATCHER)
        return "" if row is None else row.address

    @property
    def _runs(self) -> bool:
        return self._servers.monitor.state != "new" and not self._lifecycle.ended

    def __repr__(self) -> str:
        where = f" at grpc://{self._address}" if self._address else ""
        state = "" if self._runs and where else f", {self._servers.monitor.state}"
        return f"<dispatcher of cluster {self._servers.name!r}{where}{state}>"
