"""Files with the detached clusters on other hosts, which are read without a connection."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests._waiting import until
from tfd_notebook import errors, views
from tfd_notebook.cluster import attach, servers
from tfd_notebook.cluster.gpu_allocation import GpuAllocation
from tfd_notebook.launchers import base
from tfd_notebook.launchers.client import detached, orphans
from tfd_notebook.launchers.client.detached import DetachedClusterRecord, remote_detached_clusters
from tfd_notebook.model import spec
from tfd_notebook.model.spec import ClusterConfig, Role
from tfd_notebook.net import clock


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def description(workers: int) -> dict[str, Any]:
    """Return the description of a cluster of `workers` data workers and a dispatcher."""
    counts = {"dispatcher": 1, "data_worker": workers}
    config = ClusterConfig("training", "ssh", {Role(role): n for role, n in counts.items()})
    task_manager = {
        "counts": counts,
        "gpu_allocation": GpuAllocation().pack(),
        "static_addresses": [],
        "removed_addresses": [],
        "work_dir": None,
    }
    result = {"config": spec.pack(config), "task_manager": task_manager, "used": False}
    return dict(json.loads(json.dumps(result)))


@pytest.fixture
def record() -> DetachedClusterRecord:
    options = {"hosts": ["ada@one", "ada@two"], "secure": "tls"}
    return DetachedClusterRecord("training", "ssh", options, ["a1", "b2"])


@pytest.fixture
def fixed_time(monkeypatch: pytest.MonkeyPatch) -> float:
    """Stop the clocks, and return the seconds since the epoch."""
    monkeypatch.setattr(clock, "now", lambda: 50.0)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    return 1000.0


def test_record_exists_while_the_cluster_is_detached(
    record: DetachedClusterRecord, directory: Path, fixed_time: float
) -> None:
    record.describe(description(2))
    assert not remote_detached_clusters(), "a cluster without a lease ends with its kernel"
    record.set_lease(100)
    record.describe(description(3))
    (listed,) = remote_detached_clusters()
    assert (listed.name, listed.planned, listed.pid) == ("training", 4, None)
    assert listed.lease == fixed_time + 100
    assert (listed.launcher, listed.agents) == ("ssh", ("a1", "b2"))
    assert listed.description == description(3)
    assert listed.options["hosts"] == ["ada@one", "ada@two"]
    (file,) = directory.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert servers.is_detached("training")
    assert not orphans.sweep()
    record.remove()
    record.remove()
    assert not remote_detached_clusters()
    assert not list(directory.iterdir())


def test_processes_attached_to_one_cluster_share_one_record(
    record: DetachedClusterRecord, fixed_time: float
) -> None:
    record.set_lease(100)
    record.describe(description(2))
    second = DetachedClusterRecord("training", "ssh", {}, ["a1", "b2"])
    second.describe(description(5))
    record.set_lease(1000)
    (listed,) = remote_detached_clusters()
    assert (listed.description, listed.planned) == (description(5), 6)
    assert listed.lease == fixed_time + 1000
    second.describe(description(6))
    assert remote_detached_clusters()[0].lease == listed.lease
    second.set_lease(500)
    assert remote_detached_clusters()[0].description == description(6)


def test_record_with_an_expired_lease_is_removed(
    record: DetachedClusterRecord, directory: Path
) -> None:
    record.set_lease(-1)
    assert detached.detached() == ()
    assert not list(directory.iterdir())


def lease_timers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tfd-lease"]


@pytest.mark.slow
def test_released_record_is_removed_when_its_lease_expires(directory: Path) -> None:
    record = DetachedClusterRecord("training", "ssh", {}, ["a1"])
    record.schedule_removal()
    assert not lease_timers(), "a cluster without a lease has no file"
    record.set_lease(-1)
    record.schedule_removal()
    assert list(directory.iterdir())
    until(lambda: not list(directory.iterdir()))
    until(lambda: not lease_timers())


@pytest.mark.slow
def test_wall_clock_step_does_not_postpone_the_removal(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = DetachedClusterRecord("training", "ssh", {}, ["a1"])
    record.set_lease(-1)
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() - 3600)
        record.schedule_removal()
    until(lambda: not list(directory.iterdir()))
    until(lambda: not lease_timers())


@pytest.mark.slow
def test_file_of_a_renewed_cluster_is_kept(directory: Path) -> None:
    record, second = (DetachedClusterRecord("training", "ssh", {}, ["a1"]) for _ in range(2))
    record.set_lease(-1)
    record.schedule_removal()
    second.set_lease(time.time() + 100)
    until(lambda: not lease_timers())
    assert list(directory.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cluster": "c"}', '{"lease": "soon"}', "null"])
def test_invalid_file_does_not_hide_other_records(
    record: DetachedClusterRecord, directory: Path, text: str
) -> None:
    record.set_lease(100)
    (directory / "detached-0.json").write_text(text)
    assert [cluster.name for cluster in remote_detached_clusters()] == ["training"]


@pytest.mark.parametrize("change", [{"config": {}}, {"task_manager": {"counts": {}}}, {"x": 1}])
def test_record_with_a_malformed_description_is_ignored(
    record: DetachedClusterRecord, change: dict[str, Any]
) -> None:
    record.set_lease(100)
    record.describe({**description(2), **change})
    assert remote_detached_clusters() == []


def test_list_states_that_hosts_were_not_probed(record: DetachedClusterRecord) -> None:
    record.set_lease(7200)
    record.describe(description(2))
    (listed,) = attach.all_clusters()
    assert (listed["state"], listed["observed"], listed["planned"]) == ("detached", None, 3)
    assert json.loads(json.dumps(listed)) == listed
    text = views.clusters_table([listed]).text()
    assert "? of 3" in text
    assert "ssh" in text


def test_missing_launcher_is_reported(directory: Path) -> None:
    DetachedClusterRecord("training", "teleport", {}, ["a1"]).set_lease(100)
    with pytest.raises(errors.UnknownName, match="unknown launcher 'teleport'"):
        attach.attach("training")
    assert len(remote_detached_clusters()) == 1, "it may be installed again"


def test_local_launcher_cannot_reconnect() -> None:
    with pytest.raises(errors.Unsupported, match="no agents on other hosts"):
        base.launcher("local").reconnect("training", ["a1"])


def test_clusters_with_the_same_name_are_distinguished(record: DetachedClusterRecord) -> None:
    record.set_lease(100)
    DetachedClusterRecord("training", "ssh", {"hosts": ["other"]}, ["c3"]).set_lease(100)
    with pytest.raises(errors.UsageError, match="2 detached clusters"):
        attach.find("training")
    assert len(os.listdir(os.environ["TFD_RUNTIME_DIR"])) == 2
