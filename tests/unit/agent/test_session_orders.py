"""All orders of events between an agent's sessions and a client, in one thread and virtual time.

The product's `AgentListener`, `Session` and `AgentClient` run on connections that the test moves
line by line. An order is a text with one letter of `EVENTS` per event.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import queue
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests._virtual_time import VirtualTimeLoop
from tfd_notebook import errors
from tfd_notebook.agent import sessions as agent_sessions
from tfd_notebook.agent.sessions import AgentListener, Session
from tfd_notebook.launchers.client import session as client_session
from tfd_notebook.launchers.client.agent_client import AgentClient
from tfd_notebook.model.events import (
    ClusterEnded,
    HostDisconnected,
    HostReconnected,
    LeaseChanged,
    Notice,
    TasksLost,
)
from tfd_notebook.net import agent_protocol, reconnect, unix_socket

GRACE = 600.0
CLUSTER = "training"
MEGABYTE = 1_000_000
#: Number of requests and of events in an order.
MOST = 2
#: The reply to "adopt", which contains the whole state.
ADOPTED = {"description": {}, "directory": "/", "lease": 60.0, "tasks": [], "time_limit_left": None}


def message(method: str, **arguments: Any) -> bytes:
    """Return a message about the session itself, as `AgentSession` sends it."""
    return agent_protocol.encode({"id": 0, "method": method, "arguments": arguments})


def notice(text: str) -> dict[str, Any]:
    """Return the body of an event."""
    return {"cluster": CLUSTER, **Notice("info", text).to_json()}


class Connection(asyncio.Transport):
    """A connection whose lines move when the test moves them.

    Parameters
    ----------
    loop : VirtualTimeLoop
    accept : callable
        The agent's callback for a new connection.

    Attributes
    ----------
    up, down : deque of bytes
        The lines in transit to the agent, and to the client.
    open : bool
        False after the client's end was closed.
    accepted : bool
        False after the agent's end was closed.
    """

    def __init__(self, loop: VirtualTimeLoop, accept: Any) -> None:
        super().__init__()
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()
        self.open = self.accepted = True
        self._loop = loop
        self._reader = asyncio.StreamReader(limit=agent_protocol.LARGEST, loop=loop)
        self._protocol = asyncio.StreamReaderProtocol(self._reader, accept, loop)
        self._protocol.connection_made(self)

    def send(self, data: bytes) -> None:
        if not self.open:
            raise BrokenPipeError
        self.up.append(data)

    def feed(self, data: bytes, settle: bool = True) -> None:
        """Pass data to the agent, and run the agent unless more data arrives at once."""
        if self.accepted:
            self._reader.feed_data(data)
        if settle:
            self._loop.settle()

    def cut(self, seen_by_agent: bool) -> None:
        """Break the connection. The agent receives half of a line at most, or all lines late."""
        self.open = False
        self.down.clear()
        if seen_by_agent:
            lines, self.up = self.up, deque()
            if lines:
                self.feed(lines[0][: len(lines[0]) // 2])
            self.close()
            self._loop.settle()

    # The agent's end

    def write(self, data: Any) -> None:
        if self.accepted and self.open:
            self.down.append(data)

    def close(self) -> None:
        if self.accepted:
            self.accepted = False
            self._loop.call_soon(self._protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return not self.accepted

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.down))


class Agent:
    """An agent's listener, and requests that wait until the test completes them.

    Parameters
    ----------
    loop : VirtualTimeLoop
    repeatable : container of int
        The requests that are executed again if their reply is lost. Default: none.
    """

    def __init__(self, loop: VirtualTimeLoop, repeatable: Container[int] = ()) -> None:
        self.loop = loop
        self.repeatable = repeatable
        self.sessions: dict[str, Session] = {}
        self.executed: Counter[int] = Counter()
        self.has_cluster = True
        #: The sessions that requested the whole state.
        self.adopted: list[Session] = []
        self.executing: deque[asyncio.Future[None]] = deque()
        self.connections: list[Connection] = []
        listener = AgentListener(Path(), self._answer, self.sessions, loop.time)
        self._accept = loop.run_until_complete(listener.open()) or ACCEPTING.pop()

    @property
    def session(self) -> Session:
        return self.sessions["session"]

    async def _answer(self, session: Session, body: dict[str, Any]) -> None:
        if body["method"] == "adopt":
            self.adopted.append(session)
            adopted = {"reply_to": body["id"], "ok": True, "value": ADOPTED}
            missing = agent_protocol.failure(body["id"], errors.StateError("no such cluster"))
            session.send(adopted if self.has_cluster else missing)
            return
        number = body["arguments"]["number"]
        self.executed[number] += 1
        go_on = self.loop.create_future()
        self.executing.append(go_on)
        await go_on
        reply = {"reply_to": body["id"], "ok": True, "value": number}
        session.send(reply, repeatable=number in self.repeatable)

    def connect(self) -> Connection:
        self.connections.append(Connection(self.loop, self._accept))
        return self.connections[-1]

    def tick(self) -> None:
        """End silent connections and expired sessions, as the agent does regularly."""
        for key, session in list(self.sessions.items()):
            session.drop_silent(reconnect.SILENT_SECONDS)
            if session.has_expired:
                del self.sessions[key]
        self.loop.settle()

    def kept(self) -> tuple[bool, list[int]]:
        """Connect as a client that received nothing; return `full`, and the frames it receives."""
        connection = self.connect()
        connection.feed(message("open_session", session="session", last_seq=0, grace=GRACE))
        connection.close()
        hello, *frames = filter(None, map(agent_protocol.decode, connection.down))
        return hello.body["full"], [frame.seq for frame in frames]

    def close(self) -> None:
        """End all connections and requests, and with them the tasks of the loop."""
        for connection in self.connections:
            connection.close()
        for go_on in self.executing:
            go_on.set_result(None)
        self.loop.settle()


class Pair:
    """A client and its agent. Most methods are events, which may occur in any order.

    An event returns False and changes nothing if it is not possible now.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.client = AgentClient("agent", "host", self._refuse, reconnects=True)
        self.replies: list[Any] = []
        self.published: list[str] = []
        self.received: list[Any] = []
        self.client.listen(CLUSTER, self.received.append)
        self.connection: Connection | None = None
        #: The connections whose end the agent has not detected.
        self.old: list[Connection] = []
        #: Number of the last frame that the client has acknowledged, and of the last received.
        self.acknowledged = self.seq = 0
        self.hellos: list[bool] = []
        self._sessions_opened = 0

    def _refuse(self, data: bytes) -> None:
        raise OSError("not connected")

    # Events

    def request(self) -> bool:
        # `AgentSession` returns its client after the event "hello".
        if not self.client.ready.is_set() or len(self.replies) == MOST:
            return False
        self.replies.append(self.client.submit("free_disk_space", number=len(self.replies)))
        return True

    def deliver_up(self) -> bool:
        """Deliver the next line to the agent."""
        return self._deliver_up(self.connection)

    def deliver_up_twice(self) -> bool:
        return self._deliver_up(self.connection, count=2)

    def deliver_late(self) -> bool:
        """Deliver the next line of the oldest connection that the client has closed."""
        return self._deliver_up(self._late)

    def deliver_both(self) -> bool:
        """Deliver a line of the new connection, and at once one of the oldest."""
        late = self._late
        if late is None or not self._deliver_up(self.connection, settle=False):
            return False
        return self._deliver_up(late)

    @property
    def _late(self) -> Connection | None:
        waiting = (connection for connection in self.old if connection.up and connection.accepted)
        return next(waiting, None)

    def _deliver_up(
        self, connection: Connection | None, count: int = 1, settle: bool = True
    ) -> bool:
        if connection is None or not connection.up:
            return False
        line = connection.up.popleft()
        frame = agent_protocol.decode(line.lstrip(b"\n"))
        if connection.accepted and frame is not None:
            arguments = frame.body["arguments"]
            self._sessions_opened += "last_seq" in arguments
            seq = arguments.get("last_seq", arguments.get("seq", 0))
            self.acknowledged = max(self.acknowledged, seq)
        for _ in range(count):
            connection.feed(line, settle)
        return True

    def answer(self) -> bool:
        """Complete the oldest request that is being executed."""
        if not self.agent.executing:
            return False
        self.agent.executing.popleft().set_result(None)
        self.agent.loop.settle()
        return True

    def publish(self) -> bool:
        if not self.agent.sessions or len(self.published) == MOST:
            return False
        self.published.append(f"event {len(self.published)}")
        self.agent.session.send(notice(self.published[-1]))
        return True

    def deliver_down(self) -> bool:
        """Deliver the next line to the client, or the end of the connection after the last."""
        if self.connection is None:
            return False
        if not self.connection.down:
            return not self.connection.accepted and self.cut()
        self._handle(self.connection.down.popleft())
        return True

    def deliver_reply_twice(self) -> bool:
        if self.connection is None or b"reply_to" not in b"".join(list(self.connection.down)[:1]):
            return False
        self.client.handle_line(self.connection.down[0])
        return self.deliver_down()

    def _handle(self, line: bytes) -> None:
        frame = agent_protocol.decode(line)
        assert frame is not None
        if frame.body.get("event") == "hello":
            self.hellos.append(frame.body["full"])
        elif frame.seq:
            # The reply to a repeatable request is not sent again.
            has_gaps = bool(self.agent.repeatable) or False in self.hellos
            assert frame.seq == self.seq + 1 or has_gaps
            self.seq = frame.seq
        self.client.handle_line(line)

    def ping(self) -> bool:
        """Acknowledge the frames that have arrived."""
        if self.connection is None or b'"ping"' in b"".join(self.connection.up):
            return False
        self.connection.send(message("ping", seq=self.client.seq))
        return True

    def cut(self, seen_by_agent: bool = True) -> bool:
        if self.connection is None:
            return False
        self.connection.cut(seen_by_agent)
        if not seen_by_agent:
            self.old.append(self.connection)
        self.connection = None
        return True

    def cut_unseen(self) -> bool:
        """Break the connection at the client's end. The agent still receives what was sent."""
        return self.cut(seen_by_agent=False)

    def connect(self) -> bool:
        if self.connection is not None:
            return False
        self.connection = self.agent.connect()
        last_seq, last_request = self.client.seq, self.client.last_request
        arguments = {"last_seq": last_seq, "last_request": last_request, "grace": GRACE}
        self.connection.send(message("open_session", session="session", **arguments))
        self.client.resume(self.connection.send)
        return True

    def run(self, order: str) -> Pair:
        """Run the events of an order, all of which are possible."""
        for letter in order:
            assert EVENTS[letter](self), f"{letter!r} is not possible in {order!r}"
            self.check()
        return self

    # Promises

    @property
    def notices(self) -> list[str]:
        return [event.what for event in self.received if isinstance(event, Notice)]

    def check(self) -> None:
        """Check that nothing was executed twice, lost or received in another order."""
        for number, count in self.agent.executed.items():
            assert count <= (self._sessions_opened if number in self.agent.repeatable else 1)
        assert self.notices == self.published[: len(self.notices)]
        for number, reply in enumerate(self.replies):
            if reply.done():
                assert reply.result() == number
                assert self.agent.executed[number]
        assert all(self.hellos)
        assert self.client.alive

    def finish(self) -> None:
        """Connect if necessary, and continue until nothing remains to be delivered."""
        events = (self.connect, self.deliver_late, self.deliver_up, self.answer, self.deliver_down)
        while sum(event() for event in events):
            pass

    def check_finished(self) -> None:
        """Check that everything has arrived, and that the agent keeps no acknowledged frame."""
        self.check()
        assert all(reply.done() for reply in self.replies)
        assert set(self.agent.executed) == set(range(len(self.replies)))
        assert self.notices == self.published
        assert not self.client.last_request
        full, kept = self.agent.kept()
        assert full == (not self.acknowledged or not self.seq)
        if not self.agent.repeatable:
            assert kept == list(range(self.acknowledged + 1, self.seq + 1))


