"""Channels between hosts of which one vanishes without closing its connections."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

import pytest

from tests.hosts._hosts import Hosts
from tfd_notebook.net import ports, secure_channel
from tfd_notebook.spark.driver.service_feed import _await_end
from tfd_notebook.spark.feed.inbox import Inbox

pytestmark = [pytest.mark.integration, pytest.mark.root, pytest.mark.timeout(170)]

PORT = 7000
SERVER = """
import sys, threading
from tfd_notebook.net import secure_channel
host, secret = sys.argv[1], bytes.fromhex(sys.argv[2])
server = secure_channel.serve(secret, lambda channel: channel.receive(), host=host)
print(server.address, flush=True)
sys.stdin.read()
"""
#: Sends bytes without end. Like gRPC's servers, it closes a connection whose peer does not answer.
STREAM = f"""
import socket, time
listening = socket.create_server(("", {PORT}))
print("ready", flush=True)
peer, _ = listening.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1_000)
try:
    while True:
        peer.sendall(b"x")
        time.sleep(0.05)
except OSError:
    print("closed", flush=True)
"""


def test_data_worker_stops_waiting_for_a_vanished_driver(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(secure_channel, "VANISHED_SECONDS", 4)
    secret, north = secure_channel.Secret.new(), hosts.north
    driver = north.start(
        [sys.executable, "-c", SERVER, north.address, secret.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert driver.stdout is not None
        channel = secure_channel.connect(driver.stdout.readline().strip(), secret)
        with Inbox(tmp_path / "inbox", secret) as inbox, channel:
            follower = threading.Thread(target=_await_end, args=(channel, inbox))
            follower.start()
            hosts.partition(hosts.home, north)
            follower.join(60)
            assert not follower.is_alive()
            assert inbox.get("state") == "terminating"
    finally:
        hosts.heal()
        driver.kill()
        driver.communicate()


def test_connection_that_the_peer_has_closed_ends(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer closes the connection during a fault, so this process does not receive that."""
    monkeypatch.setattr(ports, "_KEEPALIVE_SECONDS", 1)
    with hosts.east.start([sys.executable, "-c", STREAM], stdout=subprocess.PIPE) as server:
        assert server.stdout
        assert server.stdout.readline() == "ready\n"
        with socket.create_connection((hosts.east.address, PORT), 60) as connection:
            assert connection.recv(1)
            hosts.partition(hosts.home, hosts.east)
            try:
                assert server.stdout.readline() == "closed\n"
            finally:
                hosts.heal()
            ports.detect_lost_peers()
            with pytest.raises(ConnectionResetError):
                deque(iter(lambda: connection.recv(100), b""), maxlen=0)
