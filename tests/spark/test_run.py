"""`TFCluster.run` and `shutdown` if the user's function reads its own data."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.net import runtime_dir
from tfd_notebook.spark import TFCluster
from tfd_notebook.spark.driver.registry import last, running

pytestmark = pytest.mark.integration

#: Timeout in seconds of steps that take 1 s on an idle machine.
LONG = 60.0


def squares_sum(sc: Any) -> int:
    return int(sc.parallelize(range(10), 2).map(lambda n: n * n).sum())


def test_the_control_socket_ends_with_the_last_cluster(sc: Any, clusters: list[Any]) -> None:
    def wait(args: Any, ctx: Any) -> None:
        threading.Event().wait()

    socket = runtime_dir.control_socket(os.getpid())
    with tfd.Cluster(data_workers=1, name="first", launcher="inprocess"):
        clusters.append(TFCluster.run(sc, wait, None, 1, 0))
    assert socket.exists()
    clusters[0].fail(errors.SparkError("the test is over"))
    until(lambda: not socket.exists(), LONG)


def test_the_function_runs_in_separate_nodes(sc: Any, tmp_path: Path) -> None:
    def function(args: Any, ctx: Any) -> None:
        import os

        report = {
            "args": vars(args),
            "executor_id": ctx.executor_id,
            "worker_num": ctx.worker_num,
            "job": ctx.job_name,
            "index": ctx.task_index,
            "spec": ctx.cluster_spec,
            "workers": ctx.num_workers,
            "default_fs": ctx.defaultFS,
            "working_dir": ctx.working_dir,
            "tf_config": json.loads(os.environ["TF_CONFIG"]),
            "pid": os.getpid(),
        }
        (tmp_path / f"{ctx.executor_id}.json").write_text(json.dumps(report))
        print("message from", ctx.job_name, ctx.task_index)

    import argparse

    args = argparse.Namespace(steps=3)
    cluster = TFCluster.run(sc, function, args, 2, 0)
    assert running()[cluster.name] is cluster
    cluster.shutdown(timeout=LONG)

    assert cluster.phase == "stopped"
    assert cluster.name not in running()
    assert last() is cluster
    reports = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2)]
    for number, node in enumerate(reports):
        assert node["args"] == {"steps": 3}
        assert (node["job"], node["index"], node["worker_num"]) == ("worker", number, number)
        assert node["executor_id"] == number
        assert node["workers"] == 2
        assert node["spec"] == cluster.cluster_spec
        assert node["tf_config"]["cluster"] == node["spec"]
        assert node["tf_config"]["task"] == {"type": "worker", "index": number}
        assert node["default_fs"] == cluster.defaultFS
        assert cluster.defaultFS.startswith("file:")
    info = cluster.cluster_info
    assert [node["pid"] for node in info] == [node["pid"] for node in reports]
    assert {node["job_name"] for node in info} == {"worker"}
    assert len({node["executor"] for node in info}) == 2
    assert cluster.cluster_meta["cluster_template"] == {"worker": [0, 1]}
    assert cluster.num_executors == 2
    assert cluster.input_mode is TFCluster.InputMode.TENSORFLOW
    assert cluster.nodeRDD.getNumPartitions() == 2
    assert "message from worker 1" in cluster.logs("worker:1")
    assert "worker:0: message from worker 0" in cluster.logs()
    rows = cluster.snapshot().spark.nodes
    assert [(row.node, row.state) for row in rows] == [
        ("worker:0", "finished"),
        ("worker:1", "finished"),
    ]
    assert squares_sum(sc) == 285


def test_a_list_of_arguments_becomes_the_command_line(sc: Any, tmp_path: Path) -> None:
    def function(args: Any, ctx: Any) -> None:
        import sys

        (tmp_path / str(ctx.task_index)).write_text(json.dumps([args, sys.argv]))

    TFCluster.run(sc, function, ["program", "--steps=3"], 1, 0).shutdown(timeout=LONG)
    assert json.loads((tmp_path / "0").read_text()) == [["program", "--steps=3"]] * 2


def test_an_error_of_the_function_has_its_traceback(sc: Any) -> None:
    def function(args: Any, ctx: Any) -> None:
        if ctx.task_index == 1:
            raise ValueError("no such column: price")
        threading.Event().wait()

    with pytest.raises(errors.NodeFailed) as caught:
        TFCluster.run(sc, function, None, 2, 0).shutdown(timeout=LONG)
    assert caught.value.task == "worker:1"
    text = str(caught.value)
    assert "ValueError: no such column: price" in text
    assert 'raise ValueError("no such column: price")' in text
    cluster = last()
    assert cluster is not None
    assert cluster.error is caught.value
    until(lambda: cluster.name not in running(), LONG)
    assert cluster.phase == "failed"
    assert {row.node: row.state for row in cluster.snapshot().spark.nodes} == {
        "worker:0": "stopped",
        "worker:1": "failed",
    }
    assert squares_sum(sc) == 285


def test_a_cluster_runs_after_a_failed_one(sc: Any, tmp_path: Path) -> None:
    def function(args: Any, ctx: Any) -> None:
        (tmp_path / f"{ctx.task_index}").touch()
        if args == "fails":
            raise KeyError("first time")

    with pytest.raises(errors.NodeFailed, match="first time"):
        TFCluster.run(sc, function, "fails", 2, 0).shutdown(timeout=LONG)
    TFCluster.run(sc, function, "works", 2, 0).shutdown(timeout=LONG)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def test_run_and_shutdown_can_return_futures(sc: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def function(args: Any, ctx: Any) -> None:
        while not gate.exists():
            time.sleep(0.05)

    future = TFCluster.run(sc, function, None, 2, 0, wait=False, name="future")
    cluster = future.result(LONG)
    assert cluster.name == "future"
    stopping = cluster.shutdown(wait=False)
    assert not stopping.done()
    gate.touch()
    assert stopping.result(LONG) is None
    assert cluster.phase == "stopped"


def test_a_cluster_runs_from_another_thread(sc: Any) -> None:
    phases = []

    def work() -> None:
        cluster = TFCluster.run(sc, lambda args, ctx: None, None, 1, 0)
        cluster.shutdown(timeout=LONG)
        phases.append(cluster.phase)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(2 * LONG)
    assert phases == ["stopped"]


def test_sys_exit_ends_the_function(sc: Any) -> None:
    def function(args: Any, ctx: Any) -> None:
        import sys

        sys.exit(args)

    TFCluster.run(sc, function, 0, 1, 0).shutdown(timeout=LONG)
    with pytest.raises(errors.NodeFailed, match="SystemExit: 3"):
        TFCluster.run(sc, function, 3, 1, 0).shutdown(timeout=LONG)


def test_a_function_that_cannot_be_pickled_is_refused(sc: Any) -> None:
    lock = threading.Lock()

    def function(args: Any, ctx: Any) -> None:
        lock.acquire()

    with pytest.raises(errors.NotSerializable, match="map_fun"):
        TFCluster.run(sc, function, None, 1, 0)


def test_train_requires_the_input_mode_spark(sc: Any) -> None:
    cluster = TFCluster.run(sc, lambda args, ctx: None, None, 1, 0)
    with pytest.raises(errors.StateError, match=r"InputMode\.SPARK"):
        cluster.train(sc.parallelize([1]), 1)
    cluster.shutdown(timeout=LONG)
    cluster.shutdown(timeout=LONG)  # a second time does nothing


def test_keras_accepts_a_pandas_frame_in_a_node(sc: Any, tmp_path: Path) -> None:
    def function(args: Any, ctx: Any) -> None:
        import keras
        import pandas as pd

        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        frame = pd.DataFrame({"a": [0.0, 1.0, 2.0, 3.0], "b": [1.0, 1.0, 1.0, 1.0]})
        history = model.fit(frame, pd.Series([0.0, 1.0, 2.0, 3.0]), epochs=2, verbose=0)
        (tmp_path / "losses").write_text(json.dumps(history.history["loss"]))

    TFCluster.run(sc, function, None, 1, 0).shutdown(timeout=LONG)
    assert len(json.loads((tmp_path / "losses").read_text())) == 2
