"""Clusters that outlive their kernel: detached, found again, renewed, and ended by anybody."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import tfd_notebook as tfd
from tests._waiting import until
from tests.integration._kernel import Kernel
from tfd_notebook import errors
from tfd_notebook.agent.sessions import SOCKET
from tfd_notebook.cluster import attach
from tfd_notebook.launchers.client import detached, orphans
from tfd_notebook.net import runtime_dir

pytestmark = [pytest.mark.integration, pytest.mark.timeout(170)]

START = """
%load_ext tfd_notebook
%tfd_cluster start --data-workers 1 --name stays -o stays --detach 1
%tfd_cluster start --data-workers 1 --name goes -o goes
import tfd_notebook as tfd
print("pids", [t.pid for t in stays.tasks], [t.pid for t in goes.tasks])
"""
# A job by name: the dispatcher knows how far it has come. One element at a time is under way.
JOB = """
import tensorflow as tf
numbers = tf.data.Dataset.range(400).apply(stays.distribute(
    "dynamic", job_name="epoch", max_outstanding_requests=1))
"""


def pids_in(said: str) -> tuple[list[int], list[int]]:
    stays, goes = said.split("pids ")[1].split("] [")
    return json.loads(stays + "]"), json.loads("[" + goes.splitlines()[0])


def runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def cli(*arguments: str, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tfd_notebook", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def elsewhere(code: str) -> None:
    """Have another process take the cluster up, as ``c``, and run `code`."""
    attached = "import tfd_notebook as tfd; c = tfd.attach('stays', connect=False); "
    subprocess.run([sys.executable, "-c", attached + code], check=True, timeout=60)


def agent_has_ended(directory: Path) -> bool:
    return not directory.exists()


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """End what a test that failed has left detached."""
    yield
    for one in detached.detached():
        os.kill(one.pid, signal.SIGTERM)


@pytest.fixture
def stays() -> Iterator[tfd.Cluster]:
    """A detached cluster that this process holds; ended however the test leaves it."""
    cluster = tfd.Cluster(data_workers=1, name="stays", if_exists="replace")
    cluster.detach(1.0)
    yield cluster
    if detached.detached():
        cli("stop", "stays")


def test_a_restarted_kernel_finds_its_cluster_and_the_job_goes_on() -> None:
    with Kernel() as kernel:
        said = kernel.run(START)
        assert "detached until" in said
        mine, others = pids_in(said)
        before = kernel.run(
            JOB + "import itertools; print('seen', [int(x) for x in itertools.islice(numbers, 50)])"
        )
        kernel.restart()
        until(lambda: not any(runs(pid) for pid in others))
        assert all(runs(pid) for pid in mine)
        found = kernel.run("%load_ext tfd_notebook\n%tfd_cluster attach -o stays")
        assert "variable 'stays'" in found
        said = kernel.run("print([t.pid for t in stays.tasks], stays.state)")
        assert said.startswith(f"{mine} ready")
        after = kernel.run(JOB + "print('seen', [int(x) for x in numbers])", timeout=60)
        first, second = (set(json.loads(part.split("seen ")[1])) for part in (before, after))
        assert len(first) == 50
        assert not first & second, "the job began anew"
        # What was under way to the kernel that ended is lost, and nothing else.
        assert len(first | second) >= 380
        # The same start cell takes the cluster that lives.
        assert "is already running" in kernel.run(
            "%tfd_cluster start --data-workers 1 --name stays -o stays --detach 2"
        )
        assert "is stopped" in kernel.run("stays.stop()\nprint('is', stays.state)")
        until(lambda: not any(runs(pid) for pid in mine))


def test_it_survives_a_killed_kernel_and_ends_from_a_terminal() -> None:
    with Kernel() as kernel:
        mine, others = pids_in(kernel.run(START))
        os.kill(kernel.pid, signal.SIGKILL)
        until(lambda: not any(runs(pid) for pid in others))
        assert all(runs(pid) for pid in mine)
    (where,) = detached.detached()
    for path in (where.directory, where.directory / "stays"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in (
        where.directory / runtime_dir.STATE_FILE,
        where.directory / "stays" / runtime_dir.STATE_FILE,
        where.directory / SOCKET,
    ):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not [left for left in orphans.sweep() if left.agent]
    listed = json.loads(cli("list", "--json"))
    assert [(one["name"], one["state"], one["pid"]) for one in listed] == [("stays", "ready", None)]
    before = detached.detached()[0].lease
    assert "detached until" in cli("renew", "stays", "--hours", "3")
    assert detached.detached()[0].lease > before + 3600
    assert "data_worker:0" in cli("watch", "stays", "--once")
    assert "is stopped" in cli("stop", "stays")
    until(lambda: not any(runs(pid) for pid in mine))
    until(lambda: agent_has_ended(where.directory))
    assert "no running cluster" in cli("list")


def test_a_terminal_starts_one_that_a_notebook_takes_up() -> None:
    said = cli("start", "--data-workers", "1", "--name", "outside", "--detach", "0.5")
    assert 'tfd.attach("outside")' in said
    cluster = tfd.attach("outside")
    try:
        import tensorflow as tf

        numbers = tf.data.Dataset.range(10).apply(cluster.distribute("dynamic"))
        assert sorted(int(x) for x in numbers) == list(range(10))
        assert 0 < (cluster.snapshot().lease or 0) - time.time() <= 1800
        assert tfd.attach("outside") is cluster
        # As whole as in the process that started it.
        cluster.scale(data_workers=2)
        cluster.kill("data_worker:0")
        until(lambda: cluster.snapshot().task("data_worker:0").restarts == 1)  # type: ignore[union-attr]
        until(lambda: cluster.state == "ready")
        cluster.leave()
        assert cluster.state == "left"
        again = tfd.attach("outside")
        assert again is not cluster
        assert len(again.tasks) == 3
        assert again.snapshot().planned == {"dispatcher": 1, "data_worker": 2, **_none(again)}
        with pytest.raises(errors.NameTaken, match="another specification"):
            attach.start(1.0, name="outside", data_workers=7)
    finally:
        cli("stop", "outside")
    until(lambda: again.ended)
    assert again.state == "stopped"


def _none(cluster: tfd.Cluster) -> dict[str, int]:
    return {str(role): n for role, n in cluster.snapshot().planned.items() if not n}


def test_a_reader_is_told_when_somebody_else_stops_it(stays: tfd.Cluster) -> None:
    import tensorflow as tf

    endless = tf.data.Dataset.range(10**9).apply(stays.distribute("off"))

    def read() -> None:
        for number, _ in enumerate(endless):
            if number == 10:
                elsewhere("c.stop()")

    with pytest.raises(errors.TfdError, match="stays"):
        read()
    until(lambda: stays.ended)
    assert any("stopped from another process" in n.what for n in stays.snapshot().notices)


def test_a_lease_that_is_over_ends_everything(stays: tfd.Cluster) -> None:
    pids = [task.pid for task in stays.tasks if task.pid]
    stays.detach(2.0 / 3600)
    until(lambda: stays.ended)
    assert stays.state == "stopped"
    assert any("lease expired" in notice.what for notice in stays.snapshot().notices)
    until(lambda: not any(runs(pid) for pid in pids))


def test_two_of_one_name_are_refused_and_blocks_let_go(stays: tfd.Cluster) -> None:
    with stays:
        pass
    assert stays.state == "left"
    with pytest.raises(errors.NameTaken, match=r"tfd\.attach"):
        tfd.Cluster(data_workers=1, name="stays")
    with tfd.Cluster(name="stays", launcher="fake") as second:
        assert any("is detached" in notice.what for notice in second.snapshot().notices)
        with pytest.raises(errors.NameTaken, match="another name="):
            second.detach()
        with pytest.raises(errors.NameTaken, match="is running in this process"):
            tfd.attach("stays")
        with pytest.raises(errors.StateError, match="has no lease to renew"):
            second.renew()
    cli("stop", "stays")


# As two do that are detached at the same moment.
TWIN = """
import tfd_notebook as tfd
from tfd_notebook.cluster.lease import Lease
Lease._require_no_detached_namesake = lambda self: None
tfd.Cluster(name="twin").detach(1)
"""


def test_two_of_one_name_are_told_apart_by_their_agents() -> None:
    for process in [subprocess.Popen([sys.executable, "-c", TWIN]) for _ in range(2)]:
        assert process.wait(60) == 0
    one, other = (where.pid for where in detached.detached())
    listed = json.loads(cli("list", "--json"))
    assert [(each["name"], each["pid"], each["agent"]) for each in listed] == [
        ("twin", None, one),
        ("twin", None, other),
    ]
    assert f"agent {other}" in cli("list")
    with pytest.raises(errors.UsageError, match=rf"agent={one}\).*tfd stop twin --pid {one}"):
        tfd.attach("twin")
    assert f"twin (detached, agent {other})" in cli("stop", "twin", status=2)
    cluster = tfd.attach("twin", agent=other)
    records = tfd.clusters().everywhere.records()
    assert [(each["pid"], each.get("agent")) for each in records] == [
        (os.getpid(), None),
        (None, one),
    ]
    assert "is stopped" in cli("stop", "twin", "--pid", str(one))
    assert cluster.state == "ready"
    assert [where.pid for where in detached.detached()] == [other]
    cluster.stop()


def test_a_cluster_that_does_not_exist_is_named(stays: tfd.Cluster) -> None:
    with pytest.raises(errors.UnknownName, match="did you mean 'stays'"):
        tfd.attach("stay")


def test_what_is_listed_names_other_processes_and_detached_ones(stays: tfd.Cluster) -> None:
    everywhere = tfd.clusters()
    assert list(everywhere) == ["stays"]
    (record,) = everywhere.everywhere.records()
    assert (record["name"], record["pid"]) == ("stays", os.getpid())
    assert "stays" in everywhere._repr_mimebundle_()["text/html"]
    stays.leave()
    assert not tfd.clusters()
    (record,) = tfd.clusters().everywhere.records()
    assert (record["name"], record["pid"], record["observed"]) == ("stays", None, 2)
    cli("stop", "stays")


def test_strangers_at_the_socket_get_nothing(stays: tfd.Cluster) -> None:
    from tfd_notebook.net import unix_socket

    (where,) = detached.detached()
    for sent in (b"\x80\x04garbage\n", b"TFD1 h a 1 2 {}\n", b'{"method": "close"}\n', b"\n" * 10):
        with unix_socket.connect(where.directory / SOCKET, 10.0) as peer:
            peer.sendall(sent)
            peer.shutdown(1)
            assert peer.recv(100) == b""
    assert stays.state == "ready"


def test_a_kernel_frozen_past_its_connection_keeps_everything(stays: tfd.Cluster) -> None:
    """Who attaches hears of what happened while it was away."""
    code = (
        "import sys, tfd_notebook as tfd\n"
        "c = tfd.attach('stays', connect=False)\n"
        "print('attached', flush=True)\n"
        "sys.stdin.readline()\n"
        "row = c.snapshot().task('data_worker:0')\n"
        "print(row.restarts, row.state)\n"
    )
    pipe: Any = subprocess.PIPE
    other = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
    try:
        assert other.stdout
        assert other.stdout.readline() == "attached\n"
        other.send_signal(signal.SIGSTOP)
        stays.kill("data_worker:0")
        until(lambda: stays.snapshot().task("data_worker:0").restarts == 1)  # type: ignore[union-attr]
        until(lambda: stays.state == "ready")
        other.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        said, _ = other.communicate("\n", timeout=30)
    finally:
        other.kill()
        other.communicate()
    assert said.split() == ["1", "ready"]
