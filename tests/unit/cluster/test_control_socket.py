"""The socket through which other processes of this user control this process's clusters."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import stat
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests._programs import program
from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.cluster import control_socket as cluster_control_socket
from tfd_notebook.cluster.cluster import Cluster
from tfd_notebook.cluster.registry import clusters
from tfd_notebook.net import control_calls, unix_socket, validation
from tfd_notebook.net.runtime_dir import control_socket
from tfd_notebook.resolvers import providers

ME = os.getpid()


@pytest.fixture(autouse=True)
def _own_runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # `tmp_path` may exceed the maximum length of a socket's path.
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("TFD_RUNTIME_DIR", f"{directory}/run")
        yield


@pytest.fixture
def listening() -> Iterator[Path]:
    with Cluster(launcher="fake", data_workers=1, name="here"):
        yield cluster_control_socket.ensure_started()
    cluster_control_socket.stop()


def raw(path: Path, sent: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(60)
        peer.connect(str(path))
        # A busy process replies and closes the connection before it reads.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            peer.sendall(sent)
        return json.loads(peer.makefile().readline())  # type: ignore[no-any-return]


def test_socket_answers_a_request(listening: Path) -> None:
    assert control_calls.processes() == (ME,)
    (record,) = control_calls.clusters()
    assert (record["name"], record["state"], record["pid"], record["observed"]) == (
        "here",
        "ready",
        ME,
        2,
    )
    view = control_calls.call(ME, {"command": "snapshot", "name": "here", "width": 60})
    assert view["snapshot"]["tasks"][1]["task"] == "data_worker:0"
    assert "data_worker:0" in view["text"]
    answer = control_calls.call(ME, {"command": "logs", "name": "here", "task": "data_worker:0"})
    assert answer["text"] == "data_worker:0 has no output"
    more = control_calls.call(
        ME, {"command": "logs", "name": "here", "task": "data_worker:0", "offset": answer["offset"]}
    )
    assert more == {"text": "", "offset": answer["offset"]}
    assert control_calls.call(ME, {"command": "stop", "name": "here"}) == "stopped"
    assert not clusters()


def test_only_this_user_can_open_it(listening: Path) -> None:
    assert stat.S_IMODE(listening.stat().st_mode) == 0o600
    assert stat.S_IMODE(listening.parent.stat().st_mode) == 0o700


def test_peer_credentials_come_from_the_system(
    listening: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert control_calls.clusters()
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(60)
        peer.connect(str(listening))
        assert peer.recv(1) == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\n",
        b"[]\n",
        b'"list"\n',
        b'{"command": "exec"}\n',
        b'{"command": ["list"]}\n',
        b'{"command": "stop"}\n',
        b'{"command": "stop", "name": ["here"]}\n',
        b'{"command": "stop", "name": "other"}\n',
        b'{"command": "logs", "name": "here", "lines": "5"}\n',
        b'{"command": "logs", "name": "here", "lines": -5}\n',
        b'{"command": "logs", "name": "here", "task": 7}\n',
        b'{"command": "logs", "name": "here", "task": "data_worker:9"}\n',
        b'{"command": "logs", "name": "here", "task": "data_worker:0", "offset": -1}\n',
        b'{"command": "snapshot", "name": "here", "width": true}\n',
        b'{"command": "snapshot", "name": "here", "hold": 1e9}\n',
        b'{"command": "pause", "name": "here"}\n',
        b'{"command": "step", "name": "here", "count": 0}\n',
        b'{"command": "cancel", "name": "here", "id": "7"}\n',
    ],
)
def test_invalid_requests_are_refused_without_effect(listening: Path, sent: bytes) -> None:
    assert raw(listening, sent)["error"]["code"].startswith("TFD10")
    assert clusters()["here"].state == "ready"


def test_oversized_request_is_rejected(listening: Path) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(60)
        peer.connect(str(listening))
        with pytest.raises(OSError, match=r"[Bb]roken pipe|reset"):
            peer.sendall(b"{" * 10_000_000)
    assert control_calls.clusters()


def test_reply_with_too_many_values_is_not_parsed(
    listening: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "MAX_VALUES", 1)
    with pytest.raises(errors.InvalidMessage, match="more than 1 values"):
        control_calls.call(ME, {"command": "logs", "name": "here", "task": "data_worker:0"})


def test_errors_keep_their_class(listening: Path) -> None:
    with pytest.raises(errors.UnknownName, match="no task 'data_worker:9'") as caught:
        control_calls.call(ME, {"command": "logs", "name": "here", "task": "data_worker:9"})
    assert caught.value.fix


def test_silent_peers_do_not_block_others(listening: Path) -> None:
    silent = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for peer in silent:
        peer.connect(str(listening))
    assert control_calls.clusters(timeout=60)
    for peer in silent:
        peer.close()


@pytest.fixture
def silent(listening: Path) -> Iterator[list[socket.socket]]:
    """Return eight connected clients that send nothing."""
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(8)]
        for peer in peers:
            peer.settimeout(60)
            peer.connect(str(listening))
        yield peers


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    # Clients stay connected, and a call does not repeat its request.
    monkeypatch.setattr(cluster_control_socket, "_PEER_SECONDS", 60.0)
    monkeypatch.setattr(control_calls, "_BUSY_SECONDS", 60.0, raising=False)


@pytest.mark.usefixtures("_patient", "silent")
def test_ninth_client_is_answered_that_the_process_is_busy(listening: Path) -> None:
    assert raw(listening, b"") == {"busy": 8}
    with pytest.raises(errors.TimeLimit, match=f"process {ME} is busy with 8 other requests"):
        control_calls.call(ME, {"command": "list"}, 60)
    unanswered: list[errors.TfdError] = []
    assert control_calls.clusters(60, unanswered=unanswered) == []
    assert len(unanswered) == 1


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_control_socket, "_PEER_SECONDS", 0.05)
    monkeypatch.setattr(control_calls, "_BUSY_SECONDS", 0.01, raising=False)


@pytest.mark.usefixtures("_impatient")
def test_ninth_client_waits_until_silent_clients_are_dropped(silent: list[socket.socket]) -> None:
    assert control_calls.call(ME, {"command": "list"}, 60)[0]["name"] == "here"
    assert [peer.recv(1) for peer in silent] == [b""] * 8


def test_dead_sockets_are_removed() -> None:
    path = control_socket(999999999)
    unix_socket.listen(path, 1).close()  # the file remains, as after a kill of its process
    assert path.exists()
    assert control_calls.processes() == ()
    assert not path.exists()
    with pytest.raises(errors.UnknownName, match="connecting to process 999999999 failed"):
        control_calls.call(999999999, {"command": "list"})


def test_unresponsive_process_is_named_and_hides_no_other(
    listening: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, unresponsive = control_calls.call, 999999998

    def call_with_timeout(pid: int, request: dict[str, Any], timeout: float) -> Any:
        return call(pid, request, 0.1 if pid == unresponsive else timeout)

    monkeypatch.setattr(control_calls, "call", call_with_timeout)
    with unix_socket.listen(control_socket(unresponsive), 1):
        with pytest.raises(errors.TimeLimit, match=str(unresponsive)):
            call(unresponsive, {"command": "list"}, 0.1)
        assert [cluster["name"] for cluster in control_calls.clusters(60)] == ["here"]


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    """Use up the descriptors below 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    opened: list[int] = []
    try:
        while not opened or opened[-1] < 1100:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_descriptors_above_1023_work() -> None:
    with many_descriptors(), Cluster(launcher="fake", data_workers=1, name="many"):
        cluster_control_socket.ensure_started()
        assert control_calls.clusters()[0]["name"] == "many"
        cluster_control_socket.stop()