class LimitedPair(Pair):
    """A pair whose agent keeps too few frames for some orders."""

    def check(self) -> None:
        """Check that nothing was executed or received twice, and what the client lacks."""
        assert all(count == 1 for count in self.agent.executed.values())
        left = iter(self.published)
        assert all(text in left for text in self.notices)
        for number, reply in enumerate(self.replies):
            if reply.done() and reply.exception():
                assert self.agent.executed[number]
                with pytest.raises(errors.LaunchError, match="no longer available"):
                    reply.result()
            elif reply.done():
                assert reply.result() == number
        assert not any(isinstance(event, ClusterEnded) for event in self.received)

    def check_finished(self) -> None:
        """Check that the client has everything or requested the whole state."""
        self.check()
        assert all(reply.done() for reply in self.replies)
        adopted = [event for event in self.received if isinstance(event, LeaseChanged)]
        if all(self.hellos):
            assert self.notices == self.published
            assert not adopted
            assert not any(reply.exception() for reply in self.replies)
        else:
            assert adopted


EVENTS: dict[str, Callable[[Any], bool]] = {
    "r": Pair.request,
    "u": Pair.deliver_up,
    "U": Pair.deliver_up_twice,
    "l": Pair.deliver_late,
    "b": Pair.deliver_both,
    "x": Pair.answer,
    "e": Pair.publish,
    "d": Pair.deliver_down,
    "D": Pair.deliver_reply_twice,
    "p": Pair.ping,
    "c": Pair.cut,
    "h": Pair.cut_unseen,
    "o": Pair.connect,
}
#: The orders that precede the tested ones.
STARTS = {
    "no session": "",
    "session not confirmed": "ou",
    "no request": "oud",
    "request not delivered": "oudr",
    "request lost": "oudrc",
    "request repeated": "oudrco",
    "request executing": "oudru",
    "request executing while disconnected": "oudruc",
    "request executing and repeated": "oudrucou",
    "reply not delivered": "oudrux",
    "reply lost": "oudruxc",
    "reply and event lost": "oudrucxe",
    "reply and event repeated": "oudrucxeou",
    "reply not acknowledged": "oudruxd",
    "reply acknowledged": "oudruxdpu",
    "event not delivered": "oude",
    "event lost": "oudec",
    "request delayed": "oudrh",
    "request delayed and repeated": "oudrhou",
    "request delayed and executing": "oudrhouu",
    "request delayed and answered": "oudrhouuxddpu",
    "two requests delayed and repeated": "oudrrho",
}
every_start = pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
#: Where the listeners of `Agent` leave their callback for connections.
ACCEPTING: list[Any] = []


