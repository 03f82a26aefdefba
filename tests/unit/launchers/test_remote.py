"""Connections to other hosts: retries, permanent errors, and cleanup after an interrupt."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.launchers import remote
from tfd_notebook.launchers.client import jupyter_server, session
from tfd_notebook.net import unix_socket

pytest.importorskip("requests")
pytest.importorskip("websocket")

THIRDPARTY = Path(__file__).parents[2] / "thirdparty"

#: A process with the name of an ssh session, and a cluster of a third-party launcher.
LOGGED_IN = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, b"sshd-session", 0, 0, 0)  # PR_SET_NAME
sys.path.insert(0, sys.argv[1])
from tfd_by_command import ByCommand
host, = ByCommand("nice -n 1").hosts()
from tfd_notebook.launchers.client.session import AgentSession
agent = "abcdefabcdef"
session = AgentSession(agent, host.label, lambda: host.connect(agent, True), grace=1.0)
print("connection:", repr(host.handshake.connection))
session.close()
host.close()
print("still logged in")
"""


class Host(remote.RemoteHost):
    def __init__(self):
        super().__init__("there")
        self.go_on = threading.Event()
        self.closed = False

    def connect(self, agent, start):
        assert self.go_on.wait(60)
        raise OSError("connection refused")

    def close(self):
        self.closed = True


class Launcher(remote.RemoteLauncher):
    name = "there"
    summary = ""

    def __init__(self, hosts):
        super().__init__()
        self._hosts = hosts

    def hosts(self):
        return self._hosts


def test_host_without_connect_is_not_created():
    with pytest.raises(TypeError, match="connect"):
        remote.RemoteHost("there")


@pytest.mark.slow
@pytest.mark.parametrize("reached", [True, False])
def test_interrupted_connect_leaves_no_session(monkeypatch, reached):
    ended = []

    class Session:
        def __init__(self, agent, host, connect, grace):
            try:
                connect()
            except OSError:
                if not reached:
                    raise

        def close(self):
            ended.append(self)

    monkeypatch.setattr(remote, "AgentSession", Session)
    host = Host()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        Launcher([host]).connect(None, None)
    assert not host.closed
    host.go_on.set()
    until(lambda: host.closed)
    assert len(ended) == reached


@pytest.mark.slow
def test_silent_agent_is_not_reported_as_lost(monkeypatch, tmp_path):
    monkeypatch.setattr(session, "CONNECT_SECONDS", 0.3)
    with (
        unix_socket.listen(tmp_path / "agent.sock", 1),
        pytest.raises(errors.LaunchError, match="did not answer") as caught,
    ):
        session.AgentSession(
            "agent", "there", lambda: session.SocketChannel.to(tmp_path / "agent.sock")
        )
    # After AgentLost, the caller may end the rest of the cluster on other hosts.
    assert not isinstance(caught.value, errors.AgentLost)


@pytest.mark.slow
def test_ssh_session_of_the_user_is_not_ended(tmp_path):
    """The relay of a command runs in the user's ssh session, and must not end it."""
    completed = subprocess.run(
        [sys.executable, "-c", LOGGED_IN, str(THIRDPARTY)],
        capture_output=True,
        text=True,
        timeout=100,
        env={
            **os.environ,
            "SSH_CONNECTION": "192.0.2.7 50000 192.0.2.1 22",
            "TFD_RUNTIME_DIR": str(tmp_path),
        },
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout == "connection: ''\nstill logged in\n"


def test_broken_connection_is_not_a_certificate_error():
    """A proxy closes the connection while its server restarts, so that retries are useful."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up():
            for _ in range(2):
                listener.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        server = jupyter_server.JupyterServer(f"https://127.0.0.1:{listener.getsockname()[1]}", "x")
        with pytest.raises(OSError, match=r"(?i)eof|reset|closed"):
            server.request("GET", "/api/kernels")
        with pytest.raises(OSError, match=r"(?i)eof|reset|closed"):
            server.connect("kernel")
        listener.close()
        assert server.has("kernel")  # without an answer, the kernel counts as present


@pytest.mark.slow
def test_errors_do_not_contain_the_token():
    with pytest.raises(errors.UsageError) as caught:
        jupyter_server.split("one:8888/?token=S3CRET")
    assert "S3CRET" not in str(caught.value)
