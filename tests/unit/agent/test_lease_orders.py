"""Leases, time limits and owners of an agent's clusters in virtual time, in all orders of events.

The agent serves real connections. It runs in this process and starts no other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests._virtual_time import InlineExecutor, VirtualTimeLoop
from tfd_notebook import errors
from tfd_notebook.agent.agent import Agent
from tfd_notebook.agent.cluster import AgentCluster
from tfd_notebook.agent.task_supervisor import TaskSupervisor
from tfd_notebook.model.spec import Role, TaskSpec, TaskState
from tfd_notebook.net import agent_protocol, clock, ports, runtime_dir, unix_socket
from tfd_notebook.net.probe import Probe

LEASE_SECONDS = 10.0
#: The agent ends a cluster this long after its time limit, if the kernel did not.
LIMIT_GRACE_SECONDS = 5.0
SESSION_GRACE_SECONDS = 12.0
#: An agent without an owner waits this long for its first cluster.
FIRST_SECONDS = 60.0
EXPIRED = "its lease expired"
LIMIT_REACHED = "the time limit of 3 s was reached"
#: The listeners of agents. An agent closes its listener by the end of its process.
LISTENERS: list[asyncio.Server] = []


class Client:
    """A client's end of a connection to an agent. It never blocks."""

    def __init__(
        self, loop: VirtualTimeLoop, connection: socket.socket, ids: Iterator[int]
    ) -> None:
        self._loop, self._connection, self._ids = loop, connection, ids
        connection.setblocking(False)
        self._buffer = b""
        self.events: list[dict[str, Any]] = []

    def request(self, method: str, **arguments: Any) -> Any:
        """Send a request and return the value of its reply, or its error code."""
        number = next(self._ids)
        body = {"id": number, "method": method, "arguments": arguments}
        self._connection.sendall(agent_protocol.encode(body, number))
        self._loop.settle()
        for reply in self.receive():
            if reply.get("reply_to") == number:
                return reply["value"] if reply["ok"] else reply["error"]["code"]
        return None

    def receive(self) -> list[dict[str, Any]]:
        """Return the new frames, and add the events of clusters to `events`."""
        try:
            while data := self._connection.recv(1 << 16):
                self._buffer += data
        except BlockingIOError:
            pass
        *lines, self._buffer = self._buffer.split(b"\n")
        frames = [agent_protocol.decode(line + b"\n") for line in lines]
        bodies = [frame.body for frame in frames if frame is not None]
        self.events += [body for body in bodies if "cluster" in body]
        return bodies

    def reasons(self) -> list[str]:
        """Return the reasons of the events by which clusters ended."""
        self.receive()
        return [event["reason"] for event in self.events if event["event"] == "ended"]

    def close(self) -> None:
        """Close the connection, as the end of the process would."""
        self._connection.close()
        self._loop.settle()


