"""Workers, parameter servers and evaluators: real servers, killed, stopped and scaled."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import tfd_notebook as tfd
from tests import _nvml
from tests._waiting import until
from tfd_notebook.errors import StateError
from tfd_notebook.launchers import local
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.net.probe import Probe, probe

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_coordinator")]

PATIENT = tfd.Policy(hang_seconds=2, on_hang="restart")


@pytest.fixture(scope="module")
def cluster() -> Iterator[tfd.Cluster]:
    with tfd.Cluster(workers=2, ps=1, evaluator=True, policy=PATIENT, name="train") as made:
        yield made


def row(cluster: tfd.Cluster, task: str) -> TaskRow:
    found = cluster.snapshot().task(task)
    assert found is not None
    return found


def server_at(address: str) -> Probe:
    return probe(address, timeout=5, expect="server")


def back(cluster: tfd.Cluster, before: TaskRow) -> TaskRow:
    """Wait until a fresh process serves the task, and return its row."""

    def fresh() -> TaskRow | None:
        now = row(cluster, before.task)
        return now if now.state == "ready" and now.pid != before.pid else None

    found: TaskRow = until(fresh)
    return found


def run(script: str, *arguments: str, **environment: str) -> Any:
    """Run a script in a process of its own; return what its last line says, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=dict(os.environ, **environment),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_all_serve_and_no_dispatcher_is_there(cluster: tfd.Cluster) -> None:
    assert [task.name for task in cluster.tasks] == ["ps:0", "worker:0", "worker:1", "evaluator:0"]
    for task in cluster.tasks:
        found = server_at(task.address)
        assert (found.kind, task.state) == ("server", "ready")
        assert [device.type for device in found.devices] == ["CPU"]
        job, index = task.name.split(":")
        assert f"/job:{job}/replica:0/task:{index}/" in found.devices[0].name
        assert row(cluster, task.name).open_to == "loopback"
    with pytest.raises(StateError, match="no dispatcher"):
        cluster.distribute("dynamic")


def test_what_they_use_is_shown(cluster: tfd.Cluster) -> None:
    for task in cluster.tasks:
        seen = until(lambda name=task.name: (r := row(cluster, name)).rss_mb and r)
        assert seen.rss_mb > 50
        assert seen.cpu_percent is not None
        assert seen.gpu == ""
    assert {"ps:0", "worker:1"} <= set(cluster.to_frame().task)


@pytest.mark.parametrize("task", ["worker:1", "ps:0", "evaluator:0"])
def test_who_is_killed_comes_back_on_its_port(cluster: tfd.Cluster, task: str) -> None:
    before = row(cluster, task)
    assert before.pid
    os.kill(before.pid, signal.SIGKILL)
    after = back(cluster, before)
    assert (after.address, after.restarts) == (before.address, before.restarts + 1)
    assert server_at(after.address).alive
    assert any(
        notice.task == task and "SIGKILL" in notice.what for notice in cluster.snapshot().notices
    )


def test_its_peers_see_at_once_that_it_is_gone(cluster: tfd.Cluster) -> None:
    """The agent keeps connections of data tasks that die; here somebody must take over the work."""
    before = row(cluster, "worker:0")
    agent, *_ = local.agent_pids()
    host, port = before.address.split(":")
    with socket.create_connection((host, int(port)), 5) as peer:
        for _ in range(2):  # the agent has looked at it
            sent = row(cluster, "worker:0").bytes_sent or 0
            until(lambda sent=sent: (row(cluster, "worker:0").bytes_sent or 0) > sent)
        assert before.pid
        os.kill(agent, signal.SIGSTOP)
        try:
            os.kill(before.pid, signal.SIGKILL)
            peer.settimeout(5)
            with peer.makefile("rb") as rest:
                rest.read()  # to its end
        finally:
            os.kill(agent, signal.SIGCONT)
    back(cluster, before)


def test_who_hangs_is_restarted(cluster: tfd.Cluster) -> None:
    before = row(cluster, "worker:0")
    assert before.pid
    os.kill(before.pid, signal.SIGSTOP)
    after = back(cluster, before)
    assert after.address == before.address
    notices = [notice.what for notice in cluster.snapshot().notices if notice.task == "worker:0"]
    assert any("hung, no reply for" in what for what in notices)


