"""The task's end of feeding: a partition goes to a node, and its results come back."""

from __future__ import annotations

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

#: Bytes on the way, beyond which one chunk at a time is sent.
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class FeedResult:
    """What became of a partition.

    Parameters
    ----------
    rows, chunks, bytes : int
        What was sent.
    stopped : str, optional
        Why the node took no more; None where it took all.
    node : str
        Which node; empty for a partition without rows.
    """

    rows: int = 0
    chunks: int = 0
    bytes: int = 0
    stopped: str | None = None
    node: str = ""


def feed_partition(
    rows: Iterable[Any],
    places: Where,
    qname: str = "input",
    feed_timeout: float = 600.0,
) -> FeedResult:
    """Feed `rows` to the node of this executor, and wait until it has consumed them.

    Returns at once where the node wants no more: its function called ``terminate()``, or returned.

    Parameters
    ----------
    rows : iterable
        The partition.
    places : Place, sequence of Place or callable
        The node, or all of them, of which `choose` takes one, or what returns them.
    qname : str
        Name of the queue. Default ``"input"``.
    feed_timeout : float
        Seconds *without any progress* of the node. Default 600.

    Raises
    ------
    NodeFailed
        The user's function raised; with the traceback from there.
    NodeLost
        The node's process is gone.
    FeedTimeout
    UsageError
        A row cannot be sent; or a queue of that name does not exist.
    """
    return feed_chunks(packed(rows), places, qname, feed_timeout)


def feed_chunks(
    chunks: Iterator[Packed], places: Where, qname: str, feed_timeout: float
) -> FeedResult:
    """Do what `feed_partition` does, with rows that are packed."""
    first = next(chunks, None)
    if first is None:
        return FeedResult()
    with _Feeder(places, qname, feed_timeout, infer=False) as feeder:
        for chunk in chain([first], chunks):
            if not feeder.send(chunk):
                break
        else:
            feeder.end()
            feeder.wait_consumed()
        return feeder.fed()


def infer_partition(
    rows: Iterable[Any],
    places: Where,
    qname: str = "input",
    feed_timeout: float = 600.0,
) -> Iterator[Any]:
    """Feed `rows` to the node of this executor, and yield a result for each, in their order.

    Parameters
    ----------
    rows, places, qname, feed_timeout
        As for `feed_partition`.

    Raises
    ------
    NodeFailed, NodeLost, FeedTimeout, UsageError
        As for `feed_partition`.
    SparkError
        The node's function ended and did not give all results.
    """
    for chunk in infer_chunks(packed(rows), places, qname, feed_timeout):
        yield from chunk.rows(0, chunk.count)


def infer_chunks(
    chunks: Iterator[Packed], places: Where, qname: str, feed_timeout: float
) -> Iterator[Chunk]:
    """Do what `infer_partition` does, with rows that are packed, and yield results in chunks."""
    first = next(chunks, None)
    if first is None:
        return
    with _Feeder(places, qname, feed_timeout, infer=True) as feeder:
        for chunk in chain([first], chunks):
            if not feeder.send(chunk):
                break
            yield from feeder.results()
        else:
            feeder.end()
        yield from feeder.remaining_results()