@pytest.fixture(scope="module")
def loop() -> Iterator[VirtualTimeLoop]:
    with contextlib.closing(VirtualTimeLoop()) as loop:
        yield loop


@pytest.fixture(autouse=True)
def _no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(accept: Any, **_: Any) -> None:
        ACCEPTING.append(accept)

    monkeypatch.setattr(asyncio, "start_unix_server", start)
    monkeypatch.setattr(unix_socket, "listen", lambda path, backlog: None)
    monkeypatch.setattr(unix_socket, "is_this_user", lambda peer: True)


@pytest.fixture
def agent(loop: VirtualTimeLoop) -> Iterator[Agent]:
    with contextlib.closing(Agent(loop)) as agent:
        yield agent


def explore(
    new: Callable[[], Agent], start: str, letters: str, depth: int = 3, kind: type[Pair] = Pair
) -> None:
    """Run all orders of `depth` possible events after `start`, each from its beginning."""

    def visit(pair: Pair | None, order: str) -> None:
        if pair is not None and len(order) == len(start) + depth:
            pair.finish()
            pair.check_finished()
            return
        for letter in letters:
            # An impossible event has changed nothing, so that the pair can try the next.
            if pair is None:
                agents.close()
                pair = kind(agents.enter_context(contextlib.closing(new()))).run(order)
            if EVENTS[letter](pair):
                with noted(order + letter):
                    pair.check()
                    visit(pair, order + letter)
                pair = None

    with contextlib.ExitStack() as agents:  # closes one agent before the next is created
        visit(None, start)


