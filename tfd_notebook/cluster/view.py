"""Interfaces of a cluster for the bus, commands, magics and widgets, wherever it runs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from tfd_notebook.views import stacks_table

if TYPE_CHECKING:
    import pandas as pd

    from tfd_notebook.coordinator.values import Values
    from tfd_notebook.model.snapshot import Snapshot
    from tfd_notebook.model.spec import ClusterConfig
    from tfd_notebook.views import Table


class CoordinatorView(Protocol):
    """A coordinator that a front end shows and controls."""

    @property
    def store(self) -> Any:
        """The closures, as a `tfd_notebook.model.closure_store.Store` or a replica of one."""

    @property
    def paused(self) -> str:
        """The reason of a pause; empty if the coordinator is not paused."""

    @property
    def values(self) -> Values: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def step(self, n: int = 1) -> int: ...

    def join(self, timeout: float | None = None) -> None: ...

    def cancel(self, id: int, /) -> bool: ...

    def control(self) -> AbstractContextManager[None]:
        """Count as an attached controller in a ``with`` block."""

    def control_for(self, seconds: float) -> None:
        """Count as an attached controller for this number of seconds."""


class ClusterView(Protocol):
    """A cluster of this process, of another kernel or on Spark."""

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> str:
        """``Snapshot.state``. Reading it builds no snapshot."""

    @property
    def ended(self) -> bool:
        """True if the cluster has ended. Reading it builds no snapshot."""

    @property
    def version(self) -> Hashable:
        """A value that is different after each change of `snapshot`. Reading it is cheap."""

    @property
    def streams(self) -> Mapping[str, Any]:
        """The streams in this process, by name."""

    @property
    def has_coordinator(self) -> bool: ...

    def current_coordinator(self) -> CoordinatorView:
        """Return the coordinator, or raise StateError if the cluster has none."""

    def snapshot(self) -> Snapshot: ...

    def to_frame(self) -> pd.DataFrame: ...

    def logs(self, task: str | None = None, lines: int = 100) -> Any:
        """Return the last lines of a task's output, or of all tasks."""

    def stacks(self, task: str | None = None) -> Table:
        """Return the Python stacks of tasks."""

    def scale(self, *, data_workers: int = ..., workers: int = ...) -> None: ...

    def adapt(self, minimum: int | None, maximum: int | None = None) -> None: ...

    def restart(self, task: str) -> None: ...

    def kill(self, task: str) -> int | None: ...

    def interrupt(self) -> None: ...

    def stop(self) -> None: ...


class RegisteredCluster(ClusterView, Protocol):
    """A cluster that this process manages."""

    @property
    def config(self) -> ClusterConfig: ...

    @property
    def _is_ending(self) -> bool: ...

    def leave(self) -> None: ...


class ClusterProxy(ClusterView, Protocol):
    """A cluster that this process does not manage. It performs commands itself."""

    def perform(self, command: str, timeout: float = ..., **arguments: Any) -> Any:
        """Perform a command of `tfd_notebook.cluster.commands.perform` and return its result.

        Raises
        ------
        TfdError
            The command failed, or the cluster does not support it.
        """


class PerformedCommands:
    """The methods of a `ClusterProxy` that are commands of its `perform`."""

    #: Always empty: `snapshot` has the streams of another process.
    streams: Mapping[str, Any] = {}

    def perform(self, command: str, timeout: float = 30.0, **arguments: Any) -> Any:
        """Perform a command as `ClusterProxy` does."""
        raise NotImplementedError

    def logs(self, task: str | None = None, lines: int = 100) -> str:
        """Return the last lines that a task, or every task, has written."""
        return str(self.perform("logs", task=task, lines=lines)["text"])

    def stacks(self, task: str | None = None) -> Table:
        """Return the Python stacks of tasks, as `tfd_notebook.Cluster.stacks` does."""
        return stacks_table(self.perform("stacks", task=task))

    def scale(self, **roles: int) -> None:
        """Change the number of ``data_workers`` or ``workers``."""
        self.perform("scale", 300.0, **roles)

    def adapt(self, minimum: int | None, maximum: int | None = None) -> None:
        """Adapt the number of data workers; see `tfd_notebook.Cluster.adapt`."""
        self.perform("adapt", minimum=minimum, maximum=maximum)

    def restart(self, task: str) -> None:
        """Restart a task in a new process."""
        self.perform("restart", 300.0, task=task)

    def kill(self, task: str) -> int | None:
        """Kill a task, to simulate a crash; return its pid."""
        pid: int | None = self.perform("kill", task=task)
        return pid

    def interrupt(self) -> None:
        """Cancel all reads of the other process from the cluster."""
        self.perform("interrupt")
