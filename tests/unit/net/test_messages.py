"""Validation of messages from other hosts."""

from __future__ import annotations

import base64
import contextlib
import copy
import itertools
import json
import os
import platform
import random
import threading
import tracemalloc
from collections import namedtuple
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests._waiting import until
from tfd_notebook import errors, views
from tfd_notebook._version import VERSION
from tfd_notebook.agent.agent import Agent
from tfd_notebook.agent.cluster import AgentCluster
from tfd_notebook.agent.stunnel import TunnelEnd
from tfd_notebook.bus import PROTOCOL
from tfd_notebook.cluster import attach
from tfd_notebook.cluster.gpu_allocation import GpuAllocation, HostAllocation
from tfd_notebook.cluster.journal_copy import JournalCopy
from tfd_notebook.cluster.monitor import Monitor
from tfd_notebook.cluster.task_manager import TaskManager
from tfd_notebook.launchers.base import AdoptedCluster
from tfd_notebook.launchers.client import tls_tunnels
from tfd_notebook.launchers.client.agent_client import AgentClient
from tfd_notebook.launchers.client.agent_host import AgentTaskHost
from tfd_notebook.launchers.client.handshake import read_handshake
from tfd_notebook.launchers.client.jupyter_server import _message
from tfd_notebook.launchers.client.session import AgentSession
from tfd_notebook.launchers.fake import Fake
from tfd_notebook.model import spec
from tfd_notebook.model.events import TaskChanged, TasksLost, from_json
from tfd_notebook.model.snapshot import AdaptationRow, GpuRow, NodeRow, Snapshot, SparkRow
from tfd_notebook.model.spec import ClusterConfig, Policy, Role, Service
from tfd_notebook.net import agent_protocol, messages, validation
from tfd_notebook.net.host import tensorflow_version
from tfd_notebook.remote_kernel.bus_client import BusClient
from tfd_notebook.spark import roles
from tfd_notebook.spark.driver import messages as spark_messages
from tfd_notebook.spark.driver import node_registry
from tfd_notebook.spark.driver.node_registry import Node

JOURNAL = "tf_data_dispatcher_journal/journal_0"
HOST = "cruncher-7"
PEM = "-----BEGIN CERTIFICATE-----\nQUJD\n-----END CERTIFICATE-----\n"
SIGNING_REQUEST = PEM.replace("CERTIFICATE", "CERTIFICATE REQUEST")
#: Hostile values, which every field of a message must reject or tolerate.
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 70_000, 2**70, 1e400, float("nan"), -0.5, "", "x", "0.0.0.0/0",
    "0.0.0.0", "::", "224.0.0.1", "../../.bashrc", "/etc/passwd", JOURNAL, "localhost:1",
    "a.tfd\n[x]\nexec = /bin/cp", "fe80::1%\n[x]\nexec = /bin/cp", "<img src=x onerror=alert(1)>",
    "\x1b]0;x\x07\u202e", "\ud800", "é" * 70_000, [], {}, [[]], ["x"] * 20_000, {"x": {"y": None}},
    [["a", 1]], {"tasks": None}, "TfdError", "__class__", "annotations", "worker:0", "ready",
)  # fmt: skip

TASK = {
    "event": "task", "cluster": "c", "task": "worker:0", "state": "ready", "reason": "ok",
    "address": "10.0.0.5:4000", "pid": 5, "restarts": 0, "open_to": "this host", "log": ["l"],
}  # fmt: skip
GPU = {"index": 0, "name": "H100", "memory": 80_000_000_000, "used": 5, "use_percent": 3.5,
       "task": "worker:0"}  # fmt: skip
EVENTS: tuple[dict[str, Any], ...] = (
    TASK,
    {"event": "measure", "cluster": "c", "task": "worker:0", "cpu_percent": 5.0, "rss_mb": 3.5,
     "pss_mb": 1.0, "bytes_sent": 7, "working": None, "late": True},
    {"event": "gpus", "cluster": "c", "gpus": [GPU]},
    {"event": "notice", "cluster": "c", "severity": "warning", "what": "w", "task": None,
     "fix": "f"},
    {"event": "lease", "cluster": "c", "seconds_left": 5.0},
    {"event": "ended", "cluster": "c", "reason": "over"},
    {
        "event": "hello",
        "version": agent_protocol.VERSION,
        "package": VERSION,
        "pid": 1,
        "full": True,
    },
    {"event": "agent_detached"},
    {"event": "failed", "reason": "r"},
)  # fmt: skip
DISPATCHER_CONFIG = namedtuple(
    "DispatcherConfig", "port protocol worker_addresses job_gc_timeout_ms"
)
DESCRIPTION = json.loads(json.dumps({
    "config": spec.pack(ClusterConfig(
        "c", "ssh", {Role.WORKER: 1, Role.DATA_WORKER: 0}, Policy(time_limit=60, minimum=0),
        Service(work_dir="/d", dispatcher_config=DISPATCHER_CONFIG(0, "grpc", ["a:1"], None),
                worker_tags=("COLOCATED",), cross_trainer_cache_size_bytes=10**10),
        {"TOKEN": ""}, ("numpy",), ("10.0.0.0/8",), {"hosts": ["one"], "place": {}},
        {"worker": 1},
    )),
    "task_manager": {
        "counts": {"worker": 1},
        "gpu_allocation": GpuAllocation(1, (HostAllocation(" on one", (0,)),)).pack(),
        "static_addresses": ["10.0.0.5:4001"],
        "removed_addresses": ["10.0.0.5:4002"],
        "work_dir": "/d",
    },
    "used": False,
}))  # fmt: skip
SERVICE = DESCRIPTION["config"]["service"]
ADOPT = {"description": DESCRIPTION, "directory": "/d", "lease": 9.5, "tasks": [TASK],
         "time_limit_left": None}  # fmt: skip
