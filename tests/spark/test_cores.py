"""Executors with several cores, and GPUs that Spark deals out: a Spark of its own has both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.spark._sources import SQUARES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROGRAM = (
    SQUARES
    + """
import contextlib, io, json, os, sys
import tfd_notebook as tfd
from tfd_notebook.spark import TFCluster

def trains(directory, ctx):
    said = {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "rows": 0}
    if ctx.job_name == "ps":
        import threading
        threading.Event().wait()
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        said["rows"] += sum(feed.next_batch(16))
    with open(f"{directory}/{ctx.job_name}-{ctx.task_index}", "w") as file:
        json.dump(said, file)

script, directory = sys.argv[1:]
spark = tfd.spark.session(executors=2, cores=2, config={
    "spark.worker.resource.gpu.amount": 2,
    "spark.worker.resource.gpu.discoveryScript": script,
    "spark.executor.resource.gpu.amount": 2,
    "spark.task.resource.gpu.amount": 1,
})
sc = spark.sparkContext
rows = sc.parallelize(range(1000), 8)
said = {}
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    said["codes"] = tfd.spark.check(spark, 4).codes
    tfd.spark.check(spark, 5)
said["printed"] = printed.getvalue()

for nodes in (4, 2):
    with contextlib.ExitStack() as last:
        fed = TFCluster.InputMode.SPARK
        cluster = TFCluster.run(sc, trains, directory, nodes, 1, input_mode=fed)
        last.callback(cluster.fail, tfd.errors.SparkError("over"))
        said[f"held {nodes}"] = cluster.slots_held
        cluster.train(rows, 2)
        cluster.shutdown(timeout=120)
        said[f"info {nodes}"] = cluster.cluster_info
        said[f"table {nodes}"] = [[row.node, row.gpu] for row in cluster.snapshot().spark.nodes]
        said[f"seen {nodes}"] = {}
        for name in os.listdir(directory):
            with open(f"{directory}/{name}") as file:
                said[f"seen {nodes}"][name] = json.load(file)
            os.unlink(f"{directory}/{name}")

with contextlib.ExitStack() as last:
    cluster = TFCluster.run(sc, squares, None, 2, 1, input_mode=TFCluster.InputMode.SPARK)
    last.callback(cluster.fail, tfd.errors.SparkError("over"))
    said["squares"] = cluster.inference(rows).collect()
    said["squared"] = cluster.cluster_info
    cluster.shutdown(timeout=120)
print(json.dumps(said, default=bytes.decode), flush=True)
"""
)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a program saw on ``local-cluster[2,2,1024]`` where each executor has two GPUs."""
    directory = tmp_path_factory.mktemp("cores")
    script = directory / "gpus"
    script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["5", "7"]}\'\n')
    script.chmod(0o755)
    results = directory / "results"
    results.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(script), str(results)],
        capture_output=True,
        text=True,
        timeout=500,
        env=dict(os.environ),
    )
    assert done.stdout, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def places(info: list[dict[str, Any]]) -> dict[str, str]:
    return {f"{node['job_name']}:{node['task_index']}": node["executor"] for node in info}


def test_each_core_is_a_slot(said: dict[str, Any]) -> None:
    assert said["codes"] == []
    assert "4 slots, 4 nodes requested" in said["printed"]
    assert "spark.master=local-cluster[3,2,1024]" in said["printed"]
    assert said["held 4"] == said["held 2"] == 1


def test_all_rows_reach_workers_beside_a_parameter_server_on_the_same_executor(
    said: dict[str, Any],
) -> None:
    executors = list(places(said["info 4"]).values())
    assert sorted(map(executors.count, set(executors))) == [2, 2]
    seen = said["seen 4"]
    assert set(seen) == {"worker-0", "worker-1", "worker-2"}
    assert sum(one["rows"] for one in seen.values()) == 2 * sum(range(1000))


def test_rows_that_come_to_an_executor_without_a_worker_reach_one_of_the_host(
    said: dict[str, Any],
) -> None:
    for info in ("info 2", "squared"):
        where = places(said[info])
        assert where["ps:0"] != where["worker:0"]  # and one core of each runs what feeds
    assert said["seen 2"]["worker-0"]["rows"] == 2 * sum(range(1000))
    assert said["squares"] == [number * number for number in range(1000)]


def test_a_node_sees_the_gpu_that_spark_gave_to_it(said: dict[str, Any]) -> None:
    table = dict(said["table 4"])
    assert set(table.values()) == {"5", "7"}
    where = places(said["info 4"])
    given = [(where[node], gpu) for node, gpu in table.items()]
    assert len(set(given)) == 4
    for name, one in said["seen 4"].items():
        assert one["gpu"] == table[name.replace("-", ":")]