class _Feeder:
    """A connection to an inbox: this thread sends, one of its own receives."""

    def __init__(self, places: Where, qname: str, feed_timeout: float, *, infer: bool) -> None:
        decode.keep()
        if callable(places):
            places = places()
        self._place = place = places if isinstance(places, InboxAddress) else choose(places)
        self._qname, self._limit = qname, feed_timeout
        self._changed = threading.Condition()
        self._rows = self._chunks = self._bytes = 0
        self._waiting: deque[int] = deque()  # sizes of the chunks that were not consumed yet
        self._arrived: deque[Chunk] = deque()
        self._given = 0
        self._error: TfdError | None = None
        self._stopped: str | None = None
        self._progress = time.monotonic()
        self._seen: dict[str, Any] = {}
        try:
            self._channel = secure_channel.connect(f"unix:{place.path}", place.secret)
        except (OSError, EOFError) as error:
            raise self._lost(f"its inbox does not answer ({error})") from error
        try:
            self._channel.send({"op": "feed", "queue": qname, "infer": infer})
            said, _ = self._channel.receive(max(30.0, min(feed_timeout, 600.0)))
        except (OSError, EOFError) as error:
            self._channel.close()
            raise self._lost(f"it closed the connection ({error})") from error
        self._window = int(said.get("window", 0))
        if said["op"] == "unknown":
            self._channel.close()
            raise UnknownName(
                f"{place.node} has no queue {qname!r}",
                task=place.node,
                fix=f"queues there: {', '.join(said['queues'])}",
            )
        self._hear(said, memoryview(b""))
        self._thread = threading.Thread(target=self._listen, name="tfd-feeder", daemon=True)
        self._thread.start()

    def __enter__(self) -> _Feeder:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._thread.join(10)

    def fed(self) -> FeedResult:
        """Return what became of it."""
        return FeedResult(self._rows, self._chunks, self._bytes, self._stopped, self._place.node)

    def send(self, chunk: Packed) -> bool:
        """Send a chunk as soon as the node grants it; False where the node wants no more."""
        with self._changed:
            self._wait_until(
                lambda: (
                    not self._waiting
                    or (
                        len(self._waiting) < self._window
                        and sum(self._waiting) + chunk.size <= _MOST_BYTES
                    )
                )
            )
            if self._stopped is not None:
                return False
            self._waiting.append(chunk.size)
        try:
            self._channel.send({"op": "rows", **chunk.header}, chunk.body)
        except ValueError as error:
            raise UsageError(
                f"a row is too large to be sent to {self._place.node}: {error}",
                fix="a row may have up to 2 GiB; feed names of files instead",
            ) from error
        except OSError as error:
            return self._after(error)
        self._rows += chunk.count
        self._chunks += 1
        self._bytes += chunk.size
        return True

    def end(self) -> None:
        """Say that this was the partition."""
        try:
            self._channel.send({"op": "end"})
        except OSError as error:
            self._after(error)

    def wait_consumed(self) -> None:
        """Wait until the node has consumed everything, or wants no more."""
        with self._changed:
            self._wait_until(lambda: not self._waiting)

    def results(self) -> Iterator[Chunk]:
        """Yield the results that are there."""
        while self._arrived:
            yield self._arrived.popleft()

    def remaining_results(self) -> Iterator[Chunk]:
        """Yield the results as they come, until there is one for each row."""
        while True:
            yield from self.results()
            with self._changed:
                self._wait_until(lambda: self._arrived or self._given >= self._rows)
                if self._arrived:
                    continue
            if self._given == self._rows and self._stopped is None:
                return
            if self._stopped is not None:
                raise SparkError(
                    f"{self._stopped} when {self._rows - self._given} results of a partition were "
                    f"missing",
                    task=self._place.node,
                    fix="the function has to give a result for each row until should_stop()",
                )
            raise SparkError(
                f"{self._given} results came for the {self._rows} rows of a partition",
                task=self._place.node,
                fix="give exactly one result for each row to batch_results()",
            )

    def _wait_until(self, reached: Any) -> None:
        began = time.monotonic()
        while self._error is None and self._stopped is None and not reached():
            left = max(self._progress, began) + self._limit - time.monotonic()
            if left <= 0:
                raise self._timeout()
            self._changed.wait(min(left, 1.0))
        if self._error is not None:
            raise self._error

    def _after(self, error: OSError) -> bool:
        """Say what it means that the channel broke: the listener knows, or will at once."""
        self._thread.join(10)
        with self._changed:
            if self._stopped is not None:
                return False
            raise self._error or self._lost(f"the connection broke ({error})")

    def _listen(self) -> None:
        try:
            while True:
                said, body = self._channel.receive()
                with self._changed:
                    self._hear(said, body)
                    self._changed.notify_all()
                    if self._error is not None or self._stopped is not None:
                        break
        except (OSError, EOFError) as error:
            with self._changed:
                if self._error is None and self._stopped is None:
                    self._error = self._lost(f"the connection ended ({error})")
                self._changed.notify_all()
        # Whoever is sending is woken.
        self._channel.close()

    def _hear(self, said: dict[str, Any], body: memoryview) -> None:
        op, place = said["op"], self._place
        if op == "ack":
            self._waiting.popleft()
            self._progress = time.monotonic()
        elif op == "results":
            chunk = Chunk(said, body)
            self._arrived.append(chunk)
            self._given += chunk.count
            self._progress = time.monotonic()
        elif op == "tick":
            if said["taken"] != self._seen.get("taken"):
                self._progress = time.monotonic()
            self._seen = said
        elif op == "stop":
            self._stopped = str(said["reason"])
        elif op == "failed":
            text = str(said["traceback"]).rstrip()
            self._error = NodeFailed(
                f"the function of {place.node} on {place.host} raised {said['what']}"
                + (f"\n\n{text}\n" if text else ""),
                task=place.node,
                fix="mend the function and run the cluster again",
            )
        elif op == "closed":
            self._error = self._lost("it is being stopped")

    def _lost(self, why: str) -> NodeLost:
        place = self._place
        return NodeLost(
            f"{place.node} on {place.host} is gone while a partition is fed: {why}",
            task=place.node,
            fix="look at its log, and run the cluster again",
        )

    def _timeout(self) -> FeedTimeout:
        place, seen = self._place, self._seen
        age = seen.get("age")
        batch = "it never took a batch" if age is None else f"its last batch was {age:.0f} s ago"
        if not seen:
            batch = "it does not say how far it is"
        return FeedTimeout(
            f"{place.node} on {place.host} took no rows of the queue {self._qname!r} for "
            f"{self._limit:g} s; {len(self._waiting)} chunks of this partition and "
            f"{seen.get('depth', 'an unknown number')} in its queue wait, {batch}",
            task=place.node,
            fix="see what its function is doing, call terminate() where it needs no more rows, "
            "or raise feed_timeout",
        )