REPLIES: dict[str, Any] = {
    "adopt": ADOPT,
    "clusters": [{"name": "c", "lease": None, "description": DESCRIPTION, "tasks": ["ready"],
                  "has_listeners": True},
                 {"name": "d", "lease": 5.0, "description": {}, "tasks": ["ready"],
                  "has_listeners": True}],
    "gpus": {"gpus": [{"index": 0, "name": "H100", "uuid": "u", "memory": 8}], "reason": "",
             "hidden": False},
    "reserve_ports": {"worker:0": "localhost:4000"},
    "journal": {JOURNAL: [0, "QUJD"]},
    "journal_size": 5,
    "kill": 5,
    "logs": ["text", 4],
    "open": "/run/x",
    "open_tunnels": {"port": 4000, "name": "0123456789ab.tfd", "authority": PEM},
    "certify_tunnels": {"port": 4000},
    "inspect": {"worker:0": {"stale": ["m"], "ops": ["Op"]}},
    "stacks": {"worker:0": {"note": "", "threads": [{"name": "t", "pipeline": True, "frames": [
        {"function": "f", "file": "/a.py", "line": 3, "users": True, "seconds": 1.5}]}]}},
    "listening_addresses": ["0.0.0.0", "::", "127.0.0.1"],
    "check_reachability": {"worker:0": ["refused", "10.0.0.5"]},
    "free_disk_space": 5,
    "read_nonce": "0123456789abcdef0123456789abcdef",
    "serve_nonce": 4000,
    "start": None,
}  # fmt: skip
HANDSHAKE = {
    "package": VERSION, "python": platform.python_version(), "executable": "/usr/bin/python",
    "tensorflow": tensorflow_version(), "identity": "b:1", "connection": "10.0.0.1 5 10.0.0.5 22",
    "cull_seconds": None,
}  # fmt: skip


def frame(body: Any) -> bytes:
    return agent_protocol.encode(body, 7)


def monitored(config: ClusterConfig | None = None) -> Monitor:
    return Monitor(config or ClusterConfig("c"))


def spoilt(value: Any, chance: random.Random) -> Any:
    """Return a copy of a JSON value in which one part is hostile, missing or added."""
    places: list[tuple[Any, Any]] = []

    def collect(inner: Any) -> None:
        for key in list(inner) if isinstance(inner, dict) else range(len(inner)):
            places.append((inner, key))
            if isinstance(inner[key], (dict, list)):
                collect(inner[key])

    spoilt_value = copy.deepcopy({"top": value})
    collect(spoilt_value)
    inner, key = chance.choice(places)
    bad = copy.deepcopy(chance.choice(HOSTILE))
    if isinstance(inner, dict) and inner is not spoilt_value:
        how = chance.randrange(4)
        if how == 0:
            inner[chance.choice(["host", "", "x", "event", "cluster"])] = bad
            return spoilt_value["top"]
        if how == 1:
            inner[str(bad)[:80]] = inner.pop(key)
            return spoilt_value["top"]
        if how == 2:
            del inner[key]
            return spoilt_value["top"]
    inner[key] = bad
    return spoilt_value["top"]