@pytest.mark.slow
def test_listener_continues_after_failed_accepts(
    listening: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as peer:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            peer.connect(str(listening))
            until(lambda: "Too many open files" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert control_calls.clusters()[0]["name"] == "here"
    assert caplog.text.count("Too many open files") == 1


def test_stop_removes_socket_and_thread(listening: Path) -> None:
    assert cluster_control_socket.ensure_started() == listening
    cluster_control_socket.stop()
    cluster_control_socket.stop()
    assert not listening.exists()
    assert not [t for t in threading.enumerate() if t.name == "tfd-control"]
    assert cluster_control_socket.ensure_started().exists()


def test_socket_remains_while_a_remote_kernel_is_open(
    listening: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = [object()]
    monkeypatch.setattr(providers, "remote_kernels", lambda: kernels)
    clusters()["here"].stop()
    assert listening.exists()
    kernels.clear()
    with Cluster(launcher="fake", name="next"):
        pass
    assert not listening.exists()


def test_cluster_that_never_starts_does_not_keep_the_socket(listening: Path) -> None:
    planned = Cluster(launcher="fake", name="planned", start=False)
    clusters()["here"].stop()
    assert not listening.exists()
    planned.stop()


def test_cluster_can_start_after_its_socket_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(launcher="fake", name="again", start=False)

    def fail() -> Path:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cluster_control_socket, "ensure_started", fail)
        with pytest.raises(OSError, match="No space"):
            cluster.start()
    assert cluster.state == "new"
    cluster.start()
    assert cluster.state == "ready"
    cluster.stop()


@pytest.mark.slow
def test_socket_of_a_cluster_that_starts_during_a_stop_remains(
    listening: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the old server would remove the path of the new one."""
    closing, proceed = threading.Event(), threading.Event()
    close = cluster_control_socket.ControlServer.close

    def close_later(server: cluster_control_socket.ControlServer) -> None:
        closing.set()
        assert proceed.wait(60)
        close(server)

    stopping = threading.Thread(target=clusters()["here"].stop)
    starting = threading.Thread(target=cluster_control_socket.ensure_started)
    with monkeypatch.context() as patch:
        patch.setattr(cluster_control_socket.ControlServer, "close", close_later)
        stopping.start()
        assert closing.wait(60)
        starting.start()
        starting.join(0.2)  # it waits for the end of the old server
        proceed.set()
        stopping.join(60)
        starting.join(60)
    assert control_calls.processes() == (ME,)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_does_not_serve_its_parents_socket(listening: Path) -> None:
    code = (
        "import os, signal, sys\nfrom tfd_notebook.cluster import control_socket\n"
        "control_socket.ensure_started()\n"
        "if os.fork() == 0:\n"
        "    print(os.getpid(), flush=True)\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "signal.pause()\n"
    )
    with program(code) as (parent, child):
        try:
            parent.wait(60)
            assert control_calls.processes() == (ME,)
        finally:
            os.kill(int(child), signal.SIGKILL)


@pytest.mark.slow
def test_process_answers_before_a_command_ends_it() -> None:
    code = (
        "import threading, time\nfrom tfd_notebook.cluster import commands\n"
        "from tfd_notebook.cluster import control_socket as control\n"
        "requested = threading.Event()\n"
        "commands.Requests.list = lambda _: (requested.set(), time.sleep(0.5), 'done')[-1]\n"
        "control.ensure_started()\nprint('ready', flush=True)\nrequested.wait(60)\n"
    )
    with program(code) as (ending, line):
        assert line == "ready\n"
        assert control_calls.call(ending.pid, {"command": "list"}) == "done"
        assert ending.wait(60) == 0


def test_long_path_is_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path / ("x" * 120)))
    with Cluster(launcher="fake", name="far"):
        cluster_control_socket.ensure_started()
        assert [cluster["name"] for cluster in control_calls.clusters()] == ["far"]
    cluster_control_socket.stop()


def test_credentials_have_the_expected_size() -> None:
    left, right = socket.socketpair()
    with left, right:
        packed = left.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 64)
    assert struct.unpack("3i", packed) == (ME, os.getuid(), os.getgid())


@pytest.mark.parametrize("command", ["detach", "renew"])
@pytest.mark.parametrize(
    "hours", [10**400, -(10**400), float("nan"), float("inf"), 0, -1], ids=lambda n: str(n)[:5]
)
def test_hours_out_of_range_are_refused(listening: Path, command: str, hours: float) -> None:
    with pytest.raises(errors.UsageError, match=r"invalid hours=.*: expected more than 0"):
        control_calls.call(ME, {"command": command, "name": "here", "hours": hours})
    with pytest.raises(errors.UsageError, match="expected more than 0"):
        getattr(clusters()["here"], command)(hours)


@pytest.mark.parametrize("hours", ["8", True, None, [8]])
def test_hours_must_be_a_number(listening: Path, hours: Any) -> None:
    with pytest.raises(errors.UsageError, match="expected a number"):
        control_calls.call(ME, {"command": "detach", "name": "here", "hours": hours})