@dataclass(frozen=True)
class InboxAddress:
    """Where the rows for one node go. It travels in the closures of tasks, and nowhere else.

    Parameters
    ----------
    cluster : str
        The cluster's id.
    role : str
    index : int
        The node's index in its role.
    host : str
        Name of the node's host, as `socket.gethostname` gives it there.
    executor : str
        Spark's id of its executor; may be empty.
    jvm : int
        Process id of its executor's JVM on that host; 0 if unknown.
    path : str
        The inbox's address: the path of its socket.
    secret : bytes
        Who does not know it cannot feed.
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
        """The node's name, such as ``worker:0``."""
        return f"{self.role}:{self.index}"


#: Where rows may go: a node, those of which `choose` takes one, or what tells a task of them.
Where: TypeAlias = "InboxAddress | Sequence[InboxAddress] | Callable[[], Sequence[InboxAddress]]"


def choose(places: Sequence[InboxAddress]) -> InboxAddress:
    """Return the node that a task in this process feeds.

    That is the node of its own executor; where that has none, one of this host. Of several, the
    one with the fewest chunks waiting, and tasks that ask at the same time begin with different
    ones. Rows do not leave the host.

    Parameters
    ----------
    places : sequence of Place

    Raises
    ------
    SparkError
        No node of the cluster is on this host.
    """
    host = socket.gethostname()
    here = [place for place in places if place.host == host and os.path.exists(place.path)]
    above = {os.getpid(), *_ancestors()}
    here = [place for place in here if place.jvm in above] or here
    if len(here) > 1:
        first = _partition() % len(here)
        return min([*here[first:], *here[:first]], key=_load)
    if here:
        return here[0]
    nodes = ", ".join(f"{place.node} on {place.host}" for place in places) or "none"
    raise SparkError(
        f"no node of this cluster that takes rows is on the host {host}; there are: {nodes}",
        fix="give the cluster as many nodes as there are executors, or keep other executors away",
    )


def _partition() -> int:
    """Return the number of the partition that this process feeds; 0 outside of Spark's tasks."""
    if "pyspark" not in sys.modules:
        return 0
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.partitionId() if context is not None else 0


def _load(place: InboxAddress) -> tuple[int, int]:
    try:
        with secure_channel.connect(f"unix:{place.path}", place.secret) as channel:
            channel.send({"op": "load"})
            said, _ = channel.receive(10)
            return int(said["depth"]), int(said["feeders"])
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
