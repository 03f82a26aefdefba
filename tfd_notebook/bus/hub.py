"""The thread that serves all sessions. It handles messages in order and never blocks."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tfd_notebook.bus.command_queues import CommandQueues
from tfd_notebook.bus.session import ControllerPresence, Session, is_message
from tfd_notebook.cluster import commands, registry

if TYPE_CHECKING:
    from tfd_notebook.cluster.view import ClusterView
    from tfd_notebook.model.snapshot import Snapshot

log = logging.getLogger("tfd_notebook")

#: Minimum seconds between two updates of a session.
TICK_SECONDS = 0.1
#: Seconds between two checks without a change. They find silent clients, and update the elapsed
#: times and falling rates of coordinators. All other changes wake the thread.
CHECK_SECONDS = 1.0
#: Seconds between two keep-alive messages while no client reads.
ALIVE_SECONDS = 60.0
#: Maximum number of ended clusters that are still shown.
MAX_ENDED = 8
#: Environment variable. 0 disables the messages that keep a busy kernel from being culled.
KEEP_ALIVE = "TFD_KEEP_ALIVE"

_lock = threading.Lock()
_hub: Hub | None = None
#: The threads of the hub, and of a previous hub that may still be ending.
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def join(session: Session) -> None:
    """Add `session` to the hub of this process, and start the hub if needed."""
    global _hub
    with _lock:
        if _hub is None:
            _hub = Hub()
        _hub.put(("join", session, None))


def leave(session: Session) -> None:
    """Remove `session` from the hub. The threads end with the last session."""
    with _lock:
        if _hub is not None:
            _hub.put(("leave", session, None))


def await_end(seconds: float) -> None:
    """Wait until the threads of the hub have ended. They end if no session remains."""
    if threading.current_thread() not in _threads:
        for thread in tuple(_threads):
            thread.join(seconds)


def receive(session: Session, message: Any) -> None:
    """Queue a message from a browser. Any thread may call this; it returns at once."""
    hub = _hub
    if hub is not None and is_message(message):
        hub.put(("message", session, message))


def _after_fork() -> None:
    global _hub, _lock
    _hub, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class Hub:
    """Server of all sessions in one thread. Commands that may block run in other threads."""

    def __init__(self) -> None:
        #: Messages for a session. None wakes the thread.
        self._inbox: queue.SimpleQueue[tuple[str, Session, Any] | None] = queue.SimpleQueue()
        self._commands = CommandQueues(lambda work: _start("tfd-bus-command", work))
        self._sessions: list[Session] = []
        self._last_sent = time.monotonic()
        self._progress: dict[str, Any] = {}
        self._running: dict[str, ClusterView] = {}
        self._ended: dict[str, Snapshot] = {}
        self._controllers = ControllerPresence()
        self._last_error = ""
        self._watched = False
        #: True if a message or a change is not published yet.
        self._changed = False
        self._last_tick = float("-inf")
        self.put = self._inbox.put
        registry.on_change(self.notify_change)
        _start("tfd-bus", self._work)

    def notify_change(self) -> None:
        """Publish the changed clusters soon, if a client watches. Any thread may call this."""
        if self._watched and not self._changed:
            self._changed = True
            self.put(None)

    def _work(self) -> None:
        served = False
        while self._sessions or not served:
            self._watched = self._controllers.any or any(s.watched for s in self._sessions)
            with contextlib.suppress(queue.Empty):
                item = self._inbox.get(timeout=self._wait_seconds())
                self._changed = True
                if item is not None:
                    self._handle(*item)
                    served = True
            if time.monotonic() >= self._last_tick + TICK_SECONDS:
                self._changed = False  # before the clusters are read
                self._attempt(self._tick)
                self._last_tick = time.monotonic()
        registry.remove_on_change(self.notify_change)
        self._controllers.renew({}, [])
        self._end()

    def _wait_seconds(self) -> float:
        if not self._watched:
            return ALIVE_SECONDS
        interval = TICK_SECONDS if self._changed else CHECK_SECONDS
        return max(self._last_tick + interval - time.monotonic(), 0.0)

    def _end(self) -> None:
        global _hub
        with _lock:
            if _hub is self:
                _hub = None
        while True:  # a session may have joined after the loop in `_work` ended
            try:
                item = self._inbox.get(block=False)
            except queue.Empty:
                return
            if item is not None and item[0] == "join":
                join(item[1])

    def _handle(self, what: str, session: Session, message: Any) -> None:
        if what == "join":
            self._sessions.append(session)
            self._attempt(session.greet)
        elif what == "leave":
            if session in self._sessions:
                self._sessions.remove(session)
                session.farewell()
        else:
            session.note_message(message["client"])
            self._serve(session, message)

    def _serve(self, session: Session, message: Any) -> None:
        if message["kind"] != "command":
            self._attempt(lambda: session.handle_message(message))
            return
        queue_name = commands.queue_of(message)
        if queue_name is None:
            self._attempt(lambda: session.execute_command(message))
        else:
            work = functools.partial(
                self._attempt, functools.partial(session.execute_command, message)
            )
            self._attempt(lambda: self._commands.put(queue_name, work))

    def _tick(self) -> None:
        running = registry.running_clusters()
        for session in self._sessions:
            session.remove_silent()
        self._controllers.renew(
            running, [session.controlled_clusters for session in self._sessions]
        )
        if any(session.watched for session in self._sessions):
            self._last_sent = time.monotonic()
            self._push(running)
        elif time.monotonic() - self._last_sent >= ALIVE_SECONDS:
            self._last_sent = time.monotonic()
            self._keep_alive(running)

    def _push(self, running: Mapping[str, ClusterView]) -> None:
        ended = {
            name: cluster
            for name, cluster in self._running.items()
            if running.get(name) is not cluster
        }
        self._ended.update(commands.snapshots(ended))
        self._running = dict(running)
        self._ended = {
            name: snapshot for name, snapshot in self._ended.items() if name not in running
        }
        for name in list(self._ended)[:-MAX_ENDED]:
            del self._ended[name]
        snapshots = commands.snapshots(running)
        for session in self._sessions:
            if not session.watched:
                continue
            cluster = session.cluster
            if session.everything:
                session.push(running, {**snapshots, **self._ended})
            elif cluster is None:
                session.push({}, {})
            elif running.get(cluster.name) is cluster:
                name = cluster.name
                session.push({name: cluster}, {n: s for n, s in snapshots.items() if n == name})
            else:
                session.push({}, commands.snapshots({cluster.name: cluster}))

    def _keep_alive(self, running: Mapping[str, ClusterView]) -> None:
        progress = {
            name: _progress(snapshot) for name, snapshot in commands.snapshots(running).items()
        }
        if progress != self._progress and os.environ.get(KEEP_ALIVE, "1") != "0":
            for session in self._sessions[:1]:
                session.keep_alive()
        self._progress = progress

    def _attempt(self, work: Any) -> None:
        try:
            work()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            if message != self._last_error:  # it may be repeated ten times a second
                self._last_error = message
                log.warning("updating panels and widgets failed: %s", message)


def _start(name: str, work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, name=name, daemon=True)
    _threads.add(thread)
    thread.start()


def _progress(snapshot: Snapshot) -> Any:
    """Return counters that increase while work is done."""
    coordinator = snapshot.coordinator
    return (
        sum(row.elements for row in snapshot.streams),
        sum(node.rows for node in snapshot.spark.nodes) if snapshot.spark is not None else 0,
        None if coordinator is None else dict(coordinator.counts),
    )
