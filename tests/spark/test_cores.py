"""Executors with several cores and GPUs that Spark assigns, in a separate Spark."""

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

def train(directory, ctx):
    report = {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "rows": 0}
    if ctx.job_name == "ps":
        import threading
        threading.Event().wait()
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        report["rows"] += sum(feed.next_batch(16))
    with open(f"{directory}/{ctx.job_name}-{ctx.task_index}", "w") as file:
        json.dump(report, file)

script, directory = sys.argv[1:]
spark = tfd.spark.session(executors=2, cores=2, config={
    "spark.worker.resource.gpu.amount": 2,
    "spark.worker.resource.gpu.discoveryScript": script,
    "spark.executor.resource.gpu.amount": 2,
    "spark.task.resource.gpu.amount": 1,
})
sc = spark.sparkContext
rows = sc.parallelize(range(1000), 8)
report = {}
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    report["codes"] = tfd.spark.check(spark, 4).codes
    tfd.spark.check(spark, 5)
report["printed"] = printed.getvalue()

for nodes in (4, 2):
    with contextlib.ExitStack() as cleanup:
        fed = TFCluster.InputMode.SPARK
        cluster = TFCluster.run(sc, train, directory, nodes, 1, input_mode=fed)
        cleanup.callback(cluster.fail, tfd.errors.SparkError("the test is over"))
        report[f"held {nodes}"] = cluster.slots_held
        cluster.train(rows, 2)
        cluster.shutdown(timeout=120)
        report[f"info {nodes}"] = cluster.cluster_info
        report[f"table {nodes}"] = [[row.node, row.gpu] for row in cluster.snapshot().spark.nodes]
        report[f"rows {nodes}"] = {}
        for name in os.listdir(directory):
            with open(f"{directory}/{name}") as file:
                report[f"rows {nodes}"][name] = json.load(file)
            os.unlink(f"{directory}/{name}")

with contextlib.ExitStack() as cleanup:
    cluster = TFCluster.run(sc, squares, None, 2, 1, input_mode=TFCluster.InputMode.SPARK)
    cleanup.callback(cluster.fail, tfd.errors.SparkError("the test is over"))
    report["squares"] = cluster.inference(rows).collect()
    report["squared"] = cluster.cluster_info
    cluster.shutdown(timeout=120)
print(json.dumps(report, default=bytes.decode), flush=True)
"""
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the report of a program on ``local-cluster[2,2,1024]`` with two GPUs an executor."""
    directory = tmp_path_factory.mktemp("cores")
    script = directory / "gpus"
    script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["5", "7"]}\'\n')
    script.chmod(0o755)
    results = directory / "results"
    results.mkdir()
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(script), str(results)],
        capture_output=True,
        text=True,
        timeout=500,
        env=dict(os.environ),
    )
    assert completed.stdout, completed.stderr[-5000:]
    report: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return report


def places(info: list[dict[str, Any]]) -> dict[str, str]:
    return {f"{node['job_name']}:{node['task_index']}": node["executor"] for node in info}


def test_each_core_is_a_slot(report: dict[str, Any]) -> None:
    assert report["codes"] == []
    assert "4 slots, 4 nodes requested" in report["printed"]
    assert "spark.master=local-cluster[3,2,1024]" in report["printed"]
    assert report["held 4"] == report["held 2"] == 1


def test_all_rows_reach_workers_next_to_a_parameter_server(
    report: dict[str, Any],
) -> None:
    executors = list(places(report["info 4"]).values())
    assert sorted(map(executors.count, set(executors))) == [2, 2]
    reports = report["rows 4"]
    assert set(reports) == {"worker-0", "worker-1", "worker-2"}
    assert sum(node["rows"] for node in reports.values()) == 2 * sum(range(1000))


def test_an_executor_without_a_worker_feeds_another_on_the_host(
    report: dict[str, Any],
) -> None:
    for info in ("info 2", "squared"):
        executors = places(report[info])
        assert (
            executors["ps:0"] != executors["worker:0"]
        )  # the second core of each runs the feeding task
    assert report["rows 2"]["worker-0"]["rows"] == 2 * sum(range(1000))
    assert report["squares"] == [number * number for number in range(1000)]


def test_a_node_sees_the_gpu_that_spark_assigned(report: dict[str, Any]) -> None:
    table = dict(report["table 4"])
    assert set(table.values()) == {"5", "7"}
    executors = places(report["info 4"])
    assigned = [(executors[node], gpu) for node, gpu in table.items()]
    assert len(set(assigned)) == 4
    for name, node in report["rows 4"].items():
        assert node["gpu"] == table[name.replace("-", ":")]
