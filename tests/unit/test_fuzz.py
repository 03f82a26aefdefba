"""Random messages, files and variables for each receiver of data from others.

Valid data is changed at random places, or replaced. A receiver may only raise its documented
errors. ``make fuzz`` tries many more inputs.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import math
import os
import platform
import random
import re
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests._fuzz_total import PROPERTY
from tests._fuzzing import (
    CLUSTER_STATE,
    ERROR,
    EVENTS,
    JSON,
    RAW,
    REPLIES,
    REPLY_VALUES,
    Receiver,
    answered,
    as_json,
    direct,
    like,
    near,
    web_server,
)
from tests._fuzzing_jupyter import JUPYTER
from tests._fuzzing_services import SERVICES
from tests._fuzzing_systems import SYSTEMS
from tfd_notebook import errors
from tfd_notebook._version import VERSION
from tfd_notebook.agent import admin_policy
from tfd_notebook.agent.agent import Agent
from tfd_notebook.agent.bridges import stdio
from tfd_notebook.agent.sessions import SOCKET
from tfd_notebook.bus.session import Session as BusSession
from tfd_notebook.bus.session import is_message
from tfd_notebook.cluster import commands
from tfd_notebook.cluster.control_socket import ControlServer
from tfd_notebook.cluster.journal_copy import JournalCopy
from tfd_notebook.launchers import profiles
from tfd_notebook.launchers.client.agent_client import AgentClient
from tfd_notebook.launchers.client.handshake import read_handshake
from tfd_notebook.launchers.client.rendezvous import Rendezvous, RendezvousHost
from tfd_notebook.net import agent_protocol, messages, plain_values, runtime_dir, secure_channel
from tfd_notebook.net.host import tensorflow_version
from tfd_notebook.net.secure_channel import AuthenticatedChannel
from tfd_notebook.remote_kernel.bus_client import BusClient
from tfd_notebook.resolvers.slurm import SlurmResolver
from tfd_notebook.resolvers.static import ClusterFileResolver, SageMakerResolver, TFConfigResolver
from tfd_notebook.resolvers.tpu import TPUResolver
from tfd_notebook.spark.driver.messages import spark_message

#: Number of inputs of all receivers in ``make fuzz``.
COUNT = int(os.environ.get("TFD_TEST_INPUTS", "0"))
#: Inputs of this number that Hypothesis selects and remembers. The others come from random bytes,
#: because its memory of the earlier inputs takes more time than most receivers.
SELECTED = 1000
#: Bytes that the peak of this process may grow by one input. A channel's first buffer has 4 MiB.
MEMORY = 128_000_000

# Receivers


def check_answer(answer: dict[str, Any]) -> None:
    """Fail for the error of a bug in an answer to a request."""
    what = (answer.get("error") or {}).get("what", "")
    assert not re.match(r"\w+(Error|Exception): ", what), what


def receive_frame(body: Any) -> None:
    """Pass a message to the client of an agent with a request of each kind."""
    client = AgentClient("a", "127.0.0.1", lambda data: None)
    client.listen("c", lambda event: None)
    for method in REPLY_VALUES:
        task = {"role": "worker", "index": 0, "host": "127.0.0.1", "port": 4000}
        tasks = [task] if method == "reserve_ports" else ["worker:0"]
        client.submit(method, cluster="c", tasks=tasks)
    client.handle_line(agent_protocol.encode(body, 1))


def receive_line(line: bytes) -> None:
    AgentClient("a", "127.0.0.1", lambda data: None).handle_line(line)


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


HANDSHAKE = {
    **{"package": VERSION, "python": platform.python_version()},
    "tensorflow": tensorflow_version(),
    **{"executable": "/usr/bin/python", "identity": "host", "cull_seconds": None},
    "connection": "10.0.0.1 1 10.0.0.2 2",
}
HANDSHAKES = tuple(
    stdio.HANDSHAKE.encode() + json.dumps(message).encode() + b"\n"
    for message in (HANDSHAKE, {**HANDSHAKE, "error": ERROR}, {**HANDSHAKE, "import_error": "a"})
)


def receive_frames_of_channel(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, AuthenticatedChannel(theirs) as channel:
        ours.sendall(data[:60_000])  # the buffer of a socket has more
        ours.shutdown(socket.SHUT_WR)
        received = 0
        try:
            while True:
                channel.receive(60)
                received += 1
        except EOFError:
            if not received:
                raise


def framed(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("!IQ", len(header), len(body)) + header + body


RANK_RESULT = plain_values.pack(
    {
        **{"a": [1, 2**70, 1.5, math.inf], (1, "b"): {b"c", "d"}, None: frozenset({True})},
        "arrays": [np.zeros((2, 3), "<f4"), np.array(["e", "fg"]), np.datetime64("2026-01-01")],
    }
)


def receive_rank_result(value: Any) -> None:
    """Receive a rank's reply as the client of an agent does, and unpack its result."""
    reply = messages.reply_value("run_rank", {"result": value})
    assert repr(plain_values.unpack(reply["result"]))


