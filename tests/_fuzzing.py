"""Receivers of data from others, valid messages of agents, and strategies of invalid data.

Invalid data is valid data with changes at random places, or random.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tfd_notebook.bus.snapshot_feed import SnapshotFeed
from tfd_notebook.model.events import Notice
from tfd_notebook.model.snapshot import (
    AdaptationRow,
    CoordinatedRow,
    CoordinatorRow,
    GpuRow,
    NodeRow,
    RankRow,
    Snapshot,
    SparkRow,
    StreamRow,
    TaskRow,
)
from tfd_notebook.model.spec import Role, TaskState
from tfd_notebook.net import agent_protocol

DEEP: list[Any] = []
for _ in range(100):
    DEEP = [DEEP]
ODD = (
    *(None, True, 0, -1, 2**31, 2**63, 10**400, -(10**30), 0.5, 1e308),
    *(float("nan"), float("inf"), "", "0", "-1", "\ud800", "\u0661", "a\nb\x1b]52;c;x\x07\0"),
    *("x" * 50_000, "../" * 9, "::1", "127.0.0.1:1", "worker:0", [], {}, [[]], {"a": 1}, DEEP),
)
SCALARS = st.sampled_from(ODD) | st.text(max_size=5) | st.integers() | st.floats()
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
RAW = st.binary(max_size=60) | st.sampled_from(
    [b"", b"\n", b"null", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"1e999", b"\xff\xfe"]
)
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 200),
        st.sampled_from(["replace", "drop", "nest", "name", "repeat", "add"]),
        JSON,
    ),
    max_size=3,
)


def paths_of(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths_of(inner, (*path, key))


def mutated(valid: Any, changes: list[tuple[int, str, Any]]) -> Any:
    """Return a copy of a JSON value with changes at these positions."""
    root = {"": copy.deepcopy(valid)}
    for position, how, change in changes:
        new = copy.deepcopy(change)
        paths = [*paths_of(root[""], ("",))]
        *parents, key = paths[position % len(paths)]
        parent: Any = root
        for name in parents:
            parent = parent[name]
        old = parent[key]
        if how == "drop" and parents:
            del parent[key]
        elif how == "add" and isinstance(old, dict):
            old[str(new)[:9]] = new
        elif how == "repeat" and isinstance(old, (list, str)):
            parent[key] = old * 2
        else:
            parent[key] = {"nest": [old], "name": {"a": old}}.get(how, new)
    return root[""]


def like(*valid: Any) -> st.SearchStrategy[Any]:
    """Return JSON values, most of them similar to these."""
    return st.builds(mutated, st.sampled_from(valid), CHANGES) | JSON


def corrupted(data: bytes, position: int, length: int, new: bytes) -> bytes:
    start = position % (len(data) + 1)
    return data[:start] + new + data[start + length :]


def near(*valid: bytes) -> st.SearchStrategy[bytes]:
    """Return bytes, most of them similar to these."""
    positions = st.integers(0, 2000)
    known = st.builds(corrupted, st.sampled_from(valid), positions, st.integers(0, 9), RAW)
    return st.builds(corrupted, known, positions, st.integers(0, 9), st.binary(max_size=2)) | RAW


def as_json(values: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    return values.map(lambda value: json.dumps(value).encode())


# Receivers


class Receiver(NamedTuple):
    """A receiver: its inputs, a function that opens it in a directory, and its errors."""

    inputs: st.SearchStrategy[Any]
    open: Callable[[Path], contextlib.AbstractContextManager[Callable[[Any], object]]]
    errors: tuple[type[BaseException], ...] = ()
    #: Inputs that a receiver once failed for.
    found: tuple[Any, ...] = ()
    #: Number of its inputs in the gate: few if each needs several connections.
    gate: int = 50


def direct(receive: Callable[[Any], object]) -> Any:
    """Return the opening function of a receiver without resources."""
    return lambda directory: contextlib.nullcontext(receive)


@contextlib.contextmanager
def web_server(directory: Path) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the address of a server, and the list with the bytes that it answers."""
    answer = [b""]
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as previous:
            while True:
                peer, _ = listener.accept()
                previous.close()  # a client that keeps its connection must not delay the next one
                with contextlib.suppress(OSError):
                    request = previous.enter_context(peer.makefile("rb"))
                    previous.enter_context(peer)
                    head = b"".join(iter(request.readline, b"\r\n"))
                    key = re.search(rb"Sec-WebSocket-Key: (\S+)", head)
                    accept = (key[1] if key else b"") + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
                    digest = base64.b64encode(hashlib.sha1(accept).digest())
                    peer.sendall(answer[0].replace(b"ACCEPT", digest))
                    peer.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", answer
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def answered(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


UPGRADED = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: ACCEPT\r\n\r\n"
)