@contextlib.contextmanager
def noted(order: str) -> Iterator[None]:
    """Add the order to the message of a failure."""
    try:
        yield
    except AssertionError as error:
        if "order: " not in str(error):
            raise AssertionError(f"order: {order}, {error}") from error
        raise


@every_start
def test_each_request_is_executed_once_and_each_event_arrives_once(
    loop: VirtualTimeLoop, start: str
) -> None:
    explore(lambda: Agent(loop), start, "ruxedplbcho")


@pytest.mark.parametrize("start", ["oudr", "oudru", "oudrux", "oudruxc", "oudrruuxxc", "oudrhouux"])
@pytest.mark.parametrize("repeatable", [(0,), (1,), (0, 1)], ids=str)
def test_only_repeatable_requests_are_executed_again(
    loop: VirtualTimeLoop, start: str, repeatable: tuple[int, ...]
) -> None:
    explore(lambda: Agent(loop, repeatable), start, "ruxelbco")


@pytest.mark.parametrize("start", ["oudr", "oudru", "oudrux", "oudruxc", "oudruxdpu", "oudrho"])
def test_duplicated_requests_and_replies_are_ignored(loop: VirtualTimeLoop, start: str) -> None:
    explore(lambda: Agent(loop), start, "rUxelDco")


@pytest.mark.parametrize("start", ["oud", "oudec", "oudrc", "oudruxc", "oudrucex", "oudecoud"])
@pytest.mark.parametrize("frames", [0, 1])
def test_client_that_missed_more_than_the_kept_frames_requests_the_whole_state(
    loop: VirtualTimeLoop, monkeypatch: pytest.MonkeyPatch, start: str, frames: int
) -> None:
    monkeypatch.setattr(agent_sessions, "KEPT_BYTES", 350 * frames)
    explore(lambda: Agent(loop), start, "ruxedco", kind=LimitedPair)