class _Scripts(HTMLParser):
    """Collector of injected HTML: elements that no view makes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in ("img", "script") or any(name.startswith("on") for name, _ in attrs):
            self.tags.append(tag)


def foreign_elements(html: str) -> list[str]:
    parser = _Scripts()
    parser.feed(html)
    return parser.tags


# Events and replies of agents


@pytest.mark.parametrize("seed", range(8))
def test_corrupt_event_ends_the_session_or_is_harmless(seed: int) -> None:
    chance = random.Random(seed)
    refused = 0
    for _ in range(150):
        monitor = monitored()
        client = AgentClient("agent", HOST, lambda line: None)
        client.listen("c", lambda body, m=monitor: m.take({**body, "host": HOST}))  # type: ignore[misc]
        client.handle_line(frame(TASK))
        client.handle_line(frame(spoilt(chance.choice(EVENTS), chance)))
        snapshot = monitor.snapshot()
        # All views can show the message.
        assert foreign_elements(views.View(snapshot)._repr_mimebundle_()["text/html"]) == []
        repr(views.View(snapshot)).encode()
        json.dumps([vars(row) for row in snapshot.tasks], allow_nan=False)
        json.dumps([vars(row) for row in snapshot.gpus], allow_nan=False)
        if not client.alive:
            refused += 1
            assert HOST in client.why_lost
    assert refused > 30


@pytest.mark.parametrize("seed", range(8))
def test_corrupt_reply_ends_the_session_or_fits_its_request(seed: int) -> None:
    chance = random.Random(seed)
    refused = 0
    for _ in range(150):
        method, value = chance.choice(list(REPLIES.items()))
        sent: list[bytes] = []
        client = AgentClient("agent", HOST, sent.append)
        requested = {"stacks": ["worker:0"], "reserve_ports": [packed("worker:0", "localhost")]}
        waiting = client.submit(
            method,
            cluster="c",
            tasks=requested.get(method, []),
            addresses={"worker:0": "10.0.0.5:4000"},
        )
        failure = {"code": "TFD105", "what": "w", "task": None, "fix": None}
        body = {"reply_to": 1, "ok": True, "value": value}
        if chance.random() < 0.2:
            body = {"reply_to": 1, "ok": False, "error": failure}
        client.handle_line(frame(spoilt(body, chance)))
        if not client.alive:
            refused += 1
            with pytest.raises(errors.AgentLost, match=HOST):
                waiting.result(0)
        elif waiting.done() and waiting.exception() is None:
            value = waiting.result()
            if isinstance(value, AdoptedCluster):
                tasks = [{"cluster": "c", **event.to_json()} for event in value.tasks]
                value = json.loads(json.dumps({**vars(value), "tasks": tasks}))
            messages.reply_value(method, value)
        elif waiting.done():
            assert isinstance(waiting.exception(), errors.TfdError)
    assert refused > 30


def use_description(description: dict[str, Any]) -> None:
    """Use a description as `tfd.attach` and the list of clusters do."""
    config = spec.unpack(description["config"])
    monitor = monitored(config)
    client = AgentClient("agent", HOST, lambda line: None)
    manager = TaskManager(config, Fake(), monitor)
    task = from_json(TASK)
    assert isinstance(task, TaskChanged)
    task_host = AgentTaskHost(client, config.name, "/d")
    manager.adopt(task_host, AdoptedCluster(description, [task]))
    monitor.snapshot()
    json.dumps(manager.description(), allow_nan=False)
    reply = {"name": config.name, "description": description, "lease": 5.0, "tasks": ["ready"]}
    json.dumps(attach.summary_of(reply, 5), allow_nan=False)


def test_valid_description_is_accepted() -> None:
    use_description(messages.description(DESCRIPTION, "description"))
    assert messages.description({}, "description") == {}


@pytest.mark.parametrize("seed", range(8))
def test_corrupt_description_is_refused_or_usable(seed: int) -> None:
    chance = random.Random(seed)
    refused = 0
    for _ in range(150):
        try:
            description = messages.description(spoilt(DESCRIPTION, chance), "description")
        except errors.InvalidMessage:
            refused += 1
        else:
            if description:
                use_description(description)
    assert refused > 30


@pytest.mark.parametrize("change", [
    {"launcher": "../../x"}, {"launcher": "ssh\n"}, {"allow": ["0.0.0.0/0 "]}, {"allow": "::/0"},
    {"name": "../c"}, {"counts": {"worker": 10**9}}, {"counts": {"cook": 1}},
    {"options": []}, {"env": {"A=B": "x"}}, {"env": {"A": 5}}, {"gpus": {"ps": 1}}, {"gpus": "all"},
    {"policy": {"on_hang": "explode"}}, {"policy": {"hang_seconds": "1"}}, {"policy": {"x": 1}},
    {"service": {}}, {"service": {**SERVICE, "port": -1}},
    {"service": {**SERVICE, "dispatcher_config": {"class": 1}}},
    {"service": {**SERVICE, "dispatcher_config": {"_x": 1, "protocol": "grpc"}}},
    {"service": {**SERVICE, "worker_config": {"port": 1}}},
    {"service": {**SERVICE, "worker_config": {"protocol": "http"}}},
    {"service": {**SERVICE, "worker_tags": [""]}}, {"service": {**SERVICE, "worker_tags": "a"}},
    {"service": {**SERVICE, "cross_trainer_cache_size_bytes": 0}},
    {"service": {**SERVICE, "snapshot_max_chunk_size_bytes": "1"}},
])  # fmt: skip
def test_specification_of_another_host_is_validated(change: dict[str, Any]) -> None:
    description = {**DESCRIPTION, "config": {**DESCRIPTION["config"], **change}}
    with pytest.raises(errors.InvalidMessage, match=r"description\.config"):
        messages.description(description, "description")


def test_cluster_description_must_have_its_name() -> None:
    summary = {"name": "other", "lease": None, "description": DESCRIPTION, "tasks": [],
               "has_listeners": True}  # fmt: skip
    with pytest.raises(errors.InvalidMessage, match=r"config\.name 'c': expected other"):
        messages.reply_value("clusters", [summary])


# Requested tasks and addresses


def packed(task: str, host: str = "10.0.0.5", port: int = 0) -> dict[str, Any]:
    role, _, index = task.partition(":")
    return {"role": role, "index": int(index), "host": host, "port": port}


def client_with_tasks(*tasks: dict[str, Any]) -> tuple[AgentClient, list[Any], Any]:
    """Return the client of a cluster that it has opened, its events, and the reply of a hold."""
    client = AgentClient("agent", HOST, lambda line: None)
    received: list[Any] = []
    client.listen("c", received.append)
    client.submit("open", cluster="c")
    client.handle_line(frame({"reply_to": 1, "ok": True, "value": "/run/c"}))
    return client, received, client.submit("reserve_ports", cluster="c", tasks=list(tasks))


@pytest.mark.parametrize(("requested", "held"), [
    ({}, {"worker:1": "10.0.0.5:4000"}),
    ({}, {"worker:0": "10.0.0.5:4000", "worker:1": "10.0.0.5:4001"}),
    ({}, {}),
    ({}, {"worker:0": "10.0.0.6:4000"}),
    ({}, {"worker:0": "localhost:4000"}),
    ({"host": "fd00::1"}, {"worker:0": "[fd00::2]:4000"}),
    ({"port": 4000}, {"worker:0": "10.0.0.5:4001"}),
])  # fmt: skip
def test_agent_must_hold_the_requested_tasks(requested: dict[str, Any], held: Any) -> None:
    client, events, reply = client_with_tasks(packed("worker:0", **requested))
    client.handle_line(frame({"reply_to": 2, "ok": True, "value": held}))
    with pytest.raises(errors.AgentLost, match=rf"{HOST}.*'reserve_ports'"):
        reply.result(0)
    assert [type(event) for event in events] == [TasksLost]


@pytest.mark.parametrize("ranks", [
    {"worker:0": "10.0.0.5:4001", "worker:1": "10.0.0.5:4002"},
    {"worker:1": "10.0.0.5:4001"}, {"worker:0": "10.0.0.6:4001"}, {},
])  # fmt: skip
def test_agent_must_open_the_requested_ranks_at_its_host(ranks: Any) -> None:
    client, _, _ = client_with_tasks(packed("worker:0"))
    client.handle_line(frame({"reply_to": 2, "ok": True, "value": {"worker:0": "10.0.0.5:4000"}}))
    reply = client.submit("open_ranks", cluster="c", tasks=["worker:0"])
    client.handle_line(frame({"reply_to": 3, "ok": True, "value": {"worker:0": "10.0.0.5:4001"}}))
    assert reply.result(0) == {"worker:0": "10.0.0.5:4001"}
    reply = client.submit("open_ranks", cluster="c", tasks=["worker:0"])
    client.handle_line(frame({"reply_to": 4, "ok": True, "value": ranks}))
    with pytest.raises(errors.AgentLost, match=rf"{HOST}.*'open_ranks'"):
        reply.result(0)


@pytest.mark.parametrize("requested", [{}, {"port": 4000}, {"host": "fd00::1"}])
def test_task_must_be_reported_at_its_address(requested: dict[str, Any]) -> None:
    client, events, reply = client_with_tasks(packed("worker:0", **requested))
    at = "[fd00::1]:4000" if "host" in requested else "10.0.0.5:4000"
    planned = {**TASK, "address": at, "state": "planned"}
    client.handle_line(frame(planned))
    client.handle_line(frame({"reply_to": 2, "ok": True, "value": {"worker:0": at}}))
    assert reply.result(0) == {"worker:0": at}
    client.handle_line(frame({**TASK, "address": at}))
    assert events == [from_json(planned), from_json({**TASK, "address": at})]
    client.submit("reserve_ports", cluster="c", tasks=[packed("worker:1", **requested)])
    client.handle_line(frame({"reply_to": 3, "ok": True, "value": {"worker:1": at}}))
    assert client.alive


@pytest.mark.parametrize("change", [
    {"task": "worker:1"}, {"address": "10.0.0.6:4000"}, {"address": "10.0.0.5:4001"},
    {"address": "localhost:4000"},
])  # fmt: skip
def test_agent_must_not_report_other_tasks(change: dict[str, Any]) -> None:
    client, events, _ = client_with_tasks(packed("worker:0"))
    client.handle_line(frame({"reply_to": 2, "ok": True, "value": {"worker:0": "10.0.0.5:4000"}}))
    client.handle_line(frame({**TASK, **change}))
    assert f"session with {HOST}" in client.why_lost
    assert [type(event) for event in events] == [TasksLost]


def test_resynchronized_agent_must_not_report_other_tasks() -> None:
    client, events, _ = client_with_tasks(packed("worker:0"))
    client.handle_line(frame({"reply_to": 2, "ok": True, "value": {"worker:0": "10.0.0.5:4000"}}))
    client.handle_line(frame({**EVENTS[6], "full": False}))
    reply = {**ADOPT, "tasks": [TASK, {**TASK, "task": "worker:1"}]}
    client.handle_line(frame({"reply_to": 3, "ok": True, "value": reply}))
    assert "worker:1" in client.why_lost
    assert [type(event) for event in events] == [TasksLost]


def test_detached_cluster_has_tasks_of_other_processes() -> None:
    client, events, _ = client_with_tasks(packed("worker:0"))
    client.handle_line(frame({"reply_to": 2, "ok": True, "value": {"worker:0": "10.0.0.5:4000"}}))
    client.submit("lease", cluster="c", seconds=5.0, renew=False)
    remote_task = {**TASK, "task": "worker:1", "address": "10.0.0.5:4001"}
    client.handle_line(frame(remote_task))
    assert events == [from_json(remote_task)]
    client.handle_line(frame({**remote_task, "address": "10.0.0.6:4001"}))
    assert "task.address" in client.why_lost


@pytest.mark.parametrize("body", [[], "x", 5, None, [[1]], {}, {"reply_to": []}, {"event": []},
                                  {"event": "host_disconnected", "host": "x", "grace": 1},
                                  {"event": "lost", "cluster": "c", "reason": "r"}])  # fmt: skip
def test_other_json_ends_the_session_or_is_ignored(body: Any) -> None:
    client = AgentClient("agent", HOST, lambda line: None)
    ignored = not isinstance(body, dict)
    client.handle_line(frame(body))
    assert client.alive is ignored
    assert ignored or "sent an invalid message" in client.why_lost
    client.handle_line(b"TFD1 1 200000 " + b"[" * 200_000 + b"\n")
    assert client.alive is ignored


def test_valid_messages_are_unchanged() -> None:
    for body in EVENTS:
        assert messages.event(body) == body
    for method, value in REPLIES.items():
        assert messages.reply_value(method, value) == value


def test_long_stacks_are_refused_and_long_names_are_cut() -> None:
    reply = copy.deepcopy(REPLIES["stacks"])
    (thread,) = reply["worker:0"]["threads"]
    thread["frames"][0]["function"] = "f" * 1000 + "\x1b"
    (checked,) = messages.reply_value("stacks", reply)["worker:0"]["threads"]
    assert checked["frames"][0]["function"] == "f" * 499 + "…"
    for field, count in (("frames", 101), ("threads", 1001)):
        long = copy.deepcopy(REPLIES["stacks"])
        entry = long["worker:0"] if field == "threads" else long["worker:0"]["threads"][0]
        entry[field] *= count
        with pytest.raises(errors.InvalidMessage, match=f"{field}.*expected a list of at most"):
            messages.reply_value("stacks", long)


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: ascii(value)[:20])
@pytest.mark.parametrize("field", ["task", "line", "seconds", "stack", "note"])
def test_rows_of_stacks_of_another_kernel_are_checked(field: str, value: Any) -> None:
    row = {"task": "kernel", "thread": "t", "function": "f", "file": "a.py", "line": 3,
           "seconds": None, "note": "", "stack": []}  # fmt: skip
    assert messages.result("stacks", [row]) == [row]
    with contextlib.suppress(errors.InvalidMessage):
        (checked,) = messages.result("stacks", [{**row, field: value}])
        assert "\x1b" not in views.stacks_table([checked]).text()
    with pytest.raises(errors.InvalidMessage):
        messages.result("stacks", value if value != [] else None)


def test_reply_without_a_definition_has_no_value() -> None:
    returning = {
        name.removeprefix("handle_")
        for kind in (Agent, AgentCluster)
        for name, method in vars(kind).items()
        if name.startswith("handle_") and method.__annotations__["return"] != "None"
    }
    assert returning <= messages.REPLIES.keys()
    with pytest.raises(errors.InvalidMessage, match="reply to 'start'"):
        messages.reply_value("start", "started")


def test_agent_error_becomes_an_error_of_the_package() -> None:
    for code in ("annotations", "ClassVar", "__name__", "TFD9999"):
        error = agent_protocol.unpack_error({"code": code, "what": "x"})
        assert type(error) is errors.TfdError


class _Channel:
    """A channel to an agent that sends the given messages."""

    def __init__(self, lines: list[bytes]) -> None:
        self.sent: list[bytes] = []
        self.closed = False
        #: Set when the lines after the first may arrive.
        self.go_on = threading.Event()
        self._lines = lines

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def lines(self) -> Any:
        yield self._lines[0]
        assert self.go_on.wait(60)
        yield from self._lines[1:]

    def close(self) -> None:
        self.closed = True


def test_invalid_message_ends_the_session_and_names_the_host() -> None:
    hello = EVENTS[6]
    channel = _Channel([frame(hello), frame({**TASK, "pid": "<b>"}), frame(TASK)])
    received: list[Any] = []
    link = AgentSession("agent", HOST, lambda: channel)
    link.client.listen("c", received.append)
    channel.go_on.set()
    until(lambda: channel.closed)
    assert f"session with {HOST}" in link.client.why_lost
    assert "task.pid" in link.client.why_lost
    assert [type(event) for event in received] == [TasksLost]
    link.close()


# The handshake


def test_error_in_a_handshake_names_no_task() -> None:
    error = {"code": "TFD200", "what": "w", "task": "worker:0", "fix": None}
    line = "TFDHELLO " + json.dumps({**HANDSHAKE, "error": error})
    with pytest.raises(errors.InvalidMessage, match=rf"{HOST}: invalid handshake\.error\.task"):
        read_handshake(HOST, iter([line.encode()]))
    line = "TFDHELLO " + json.dumps({**HANDSHAKE, "error": {**error, "task": None}})
    with pytest.raises(errors.LaunchError, match=f"{HOST}: w"):
        read_handshake(HOST, iter([line.encode()]))


@pytest.mark.parametrize("seed", range(4))
def test_corrupt_handshake_raises_an_error_with_the_host(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(150):
        line = "TFDHELLO " + json.dumps(spoilt(HANDSHAKE, chance))
        handshake, why = None, HOST
        try:
            handshake = read_handshake(HOST, iter([line.encode()]))
        except errors.TfdError as error:
            why = error.what
        assert HOST in why
        for word in handshake.connection.split()[::2] if handshake else ():
            validation.ip_address(word, "connection")


@pytest.mark.parametrize(
    ("field", "version", "what", "fix"),
    [
        ("package", "0.0.9", f"has tfd-notebook 0.0.9 and this kernel {VERSION}", "pip install"),
        ("python", "3.9.1", f"which has Python {platform.python_version()}", "use Python 3."),
        ("tensorflow", "2.3.0", "has TensorFlow 2.3.0 and this kernel", "the same version"),
        ("tensorflow", None, "has no TensorFlow", "pip install"),
    ],
)
def test_other_version_on_a_host_is_refused(
    field: str, version: str | None, what: str, fix: str
) -> None:
    line = "TFDHELLO " + json.dumps({**HANDSHAKE, field: version})
    with pytest.raises(errors.LaunchError, match="blue: its Python") as caught:
        read_handshake("blue", iter([line.encode()]))
    assert what in caught.value.what
    assert fix in str(caught.value.fix)
    if field == "python":
        assert "3.9.1 (/usr/bin/python)" in caught.value.what


@pytest.mark.parametrize("field", ["python", "tensorflow"])
def test_other_patch_version_on_a_host_is_accepted(field: str) -> None:
    version = ".".join([*str(HANDSHAKE[field]).split(".")[:2], "99"])
    line = "TFDHELLO " + json.dumps({**HANDSHAKE, field: version})
    handshake = read_handshake("blue", iter([line.encode()]))
    assert getattr(handshake, field) == version


@pytest.mark.parametrize("line", [b"TFDHELLO", b"TFDHELLO {", b"TFDHELLO " + b"[" * 100_000])
def test_truncated_handshake_is_refused(line: bytes) -> None:
    with pytest.raises(errors.TfdError, match=HOST):
        read_handshake(HOST, iter([line + b"\n"]))


# Addresses


@pytest.mark.parametrize("value", [
    "0.0.0.0", "::", "::ffff:0.0.0.0", "224.0.0.1", "ff02::1", "255.255.255.255", "0.0.0.0/0",
    "10.0.0.0/8", "fe80::1%\n[x]\nexec = y", "fe80::1%a b", "10.0.0.5\n", " 10.0.0.5", "name", "",
    5, None,
])  # fmt: skip
def test_invalid_host_address_is_refused(value: Any) -> None:
    with pytest.raises(errors.InvalidMessage):
        validation.ip_address(value, "address")


@pytest.mark.parametrize("value", ["10.0.0.5", "::1", "fd00::1", "fe80::1%eth0", "127.0.0.1"])
def test_valid_host_address_is_accepted(value: str) -> None:
    assert validation.ip_address(value, "address") == value


@pytest.mark.parametrize("value", [
    "a:1\nexec = x", "a:0", "a:65536", "a:١", "a", ":1", "a b:1", "a/b:1", "fd00::1:80", "[a]:1",
    "[fe80::1%\nx]:1", "0.0.0.0:1", "[::]:1", "a;b:1", "a:1 ", "999.1.1.1:1", 5,
])  # fmt: skip
def test_invalid_task_address_is_refused(value: Any) -> None:
    with pytest.raises(errors.InvalidMessage):
        validation.address(value, "address")


@pytest.mark.parametrize("value", ["a:1", "a.b-c_d:65535", "10.0.0.5:80", "[fd00::1]:80"])
def test_valid_task_address_is_accepted(value: str) -> None:
    assert validation.address(value, "address") == value


@pytest.mark.parametrize("connection", [
    "0.0.0.0/0 0 10.0.0.5 0", "::/0 0 10.0.0.5 0", "10.0.0.1 0 10.0.0.0/8 0",
    "0.0.0.0 0 10.0.0.5 0", "224.0.0.1 0 10.0.0.5 0", "10.0.0.1 0 10.0.0.5",
])  # fmt: skip
def test_host_cannot_open_the_ports_of_other_hosts(connection: str) -> None:
    line = "TFDHELLO " + json.dumps({**HANDSHAKE, "connection": connection})
    with pytest.raises(errors.InvalidMessage, match="blue"):
        read_handshake("blue", iter([line.encode()]))


# Tunnels


@pytest.mark.parametrize(
    ("port", "to", "host", "authority"),
    [
        (4000, "10.0.0.5:4000", "a.tfd\n[x]\nclient = yes\nexec = /bin/cp", PEM),
        (4000, "10.0.0.5:4000", "0123456789ab.tfd\nverifyChain = no", PEM),
        (4000, "10.0.0.5:4000\nexec = /bin/cp", "0123456789ab.tfd", PEM),
        (4000, "[fe80::1%\nexec = x]:4000", "0123456789ab.tfd", PEM),
        ("4000\nexec = x", "10.0.0.5:4000", "0123456789ab.tfd", PEM),
        (0, "10.0.0.5:4000", "0123456789ab.tfd", PEM),
        (True, "10.0.0.5:4000", "0123456789ab.tfd", PEM),
        (4000, "10.0.0.5:4000", "0123456789ab.tfd", PEM * 2),
    ],
)
def test_agent_cannot_inject_configuration_lines(
    port: Any, to: str, host: str, authority: str
) -> None:
    end = TunnelEnd.__new__(TunnelEnd)  # its methods are not called
    with pytest.raises(errors.InvalidMessage):
        end.forward(port, to, host, authority)


#: A running endpoint, as the host of an attached cluster describes it.
RUNNING = REPLIES["open_tunnels"]


@pytest.mark.parametrize(
    ("method", "reply"),
    [
        # After the request is signed, a host sends its port and nothing to trust.
        ("certify_tunnels", {"port": 4000, "trust": [PEM]}),
        ("certify_tunnels", {"port": 4000, "authority": PEM}),
        ("certify_tunnels", {"port": 4000, "name": "0123456789ab.tfd"}),
        ("certify_tunnels", {"port": "4000"}),
        ("certify_tunnels", {"port": 0}),
        ("open_tunnels", {"request": SIGNING_REQUEST, "trust": [PEM]}),
        ("open_tunnels", {"request": SIGNING_REQUEST, "authority": PEM}),
        ("open_tunnels", {"request": SIGNING_REQUEST * 2}),
        ("open_tunnels", {"request": SIGNING_REQUEST + PEM}),
        ("open_tunnels", {"request": PEM}),
        ("open_tunnels", {"request": SIGNING_REQUEST.replace("QUJD", "QUJD\n" * 1_000_000)}),
        ("open_tunnels", {**RUNNING, "trust": [PEM]}),
        ("open_tunnels", {**RUNNING, "authority": [PEM]}),
        ("open_tunnels", {**RUNNING, "authority": PEM * 2}),
        ("open_tunnels", {**RUNNING, "authority": PEM.replace("QUJD", "Q" * 10_000_000)}),
        ("open_tunnels", {**RUNNING, "authority": PEM.replace("QUJD\n", "QUJD\n" * 101)}),
        ("open_tunnels", {**RUNNING, "authority": "a comment\n" + PEM}),
        ("open_tunnels", {**RUNNING, "authority": PEM + "a comment\n"}),
        ("open_tunnels", {**RUNNING, "authority": SIGNING_REQUEST}),
        ("open_tunnels", {**RUNNING, "authority": ""}),
        ("open_tunnels", {**RUNNING, "name": "a.tfd\n[x]"}),
        ("open_tunnels", {**RUNNING, "name": None}),
        ("open_tunnels", {"port": 4000, "name": "0123456789ab.tfd"}),
    ],
)
def test_host_cannot_send_certificates_to_trust(method: str, reply: Any) -> None:
    with pytest.raises(errors.InvalidMessage):
        messages.reply_value(method, reply)


class _TunnelHost:
    """A host that opens its end with a signed request, or has one of an earlier kernel."""

    def __init__(self, reply: dict[str, Any]) -> None:
        self.reply = reply
        self.issued: tuple[str, str] | None = None
        self.forwarded: list[tuple[int, str, str, str]] = []

    def open_tunnels(self, authority: str, name: str) -> Any:
        if "authority" in self.reply:
            return self.reply
        key = ec.generate_private_key(ec.SECP256R1())
        request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        signed = request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        return {"request": validation.signing_request(signed.decode(), "request")}

    def certify_tunnels(self, authority: str, name: str, certificate: str) -> Any:
        self.issued = name, validation.certificate(authority, "authority")
        return self.reply

    def serve_tunnel(self, port: int) -> None: ...
    def close_tunnel(self, port: int) -> None: ...

    def forward_tunnel(self, port: int, address: str, name: str, authority: str) -> None:
        self.forwarded.append((port, address, name, authority))


def test_connections_trust_the_authority_of_their_own_target() -> None:
    own = PEM.replace("QUJD", "REVG")
    hosts: Any = [
        _TunnelHost({"port": 5000}),
        _TunnelHost({"port": 5001, "name": "f" * 12 + ".tfd", "authority": own, "trust": [own]}),
        # It claims to trust its own authority after the kernel has signed its certificate.
        _TunnelHost({"port": 5002, "name": "e" * 12 + ".tfd", "trust": [own]}),
    ]
    kernel: Any = _TunnelHost({"port": 5003})
    tunnels = tls_tunnels.TLSTunnels(
        [(host, f"host {i}", f"10.0.0.{i}") for i, host in enumerate(hosts)], kernel
    )
    for position in range(3):
        tunnels.open(4000 + position, position)
    issued = [host.issued for host in (*hosts, kernel) if host.issued is not None]
    assert len({name for name, _ in issued}) == 3
    assert len({authority for _, authority in issued}) == 1
    expected = [
        (4000, "10.0.0.0:5000", *hosts[0].issued),
        (4001, "10.0.0.1:5001", "f" * 12 + ".tfd", own),
        (4002, "10.0.0.2:5002", *hosts[2].issued),
    ]
    assert kernel.forwarded == expected
    for position, host in enumerate(hosts):
        assert host.forwarded == expected[:position] + expected[position + 1 :]


# The journal


def copied(*answers: Any) -> tuple[JournalCopy, Callable[[], None]]:
    rest = [*answers, {}]
    journal_copy = JournalCopy(lambda have: rest.pop(0) if len(rest) > 1 else rest[0])
    return journal_copy, journal_copy.refresh


@pytest.mark.parametrize("name", [
    "/tmp/evil", "../evil", "tf_data_dispatcher_journal/../../evil", "evil",
    "tf_data_dispatcher_journal/journal_", "tf_data_dispatcher_journal/journal_0/x",
    "tf_data_dispatcher_journal/journal_0\n", "", "tf_data_dispatcher_journal/journal_" + "1" * 99,
])  # fmt: skip
def test_journal_copy_has_journal_files_only(name: str, tmp_path: Path) -> None:
    copy_, refresh = copied({name: [0, "QUJD"]})
    with pytest.raises(errors.InvalidMessage):
        refresh()
    assert [path for path in Path(copy_.directory).rglob("*") if path.is_file()] == []
    copy_.close()


@pytest.mark.parametrize("content", [
    [5, "QUJD"], [0, "not base64"], [0, 5], [0], "QUJD", None, [-1, "QUJD"], [0, "QUJD", 1],
])  # fmt: skip
def test_journal_copy_continues_at_its_end(content: Any) -> None:
    copy_, refresh = copied({JOURNAL: content})
    with pytest.raises(errors.InvalidMessage):
        refresh()
    copy_.close()


def test_journal_is_copied() -> None:
    copy_, refresh = copied({JOURNAL: [0, "QUJD"]}, {JOURNAL: [3, "REVG"]})
    refresh()
    assert Path(copy_.directory, JOURNAL).read_bytes() == b"ABCDEF"
    copy_.close()


def test_message_with_too_many_values_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty object has two bytes in JSON, and 64 in memory."""
    line = agent_protocol.encode({"value": [{}] * 10})
    assert agent_protocol.decode(line) is not None
    monkeypatch.setattr(validation, "MAX_VALUES", 10)
    with pytest.raises(errors.InvalidMessage, match="more than 10 values"):
        agent_protocol.decode(line)