def websocket_frame(data: bytes, kind: int) -> bytes:
    return struct.pack("!BBH", 0x80 | kind, 126, len(data)) + data


# Messages of agents

ERROR = {"code": "TFD101", "what": "failed", "task": "worker:0", "fix": None}
TASK = {
    **{"event": "task", "cluster": "c", "task": "worker:0", "state": "ready", "reason": ""},
    **{"address": "127.0.0.1:4000", "pid": 7, "restarts": 0, "log": ["line"]},
}
EVENTS = (
    TASK,
    {"event": "measure", "cluster": "c", "task": "worker:0", "rss_mb": 1.5, "bytes_sent": 7},
    {"event": "gpus", "cluster": "c", "gpus": [{"index": 0, "name": "g", "memory": 1, "task": ""}]},
    {"event": "notice", "cluster": "c", "severity": "info", "what": "a", "task": None},
    {"event": "lease", "cluster": "c", "left": 5.0},
    {"event": "ended", "cluster": "c", "reason": "stopped"},
    {"event": "hello", "version": agent_protocol.VERSION, "full": False, "package": "1", "pid": 1},
    {"event": "hello", "version": 1, "full": True, "package": "1"},
    {"event": "failed", "reason": "a"},
)
REPLY_VALUES = {
    "reserve_ports": {"worker:0": "127.0.0.1:4000"},
    "open_ranks": {"worker:0": "127.0.0.1:4001"},
    "adopt": {
        **{"description": {}, "directory": "/tmp/a", "lease": 5.0, "time_limit_left": None},
        "tasks": [TASK],
    },
    "certify_tunnels": {"port": 7},
    "open_tunnels": {"port": 7, "name": "0123456789ab.tfd", "authority": "-----BEGIN"},
    "check_reachability": {"worker:0": ["", "127.0.0.1"]},
    "clusters": [
        {"name": "c", "lease": 1, "description": {}, "tasks": ["ready"], "has_listeners": True}
    ],
    "connect": ["", "10.0.0.1", "10.0.0.2"],
    "gpus": {"gpus": [{"index": 0, "name": "g", "memory": 1, "uuid": "u"}], "reason": ""},
    "inspect": {"worker:0": {"stale": [], "ops": ["MatMul"]}},
    "journal": {"tf_data_dispatcher_journal/journal_0": [0, "AAAA"]},
    "logs": ["text", 4],
    "listening_addresses": ["::", "10.0.0.1"],
    "read_nonce": "0" * 32,
    "stacks": {
        "worker:0": {
            "note": "",
            "threads": [
                {
                    **{"name": "t", "pipeline": True},
                    "frames": [
                        {"function": "f", "file": "a", "line": 1, "users": True, "seconds": None}
                    ],
                }
            ],
        }
    },
    "run_rank": {"kind": "ValueError", "text": "a", "traceback": "b"},
}
REPLIES = [
    {"reply_to": number, "ok": True, "value": value}
    for number, value in enumerate(REPLY_VALUES.values(), 1)
]

# The state of a cluster on the bus of a kernel

SNAPSHOT = Snapshot(
    *(1, 2.0, "c", "local", "ready"),
    tasks=(TaskRow("worker:0", Role.WORKER, 0, pid=7, state=TaskState.READY),),
    streams=(StreamRow("stream 1", "distribute", "running"),),
    ranks=(RankRow("worker:0", 0, "h", "running"),),
    gpus=(GpuRow("h", 0, "g"),),
    planned={Role.WORKER: 1},
    events=(Notice("info", "a"),),
    lease=9.0,
    coordinator=CoordinatorRow(
        "running", counts={"ready": 1}, workers=(CoordinatedRow(0, "idle"),)
    ),
    spark=SparkRow("running", 1.0, nodes=(NodeRow("worker", 0),)),
    adaptation=AdaptationRow(1, 4),
)
CLUSTER_STATE = SnapshotFeed().full([SNAPSHOT])["clusters"]["c"]
