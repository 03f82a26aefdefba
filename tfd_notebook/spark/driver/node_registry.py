"""The driver's end of the channels to nodes: what they say is noted, what they shall do is sent."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfd_notebook.errors import InvalidMessage, TfdError
from tfd_notebook.model.snapshot import NodeRow
from tfd_notebook.net import agent_protocol
from tfd_notebook.net.secure_channel import AuthenticatedChannel, Secret, Server, serve
from tfd_notebook.spark.driver import messages
from tfd_notebook.spark.driver.roles import Assignment

#: Lines of each node's log that are kept, and characters of one of them.
_LOG_LINES = 1000
_LINE_SIZE = 4000
#: Seconds over which a rate is taken.
_RATE_SECONDS = 3.0


@dataclass
class Node:
    """What the driver knows of a node; changed under the lock of `NodeServer` alone."""

    assignment: Assignment
    address: str = ""
    executor: str = ""
    host: str = ""
    jvm: int = 0
    pid: int | None = None
    gpu: str = ""
    state: str = ""
    path: str = ""
    board: str = ""
    board_pid: int = 0
    no_board: str = ""
    open_to: str = ""
    error: str = ""
    reason: str = ""
    attempt: int | None = None
    ended: bool = False
    numbers: Mapping[str, Any] = field(default_factory=dict)
    log: deque[str] = field(default_factory=lambda: deque(maxlen=_LOG_LINES))
    unfinished_line: str = ""
    rates: deque[tuple[float, int]] = field(default_factory=deque)
    channel: AuthenticatedChannel | None = None
    heard: float = 0.0
    #: The last of its words that was heard; it says again what it does not know to be heard.
    word: int = -1
    #: What it was told to do, which it hears again whenever it comes back.
    order: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether its function has ended, in whatever way."""
        return self.state in messages.NODE_ENDS

    @property
    def rows_per_s(self) -> float:
        """Rows that its function took per second, of late."""
        if len(self.rates) < 2:
            return 0.0
        (began, first), (ended, last) = self.rates[0], self.rates[-1]
        return (last - first) / (ended - began) if ended > began else 0.0

    def note_known(self, known: Mapping[str, Any]) -> None:
        """Note what its supervisor knows of it."""
        self.path, self.open_to = known["path"], known["open_to"]
        self.board, self.no_board = known["board"], known["no_board"]
        self.board_pid = known["board_pid"]
        self.error = known["error"]
        if not self.is_over and not self.ended:
            self.state = known["state"]

    def note_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Note what its inbox counted."""
        self.numbers = numbers
        now = time.monotonic()
        self.rates.append((now, numbers.get("rows", 0)))
        while now - self.rates[0][0] > _RATE_SECONDS and len(self.rates) > 2:
            self.rates.popleft()

    def note_log(self, text: str) -> None:
        """Note what it wrote."""
        *lines, self.unfinished_line = (self.unfinished_line + text).split("\n")
        self.log.extend(line[:_LINE_SIZE] for line in lines)
        self.unfinished_line = self.unfinished_line[-_LINE_SIZE:]

    def last_lines(self, count: int) -> tuple[str, ...]:
        """Return the latest lines that it wrote."""
        lines = [*self.log, *([self.unfinished_line] if self.unfinished_line else [])]
        return tuple(lines[-count:])


class NodeServer:
    """Listens for nodes, knows what they are doing, and gives them orders.

    Parameters
    ----------
    host : str
        Where executors reach the driver.
    listen_at : str
        The address of this host that it listens at.
    assignments : sequence of Assignment
    heartbeat_limit : float
        Seconds without a word after which a node counts as lost.
    changed : callable
        Called with a node, and the kind of what it said, after each change; no lock is held.
    asked : callable
        Answers the tasks of Spark that feed.

    Attributes
    ----------
    secret : Secret
    address : str
        Where nodes find it, ``"host:port"``.
    nodes : dict of int to Node
    """

    def __init__(
        self,
        host: str,
        listen_at: str,
        assignments: Sequence[Assignment],
        heartbeat_limit: float,
        changed: Callable[[Node, str], None],
        asked: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda said: {},
    ) -> None:
        self.secret = Secret.new()
        self.nodes = {each.node: Node(each) for each in assignments}
        #: Why a node could not be started.
        self.problem: TfdError | None = None
        self._limit = heartbeat_limit
        self._changed = changed
        self._asked = asked
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._stopped = threading.Event()
        self._server: Server = serve(self.secret, self._serve, host=listen_at)
        self.address = f"{host}:{self._server.address.rpartition(':')[2]}"
        self._watcher = threading.Thread(target=self._watch, name="tfd-spark-watch", daemon=True)
        self._watcher.start()

    @property
    def lock(self) -> threading.Lock:
        """Held while nodes change."""
        return self._lock

    @property
    def done(self) -> bool:
        """Return True after `stop`, and when all nodes that take rows have ended.

        See Also
        --------
        tensorflowonspark.reservation.Server
        """
        return (
            self._stopped.is_set()
            or self._closed.is_set()
            or all(node.is_over for node in self.nodes.values() if node.assignment.is_fed)
        )

    def stop(self) -> None:
        """Request that ``shutdown(ssc=...)`` stops its StreamingContext.

        The nodes keep running until then.

        See Also
        --------
        tensorflowonspark.reservation.Server.stop
        """
        self._stopped.set()

    def order(self, what: str, nodes: Sequence[Node] | None = None, **more: Any) -> None:
        """Tell nodes (default: all) what to do: ``"finish"``, or ``"stop"``, which is for good.

        A node that cannot be reached hears it when it is back; one that stays away is lost.
        """
        for node in nodes if nodes is not None else list(self.nodes.values()):
            with self._lock:
                if node.order.get("order") != "stop":
                    node.order = {"order": what, **more}
                channel = node.channel
            self._remind(node, channel)

    def _remind(self, node: Node, channel: AuthenticatedChannel | None) -> None:
        if node.order and channel is not None:
            with contextlib.suppress(OSError):
                channel.send(dict(node.order))

    def close(self, timeout: float = 5.0) -> None:
        """Listen no more."""
        self._closed.set()
        self._server.close(timeout)
        if threading.current_thread() is not self._watcher:
            self._watcher.join(timeout)

    def _serve(self, channel: AuthenticatedChannel) -> None:
        header, _ = channel.receive(timeout=60.0)
        if header.get("say") in ("gave up", "fed again"):
            channel.send(self._asked(messages.spark_message(header, "gave up", "fed again")))
            return
        number = header.get("node")
        node = self.nodes.get(number) if type(number) is int else None
        try:
            said = messages.spark_message(header, *messages.NODE_GREETINGS)
            if node is not None:
                self._serve_node(node, channel, said)
        except InvalidMessage as error:
            if node is None:
                raise
            self._reject(node, error)

    def _serve_node(
        self, node: Node, channel: AuthenticatedChannel, said: Mapping[str, Any]
    ) -> None:
        if said["say"] == "reserved":
            channel.send({"go": self.reserve(node, said)})
            self._changed(node, "reserved" if node.attempt == said["attempt"] else "again")
            with contextlib.suppress(EOFError, OSError):
                channel.receive(timeout=60.0)  # it closes when it has read the answer
        elif said["say"] == "unable":
            self.problem = agent_protocol.unpack_error(said["error"])
            self._changed(node, "unable")
        else:
            self._hold(node, channel, said)

    def _reject(self, node: Node, error: InvalidMessage) -> None:
        """Count a node as lost because it sent an invalid message."""
        with self._lock:
            node.ended = True
            if not node.is_over:
                node.state, node.reason = "lost", f"it sent an invalid message: {error.what}"
        self._changed(node, "ended")

    def reserve(self, node: Node, said: Mapping[str, Any]) -> bool:
        """Note a node's reservation; False where it has one already."""
        with self._lock:
            if node.attempt is not None or self._closed.is_set():
                return False
            node.attempt = said["attempt"]
            node.address, node.executor = said["address"], said["executor"]
            node.host, node.jvm = said["host"], said["jvm"]
            node.gpu, node.state, node.heard = said["gpu"], "reserved", time.monotonic()
        return True

    def _hold(self, node: Node, channel: AuthenticatedChannel, hello: Mapping[str, Any]) -> None:
        with self._lock:
            before, node.channel, node.heard = node.channel, channel, time.monotonic()
            node.pid = hello["pid"]
            node.note_known(hello["known"])
        if before is not None:
            before.close()
        self._remind(node, channel)
        self._changed(node, "hello")
        try:
            while True:
                header, _ = channel.receive()
                said = messages.spark_message(header, *messages.NODE_WORDS)
                with self._lock:
                    node.heard = time.monotonic()
                    is_new = said["word"] > node.word
                    if is_new:
                        node.word = said["word"]
                        self._note(node, said)
                # Once it is noted: the node ends when its last word was heard.
                with contextlib.suppress(OSError):  # it says that again
                    channel.send({"order": "heard", "word": said["word"]})
                if is_new:
                    self._changed(node, said["say"])
        finally:
            with self._lock:
                if node.channel is channel:
                    node.channel = None

    def _note(self, node: Node, said: Mapping[str, Any]) -> None:
        if said["log"]:
            node.note_log(said["log"])
        if said["numbers"]:
            node.note_numbers(said["numbers"])
        node.note_known(said["known"])
        if said["say"] == "ended":
            node.ended = True
            # What its function came to counts for more than how its process ended afterwards.
            if not node.is_over:
                node.state, node.reason = said["state"], said["reason"]

    def _watch(self) -> None:
        """Find nodes that have gone without a word."""
        while not self._closed.wait(0.25):
            now = time.monotonic()
            for node in self.nodes.values():
                with self._lock:
                    if node.ended or node.pid is None:
                        continue
                    silent = now - node.heard
                    if silent <= self._limit:
                        continue
                    node.ended = True
                    if not node.is_over:
                        broken = "" if node.channel else ", and the connection to it is broken"
                        node.reason = f"nothing was heard of it for {silent:.0f} s{broken}"
                        node.state = "lost"
                self._changed(node, "ended")


#: Lines of a node's log in its row.
_LINES = 20


def node_row(node: Node) -> NodeRow:
    """Return a node's row; to be called while `node` cannot change."""
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
        rows_per_s=0.0 if node.is_over else node.rows_per_s,
        queue_depth=numbers.get("queue_depth"),
        queue_capacity=numbers.get("queue_capacity"),
        batch_age_s=numbers.get("batch_age_s"),
        log=node.last_lines(_LINES),
        error=node.error or node.reason,
    )