def test_rest_of_an_incomplete_write_is_replaced() -> None:
    copy_, refresh = copied({JOURNAL: [0, "QUJD"]}, {}, {JOURNAL: [3, "REVG"]})
    refresh()
    with Path(copy_.directory, JOURNAL).open("ab") as file:
        file.write(b"D")
    refresh()
    assert Path(copy_.directory, JOURNAL).read_bytes() == b"ABCDEF"
    copy_.close()


def test_journal_copy_leaves_free_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfd_notebook.cluster.journal_copy.MIN_FREE", 1 << 60)
    copy_, refresh = copied({JOURNAL: [0, "QUJD"]})
    with pytest.raises(errors.WorkDirError, match="MB are free"):
        refresh()
    copy_.close()


def test_journal_copy_follows_no_links(tmp_path: Path) -> None:
    copy_, refresh = copied({JOURNAL: [0, "QUJD"]})
    os.symlink(tmp_path, Path(copy_.directory, "tf_data_dispatcher_journal"))
    with pytest.raises(errors.WorkDirError, match=r"(?i)link|directory"):
        refresh()
    assert list(tmp_path.iterdir()) == []
    copy_.close()


def test_large_journal_is_copied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfd_notebook.cluster.journal_copy.MAX_REFRESH", 10_000)
    monkeypatch.setattr("tfd_notebook.cluster.journal_copy.MAX_TOTAL", 25_000)
    more = base64.b64encode(bytes(1000)).decode()
    copy_ = JournalCopy(lambda have: {JOURNAL: [have.get(JOURNAL, 0), more]})
    copy_.refresh()
    assert Path(copy_.directory, JOURNAL).stat().st_size == 10_000
    copy_.refresh()
    with pytest.raises(errors.InvalidMessage, match="more than"):
        copy_.refresh()
    assert Path(copy_.directory, JOURNAL).stat().st_size == 25_000
    copy_.close()


