"""The thread that serves all sessions: it handles their messages one by one, and never waits."""

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
    from tfd_notebook.cluster.cluster import Cluster
    from tfd_notebook.model.snapshot import Snapshot

log = logging.getLogger("tfd_notebook")

#: Seconds between two messages about the same thing.
TICK_SECONDS = 0.1
#: Seconds between two messages that only show that this kernel works, where nobody looks.
ALIVE_SECONDS = 60.0
#: Clusters that have ended and are still shown.
MOST_ENDED = 8
#: Set to 0, no message is sent to keep a kernel that works from being culled.
KEEP_ALIVE = "TFD_KEEP_ALIVE"

_lock = threading.Lock()
_hub: Hub | None = None
#: Those of the hub, and of one before it that may not have ended yet.
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def join(session: Session) -> None:
    """Have the hub of this process serve `session`; starts its threads."""
    global _hub
    with _lock:
        if _hub is None:
            _hub = Hub()
        _hub.put(("join", session, None))


def leave(session: Session) -> None:
    """Have it no longer served; the threads end with the last one."""
    global _hub
    with _lock:
        if _hub is not None:
            _hub.put(("leave", session, None))


def await_end(seconds: float) -> None:
    """Wait until the threads of the hub have ended, if nobody is served any more."""
    if threading.current_thread() not in _threads:
        for thread in tuple(_threads):
            thread.join(seconds)


def receive(session: Session, message: Any) -> None:
    """Take a message from a browser, from any thread; returns at once."""
    hub = _hub
    if hub is not None and is_message(message):
        hub.put(("message", session, message))


def _after_fork() -> None:
    global _hub, _lock
    _hub, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class Hub:
    """Serves all sessions in one thread, which never waits; commands that may wait are queued."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[str, Session, Any]] = queue.SimpleQueue()
        self._commands = CommandQueues(lambda work: _start("tfd-bus-command", work))
        self._sessions: list[Session] = []
        self._told_alive = time.monotonic()
        self._progress: dict[str, Any] = {}
        self._living: dict[str, Cluster] = {}
        self._ended: dict[str, Snapshot] = {}
        self._controllers = ControllerPresence()
        self._complained = ""
        self.put = self._inbox.put
        _start("tfd-bus", self._work)

    def _work(self) -> None:
        tick = time.monotonic()
        served = False
        while self._sessions or not served:
            ticks = self._controllers.any or any(session.watched for session in self._sessions)
            wait = max(tick - time.monotonic(), 0.0) if ticks else ALIVE_SECONDS
            with contextlib.suppress(queue.Empty):
                self._handle(*self._inbox.get(timeout=wait))
                served = True
            if time.monotonic() >= tick:
                self._attempt(self._tick)
                tick = time.monotonic() + TICK_SECONDS
        self._controllers.renew({}, [])
        self._end()

    def _end(self) -> None:
        global _hub
        with _lock:
            if _hub is self:
                _hub = None
        while True:  # somebody may have joined meanwhile
            try:
                what, session, _ = self._inbox.get(block=False)
            except queue.Empty:
                return
            if what == "join":
                join(session)

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
        living = registry.running_clusters()
        for session in self._sessions:
            session.forget_silent()
        self._controllers.renew(living, [session.controlled_clusters for session in self._sessions])
        if any(session.watched for session in self._sessions):
            self._told_alive = time.monotonic()
            self._push(living)
        elif time.monotonic() - self._told_alive >= ALIVE_SECONDS:
            self._told_alive = time.monotonic()
            self._keep_alive(living)

    def _push(self, living: Mapping[str, Cluster]) -> None:
        ended = {name: one for name, one in self._living.items() if living.get(name) is not one}
        self._ended.update(commands.snapshots(ended))
        self._living = dict(living)
        self._ended = {name: seen for name, seen in self._ended.items() if name not in living}
        for name in list(self._ended)[:-MOST_ENDED]:
            del self._ended[name]
        seen = commands.snapshots(living)
        for session in self._sessions:
            if not session.watched:
                continue
            if session.everything:
                session.push(living, {**seen, **self._ended})
            elif (own := session.cluster) is None:
                session.push({}, {})
            elif living.get(own.name) is own:
                session.push({own.name: own}, {n: one for n, one in seen.items() if n == own.name})
            else:
                session.push({}, commands.snapshots({own.name: own}))

    def _keep_alive(self, living: Mapping[str, Cluster]) -> None:
        progress = {name: _progress(seen) for name, seen in commands.snapshots(living).items()}
        if progress != self._progress and os.environ.get(KEEP_ALIVE, "1") != "0":
            for session in self._sessions[:1]:
                session.keep_alive()
        self._progress = progress

    def _attempt(self, work: Any) -> None:
        try:
            work()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            if said != self._complained:  # ten times a second is too often
                self._complained = said
                log.warning("what panels and widgets show may be out of date: %s", said)


def _start(name: str, work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, name=name, daemon=True)
    _threads.add(thread)
    thread.start()


def _progress(seen: Snapshot) -> Any:
    """Return what grows while work is done."""
    coordinator = seen.coordinator
    return (
        sum(row.elements for row in seen.streams),
        sum(node.rows for node in seen.spark.nodes) if seen.spark is not None else 0,
        None if coordinator is None else dict(coordinator.counts),
    )
