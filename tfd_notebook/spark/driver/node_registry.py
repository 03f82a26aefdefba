"""Driver's end of the channels to the nodes: it records their messages and sends orders."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfd_notebook.errors import InvalidMessage, LaunchError, TfdError
from tfd_notebook.launchers.client.host_addresses import is_private, parse_address
from tfd_notebook.model.rate_window import RateWindow
from tfd_notebook.model.snapshot import NodeRow
from tfd_notebook.net import ports
from tfd_notebook.net.host import addresses_of
from tfd_notebook.net.secure_channel import AuthenticatedChannel, Secret, Server, serve
from tfd_notebook.spark.driver import messages
from tfd_notebook.spark.roles import Assignment

log = logging.getLogger(__name__)

#: Number of log lines kept per node, and maximum length of a line in characters.
_LOG_LINES = 1000
_LINE_SIZE = 4000
#: Window in seconds for the row rate.
_RATE_SECONDS = 3.0


@dataclass
class Node:
    """State of a node in the driver; changed only under the lock of `NodeServer`."""

    assignment: Assignment
    address: str = ""
    #: True if it has stated its host, behind a forwarded port of the driver's host.
    is_stated: bool = False
    executor: str = ""
    host: str = ""
    jvm: int = 0
    pid: int | None = None
    gpu: str = ""
    state: str = ""
    path: str = ""
    board: str = ""
    board_pid: int = 0
    board_error: str = ""
    open_to: str = ""
    error: str = ""
    reason: str = ""
    attempt: int | None = None
    #: True if a start at another address was refused because this one was connected.
    has_refused_start: bool = False
    ended: bool = False
    numbers: Mapping[str, Any] = field(default_factory=dict)
    log: deque[str] = field(default_factory=lambda: deque(maxlen=_LOG_LINES))
    unfinished_line: str = ""
    rows: RateWindow = field(default_factory=lambda: RateWindow(_RATE_SECONDS))
    channel: AuthenticatedChannel | None = None
    last_message_at: float = 0.0
    #: Number of its last message. The node repeats messages that are not acknowledged.
    last_seq: int = -1
    #: The current order, sent again whenever the node reconnects.
    order: Mapping[str, Any] = field(default_factory=dict)

    @property
    def function_ended(self) -> bool:
        """True if its function has ended, with or without an error."""
        return self.state in messages.FINAL_STATES

    @property
    def rows_per_s(self) -> float:
        """Rows per second that its function consumed, over the last 3 s."""
        return self.rows.rate or 0.0

    def update_state(self, status: Mapping[str, Any]) -> None:
        """Apply the state that its supervisor reports."""
        self.path, self.open_to = status["path"], status["open_to"]
        # Its host is that of the node, and not stated.
        host, port = self.address.rpartition(":")[0], status["board"].rpartition(":")[2]
        self.board = f"http://{host}:{port}" if host and port else ""
        self.board_error = status["board_error"]
        self.board_pid = status["board_pid"]
        self.error = status["error"]
        if status["numbers"]:
            self.numbers = status["numbers"]
            self.rows.add(time.monotonic(), self.numbers.get("rows", 0))
        # The result of the function takes precedence over the end of its process.
        if not self.function_ended and not self.ended:
            self.state, self.reason = status["state"], status["reason"]
        self.ended = self.ended or status["ended"]

    def lose(self, reason: str) -> None:
        """Count the node as ended, and as lost unless its function had ended."""
        self.ended = True
        if not self.function_ended:
            self.state, self.reason = "lost", reason

    def append_log(self, text: str) -> None:
        """Append to its log."""
        *lines, self.unfinished_line = (self.unfinished_line + text).split("\n")
        self.log.extend(line[:_LINE_SIZE] for line in lines)
        self.unfinished_line = self.unfinished_line[-_LINE_SIZE:]

    def last_lines(self, count: int) -> tuple[str, ...]:
        """Return the latest lines of its log."""
        lines = [*self.log, *([self.unfinished_line] if self.unfinished_line else [])]
        return tuple(lines[-count:])


class NodeServer:
    """A server that receives the nodes' messages, tracks their states and sends orders.

    Parameters
    ----------
    host : str
        Name or address of the driver for executors.
    listen_at : str
        Local address to listen on.
    assignments : sequence of Assignment
    heartbeat_limit : float
        Seconds without a message after which a node counts as lost.
    changed : callable
        Called after each change with the node and the kind of its message, without a lock.
    answer : callable
        Returns the answer to a message of a Spark task that feeds.
    secret : Secret, optional
        Default: a new one.

    Attributes
    ----------
    secret : Secret
    address : str
        Address for the nodes, ``"host:port"``.
    nodes : dict of int to Node
    """

    def __init__(
        self,
        host: str,
        listen_at: str,
        assignments: Sequence[Assignment],
        heartbeat_limit: float,
        changed: Callable[[Node, str], None],
        answer: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda message: {},
        secret: Secret | None = None,
    ) -> None:
        self.secret = secret or Secret.new()
        self.nodes = {each.node: Node(each) for each in assignments}
        #: Error of a node that could not be started.
        self.problem: TfdError | None = None
        self._limit = heartbeat_limit
        self._changed = changed
        self._answer = answer
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._stopped = threading.Event()
        self._host = host
        self._server: Server = serve(self.secret, self._serve, host=listen_at)
        self.address = f"{host}:{self._server.address.rpartition(':')[2]}"
        self._watcher = threading.Thread(target=self._watch, name="tfd-spark-watch", daemon=True)
        self._watcher.start()

    @property
    def lock(self) -> threading.Lock:
        """The lock that protects the nodes."""
        return self._lock

    @property
    def done(self) -> bool:
        """True after `stop`, and when the functions of all nodes that receive rows have ended.

        See Also
        --------
        tensorflowonspark.reservation.Server
        """
        return (
            self._stopped.is_set()
            or self._closed.is_set()
            or all(node.function_ended for node in self.nodes.values() if node.assignment.is_fed)
        )

    def stop(self) -> None:
        """Request that ``shutdown(ssc=...)`` stops its StreamingContext.

        The nodes keep running until then.

        See Also
        --------
        tensorflowonspark.reservation.Server.stop
        """
        self._stopped.set()

    def order(self, what: str, nodes: Sequence[Node] | None = None, **details: Any) -> None:
        """Send the order ``"finish"``, or ``"stop"``, which is final, to nodes (default: all).

        An unreachable node receives the order when it reconnects, or is lost at its limit.
        """
        for node in nodes if nodes is not None else list(self.nodes.values()):
            with self._lock:
                if node.order.get("order") != "stop":
                    node.order = {"order": what, **details}
                channel = node.channel
            self._send_order(node, channel)

    def _send_order(self, node: Node, channel: AuthenticatedChannel | None) -> None:
        if node.order and channel is not None:
            with contextlib.suppress(OSError):
                channel.send(dict(node.order))

    def close(self, timeout: float = 5.0) -> None:
        """Close the server and stop the watcher thread."""
        self._closed.set()
        self._server.close(timeout)
        if threading.current_thread() is not self._watcher:
            self._watcher.join(timeout)

    def _serve(self, channel: AuthenticatedChannel) -> None:
        header, _ = channel.receive(timeout=60.0)
        if header.get("type") in ("feed_failed", "feed_repeated"):
            channel.send(
                self._answer(messages.spark_message(header, "feed_failed", "feed_repeated"))
            )
            return
        number = header.get("node")
        node = self.nodes.get(number) if type(number) is int else None
        try:
            message = messages.spark_message(header, "reserved", "start_failed", "update")
            if node is not None:
                self._serve_node(node, channel, message)
        except InvalidMessage as error:
            if node is None or not _is_from(node, channel):
                raise
            self._reject(node, error)

    def _serve_node(
        self, node: Node, channel: AuthenticatedChannel, message: Mapping[str, Any]
    ) -> None:
        if not self._accepts(node, channel, message["type"]):
            log.warning(
                "a message (%s) of %s from %s was refused: the node is at %s",
                *(message["type"], node.assignment.name, channel.ends[0], node.address),
            )
        elif message["type"] == "reserved":
            try:
                is_first = self._reserve(node, message, channel)
            except LaunchError as error:
                self.problem = error
                self._changed(node, "start_failed")
                return
            if is_first:
                self._send_addresses()
                self._changed(node, "reserved")
            else:
                channel.send({})
                self._changed(node, "reserved_again")
            with contextlib.suppress(EOFError, OSError):
                channel.receive()  # the task closes it after it has read the answer
            self._end_reservation(node, channel)
        elif message["type"] == "start_failed":
            self.problem = messages.start_error(message, node.assignment.name)
            self._changed(node, "start_failed")
        else:
            self._follow_node(node, channel, message)

    def _accepts(self, node: Node, channel: AuthenticatedChannel, kind: str) -> bool:
        """Return True if a message about a node can be its own.

        After the loss of an executor, Spark starts the node again, possibly at another address. The
        task of its first start has then ended, or Spark is ending it.
        """
        if _is_from(node, channel):
            return True
        with self._lock:
            if kind == "update" or node.pid is not None:
                return False
            node.has_refused_start = node.channel is not None
            return node.channel is None

    def _end_reservation(self, node: Node, channel: AuthenticatedChannel) -> None:
        """Report a second start of a node if its first task ended before it had the addresses."""
        with self._lock:
            if node.channel is not channel:  # the node has connected, or this start is the second
                return
            node.channel = None
            is_second = node.has_refused_start and not all(self._addresses().values())
        if is_second:
            self._changed(node, "reserved_again")

    def _reject(self, node: Node, error: InvalidMessage) -> None:
        """Count a node as lost because it sent an invalid message."""
        with self._lock:
            node.lose(f"it sent an invalid message: {error.what}")
        self._changed(node, "ended")

    def _reserve(
        self, node: Node, message: Mapping[str, Any], channel: AuthenticatedChannel
    ) -> bool:
        """Record a node's reservation; return False if it already has one.

        Raises
        ------
        LaunchError
            The node states an address that cannot be its own.
        """
        host, is_stated = _host_of(channel.ends[0], message["address"], self._host)
        address = f"{host}:{message['address'].rpartition(':')[2]}"
        with self._lock:
            if node.attempt is not None or self._closed.is_set():
                return False
            if not host:
                raise _stated_wrongly(node, message["address"])
            for other in self.nodes.values():
                is_same = other.address.rpartition(":")[0] == host
                if other.address == address or (is_same and other.is_stated is not is_stated):
                    if is_stated:
                        raise _stated_wrongly(node, address, other)
                    raise _stated_wrongly(other, other.address, node)
            node.attempt = message["attempt"]
            node.address, node.is_stated = address, is_stated
            node.executor = message["executor"]
            node.host, node.jvm, node.gpu = message["host"], message["jvm"], message["gpu"]
            node.state, node.channel = "reserved", channel
            node.last_message_at = time.monotonic()
        return True

    def _addresses(self) -> dict[int, str]:
        return {number: node.address for number, node in self.nodes.items()}

    def _send_addresses(self) -> None:
        """Send the addresses of all nodes to the tasks that launch them, if all are known."""
        addresses = self._addresses()
        if all(addresses.values()):
            for node in self.nodes.values():
                if node.state == "reserved" and (channel := node.channel) is not None:
                    with contextlib.suppress(OSError):
                        channel.send({"addresses": addresses})

    def _follow_node(
        self, node: Node, channel: AuthenticatedChannel, message: Mapping[str, Any]
    ) -> None:
        with self._lock:
            previous, node.channel = node.channel, channel
        if previous is not None:
            previous.close()
        self._send_order(node, channel)
        try:
            while True:
                with self._lock:
                    node.pid, node.last_message_at = message["pid"], time.monotonic()
                    is_new = message["seq"] > node.last_seq
                    if is_new:
                        node.last_seq = message["seq"]
                        node.append_log(message["log"])
                        node.update_state(message["status"])
                # Acknowledge afterwards: the node ends when its last message is acknowledged.
                with contextlib.suppress(OSError):  # the node then repeats the message
                    channel.send({"order": "acknowledge", "seq": message["seq"]})
                if is_new:
                    self._changed(node, "update")
                header, _ = channel.receive()
                message = messages.spark_message(header, "update")
        finally:
            with self._lock:
                if node.channel is channel:
                    node.channel = None

    def _watch(self) -> None:
        """Mark nodes as lost whose last message is older than the limit."""
        while not self._closed.wait(0.25):
            now = time.monotonic()
            for node in self.nodes.values():
                with self._lock:
                    if node.ended or node.pid is None:
                        continue
                    silent_s = now - node.last_message_at
                    if silent_s <= self._limit:
                        continue
                    broken = "" if node.channel else ", and the connection to it is broken"
                    node.lose(f"no message from it for {silent_s:.0f} s{broken}")
                self._changed(node, "ended")


def _host_of(peer: str, stated: str, driver: str) -> tuple[str, bool]:
    """Return the host of a node, and True if it comes from the address that the node states.

    It is `peer`, the other end of its connection to the driver. A loopback address is that of the
    driver's host or of a port that is forwarded to it. Then a private address counts. A node on
    the driver's host has the name that executors use for the `driver`.
    """
    connected = parse_address(peer)
    if connected is not None and not connected.is_loopback:
        return _bracketed(str(connected)), False
    name = stated.rpartition(":")[0].strip("[]")
    if ports.is_this_host(name):
        return driver, True
    # Resolve a name once. Other hosts could get another address for it.
    for text in sorted(addresses_of(name)):
        if (address := parse_address(text)) is not None and is_private(address):
            return _bracketed(str(address)), True
    return "", True


def _is_from(node: Node, channel: AuthenticatedChannel) -> bool:
    """Return True if a channel has the address from which the node has reserved, if it has."""
    connected = parse_address(channel.ends[0])
    if not node.address:
        return True
    if connected is None or connected.is_loopback:
        return node.is_stated
    return node.address.rpartition(":")[0] == _bracketed(str(connected))


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _stated_wrongly(node: Node, address: str, owner: Node | None = None) -> LaunchError:
    reason = "does not resolve to a private address"
    if owner is not None:
        reason = f"belongs to {owner.assignment.name}"
    return LaunchError(
        f"{node.assignment.name} states the address {address}, which {reason}",
        fix="set spark.driver.host to an address that executors reach without a forwarded port",
    )


#: Number of log lines in a node's row.
_LINES = 20


def node_row(node: Node) -> NodeRow:
    """Return the row of a node for a snapshot; the caller holds the lock."""
    numbers = node.numbers
    return NodeRow(
        role=node.assignment.role,
        index=node.assignment.index,
        executor=node.executor,
        host=node.host,
        address=node.address,
        pid=node.pid,
        state=node.state,
        gpu=node.gpu,
        rows=int(numbers.get("rows", 0)),
        results=int(numbers.get("results", 0)),
        rows_per_s=0.0 if node.function_ended else node.rows_per_s,
        queue_depth=numbers.get("queue_depth"),
        queue_capacity=numbers.get("queue_capacity"),
        batch_age_s=numbers.get("batch_age_s"),
        log=node.last_lines(_LINES),
        error=node.error or node.reason,
    )