class Host:
    """An agent in virtual time. Its owner is the parent of this process, or none."""

    def __init__(self, owned: bool = True) -> None:
        self.loop = VirtualTimeLoop()
        self._closing = contextlib.ExitStack()
        self.loop.set_default_executor(InlineExecutor())
        self.directory, self._lock = runtime_dir.new_agent_dir(uuid.uuid4().hex[:12])
        self._clients: list[Client] = []
        self._ids = itertools.count(1)
        ours, self._agents = socket.socketpair()
        self._closing.callback(self._agents.close)
        self.owner = self._client(ours)
        self.running = self.loop.create_task(self._run(os.getppid() if owned else None))
        self.loop.settle()

    async def _run(self, owner: int | None) -> None:
        self.agent = Agent("a", self.directory, owner, lambda _: self._open_pipes())
        await self.agent.run()

    async def _open_pipes(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(sock=self._agents)
        self._closing.callback(writer.close)
        return reader, writer

    def _client(self, connection: socket.socket) -> Client:
        self._clients.append(Client(self.loop, connection, self._ids))
        return self._clients[-1]

    def connect(self, session: str) -> Client:
        """Open a session over the agent's socket, or connect it again."""
        client = self._client(unix_socket.connect(self.directory / "agent.sock", 60.0))
        grace = SESSION_GRACE_SECONDS
        client.request("open_session", session=session, grace=grace, last_seq=0)
        return client

    @property
    def clusters(self) -> dict[str, AgentCluster]:
        """The clusters of the agent. None remain when it has ended."""
        return {} if self.running.done() else self.agent.clusters

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        """End the agent, and release what it leaves to the end of its process."""
        for cluster in list(self.clusters.values()):
            self.loop.run_until_complete(self.agent.end(cluster, "the test ended"))
        for client in self._clients:
            client.close()
        self.loop.advance(FIRST_SECONDS + 2.0)
        self.running.cancel()
        while LISTENERS:
            LISTENERS.pop().close()
        self._closing.close()
        self.loop.close()
        self._lock.close()


def open_cluster(client: Client, name: str = "c", **policy: Any) -> None:
    client.request(
        "open",
        cluster=name,
        policy=policy,
        environment={},
        path=[],
        directory=os.getcwd(),
        preload=[],
        allow=[],
        description={},
    )


class Clocks:
    """The clock of deadlines and the wall clock, as seen by the loop of a host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop: VirtualTimeLoop | None = None
        self.step = 0.0
        monkeypatch.setattr(clock, "now", lambda: 5000.0 + self._now())
        monkeypatch.setattr(time, "time", lambda: 1e9 + self.step + self._now())

    def _now(self) -> float:
        return 0.0 if self.loop is None else self.loop.time()


@pytest.fixture(autouse=True)
def _listeners_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    start = asyncio.start_unix_server

    async def start_known(*arguments: Any, **options: Any) -> asyncio.Server:
        LISTENERS.append(await start(*arguments, **options))
        return LISTENERS[-1]

    monkeypatch.setattr(asyncio, "start_unix_server", start_known)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


@pytest.fixture
def host(clocks: Clocks) -> Iterator[Host]:
    with Host() as host:
        clocks.loop = host.loop
        yield host


def test_a_task_that_does_not_reply_delays_no_other_task(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[str] = []

    async def probe(task: TaskSupervisor, address: str, kind: object) -> Probe:
        probed.append(task.spec.name)
        if task.spec.name == "worker:0":
            await asyncio.Event().wait()
        return Probe(address, "alive", "server")

    monkeypatch.setattr(TaskSupervisor, "probe_address", probe)
    open_cluster(host.owner)
    cluster = host.clusters["c"]

    async def add() -> None:
        for index in range(2):
            task = TaskSupervisor(cluster, TaskSpec(Role.WORKER, index))
            task.state = TaskState.READY
            cluster.tasks[task.spec.name] = task

    host.loop.run_until_complete(add())
    host.loop.advance(10.0)
    assert probed.count("worker:0") == 1
    assert probed.count("worker:1") == 10


class Expected:
    """The model of an agent with one cluster, which it inspects once a second."""

    def __init__(self, limit: float | None) -> None:
        self.now = 0.0
        self.limit = limit
        #: The time at which the time limit ends the cluster.
        self.limit_at = math.inf
        self.lease: float | None = None
        self.owned = True
        self.reason = ""

    @property
    def open(self) -> bool:
        return not self.reason

    def advance(self, seconds: float) -> None:
        for now in range(int(self.now) + 1, int(self.now + seconds) + 1):
            if self.open and now > self.limit_at:
                self.reason = LIMIT_REACHED
            if self.open and self.lease is not None and now > self.lease:
                self.reason = EXPIRED
        self.now += seconds

    def detach(self, renew: bool = False) -> bool:
        """Return True if the lease was set."""
        if not self.open or (renew and self.lease is None):
            return False
        self.lease = self.now + LEASE_SECONDS
        return True

    def leave(self) -> None:
        self.owned = False
        if self.lease is None:
            self.reason = self.reason or "its agent ended"

    @property
    def runs(self) -> bool:
        """True if the agent runs: while it has an owner or a cluster."""
        return self.owned or self.open


def _lease(host: Host, expected: Expected, renew: bool) -> None:
    reply = host.owner.request("lease", cluster="c", seconds=LEASE_SECONDS, renew=renew)
    assert (reply == LEASE_SECONDS) == expected.detach(renew)


def _adopt(host: Host, expected: Expected, _: Clocks) -> None:
    """Attach from another process, which neither shortens nor extends the lease."""
    reply = host.owner.request("adopt", cluster="c")
    if expected.open:
        left = None if expected.lease is None else expected.lease - expected.now
        assert reply["lease"] == pytest.approx(left)
    else:
        assert not isinstance(reply, dict)


def _leave(host: Host, expected: Expected, _: Clocks) -> None:
    host.owner.close()
    expected.leave()


def _be_ready(host: Host, expected: Expected, _: Clocks) -> None:
    """Report a task as ready. Only the first report starts the time limit."""
    cluster = host.clusters.get("c")
    if cluster is not None:
        task = cluster.tasks["worker:0"]
        task.state = TaskState.READY
        cluster.task_changed(task, ())
        task.state = TaskState.STARTING  # the agent probes only ready tasks
    if expected.limit is not None and expected.limit_at == math.inf:
        expected.limit_at = expected.now + expected.limit + LIMIT_GRACE_SECONDS


def _advance(seconds: float) -> Callable[[Host, Expected, Clocks], None]:
    def advance(host: Host, expected: Expected, _: Clocks) -> None:
        host.loop.advance(seconds)
        expected.advance(seconds)

    return advance


def _step_clock(host: Host, expected: Expected, clocks: Clocks) -> None:
    clocks.step = -clocks.step or 3600.0


Event = Callable[[Host, Expected, Clocks], None]
#: No event occurs at the time of an inspection, which are at whole seconds.
EVENTS: dict[str, Event] = {
    "detach": lambda host, expected, _: _lease(host, expected, renew=False),
    "renew": lambda host, expected, _: _lease(host, expected, renew=True),
    "adopt": _adopt,
    "ready": _be_ready,
    "step": _step_clock,
    "six": _advance(6.3),
    "twelve": _advance(12.3),
    "leave": _leave,
}
#: Without an owner, no request can be sent over its pipes.
NEED_OWNER = ("detach", "renew", "adopt", "leave")


def orders(length: int) -> Iterator[tuple[str, ...]]:
    """Yield the orders of events in which no request follows the end of the owner."""
    for order in itertools.product(EVENTS, repeat=length):
        end = order.index("leave") if "leave" in order else length
        if not any(name in NEED_OWNER for name in order[end + 1 :]):
            yield order


@pytest.mark.parametrize("limit", [None, 3.0])
@pytest.mark.parametrize("first", list(orders(2)), ids="-".join)
def test_clusters_end_as_the_model_predicts(
    clocks: Clocks, first: tuple[str, ...], limit: float | None
) -> None:
    for order in (order for order in orders(3) if order[:2] == first):
        clocks.loop, clocks.step = None, 0.0
        with Host() as host:
            clocks.loop = host.loop
            expected = Expected(limit)
            open_cluster(host.owner, **({} if limit is None else {"time_limit": limit}))
            worker = {"role": "worker", "index": 0, "host": "localhost", "port": 0, "gpus": []}
            host.owner.request("reserve_ports", cluster="c", tasks=[{**worker, "settings": {}}])
            for name in order:
                EVENTS[name](host, expected, clocks)
                assert ("c" in host.clusters) == expected.open, order
                assert host.running.done() == (not expected.runs), order
                if expected.owned:
                    assert host.owner.reasons() == [expected.reason] * (not expected.open), order
            assert host.directory.exists() == expected.runs, order


def test_time_limit_starts_with_the_first_ready_task(host: Host, clocks: Clocks) -> None:
    expected = Expected(limit=3.0)
    open_cluster(host.owner, time_limit=3.0)
    task = {"role": "worker", "index": 0, "host": "localhost", "port": 0}
    host.owner.request("reserve_ports", cluster="c", tasks=[{**task, "settings": {}, "gpus": []}])
    for name in ("twelve", "ready", "six", "ready", "six"):
        assert "c" in host.clusters
        EVENTS[name](host, expected, clocks)
    assert host.owner.reasons() == [LIMIT_REACHED] == [expected.reason]


def test_lease_outlives_the_death_of_the_owner(host: Host) -> None:
    """The end of the parent is a signal, and the agent's pipes may stay open."""
    assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
    open_cluster(host.owner, "kept")
    open_cluster(host.owner, "other")
    host.owner.request("lease", cluster="kept", seconds=LEASE_SECONDS)
    signal.raise_signal(signal.SIGHUP)
    host.loop.settle()
    assert list(host.clusters) == ["kept"]
    host.loop.advance(LEASE_SECONDS + 0.5)
    assert list(host.clusters) == ["kept"]
    host.loop.advance(2.0)
    assert host.running.done()
    assert not host.directory.exists()


def test_agent_without_a_lease_ends_with_its_owner(host: Host) -> None:
    open_cluster(host.owner)
    directory = host.clusters["c"].directory
    signal.raise_signal(signal.SIGHUP)
    host.loop.settle()
    assert host.running.done()
    assert not directory.exists()


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0, -1, True, None])
def test_lease_has_a_finite_time(host: Host, seconds: Any) -> None:
    open_cluster(host.owner)
    assert host.owner.request("lease", cluster="c", seconds=seconds) == errors.UsageError.code
    assert host.owner.request("adopt", cluster="c")["lease"] is None


