"""A session with one recipient of messages: all panels of a kernel, or one widget."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tfd_notebook.bus import greeting, running_cell
from tfd_notebook.bus.closure_feed import ColumnFeed
from tfd_notebook.bus.snapshot_feed import SnapshotFeed
from tfd_notebook.cluster import commands
from tfd_notebook.errors import TfdError

if TYPE_CHECKING:
    from tfd_notebook.cluster.view import ClusterView, CoordinatorView
    from tfd_notebook.model.snapshot import Snapshot

Extra = Callable[[], Mapping[str, Callable[[commands.Request], Any]]]
Send = Callable[[dict[str, Any], list[bytes]], None]

#: A client with more unacknowledged messages is closed or overloaded, and receives nothing.
MAX_UNACKNOWLEDGED = 50
#: Seconds without an answer after which a client is removed. Front ends send a message a minute.
SILENT_SECONDS = 300.0
#: Maximum clients of a session. Beyond it, the client with the oldest message is removed.
MAX_CLIENTS = 100


@dataclass
class _Client:
    """A client, such as one tab of a browser."""

    #: Whether it acknowledges messages. If its messages wait for the running cell, it cannot.
    acknowledges: bool
    acknowledged_seq: int = 0
    #: Names of the clusters whose closures it shows.
    subscriptions: frozenset[str] = field(default_factory=frozenset)
    #: Monotonic time of the first message that the client has not answered, or None.
    unanswered_since: float | None = None


class Session:
    """A session that publishes state and executes commands.

    Only the hub's thread calls its methods, except `execute_command`.

    Parameters
    ----------
    send : callable
        Takes a message of JSON values, and binary buffers.
    cluster : ClusterView, optional
        The published cluster. It may be set later.
    everything : bool
        Whether all clusters of this process are published instead. Default false.
    extra : callable, optional
        Returns commands in addition to those of `tfd_notebook.cluster.commands`. They may block.
    """

    def __init__(
        self,
        send: Send,
        cluster: ClusterView | None = None,
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
        self._send_full = True
        self._pending_replies: list[dict[str, Any]] = []

    # Received messages

    def handle_message(self, message: Any) -> None:
        """Handle a message other than a command. Invalid messages are ignored."""
        client, kind = message["client"], message["kind"]
        if kind == "hello":
            self._clients.pop(client, None)  # keep the order by the latest message
            self._clients[client] = _Client(bool(message.get("acks")), self._seq)
            if len(self._clients) > MAX_CLIENTS:
                del self._clients[next(iter(self._clients))]
            self.greet(known=client)
            self._send_full = True
            self._columns.clear()
        elif kind == "bye":
            self._clients.pop(client, None)
        elif client not in self._clients:
            self.greet(unknown=client)  # the extension was reloaded
        elif kind == "ack":
            number = message.get("seq")
            if isinstance(number, int):
                self._clients[client].acknowledged_seq = number
        elif kind == "resync":
            self._send_full = True
            self._columns.clear()
        elif kind == "subscribe":
            self._set_subscriptions(self._clients[client], message.get("clusters"))
        elif kind == "flush":
            self._pending_replies.append(
                {"kind": "reply", "client": client, "request_id": message.get("request_id")}
            )

    def _set_subscriptions(self, client: _Client, names: Any) -> None:
        wanted = frozenset(name for name in names or () if isinstance(name, str))
        for name in wanted - client.subscriptions:
            self._columns.pop(name, None)  # the new client needs all closures first
        client.subscriptions = wanted

    def note_message(self, client: str) -> None:
        """Record that a client has sent a message."""
        if (known := self._clients.pop(client, None)) is not None:
            known.unanswered_since = None
            self._clients[client] = known

    def remove_silent(self) -> None:
        """Remove clients that do not answer. If still open, they send hello again."""
        now, idle_since = time.monotonic(), running_cell.idle_since()
        for name, client in list(self._clients.items()):
            since = client.unanswered_since
            if since is None:
                if client.subscriptions:  # it keeps `join` of a paused coordinator waiting
                    client.unanswered_since = now
                continue
            if not client.acknowledges:
                # Its messages wait for the running cell.
                since = now if idle_since is None else max(since, idle_since)
            if now - since > SILENT_SECONDS:
                del self._clients[name]
                self.greet(unknown=name)

    def execute_command(self, message: Any) -> None:
        """Execute a command and send its reply. May block, and runs in any thread."""
        request = {**message, "wait": False}
        work = self._extra().get(str(request.get("command")))
        result = commands.answer(lambda: work(request) if work else commands.perform(request))
        reply = {
            "kind": "reply",
            "client": message["client"],
            "request_id": message.get("request_id"),
            **result,
        }
        self._send(reply, [])

    # Sent messages

    def greet(self, **to: str) -> None:
        """Send the greeting. ``known=`` or ``unknown=`` names a client in it."""
        self._send({**greeting(), **to}, [])

    @property
    def watched(self) -> bool:
        """True if a client reads the messages."""
        return any(
            not client.acknowledges or self._seq - client.acknowledged_seq < MAX_UNACKNOWLEDGED
            for client in self._clients.values()
        )

    @property
    def controlled_clusters(self) -> frozenset[str]:
        """The clusters whose coordinators a client shows and could resume."""
        if not self.watched:
            return frozenset()
        if self.cluster is not None:
            return frozenset({self.cluster.name})
        return self._subscriptions

    @property
    def _subscriptions(self) -> frozenset[str]:
        return frozenset().union(*(client.subscriptions for client in self._clients.values()))

    def push(self, clusters: Mapping[str, ClusterView], snapshots: Mapping[str, Snapshot]) -> None:
        """Send the changes.

        Parameters
        ----------
        clusters : mapping of str to ClusterView
            The running clusters to publish.
        snapshots : mapping of str to Snapshot
            Their snapshots, and those of ended clusters.
        """
        latest = snapshots.values()
        if self._send_full:
            self._send_full = False
            self._post({"kind": "state", "full": True, "state": self._feed.full(latest)})
        elif patch := self._feed.patch(latest):
            self._post({"kind": "state", "full": False, "state": patch})
        wanted = self._subscriptions
        self._columns = {name: feed for name, feed in self._columns.items() if name in wanted}
        for name in sorted(wanted & set(clusters)):
            self._push_columns(name, clusters[name])
        replies, self._pending_replies = self._pending_replies, []
        for reply in replies:
            self._send({**reply, "value": None}, [])

    def _push_columns(self, name: str, cluster: ClusterView) -> None:
        with contextlib.suppress(TfdError):
            if not cluster.has_coordinator:
                return
            coordinator = cluster.current_coordinator()
            feed = self._columns.get(name)
            if feed is None or feed.store is not coordinator.store:
                feed = ColumnFeed(coordinator.store, lambda: bool(coordinator.paused))
                self._columns[name] = feed
            changes = feed.changes()
            if changes is not None:
                head, buffers = changes
                self._post({"kind": "values", "cluster": name, **head}, buffers)

    def keep_alive(self) -> None:
        """Send a keep-alive message."""
        self._send({"kind": "alive", "time": time.time()}, [])

    def farewell(self) -> None:
        """Send the last message of the session."""
        with contextlib.suppress(Exception):
            self._send({"kind": "bye"}, [])

    def _post(self, message: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        self._seq += 1
        now = time.monotonic()
        for client in self._clients.values():
            if client.unanswered_since is None:
                client.unanswered_since = now
        self._send({**message, "seq": self._seq}, buffers or [])


def is_message(message: Any) -> bool:
    """Return True if a value from a browser is a well-formed message."""
    return (
        isinstance(message, dict)
        and isinstance(message.get("kind"), str)
        and isinstance(message.get("client"), str)
        and len(message["client"]) <= 100
    )


class ControllerPresence:
    """Tracks which coordinators have an attached viewer that can resume them.

    ``join`` of a paused coordinator waits while it has a viewer.
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[CoordinatorView, contextlib.ExitStack]] = {}

    @property
    def any(self) -> bool:
        """True if any coordinator has a viewer."""
        return bool(self._open)

    def renew(self, running: Mapping[str, ClusterView], viewed: Iterable[frozenset[str]]) -> None:
        """Open live controls for the coordinators of viewed clusters, and close all others."""
        present = {}
        for name in frozenset().union(*viewed) & running.keys():
            with contextlib.suppress(TfdError):
                if running[name].has_coordinator:
                    present[name] = running[name].current_coordinator()
        for name, (coordinator, control) in list(self._open.items()):
            if present.get(name) is not coordinator:
                del self._open[name]
                control.close()
        for name in present.keys() - self._open.keys():
            stack = contextlib.ExitStack()
            # A stopped coordinator, or one that cannot be paused, raises here.
            with contextlib.suppress(TfdError):
                stack.enter_context(present[name].control())
            self._open[name] = present[name], stack
