"""Base of launchers for engines, which start hosts for a cluster or have workers already."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast

from tfd_notebook.agent.bridges import stdio
from tfd_notebook.errors import (
    InvalidMessage,
    LaunchError,
    StartTimeout,
    TfdError,
    Unsupported,
)
from tfd_notebook.launchers.base import OnEvent, TaskHost
from tfd_notebook.launchers.client.handshake import read_handshake
from tfd_notebook.launchers.client.multi_host import TaskHostGroup
from tfd_notebook.launchers.remote import RemoteHost, RemoteLauncher, RemoteTaskHost
from tfd_notebook.model.events import Notice, TaskChanged
from tfd_notebook.model.spec import ClusterConfig, Role, TaskState

POLL_SECONDS = 1.0
#: Seconds between two requests for the states of hosts that join later.
LATE_POLL_SECONDS = 5.0
Phase = Literal["queued", "missing", "starting", "running", "ending", "ended"]

H = TypeVar("H", bound=RemoteHost)
T = TypeVar("T")


@dataclass(frozen=True)
class HostState:
    """The state of a host according to its engine.

    Parameters
    ----------
    phase : {"queued", "missing", "starting", "running", "ending", "ended"}
        A queued host waits for resources, and a missing one gets none from its request. One that
        cannot start without the user has ended.
    reason, fix : str
        Why it is in this phase, as a sentence, and the next step of the user. Default: none.
    """

    phase: Phase
    reason: str = ""
    fix: str = ""

    @property
    def ends(self) -> bool:
        return self.phase in ("ending", "ended")


class Start:
    """The start of one cluster, which `Launcher.abort` stops."""

    def __init__(self, config: ClusterConfig, on_event: OnEvent) -> None:
        self.config, self.on_event = config, on_event
        #: Closed if the start fails. Otherwise the hosts close what it holds.
        self.opened = contextlib.ExitStack()
        #: The hosts that may join the cluster after its start, and why they do not run yet.
        self.late: dict[Any, str] = {}
        #: False if no host can join the cluster.
        self.may_join = False
        self._stopped = threading.Event()
        self._shown: dict[str, str] = {}

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """End the waits of the start; never raises."""
        self._stopped.set()

    def check(self) -> None:
        """Raise LaunchError if the cluster was stopped."""
        if self.stopped:
            raise LaunchError(f"cluster {self.config.name!r} was stopped while it started")

    def show(self, reason_of: Callable[[str, int], str]) -> None:
        """Show why tasks wait: `reason_of` returns the reason for a role and an index."""
        for role, index in self.config.tasks():
            task, reason = f"{role}:{index}", reason_of(role, index)
            if reason and reason != self._shown.get(task):
                self._shown[task] = reason
                self.on_event(TaskChanged(task, TaskState.PLANNED, reason))


class Engine(Start, ABC, Generic[H]):
    """The hosts of one cluster that an engine starts.

    A subclass implements `submit`, `state`, `cancel` and `log`. Until all hosts run, these methods
    run in one thread. Ctrl-C therefore interrupts none of them, and `cancel` follows `submit`.

    Parameters
    ----------
    config, on_event
        See `Launcher.connect`.
    minimum : int, optional
        Smallest number of hosts of a group. Default: all.
    """

    #: Name of the hosts in messages, such as "pods".
    kind: ClassVar[str]
    #: The next step if the engine cannot be reached.
    unreached_fix: ClassVar[str]
    #: Seconds without a change after which the minimum of hosts is enough.
    settle_seconds: ClassVar[float] = 0.0
    #: Maximum seconds between the end of a host and its last connection or event.
    end_seconds: ClassVar[float] = 0.0
    #: Seconds to wait for `cancel`, which then continues in its thread.
    close_seconds: ClassVar[float] = 5.0

    def __init__(self, config: ClusterConfig, on_event: OnEvent, minimum: int | None) -> None:
        super().__init__(config, on_event)
        self.minimum = minimum
        #: The hosts. The engine starts those of a group in this order.
        self.groups: list[list[H]] = []
        #: The hosts that have joined the cluster.
        self.joined: list[H] = []
        self._closes_late = False
        #: Set when the state of a host has changed.
        self.changed = threading.Event()
        self._lock = threading.Lock()
        self._requests = concurrent.futures.ThreadPoolExecutor(1, "tfd-engine")

    @abstractmethod
    def submit(self) -> None:
        """Request the hosts from the engine."""

    @abstractmethod
    def state(self, host: H) -> HostState:
        """Return the state of a host."""

    @abstractmethod
    def cancel(self) -> None:
        """Withdraw the request and end the hosts."""

    @abstractmethod
    def log(self, host: H) -> bytes:
        """Return the end of the output of a host."""

    def states(self, hosts: Sequence[H]) -> Mapping[H, HostState]:
        """Return the states of hosts."""
        return {host: self.state(host) for host in hosts}

    def later(self, missing: list[H]) -> list[H]:
        """Return hosts that may join later in the place of those that do not run. Default: none."""
        return []

    def runs(self, host: H, role: str, index: int) -> bool:
        """Return True if a task runs on a host, or may run there."""
        return True

    def complete(self) -> None:
        """Complete the request when the hosts run, and when no other host can join any more."""

    def has_open_request(self) -> bool:
        """Return True if `states` must be called from time to time after the start."""
        return bool(self.late)

    def interrupt(self) -> None:
        """Close the connections that are opening; never raises."""

    @property
    def hosts(self) -> list[H]:
        return [*(host for group in self.groups for host in group), *self.joined]

    def start(self) -> list[H]:
        """Request the hosts, and return them when they run.

        Raises
        ------
        LaunchError
            The engine refuses the request, a host has ended, or the cluster was stopped.
        StartTimeout
        """
        self.call(self.submit)
        self._await_hosts()
        self.call(self.complete)
        return self.hosts

    def call(self, request: Callable[[], T]) -> T:
        """Return the result of a request in the thread, or raise its error."""
        with self._lock:
            self.check()
            result = self._requests.submit(request)
        try:
            return result.result()
        except OSError as error:
            raise LaunchError(str(error), fix=self.unreached_fix) from None

    def stop(self) -> None:
        with self._lock:
            if self.stopped:
                return
            super().stop()
            # At the exit of Python, executors start nothing.
            is_running = threading.main_thread().is_alive()
            cancelled = self._requests.submit(self.cancel) if is_running else None
            self._requests.shutdown(wait=False)
        self.changed.set()
        self.interrupt()
        with contextlib.suppress(Exception):
            self.cancel() if cancelled is None else cancelled.result(self.close_seconds)

    def await_end(self, host: H, seconds: float) -> HostState:
        """Return the state of a host; wait for its end, `seconds` at most."""
        deadline = time.monotonic() + seconds
        while (state := self.state(host)).phase != "ended" and time.monotonic() < deadline:
            if self._stopped.wait(POLL_SECONDS):
                break
        return state

    def start_error(self, host: H, state: HostState) -> LaunchError:
        """Return the error of a host that has ended, with the end of its output."""
        lines = self.log(host).splitlines()
        try:
            read_handshake(host.label, iter(lines))
        except (LaunchError, InvalidMessage) as error:
            if any(line.startswith(stdio.HANDSHAKE.encode()) for line in lines):
                return LaunchError(error.what, fix=error.fix)
        output = "; ".join(line.decode(errors="replace") for line in lines[-3:] if line.strip())
        what = state.reason + (f"; its output ends with {output!r}" if output else "")
        return LaunchError(what, fix=state.fix or "start the cluster again")

    def _await_hosts(self) -> None:
        """Return when all hosts run, or enough of them. Until then, show the engine's reasons."""
        timeout = self.config.policy.start_timeout
        deadline = time.monotonic() + timeout
        ended_at = settled_at = float("inf")
        while True:
            self.changed.clear()
            states = self.call(functools.partial(self.states, self.hosts))
            waiting = {host: state for host, state in states.items() if state.phase != "running"}
            if not waiting:
                return
            self.show(functools.partial(self._reason, waiting))
            now = time.monotonic()
            if ended := [(host, state) for host, state in waiting.items() if state.ends]:
                ended_at = min(ended_at, now + self.end_seconds)
                if now >= ended_at:
                    raise self.call(functools.partial(self.start_error, *ended[0]))
            reason = next(iter(waiting.values())).reason
            are_enough = self._are_enough(states)
            settled_at = min(settled_at, now + self.settle_seconds) if are_enough else float("inf")
            if are_enough and now >= min(settled_at, deadline):
                self._drop(waiting, reason)
                return
            if now > deadline:
                raise StartTimeout(
                    f"not all {self.kind} started within {timeout:g} s: {reason}",
                    fix=next((state.fix for state in waiting.values() if state.fix), None)
                    or "allow more time with tfd.Policy(start_timeout=...)",
                )
            self.changed.wait(POLL_SECONDS)

    def _reason(self, waiting: Mapping[H, HostState], role: str, index: int) -> str:
        return next((s.reason for host, s in waiting.items() if self.runs(host, role, index)), "")

    def _are_enough(self, states: Mapping[H, HostState]) -> bool:
        """Return True if the first hosts of each group run, and no other host is starting."""
        phases = [[states[host].phase for host in group] for group in self.groups]
        return all("starting" not in p and set(p[: self.minimum]) == {"running"} for p in phases)

    def _drop(self, waiting: Mapping[H, HostState], reason: str) -> None:
        """Drop the first host of each group that does not run, and all after it."""
        count = len(self.hosts)
        dropped: list[H] = []
        for group in self.groups:
            first = next((n for n, host in enumerate(group) if host in waiting), len(group))
            dropped += group[first:]
            del group[first:]
        if self.may_join:
            late = self.call(functools.partial(self.later, dropped))
            self.late = dict.fromkeys(late, reason)
        for host in dropped:
            if host not in self.late:
                host.close()
        what = f"the cluster has {len(self.hosts)} of {count} {self.kind}"
        what += f", and {len(self.late)} may join later" if self.late else ""
        self.on_event(Notice("warning", f"{what}: {reason}"))

    def await_late(self, join: Callable[[H], bool], show: Callable[[list[str]], None]) -> None:
        """Pass late hosts to `join` when they run, until none is left or the cluster ends.

        Parameters
        ----------
        join : callable
            Adds a host to the cluster, and returns False if the cluster has ended. It raises a
            TfdError.
        show : callable
            Takes the reasons for which the late hosts do not run yet. Those of hosts that will
            never run are the last.
        """
        ended: list[str] = []
        while self.has_open_request() and not self._closes_late:
            self.changed.clear()
            with contextlib.suppress(LaunchError, InvalidMessage):  # the engine does not answer
                ended += self._poll_late(join)
                show([*self.late.values(), *ended])
            if self.has_open_request() and not self._closes_late:
                self.changed.wait(LATE_POLL_SECONDS)
        if self._closes_late:
            self.close_late()  # also those that were requested in the meantime
        else:
            with contextlib.suppress(LaunchError):
                self.call(self.complete)

    def _poll_late(self, join: Callable[[H], bool]) -> list[str]:
        """Add late hosts that run to the cluster, and return why others will never run."""
        states = self.call(functools.partial(self.states, list(self.late)))
        ended: list[str] = []
        for host, state in states.items():
            if state.phase not in ("running", "ending", "ended"):
                self.late[host] = state.reason
                continue
            why = self._join(host, join) if state.phase == "running" else state.reason
            if why and not self._closes_late:
                host.close_session()
                ended.append(why)
                what = f"{host.label} does not join the cluster: {why}"
                self.on_event(Notice("warning", what, fix=state.fix or None))
            del self.late[host]
        missing = [host for host, state in states.items() if state.phase == "missing"]
        if missing and all(states[host].phase != "starting" for host in self.late):
            why = self.late[missing[0]]
            late = self.call(functools.partial(self.later, missing))
            self.late |= dict.fromkeys(late, why)
            ended += [why] * (len(missing) - len(late))
            for host in missing:
                del self.late[host]
                host.close()
        return ended

    def _join(self, host: H, join: Callable[[H], bool]) -> str:
        """Add a host to the cluster; return the reason if that failed, or an empty string."""
        try:
            if join(host):
                self.joined.append(host)
                self.on_event(Notice("info", f"{host.label} has joined the cluster"))
        except (TfdError, OSError) as error:
            return error.in_one_line if isinstance(error, TfdError) else str(error)
        return ""

    def close_late(self, running: Collection[RemoteHost] = ()) -> None:
        """Close the late hosts except those in `running`; no host joins any more. Never raises."""
        self._closes_late = True
        self.changed.set()
        for host in list(self.late):
            if host not in running:
                with contextlib.suppress(Exception):
                    host.close_session()