@pytest.mark.parametrize("missed", range(6))
@pytest.mark.parametrize("received", range(3))
def test_hello_reports_whether_all_missed_frames_follow(
    loop: VirtualTimeLoop, monkeypatch: pytest.MonkeyPatch, agent: Agent, received: int, missed: int
) -> None:
    monkeypatch.setattr(agent_sessions, "KEPT_BYTES", 3 * 350)
    pair = Pair(agent).run("oud")
    for number in range(received):
        agent.session.send(notice(f"event {number}"))
        pair.deliver_down()
    pair.cut()
    for number in range(received, received + missed):
        agent.session.send(notice(f"event {number}"))
    pair.finish()
    assert pair.hellos == [True, missed <= 3]
    first = max(received, received + missed - 3)
    expected = [*range(received), *range(first, received + missed)]
    assert pair.notices == [f"event {number}" for number in expected]


def test_kept_frames_are_limited_in_size(agent: Agent) -> None:
    Pair(agent).run("oud")
    for _ in range(20):
        agent.session.send(notice("x" * MEGABYTE))
    full, kept = agent.kept()
    assert not full
    assert kept == list(range(6, 21))


def test_measurements_are_dropped_without_a_client_that_fetches_them(agent: Agent) -> None:
    pair = Pair(agent).run("oud")
    measure = {"event": "measure", "cluster": CLUSTER}
    assert pair.connection is not None
    agent.session.send(notice("first"))
    agent.session.send(measure)
    assert pair.connection.down.pop().startswith(b"TFD1 0 ")
    agent.session.send(notice("x" * MEGABYTE))
    agent.session.send(measure)
    assert len(pair.connection.down) == 2
    pair.cut()
    agent.session.send(measure)
    assert agent.kept() == (True, [1, 2])


