"""Messages of hosts that name tasks of other hosts, through the connections of a launcher."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tfd_notebook import errors
from tfd_notebook.cluster.gpu_allocation import GpuAllocation
from tfd_notebook.cluster.monitor import Monitor
from tfd_notebook.cluster.task_manager import TaskManager
from tfd_notebook.launchers.base import AdoptedCluster
from tfd_notebook.launchers.client.agent_client import AgentClient
from tfd_notebook.launchers.client.detached import (
    DetachedClusterRecord,
    RemoteDetachedCluster,
    remote_detached_clusters,
)
from tfd_notebook.launchers.client.handshake import HostHandshake
from tfd_notebook.launchers.client.multi_host import TaskHostGroup
from tfd_notebook.launchers.remote import RemoteHost, RemoteLauncher
from tfd_notebook.model.events import Notice
from tfd_notebook.model.spec import ClusterConfig, Role, TaskSpec, pack
from tfd_notebook.net import agent_protocol

CONFIG = ClusterConfig("c", "named", {Role.WORKER: 2})
DESCRIPTION = {
    "config": pack(CONFIG),
    "task_manager": {
        "counts": {"worker": 2},
        "gpu_allocation": GpuAllocation().pack(),
        "static_addresses": [],
        "removed_addresses": [],
        "work_dir": None,
    },
    "used": False,
}
ADDRESSES = {"one": "10.0.0.1", "two": "10.0.0.2"}
#: An address that no host of the cluster has.
CHOSEN = "203.0.113.66:4666"


def task(name: str, address: str) -> dict[str, Any]:
    return {
        **{"event": "task", "cluster": "c", "task": name, "state": "ready", "reason": "ok"},
        **{"address": address, "pid": 5, "restarts": 0, "open_to": "this host", "log": []},
    }


class Peer:
    """The channel to an agent that follows the protocol, and sends what a test adds."""

    def __init__(self) -> None:
        self.tasks: list[dict[str, Any]] = []
        #: Replies that replace those of an agent, by request.
        self.replies: dict[str, Any] = {}
        self.requests: list[str] = []
        #: The port of each task that it reserves.
        self.port = 4000
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._put({"event": "hello", "version": agent_protocol.VERSION, "pid": 1, "full": True})

    def send(self, data: bytes) -> None:
        frame = agent_protocol.decode(data)
        assert frame is not None
        method, arguments = frame.body["method"], frame.body["arguments"]
        if method == "close_session":
            self.close()
        if method in ("open_session", "close_session"):
            return
        self.requests.append(method)
        reply = {"reply_to": frame.body["id"], "ok": True, "value": self._value(method, arguments)}
        if method in self.replies and "error" in self.replies[method]:
            reply = {"reply_to": frame.body["id"], "ok": False, **self.replies[method]}
        self._put(reply)

    def _value(self, method: str, arguments: dict[str, Any]) -> Any:
        if method in self.replies:
            return self.replies[method]
        if method == "reserve_ports":
            named = {f"{t['role']}:{t['index']}": t["host"] for t in arguments["tasks"]}
            addresses = {name: f"{host}:{self.port}" for name, host in named.items()}
            for name, address in addresses.items():
                self._put(task(name, address))
            return addresses
        adopted = {"description": DESCRIPTION, "directory": "/d", "lease": 50.0}
        values = {
            "preload": [],
            "open": "/d",
            "lease": 50.0,
            "logs": ["text", 4],
            "adopt": {**adopted, "tasks": self.tasks, "time_limit_left": None},
        }
        return values.get(method)

    def event(self, body: dict[str, Any], client: AgentClient) -> None:
        """Send an event, and wait until it is handled."""
        self._put(body)
        if client.alive:
            with_reply = client.submit("preload")
            try:
                with_reply.result(60)
            except errors.AgentLost:
                assert not client.alive

    def _put(self, body: dict[str, Any]) -> None:
        self._lines.put(agent_protocol.encode(body, 1))

    def lines(self) -> Iterator[bytes]:
        yield from iter(self._lines.get, None)

    def close(self) -> None:
        self._lines.put(None)


class PeerHost(RemoteHost):
    def __init__(self, label: str) -> None:
        super().__init__(label)
        self.peer = Peer()
        #: The address that the host states behind a proxy; empty without a proxy.
        self.stated = ""

    @property
    def client(self) -> AgentClient:
        return self.session.client

    def connect(self, agent: str, start: bool) -> Peer:
        self.peer_address, self.own_address = ADDRESSES[self.label], "10.0.0.9"
        connection = ""
        if self.stated:
            self.peer_address, connection = "", f"10.0.0.9 1 {self.stated} 2"
        self.handshake = HostHandshake("0", "3", "python", None, self.label, connection)
        return self.peer


class Tunnels:
    """Tunnels that record the position of the host to which each port leads."""

    def __init__(self) -> None:
        self.opened: dict[int, int] = {}

    def open(self, port: int, host: int) -> None:
        self.opened[port] = host

    def close(self, port: int) -> None: ...
    def end(self) -> None: ...


class Named(RemoteLauncher):
    name = "named"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.opened = Tunnels()
        self.one, self.two = PeerHost("one"), PeerHost("two")
        self.two.peer.port = 4001

    def hosts(self) -> list[RemoteHost]:
        return [self.one, self.two]

    def tunnels(self, task_hosts: Sequence[Any], *_: Any) -> Tunnels:
        return self.opened


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def launcher() -> Iterator[Named]:
    launcher = Named()
    yield launcher
    for host in (launcher.one, launcher.two):
        host.close_session()


def attach(launcher: Named) -> tuple[TaskHostGroup, Monitor]:
    """Attach to the cluster as `tfd.attach` does."""
    monitor = Monitor(CONFIG)
    group, adopted = launcher.reconnect("c", ["a", "b"]).adopt(CONFIG, monitor.apply)
    for event in adopted.tasks:
        monitor.apply(event)
    return group, monitor


def detach(launcher: Named) -> RemoteDetachedCluster:
    """Start the cluster, detach from it, and return its record."""
    group, monitor = start(launcher)
    manager = TaskManager(CONFIG, launcher, monitor)
    manager.adopt(group, AdoptedCluster(DESCRIPTION, []))
    group.lease(3600.0)
    group.describe(manager.description())
    manager.detach()
    (listed,) = remote_detached_clusters()
    return listed


def start(launcher: Named) -> tuple[TaskHostGroup, Monitor]:
    """Start the cluster: ``worker:0`` runs on the host "one", and ``worker:1`` on "two"."""
    monitor = Monitor(CONFIG)
    (group,) = launcher.connect(CONFIG, monitor.apply)
    assert isinstance(group, TaskHostGroup)
    group.reserve_ports([TaskSpec(Role.WORKER, index, "") for index in range(2)])
    return group, monitor


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("changed", ["", "port", "address"])
def test_attached_host_cannot_move_its_tasks(secure: bool, changed: str) -> None:
    launcher = Named(secure=secure)
    launcher.one.stated = ADDRESSES["one"]
    record = detach(launcher)
    attached = Named(secure=secure)
    attached.one.stated = "10.0.0.66" if changed == "address" else ADDRESSES["one"]
    address = "localhost" if secure else attached.one.stated
    port = 4666 if changed == "port" else 4000
    attached.one.peer.tasks = [task("worker:0", f"{address}:{port}")]
    connection = dataclasses.replace(record, launcher=attached).connect()
    monitor = Monitor(CONFIG)
    if changed == "port":
        with pytest.raises(errors.AgentLost, match=r"session with one .* invalid task\.address"):
            connection.adopt(CONFIG, monitor.apply)
    elif changed == "address" and not secure:
        expected = "one has the address 10.0.0.66, but worker:0 was started at 10.0.0.1"
        with pytest.raises(errors.StateError, match=expected) as caught:
            connection.adopt(CONFIG, monitor.apply)
        assert "tfd stop c" in (caught.value.fix or "")
        assert "adopt" not in attached.one.peer.requests
    else:
        _, adopted = connection.adopt(CONFIG, monitor.apply)
        assert [event.address for event in adopted.tasks] == [f"{address}:4000"]
    for host in (attached.one, attached.two):
        host.close_session()
    DetachedClusterRecord("c", "named", {}, record.agents).remove()


@pytest.mark.parametrize("leased", [False, True])
@pytest.mark.parametrize("state", ["ready", "restarting", "stopped"])
def test_port_of_a_task_changes_only_after_its_removal(
    launcher: Named, leased: bool, state: str
) -> None:
    group, monitor = start(launcher)
    if leased:
        group.lease(3600.0)
    peer, client = launcher.one.peer, launcher.one.client
    peer.event({**task("worker:0", "10.0.0.1:4000"), "state": state}, client)
    peer.event(task("worker:0", "10.0.0.1:4666"), client)
    row = monitor.snapshot().task("worker:0")
    assert row is not None
    if leased and state == "stopped":  # another process may have removed it and added it again
        assert row.address == "10.0.0.1:4666"
        peer.event(task("worker:0", "10.0.0.1:4667"), client)
    else:
        assert row.address == "10.0.0.1:4000"
    assert "the session with one was ended" in client.why_lost
    assert "task.address" in client.why_lost


@pytest.mark.parametrize("leased", [False, True])
def test_task_that_this_process_adds_again_has_another_port(launcher: Named, leased: bool) -> None:
    group, monitor = start(launcher)
    if leased:
        group.lease(3600.0)
    group.stop(["worker:0"])
    launcher.one.peer.port = 4005
    group.reserve_ports([TaskSpec(Role.WORKER, 0, "")])
    row = monitor.snapshot().task("worker:0")
    assert row is not None
    assert row.address == "10.0.0.1:4005"
    group.stop(["worker:0"])
    group.lease(3600.0)
    launcher.one.peer.event(task("worker:0", "10.0.0.1:4006"), launcher.one.client)
    assert launcher.one.client.alive


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("claimed", ["worker:0", "worker:1"])
def test_attached_host_cannot_claim_a_task_or_an_address(secure: bool, claimed: str) -> None:
    launcher = Named(secure=secure)
    addresses = ["localhost", "localhost"] if secure else list(ADDRESSES.values())
    launcher.one.peer.tasks = [task("worker:0", f"{addresses[0]}:4000")]
    launcher.two.peer.tasks = [task("worker:1", f"{addresses[1]}:4001")]
    group, monitor = attach(launcher)
    assert [row.address for row in monitor.tasks()] == [
        f"{addresses[0]}:4000",
        f"{addresses[1]}:4001",
    ]
    assert launcher.opened.opened == ({4000: 0, 4001: 1} if secure else {})
    group.logs("worker:0", 10)
    assert "logs" in launcher.one.peer.requests
    assert "logs" not in launcher.two.peer.requests
    group.detach()

    launcher = Named(secure=secure)
    launcher.one.peer.tasks = [task("worker:0", f"{addresses[0]}:4000")]
    chosen = "localhost:4666" if secure and claimed == "worker:0" else CHOSEN
    launcher.two.peer.tasks = [task(claimed, chosen)]
    invalid = "task 'worker:0'" if claimed == "worker:0" else f"task.address '{CHOSEN}'"
    with pytest.raises(errors.AgentLost, match=f"session with two .* invalid {invalid}") as caught:
        attach(launcher)
    assert caught.value.fix
    assert launcher.opened.opened == {}
    for host in (launcher.one, launcher.two):
        host.close_session()


CLAIMS: dict[str, dict[str, Any]] = {
    "task": task("worker:1", CHOSEN),
    "measure": {
        **{"event": "measure", "cluster": "c", "task": "worker:1", "cpu_percent": 0.0},
        **{"rss_mb": 1e6, "pss_mb": 1e6, "bytes_sent": 7, "working": None, "late": True},
    },
    "gpus": {
        "event": "gpus",
        "cluster": "c",
        "gpus": [{"index": 0, "name": "X", "memory": 1, "task": "worker:1", "used": 1}],
    },
    "notice": {
        **{"event": "notice", "cluster": "c", "severity": "error", "what": "claimed"},
        **{"task": "worker:1", "fix": "run this"},
    },
}


@pytest.mark.parametrize("leased", [False, True])
@pytest.mark.parametrize("claim", CLAIMS)
def test_events_about_tasks_of_another_host_are_refused(
    launcher: Named, claim: str, leased: bool
) -> None:
    group, monitor = start(launcher)
    if leased:
        group.lease(3600.0)
    for peer, client in ((h.peer, h.client) for h in (launcher.one, launcher.two)):
        peer.event({"event": "lease", "cluster": "c", "seconds_left": 5.0}, client)
    before = monitor.snapshot().task("worker:1")
    assert before is not None
    launcher.one.peer.event(CLAIMS[claim], launcher.one.client)
    after = monitor.snapshot().task("worker:1")
    assert after is not None
    lost = {"state": after.state, "reason": after.reason, "pid": after.pid}
    assert after == dataclasses.replace(before, **lost)
    assert not [
        e for e in monitor.snapshot().events if isinstance(e, Notice) and e.fix == "run this"
    ]
    assert "the session with one was ended" in launcher.one.client.why_lost
    assert "'worker:1'" in launcher.one.client.why_lost
    assert launcher.two.client.alive


def test_events_about_own_tasks_are_applied(launcher: Named) -> None:
    _, monitor = start(launcher)
    for claim in ("measure", "gpus", "notice"):
        launcher.two.peer.event(CLAIMS[claim], launcher.two.client)
    row = monitor.snapshot().task("worker:1")
    assert row is not None
    assert row.rss_mb == 1e6
    assert row.gpu
    assert any(isinstance(event, Notice) and event.fix for event in monitor.snapshot().events)


@pytest.mark.parametrize("host", ["one", "two"])
def test_task_of_another_process_must_be_at_its_host(launcher: Named, host: str) -> None:
    group, monitor = start(launcher)
    group.lease(3600.0)
    sender = launcher.one if host == "one" else launcher.two
    sender.peer.event(task("worker:2", f"{ADDRESSES[host]}:4002"), sender.client)
    added = monitor.snapshot().task("worker:2")
    if host == "one":
        assert added is not None
        assert (added.address, added.host) == ("10.0.0.1:4002", "one")
        launcher.one.peer.event(task("worker:4", CHOSEN), launcher.one.client)
        assert monitor.snapshot().task("worker:4") is None
        assert "task.address" in launcher.one.client.why_lost
    else:
        assert added is None
        assert "invalid task 'worker:2': expected a task of two" in launcher.two.client.why_lost


def test_reply_about_reachability_names_requested_tasks_only(launcher: Named) -> None:
    group, _ = start(launcher)
    addresses = {f"worker:{i}": f"127.0.0.1:{i + 1}" for i in range(2)}
    launcher.one.peer.replies["check_reachability"] = {"worker:99": ["refused", "10.0.0.5"]}
    launcher.two.peer.replies["check_reachability"] = {"worker:0": ["", "10.0.0.2"]}
    sentences = group.unreachable_peers(addresses)
    assert all(sentence.startswith("this kernel cannot reach") for sentence in sentences)
    assert "session with one" in launcher.one.client.why_lost
    assert "'worker:99'" in launcher.one.client.why_lost
    assert launcher.two.client.alive


@pytest.mark.parametrize("method", ["inspect", "stacks", "kill"])
def test_reply_about_a_task_of_another_host_is_refused(launcher: Named, method: str) -> None:
    group, _ = start(launcher)
    error = {"code": "TFD100", "what": "claimed", "task": "worker:1", "fix": "run this"}
    replies: dict[str, Any] = {
        "inspect": {"worker:1": {"stale": ["claimed"], "ops": []}},
        "stacks": {"worker:1": {"note": "claimed", "threads": []}},
        "kill": {"error": error},
    }
    launcher.one.peer.replies[method] = replies[method]
    if method == "inspect":
        launcher.two.peer.replies["inspect"] = {}
        with pytest.raises(errors.AgentLost, match=r"session with one .*'worker:1'"):
            group.inspect()
    elif method == "kill":
        with pytest.raises(errors.AgentLost, match=r"session with one .*error.task 'worker:1'"):
            group.kill("worker:0")
    else:
        stacks = group.stacks(["worker:0"])
        assert "session with one" in stacks["worker:0"]["note"]
    assert not launcher.one.client.alive


def test_error_about_the_requested_task_is_raised(launcher: Named) -> None:
    group, _ = start(launcher)
    error = {"code": "TFD100", "what": "no such process", "task": "worker:0", "fix": None}
    launcher.one.peer.replies["kill"] = {"error": error}
    with pytest.raises(errors.TfdError, match=r"worker:0: .*no such process"):
        group.kill("worker:0")
    rank = {**error, "task": "rank 0"}
    launcher.one.peer.replies["run_rank"] = {"error": rank}
    with pytest.raises(errors.TfdError, match=r"rank 0: .*no such process"):
        group.run_rank("worker:0", b"", {})
    assert launcher.one.client.alive