class EngineLauncher(RemoteLauncher):
    """Tasks on the hosts of an engine, which are known when a cluster starts.

    Parameters
    ----------
    own : mapping
        The options of this launcher as JSON values, in addition to those of `RemoteLauncher`.
    **options
        See `RemoteLauncher`.
    """

    def __init__(self, own: Mapping[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self._own = dict(own)
        #: The clusters that are starting, by name.
        self._starting: dict[str, Any] = {}

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, **self._own}

    def new_start(self, config: ClusterConfig, on_event: OnEvent) -> Any:
        """Return the start of a new cluster."""
        return Start(config, on_event)

    def start_hosts(self, start: Any) -> Sequence[RemoteHost]:
        """Return the hosts of a new cluster, whose start is the result of `new_start`."""
        hosts: Sequence[RemoteHost] = start.start()
        return hosts

    def connect(self, config: ClusterConfig, on_event: OnEvent) -> tuple[TaskHost, ...]:
        start = self._starting[config.name] = self.new_start(config, on_event)
        try:
            return super().connect(config, on_event)
        except BaseException:
            start.stop()  # Ctrl-C does not wait for connections that are opening
            start.opened.close()
            raise
        finally:
            self._starting.pop(config.name, None)

    def abort(self, cluster: str) -> None:
        if (start := self._starting.get(cluster)) is not None:
            start.stop()

    def hosts(self) -> list[RemoteHost]:
        raise Unsupported(f"the hosts of launcher {self.name!r} are known when a cluster starts")

    def hosts_for(self, config: ClusterConfig, on_event: OnEvent) -> list[RemoteHost]:
        start = self._starting[config.name]
        # A host that joins has no tunnels, and `place` cannot name it.
        has_place = self._secure or Role.DATA_WORKER in self._place
        start.may_join = bool(config.counts.get(Role.DATA_WORKER)) and not has_place
        return list(self.start_hosts(start))

    def late_hosts(self, config: ClusterConfig) -> Sequence[RemoteHost]:
        return list(self._starting[config.name].late)

    def _open(
        self, hosts: Sequence[RemoteHost], config: ClusterConfig, on_event: OnEvent
    ) -> TaskHostGroup:
        start = self._starting[config.name]
        group = super()._open(hosts, config, on_event)
        if start.late:
            group.expect(list(start.late.values()))

            def join(host: RemoteHost) -> bool:
                return self.join(group, host, config, on_event)

            def end() -> None:
                start.close_late([cast(RemoteTaskHost, host).remote for host in group.hosts])

            group.on_end = end
            threading.Thread(
                target=start.await_late,
                args=(join, group.expect),
                name="tfd-late-hosts",
                daemon=True,
            ).start()
        return group