STATUS = {
    **{"state": "running", "reason": "", "ended": False, "numbers": {"rows": 3}, "path": "/a"},
    **{"board": "http://h:1", "board_error": "", "board_pid": 7, "open_to": "h", "error": ""},
}
SPARK = (
    {
        **{"type": "reserved", "node": 0, "address": "h:1", "executor": "1", "host": "h"},
        **{"jvm": 7, "gpu": "", "attempt": 0},
    },
    {"type": "start_failed", "node": 0, "error": ERROR},
    {"type": "feed_failed", "stage": 1, "error": ERROR},
    {"type": "register_worker", "host": "h", "pid": 7, "path": "/a"},
    {"type": "update", "node": 0, "pid": 7, "seq": 1, "log": "a", "status": STATUS},
    {"type": "feed_repeated", "partition": 1, "attempt": 0},
    {"type": "list_workers", "host": "h"},
)
KINDS = tuple(str(message["type"]) for message in SPARK)


@contextlib.contextmanager
def agent_socket(directory: Path) -> Iterator[Callable[[bytes], None]]:
    loop = asyncio.new_event_loop()
    servers = []
    start = asyncio.start_unix_server

    async def start_known(*arguments: Any, **options: Any) -> asyncio.Server:
        servers.append(await start(*arguments, **options))
        return servers[-1]

    async def listen() -> None:
        # An agent closes its listener by the end of its process.
        with mock.patch("asyncio.start_unix_server", start_known):
            await Agent("a", directory, None).listener.open()

    async def talk(data: bytes) -> None:
        reader, writer = await asyncio.open_unix_connection(directory / SOCKET)
        writer.write(data)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 60)
        writer.close()

    loop.run_until_complete(listen())
    # An agent prints the traceback of an unexpected error in a request.
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        yield lambda data: (printed.truncate(0), loop.run_until_complete(talk(data)))[1]
    servers[0].close()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def request_lines(number: int, message: dict[str, Any], valid: bool) -> bytes:
    """Return the lines of a session with this request, or with this message as its first line."""
    line = agent_protocol.encode(message, 1)
    grace = {"session": str(number), "last_seq": 0, "grace": 0}
    opened = agent_protocol.encode({"method": "open_session", "arguments": grace})
    return opened + line if valid else line


REQUESTS = (
    {"method": "open_session", "arguments": {"session": "s", "last_seq": 0, "grace": 0}},
    {"id": 1, "method": "clusters", "arguments": {}},
    {"id": 1, "method": "adopt", "arguments": {"cluster": "c"}},
    {"id": 1, "method": "logs", "arguments": {"cluster": "c", "task": "worker:0"}},
    {"method": "ping", "arguments": {"seq": 1}},
    {"method": "close_session"},
)


@contextlib.contextmanager
def rendezvous(directory: Path) -> Iterator[Callable[[Any], None]]:
    server = Rendezvous("127.0.0.1")
    server.expect({})

    def receive(header: Any) -> None:
        address = f"127.0.0.1:{server.port}"
        with secure_channel.connect(address, server.secret, 60) as channel:
            channel.send(header)
            assert channel.receive(60)[0] == {"close": True}

    try:
        yield receive
    finally:
        server.close()


