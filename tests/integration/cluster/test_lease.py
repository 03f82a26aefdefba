"""Detached clusters: attach, renew, and stop from any process."""

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
from tfd_notebook.cluster.config import ClusterOptions
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


def pids_in(output: str) -> tuple[list[int], list[int]]:
    stays, goes = output.split("pids ")[1].split("] [")
    return json.loads(stays + "]"), json.loads("[" + goes.splitlines()[0])


def runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def cli(*arguments: str, status: int = 0) -> str:
    completed = subprocess.run(
        [sys.executable, "-m", "tfd_notebook", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert completed.returncode == status, completed.stderr
    return completed.stdout + completed.stderr


def agent_has_ended(directory: Path) -> bool:
    return not directory.exists()


@pytest.fixture(autouse=True)
def _end_detached() -> Iterator[None]:
    """End the detached clusters that a failed test left behind."""
    shared = {cluster.pid for cluster in detached.detached()}
    yield
    for cluster in detached.detached():
        if cluster.pid not in shared:
            os.kill(cluster.pid, signal.SIGTERM)


def detached_cluster() -> Iterator[tfd.Cluster]:
    """Yield a detached cluster of this process, which ends afterwards in any case."""
    cluster = tfd.Cluster(data_workers=1, name="stays", if_exists="replace")
    cluster.detach(1.0)
    yield cluster
    if detached.detached():
        cli("stop", "stays")


#: A detached cluster for one test.
stays = pytest.fixture(detached_cluster)
#: A detached cluster for the last tests, because it needs a separate agent.
shared = pytest.fixture(scope="module")(detached_cluster)


@pytest.mark.slow
def test_magics_of_a_restarted_kernel_attach() -> None:
    with Kernel() as kernel:
        output = kernel.run(START)
        assert "detached until" in output
        kept, ended = pids_in(output)
        kernel.restart()
        until(lambda: not any(runs(pid) for pid in ended))
        assert "variable 'stays'" in kernel.run(
            "%load_ext tfd_notebook\n%tfd_cluster attach -o stays"
        )
        output = kernel.run("print([t.pid for t in stays.tasks], stays.state)")
        assert output.startswith(f"{kept} ready")
        # The same start cell attaches to the running cluster.
        assert "is already running" in kernel.run(
            "%tfd_cluster start --data-workers 1 --name stays -o stays --detach 2"
        )
        assert "is stopped" in kernel.run("stays.stop()\nprint('is', stays.state)")
        until(lambda: not any(runs(pid) for pid in kept))


def test_cluster_of_a_killed_kernel_is_stopped_in_a_terminal() -> None:
    with Kernel() as kernel:
        kept, ended = pids_in(kernel.run(START))
        os.kill(kernel.pid, signal.SIGKILL)
        until(lambda: not any(runs(pid) for pid in ended))
        assert all(runs(pid) for pid in kept)
    (cluster,) = detached.detached()
    for path in (cluster.directory, cluster.directory / "stays"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in (
        cluster.directory / runtime_dir.STATE_FILE,
        cluster.directory / SOCKET,
    ):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not [left for left in orphans.sweep() if left.agent]
    listed = json.loads(cli("list", "--json"))
    assert [(record["name"], record["state"], record["pid"]) for record in listed] == [
        ("stays", "ready", None)
    ]
    before = detached.detached()[0].lease
    assert "detached until" in cli("renew", "stays", "--hours", "3")
    assert detached.detached()[0].lease > before + 3600
    assert "data_worker:0" in cli("watch", "stays", "--once")
    assert "is stopped" in cli("stop", "stays")
    until(lambda: not any(runs(pid) for pid in kept))
    until(lambda: agent_has_ended(cluster.directory))
    assert "no running cluster" in cli("list")


def test_notebook_attaches_to_a_cluster_started_in_a_terminal() -> None:
    output = cli("start", "--data-workers", "1", "--name", "outside", "--detach", "0.5")
    assert 'tfd.attach("outside")' in output
    cluster = tfd.attach("outside")
    try:
        import tensorflow as tf

        numbers = tf.data.Dataset.range(10).apply(cluster.distribute("dynamic"))
        assert sorted(int(x) for x in numbers) == list(range(10))
        assert 0 < (cluster.snapshot().lease or 0) - time.time() <= 1800
        assert tfd.attach("outside") is cluster
        # The same control as in the process that started the cluster.
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
            attach.start(ClusterOptions(name="outside", data_workers=7), 1.0)
    finally:
        cli("stop", "outside")
    until(lambda: again.ended)
    assert again.state == "stopped"


def _none(cluster: tfd.Cluster) -> dict[str, int]:
    return {str(role): n for role, n in cluster.snapshot().planned.items() if not n}


def test_duplicate_names_are_refused_and_with_detaches(stays: tfd.Cluster) -> None:
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


# Skips the check for namesakes, as if two clusters were detached at the same moment.
TWIN = """
import tfd_notebook as tfd
from tfd_notebook.cluster.servers import ClusterServers
ClusterServers._require_no_detached_namesake = lambda self: None
tfd.Cluster(name="twin").detach(1)
"""


def test_namesakes_are_identified_by_their_agents() -> None:
    for process in [subprocess.Popen([sys.executable, "-c", TWIN]) for _ in range(2)]:
        assert process.wait(60) == 0
    first, second = (cluster.pid for cluster in detached.detached())
    listed = json.loads(cli("list", "--json"))
    assert [(each["name"], each["pid"], each["agent"]) for each in listed] == [
        ("twin", None, first),
        ("twin", None, second),
    ]
    assert f"agent {second}" in cli("list")
    with pytest.raises(errors.UsageError, match=rf"agent={first}\).*tfd stop twin --pid {first}"):
        tfd.attach("twin")
    assert f"twin (detached, agent {second})" in cli("stop", "twin", status=2)
    cluster = tfd.attach("twin", agent=second)
    records = tfd.clusters().everywhere.records()
    assert [(each["pid"], each.get("agent")) for each in records] == [
        (os.getpid(), None),
        (None, first),
    ]
    assert "is stopped" in cli("stop", "twin", "--pid", str(first))
    assert cluster.state == "ready"
    assert [item.pid for item in detached.detached()] == [second]
    cluster.stop()


def test_unknown_name_suggests_a_similar_one(shared: tfd.Cluster) -> None:
    with pytest.raises(errors.UnknownName, match="did you mean 'stays'"):
        tfd.attach("stay")


def test_invalid_bytes_at_the_socket_get_no_reply(shared: tfd.Cluster) -> None:
    from tfd_notebook.net import unix_socket

    (cluster,) = detached.detached()
    for sent in (b"\x80\x04garbage\n", b"TFD1 1 2 {}\n", b'{"method": "close"}\n', b"\n" * 10):
        with unix_socket.connect(cluster.directory / SOCKET, 10.0) as peer:
            peer.sendall(sent)
            peer.shutdown(1)
            assert peer.recv(100) == b""
    assert shared.state == "ready"


def test_suspended_process_receives_the_missed_events(shared: tfd.Cluster) -> None:
    """An attached process that was suspended receives the missed events."""
    code = (
        "import sys, tfd_notebook as tfd\n"
        "c = tfd.attach('stays', connect=False)\n"
        "print('attached', flush=True)\n"
        "sys.stdin.readline()\n"
        "row = c.snapshot().task('data_worker:0')\n"
        "print(row.restarts, row.state)\n"
    )
    pipe: Any = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdout
        assert process.stdout.readline() == "attached\n"
        process.send_signal(signal.SIGSTOP)
        shared.kill("data_worker:0")
        until(lambda: shared.snapshot().task("data_worker:0").restarts == 1)  # type: ignore[union-attr]
        until(lambda: shared.state == "ready")
        process.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        output, _ = process.communicate("\n", timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert output.split() == ["1", "ready"]


def test_list_includes_other_processes_and_detached_clusters(shared: tfd.Cluster) -> None:
    """This is the last test with the shared cluster."""
    everywhere = tfd.clusters()
    assert list(everywhere) == ["stays"]
    (record,) = everywhere.everywhere.records()
    assert (record["name"], record["pid"]) == ("stays", os.getpid())
    assert "stays" in everywhere._repr_mimebundle_()["text/html"]
    shared.leave()
    assert not tfd.clusters()
    (record,) = tfd.clusters().everywhere.records()
    assert (record["name"], record["pid"], record["observed"]) == ("stays", None, 2)
    cli("stop", "stays")
