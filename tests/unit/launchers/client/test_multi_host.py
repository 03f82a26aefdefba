"""Requests to task hosts: one declaration, passed on by name, to the hosts that they concern."""

from __future__ import annotations

import base64
import dataclasses
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tfd_notebook.errors import LaunchError, PortInUse, StateError
from tfd_notebook.launchers.base import ForwardingTaskHost, TaskHost, forwarded
from tfd_notebook.launchers.client.agent_client import AgentClient
from tfd_notebook.launchers.client.agent_host import AgentTaskHost
from tfd_notebook.launchers.client.detached import DetachedClusterRecord
from tfd_notebook.launchers.client.multi_host import TaskHostGroup
from tfd_notebook.model.events import TaskChanged
from tfd_notebook.model.spec import Role, TaskSpec, TaskState
from tfd_notebook.net import agent_protocol

WORKERS = [TaskSpec(Role.WORKER, index, host="localhost") for index in range(2)]


class Recorder(ForwardingTaskHost):
    """A host that records the requests that it gets."""

    is_local = True

    def __init__(self, label: str) -> None:
        self.host, self.label, self.directory = label, label, "/d"
        self.requests: list[tuple[str, float, dict[str, Any]]] = []

    def request(self, method: str, timeout: float, **arguments: Any) -> Any:
        self.requests.append((method, timeout, arguments))
        if method == "reserve_ports":
            return {task.name: f"{self.host}:4000" for task in arguments["tasks"]}
        if method == "open_ranks":
            return dict.fromkeys(arguments["tasks"], f"{self.host}:4000")
        return {f"{self.host}:0": {}} if method == "inspect" else None

    @forwarded
    def probe(self, port: int) -> None:
        """Send a request without a timeout."""

    @forwarded
    def release_ports(self, tasks: Sequence[str], *, timeout: float = 30.0) -> None:
        """Release the ports of tasks."""

    def close(self, timeout: float = 10.0) -> None: ...
    def detach(self) -> None: ...


def test_each_request_is_forwarded_with_its_defaults() -> None:
    methods = {
        name: method
        for name, method in vars(TaskHost).items()
        if inspect.isfunction(method) and "timeout" in inspect.signature(method).parameters
    }
    for name in methods.keys() - {"close"}:
        assert inspect.signature(getattr(Recorder, name)) == inspect.signature(methods[name])
    host = Recorder("one")
    host.logs("worker:0", 10)
    host.install(b"blob", ["t"], removed=[])
    host.kill("worker:0", timeout=5.0)
    host.probe(7)
    assert host.requests == [
        ("logs", 30.0, {"task": "worker:0", "size": 10, "offset": None}),
        ("install", 60.0, {"functions": b"blob", "tokens": ["t"], "removed": []}),
        ("kill", 5.0, {"task": "worker:0"}),
        ("probe", 30.0, {"port": 7}),
    ]
    with pytest.raises(TypeError, match="missing a required argument: 'size'"):
        host.logs("worker:0")  # type: ignore[call-arg]


def test_functions_are_sent_over_the_channel_of_the_agent() -> None:
    """The channel of an agent on this host is a pipe; see `test_only_tasks_listen`."""
    sent: list[dict[str, Any]] = []

    def write(data: bytes) -> None:
        frame = agent_protocol.decode(data)
        assert frame is not None
        sent.append(frame.body)
        reply = {"reply_to": sent[-1]["id"], "ok": True, "value": None}
        client.handle_line(agent_protocol.encode(reply, 1))

    client = AgentClient("a", "127.0.0.1", write)
    AgentTaskHost(client, "c").install(b"pickled", ["token"], removed=[])
    (message,) = sent
    assert message["method"] == "install"
    assert base64.b64decode(message["arguments"]["functions"]) == b"pickled"


def test_requests_reach_the_hosts_that_they_concern(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path))
    hosts: Any = [Recorder("one"), Recorder("two")]
    record = DetachedClusterRecord("c", "ssh", {}, ["a", "b"])
    group = TaskHostGroup(hosts, lambda role, index: index, None, record)
    addresses = group.reserve_ports([*WORKERS, TaskSpec(Role.DISPATCHER, 1, host="localhost")])
    assert addresses["worker:1"] == "two:4000"
    for host in hosts:
        host.requests.clear()
    group.start({"worker:0": {"x": 1}, "worker:1": {"x": 2}})
    group.stop(["worker:1"])
    group.kill("worker:1")
    group.journal({})
    group.describe({"task_manager": {"counts": {"worker": 2}}})
    assert group.inspect() == {"one:0": {}, "two:0": {}}
    described = ("describe", 30.0, {"description": {"task_manager": {"counts": {"worker": 2}}}})
    assert hosts[0].requests == [
        ("start", 30.0, {"tasks": {"worker:0": {"x": 1}}}),
        ("journal", 30.0, {"sizes": {}}),
        described,
        ("inspect", 30.0, {}),
    ]
    assert hosts[1].requests == [
        ("start", 30.0, {"tasks": {"worker:1": {"x": 2}}}),
        ("stop", 30.0, {"tasks": ["worker:1"]}),
        ("kill", 30.0, {"task": "worker:1"}),
        described,
        ("inspect", 30.0, {}),
    ]


