"""Node's end of a feed: receives rows, queues them, and reports progress to the tasks."""

from __future__ import annotations

import contextlib
import queue as queue_module
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tfd_notebook.errors import UnknownName
from tfd_notebook.model.handle import Handle
from tfd_notebook.net import secure_channel
from tfd_notebook.spark.feed import decode
from tfd_notebook.spark.feed.chunks import Chunk, Packed

#: Interval in seconds between progress messages to the feeding tasks.
_REPORT_SECONDS = 1.0
#: Timeout in seconds for a task's first message, and for a rejected task to disconnect.
_MESSAGE_SECONDS = 10.0
#: Maximum number of chunks in flight or waiting, over all tasks, and minimum window of a task.
_CAPACITY = 8
_MIN_WINDOW = 2


class Inbox(Handle):
    """A server that receives rows from the tasks of this node's executor.

    It listens in `directory` on a Unix socket that only this user can access. It only accepts
    clients that have the secret. The user's function runs in the same process. A ``with`` statement
    closes the inbox.

    Parameters
    ----------
    directory : Path or str
        Created with access for this user only, if it is missing.
    secret : bytes
        The secret of the cluster.
    role : str
    index : int
        Role and index of this node, for error messages of the tasks. Default ``worker`` 0.
    queues : sequence of str
        Names of queues. Default ``("input", "output", "error")``.

    Attributes
    ----------
    address : str
        Path of the socket.
    """

    def __init__(
        self,
        directory: Path | str,
        secret: bytes,
        *,
        role: str = "worker",
        index: int = 0,
        queues: Sequence[str] = ("input", "output", "error"),
    ) -> None:
        decode.reuse_large_buffers()
        self.node = f"{role}:{index}"
        self._lock = threading.Condition()
        self._queues = {name: Queue(name) for name in queues}
        self._value_queues: dict[str, ValueQueue] = {}
        self._values: dict[str, Any] = {}
        self._sources: set[Source] = set()
        self._state = "running"
        self._final_message: dict[str, Any] = {}
        self._taken_at: float | None = None
        self._results = 0
        directory = Path(directory)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"feed-{index}.sock"
        self._closing = threading.Event()
        self._server = secure_channel.serve(secret, self._serve, path=path)
        self.address = str(path)
        self._reporter = threading.Thread(
            target=self._report_progress, name="tfd-inbox-progress", daemon=True
        )
        self._reporter.start()

    # Called by the node's process

    def numbers(self) -> dict[str, Any]:
        """Return counters of rows, results and waiting chunks; most keys are those of `NodeRow`."""
        with self._lock:
            age = None if self._taken_at is None else time.monotonic() - self._taken_at
            return {
                "rows": sum(queue.taken for queue in self._queues.values()),
                "results": self._results,
                "queue_depth": sum(queue.depth for queue in self._queues.values()),
                "queue_capacity": _CAPACITY,
                "batch_age_s": age,
                "feeders": len(self._sources),
                "state": self._state,
                "queues": {
                    name: {"depth": queue.depth, "rows": queue.taken, "ended": queue.ended}
                    for name, queue in self._queues.items()
                },
            }

    def end_of_feed(self) -> None:
        """End the feed for the user's function, after waiting rows and tasks that still feed."""
        with self._lock:
            for queue in self._queues.values():
                queue.ended = True
            self._lock.notify_all()

    def terminate(self, reason: str = "the function called terminate()") -> None:
        """Drop waiting rows, and stop tasks that feed now or later."""
        self._stop_feeders("terminating", {"op": "stop", "reason": reason})

    def finish(self, reason: str = "the function returned") -> None:
        """Stop tasks that feed now or later, because the user's function consumes no more rows."""
        self._stop_feeders("finished", {"op": "stop", "reason": reason})

    def fail(self, error: dict[str, Any]) -> None:
        """Raise `NodeFailed` in all tasks that feed now or later.

        Parameters
        ----------
        error : dict
            ``what`` is the error in one sentence, and ``traceback`` a text.
        """
        fields = {name: str(error.get(name, "")) for name in ("what", "traceback")}
        self._stop_feeders("failed", {"op": "failed", **fields})

    def close(self) -> None:
        """Close the server. Tasks that still feed get an error."""
        self._closing.set()
        with self._lock:
            if self._state == "running":
                self._state = "closed"
                self._final_message = {"op": "closed"}
            self._lock.notify_all()
        self._server.close()
        self._reporter.join(5)

    def __enter__(self) -> Inbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Called on `ctx.mgr` by programs written for TensorFlowOnSpark

    def get(self, key: str) -> Any:
        """Return a stored value; ``"state"`` is ``running``, ``terminating`` or another state."""
        return self._state if key == "state" else self._values.get(key)

    def set(self, key: str, value: Any) -> None:
        """Store a value; ``set("state", "terminating")`` calls `terminate`."""
        if key == "state" and value == "terminating":
            self.terminate()
        else:
            self._values[key] = value

    def get_queue(self, name: str) -> ValueQueue:
        """Return a queue of Python values, for use within this process.

        It does not contain rows, which `DataFeed` reads.
        """
        self._queue(name)
        return self._value_queues.setdefault(name, ValueQueue())

    # Called by DataFeed

    def next_chunk(self, name: str) -> tuple[Source, Chunk | None] | None:
        """Wait for the next chunk.

        Returns
        -------
        tuple of Source and Chunk, or None
            The chunk is None at the end of the source's partition. Returns None after the last one.
        """
        with self._lock:
            queue = self._queue(name)
            while True:
                if self._state != "running":
                    return None
                item = queue.pop()
                if item is not None:
                    return item
                if self._is_exhausted(queue):
                    return None
                # Use a timeout: Python runs signal handlers between two waits.
                self._lock.wait(1.0)

    def wait_for_chunk(self, name: str, timeout: float) -> bool:
        """Return True if `next_chunk` has an item, now or within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._lock:
            queue = self._queue(name)
            while self._state == "running" and queue.is_empty:
                if self._is_exhausted(queue):
                    break
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._lock.wait(remaining)
        return True

    def _is_exhausted(self, queue: Queue) -> bool:
        """Return True if no more rows can arrive."""
        return queue.ended and not any(source.queue is queue for source in self._sources)

    def count_rows(self, source: Source, rows: int) -> None:
        """Count rows that the user's function received."""
        with self._lock:
            source.queue.taken += rows
            self._taken_at = time.monotonic()

    def acknowledge(self, source: Source) -> None:
        """Acknowledge a consumed chunk, so that the task can send another."""
        self._send(source, {"op": "ack"})

    def send_results(self, source: Source, packed: Packed) -> None:
        """Send results to the task that fed the rows."""
        with self._lock:
            self._results += packed.count
            self._taken_at = time.monotonic()
        self._send(source, {"op": "results", **packed.header}, packed.body)

    # Threads of the channels

    def _serve(self, channel: secure_channel.AuthenticatedChannel) -> None:
        request, _ = channel.receive(_MESSAGE_SECONDS)
        if request.get("op") == "load":
            numbers = self.numbers()
            channel.send({"depth": numbers["queue_depth"], "feeders": numbers["feeders"]})
            return
        if request.get("op") == "end_of_feed":
            self.end_of_feed()
            channel.send({"op": "ended"})
            return
        source = self._register(channel, request)
        if source is None:
            # Wait until the task has read the answer and closed the channel.
            with contextlib.suppress(TimeoutError):
                channel.receive(_MESSAGE_SECONDS)
            return
        try:
            while True:
                header, body = channel.receive(allocate=decode.aligned_buffer)
                chunk = Chunk(header, body) if header.get("op") == "rows" else None
                with self._lock:
                    if self._state == "running":
                        source.queue.put(source, chunk)
                        self._lock.notify_all()
        finally:
            with self._lock:
                source.disconnected = True
                self._sources.discard(source)
                source.queue.drop_source(source)
                self._lock.notify_all()

    def _register(
        self, channel: secure_channel.AuthenticatedChannel, request: dict[str, Any]
    ) -> Source | None:
        with self._lock:
            queue = self._queues.get(str(request.get("queue")))
            answer = self._final_message
            if self._state == "running":
                if queue is None:
                    answer = {"op": "unknown", "queues": sorted(self._queues)}
                elif queue.ended:
                    answer = {"op": "stop", "reason": "the end of the feed was announced"}
            if not answer:
                assert queue is not None
                source = Source(queue, channel, bool(request.get("infer")))
                self._sources.add(source)
                window = max(_MIN_WINDOW, _CAPACITY // len(self._sources))
                answer = {"op": "go", "window": window}
            else:
                source = None
        channel.send(answer)
        return source

    def _stop_feeders(self, state: str, message: dict[str, Any]) -> None:
        with self._lock:
            if self._state not in ("running", "terminating"):
                return
            self._state, self._final_message = state, message
            for queue in self._queues.values():
                queue.clear()
            sources = list(self._sources)
            self._lock.notify_all()
        for source in sources:
            self._send(source, message)

    def _send(
        self, source: Source, message: dict[str, Any], body: Iterable[memoryview] = ()
    ) -> None:
        try:
            source.channel.send(message, list(body))
        except OSError:
            # The channel's own thread detects the error, too.
            source.disconnected = True

    def _report_progress(self) -> None:
        while not self._closing.wait(_REPORT_SECONDS):
            with self._lock:
                if self._state != "running":
                    continue
                now = time.monotonic()
                age = None if self._taken_at is None else now - self._taken_at
                reports = [
                    (
                        source,
                        {
                            "op": "tick",
                            "taken": source.queue.taken + self._results,
                            "depth": source.queue.depth,
                            "age": age,
                        },
                    )
                    for source in self._sources
                ]
            for source, message in reports:
                self._send(source, message)

    def _queue(self, name: str) -> Queue:
        try:
            return self._queues[name]
        except KeyError:
            raise UnknownName(
                f"{self.node} has no queue {name!r}",
                fix=f"use one of the queues {', '.join(self._queues)}",
            ) from None


class Source:
    """A Spark task that feeds one partition.

    Parameters
    ----------
    queue : Queue
    channel : AuthenticatedChannel
    infer : bool
        Whether the task waits for one result per row.

    Attributes
    ----------
    disconnected : bool
        True after the task has disconnected.
    ended : bool
        True after the function has read all rows of the partition.
    """

    def __init__(
        self, queue: Queue, channel: secure_channel.AuthenticatedChannel, infer: bool
    ) -> None:
        self.queue = queue
        self.channel = channel
        self.infer = infer
        self.disconnected = False
        self.ended = False


class Queue:
    """Chunks that wait for the user's function. The owner's lock protects it.

    Rows for training are returned in the order of arrival. Partitions for inference are returned
    one after another, so that a batch never contains rows of two of them.

    Attributes
    ----------
    depth : int
        Number of waiting chunks.
    taken : int
        Number of rows that the user's function received.
    ended : bool
        True after the end of the feed was announced.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.taken = 0
        self.ended = False
        self.depth = 0
        self._common: deque[tuple[Source, Chunk | None]] = deque()
        self._lanes: dict[Source, deque[tuple[Source, Chunk | None]]] = {}
        self._current: Source | None = None

    @property
    def is_empty(self) -> bool:
        """True if `pop` would return None."""
        if self._current is not None:
            return not self._lanes[self._current]
        return not self._common and not any(self._lanes.values())

    def put(self, source: Source, chunk: Chunk | None) -> None:
        """Append a chunk, or None for the end of the source's partition."""
        self.depth += chunk is not None
        if source.infer:
            self._lanes.setdefault(source, deque()).append((source, chunk))
        else:
            self._common.append((source, chunk))

    def pop(self) -> tuple[Source, Chunk | None] | None:
        """Remove and return the next item, or return None if there is none."""
        item = None
        if self._current is None:
            if self._common:
                item = self._common.popleft()
            else:
                self._current = next(iter(self._lanes), None)
        if item is None and self._current is not None:
            lane = self._lanes[self._current]
            if lane:
                item = lane.popleft()
                if item[1] is None:
                    del self._lanes[self._current]
                    self._current = None
        if item is not None:
            self.depth -= item[1] is not None
        return item

    def drop_source(self, source: Source) -> None:
        """Drop the waiting chunks of a disconnected source."""
        lane = self._lanes.pop(source, ())
        kept = deque(item for item in self._common if item[0] is not source)
        dropped = [*lane, *(item for item in self._common if item[0] is source)]
        self.depth -= sum(chunk is not None for _, chunk in dropped)
        self._common = kept
        if self._current is source:
            self._current = None

    def clear(self) -> None:
        """Drop all chunks."""
        self._common.clear()
        self._lanes.clear()
        self._current = None
        self.depth = 0


class ValueQueue(queue_module.Queue[Any]):
    """A queue of Python values between the threads of a node."""
