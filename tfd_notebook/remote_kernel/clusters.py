"""Proxies of the clusters and coordinators of another kernel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from tfd_notebook import views
from tfd_notebook.cluster.view import PerformedCommands
from tfd_notebook.coordinator.values import Values
from tfd_notebook.errors import RemoteError, StateError, TimeLimit
from tfd_notebook.model.handle import Handle
from tfd_notebook.model.snapshot import Snapshot
from tfd_notebook.model.spec import TaskState, check_timeout

if TYPE_CHECKING:
    import pandas as pd

    from tfd_notebook.remote_kernel.kernel import RemoteKernel

_REQUEST_SECONDS = 30.0
_POLL_SECONDS = 0.05
_ENDED = ("stopped", "failed", "lost", "left")


class RemoteCluster(PerformedCommands, Handle):
    """A cluster of another kernel: its state, and commands for it.

    Created by `RemoteKernel.clusters`.
    """

    def __init__(self, kernel: RemoteKernel, name: str) -> None:
        self._kernel = kernel
        self.name = name

    def perform(self, command: str, timeout: float = _REQUEST_SECONDS, **arguments: Any) -> Any:
        """Perform a command on the cluster; see `tfd_notebook.cluster.commands.perform`."""
        return self._kernel.perform(command, timeout, name=self.name, **arguments)

    def snapshot(self) -> Snapshot:
        """Return its latest known state, with the kernel's label in place of ``localhost``.

        After the loss of the kernel, the state is ``"lost"``. After `RemoteKernel.close`, it is
        ``"stopped"``, or ``"left"`` if the cluster is detached.
        """
        snapshot, label, state = self._received, self._kernel.label, self.state
        tasks = tuple(
            replace(row, host=label if row.host == "localhost" else row.host)
            for row in snapshot.tasks
        )
        if state != snapshot.state:
            task_state = TaskState.STOPPED if state == "stopped" else TaskState.LOST
            tasks = tuple(
                row if row.state.ended else replace(row, state=task_state) for row in tasks
            )
        return replace(
            snapshot, tasks=tasks, state=state, launcher=f"{snapshot.launcher} at {label}"
        )

    @property
    def _received(self) -> Snapshot:
        """The latest state that the other kernel has sent."""
        return self._kernel._bus.snapshot(self.name)

    @property
    def version(self) -> Hashable:
        """A value that is different after each change of `snapshot`."""
        return self._received.version, self._kernel.state

    @property
    def state(self) -> str:
        """State of the cluster, as for `tfd_notebook.Cluster`."""
        received, kernel_state = self._received, self._kernel.state
        if kernel_state == "ready" or received.state in _ENDED:
            return received.state
        if kernel_state != "closed":
            return "lost"
        return "stopped" if received.lease is None else "left"

    @property
    def ended(self) -> bool:
        """True if no task runs any more, or its state can no longer be observed."""
        return self.state in _ENDED

    def to_frame(self) -> pd.DataFrame:
        """Return the tasks as `tfd_notebook.Cluster.to_frame` does."""
        return self.snapshot().to_frame()

    def stop(self) -> None:
        """Stop the cluster. No-op if it has been stopped."""
        if self.state != "stopped":
            self.perform("stop", 120.0)

    @property
    def has_coordinator(self) -> bool:
        """True if the cluster has a coordinator."""
        return self._received.coordinator is not None

    @property
    def coordinator(self) -> RemoteCoordinator:
        """The coordinator of the cluster.

        Raises
        ------
        StateError
            The cluster has no coordinator.
        """
        if not self.has_coordinator:
            raise StateError(
                f"cluster {self.name!r} at {self._kernel.label} has no coordinator",
                fix='create it with kernel.run("coordinator = cluster.coordinator()")',
            )
        return self._coordinator

    @cached_property
    def _coordinator(self) -> RemoteCoordinator:
        return RemoteCoordinator(self)

    def current_coordinator(self) -> RemoteCoordinator:
        """Return `coordinator`."""
        return self.coordinator

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return views.mimebundle(self.snapshot())

    def __repr__(self) -> str:
        snapshot = self.snapshot()
        return f"<RemoteCluster {self.name!r} {snapshot.state} on {snapshot.launcher}>"


class Clusters(dict[str, RemoteCluster]):
    """Clusters by name. An unknown name is looked up in the other kernel."""

    def __init__(
        self, known: Mapping[str, RemoteCluster], fetch: Callable[[str], RemoteCluster]
    ) -> None:
        super().__init__(known)
        self._fetch = fetch

    def __missing__(self, name: str) -> RemoteCluster:
        return self._fetch(name)


class RemoteCoordinator(Handle):
    """A coordinator of another kernel: its closures, and the controls of its stepper.

    Attributes
    ----------
    values : Values
        As in `tfd_notebook.Coordinator`. The results stay in the other kernel.
    """

    def __init__(self, cluster: RemoteCluster) -> None:
        self._cluster = cluster
        self.store = cast(Any, cluster._kernel._bus.replica(cluster.name))
        self.values = Values(self.store, lambda: bool(self.paused))

    @property
    def paused(self) -> str:
        """The reason of a pause; empty if the coordinator is not paused."""
        row = self._cluster._received.coordinator
        return row.reason or row.state if row is not None and row.state == "paused" else ""

    def pause(self) -> None:
        """Stop dispatching closures to the workers."""
        self._cluster.perform("pause", source="another kernel")

    def resume(self) -> None:
        """Resume dispatching closures."""
        self._cluster.perform("resume")

    def step(self, n: int = 1, timeout: float | None = 60.0) -> int:
        """Run the next `n` closures, wait for their end, and return the number that ended."""
        check_timeout(timeout)
        self._cluster._kernel.catch_up()
        before = self._ended
        self._cluster.perform("step", count=n)
        with contextlib.suppress(TimeLimit):
            self._wait_until(lambda: self._ended - before >= n or not self._open, timeout, "step")
        return self._ended - before

    def join(self, timeout: float | None = None) -> None:
        """Wait until no closure is queued or runs; Ctrl-C interrupts the wait.

        Raises
        ------
        TimeLimit
            Closures are left after `timeout` seconds.
        RemoteError
            The kernel is lost.
        """
        check_timeout(timeout)
        self._wait_until(lambda: not self._open, timeout, "join")

    @property
    def _ended(self) -> int:
        counts = self.store.counts()
        return sum(counts[state] for state in ("ready", "failed", "cancelled"))

    @property
    def _open(self) -> int:
        return len(self.store) - self._ended

    def _wait_until(
        self, condition: Callable[[], bool], timeout: float | None, operation: str
    ) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        kernel = self._cluster._kernel
        while True:
            if kernel.state != "ready":
                raise RemoteError(
                    f"{operation} failed: the kernel at {kernel.label} is {kernel.state}"
                )
            if condition():
                # The counts are received before the rows. A busy kernel answers later.
                with contextlib.suppress(TimeLimit):
                    kernel.catch_up()
                    if condition():
                        return
            if deadline is not None and time.monotonic() > deadline:
                raise TimeLimit(f"{operation} failed: not finished within {timeout:g} s")
            time.sleep(_POLL_SECONDS)

    def cancel(self, id: int) -> bool:
        """Cancel a queued or running closure; return True if it was cancelled."""
        return bool(self._cluster.perform("cancel", id=id))

    def pause_worker(self, i: int) -> None:
        """Stop dispatching closures to worker `i`."""
        self._cluster.perform("hold", worker=i, held=True)

    def resume_worker(self, i: int) -> None:
        """Resume dispatching closures to worker `i`."""
        self._cluster.perform("hold", worker=i, held=False)

    def break_on(self, failure: bool = True) -> None:
        """Set whether a failure pauses the coordinator."""
        self._cluster.perform("break_on", failure=failure)

    def control_for(self, seconds: float) -> None:
        """Report for this number of seconds that a user can resume the coordinator."""
        self._cluster.perform("snapshot", hold=int(min(seconds, 3600)))

    @contextlib.contextmanager
    def control(self) -> Iterator[None]:
        """No-op: an open bus client already counts as an attached controller."""
        yield

    def __repr__(self) -> str:
        place = f"cluster {self._cluster.name!r} at {self._cluster._kernel.label}"
        return f"<RemoteCoordinator of {place}: {self.values!r}>"
