"""Channels between hosts of which one vanishes without closing its connections."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.hosts._hosts import Hosts
from tfd_notebook.net import secure_channel
from tfd_notebook.spark.driver.service_feed import _await_end
from tfd_notebook.spark.feed.inbox import Inbox

pytestmark = [pytest.mark.integration, pytest.mark.root, pytest.mark.timeout(170)]

SERVER = """
import sys, threading
from tfd_notebook.net import secure_channel
host, secret = sys.argv[1], bytes.fromhex(sys.argv[2])
server = secure_channel.serve(secret, lambda channel: channel.receive(), host=host)
print(server.address, flush=True)
sys.stdin.read()
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
