"""Roles in a running cluster: chief, evaluator, parameter servers, TensorBoard."""

from __future__ import annotations

import json
import socket
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.spark import TFCluster
from tfd_notebook.spark.executor import tensorboard
from tfd_notebook.spark.TFCluster import InputMode

pytestmark = pytest.mark.integration

LONG = 90.0


def test_chief_and_parameter_server_get_their_tf_config(
    sc: Any, tmp_path: Path, clusters: list[Any]
) -> None:
    """The parameter server occupies its executor, so all rows go to the chief."""

    def function(args: Any, ctx: Any) -> None:
        import threading

        (tmp_path / f"{ctx.job_name}.json").write_text(__import__("os").environ["TF_CONFIG"])
        if ctx.job_name == "ps":
            threading.Event().wait()
        count, feed = 0, ctx.get_data_feed()
        while not feed.should_stop():
            count += len(feed.next_batch(10))
        (tmp_path / "count").write_text(str(count))

    cluster = TFCluster.run(
        sc, function, None, 2, 1, master_node="chief", input_mode=InputMode.SPARK
    )
    clusters.append(cluster)
    cluster.train(sc.parallelize(range(100), 5), 1)
    assert sc.statusTracker().getActiveStageIds(), "the parameter server's slot is not held"
    cluster.shutdown(timeout=LONG)
    assert (tmp_path / "count").read_text() == "100"
    for job in ("chief", "ps"):
        config = json.loads((tmp_path / f"{job}.json").read_text())
        assert config["task"] == {"type": job, "index": 0}
        assert config["cluster"] == cluster.cluster_spec
    states = {row.node: row.state for row in cluster.snapshot().spark.nodes}
    assert states == {"ps:0": "stopped", "chief:0": "finished"}


def test_tensorboard_serves_at_its_url_until_the_shutdown(
    sc: Any, tmp_path: Path, clusters: list[Any]
) -> None:
    gate = tmp_path / "gate"

    def function(args: Any, ctx: Any) -> None:
        import time

        while not gate.exists():
            time.sleep(0.05)

    logs = tmp_path / "logs"
    logs.mkdir()
    cluster = TFCluster.run(sc, function, None, 1, 0, tensorboard=True, log_dir=str(logs))
    clusters.append(cluster)
    url = cluster.tensorboard_url(wait=False).result(LONG)
    assert url is not None
    assert cluster.tensorboard_url() == url
    assert cluster.snapshot().spark.tensorboard == url
    (node_info,) = cluster.cluster_info
    assert node_info["tb_port"] == int(url.rpartition(":")[2])
    assert "tensorboard" in " ".join(psutil.Process(node_info["tb_pid"]).cmdline())
    sockets = psutil.Process(node_info["tb_pid"]).net_connections("tcp")
    listening = {c.laddr.ip for c in sockets if c.status == psutil.CONN_LISTEN}
    assert listening == {socket.gethostbyname(urllib.parse.urlsplit(url).hostname or "")}
    # It has no password.
    with urllib.request.urlopen(f"{url}/data/environment", timeout=LONG) as response:
        assert str(logs) in response.read().decode()
    supervisor = psutil.Process(psutil.Process(cluster.nodes[0].pid).ppid())
    boards = [p for p in supervisor.children() if "tensorboard" in " ".join(p.cmdline())]
    assert len(boards) == 1
    gate.touch()
    cluster.shutdown(timeout=LONG)
    until(lambda: not boards[0].is_running(), LONG)


def test_the_url_is_none_without_tensorboard(sc: Any, clusters: list[Any]) -> None:
    cluster = TFCluster.run(sc, lambda args, ctx: None, None, 1, 0)
    clusters.append(cluster)
    assert cluster.tensorboard_url() is None
    assert cluster.tensorboard_url(wait=False).result(LONG) is None
    cluster.shutdown(timeout=LONG)


def test_the_end_of_tensorboard_is_reported_at_once(sc: Any, clusters: list[Any]) -> None:
    def function(args: Any, ctx: Any) -> None:
        import threading

        threading.Event().wait()

    cluster = TFCluster.run(sc, function, None, 1, 0, tensorboard=True)
    clusters.append(cluster)
    supervisor = psutil.Process(psutil.Process(cluster.nodes[0].pid).ppid())
    (board,) = (p for p in supervisor.children() if "tensorboard" in " ".join(p.cmdline()))
    board.kill()
    until(lambda: cluster.nodes[0].board_error, LONG)
    with pytest.raises(errors.LaunchError, match="ended, with status -9") as caught:
        cluster.tensorboard_url()
    assert caught.value.task == "worker:0"
    assert cluster.phase == "running"


def test_the_error_of_tensorboard_contains_its_output(tmp_path: Path) -> None:
    messages: list[dict[str, str]] = []
    # No host has this address.
    request = {"tensorboard": "logs", "host": "192.0.2.1", "directory": str(tmp_path)}
    board = tensorboard.start(request, tmp_path, messages.append)
    assert board is not None
    until(lambda: messages, LONG)
    board.end()
    (message,) = messages
    assert message["board"] == ""
    assert "has ended, with status" in message["board_error"]
    assert "Cannot assign requested address" in message["board_error"]
