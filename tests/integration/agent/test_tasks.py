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
    with tfd.Cluster(workers=2, ps=1, evaluator=True, policy=PATIENT, name="train") as cluster:
        yield cluster


def row(cluster: tfd.Cluster, task: str) -> TaskRow:
    result = cluster.snapshot().task(task)
    assert result is not None
    return result


def server_at(address: str) -> Probe:
    return probe(address, timeout=5, expect="server")


def restarted(cluster: tfd.Cluster, before: TaskRow) -> TaskRow:
    """Wait until a new process serves the task, and return its row."""

    def new_row() -> TaskRow | None:
        now = row(cluster, before.task)
        return now if now.state == "ready" and now.pid != before.pid else None

    result: TaskRow = until(new_row)
    return result


def run(script: str, **environment: str) -> Any:
    """Run a script in a separate process; return the JSON value of its last line."""
    completed = subprocess.run(
        [sys.executable, "-c", script],
        env=dict(os.environ, **environment),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    return json.loads(completed.stdout.splitlines()[-1])


def test_all_tasks_serve_and_no_dispatcher_is_started(cluster: tfd.Cluster) -> None:
    assert [task.name for task in cluster.tasks] == ["ps:0", "worker:0", "worker:1", "evaluator:0"]
    for task in cluster.tasks:
        probed = server_at(task.address)
        assert (probed.kind, task.state) == ("server", "ready")
        assert [device.type for device in probed.devices] == ["CPU"]
        job, index = task.name.split(":")
        assert f"/job:{job}/replica:0/task:{index}/" in probed.devices[0].name
        assert row(cluster, task.name).open_to == "loopback"
    with pytest.raises(StateError, match="no dispatcher"):
        cluster.distribute("dynamic")


def test_resource_use_is_shown(cluster: tfd.Cluster) -> None:
    for task in cluster.tasks:
        usage = until(lambda name=task.name: (r := row(cluster, name)).rss_mb and r)
        assert usage.rss_mb > 50
        assert usage.cpu_percent is not None
        assert usage.gpu == ""
    assert {"ps:0", "worker:1"} <= set(cluster.to_frame().task)


def test_peers_detect_a_killed_worker_at_once(cluster: tfd.Cluster) -> None:
    """The agent keeps only the connections of data tasks open after a crash."""
    before = row(cluster, "worker:0")
    agent, *_ = local.agent_pids()
    host, port = before.address.split(":")
    with socket.create_connection((host, int(port)), 5) as peer:
        for _ in range(2):  # the agent has sampled the worker
            sent = row(cluster, "worker:0").bytes_sent or 0
            until(lambda sent=sent: (row(cluster, "worker:0").bytes_sent or 0) > sent)
        assert before.pid
        os.kill(agent, signal.SIGSTOP)
        try:
            os.kill(before.pid, signal.SIGKILL)
            peer.settimeout(60)
            with peer.makefile("rb") as rest:
                rest.read()  # until the connection closes
        finally:
            os.kill(agent, signal.SIGCONT)
    restarted(cluster, before)


def test_hung_task_is_restarted(cluster: tfd.Cluster) -> None:
    before = row(cluster, "worker:0")
    assert before.pid
    os.kill(before.pid, signal.SIGSTOP)
    after = restarted(cluster, before)
    assert after.address == before.address
    notices = [notice.what for notice in cluster.snapshot().notices if notice.task == "worker:0"]
    assert any("hung, no reply for" in what for what in notices)


def test_scaling_keeps_the_addresses(cluster: tfd.Cluster) -> None:
    before = cluster._task_manager.cluster_spec()
    cluster.scale(workers=4)
    grown = cluster._task_manager.cluster_spec()
    assert (grown["ps"], grown["worker"][:2]) == (before["ps"], before["worker"])
    probed = server_at(grown["worker"][3])
    assert "/job:worker/replica:0/task:3/" in probed.devices[0].name
    pids = [row(cluster, f"worker:{index}").pid for index in (2, 3)]
    cluster.scale(workers=2)
    assert cluster._task_manager.cluster_spec() == before
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids if pid))
    assert [task.name for task in cluster.tasks if task.role == "worker"] == [
        "worker:0",
        "worker:1",
    ]
    cluster.scale(workers=3)
    assert (
        cluster._task_manager.cluster_spec()["worker"][2] == grown["worker"][2]
    )  # on its previous port
    cluster.scale(workers=2)


def test_data_workers_are_added_and_removed_independently(cluster: tfd.Cluster) -> None:
    import tensorflow as tf

    pids = {task.name: task.pid for task in cluster.tasks}
    cluster.scale(data_workers=2)
    assert cluster.dispatcher.target
    dataset = tf.data.Dataset.range(40).apply(cluster.distribute("dynamic"))
    assert sorted(dataset.as_numpy_iterator()) == list(range(40))
    cluster.scale(data_workers=0)
    assert {t.name: t.pid for t in cluster.tasks if t.role != "dispatcher"} == pids


#: Trains with the servers of a cluster, in a process that owns it.
TRAIN = """
import json
import tensorflow as tf

def train(spec):
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(spec), rpc_layer="grpc"
    )
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
    return total.numpy().item(), total.device
"""
LOCAL = """
import tfd_notebook as tfd
with tfd.Cluster(workers=2, ps=1, name="bare") as cluster:
    print(json.dumps(train(cluster._task_manager.cluster_spec())))
"""
ON_PS = "/job:ps/replica:0/task:0/"


