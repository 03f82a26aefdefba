"""The node's end of feeding: who feeds, what waits, what was taken, and how it all ends."""

from __future__ import annotations

import contextlib
import queue as plain
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tfd_notebook.errors import UnknownName
from tfd_notebook.net import secure_channel
from tfd_notebook.spark.feed import decode
from tfd_notebook.spark.feed.chunks import Chunk, Packed

#: Seconds between two messages about how far the node is.
_TICK = 1.0
#: Seconds for a feeder's first message, and until one that was refused has left.
_IDLE_SECONDS = 10.0
#: Chunks on the way or waiting, over all feeders, and those that each may have at least.
_CAPACITY = 8
_FEWEST = 2


class Inbox:
    """Takes rows from the tasks of this node's executor, for the user's function in this process.

    It listens in `directory`, at a socket that only this user can reach, and to those only who know
    the secret. A ``with`` statement closes it.

    Parameters
    ----------
    directory : Path or str
        Made if it is missing, for this user only.
    secret : bytes
        The cluster's.
    role : str
    index : int
        Who this node is, for the errors of those who feed it. Default ``worker`` 0.
    queues : sequence of str
        Names of queues. Default ``("input", "output", "error")``.

    Attributes
    ----------
    address : str
        The path of the socket.
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
        decode.keep()
        self.node = f"{role}:{index}"
        self._lock = threading.Condition()
        self._queues = {name: Queue(name) for name in queues}
        self._facades: dict[str, Facade] = {}
        self._values: dict[str, Any] = {}
        self._sources: set[Source] = set()
        self._state = "running"
        self._last: dict[str, Any] = {}
        self._taken_at: float | None = None
        self._results = 0
        directory = Path(directory)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"feed-{index}.sock"
        self._closing = threading.Event()
        self._server = secure_channel.serve(secret, self._serve, path=path)
        self.address = str(path)
        self._ticker = threading.Thread(target=self._tick, name="tfd-feed-ticks", daemon=True)
        self._ticker.start()

    # What whoever runs the node calls.

    def numbers(self) -> dict[str, Any]:
        """Return rows, results and what waits, by the names of `NodeRow`, and some more."""
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
        """Let the user's function see the end, after what is there now and who is still feeding."""
        with self._lock:
            for queue in self._queues.values():
                queue.ended = True
            self._lock.notify_all()

    def terminate(self, reason: str = "the function called terminate()") -> None:
        """Drop what waits; who feeds now or later is told to stop."""
        self._end("terminating", {"op": "stop", "reason": reason})

    def finish(self, reason: str = "the function returned") -> None:
        """Tell everybody who feeds that the user's function takes no more rows."""
        self._end("finished", {"op": "stop", "reason": reason})

    def fail(self, error: dict[str, Any]) -> None:
        """Raise `NodeFailed` in everybody who feeds, now or later.

        Parameters
        ----------
        error : dict
            ``what``: the error in a sentence; ``traceback``: text.
        """
        said = {name: str(error.get(name, "")) for name in ("what", "traceback")}
        self._end("failed", {"op": "failed", **said})

    def close(self) -> None:
        """Listen no more. Who still feeds gets an error."""
        self._closing.set()
        with self._lock:
            if self._state == "running":
                self._state = "closed"
                self._last = {"op": "closed"}
            self._lock.notify_all()
        self._server.close()
        self._ticker.join(5)

    def __enter__(self) -> Inbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What programs written for TensorFlowOnSpark call on `ctx.mgr`.

    def get(self, key: str) -> Any:
        """Return a value that was set; ``"state"`` is ``running``, ``terminating`` or another."""
        return self._state if key == "state" else self._values.get(key)

    def set(self, key: str, value: Any) -> None:
        """Keep a value; ``set("state", "terminating")`` terminates."""
        if key == "state" and value == "terminating":
            self.terminate()
        else:
            self._values[key] = value

    def get_queue(self, name: str) -> Facade:
        """Return a queue of plain values, within this process.

        Rows that are fed are not in it: they are in a `DataFeed`.
        """
        self._queue(name)
        return self._facades.setdefault(name, Facade())

    # What a DataFeed calls.

    def take(self, name: str) -> tuple[Source, Chunk | None] | None:
        """Wait for the next chunk.

        Returns
        -------
        tuple of Source and Chunk, or None
            None for the chunk: the end of that source's partition. None alone: nothing more comes.
        """
        with self._lock:
            queue = self._queue(name)
            while True:
                if self._state != "running":
                    return None
                item = queue.pop()
                if item is not None:
                    return item
                if self._is_through(queue):
                    return None
                # A signal's handler runs between two waits.
                self._lock.wait(1.0)

    def arrived(self, name: str, timeout: float) -> bool:
        """Whether `take` has something to return, or will within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._lock:
            queue = self._queue(name)
            while self._state == "running" and queue.is_empty:
                if self._is_through(queue):
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._lock.wait(left)
        return True

    def _is_through(self, queue: Queue) -> bool:
        """Whether nothing will come any more."""
        return queue.ended and not any(source.queue is queue for source in self._sources)

    def took(self, source: Source, rows: int) -> None:
        """Count rows that the user's function got."""
        with self._lock:
            source.queue.taken += rows
            self._taken_at = time.monotonic()

    def consumed(self, source: Source) -> None:
        """Tell the feeder that a chunk was consumed, which lets it send another."""
        self._tell(source, {"op": "ack"})

    def give(self, source: Source, packed: Packed) -> None:
        """Send results to who fed the rows."""
        with self._lock:
            self._results += packed.count
            self._taken_at = time.monotonic()
        self._tell(source, {"op": "results", **packed.header}, packed.body)

    # Threads of feeders.

    def _serve(self, channel: secure_channel.AuthenticatedChannel) -> None:
        said, _ = channel.receive(_IDLE_SECONDS)
        if said.get("op") == "load":
            numbers = self.numbers()
            channel.send({"depth": numbers["queue_depth"], "feeders": numbers["feeders"]})
            return
        if said.get("op") == "end_of_feed":
            self.end_of_feed()
            channel.send({"op": "ended"})
            return
        source = self._welcome(channel, said)
        if source is None:
            # Until who connected has read it and gone.
            with contextlib.suppress(TimeoutError):
                channel.receive(_IDLE_SECONDS)
            return
        try:
            while True:
                header, body = channel.receive(allocate=decode.aligned)
                chunk = Chunk(header, body) if header.get("op") == "rows" else None
                with self._lock:
                    if self._state == "running":
                        source.queue.put(source, chunk)
                        self._lock.notify_all()
        finally:
            with self._lock:
                source.gone = True
                self._sources.discard(source)
                source.queue.forget(source)
                self._lock.notify_all()

    def _welcome(
        self, channel: secure_channel.AuthenticatedChannel, said: dict[str, Any]
    ) -> Source | None:
        with self._lock:
            queue = self._queues.get(str(said.get("queue")))
            answer = self._last
            if self._state == "running":
                if queue is None:
                    answer = {"op": "unknown", "queues": sorted(self._queues)}
                elif queue.ended:
                    answer = {"op": "stop", "reason": "the end of the feed was announced"}
            if not answer:
                assert queue is not None
                source = Source(queue, channel, bool(said.get("infer")))
                self._sources.add(source)
                window = max(_FEWEST, _CAPACITY // len(self._sources))
                answer = {"op": "go", "window": window}
            else:
                source = None
        channel.send(answer)
        return source

    def _end(self, state: str, message: dict[str, Any]) -> None:
        with self._lock:
            if self._state not in ("running", "terminating"):
                return
            self._state, self._last = state, message
            for queue in self._queues.values():
                queue.clear()
            sources = list(self._sources)
            self._lock.notify_all()
        for source in sources:
            self._tell(source, message)

    def _tell(
        self, source: Source, message: dict[str, Any], body: Iterable[memoryview] = ()
    ) -> None:
        try:
            source.channel.send(message, list(body))
        except OSError:
            # Its own thread notices as well.
            source.gone = True

    def _tick(self) -> None:
        while not self._closing.wait(_TICK):
            with self._lock:
                if self._state != "running":
                    continue
                now = time.monotonic()
                age = None if self._taken_at is None else now - self._taken_at
                told = [
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
            for source, message in told:
                self._tell(source, message)

    def _queue(self, name: str) -> Queue:
        try:
            return self._queues[name]
        except KeyError:
            raise UnknownName(
                f"{self.node} has no queue {name!r}",
                fix=f"queues here: {', '.join(self._queues)}",
            ) from None


class Source:
    """A task of Spark that feeds one partition.

    Parameters
    ----------
    queue : Queue
    channel : Channel
    infer : bool
        It waits for a result for each row.

    Attributes
    ----------
    gone : bool
        It has disconnected.
    """

    def __init__(
        self, queue: Queue, channel: secure_channel.AuthenticatedChannel, infer: bool
    ) -> None:
        self.queue = queue
        self.channel = channel
        self.infer = infer
        self.gone = False


class Queue:
    """Chunks that wait for the user's function. Its owner's lock guards it.

    Rows for training are taken in the order in which their chunks came. Of partitions whose results
    are awaited one is taken after the other, so that a batch never holds rows of two of them.

    Attributes
    ----------
    depth : int
        Chunks that wait.
    taken : int
        Rows that the user's function got.
    ended : bool
        Nobody will feed any more.
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
        """Whether there is nothing that `pop` could return now."""
        if self._current is not None:
            return not self._lanes[self._current]
        return not self._common and not any(self._lanes.values())

    def put(self, source: Source, chunk: Chunk | None) -> None:
        """Append a chunk, or the end of the source's partition."""
        self.depth += chunk is not None
        if source.infer:
            self._lanes.setdefault(source, deque()).append((source, chunk))
        else:
            self._common.append((source, chunk))

    def pop(self) -> tuple[Source, Chunk | None] | None:
        """Return the next one, or None where there is none yet."""
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

    def forget(self, source: Source) -> None:
        """Drop what a source that is gone has sent, and nobody has taken."""
        lane = self._lanes.pop(source, ())
        kept = deque(item for item in self._common if item[0] is not source)
        dropped = [*lane, *(item for item in self._common if item[0] is source)]
        self.depth -= sum(chunk is not None for _, chunk in dropped)
        self._common = kept
        if self._current is source:
            self._current = None

    def clear(self) -> None:
        """Drop everything."""
        self._common.clear()
        self._lanes.clear()
        self._current = None
        self.depth = 0


class Facade(plain.Queue[Any]):
    """A queue of plain values between the threads of a node."""
