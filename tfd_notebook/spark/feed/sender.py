"""Task's end of a feed: sends a partition to a node, and receives its results."""

from __future__ import annotations

import functools
import gc
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from tfd_notebook.errors import (
    FeedTimeout,
    NodeFailed,
    NodeLost,
    SparkError,
    TfdError,
    UnknownName,
    UsageError,
)
from tfd_notebook.net import secure_channel
from tfd_notebook.spark.feed import decode
from tfd_notebook.spark.feed.chunks import Chunk, Packed, packed

#: Maximum bytes in flight. A larger chunk is sent alone.
_MAX_BYTES = 64 << 20
#: New objects until Python searches for garbage. The rows of a chunk are many, and have no cycles.
_GC_THRESHOLD = 100_000


@dataclass(frozen=True)
class FeedResult:
    """Result of feeding a partition.

    Parameters
    ----------
    rows, chunks, bytes : int
        Amounts that were sent.
    stopped : str, optional
        Reason why the node stopped the feed; None if it consumed all rows.
    node : str
        Name of the node; empty for a partition without rows.
    """

    rows: int = 0
    chunks: int = 0
    bytes: int = 0
    stopped: str | None = None
    node: str = ""


def feed_partition(
    rows: Iterable[Any],
    inboxes: InboxAddresses,
    qname: str = "input",
    feed_timeout: float = 600.0,
) -> FeedResult:
    """Feed `rows` to the node of this executor, and wait until it has consumed them.

    Return early if the node stops the feed: its function called ``terminate()``, or returned.

    Parameters
    ----------
    rows : iterable
        The rows of the partition.
    inboxes : InboxAddress, sequence of InboxAddress or callable
        A node, nodes from which `choose` selects one, or a function that returns such nodes.
    qname : str
        Name of the queue. Default ``"input"``.
    feed_timeout : float
        Seconds *without any progress* of the node until the feed fails. Default 600.

    Raises
    ------
    NodeFailed
        The user's function raised. The error has its traceback.
    NodeLost
        The node's process has ended.
    FeedTimeout
    UsageError
        A row cannot be sent, or the queue does not exist.
    """
    return feed_chunks(packed(rows), inboxes, qname, feed_timeout)


def feed_chunks(
    chunks: Iterator[Packed], inboxes: InboxAddresses, qname: str, feed_timeout: float
) -> FeedResult:
    """Feed packed rows; see `feed_partition`."""
    first = next(chunks, None)
    if first is None:
        return FeedResult()
    with _Feeder(inboxes, qname, feed_timeout, infer=False) as feeder:
        for chunk in chain([first], chunks):
            if not feeder.send(chunk):
                break
        else:
            feeder.end()
            feeder.wait_consumed()
        return feeder.result()


def infer_partition(
    rows: Iterable[Any],
    inboxes: InboxAddresses,
    qname: str = "input",
    feed_timeout: float = 600.0,
) -> Iterator[Any]:
    """Feed `rows` to the node of this executor, and yield one result per row, in order.

    Parameters
    ----------
    rows, inboxes, qname, feed_timeout
        As for `feed_partition`.

    Raises
    ------
    NodeFailed, NodeLost, FeedTimeout, UsageError
        As for `feed_partition`.
    SparkError
        The node's function ended without returning all results.
    """
    for chunk in infer_chunks(packed(rows), inboxes, qname, feed_timeout):
        yield from chunk.rows(0, chunk.count)


def infer_chunks(
    chunks: Iterator[Packed], inboxes: InboxAddresses, qname: str, feed_timeout: float
) -> Iterator[Chunk]:
    """Feed packed rows, and yield the results in chunks; see `infer_partition`."""
    first = next(chunks, None)
    if first is None:
        return
    with _Feeder(inboxes, qname, feed_timeout, infer=True) as feeder:
        for chunk in chain([first], chunks):
            if not feeder.send(chunk):
                break
            yield from feeder.results()
        else:
            feeder.end()
        yield from feeder.remaining_results()


@functools.cache
def _collect_garbage_rarely() -> None:
    """Raise the threshold of the garbage collector of this Python worker of Spark."""
    first, *others = gc.get_threshold()
    if 0 < first < _GC_THRESHOLD:  # 0: disabled
        gc.set_threshold(_GC_THRESHOLD, *others)