def test_journal_copy_limits_the_number_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfd_notebook.cluster.journal_copy.MAX_FILES", 20)
    replies = ({f"{JOURNAL[:-1]}{number}": [0, "QQ=="]} for number in range(100))
    copy_ = JournalCopy(lambda have: next(replies))
    with pytest.raises(errors.InvalidMessage, match="more than 20 files"):
        copy_.refresh()
    assert len([path for path in Path(copy_.directory).rglob("*") if path.is_file()]) == 20
    copy_.close()


def test_journal_copy_limits_the_time_of_a_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfd_notebook.cluster.journal_copy.MAX_SECONDS", 5.0)
    seconds, sizes = itertools.count(), iter(range(20))
    copy_ = JournalCopy(lambda have: {JOURNAL: [next(sizes), "QQ=="]}, lambda: next(seconds))
    for size in (4, 8):  # the clock advances a second at each request
        copy_.refresh()
        assert Path(copy_.directory, JOURNAL).stat().st_size == size
    copy_.close()


def test_journal_copy_limits_a_reply() -> None:
    half = base64.b64encode(bytes(2_500_000)).decode()
    copy_ = JournalCopy(lambda have: {JOURNAL: [0, half], f"{JOURNAL}1": [0, half]})
    with pytest.raises(errors.InvalidMessage, match="one reply has more than 4 MB"):
        copy_.refresh()
    copy_.close()


