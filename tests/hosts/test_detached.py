"""Clusters on other hosts that outlive the kernel that started them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tfd_notebook as tfd
from tests._waiting import until
from tests.hosts._conformance import numbers, pids_on
from tests.hosts._hosts import Host, Hosts
from tests.hosts._sshd import Sshds
from tfd_notebook import errors
from tfd_notebook.launchers.client import orphans
from tfd_notebook.launchers.client.detached import DetachedClusterRecord
from tfd_notebook.net import runtime_dir

pytestmark = [pytest.mark.integration, pytest.mark.root, pytest.mark.timeout(170)]

#: Starts a cluster, reads elements, detaches it, and waits to be killed.
OWNER = """
import sys, tfd_notebook as tfd
count, elements = {count}, []
cluster = tfd.Cluster(data_workers=2, name="stays", launcher={launcher})
if count:
    import itertools, tensorflow as tf
    job = tf.data.Dataset.range(400).apply(cluster.distribute(
        "dynamic", job_name="epoch", max_outstanding_requests=1))
    elements = [int(x) for x in itertools.islice(job, count)]
cluster.detach(1)
print(elements, flush=True)
sys.stdin.read()
"""

#: Returns a launcher's expression, which starts with ``tfd``, for a value of ``secure=``.
Written = Callable[..., str]


@pytest.fixture(scope="module")
def written(sshd: Sshds) -> Written:
    labels = [f"root@{sshd[name].address}" for name in ("north", "east")]

    def written(secure: object) -> str:
        return (
            f"tfd.launchers.SSH({labels!r}, python={sys.executable!r}, "
            f"key={str(sshd.client_key)!r}, known_hosts={str(sshd.known_hosts)!r}, "
            f"secure={secure!r}, grace=5)"
        )

    return written


@pytest.fixture
def before(hosts: Hosts) -> Iterator[dict[Host, set[int]]]:
    """Return the processes on the hosts; stop clusters that a failed test left."""
    processes = {host: host.pids() for host in hosts}
    yield processes
    for host in hosts:
        for pid in pids_on(host, processes[host]):
            os.kill(pid, signal.SIGTERM)
    for path in runtime_dir.runtime_dir().glob("detached-*"):
        path.unlink()


def killed_owner(launcher: str, count: int = 0) -> list[int]:
    """Start and detach a cluster in a process, and kill it; return `count` elements it has read."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(launcher=launcher, count=count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout
        received: list[int] = json.loads(owner.stdout.readline())
    finally:
        owner.kill()
        owner.communicate()
    orphans.sweep()  # removes the files of the killed process
    return received


def cli(*arguments: str) -> str:
    completed = subprocess.run(
        [sys.executable, "-m", "tfd_notebook", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def files() -> list[Path]:
    return list(runtime_dir.runtime_dir().glob("detached-*"))


@pytest.mark.parametrize("secure", [True, "tls", False], ids=["ssh", "tls", "open"])
def test_other_process_continues_after_the_kill(
    hosts: Hosts,
    written: Written,
    before: dict[Host, set[int]],
    secure: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tensorflow as tf

    first = killed_owner(written(secure), count=50)
    (file,) = files()
    assert file.stat().st_mode & 0o777 == 0o600
    (listed,) = json.loads(cli("list", "--json"))
    assert (listed["name"], listed["launcher"], listed["planned"]) == ("stays", "ssh", 3)
    if secure == "tls":
        assert "detached until" in cli("renew", "stays", "--hours", "3")
        assert json.loads(file.read_text())["lease"] > listed["lease"] + 3600
        assert "detached" in cli("list")
        # Each of these processes has ended, but the cluster still runs.
        assert pids_on(hosts.east, before[hosts.east])
    cluster = tfd.attach("stays")
    try:
        assert cluster.detached
        assert {task.state for task in cluster.tasks} == {"ready"}
        assert cluster.to_frame()["host"].nunique() == 2
        job = tf.data.Dataset.range(400).apply(
            cluster.distribute("dynamic", job_name="epoch", max_outstanding_requests=1)
        )
        second = [int(x) for x in job]
        assert not set(first) & set(second), "the job restarted"
        # Only the elements in transit to the killed process are lost.
        assert len(set(first) | set(second)) >= 380
        cluster.scale(data_workers=3)
        assert numbers(cluster) == list(range(100))
        lease = cluster.renew(2)
        assert json.loads(file.read_text())["lease"] == pytest.approx(lease, abs=5)
        assert json.loads(file.read_text())["planned"] == 4
        if secure == "tls":
            # The timer of this process would run until the end of the lease.
            monkeypatch.setattr(DetachedClusterRecord, "schedule_removal", lambda self: None)
            cluster.leave()
            assert "is stopped" in cli("stop", "stays")
        else:
            cluster.leave()
            tfd.attach("stays").stop()
    finally:
        cluster.stop()
    assert not files()
    until(lambda: not any(pids_on(host, before[host]) for host in hosts))
    with pytest.raises(errors.UnknownName):
        tfd.attach("stays")


def test_attached_cluster_ends_when_its_lease_expires(
    hosts: Hosts, written: Written, before: dict[Host, set[int]]
) -> None:
    launcher: Any = eval(written("tls"), {"tfd": tfd})
    cluster = tfd.Cluster(data_workers=1, name="stays", launcher=launcher)
    cluster.detach(1)
    cluster.leave()
    with pytest.raises(errors.NameTaken):
        tfd.Cluster(data_workers=1, name="stays", launcher=launcher).detach(1)
    tfd.clusters()["stays"].stop()
    again = tfd.attach("stays")
    assert numbers(again) == list(range(100))
    again.detach(2 / 3600)
    again.leave()
    until(lambda: not any(pids_on(host, before[host]) for host in hosts))
    assert json.loads(cli("list", "--json")) == []
    assert not files()


def test_cluster_with_a_dead_host_is_stopped_on_all_hosts(
    hosts: Hosts, written: Written, before: dict[Host, set[int]]
) -> None:
    killed_owner(written("tls"))
    for pid in pids_on(hosts.east, before[hosts.east]):
        os.kill(pid, signal.SIGKILL)
    for directory in hosts.east.runtime.glob("agent-*"):
        shutil.rmtree(directory)
    with pytest.raises(errors.StateError, match="has ended"):
        tfd.attach("stays")
    assert not files()
    until(lambda: not pids_on(hosts.north, before[hosts.north]))
