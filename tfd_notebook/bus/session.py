"""One place that messages go to: all panels of a kernel, or one widget."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tfd_notebook import errors
from tfd_notebook.bus import greeting, running_cell
from tfd_notebook.bus.closure_feed import ColumnFeed
from tfd_notebook.bus.snapshot_feed import SnapshotFeed
from tfd_notebook.cluster import commands
from tfd_notebook.errors import TfdError

if TYPE_CHECKING:
    from tfd_notebook.cluster.cluster import Cluster
    from tfd_notebook.coordinator.coordinator import Coordinator
    from tfd_notebook.model.snapshot import Snapshot

Extra = Callable[[], Mapping[str, Callable[[commands.Request], Any]]]
Send = Callable[[dict[str, Any], list[bytes]], None]

#: Messages that a reader may be behind before it gets no more: it is closed, or chokes.
_MOST_UNSEEN = 50
#: Seconds after which a client that owes a message is forgotten. Front ends send one a minute.
SILENT_SECONDS = 300.0
#: Clients of one session; beyond that the one with the oldest message is forgotten.
MOST_CLIENTS = 100


@dataclass
class _Client:
    """A reader, such as one tab of a browser."""

    #: Whether it tells what it has seen; one whose messages wait for the running cell cannot.
    tells: bool
    seen: int = 0
    values: frozenset[str] = field(default_factory=frozenset)
    #: Monotonic time since when the client owes a message, None if it owes none.
    owes_since: float | None = None


class Session:
    """Publishes states and answers commands. Only the hub's thread calls its methods, but `obey`.

    Parameters
    ----------
    send : callable
        Takes a message of JSON values and binary buffers.
    cluster : Cluster, optional
        The one that it is about; it may get one later.
    everything : bool
        Whether it is about all clusters of this process instead. Default false.
    extra : callable, optional
        Returns commands besides those of `tfd_notebook.cluster.commands`; they may take their time.
    """

    def __init__(
        self,
        send: Send,
        cluster: Cluster | None = None,
        everything: bool = False,
        extra: Extra | None = None,
    ) -> None:
        self._send = send
        self.cluster = cluster
        self.everything = everything
        self._extra = extra or dict
        self._clients: dict[str, _Client] = {}
        self._feed = SnapshotFeed()
        self._columns: dict[str, ColumnFeed] = {}
        self._seq = 0
        self._whole = True
        self._to_tell: list[dict[str, Any]] = []

    # What comes in

    def handle_message(self, message: Any) -> None:
        """Act upon a message that is no command; what makes no sense is not answered."""
        client, kind = message["client"], message["kind"]
        if kind == "hello":
            self._clients.pop(client, None)  # the newest is the last
            self._clients[client] = _Client(bool(message.get("tells")), self._seq)
            if len(self._clients) > MOST_CLIENTS:
                del self._clients[next(iter(self._clients))]
            self.greet(known=client)
            self._whole = True
            self._columns.clear()
        elif kind == "bye":
            self._clients.pop(client, None)
        elif client not in self._clients:
            self.greet(unknown=client)  # the package was loaded anew
        elif kind == "seen":
            number = message.get("seq")
            if isinstance(number, int):
                self._clients[client].seen = number
        elif kind == "resync":
            self._whole = True
            self._columns.clear()
        elif kind == "want":
            self._want(self._clients[client], message.get("values"))
        elif kind == "tell":
            self._to_tell.append({"kind": "reply", "client": client, "ask": message.get("ask")})

    def _want(self, client: _Client, names: Any) -> None:
        wanted = frozenset(name for name in names or () if isinstance(name, str))
        for name in wanted - client.values:
            self._columns.pop(name, None)  # a new reader has seen nothing of it
        client.values = wanted

    def note_message(self, client: str) -> None:
        """Note that a client has sent a message."""
        if (known := self._clients.pop(client, None)) is not None:
            known.owes_since = None
            self._clients[client] = known

    def forget_silent(self) -> None:
        """Forget clients that owe a message for too long; open ones then send hello again."""
        now, idle_since = time.monotonic(), running_cell.idle_since()
        for name, client in list(self._clients.items()):
            since = client.owes_since
            if since is None:
                if client.values:  # it keeps a coordinator paused, so it must be there
                    client.owes_since = now
                continue
            if not client.tells:
                # Its messages wait for the running cell.
                since = now if idle_since is None else max(since, idle_since)
            if now - since > SILENT_SECONDS:
                del self._clients[name]
                self.greet(unknown=name)

    def execute_command(self, message: Any) -> None:
        """Execute a command and send its reply; may wait, and runs in any thread."""
        request = {**message, "wait": False}
        work = self._extra().get(str(request.get("command")))
        said = commands.answer(lambda: work(request) if work else commands.perform(request))
        reply = {"kind": "reply", "client": message["client"], "ask": message.get("ask"), **said}
        self._send(reply, [])

    # What goes out

    def greet(self, **to: str) -> None:
        """Say who this is, in which protocol it speaks, and whether it knows a client."""
        self._send({**greeting(), **to}, [])

    @property
    def watched(self) -> bool:
        """Whether somebody reads."""
        return any(not c.tells or self._seq - c.seen < _MOST_UNSEEN for c in self._clients.values())

    @property
    def controlled_clusters(self) -> frozenset[str]:
        """The clusters whose coordinators somebody sees here, and could resume."""
        if not self.watched:
            return frozenset()
        if self.cluster is not None:
            return frozenset({self.cluster.name})
        return self._wanted

    @property
    def _wanted(self) -> frozenset[str]:
        return frozenset().union(*(client.values for client in self._clients.values()))

    def push(self, clusters: Mapping[str, Cluster], snapshots: Mapping[str, Snapshot]) -> None:
        """Send what changed.

        Parameters
        ----------
        clusters : mapping of str to Cluster
            Those that live and are to be seen here.
        snapshots : mapping of str to Snapshot
            Of these and of those that ended.
        """
        seen = snapshots.values()
        if self._whole:
            self._whole = False
            self._post({"kind": "state", "whole": True, "state": self._feed.whole(seen)})
        elif patch := self._feed.patch(seen):
            self._post({"kind": "state", "whole": False, "state": patch})
        wanted = self._wanted
        self._columns = {name: feed for name, feed in self._columns.items() if name in wanted}
        for name in sorted(wanted & set(clusters)):
            self._push_columns(name, clusters[name])
        told, self._to_tell = self._to_tell, []
        for reply in told:
            self._send({**reply, "value": None}, [])

    def _push_columns(self, name: str, cluster: Cluster) -> None:
        with contextlib.suppress(errors.TfdError):
            if not cluster.has_coordinator:
                return
            coordinator = cluster.present_coordinator()
            feed = self._columns.get(name)
            if feed is None or feed.store is not coordinator.store:
                feed = ColumnFeed(coordinator.store, lambda: bool(coordinator.paused))
                self._columns[name] = feed
            found = feed.changes()
            if found is not None:
                head, buffers = found
                self._post({"kind": "values", "cluster": name, **head}, buffers)

    def keep_alive(self) -> None:
        """Send a message whose only purpose is that it is one."""
        self._send({"kind": "alive", "time": time.time()}, [])

    def farewell(self) -> None:
        """Say that nothing will come any more."""
        with contextlib.suppress(Exception):
            self._send({"kind": "bye"}, [])

    def _post(self, message: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        self._seq += 1
        now = time.monotonic()
        for client in self._clients.values():
            if client.owes_since is None:
                client.owes_since = now
        self._send({**message, "seq": self._seq}, buffers or [])


def is_message(message: Any) -> bool:
    """Whether something from a browser has the form of a message."""
    return (
        isinstance(message, dict)
        and isinstance(message.get("kind"), str)
        and isinstance(message.get("client"), str)
        and len(message["client"]) <= 100
    )


class ControllerPresence:
    """Somebody's presence at clusters; a ``join`` of a paused coordinator waits for them."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Coordinator, contextlib.ExitStack]] = {}

    @property
    def any(self) -> bool:
        """Whether some coordinator was told."""
        return bool(self._held)

    def renew(self, living: Mapping[str, Cluster], looking: Iterable[frozenset[str]]) -> None:
        """Tell the coordinators of the clusters that are looked at, and no longer the others."""
        present = {}
        for name in frozenset().union(*looking) & living.keys():
            with contextlib.suppress(TfdError):
                if living[name].has_coordinator:
                    present[name] = living[name].present_coordinator()
        for name, (coordinator, held) in list(self._held.items()):
            if present.get(name) is not coordinator:
                del self._held[name]
                held.close()
        for name in present.keys() - self._held.keys():
            stack = contextlib.ExitStack()
            # One that is stopped by now, or cannot be paused at all, need not know.
            with contextlib.suppress(TfdError):
                stack.enter_context(present[name].control())
            self._held[name] = present[name], stack