# Views


def test_gpu_number_is_escaped_in_html() -> None:
    bad: Any = "<img src=x onerror=alert(1)>"
    snapshot = Snapshot(1, 0.0, "c", "ssh", "ready", gpus=(GpuRow("h", bad, "H100", "worker:0"),))
    assert foreign_elements(views.View(snapshot)._repr_mimebundle_()["text/html"]) == []


# Kernels of other Jupyter servers

TREE = {
    "name": "c", "launcher": "local", "state": "ready", "planned": {"worker": 1}, "requested": {},
    "observed": {"worker": 1}, "order": ["worker:0"], "expires": 5.0,
    "tasks": {"worker:0": {"task": "worker:0", "role": "worker", "index": 0, "pid": 5,
                           "state": "ready", "rss_mb": 3.5}},
    "streams": {"s": {"name": "s", "kind": "stream", "state": "running", "history": [1.0]}},
    "notices": [{"severity": "info", "what": "w", "time": 1.0}],
    "coordinator": {"state": "idle", "counts": {"ready": 1}, "queue_ms": [1.0, 2.0, 3.0],
                    "workers": {"0": {"index": 0, "state": "idle"}}},
    "spark": {"phase": "running", "since": 1.0, "order": ["worker:0"],
              "nodes": {"worker:0": {"role": "worker", "index": 0, "log": ["x"]}}},
    "adaptation": {"minimum": 1, "maximum": 8, "workers": 3, "reason": "r", "since": 1.0},
}  # fmt: skip