def test_host_that_joins_gets_the_functions_and_its_tasks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path))
    one, two, three = Recorder("one"), Recorder("two"), Recorder("three")
    record = DetachedClusterRecord("c", "slurm", {}, ["a"])
    hosts: Any = [one]
    late: Any = two, three
    group = TaskHostGroup(hosts, lambda role, index: index % 3, None, record)
    ended: list[str] = []
    group.on_end = lambda: ended.append("late hosts")
    group.expect(["no node is free", "no quota"])
    names = [f"data_worker:{index}" for index in range(4)]
    assert [group.why_waiting(name) for name in names] == [
        *(None, "no node is free", "no quota", None)
    ]
    group.install(b"old", ["a"], [])
    group.install(b"new", ["b"], ["a"])
    group.stop(names[1:])
    with pytest.raises(StateError, match=r"data_worker:1 has not started.*no node is free"):
        group.kill("data_worker:1")
    assert group.logs("data_worker:1", 10) == ("", 0)
    assert group.join(late[0])
    assert group.why_waiting("data_worker:1") is None
    assert group.why_waiting("data_worker:2") == "no quota"
    group.kill("data_worker:1")
    assert two.requests == [
        ("install", 60.0, {"functions": b"new", "tokens": ("b",), "removed": []}),
        ("kill", 30.0, {"task": "data_worker:1"}),
    ]
    assert one.requests[-1] == ("stop", 30.0, {"tasks": ["data_worker:3"]})
    group.close()
    assert ended == ["late hosts"]
    assert not group.join(late[1])


class WithStacks(Recorder):
    """A host whose reply to a request for stacks names a task of another host, too."""

    reason = ""

    def request(self, method: str, timeout: float, **arguments: Any) -> Any:
        super().request(method, timeout, **arguments)
        if self.reason:
            raise LaunchError(self.reason)
        return {name: {"note": self.label, "threads": []} for name in ("worker:0", "worker:1")}


def test_lost_host_hides_no_stacks_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path))
    hosts: Any = [WithStacks("one"), WithStacks("two")]
    record = DetachedClusterRecord("c", "ssh", {}, ["a", "b"])
    group = TaskHostGroup(hosts, lambda role, index: index, None, record)
    replies = group.stacks(["worker:0", "worker:1"])
    assert {name: reply["note"] for name, reply in replies.items()} == {
        "worker:0": "one",
        "worker:1": "two",
    }
    hosts[1].reason = "the connection to two is lost"
    assert group.stacks(["worker:0", "worker:1"]) == {
        "worker:0": {"note": "one", "threads": []},
        "worker:1": {"note": "the connection to two is lost", "threads": []},
    }
    assert group.stacks(["worker:0"]).keys() == {"worker:0"}


class OpenedTunnels:
    """Tunnels that record the host to which each port leads."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, int]] = []

    def open(self, port: int, host: int) -> None:
        self.opened.append((port, host))

    def close(self, port: int) -> None: ...
    def end(self) -> None: ...


def test_host_cannot_claim_the_port_of_another_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path))
    hosts: Any = [Recorder("one"), Recorder("two")]  # both report port 4000
    record = DetachedClusterRecord("c", "ssh", {}, ["a", "b"])
    tunnels = OpenedTunnels()
    group = TaskHostGroup(hosts, lambda role, index: index, tunnels, record)
    group.reserve_ports(WORKERS[:1])
    with pytest.raises(PortInUse, match=r"two: .*port 4000: its tunnel leads to one"):
        group.reserve_ports(WORKERS[1:])
    with pytest.raises(PortInUse, match=r"two: .*port 4000: its tunnel leads to one"):
        group.open_ranks(["worker:1"])
    event = TaskChanged("worker:1", TaskState.READY, "", "localhost:4000")
    attached = TaskHostGroup(hosts, lambda role, index: index, tunnels, record)
    attached.adopt([dataclasses.replace(event, task="worker:0")])
    with pytest.raises(PortInUse, match=r"two: .*port 4000: its tunnel leads to one"):
        attached.adopt([event])
    assert set(tunnels.opened) == {(4000, 0)}


@pytest.mark.parametrize(
    ("connected", "stated", "advised"),
    [("10.253.9.2", "10.253.9.2", True), ("10.253.9.2", "0.0.0.0", False), ("", "10.9.9.9", False)],
)
def test_only_a_known_address_is_advised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, connected: str, stated: str, advised: bool
) -> None:
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path))

    class Peer(Recorder):
        allowed_networks, peer_address = ("10.253.9.1",), connected

        def check_reachability(self, addresses: Any, *, timeout: float) -> Any:
            return dict.fromkeys(addresses, ("no connection", stated))

    hosts: Any = [Peer("one"), Peer("two")]
    record = DetachedClusterRecord("c", "ssh", {}, ["a", "b"])
    group = TaskHostGroup(hosts, lambda role, index: index, None, record)
    addresses = group.reserve_ports(WORKERS[:1])
    (sentence,) = group.unreachable_peers(addresses)
    assert f"allows 10.253.9.1/32 but not {stated}" in sentence
    assert sentence.endswith(f"; set allow={stated!r}") is advised
    assert sentence.endswith("an address that the host states, not verified") is not advised