def test_restarted_when_asked(cluster: tfd.Cluster) -> None:
    for task in ("ps:0", "worker:1"):
        before = row(cluster, task)
        cluster.restart(task)
        after = row(cluster, task)
        assert (after.state, after.address) == ("ready", before.address)
        assert after.pid != before.pid
        assert server_at(after.address).alive


def test_scaled_up_and_down(cluster: tfd.Cluster) -> None:
    before = cluster._task_manager.cluster_spec()
    cluster.scale(workers=4)
    grown = cluster._task_manager.cluster_spec()
    assert (grown["ps"], grown["worker"][:2]) == (before["ps"], before["worker"])
    found = server_at(grown["worker"][3])
    assert "/job:worker/replica:0/task:3/" in found.devices[0].name
    pids = [row(cluster, f"worker:{index}").pid for index in (2, 3)]
    cluster.scale(workers=2)
    assert cluster._task_manager.cluster_spec() == before
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids if pid))
    assert [task.name for task in cluster.tasks if task.role == "worker"] == [
        "worker:0",
        "worker:1",
    ]
    cluster.scale(workers=3)
    assert cluster._task_manager.cluster_spec()["worker"][2] == grown["worker"][2]  # its own port
    cluster.scale(workers=2)


def test_data_workers_come_and_go_beside_them(cluster: tfd.Cluster) -> None:
    import tensorflow as tf

    pids = {task.name: task.pid for task in cluster.tasks}
    cluster.scale(data_workers=2)
    assert cluster.dispatcher.target
    dataset = tf.data.Dataset.range(40).apply(cluster.distribute("dynamic"))
    assert sorted(dataset.as_numpy_iterator()) == list(range(40))
    cluster.scale(data_workers=0)
    assert {t.name: t.pid for t in cluster.tasks if t.role != "dispatcher"} == pids


def test_everything_at_once_and_nothing_is_left() -> None:
    import tensorflow as tf

    with tfd.Cluster(data_workers=1, workers=1, ps=1, name="all") as cluster:
        assert [task.name for task in cluster.tasks] == [
            "dispatcher:0",
            "data_worker:0",
            "ps:0",
            "worker:0",
        ]
        dataset = tf.data.Dataset.range(20).apply(cluster.distribute("dynamic"))
        assert len(list(dataset)) == 20
        pids = [task.pid for task in cluster.tasks]
        ports = [int(task.address.rpartition(":")[2]) for task in cluster.tasks]
    assert not any(psutil.pid_exists(pid) for pid in pids if pid)
    for port in ports:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("", port))
    assert {row.state for row in cluster.snapshot().tasks} == {"stopped"}


TRAIN = """
import json, sys
import tensorflow as tf
import tfd_notebook as tfd

with tfd.Cluster(workers=2, ps=1, launcher=sys.argv[1], name="bare") as cluster:
    spec = tf.train.ClusterSpec(cluster._task_manager.cluster_spec())
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        total = tf.Variable(0.0)

    @tf.function
    def add(x):
        total.assign_add(x)
        return total.device

    for number in range(20):
        coordinator.schedule(add, (float(number),))
    coordinator.join()
    print(json.dumps([total.numpy().item(), total.device]))
"""


@pytest.mark.parametrize("launcher", ["local", "inprocess"])
def test_tensorflow_trains_on_them(launcher: str) -> None:
    total, device = run(TRAIN, launcher)
    assert total == 190.0
    assert device.startswith("/job:ps/replica:0/task:0/")


