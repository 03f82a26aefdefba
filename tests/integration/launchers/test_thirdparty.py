"""A launcher of another distribution, loaded by its entry point."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.cluster import data_service
from tfd_notebook.launchers import base
from tfd_notebook.launchers.client.detached import remote_detached_clusters
from tfd_notebook.testing import check_launcher

pytestmark = [pytest.mark.integration, pytest.mark.timeout(170)]

PACKAGE = Path(__file__).parents[2] / "thirdparty"


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the distribution in a directory for this module only."""
    target = tmp_path_factory.mktemp("installed")
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--no-compile"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", target, PACKAGE],
        check=True,
        timeout=120,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    sys.path.insert(0, str(target))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(target))
    sys.modules.pop("tfd_by_command", None)


@pytest.fixture(scope="module")
def cluster(_installed: None) -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=2, name="prefixed", launcher="command") as cluster:
        yield cluster


def numbers(cluster: tfd.Cluster) -> list[int]:
    import tensorflow as tf

    return sorted(int(x) for x in tf.data.Dataset.range(100).apply(cluster.distribute("dynamic")))


def test_launcher_is_listed_and_suggested() -> None:
    assert base.available_launchers()["command"].name == "command"
    assert "docker" in base.available_launchers()["command"].summary
    launcher = base.launcher("command", {"commands": ["nice -n 3"], "grace": 9})
    assert base.launcher("command", launcher.options).options == launcher.options
    with pytest.raises(errors.UnknownName, match="did you mean 'command'"):
        tfd.Cluster(data_workers=1, launcher="comand")


def test_tasks_run_behind_the_command(cluster: tfd.Cluster) -> None:
    assert cluster.state == "ready"
    assert cluster.snapshot().launcher == "command"
    assert {psutil.Process(task.pid).nice() for task in cluster.tasks} == {min(os.nice(0) + 10, 19)}
    assert numbers(cluster) == list(range(100))


def test_killed_task_restarts_on_its_port(cluster: tfd.Cluster) -> None:
    before = next(task for task in cluster.tasks if task.name == "data_worker:1")
    os.kill(before.pid or 0, signal.SIGKILL)
    until(lambda: {t.pid for t in cluster.tasks if t.state == "ready"} - {before.pid, None})
    until(lambda: cluster.state == "ready" and len(data_service.of(cluster).data_workers()) == 2)
    after = next(task for task in cluster.tasks if task.name == "data_worker:1")
    assert after.address == before.address
    assert numbers(cluster) == list(range(100))


def test_tasks_restart_and_scale(cluster: tfd.Cluster) -> None:
    before = {task.name: task.pid for task in cluster.tasks}
    cluster.restart("data_worker:0")
    assert {t.pid for t in cluster.tasks if t.name == "data_worker:0"} != {before["data_worker:0"]}
    cluster.scale(data_workers=3)
    assert len(data_service.of(cluster).data_workers()) == 3
    assert numbers(cluster) == list(range(100))
    cluster.scale(data_workers=2)
    assert numbers(cluster) == list(range(100))


def test_stop_leaves_nothing_behind(cluster: tfd.Cluster) -> None:
    with tfd.Cluster(data_workers=1, name="brief", launcher="command") as brief:
        pids = [task.pid for task in brief.tasks]
        assert numbers(brief) == list(range(100))
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids if pid))
    assert cluster.state == "ready"


@pytest.mark.timeout(340)  # all checks, each with clusters
def test_launcher_conforms() -> None:
    check_launcher("command")


def test_error_of_the_launcher_is_raised() -> None:
    launcher = base.launcher("command", {"commands": ["/nowhere/nice"]})
    with pytest.raises(errors.LaunchError, match="/nowhere/nice"):
        tfd.Cluster(data_workers=1, name="nowhere", launcher=launcher)
    assert "nowhere" not in tfd.clusters()


def test_agent_cannot_change_what_an_attach_starts(cluster: tfd.Cluster) -> None:
    """An attach takes the specification from this host, not from the agent."""
    config = cluster.config
    cluster.detach(1.0)
    (known,) = remote_detached_clusters()

    def describe(description: dict[str, Any]) -> None:
        """Replace the description that the agent has."""
        connection = known.connect()
        group, _ = connection.adopt(config, lambda event: None)
        group.hosts[0].describe(description)  # type: ignore[attr-defined]
        connection.close()

    try:
        stored = known.description["config"]
        changed = {"launcher": "command", "options": {"commands": ["touch /tmp/evil"]},
                   "allow": ["0.0.0.0/0"], "env": {"LD_PRELOAD": ""}}  # fmt: skip
        describe({**known.description, "config": {**stored, **changed}})
        cluster.leave()
        attached = tfd.attach("prefixed", connect=False)
        assert attached.config == config
        assert attached.state == "ready"
        attached.leave()
        describe({"config": {"launcher": "x"}})
        with pytest.raises(errors.TfdError, match=r"(?s)nice.*invalid.*description\.config"):
            tfd.attach("prefixed", connect=False)
    finally:
        known.connect().end("prefixed")  # type: ignore[attr-defined]
        known.path.unlink(missing_ok=True)
