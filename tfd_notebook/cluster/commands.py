"""Commands that other processes and front ends send to the clusters of this process.

The control socket, the panel and the widgets call `perform` with a request. A request is a mapping
of JSON values. It is validated, and nothing in it is executed or unpickled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Hashable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from tfd_notebook import errors, views
from tfd_notebook.cluster import registry
from tfd_notebook.model.snapshot import as_dict
from tfd_notebook.net.agent_protocol import pack_error

if TYPE_CHECKING:
    from tfd_notebook.cluster.cluster import Cluster
    from tfd_notebook.cluster.view import ClusterView
    from tfd_notebook.model.snapshot import Snapshot

__all__ = ["COMMANDS", "answer", "cluster_of", "perform", "queue_of", "snapshots"]

log = logging.getLogger("tfd_notebook")

#: Seconds that a step may block its caller. Closures that have not ended keep running.
_STEP_SECONDS = 5.0
#: Timeout in seconds of a command that another kernel performs.
_REMOTE_SECONDS = 300.0
#: Fields of a request that belong to its transport.
_ENVELOPE = ("kind", "client", "request_id", "command", "name")

#: The group of entry points that add commands. Each is a function that takes a request.
ENTRY_POINTS = "tfd_notebook.commands"

Request = Mapping[str, Any]
_Named = TypeVar("_Named")


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
        ``command`` and its arguments:

        - ``list()``, ``snapshot(name, width, hold)``, ``logs(name, task, lines, offset)``
        - ``stop(name)``, ``scale(name, data_workers, workers)``, ``restart(name, task)``,
          ``kill(name, task)``, ``interrupt(name)``
        - ``detach(name, hours)`` and ``renew(name, hours)``, which return the end of the lease
        - of a coordinator: ``pause(name, source)``, ``resume(name)``, ``step(name, count, wait)``,
          ``cancel(name, id)``, ``break_on(name, failure)``, ``hold(name, worker, held)`` and
          ``value(name, id)``
        - ``doctor(name)``, or of the whole process without a name
        - ``support()``

    Raises
    ------
    TfdError
        The request is invalid, or the command failed.
    """
    command = request.get("command") if isinstance(request, Mapping) else None
    command = command if isinstance(command, str) else ""
    handler = _handler(command)
    if handler is None:
        names = [*COMMANDS, *sorted(entry_points(group=ENTRY_POINTS).names)]
        raise errors.UsageError(f"invalid command: expected one of {', '.join(names)}")
    if command not in ("list", "snapshot", "support"):
        proxy = registry.proxies().get(str(request.get("name")))
        if proxy is not None:
            arguments = {k: v for k, v in request.items() if k not in _ENVELOPE}
            return proxy.perform(command, _REMOTE_SECONDS, **arguments)
    return handler(request)


def _handler(command: str) -> Callable[[Request], Any] | None:
    if command in COMMANDS:
        return COMMANDS[command]
    for point in entry_points(group=ENTRY_POINTS, name=command):
        handler: Callable[[Request], Any] = point.load()
        return handler
    return None


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


# Clusters


def _list(request: Request) -> Any:
    return [views.brief(snapshot) for snapshot in snapshots(registry.running_clusters()).values()]


def _snapshot(request: Request) -> Any:
    cluster = _named(registry.running_clusters(), request)
    width = _number(request, "width", 110, least=20, most=1000)
    hold = _number(request, "hold", 0, least=0, most=3600)
    if hold and cluster.has_coordinator:
        with contextlib.suppress(errors.TfdError):
            cluster.current_coordinator().control_for(hold)
    snapshot = cluster.snapshot()
    return {"snapshot": as_dict(snapshot), "text": views.text(snapshot, width)}


def _logs(request: Request) -> Any:
    cluster = cluster_of(request)
    lines = _number(request, "lines", 100, least=1, most=100_000)
    if request.get("task") is None:
        return {"text": cluster.logs(None, lines), "offset": None}
    since = request.get("offset")
    if since is not None:
        since = _number(request, "offset", 0, least=0, most=2**62)
    text, offset = cluster._task_manager.log_from(_name(request, "task"), since, lines)
    return {"text": text, "offset": offset}


def _stop(request: Request) -> Any:
    cluster = cluster_of(request)
    cluster.stop()
    return cluster.state


def _scale(request: Request) -> Any:
    counts = {
        name: _number(request, name, 0, least=0, most=100_000)
        for name in ("data_workers", "workers")
        if request.get(name) is not None
    }
    cluster = cluster_of(request)
    cluster.scale(**counts)
    return {str(role): count for role, count in cluster.snapshot().observed.items()}