@contextlib.contextmanager
def rendezvous_host(directory: Path) -> Iterator[Callable[[tuple[bytes, bool]], None]]:
    """Pass the messages of a host that connects, before a session or as the answer for one."""
    server = Rendezvous("127.0.0.1")
    server.expect({})
    module = "tfd_notebook.launchers.client.rendezvous"

    def receive(value: tuple[bytes, bool]) -> None:
        data, is_answer = value
        host = RendezvousHost("one", server)
        with socket.create_connection(listener.getsockname()) as peer:
            channel = AuthenticatedChannel(listener.accept()[0])
            offered = pool.submit(host.offer, channel, {})
            try:
                if is_answer:
                    answered = pool.submit(answer, peer, data)
                    host.connect("0123456789ab", True).close()
                    answered.result(60)
                else:
                    send(peer, data)
                    offered.result(60)
            finally:
                host.close()
                channel.close()
                offered.exception(60)

    def send(peer: socket.socket, data: bytes) -> None:
        peer.sendall(data[:60_000])  # the buffer of a socket has more
        peer.shutdown(socket.SHUT_WR)

    def answer(peer: socket.socket, data: bytes) -> None:
        peer.settimeout(60)
        if peer.recv(1):  # of the request
            send(peer, data)

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        ThreadPoolExecutor(2) as pool,
        mock.patch(f"{module}._POLL_SECONDS", 0.001),
        contextlib.closing(server),
    ):
        yield receive


