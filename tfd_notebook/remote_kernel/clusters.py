"""Clusters of another kernel as they are seen and steered here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from tfd_notebook import views
from tfd_notebook.coordinator.values import Values
from tfd_notebook.errors import RemoteError, StateError, TimeLimit
from tfd_notebook.model.snapshot import Snapshot
from tfd_notebook.model.spec import TaskState

if TYPE_CHECKING:
    import pandas as pd

    from tfd_notebook.remote_kernel.kernel import RemoteKernel

_ASK_SECONDS = 30.0
_POLL_SECONDS = 0.05
_ENDED = ("stopped", "failed", "lost", "left")


class RemoteCluster:
    """A cluster of another kernel: its views, and what is asked of it there.

    Made by `RemoteKernel.clusters`.
    """

    #: None of this kernel's: what reads from it there stands in its snapshot.
    streams: Mapping[str, Any] = {}

    def __init__(self, kernel: RemoteKernel, name: str) -> None:
        self._kernel = kernel
        self.name = name

    def ask(self, command: str, timeout: float = _ASK_SECONDS, **arguments: Any) -> Any:
        """Have a command performed upon it; see `tfd_notebook.cluster.commands.perform`."""
        return self._kernel.ask(command, timeout, name=self.name, **arguments)

    def snapshot(self) -> Snapshot:
        """Return it as it was told last; hosts that are ``localhost`` there have that host's name.

        Of a kernel that is lost the state is ``"lost"``; one that was closed has stopped it, or
        left it if it is detached.
        """
        seen = self._kernel._reader.snapshot(self.name)
        label, now = self._kernel.label, self._kernel.state
        tasks = tuple(
            replace(row, host=label if row.host == "localhost" else row.host) for row in seen.tasks
        )
        state = seen.state
        if now != "ready" and state not in _ENDED:
            if now != "closed":
                state, gone = "lost", TaskState.LOST
            elif seen.lease is None:
                state, gone = "stopped", TaskState.STOPPED
            else:
                state, gone = "left", TaskState.LOST
            tasks = tuple(row if row.state.ended else replace(row, state=gone) for row in tasks)
        return replace(seen, tasks=tasks, state=state, launcher=f"{seen.launcher} at {label}")

    @property
    def state(self) -> str:
        """As for `tfd_notebook.Cluster`."""
        return self.snapshot().state

    @property
    def ended(self) -> bool:
        """Whether nothing runs any more, or nothing can be known of it."""
        return self.state in _ENDED

    def to_frame(self) -> pd.DataFrame:
        """Return the tasks as `tfd_notebook.Cluster.to_frame` does."""
        return self.snapshot().to_frame()

    def logs(self, task: str | None = None, lines: int = 100) -> str:
        """Return the last lines that a task wrote, or all tasks."""
        which: dict[str, Any] = {} if task is None else {"task": task}
        said = self.ask("logs", lines=lines, **which)
        return str(said["text"])

    def scale(self, **roles: int) -> None:
        """Have so many ``data_workers`` or ``workers``."""
        self.ask("scale", 300.0, **roles)

    def restart(self, task: str) -> None:
        """Start a fresh process for a task."""
        self.ask("restart", 300.0, task=task)

    def kill(self, task: str) -> int | None:
        """Kill a task as a crash would; return its pid."""
        pid: int | None = self.ask("kill", task=task)
        return pid

    def interrupt(self) -> None:
        """End what waits for data there."""
        self.ask("interrupt")

    def stop(self) -> None:
        """Stop it; does nothing where it has been stopped."""
        if self.state != "stopped":
            self.ask("stop", 120.0)

    @property
    def has_coordinator(self) -> bool:
        """Whether it has one."""
        return self.snapshot().coordinator is not None

    @property
    def coordinator(self) -> RemoteCoordinator:
        """Its coordinator.

        Raises
        ------
        StateError
            It has none.
        """
        if not self.has_coordinator:
            raise StateError(
                f"cluster {self.name!r} at {self._kernel.label} has no coordinator",
                fix='kernel.run("coordinator = cluster.coordinator()") makes one there',
            )
        return RemoteCoordinator(self)

    def present_coordinator(self) -> RemoteCoordinator:
        """Return `coordinator`."""
        return self.coordinator

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return views.mimebundle(self.snapshot())

    def __repr__(self) -> str:
        seen = self.snapshot()
        return f"<RemoteCluster {self.name!r} {seen.state} on {seen.launcher}>"


class Clusters(dict[str, RemoteCluster]):
    """Clusters by name; one that is not known yet is asked for."""

    def __init__(
        self, known: Mapping[str, RemoteCluster], await_one: Callable[[str], RemoteCluster]
    ) -> None:
        super().__init__(known)
        self._await = await_one

    def __missing__(self, name: str) -> RemoteCluster:
        return self._await(name)


class RemoteCoordinator:
    """A coordinator of another kernel: its closures, and the stepper's controls.

    Attributes
    ----------
    values : Values
        As of `tfd_notebook.Coordinator`; results themselves stay there.
    """

    def __init__(self, cluster: RemoteCluster) -> None:
        self._cluster = cluster
        self.store = cast(Any, cluster._kernel._reader.mirror(cluster.name))
        self.values = Values(self.store, lambda: bool(self.paused))

    @property
    def paused(self) -> str:
        """Why nothing moves, empty while all moves."""
        row = self._cluster.snapshot().coordinator
        return row.reason or row.state if row is not None and row.state == "paused" else ""

    def pause(self) -> None:
        """Give no closure to any worker from now on."""
        self._cluster.ask("pause", who="another kernel")

    def resume(self) -> None:
        """Go on."""
        self._cluster.ask("resume")

    def step(self, n: int = 1, timeout: float | None = 60.0) -> int:
        """Let the next `n` closures run, and wait until they have ended; return how many have."""
        self._cluster._kernel.catch_up()
        before = self._ended
        self._cluster.ask("step", count=n)
        with contextlib.suppress(TimeLimit):
            self._await(lambda: self._ended - before >= n or not self._waiting, timeout, "step")
        return self._ended - before

    def join(self, timeout: float | None = None) -> None:
        """Wait until no closure waits or runs; answers Ctrl-C.

        Raises
        ------
        TimeLimit
        RemoteError
            The kernel is lost.
        """
        self._await(lambda: not self._waiting, timeout, "join")

    @property
    def _ended(self) -> int:
        counts = self.store.counts()
        return sum(counts[state] for state in ("ready", "failed", "cancelled"))

    @property
    def _waiting(self) -> int:
        return len(self.store) - self._ended

    def _await(self, holds: Callable[[], bool], timeout: float | None, what: str) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        kernel = self._cluster._kernel
        kernel.catch_up()
        while not holds():
            if kernel.state != "ready":
                raise RemoteError(f"the kernel at {kernel.label} is {kernel.state}")
            if deadline is not None and time.monotonic() > deadline:
                raise TimeLimit(f"{what}: not ended within {timeout:g} s")
            time.sleep(_POLL_SECONDS)

    def cancel(self, id: int) -> bool:
        """Cancel a closure that is queued or runs."""
        return bool(self._cluster.ask("cancel", id=id))

    def pause_worker(self, i: int) -> None:
        """Give no closure to worker `i`."""
        self._cluster.ask("hold", worker=i, held=True)

    def resume_worker(self, i: int) -> None:
        """Give closures to worker `i` again."""
        self._cluster.ask("hold", worker=i, held=False)

    def break_on(self, failure: bool = True) -> None:
        """Pause at failures, or not."""
        self._cluster.ask("break_on", failure=failure)

    def control_for(self, seconds: float) -> None:
        """Say that somebody can resume it for so many seconds more."""
        self._cluster.ask("snapshot", hold=int(min(seconds, 3600)))

    @contextlib.contextmanager
    def control(self) -> Iterator[None]:
        """Do nothing: whoever reads of it here is taken for present there."""
        yield
