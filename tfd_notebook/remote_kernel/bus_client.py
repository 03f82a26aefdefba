"""Client of another kernel's bus: the state of its clusters, and commands for them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfd_notebook import bus
from tfd_notebook._version import VERSION
from tfd_notebook.errors import RemoteError, TimeLimit, UnknownName, nearest
from tfd_notebook.model.snapshot import Snapshot
from tfd_notebook.net import messages, validation
from tfd_notebook.net.agent_protocol import unpack_error
from tfd_notebook.remote_kernel.closure_replica import ClosureStoreReplica

#: Messages per acknowledgement. The sender pauses after 50 unacknowledged messages.
_ACKNOWLEDGE_EVERY = 10
#: Size in bytes of the changes to a complete state, before another complete state is requested.
_MAX_CHANGES = 16_000_000

Send = Callable[[dict[str, Any]], None]


class BusClient:
    """Client of a bus. It stores the published state and sends commands.

    Parameters
    ----------
    send : callable
        Sends a message to the other end; raises OSError if it cannot be reached.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._client = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._pending: dict[str, concurrent.futures.Future[Any]] = {}
        self._clusters: dict[str, Any] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._replicas: dict[str, ClosureStoreReplica] = {}
        self._subscribed: set[str] = set()
        self._seq = 0
        self._changes = 0
        self._version = 0
        #: Set when the other end has sent its complete state.
        self.ready = threading.Event()
        #: True if the other end handles messages while a cell runs.
        self.concurrent = True
        #: Reason why the other end is incompatible; empty if it is compatible.
        self.incompatible = ""

    def greet(self) -> None:
        """Subscribe to the bus. The other end then sends its complete state."""
        self._subscribed = set()
        self._publish("hello", protocol=bus.PROTOCOL, version=VERSION, acks=self.concurrent)

    def acknowledge(self) -> None:
        """Send the number of the latest message; the bus drops clients after 300 s of silence."""
        self._publish("ack", seq=self._seq)

    def leave(self) -> None:
        """Unsubscribe from the bus."""
        with contextlib.suppress(OSError):
            self._publish("bye")

    def perform(self, command: str, timeout: float, **arguments: Any) -> Any:
        """Perform a command in the other kernel and return its result.

        Raises
        ------
        TfdError
            The error of the command; TimeLimit without an answer.
        """
        reply = self._request("command", command, timeout, command=command, **arguments)
        if reply.get("error") is not None:
            raise unpack_error(reply["error"])
        return messages.result(command, reply.get("value"))

    def catch_up(self, timeout: float) -> None:
        """Wait until the state here, with all closures, is the other kernel's current one.

        Raises
        ------
        TfdError
            The request failed, or got no answer.
        """
        deadline = time.monotonic() + timeout
        subscribed = None
        # The bus sends the closures of subscribed clusters only.
        while subscribed != self._subscribed:
            subscribed = self._subscribed
            self._request("flush", "the current state", max(0.0, deadline - time.monotonic()))

    def _request(self, kind: str, what: str, timeout: float, **fields: Any) -> Any:
        number = str(next(self._numbers))
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._pending[number] = answer
        try:
            self._publish(kind, request_id=number, **fields)
            return answer.result(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeLimit(
                f"request {what!r} failed: the other kernel did not answer within {timeout:g} s",
                fix="wait until its cell ends; a kernel with subshells answers while a cell runs",
            ) from None
        except OSError as error:
            raise RemoteError(
                f"request {what!r} failed: the other kernel cannot be reached: {error}"
            ) from None
        finally:
            self._pending.pop(number, None)

    def end(self, error: RemoteError) -> None:
        """End each request with an error, because no answer will be received."""
        for answer in tuple(self._pending.values()):
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                answer.set_exception(error)
        self.ready.set()

    # Received messages

    def handle_message(self, message: Mapping[str, Any], buffers: Sequence[bytes]) -> None:
        """Handle a message of the bus.

        Raises
        ------
        InvalidMessage
            The message is invalid.
        """
        message = messages.bus_message(message)
        kind = message.get("kind")
        if kind == "hello" and message.get("protocol") != bus.PROTOCOL:
            self.incompatible = (
                f"its tfd-notebook {message.get('version')} is incompatible with version "
                f"{VERSION} of this kernel"
            )
            self.ready.set()
        elif kind == "hello" and message.get("unknown") == self._client:
            self.greet()
        elif kind == "reply" and message.get("client") == self._client:
            answer = self._pending.get(str(message.get("request_id")))
            if answer is not None:
                with contextlib.suppress(concurrent.futures.InvalidStateError):
                    answer.set_result(message)
        elif kind in ("state", "values"):
            self._update(kind, message, buffers)

    def _update(self, kind: str, message: Mapping[str, Any], buffers: Sequence[bytes]) -> None:
        if kind == "state":
            size = len(json.dumps(message["state"]))
            self._changes = 0 if message["full"] else self._changes + size
        gap = message["seq"] != self._seq + 1 and not message["full"]
        self._seq = message["seq"]
        if gap or self._changes > _MAX_CHANGES:
            self._publish("resync")
            return
        if kind == "state":
            state = message["state"]
            tree = state if message["full"] else _patched({"clusters": self._clusters}, state)
            clusters = messages.clusters(tree.get("clusters", {}))
            self._version += 1
            self._snapshots = {
                name: self._snapshots[name]
                if cluster is self._clusters.get(name)  # a patch copies changed objects only
                else messages.snapshot(cluster, self._version)
                for name, cluster in clusters.items()
            }
            self._clusters = clusters
            for name, replica in tuple(self._replicas.items()):  # other threads add replicas
                snapshot = self._snapshots.get(name)
                coordinator = None if snapshot is None else snapshot.coordinator
                replica.count({} if coordinator is None else coordinator.counts)
            self._subscribe()
            self.ready.set()
        elif message["cluster"] in self._subscribed:
            replica = self._replicas[message["cluster"]]
            try:
                replica.apply(message, buffers)
            except (LookupError, TypeError, ValueError, OverflowError):
                raise validation.invalid("values", "...", "the columns of closures") from None
        if self._seq % _ACKNOWLEDGE_EVERY == 0:
            self.acknowledge()

    def _subscribe(self) -> None:
        """Subscribe to the closures of all clusters with a coordinator."""
        names = {name for name, tree in self._clusters.items() if "coordinator" in tree}
        for name in names - self._replicas.keys():
            self._replicas[name] = ClosureStoreReplica()
        if names != self._subscribed:
            self._subscribed = names
            self._publish("subscribe", clusters=sorted(names))

    def _publish(self, kind: str, **fields: Any) -> None:
        self._send({"kind": kind, "client": self._client, **fields})

    # State

    def names(self) -> tuple[str, ...]:
        """Return the names of the other kernel's clusters, including ended ones."""
        return tuple(self._snapshots)

    def replica(self, name: str) -> ClosureStoreReplica:
        """Return the closures of a cluster's coordinator."""
        return self._replicas.setdefault(name, ClosureStoreReplica())

    def snapshot(self, name: str) -> Snapshot:
        """Return the latest state of a cluster.

        Raises
        ------
        UnknownName
            The other kernel has no cluster of this name.
        """
        known = self._snapshots
        if name not in known:
            raise UnknownName(
                f"the other kernel has no cluster {name!r}",
                fix=f"{nearest(name, known)}clusters: {', '.join(known) or 'none'}",
            )
        return known[name]


def _patched(tree: Any, patch: Any) -> Any:
    """Return a tree with a merge patch applied (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    patched = dict(tree) if isinstance(tree, dict) else {}
    for key, value in patch.items():
        if value is None:
            patched.pop(key, None)
        else:
            patched[key] = _patched(patched.get(key), value)
    return patched
