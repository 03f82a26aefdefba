"""Commands that other processes and front ends send to the clusters of this process.

The control socket, the panel and the widgets call `perform` with a request. A request is a mapping
of JSON values. It is validated, and nothing in it is executed or unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from tfd_notebook import errors, views
from tfd_notebook.cluster import registry
from tfd_notebook.model import command_table
from tfd_notebook.model.command import Command
from tfd_notebook.model.snapshot import as_dict
from tfd_notebook.net.agent_protocol import pack_error

if TYPE_CHECKING:
    from tfd_notebook.cluster.view import ClusterView
    from tfd_notebook.model.snapshot import Snapshot

__all__ = ["answer", "cluster_of", "panel_requests", "perform", "queue_of", "snapshots"]

log = logging.getLogger("tfd_notebook")

#: Seconds that a step may block its caller. Closures that have not ended keep running.
_STEP_SECONDS = 5.0
#: Timeout in seconds of a command that another kernel performs.
_REMOTE_SECONDS = 300.0

Request = Mapping[str, Any]


#: The latest snapshot of each cluster with its version, and the last error of `snapshot`.
_snapshots: weakref.WeakKeyDictionary[ClusterView, tuple[Hashable, Snapshot]]
_snapshots = weakref.WeakKeyDictionary()
_snapshot_errors: weakref.WeakKeyDictionary[ClusterView, str] = weakref.WeakKeyDictionary()


def snapshots(clusters: Mapping[str, ClusterView]) -> dict[str, Snapshot]:
    """Return a snapshot of each cluster, by name. It is only built if the cluster has changed.

    If a cluster's `snapshot` raises, its previous one is used, if any. The error is logged once.
    """
    latest = {}
    for name, cluster in clusters.items():
        try:
            version = cluster.version
            if cluster not in _snapshots or _snapshots[cluster][0] != version:
                _snapshots[cluster] = version, cluster.snapshot()
            _snapshot_errors.pop(cluster, None)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            if _snapshot_errors.get(cluster) != message:
                _snapshot_errors[cluster] = message
                log.warning("snapshot of cluster %r failed: %s", name, message)
        if cluster in _snapshots:
            latest[name] = _snapshots[cluster][1]
    return latest


def perform(request: Any) -> Any:
    """Perform a command and return its result as JSON values.

    Parameters
    ----------
    request : mapping
        ``command``, one of those for requests in `tfd_notebook.model.command_table`, and its
        arguments. Other fields are ignored.

    Raises
    ------
    TfdError
        The request is invalid, or the command failed.
    """
    known = command_table.commands("request")
    command = known.get(str(request.get("command"))) if isinstance(request, Mapping) else None
    if command is None:
        raise errors.UsageError(f"invalid command: expected one of {', '.join(known)}")
    arguments = command.read(request)
    name = arguments.get("name")
    proxy = registry.proxies().get(name) if name is not None else None
    if proxy is not None and command.name != "snapshot":
        del arguments["name"]
        return proxy.perform(command.name, _REMOTE_SECONDS, **arguments)
    return command_table.handler(command, "request")(**arguments)


def panel_requests(shell: Any) -> dict[str, Callable[[Request], Any]]:
    """Return functions that perform the requests of a front end to the notebook of `shell`."""

    def perform_one(command: Command, request: Request) -> Any:
        return command_table.handler(command, "panel", shell)(**command.read(request))

    commands = command_table.commands("panel")
    return {name: functools.partial(perform_one, command) for name, command in commands.items()}


def answer(work: Callable[[], Any]) -> dict[str, Any]:
    """Call `work`; return its result as ``{"value": ...}`` or its error as ``{"error": ...}``."""
    try:
        return {"value": work()}
    except Exception as error:
        return {"error": pack_error(error)}


def queue_of(request: Mapping[str, Any]) -> Hashable | None:
    """Return the name of the queue that a request waits in, or None if it never waits.

    Requests in the same queue are performed in order. Each cluster has two queues: one for
    requests that change its tasks, and one for all others. So logs can be read while tasks start.
    """
    command, name = str(request.get("command")), request.get("name")
    if command in _IMMEDIATE and not (command in _CONTROLS and str(name) in registry.proxies()):
        return None
    if command == "start" and isinstance(options := request.get("options"), Mapping):
        name = options.get("name")
    return (str(name), command in _CHANGES) if name is not None else command


#: Requests about a coordinator of this process that return at once.
_CONTROLS = frozenset({"pause", "resume", "step"})
#: Requests that never wait, except controls of a coordinator in another kernel.
_IMMEDIATE = _CONTROLS | {"list", "snapshot"}
#: Requests that change a cluster's tasks or its lease.
_CHANGES = frozenset({"start", "stop", "scale", "adapt", "restart", "detach", "renew"})


class Requests:
    """The commands of other processes and front ends, with checked arguments."""

    # Clusters

    def list(self) -> Any:
        running = snapshots(registry.running_clusters())
        return [views.brief(snapshot) for snapshot in running.values()]

    def snapshot(self, name: str | None, width: int, hold: int) -> Any:
        cluster = cluster_of(name, registry.running_clusters())
        if hold and cluster.has_coordinator:
            with contextlib.suppress(errors.TfdError):
                cluster.current_coordinator().control_for(hold)
        snapshot = cluster.snapshot()
        return {"snapshot": as_dict(snapshot), "text": views.text(snapshot, width)}

    def logs(self, name: str | None, task: str | None, lines: int, offset: int | None) -> Any:
        cluster = cluster_of(name)
        if task is None:
            return {"text": cluster.logs(None, lines), "offset": None}
        text, offset = cluster._task_manager.log_from(task, offset, lines)
        return {"text": text, "offset": offset}

    def stacks(self, name: str | None, task: str | None) -> Any:
        return cluster_of(name).stacks(task).records()

    def rates(self, name: str | None, since: int) -> Any:
        return cluster_of(name)._monitor.rates(since)

    def stop(self, name: str | None) -> Any:
        cluster = cluster_of(name)
        cluster.stop()
        return cluster.state

    def scale(self, name: str | None, **counts: int | None) -> Any:
        cluster = cluster_of(name)
        cluster.scale(**{role: count for role, count in counts.items() if count is not None})
        return {str(role): count for role, count in cluster.snapshot().observed.items()}

    def adapt(self, name: str | None, minimum: int | None, maximum: int | None) -> Any:
        cluster = cluster_of(name)
        cluster.adapt(minimum, maximum)
        return cluster.snapshot().adaptation is not None

    def restart(self, name: str | None, task: str) -> Any:
        cluster = cluster_of(name)
        cluster.restart(task)
        return cluster.state

    def kill(self, name: str | None, task: str) -> Any:
        return cluster_of(name).kill(task)

    def detach(self, name: str | None, hours: float) -> Any:
        return cluster_of(name).detach(hours)

    def renew(self, name: str | None, hours: float) -> Any:
        return cluster_of(name).renew(hours)

    def interrupt(self, name: str | None) -> Any:
        cluster_of(name).interrupt()

    # Coordinators

    def pause(self, name: str | None, source: str) -> Any:
        coordinator = _coordinator_of(name)
        # The client that paused can resume, so `join` must not raise PausedError until then.
        coordinator.control_for(float("inf"))
        coordinator.pause(f"from {source}")
        return coordinator.values.counts()

    def resume(self, name: str | None) -> Any:
        coordinator = _coordinator_of(name)
        coordinator.resume()
        return coordinator.values.counts()

    def step(self, name: str | None, count: int, wait: bool) -> Any:
        coordinator = _coordinator_of(name)
        ended = coordinator.step(count, timeout=_STEP_SECONDS if wait else 0.0)
        return {"ended": ended, "counts": coordinator.values.counts()}

    def cancel(self, name: str | None, id: int) -> Any:
        return _coordinator_of(name).cancel(id)

    def break_on(self, name: str | None, failure: bool) -> Any:
        """Set or clear the breakpoint on failures and keep the other breakpoints."""
        coordinator = _coordinator_of(name)
        _, workers, functions = coordinator.breakpoints
        coordinator.break_on(failure, workers, functions)

    def hold(self, name: str | None, worker: int, held: bool) -> Any:
        coordinator = _coordinator_of(name)
        (coordinator.pause_worker if held else coordinator.resume_worker)(worker)
        return [*coordinator.paused_workers]

    def value(self, name: str | None, id: int) -> Any:
        return _coordinator_of(name).values.record(id)


def cluster_of(name: str | None, known: Mapping[str, Any] | None = None) -> Any:
    """Return the cluster of this process with the name in a request.

    Parameters
    ----------
    name : str or None
    known : mapping of str to ClusterView, optional
        Default: the clusters that this process started or attached.

    Raises
    ------
    UnknownName
        No such cluster is running.
    """
    known = {**registry.clusters()} if known is None else known
    if name is None or name not in known:
        raise errors.UnknownName(f"no cluster {name!r} in process {os.getpid()}")
    return known[name]


def _coordinator_of(name: str | None) -> Any:
    return cluster_of(name).current_coordinator()