class _Feeder:
    """A connection to an inbox: the task's thread sends, and a second thread receives."""

    def __init__(
        self, inboxes: InboxAddresses, qname: str, feed_timeout: float, *, infer: bool
    ) -> None:
        decode.reuse_large_buffers()
        _collect_garbage_rarely()
        if callable(inboxes):
            inboxes = inboxes()
        self._address = address = inboxes if isinstance(inboxes, InboxAddress) else choose(inboxes)
        self._qname, self._timeout_s, self._infer = qname, feed_timeout, infer
        self._changed = threading.Condition()
        self._rows = self._chunks = self._bytes = 0
        self._unconsumed: deque[int] = deque()  # sizes of the chunks that are not consumed yet
        self._results: deque[Chunk] = deque()
        self._result_count = 0
        self._error: TfdError | None = None
        self._stopped: str | None = None
        self._progress = time.monotonic()
        self._last_report: dict[str, Any] = {}
        try:
            self._channel = secure_channel.connect(f"unix:{address.path}", address.secret)
        except (OSError, EOFError) as error:
            raise self._node_lost(f"its inbox does not answer ({error})") from error
        try:
            self._channel.send({"op": "feed", "queue": qname, "infer": infer})
            answer, _ = self._channel.receive(max(30.0, min(feed_timeout, 600.0)))
        except (OSError, EOFError) as error:
            self._channel.close()
            raise self._node_lost(f"it closed the connection ({error})") from error
        self._window = int(answer.get("window", 0))
        if answer["op"] == "unknown":
            self._channel.close()
            raise UnknownName(
                f"{address.node} has no queue {qname!r}",
                task=address.node,
                fix=f"use one of the queues {', '.join(answer['queues'])}",
            )
        self._handle_message(answer, memoryview(b""))
        self._thread = threading.Thread(
            target=self._receive_loop, name="tfd-feed-sender", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> _Feeder:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._thread.join(10)

    def result(self) -> FeedResult:
        """Return the result of the feed."""
        return FeedResult(self._rows, self._chunks, self._bytes, self._stopped, self._address.node)

    def send(self, chunk: Packed) -> bool:
        """Send a chunk when the window allows it; return False if the node stopped the feed."""
        with self._changed:
            self._wait_until(
                lambda: (
                    not self._unconsumed
                    or (
                        len(self._unconsumed) < self._window
                        and sum(self._unconsumed) + chunk.size <= _MAX_BYTES
                    )
                )
            )
            if self._stopped is not None:
                return False
            self._unconsumed.append(chunk.size)
        try:
            self._channel.send({"op": "rows", **chunk.header}, chunk.body)
        except ValueError as error:
            raise UsageError(
                f"a row is too large to be sent to {self._address.node}: {error}",
                fix="a row can have up to 2 GiB; feed names of files instead",
            ) from error
        except OSError as error:
            return self._on_broken_channel(error)
        self._rows += chunk.count
        self._chunks += 1
        self._bytes += chunk.size
        return True

    def end(self) -> None:
        """Report the end of the partition."""
        try:
            self._channel.send({"op": "end"})
        except OSError as error:
            self._on_broken_channel(error)

    def wait_consumed(self) -> None:
        """Wait until the node has consumed all chunks, or stops the feed."""
        with self._changed:
            self._wait_until(lambda: not self._unconsumed)

    def results(self) -> Iterator[Chunk]:
        """Yield the results that have arrived."""
        while self._results:
            yield self._results.popleft()

    def remaining_results(self) -> Iterator[Chunk]:
        """Yield results as they arrive, until there is one per row."""
        while True:
            yield from self.results()
            with self._changed:
                self._wait_until(lambda: self._results or self._result_count >= self._rows)
                if self._results:
                    continue
            if self._result_count == self._rows and self._stopped is None:
                return
            if self._stopped is not None:
                raise SparkError(
                    f"{self._stopped}, but {self._rows - self._result_count} results of a "
                    "partition are missing",
                    task=self._address.node,
                    fix="return a result for each row until should_stop() is true",
                )
            raise SparkError(
                f"{self._result_count} results arrived for the {self._rows} rows of a partition",
                task=self._address.node,
                fix="pass exactly one result per row to batch_results()",
            )

    def _wait_until(self, reached: Any) -> None:
        began = time.monotonic()
        while self._error is None and self._stopped is None and not reached():
            remaining = max(self._progress, began) + self._timeout_s - time.monotonic()
            if remaining <= 0:
                raise self._timeout()
            self._changed.wait(min(remaining, 1.0))
        if self._error is not None:
            raise self._error

    def _on_broken_channel(self, error: OSError) -> bool:
        """Handle a broken channel: return False if the node stopped the feed, else raise."""
        self._thread.join(10)
        with self._changed:
            if self._stopped is not None:
                return False
            raise self._error or self._node_lost(f"the connection broke ({error})")

    def _receive_loop(self) -> None:
        try:
            while True:
                message, body = self._channel.receive()
                with self._changed:
                    self._handle_message(message, body)
                    self._changed.notify_all()
                    if self._error is not None or self._stopped is not None:
                        break
        except (OSError, EOFError) as error:
            with self._changed:
                if self._error is None and self._stopped is None:
                    self._error = self._node_lost(f"the connection ended ({error})")
                self._changed.notify_all()
        # Interrupts a `send` in the task's thread.
        self._channel.close()

    def _handle_message(self, message: dict[str, Any], body: memoryview) -> None:
        op, address = message["op"], self._address
        if op == "ack":
            self._unconsumed.popleft()
            self._progress = time.monotonic()
        elif op == "results":
            chunk = Chunk(message, body)
            self._results.append(chunk)
            self._result_count += chunk.count
            self._progress = time.monotonic()
        elif op == "tick":
            if message["taken"] != self._last_report.get("taken"):
                self._progress = time.monotonic()
            self._last_report = message
        elif op == "stop":
            self._stopped = str(message["reason"])
        elif op == "failed":
            text = str(message["traceback"]).rstrip()
            self._error = NodeFailed(
                f"the function of {address.node} on {address.host} raised {message['what']}"
                + (f"\n\n{text}\n" if text else ""),
                task=address.node,
                fix="fix the function and run the cluster again",
            )
        elif op == "closed":
            self._error = self._node_lost("the node is stopping")

    def _node_lost(self, why: str) -> NodeLost:
        address = self._address
        return NodeLost(
            f"lost {address.node} on {address.host} while a partition was fed: {why}",
            task=address.node,
            fix="see its log, and run the cluster again",
        )

    def _timeout(self) -> FeedTimeout:
        address, report = self._address, self._last_report
        age = report.get("age")
        batch = "no batch was taken yet" if age is None else f"the last batch was {age:.0f} s ago"
        if not report:
            batch = "the node does not report its progress"
        if self._infer and not self._unconsumed:
            return FeedTimeout(
                f"{address.node} on {address.host} read all {self._rows} rows of a partition, but "
                f"returned {self._result_count} results; nothing arrived for {self._timeout_s:g} s",
                task=address.node,
                fix="create the DataFeed with train_mode=False, pass batch_results() one result "
                "per row, or use a larger feed_timeout",
            )
        return FeedTimeout(
            f"{address.node} on {address.host} consumed no rows of the queue {self._qname!r} for "
            f"{self._timeout_s:g} s; {len(self._unconsumed)} chunks of this partition and "
            f"{report.get('depth', 'an unknown number')} in its queue wait, {batch}",
            task=address.node,
            fix="check what its function does, call terminate() if it needs no more rows, or use a "
            "larger feed_timeout",
        )


@dataclass(frozen=True)
class InboxAddress:
    """Address of a node's inbox. Only the closures of Spark tasks contain it.

    Parameters
    ----------
    cluster : str
        The cluster's id.
    role : str
    index : int
        The node's index in its role.
    host : str
        Name of the node's host, from `socket.gethostname`.
    executor : str
        Spark's id of its executor; may be empty.
    jvm : int
        Process id of its executor's JVM on that host; 0 if unknown.
    path : str
        Path of the inbox's socket.
    secret : bytes
        Authenticates the tasks to the inbox.
    """

    cluster: str
    role: str
    index: int
    host: str
    executor: str
    jvm: int
    path: str
    secret: bytes = field(repr=False)

    @property
    def node(self) -> str:
        """Name of the node, such as ``worker:0``."""
        return f"{self.role}:{self.index}"


#: Destination of rows: a node, nodes from which `choose` selects one, or a function that returns
#: such nodes.
InboxAddresses: TypeAlias = (
    "InboxAddress | Sequence[InboxAddress] | Callable[[], Sequence[InboxAddress]]"
)


def choose(inboxes: Sequence[InboxAddress]) -> InboxAddress:
    """Return the address of the node that a task in this process feeds.

    A node of the task's executor is preferred to other nodes of this host. Of several, the one with
    the fewest waiting chunks is selected. Tasks that start at the same time begin the search with
    different nodes. Rows do not leave the host.

    Parameters
    ----------
    inboxes : sequence of InboxAddress

    Raises
    ------
    SparkError
        No node of the cluster is on this host, or all of them have ended.
    """
    host = socket.gethostname()
    here = [address for address in inboxes if address.host == host]
    local = [address for address in here if os.path.exists(address.path)]
    ancestor_pids = {os.getpid(), *_ancestors()}
    local = [address for address in local if address.jvm in ancestor_pids] or local
    if len(local) > 1:
        first = _partition() % len(local)
        return min([*local[first:], *local[:first]], key=_load)
    if local:
        return local[0]
    if here:
        raise SparkError(
            f"the nodes on host {host} that received rows have ended: "
            + ", ".join(address.node for address in here),
            fix="cluster.error has the reason, and cluster.logs() what they have written",
        )
    nodes = ", ".join(f"{address.node} on {address.host}" for address in inboxes) or "none"
    raise SparkError(
        f"no node of this cluster that receives rows is on host {host}; the nodes are: {nodes}",
        fix="use one node per executor, or remove the other executors",
    )


def _partition() -> int:
    """Return the number of this task's partition; 0 outside of Spark tasks."""
    if "pyspark" not in sys.modules:
        return 0
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.partitionId() if context is not None else 0


def _load(address: InboxAddress) -> tuple[int, int]:
    try:
        with secure_channel.connect(f"unix:{address.path}", address.secret) as channel:
            channel.send({"op": "load"})
            counters, _ = channel.receive(10)
            return int(counters["depth"]), int(counters["feeders"])
    except (OSError, EOFError, KeyError, TypeError, ValueError):
        return 1 << 30, 1 << 30


def _ancestors() -> Iterator[int]:
    pid = os.getppid()
    for _ in range(64):
        if pid <= 1:
            return
        yield pid
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return
        pid = int(stat.rpartition(")")[2].split()[1])