def _restart(request: Request) -> Any:
    cluster = cluster_of(request)
    cluster.restart(_name(request, "task"))
    return cluster.state


def _kill(request: Request) -> Any:
    return cluster_of(request).kill(_name(request, "task"))


def _detach(request: Request) -> Any:
    return cluster_of(request).detach(request.get("hours", 8.0))


def _renew(request: Request) -> Any:
    return cluster_of(request).renew(request.get("hours", 8.0))


def _interrupt(request: Request) -> Any:
    cluster_of(request).interrupt()


# Coordinators


def _pause(request: Request) -> Any:
    coordinator = cluster_of(request).current_coordinator()
    # The client that paused can resume, so `join` must not raise PausedError until then.
    coordinator.control_for(float("inf"))
    coordinator.pause(f"from {_name(request, 'source', 'a terminal')}")
    return coordinator.values.counts()


def _resume(request: Request) -> Any:
    coordinator = cluster_of(request).current_coordinator()
    coordinator.resume()
    return coordinator.values.counts()


def _step(request: Request) -> Any:
    coordinator = cluster_of(request).current_coordinator()
    count = _number(request, "count", 1, least=1, most=2**31)
    wait = 0.0 if request.get("wait") is False else _STEP_SECONDS
    ended = coordinator.step(count, timeout=wait)
    return {"ended": ended, "counts": coordinator.values.counts()}


def _cancel(request: Request) -> Any:
    return cluster_of(request).current_coordinator().cancel(_closure_id(request))


def _break_on(request: Request) -> Any:
    """Set or clear the breakpoint on failures and keep the other breakpoints."""
    coordinator = cluster_of(request).current_coordinator()
    _, workers, functions = coordinator.breakpoints
    coordinator.break_on(_boolean(request, "failure"), workers, functions)


def _hold(request: Request) -> Any:
    coordinator = cluster_of(request).current_coordinator()
    worker = _number(request, "worker", -1, least=0, most=100_000)
    (coordinator.pause_worker if _boolean(request, "held") else coordinator.resume_worker)(worker)
    return list(coordinator.paused_workers)


def _value(request: Request) -> Any:
    return cluster_of(request).current_coordinator().values.record(_closure_id(request))


COMMANDS: dict[str, Callable[[Request], Any]] = {
    "list": _list,
    "snapshot": _snapshot,
    "logs": _logs,
    "stop": _stop,
    "scale": _scale,
    "restart": _restart,
    "kill": _kill,
    "interrupt": _interrupt,
    "detach": _detach,
    "renew": _renew,
    "pause": _pause,
    "resume": _resume,
    "step": _step,
    "cancel": _cancel,
    "break_on": _break_on,
    "hold": _hold,
    "value": _value,
}
#: Requests about a coordinator of this process that return at once.
_CONTROLS = frozenset({"pause", "resume", "step"})
#: Requests that never wait, except controls of a coordinator in another kernel.
_IMMEDIATE = _CONTROLS | {"list", "snapshot"}
#: Requests that change a cluster's tasks or its lease.
_CHANGES = frozenset({"start", "stop", "scale", "restart", "detach", "renew"})


# Fields of a request


def cluster_of(request: Request) -> Cluster:
    """Return the running cluster of this process with the name in a request.

    Raises
    ------
    UnknownName
        No running cluster has this name.
    """
    return _named(registry.clusters(), request)


def _named(known: Mapping[str, _Named], request: Request) -> _Named:
    name = request.get("name")
    if not isinstance(name, str) or name not in known:
        raise errors.UnknownName(f"no cluster {name!r} in process {os.getpid()}")
    return known[name]


def _number(request: Request, name: str, default: int, *, least: int, most: int) -> int:
    value = request.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise errors.UsageError(f"invalid {name}={value!r}: expected {least} to {most}")
    return value


def _closure_id(request: Request) -> int:
    return _number(request, "id", -1, least=0, most=2**62)


def _boolean(request: Request, name: str) -> bool:
    value = request.get(name)
    if not isinstance(value, bool):
        raise errors.UsageError(f"invalid {name} {value!r}: expected true or false")
    return value


def _name(request: Request, name: str, default: str | None = None) -> str:
    value = request.get(name, default)
    if not isinstance(value, str) or not value or len(value) > 200:
        raise errors.UsageError(f"invalid {name} {value!r}: expected a name")
    return value