def test_renewal_needs_a_lease(host: Host) -> None:
    open_cluster(host.owner)
    error = host.owner.request("lease", cluster="c", seconds=LEASE_SECONDS, renew=True)
    assert error == errors.StateError.code
    host.loop.advance(1000.0)
    assert host.owner.request("adopt", cluster="c")["lease"] is None


def test_new_lease_replaces_a_longer_one(host: Host) -> None:
    open_cluster(host.owner)
    for seconds in (3600.0, LEASE_SECONDS):
        host.owner.request("lease", cluster="c", seconds=seconds)
    host.owner.receive()
    leases = [e["seconds_left"] for e in host.owner.events if e["event"] == "lease"]
    assert leases == [3600.0, LEASE_SECONDS]
    host.loop.advance(LEASE_SECONDS + 1.5)
    assert host.owner.reasons() == [EXPIRED]


def test_expired_lease_releases_the_ports(host: Host) -> None:
    open_cluster(host.owner)
    task = {"role": "ps", "index": 0, "host": "localhost", "port": 0, "settings": {}, "gpus": []}
    address = host.owner.request("reserve_ports", cluster="c", tasks=[task])["ps:0"]
    port = int(address.rpartition(":")[2])
    host.owner.request("lease", cluster="c", seconds=LEASE_SECONDS)
    with pytest.raises(errors.PortInUse):
        ports.reserve_port(port)
    host.loop.advance(LEASE_SECONDS + 1.5)
    ports.reserve_port(port).close()