def test_half_sent_request_does_not_swallow_the_next(loop: VirtualTimeLoop, agent: Agent) -> None:
    pair = Pair(agent).run("oud")
    connection = pair.connection
    assert connection is not None

    def interrupt(data: bytes) -> None:
        connection.feed(data[: len(data) // 2])
        raise KeyboardInterrupt

    pair.client.resume(interrupt)
    with pytest.raises(KeyboardInterrupt):
        pair.client.submit("free_disk_space", number=0)
    pair.client.resume(connection.send)
    pair.request()
    pair.finish()
    pair.check_finished()


@every_start
def test_closed_session_ends_at_once_and_fails_pending_requests(agent: Agent, start: str) -> None:
    pair = Pair(agent).run(start)
    pair.connect()
    connection = pair.connection
    assert connection is not None
    connection.send(message("close_session"))
    while pair.deliver_up():
        pass
    assert not connection.accepted
    assert agent.session.has_expired
    agent.tick()
    assert not agent.sessions
    pair.client.lost("closed")
    for number, reply in enumerate(pair.replies):
        if reply.exception():
            with pytest.raises(errors.AgentLost, match="closed"):
                reply.result()
        else:
            assert reply.result() == number
    while pair.answer():
        pass
    assert all(count == 1 for count in agent.executed.values())


# Time


@pytest.mark.parametrize("start", ["oud", "oudc", "oudcou"])
def test_session_expires_after_its_grace_time_without_a_connection(
    loop: VirtualTimeLoop, start: str
) -> None:
    for order in itertools.product(["o", "c", 1.0, GRACE - 1.0], repeat=4):
        with contextlib.closing(Agent(loop)) as agent:
            pair, since = Pair(agent), None
            for step in (*start, *order):
                if isinstance(step, float):
                    loop.advance(step)
                elif EVENTS[step](pair) and step == "c":
                    since = loop.time()
                elif step == "o":
                    pair.deliver_up()
                    since = None
                expired = since is not None and loop.time() - since >= GRACE
                assert agent.session.has_expired == expired, (start, order)


@every_start
@pytest.mark.parametrize("seconds", [GRACE - 1.0, GRACE])
def test_request_is_not_repeated_after_its_session_has_expired(
    loop: VirtualTimeLoop, agent: Agent, start: str, seconds: float
) -> None:
    pair = Pair(agent).run(start)
    pair.connect()
    pair.deliver_up()
    pair.cut()
    loop.advance(seconds)
    agent.tick()
    assert bool(agent.sessions) == (seconds < GRACE)
    if agent.sessions:
        pair.finish()
        pair.check_finished()
        return
    pending = [reply for reply in pair.replies if not reply.done()]
    pair.finish()
    for reply in pending:
        with pytest.raises(errors.LaunchError, match="no longer available"):
            reply.result()
    assert all(count == 1 for count in agent.executed.values())
    pair.replies.clear()
    pair.request()
    pair.finish()
    assert pair.replies[0].result() == 0


@pytest.mark.parametrize("expirations", [1, 2])
def test_client_adopts_its_clusters_from_each_new_session(
    loop: VirtualTimeLoop, expirations: int
) -> None:
    for order in itertools.product("udco", repeat=4):
        with contextlib.closing(Agent(loop)) as agent:
            pair = Pair(agent).run("oudruxd")
            for events in ("o", *order), ():
                if events or expirations == 2:
                    pair.cut()
                    loop.advance(GRACE)
                    agent.tick()
                for letter in events:
                    EVENTS[letter](pair)
            pair.finish()
            assert agent.adopted[-1] is agent.session, order
            assert isinstance(pair.received[-1], LeaseChanged), order
            assert not any(isinstance(event, ClusterEnded) for event in pair.received)


def test_client_reports_a_cluster_that_ended_with_its_session(
    loop: VirtualTimeLoop, agent: Agent
) -> None:
    pair = Pair(agent).run("oudruxdc")
    loop.advance(GRACE)
    agent.tick()
    agent.has_cluster = False
    pair.finish()
    assert isinstance(pair.received[-1], ClusterEnded)


def test_silent_connection_is_dropped_after_four_missed_heartbeats(loop: VirtualTimeLoop) -> None:
    for order in itertools.product([True, False], repeat=6):
        with contextlib.closing(Agent(loop)) as agent:
            pair = Pair(agent).run("oud")
            received = loop.time()
            assert pair.connection is not None
            for sends in order:
                if sends and pair.connection.accepted:
                    pair.run("pu")
                    received = loop.time()
                loop.advance(reconnect.HEARTBEAT_SECONDS)
                agent.tick()
                silent = loop.time() - received > reconnect.SILENT_SECONDS
                assert pair.connection.accepted != silent, order
            pair.request()
            pair.finish()
            pair.check_finished()


def test_session_on_pipes_is_not_dropped_when_silent(loop: VirtualTimeLoop) -> None:
    session = Session(0.0, loop.time)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await session.serve(reader, writer, lambda session, body: asyncio.sleep(0))

    connection = Connection(loop, serve)
    loop.advance(10 * reconnect.SILENT_SECONDS)
    session.drop_silent(reconnect.SILENT_SECONDS)
    assert connection.accepted
    connection.close()
    loop.settle()
    assert session.has_expired


@pytest.mark.parametrize(("line", "seconds"), [
    (b"", 30.0),
    (b"stray output\n", 0.0),
    (message("ping", seq=0), 0.0),
    (message("open_session", grace=GRACE), 0.0),
    *(
        (message("open_session", session="session", last_seq=0, grace=grace), 0.0)
        for grace in ("long", None, True, -1, math.nan, math.inf, 10**400)
    ),
])  # fmt: skip
def test_connection_that_opens_no_session_is_closed(
    loop: VirtualTimeLoop, agent: Agent, line: bytes, seconds: float
) -> None:
    connection = agent.connect()
    loop.advance(max(seconds - 1.0, 0.0))
    assert connection.accepted
    connection.feed(line)
    loop.advance(min(seconds, 1.0))
    assert not connection.accepted
    assert not agent.sessions


class Channel:
    """A channel of `AgentSession` to an agent that sends nothing but "hello"."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        hello = {"event": "hello", "version": agent_protocol.VERSION, "pid": 1, "full": True}
        self._lines.put(agent_protocol.encode(hello))

    def send(self, data: bytes) -> None:
        self.sent.append(data)
        if b"close_session" in data:
            self.close()

    def lines(self) -> Iterator[bytes]:
        yield from iter(self._lines.get, None)

    def close(self) -> None:
        self._lines.put(None)


@pytest.mark.parametrize("late", [0.0, 1.0])
def test_client_reconnects_until_its_grace_time_has_passed(
    monkeypatch: pytest.MonkeyPatch, late: float
) -> None:
    without_pauses = functools.partial(reconnect.reconnect, first_delay=0.0, max_delay=0.0)
    monkeypatch.setattr(reconnect, "reconnect", without_pauses)
    now = 0.0
    channels = [Channel(), Channel()]
    attempts: Iterator[Any] = iter([channels[0], 1.0, GRACE + late, channels[1]])

    def connect() -> Channel:
        nonlocal now
        attempt = next(attempts)
        if isinstance(attempt, Channel):
            return attempt
        now = attempt
        raise ConnectionRefusedError("refused")

    session = client_session.AgentSession("agent", "host", connect, GRACE, clock=lambda: now)
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    session.client.listen(CLUSTER, events.put)
    reply = session.client.submit("free_disk_space")
    channels[0].close()
    assert events.get(timeout=60) == HostDisconnected("host", GRACE)
    if late:
        assert isinstance(events.get(timeout=60), TasksLost)
        with pytest.raises(errors.AgentLost, match="could not be reached for 600 s"):
            reply.result(60)
    else:
        assert events.get(timeout=60) == HostReconnected("host", GRACE)
        opened, repeated = map(agent_protocol.decode, channels[1].sent)
        assert opened is not None
        assert opened.body["method"] == "open_session"
        assert opened.body["arguments"]["last_request"] == 1
        assert repeated == agent_protocol.decode(channels[0].sent[1])
    session.close()