@contextlib.contextmanager
def control_socket(directory: Path) -> Iterator[Callable[[bytes], None]]:
    server = ControlServer(directory / "s")

    def receive(data: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(60)
            client.connect(str(server.path))
            client.sendall(data[:60_000] + b"\n")
            client.shutdown(socket.SHUT_WR)
            check_answer(json.loads(client.makefile("rb").read()))

    try:
        yield receive
    finally:
        server.close()


def receive_from_browser(message: Any) -> None:
    sent: list[dict[str, Any]] = []
    session = BusSession(lambda message, buffers: sent.append(message), everything=True)
    session.handle_message({"kind": "hello", "client": "tab"})
    if is_message(message):
        session.note_message(message["client"])
        if message["kind"] == "command":
            hash(commands.queue_of(message))
            session.execute_command(message)
        else:
            session.handle_message(message)
        session.push({}, {})
        session.remove_silent()
    for answer in sent:
        check_answer(answer)


COMMANDS = (
    {"command": "list"},
    {"command": "logs", "name": "c", "task": "worker:0", "lines": 5, "offset": 0},
    {"command": "scale", "name": "c", "workers": 2},
    {"command": "detach", "name": "c", "hours": 1.5},
    {"command": "step", "name": "c", "count": 1},
    {"command": "hold", "name": "c", "worker": 0, "held": True},
)
PANEL = (
    {"kind": "hello", "client": "tab", "acks": True},
    {"kind": "ack", "client": "tab", "seq": 1},
    {"kind": "subscribe", "client": "tab", "clusters": ["c"]},
    {"kind": "flush", "client": "tab", "request_id": 1},
    {"kind": "resync", "client": "tab"},
    {"kind": "bye", "client": "tab"},
    *({"kind": "command", "client": "tab", "request_id": 1, **command} for command in COMMANDS),
)
BUS = (
    {
        **{"kind": "state", "seq": 1, "full": True},
        "state": {"clusters": {"c": CLUSTER_STATE}},
    },
    {
        **{"kind": "values", "seq": 1, "full": True, "cluster": "c", "columns": [["id", "<i4"]]},
        **{"functions": ["f"], "errors": {"1": "a"}, "lost": [[0, 1, 2, 3]], "paused": False},
    },
    {"kind": "reply", "client": "a", "request_id": "1", "error": ERROR},
    {"kind": "hello", "protocol": 1, "version": "1"},
)


def receive_from_kernel(message: Any) -> None:
    client = BusClient(lambda message: None)
    client.handle_message(BUS[0], [])  # it subscribes to the closures of this state
    client.handle_message(message, [b"\0" * 8])


def receive_journal(value: Any) -> None:
    answers = iter([value])
    journal = JournalCopy(lambda have: next(answers, {}))
    try:
        journal.refresh()
    finally:
        journal.close()


@contextlib.contextmanager
def metadata_server(directory: Path) -> Iterator[Callable[[bytes], None]]:
    with web_server(directory) as (address, answer):

        def receive(data: bytes) -> None:
            answer[0] = data
            with mock.patch.dict(os.environ, {"GCE_METADATA_HOST": address}):
                TPUResolver("name")

        yield receive


def file_receiver(name: str, read: Callable[[Path], object]) -> Any:
    """Return the opening function of the reader of a file."""

    def open_file(directory: Path) -> Any:
        def receive(content: bytes) -> None:
            (directory / name).write_bytes(content)
            read(directory / name)

        return contextlib.nullcontext(receive)

    return open_file


def read_state(path: Path) -> None:
    state = runtime_dir.read_state(path.parent)
    runtime_dir.has_ended(state.get("process"))
    runtime_dir.is_running(state.get("owner"))
    any(lease is not None for lease in (state.get("clusters") or {}).values())


class RootFile(type(Path())):  # type: ignore[misc]
    """A file that only root can write."""

    def stat(self, **options: Any) -> Any:
        return SimpleNamespace(st_uid=0, st_mode=0o100600)


def read_policy(path: Path) -> None:
    limits = admin_policy.limits(RootFile(path))
    limits.too_much_memory(5.0)
    limits.check_lease(1.0)
    limits.check_cluster("ssh", 3, 1, ["10.0.0.0/9"])


def environment_receiver(read: Callable[[], object], *names: str) -> Any:
    """Return the opening function of the reader of environment variables."""

    def receive(values: tuple[bytes, ...]) -> None:
        texts = [value.replace(b"\0", b"").decode(errors="surrogateescape") for value in values]
        with mock.patch.dict(os.environ, dict(zip(names, texts, strict=True))):
            read()

    return direct(receive)


def resolve(resolver: Any) -> None:
    for read in (
        *(resolver.tasks, resolver.cluster_spec, resolver.master, lambda: resolver.task_type),
        *(lambda: resolver.task_id, lambda: resolver.rpc_layer),
    ):
        with contextlib.suppress(errors.ResolveError, errors.UsageError):
            read()


CLUSTER = {"worker": ["10.0.0.1:1", "h:2"], "ps": {"3": "h:3"}}
TF_CONFIG = {
    **{"cluster": CLUSTER, "task": {"type": "worker", "index": 0}},
    **{"rpc_layer": "grpc", "session_master": None},
}
SLURM = (
    *("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_DISTRIBUTION"),
    *("SLURM_DIST_PLANESIZE", "SLURMD_NODENAME"),
)
#: Lists of more hosts than a cluster has, or of names that are too long.
LONG_HOSTS = (
    *(b"n[1-100000][1-100000]", b"n[1-99999999999999999999]", b"n" + b"[1]" * 1000),
    *(b"n" * 9999 + b"[1-100000]", b"n[" + b"0" * 9999 + b"1-100000]", b"n[1-9,1-100000]"),
)
STATE_IDENTITY = {"host": "h", "boot": "b", "pid_namespace": "1", "pid": 7, "start": 5.0}
STATE = {
    **{"agent": "a", "pid": 7, "process": STATE_IDENTITY, "owner": STATE_IDENTITY},
    "clusters": {"c": None, "d": 1e9},
}
PROFILE = b'launcher = "ssh"\nhosts = ["a", "b"]\nport = 1\n[options]\nx = {a = 1.5}\n'
POLICY = (
    b'tasks = 32\nmemory_gb = 16\ngpus = 4\nlease_hours = 48.5\nlaunchers = ["local", "ssh"]\n'
    b'allow = ["10.0.0.0/8"]\n'
)

RECEIVERS = {
    **JUPYTER,
    **SERVICES,
    **SYSTEMS,
    "replies of an agent": Receiver(like(*REPLIES).filter(is_object), direct(receive_frame)),
    "events of an agent": Receiver(like(*EVENTS).filter(is_object), direct(receive_frame)),
    "lines of an agent": Receiver(
        near(*(agent_protocol.encode(body, 1) for body in (*EVENTS, *REPLIES))),
        direct(receive_line),
    ),
    "agent": Receiver(
        st.builds(request_lines, st.integers(0), like(*REQUESTS).filter(is_object), st.booleans())
        | near(b"".join(agent_protocol.encode(message, 1) for message in REQUESTS)),
        agent_socket,
        (ConnectionError,),
        found=(
            request_lines(
                0,
                {
                    "method": "open_session",
                    "arguments": {"session": "s", "last_seq": 0, "grace": 10**400},
                },
                False,
            ),
        ),
    ),
    "process of an engine": Receiver(
        like({"host": "0", "process": 1}).filter(is_object),
        rendezvous,
        (EOFError, OSError),
        found=({"host": "0", "process": []},),
        gate=10,
    ),
    "result of a rank": Receiver(
        like(*(item for pair in RANK_RESULT["dict"] for item in pair), RANK_RESULT),
        direct(receive_rank_result),
        (errors.InvalidMessage, ValueError, TypeError),
        found=(
            *({"array": [dtype, [1], ""]} for dtype in ("i4,(", ",", "9" * 5000)),
            {"array": ["<U1", [2], "eHh4eHh4eHg="]},
        ),
    ),
    "host of an engine": Receiver(
        st.tuples(
            as_json(like({"handshake": HANDSHAKE}, {"ended": "a"}, {})).map(framed)
            | near(*(framed(line) for line in (b'{"ended": "a"}', b"{}"))),
            st.booleans(),
        ),
        rendezvous_host,
        (OSError, errors.TfdError),
        found=((framed(json.dumps({"handshake": HANDSHAKE}).encode()), True),),
    ),
    "messages of Spark": Receiver(
        like(*SPARK), direct(lambda body: spark_message(body, *KINDS)), (errors.InvalidMessage,)
    ),
    "control socket": Receiver(
        as_json(like(*COMMANDS)) | near(*(json.dumps(command).encode() for command in COMMANDS)),
        control_socket,
        found=(b"[" * 50_000,),
    ),
    "bus": Receiver(like(*PANEL), direct(receive_from_browser)),
    "bus of another kernel": Receiver(
        like(*BUS), direct(receive_from_kernel), (errors.InvalidMessage,)
    ),
    "secure channel": Receiver(
        near(*(framed(b'{"a": 1}', b"x" * 9) + framed(b"{}") for _ in range(2)))
        | as_json(JSON).map(framed),
        direct(receive_frames_of_channel),
        (OSError, EOFError),
    ),
    "handshake": Receiver(
        as_json(like(HANDSHAKE)).map(lambda text: stdio.HANDSHAKE.encode() + text)
        | near(*HANDSHAKES),
        direct(lambda line: read_handshake("h", iter([line]))),
        (errors.TfdError,),
    ),
    "journal copy": Receiver(
        like(REPLY_VALUES["journal"]), direct(receive_journal), (errors.InvalidMessage,)
    ),
    "state.json": Receiver(
        as_json(like(STATE)) | near(json.dumps(STATE).encode()),
        file_receiver("state.json", read_state),
    ),
    "profile": Receiver(
        near(PROFILE),
        file_receiver("p.toml", profiles.read),
        (errors.UsageError,),
        found=(PROFILE + b"x = " + b"9" * 5000, b"x = " + b"[" * 5000),
    ),
    "policy.toml": Receiver(
        near(POLICY, POLICY + b"# " + POLICY),
        file_receiver("policy.toml", read_policy),
        (errors.UsageError, errors.Refused),
        found=(b"memory_gb = 1" + b"0" * 400, b"gpus = " + b"[" * 5000),
    ),
    "TF_CONFIG": Receiver(
        st.tuples(as_json(like(TF_CONFIG)) | near(json.dumps(TF_CONFIG).encode())),
        environment_receiver(lambda: resolve(TFConfigResolver()), "TF_CONFIG"),
        found=((b"[" * 100_000,), (b'{"task": {"type": "a", "index": 1e999}}',)),
    ),
    "SageMaker's variables": Receiver(
        st.tuples(as_json(like(["a", "b"])), st.just(b"a") | RAW),
        environment_receiver(lambda: resolve(SageMakerResolver()), "SM_HOSTS", "SM_CURRENT_HOST"),
    ),
    "Slurm's variables": Receiver(
        st.tuples(
            near(b"n[1-2,10],login", b"a[1-3]b[0-4]"),
            near(b"3(x2),1", b"1(x3)"),
            near(b"0"),
            near(b"block", b"cyclic", b"plane"),
            near(b"2"),
            near(b"n1"),
        ),
        environment_receiver(lambda: resolve(SlurmResolver()), *SLURM),
        found=(
            *((hosts, b"1", b"0", b"block", b"", b"") for hosts in LONG_HOSTS),
            *((b"n1", tasks, b"0", b"block", b"", b"") for tasks in (b"9" * 5000, b"9" * 9)),
            (b"n1", b"1", b"9" * 5000, b"plane", b"9" * 5000, b""),
        ),
    ),
    "TPU_CONFIG": Receiver(
        st.tuples(as_json(like({"tpu_node_name": "grpc://h:1,[::1]", "zone": "z"})) | RAW),
        environment_receiver(lambda: resolve(TPUResolver(project="p", zone="z")), "TPU_CONFIG"),
        (errors.ResolveError, errors.UsageError),
        found=((b"[" * 100_000,),),
    ),
    "metadata server": Receiver(
        near(answered(b"project"), answered(b"projects/1/zones/z")) | RAW.map(answered),
        metadata_server,
        (errors.ResolveError,),
        found=(b"\n", answered(b""), answered(b"a" * 100_000)),
    ),
    "cluster file": Receiver(
        as_json(like(TF_CONFIG, CLUSTER)) | near(json.dumps(CLUSTER).encode()),
        file_receiver("c.json", lambda path: resolve(ClusterFileResolver(path))),
    ),
    "cluster file in TOML": Receiver(
        near(b'worker = ["h:1"]\n[cluster]\nworker = ["h:1"]\n'),
        file_receiver("c.toml", lambda path: resolve(ClusterFileResolver(path))),
        found=(b"x = " + b"[" * 5000, b"x = " + b"9" * 5000),
    ),
}


@pytest.fixture
def unhandled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The exceptions that are logged, or that end a thread."""
    found: list[Any] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                found.append(record.exc_info)

    monkeypatch.setattr(threading, "excepthook", lambda hook: found.append(hook))
    handler = Handler()
    for name in ("tfd_notebook", "asyncio"):
        logging.getLogger(name).addHandler(handler)
    yield found
    for name in ("tfd_notebook", "asyncio"):
        logging.getLogger(name).removeHandler(handler)


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# An input may be long.
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.timeout(180 + COUNT // 50)
@pytest.mark.parametrize("name", RECEIVERS)
def test_receiver_raises_only_its_documented_errors(
    name: str,
    tmp_path: Path,
    unhandled: list[Any],
    record_property: Callable[[str, object], None],
) -> None:
    receiver = RECEIVERS[name]
    wanted = math.ceil(COUNT / len(RECEIVERS))
    count = accepted = 0

    @hypothesis.settings(
        max_examples=max(min(wanted, SELECTED), receiver.gate),
        deadline=None,
        derandomize=not COUNT,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(receiver.inputs)
    def check(value: Any) -> None:
        nonlocal count, accepted
        count += 1
        memory = peak_memory()
        try:
            with contextlib.suppress(*receiver.errors):
                receive(value)
                accepted += 1
            assert not unhandled, unhandled.pop()
            assert peak_memory() - memory < MEMORY
        except BaseException:
            print(f"failed for {value!r}")
            raise

    for value in receiver.found:
        check = hypothesis.example(value)(check)
    with receiver.open(tmp_path) as receive:
        check()
        while count < wanted:
            size = random.choice((64, 256, 1024, 4096))
            check.hypothesis.fuzz_one_input(random.randbytes(size))
    assert accepted
    record_property(PROPERTY, count)
    print(f"\n{name}: {count} inputs")
