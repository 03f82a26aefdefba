"""The reading end of a bus: the clusters of another kernel, and what may be asked of them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from tfd_notebook import bus
from tfd_notebook._version import VERSION
from tfd_notebook.cluster import commands
from tfd_notebook.errors import RemoteError, TimeLimit, UnknownName
from tfd_notebook.model.events import Notice
from tfd_notebook.model.snapshot import (
    CoordinatedRow,
    CoordinatorRow,
    NodeRow,
    Snapshot,
    SparkRow,
    StreamRow,
    TaskRow,
)
from tfd_notebook.model.spec import Role
from tfd_notebook.net import messages, validation
from tfd_notebook.remote_kernel.closure_mirror import ClosureStoreReplica

#: Messages after which the sender hears that they were read; it stops when it is 50 ahead.
_SEEN_EVERY = 10

Send = Callable[[dict[str, Any]], None]


class BusClient:
    """Keeps what a bus tells, and asks.

    Parameters
    ----------
    send : callable
        Takes a message for the other end; raises OSError where it cannot be reached now.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._client = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._asked: dict[str, concurrent.futures.Future[Any]] = {}
        self._clusters: dict[str, Any] = {}
        self._mirrors: dict[str, ClosureStoreReplica] = {}
        self._wanted: set[str] = set()
        self._seq = 0
        self._version = 0
        #: Set when the other end has told everything once.
        self.ready = threading.Event()
        #: True if the other end handles messages while a cell runs.
        self.concurrent = True
        #: Why the other end is not understood, empty where it is.
        self.foreign = ""

    def greet(self) -> None:
        """Say that somebody reads; everything is told anew then."""
        self._wanted = set()
        self._tell("hello", protocol=bus.PROTOCOL, version=VERSION, tells=self.concurrent)

    def acknowledge(self) -> None:
        """Send the number of the latest message; a silent reader is forgotten after minutes."""
        self._tell("seen", seq=self._seq)

    def leave(self) -> None:
        """Say that nobody reads any more."""
        with contextlib.suppress(OSError):
            self._tell("bye")

    def ask(self, command: str, timeout: float, **arguments: Any) -> Any:
        """Have a command performed there and return its answer.

        Raises
        ------
        TfdError
            What was answered; TimeLimit where nothing was.
        """
        said = self._answer("command", command, timeout, command=command, **arguments)
        if "error" in said:
            raise commands.error_from(said["error"])
        return said["value"]

    def catch_up(self, timeout: float) -> None:
        """Wait until what holds there now is known here, and every closure of it.

        Raises
        ------
        TfdError
            It could not be asked, or has not answered.
        """
        wanted = None
        while wanted != self._wanted:  # closures come only when they were asked for
            wanted = self._wanted
            self._answer("tell", "what there is", timeout)

    def _answer(self, kind: str, what: str, timeout: float, **fields: Any) -> Any:
        number = str(next(self._numbers))
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._asked[number] = answer
        try:
            self._tell(kind, ask=number, **fields)
            return answer.result(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeLimit(
                f"the other kernel did not answer {what!r} within {timeout:g} s",
                fix="it may be busy with a cell: a kernel with subshells answers meanwhile",
            ) from None
        except OSError as error:
            raise RemoteError(f"the other kernel cannot be reached now: {error}") from None
        finally:
            self._asked.pop(number, None)

    # What arrives

    def handle_message(self, message: Mapping[str, Any], buffers: Sequence[bytes]) -> None:
        """Take a message of the bus.

        Raises
        ------
        InvalidMessage
        """
        message = messages.bus_message(message)
        kind = message.get("kind")
        if kind == "hello" and message.get("protocol") != bus.PROTOCOL:
            self.foreign = (
                f"it has tfd-notebook {message.get('version')} and this kernel {VERSION}: "
                "they do not understand each other"
            )
            self.ready.set()
        elif kind == "hello" and message.get("unknown") == self._client:
            self.greet()
        elif kind == "reply" and message.get("client") == self._client:
            answer = self._asked.get(str(message.get("ask")))
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif kind in ("state", "values"):
            self._follow(kind, message, buffers)

    def _follow(self, kind: str, message: Mapping[str, Any], buffers: Sequence[bytes]) -> None:
        gap = message["seq"] != self._seq + 1 and not message["whole"]
        self._seq = message["seq"]
        if gap:
            self._tell("resync")
            return
        if kind == "state":
            with self._lock:
                told = message["state"]
                tree = told if message["whole"] else _patched({"clusters": self._clusters}, told)
                clusters = messages.clusters(tree.get("clusters", {}))
                for name in clusters:
                    _snapshot(clusters[name], self._version)
                self._clusters = clusters
                self._version += 1
            for name, mirror in tuple(self._mirrors.items()):  # others add to them
                coordinator = self._clusters.get(name, {}).get("coordinator")
                counts = {} if coordinator is None else _coordinator(coordinator).counts
                mirror.count(counts)
            self._want()
            self.ready.set()
        else:
            mirror = self._mirrors.setdefault(message["cluster"], ClosureStoreReplica())
            try:
                mirror.apply(message, buffers)
            except (LookupError, TypeError, ValueError, OverflowError):
                raise validation.invalid("values", "...", "the columns of closures") from None
        if self._seq % _SEEN_EVERY == 0:
            self.acknowledge()

    def _want(self) -> None:
        """Ask for the closures of all that have some."""
        names = {name for name, tree in self._clusters.items() if "coordinator" in tree}
        for name in names - self._mirrors.keys():
            self._mirrors[name] = ClosureStoreReplica()
        if names != self._wanted:
            self._wanted = names
            self._tell("want", values=sorted(names))

    def _tell(self, kind: str, **fields: Any) -> None:
        self._send({"kind": kind, "client": self._client, **fields})

    # What is known

    def names(self) -> tuple[str, ...]:
        """Return the names of the clusters there, also of those that ended."""
        return tuple(self._clusters)

    def mirror(self, name: str) -> ClosureStoreReplica:
        """Return the closures of a cluster's coordinator."""
        return self._mirrors.setdefault(name, ClosureStoreReplica())

    def snapshot(self, name: str) -> Snapshot:
        """Return a cluster as it was told last.

        Raises
        ------
        UnknownName
        """
        with self._lock:
            if name not in self._clusters:
                raise UnknownName(
                    f"the other kernel has no cluster {name!r}",
                    fix=f"it has {', '.join(self._clusters) or 'none'}",
                )
            return _snapshot(self._clusters[name], self._version)


def _patched(tree: Any, patch: Any) -> Any:
    """Return a tree with a merge patch applied (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    made = dict(tree) if isinstance(tree, dict) else {}
    for key, value in patch.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = _patched(made.get(key), value)
    return made


def _snapshot(tree: Mapping[str, Any], version: int) -> Snapshot:
    tree = messages.snapshot_tree(tree)
    rows = tree.get("tasks", {})
    coordinator = tree.get("coordinator")
    spark = tree.get("spark")
    return Snapshot(
        version=version,
        time=time.time(),
        name=tree["name"],
        launcher=tree.get("launcher", ""),
        state=tree["state"],
        tasks=tuple(_row(TaskRow, rows[name]) for name in tree.get("order", ()) if name in rows),
        streams=tuple(_row(StreamRow, row) for row in tree.get("streams", {}).values()),
        planned=_counts(tree.get("planned")),
        requested=_counts(tree.get("requested")),
        observed=_counts(tree.get("observed")),
        events=tuple(_row(Notice, notice) for notice in tree.get("notices", ())),
        expires=tree.get("expires"),
        lease=tree.get("lease"),
        coordinator=None if coordinator is None else _coordinator(coordinator),
        spark=None if spark is None else _spark(spark),
    )


def _spark(tree: Mapping[str, Any]) -> SparkRow:
    nodes = tree.get("nodes", {})
    made: SparkRow = _row(SparkRow, {k: v for k, v in tree.items() if k != "nodes"})
    ordered = tuple(_row(NodeRow, nodes[name]) for name in tree.get("order", ()) if name in nodes)
    return replace(made, nodes=ordered)


def _coordinator(tree: Mapping[str, Any]) -> CoordinatorRow:
    workers = tree.get("workers", {})
    ordered = tuple(_row(CoordinatedRow, workers[index]) for index in sorted(workers, key=int))
    made: CoordinatorRow = _row(CoordinatorRow, {k: v for k, v in tree.items() if k != "workers"})
    return replace(made, workers=ordered)


def _row(kind: Any, values: Any) -> Any:
    """Return a row made of JSON values; what is not there has its default."""
    known = {field.name for field in fields(kind)}
    # Fields of later versions are ignored. The tree omits empty strings, also those of fields
    # that have no default.
    made = {name: value for name, value in validation.members(values).items() if name in known}
    for name in ("what", "severity", "name", "kind", "state"):
        if name in known and kind is not TaskRow:
            made.setdefault(name, "")
    return validation.from_json(kind, made, kind.__name__)


def _counts(counts: Mapping[str, int] | None) -> dict[Role, int]:
    return {Role(role): count for role, count in (counts or {}).items()}
