"""Steps of the wall clock, which must not change leases or the lists of clusters."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests._clock import WallClock
from tests._waiting import until
from tfd_notebook.agent.bridges import stdio
from tfd_notebook.net import secure_channel

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(170)]

HOUR = 3600.0

#: Starts a cluster, evaluates each line of input, and prints the value as a line of JSON.
OWNER = """
import json, sys, time
import tfd_notebook as tfd
from tfd_notebook.launchers import local
cluster = tfd.Cluster(data_workers=1, name="stepped", policy=tfd.Policy(time_limit=600))

def measured():
    "Wait until the agent has inspected the tasks several times."
    before = cluster.snapshot().version
    while cluster.snapshot().version < before + 8:
        time.sleep(0.05)
    return cluster.state

def left():
    snapshot = cluster.snapshot()
    return [snapshot.expires - time.time(), snapshot.lease - time.time()]

print(json.dumps([*(task.pid for task in cluster.tasks), *local.agent_pids()]), flush=True)
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
"""

READER = """
import tensorflow as tf, tfd_notebook as tfd
cluster = tfd.attach("stepped")
numbers = tf.data.Dataset.range(100).apply(cluster.distribute("dynamic"))
print(sum(int(x) for x in numbers), flush=True)
"""


class Owner:
    def __init__(self, clock: WallClock) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER],
            env=clock.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pids: list[int] = self._answer()

    def evaluate(self, expression: str) -> Any:
        assert self.process.stdin
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def clock(tmp_path: Path) -> WallClock:
    return WallClock(tmp_path)


@pytest.fixture
def owner(clock: WallClock) -> Iterator[Owner]:
    owner = Owner(clock)
    yield owner
    owner.process.kill()
    owner.process.communicate()
    for pid in owner.pids:
        if psutil.pid_exists(pid):
            os.kill(pid, 9)
    until(lambda: not any(psutil.pid_exists(pid) for pid in owner.pids))
    subprocess.run([sys.executable, "-m", "tfd_notebook", "sweep"], check=True, timeout=60)


def cli(clock: WallClock, *arguments: str) -> str:
    return subprocess.check_output(
        [sys.executable, "-m", "tfd_notebook", *arguments],
        env=clock.environment,
        text=True,
        timeout=60,
    )


def test_clock_step_neither_ends_nor_hides_a_cluster(clock: WallClock, owner: Owner) -> None:
    owner.evaluate("cluster.detach(1)")
    for step in (2 * HOUR, -2 * HOUR):
        clock.step(step)
        assert owner.evaluate("measured()") == "ready"
        limit, lease = owner.evaluate("left()")
        assert 0 < limit <= 600
        assert 600 < lease <= HOUR
        assert cli(clock, "sweep") == "no orphans\n"
        (listed,) = json.loads(cli(clock, "list", "--json"))
        assert listed["name"] == "stepped"
        assert 600 < listed["lease"] - (time.time() + step) <= HOUR
    owner.process.kill()
    clock.step(2 * HOUR)
    output = subprocess.check_output(
        [sys.executable, "-c", READER], env=clock.environment, text=True, timeout=120
    )
    assert output == "4950\n"
    assert all(psutil.pid_exists(pid) for pid in owner.pids)
    (listed,) = json.loads(cli(clock, "list", "--json"))
    assert listed["pid"] is None
    assert 600 < listed["lease"] - (time.time() + 2 * HOUR) <= HOUR
    cli(clock, "stop", "stepped")
    until(lambda: not any(psutil.pid_exists(pid) for pid in owner.pids))


def test_clock_step_does_not_extend_a_lease(clock: WallClock, owner: Owner) -> None:
    owner.evaluate("cluster.detach(3 / 3600)")
    clock.step(-2 * HOUR)
    owner.process.kill()
    until(lambda: not any(psutil.pid_exists(pid) for pid in owner.pids), 60)


@pytest.mark.root
def test_sweep_in_another_pid_namespace_ends_nothing(clock: WallClock, owner: Owner) -> None:
    container = ["unshare", "--pid", "--fork", "--mount-proc"]
    for arguments in (["sweep"], ["list", "--json"]):
        subprocess.run(
            [*container, sys.executable, "-m", "tfd_notebook", *arguments], check=True, timeout=60
        )
    assert owner.evaluate("measured()") == "ready"
    assert json.loads(cli(clock, "list", "--json"))[0]["name"] == "stepped"


def test_clock_step_does_not_end_the_bridge_of_an_executor(clock: WallClock) -> None:
    secret = secure_channel.Secret.new()
    hellos: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    released = threading.Event()

    def receive_hello(channel: secure_channel.AuthenticatedChannel) -> None:
        hellos.put(channel.receive(60)[0])
        released.wait(150)

    java = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(150)"])
    with secure_channel.Server(secret, receive_hello) as server:
        given = {
            "address": server.address,
            "secret": secret.hex(),
            "grace": 60,
            "process": java.pid,
            "end_reason": "ended",
        }
        bridge = subprocess.Popen(
            [sys.executable, "-u", "-c", stdio.bootstrap("rendezvous")],
            env=clock.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert bridge.stdin
            assert bridge.stdout
            bridge.stdin.write(json.dumps(given).encode() + b"\n")
            bridge.stdin.flush()
            assert bridge.stdout.readline().startswith(stdio.HANDSHAKE.encode())
            assert hellos.get(timeout=60)["process"] == java.pid
            clock.step(HOUR)
            before = switches(bridge.pid)
            until(
                lambda: switches(bridge.pid) >= before + 4, 60
            )  # one context switch for each check
            assert bridge.poll() is None
            java.kill()
            java.wait()
            assert bridge.wait(60) == 0
        finally:
            released.set()
            for process in (java, bridge):
                process.kill()
                process.communicate()


def switches(pid: int) -> int:
    """Return the number of voluntary context switches of the main thread of a process."""
    status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