def read(tree: Any) -> BusClient:
    reader = BusClient(lambda message: None)
    reader.handle_message({"kind": "hello", "protocol": PROTOCOL, "version": VERSION}, ())
    state = {"clusters": {"c": tree}}
    reader.handle_message({"kind": "state", "seq": 1, "full": True, "state": state}, ())
    return reader


def test_valid_tree_of_another_kernel_is_read() -> None:
    snapshot = read(TREE).snapshot("c")
    assert snapshot.task("worker:0").pid == 5
    assert snapshot.coordinator is not None
    assert snapshot.coordinator.queue_ms == (1.0, 2.0, 3.0)
    assert snapshot.spark is not None
    assert snapshot.spark.nodes[0].log == ("x",)
    assert snapshot.adaptation == AdaptationRow(1, 8, 3, "r", 1.0)


@pytest.mark.parametrize("seed", range(8))
def test_corrupt_tree_of_a_kernel_is_refused_or_shown(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        try:
            snapshot = read(spoilt(TREE, chance)).snapshot("c")
        except errors.InvalidMessage:
            continue
        assert foreign_elements(views.View(snapshot)._repr_mimebundle_()["text/html"]) == []
        repr(views.View(snapshot)).encode()
        for row in (*snapshot.tasks, *snapshot.streams):
            json.dumps(vars(row), allow_nan=False)


def test_changes_of_a_remote_kernel_do_not_add_up() -> None:
    sent: list[dict[str, Any]] = []
    reader = BusClient(sent.append)
    tree: dict[str, Any] = {"clusters": {"c": TREE}}
    reader.handle_message({"kind": "state", "seq": 1, "full": True, "state": tree}, ())
    tracemalloc.start()
    for seq in range(2, 22):
        change = {"clusters": {"c": {"tasks": {"worker:0": {f"x{seq}": "x" * 5_000_000}}}}}
        reader.handle_message({"kind": "state", "seq": seq, "full": False, "state": change}, ())
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 25_000_000
    assert {message["kind"] for message in sent} == {"subscribe", "resync"}
    tree["clusters"]["c"] = {**TREE, "state": "ended"}
    reader.handle_message({"kind": "state", "seq": 22, "full": True, "state": tree}, ())
    reader.handle_message({"kind": "state", "seq": 23, "full": False, "state": {
        "clusters": {"c": {"launcher": "ssh"}}}}, ())  # fmt: skip
    assert reader.snapshot("c").state == "ended"
    assert reader.snapshot("c").launcher == "ssh"


VALUES = {
    "kind": "values", "seq": 2, "full": True, "cluster": "c", "columns": [["id", "f8"]],
    "functions": ["f"], "errors": {"1": "e"}, "lost": [[1, 0, 5.0, 6.0]], "paused": False,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_corrupt_closures_of_another_kernel_are_refused(seed: int) -> None:
    chance = random.Random(seed)
    refused = 0
    for _ in range(100):
        reader = read(TREE)
        with_buffers = bytes(8 * chance.randrange(3)) + b"x" * chance.randrange(2)
        try:
            reader.handle_message(spoilt(VALUES, chance), (with_buffers,))
        except errors.InvalidMessage:
            refused += 1
        else:
            reader.replica("c").lost_attempts()
    assert refused > 50


@pytest.mark.parametrize("received", [
    "[]", "5", "{", "[" * 100_000, b"", b"\x00", b"\xff\xff\xff\xff", b"\x00\x00\x00\x01abcd",
    '{"header": 5}', '{"header": {"msg_type": 5}, "parent_header": {}, "content": {}}',
    '{"header": {"msg_type": "stream"}, "parent_header": {}, "content": {"name": "x"}}',
    '{"header": {"msg_type": "comm_msg"}, "parent_header": {}, "content": {"comm_id": 5}}',
])  # fmt: skip
def test_message_of_a_kernel_is_validated(received: Any) -> None:
    with pytest.raises(errors.InvalidMessage):
        _message(received)


# Nodes on Spark, and Spark tasks that feed rows

NUMBERS = {
    "rows": 3, "results": 0, "queue_depth": 1, "queue_capacity": 8, "batch_age_s": None,
    "feeders": 1, "state": "running", "queues": {"input": {"depth": 1, "rows": 3, "ended": False}},
}  # fmt: skip
STATUS = {"state": "running", "reason": "", "ended": False, "path": "/d/in",
          "board": "http://h:6006", "board_pid": 5, "board_error": "", "open_to": "this host",
          "error": "", "numbers": NUMBERS}  # fmt: skip
UPDATE = {"type": "update", "node": 0, "pid": 5, "seq": 0, "log": "\x1b[1mbold\n",
          "status": STATUS}  # fmt: skip
NODE_ERROR = {"code": "TFD890", "what": "w", "task": None, "fix": "f"}
SPARK: tuple[dict[str, Any], ...] = (
    {"type": "reserved", "node": 0, "address": "[fe80::1]:4000", "executor": "driver", "host": "h",
     "jvm": 5, "gpu": "0,1", "attempt": 0},
    {"type": "start_failed", "node": 0, "error": {**NODE_ERROR, "what": "t" * 100_000}},
    UPDATE,
    {**UPDATE, "status": {**STATUS, "numbers": {}}},
    {**UPDATE, "status": {**STATUS, "state": "lost", "reason": "killed", "ended": True}},
    {"type": "feed_repeated", "partition": 3, "attempt": 1},
    {"type": "feed_failed", "stage": -1},
    {"type": "feed_failed", "stage": 3, "error": NODE_ERROR},
    {"type": "register_worker", "host": "h", "pid": 5, "path": "/tmp/feed-5.sock"},
    {"type": "list_workers", "host": "h"},
)  # fmt: skip


def test_valid_spark_messages_are_unchanged() -> None:
    for message in SPARK:
        assert spark_messages.spark_message(message, message["type"]) == message


@pytest.mark.parametrize("seed", range(4))
def test_corrupt_spark_message_is_refused_or_usable(seed: int) -> None:
    chance = random.Random(seed)
    kinds = tuple({message["type"] for message in SPARK})
    refused = 0
    for _ in range(300):
        try:
            answer = spark_messages.spark_message(spoilt(chance.choice(SPARK), chance), *kinds)
        except errors.InvalidMessage:
            refused += 1
            continue
        json.dumps(answer, allow_nan=False).encode()
        node = Node(roles.assign(1, 0, None, False, False)[0])
        if "status" in answer:
            node.update_state(answer["status"])
            node.append_log(answer["log"])
        row = node_registry.node_row(node)
        json.dumps(vars(row), allow_nan=False)
        assert int(node.board.rpartition(":")[2] or 0) < 65536
        html = views.View(snapshot_of_node(row))._repr_mimebundle_()["text/html"]
        assert foreign_elements(html) == []
    assert refused > 100


def snapshot_of_node(row: NodeRow) -> Snapshot:
    spark = SparkRow(phase="running", since=0.0, reserved=1, needed=1, input_mode="SPARK",
                     application="a", nodes=(row,))  # fmt: skip
    return Snapshot(1, 0.0, "c", launcher="spark", state="ready", spark=spark)


def test_values_of_a_handshake_are_counted_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(validation, "MAX_VALUES", 100)
    line = b"TFDHELLO [" + b"[]," * 100 + b"[]]\n"
    with pytest.raises(errors.InvalidMessage, match="more than 100 values"):
        read_handshake("blue", iter([line]))


@pytest.mark.parametrize("metadata", [7, "a", [1]])
def test_metadata_of_an_output_is_checked(metadata: Any) -> None:
    message = {
        **{"header": {"msg_type": "display_data"}, "parent_header": {}},
        "content": {"data": {"text/plain": "a"}, "metadata": metadata},
    }
    with pytest.raises(errors.InvalidMessage, match="metadata"):
        messages.kernel_message(message)


def test_optional_field_that_is_missing_stays_missing() -> None:
    done = {"kind": "reply", "request_id": "1", "value": 3}
    assert messages.bus_message(done) == done
    failed = {**done, "error": {"code": "TFD000", "what": "a", "task": None}}
    assert messages.bus_message(failed) == failed
