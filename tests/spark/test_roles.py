"""Roles in a running cluster: chief, evaluator, parameter servers, TensorBoard."""

from __future__ import annotations

import json
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


def test_chief_and_parameter_server_each_with_its_configuration(
    sc: Any, tmp_path: Path, ended: list[Any]
) -> None:
    """The parameter server holds its executor: all rows go to the chief."""

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
    ended.append(cluster)
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


def test_tensorboard_is_where_it_says_and_ends(sc: Any, tmp_path: Path, ended: list[Any]) -> None:
    gate = tmp_path / "gate"

    def function(args: Any, ctx: Any) -> None:
        import time

        while not gate.exists():
            time.sleep(0.05)

    logs = tmp_path / "logs"
    logs.mkdir()
    cluster = TFCluster.run(sc, function, None, 1, 0, tensorboard=True, log_dir=str(logs))
    ended.append(cluster)
    url = cluster.tensorboard_url(wait=False).result(LONG)
    assert url is not None
    assert cluster.tensorboard_url() == url
    assert cluster.snapshot().spark.tensorboard == url
    (known,) = cluster.cluster_info
    assert known["tb_port"] == int(url.rpartition(":")[2])
    assert "tensorboard" in " ".join(psutil.Process(known["tb_pid"]).cmdline())
    with urllib.request.urlopen(f"{url}/data/environment", timeout=LONG) as answer:
        assert str(logs) in answer.read().decode()
    supervisor = psutil.Process(psutil.Process(cluster.nodes[0].pid).ppid())
    boards = [p for p in supervisor.children() if "tensorboard" in " ".join(p.cmdline())]
    assert len(boards) == 1
    gate.touch()
    cluster.shutdown(timeout=LONG)
    until(lambda: not boards[0].is_running(), LONG)


def test_without_tensorboard_there_is_no_address(sc: Any, ended: list[Any]) -> None:
    cluster = TFCluster.run(sc, lambda args, ctx: None, None, 1, 0)
    ended.append(cluster)
    assert cluster.tensorboard_url() is None
    assert cluster.tensorboard_url(wait=False).result(LONG) is None
    cluster.shutdown(timeout=LONG)


def test_tensorboard_that_has_ended_is_told_at_once(sc: Any, ended: list[Any]) -> None:
    def function(args: Any, ctx: Any) -> None:
        import threading

        threading.Event().wait()

    cluster = TFCluster.run(sc, function, None, 1, 0, tensorboard=True)
    ended.append(cluster)
    supervisor = psutil.Process(psutil.Process(cluster.nodes[0].pid).ppid())
    (board,) = (p for p in supervisor.children() if "tensorboard" in " ".join(p.cmdline()))
    board.kill()
    until(lambda: cluster.nodes[0].board_error, LONG)
    with pytest.raises(errors.LaunchError, match="ended, with status -9") as caught:
        cluster.tensorboard_url()
    assert caught.value.task == "worker:0"
    assert cluster.phase == "running"


def test_why_tensorboard_has_ended_is_what_it_wrote(tmp_path: Path) -> None:
    said: list[dict[str, str]] = []
    # An address that no host has.
    request = {"tensorboard": "logs", "host": "192.0.2.1", "directory": str(tmp_path)}
    board = tensorboard.start(request, tmp_path, said.append)
    assert board is not None
    until(lambda: said, LONG)
    board.end()
    (word,) = said
    assert word["board"] == ""
    assert "has ended, with status" in word["no_board"]
    assert "Cannot assign requested address" in word["no_board"]