#: The events of a cluster whose kernel is on another host, over a connection that may break.
REMOTE_EVENTS = ("disconnect", "reconnect", "detach", "six", "thirteen")


@pytest.mark.parametrize("first", list(itertools.product(REMOTE_EVENTS, repeat=2)), ids="-".join)
def test_session_ends_after_its_grace_time(clocks: Clocks, first: tuple[str, ...]) -> None:
    for rest in itertools.product(REMOTE_EVENTS, repeat=2):
        order = (*first, *rest)
        clocks.loop = None
        with Host(owned=False) as host:
            clocks.loop = host.loop
            client: Client | None = host.connect("kernel")
            open_cluster(client)
            now, broken_at, lease, reason = 0.0, math.inf, math.inf, ""
            for name in order:
                if name == "disconnect" and client is not None:
                    client.close()
                    client, broken_at = None, now
                elif name == "reconnect" and client is None and not reason:
                    client, broken_at = host.connect("kernel"), math.inf
                elif name == "detach" and client is not None and not reason:
                    client.request("lease", cluster="c", seconds=LEASE_SECONDS)
                    lease = now + LEASE_SECONDS
                elif name in ("six", "thirteen"):
                    seconds = 6.3 if name == "six" else 13.3
                    host.loop.advance(seconds)
                    for second in range(int(now) + 1, int(now + seconds) + 1):
                        if second > lease:
                            reason = reason or EXPIRED
                        elif second - broken_at >= SESSION_GRACE_SECONDS and lease == math.inf:
                            reason = reason or "no reconnection within 12 s"
                    now += seconds
                    if client is not None:
                        client.request("ping", seq=0)
                assert ("c" in host.clusters) == (not reason), order
                if client is not None:
                    assert client.reasons() == [reason] * bool(reason), order


def test_agent_without_an_owner_waits_for_its_first_cluster(clocks: Clocks) -> None:
    with Host(owned=False) as host:
        clocks.loop = host.loop
        host.loop.advance(FIRST_SECONDS)
        assert not host.running.done()
        host.loop.advance(1.5)
        assert host.running.done()