def test_tensorflow_trains_with_the_tasks() -> None:
    total, device = run(TRAIN + LOCAL)
    assert total == 190.0
    assert device.startswith(ON_PS)


INSIDE = """
import tfd_notebook as tfd
from tfd_notebook.agent import tf_servers as servers
from tfd_notebook.net.probe import probe

def kinds(cluster):
    return [probe(task.address, 5, expect="server").kind for task in cluster.tasks]

results = {}
first = tfd.Cluster(workers=2, ps=1, evaluator=True, launcher="inprocess", name="first")
results["kinds"] = kinds(first)
results["names"] = [task.name for task in first.tasks]
results["open_to"] = sorted({row.open_to for row in first.snapshot().tasks})
results["notices"] = [notice.what for notice in first.snapshot().notices]
try:
    first.restart("worker:0")
except tfd.errors.StateError as error:
    results["restart"] = str(error)
first.scale(workers=1)
first.stop()
rows = first.snapshot().tasks
results["stopped"] = [(str(row.state), row.reason) for row in rows]
results["after"] = kinds(first)
second = tfd.Cluster(workers=1, ps=1, launcher="inprocess", name="second")
results["again"] = kinds(second)
results["new_ports"] = {t.address for t in first.tasks}.isdisjoint(t.address for t in second.tasks)
results["warned"] = [notice.what for notice in second.snapshot().notices]
second.stop()
results["unstoppable"] = servers.unstoppable()
most, servers.MAX_UNSTOPPABLE = servers.MAX_UNSTOPPABLE, servers.unstoppable() + 1
try:
    tfd.Cluster(workers=1, ps=1, launcher="inprocess", name="third")
except tfd.errors.StateError as error:
    results["refused"] = str(error)
results["not_started"] = servers.unstoppable() == results["unstoppable"]
results["left"] = list(tfd.clusters())
with tfd.Cluster(data_workers=1, launcher="inprocess", name="data") as data:
    results["data"] = data.state
servers.MAX_UNSTOPPABLE = most
# The last step, because it connects this process to the cluster.
with tfd.Cluster(workers=2, ps=1, launcher="inprocess", name="bare") as bare:
    results["trained"] = train(bare._task_manager.cluster_spec())
print(json.dumps(results))
"""


def test_in_process_servers_end_with_the_kernel() -> None:
    results = run(f"{TRAIN}\n{INSIDE}")
    assert results["names"] == ["ps:0", "worker:0", "worker:1", "evaluator:0"]
    assert results["kinds"] == ["server"] * 4
    assert results["open_to"] == ["loopback"]
    assert results["notices"] == []
    assert "restart the kernel" in results["restart"]
    ended = "TensorFlow cannot stop it, so it keeps its port until the kernel ends"
    assert results["stopped"] == [["stopped", ended]] * 3
    assert results["after"] == ["server"] * 3
    assert results["again"] == ["server"] * 2
    assert results["new_ports"]
    assert "4 servers of earlier clusters still run" in results["warned"][0]
    assert results["unstoppable"] == 6
    assert results["refused"].startswith(
        "[TFD105] 6 workers and ps of this and earlier clusters run"
    )
    assert "restart the kernel" in results["refused"]
    assert results["not_started"]
    assert results["left"] == []
    assert results["data"] == "ready"
    total, device = results["trained"]
    assert total == 190.0
    assert device.startswith(ON_PS)


RECORD = """
import json, os
variables = {name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "TF_"))}
with open("variables.jsonl", "a") as file:
    file.write(json.dumps(variables) + "\\n")
"""
GPUS = """
import json, os
import tfd_notebook as tfd

before = dict(os.environ)
with tfd.Cluster(
    workers=2, evaluator=True, data_workers=1, preload=["record"], name="gpus",
    gpus={"worker": 1, "evaluator": 0},
) as cluster:
    cluster._monitor.wait(lambda rows: sum(bool(row.gpu) for row in rows.values()) == 2, 30)
    shown = {row.task: row.gpu for row in cluster.snapshot().tasks}
assert dict(os.environ) == before
print(json.dumps(shown))
"""


def test_tasks_see_their_gpus_only(tmp_path: Path) -> None:
    _nvml.write_module(tmp_path)
    _nvml.write_gpus(tmp_path / "gpus", *[(35, 2_100_000_000)] * 4)
    (tmp_path / "record.py").write_text(RECORD)
    shown = run(
        f"import os; os.chdir({str(tmp_path)!r})\n{GPUS}",
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
    environments = [
        json.loads(line) for line in (tmp_path / "variables.jsonl").read_text().splitlines()
    ]
    assert sorted(environment["CUDA_VISIBLE_DEVICES"] for environment in environments) == [
        "-1",
        "-1",
        "-1",
        "1",
        "3",
    ]
    for environment in environments:
        has_gpu = environment["CUDA_VISIBLE_DEVICES"] != "-1"
        assert ("TF_FORCE_GPU_ALLOW_GROWTH" in environment) is has_gpu
        assert ("CUDA_DEVICE_ORDER" in environment) is has_gpu
        assert "TF_GRPC_REUSE_PORT" not in environment