INSIDE = """
import json
import tfd_notebook as tfd
from tfd_notebook.agent import tf_servers as servers
from tfd_notebook.net.probe import probe

def ask(cluster):
    return [probe(task.address, 5, expect="server").kind for task in cluster.tasks]

said = {}
first = tfd.Cluster(workers=2, ps=1, evaluator=True, launcher="inprocess", name="first")
said["kinds"] = ask(first)
said["names"] = [task.name for task in first.tasks]
said["open_to"] = sorted({row.open_to for row in first.snapshot().tasks})
said["notices"] = [notice.what for notice in first.snapshot().notices]
try:
    first.restart("worker:0")
except tfd.errors.StateError as error:
    said["restart"] = str(error)
first.scale(workers=1)
first.stop()
rows = first.snapshot().tasks
said["stopped"] = [(str(row.state), row.reason) for row in rows]
said["after"] = ask(first)
second = tfd.Cluster(workers=1, ps=1, launcher="inprocess", name="second")
said["again"] = ask(second)
said["new_ports"] = {t.address for t in first.tasks}.isdisjoint(t.address for t in second.tasks)
said["warned"] = [notice.what for notice in second.snapshot().notices]
second.stop()
said["endless"] = servers.endless()
servers.MOST_ENDLESS = servers.endless() + 1
try:
    tfd.Cluster(workers=1, ps=1, launcher="inprocess", name="third")
except tfd.errors.StateError as error:
    said["refused"] = str(error)
said["not_begun"] = servers.endless() == said["endless"]
said["left"] = list(tfd.clusters())
with tfd.Cluster(data_workers=1, launcher="inprocess", name="data") as data:
    said["data"] = data.state
print(json.dumps(said))
"""


def test_inside_a_kernel_they_end_with_it() -> None:
    said = run(INSIDE)
    assert said["names"] == ["ps:0", "worker:0", "worker:1", "evaluator:0"]
    assert said["kinds"] == ["server"] * 4
    assert said["open_to"] == ["loopback"]
    assert said["notices"] == []
    assert "restart the kernel" in said["restart"]
    ended = "TensorFlow cannot stop it, so it keeps its port until the kernel ends"
    assert said["stopped"] == [["stopped", ended]] * 3
    assert said["after"] == ["server"] * 3
    assert said["again"] == ["server"] * 2
    assert said["new_ports"]
    assert "4 servers of earlier clusters still run" in said["warned"][0]
    assert said["endless"] == 6
    assert said["refused"].startswith("[TFD105] 6 workers and ps of this and earlier clusters run")
    assert "restart the kernel" in said["refused"]
    assert said["not_begun"]
    assert said["left"] == []
    assert said["data"] == "ready"


TELL = """
import json, os
seen = {name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "TF_"))}
with open("seen.jsonl", "a") as file:
    file.write(json.dumps(seen) + "\\n")
"""
DEAL = """
import json, os
import tfd_notebook as tfd

before = dict(os.environ)
with tfd.Cluster(
    workers=2, evaluator=True, data_workers=1, preload=["tell"], name="gpus",
    gpus={"worker": 1, "evaluator": 0},
) as cluster:
    cluster._monitor.wait(lambda rows: sum(bool(row.gpu) for row in rows.values()) == 2, 30)
    shown = {row.task: row.gpu for row in cluster.snapshot().tasks}
assert dict(os.environ) == before
print(json.dumps(shown))
"""


def test_gpus_reach_their_tasks(tmp_path: Path) -> None:
    _nvml.write_module(tmp_path)
    _nvml.write_gpus(tmp_path / "gpus", *[(35, 2_100_000_000)] * 4)
    (tmp_path / "tell.py").write_text(TELL)
    shown = run(
        f"import os; os.chdir({str(tmp_path)!r})\n{DEAL}",
        PYTHONPATH=str(tmp_path),
        CUDA_VISIBLE_DEVICES="3,1",
        **{_nvml.VARIABLE: str(tmp_path / "gpus")},
    )
    figures = "35 %, 2.1 of 80 GB"
    assert shown == {
        "dispatcher:0": "",
        "data_worker:0": "",
        "evaluator:0": "",
        "worker:0": f"3: {figures}",
        "worker:1": f"1: {figures}",
    }
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert sorted(one["CUDA_VISIBLE_DEVICES"] for one in seen) == ["-1", "-1", "-1", "1", "3"]
    for one in seen:
        sees = one["CUDA_VISIBLE_DEVICES"] != "-1"
        assert ("TF_FORCE_GPU_ALLOW_GROWTH" in one) is sees
        assert ("CUDA_DEVICE_ORDER" in one) is sees
        assert "TF_GRPC_REUSE_PORT" not in one
