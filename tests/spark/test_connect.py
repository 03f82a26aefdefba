"""Executors with several cores and GPUs, and Spark Connect, which has no RDDs, in one program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
Step = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Step]:
    """Yield a function that runs a step of `_connected` and returns its result."""
    directory = tmp_path_factory.mktemp("connected")
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("_connected.py")), str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    requests, replies = process.stdin, process.stdout

    def run_step(name: str) -> dict[str, Any]:
        requests.write(f"{name}\n")
        requests.flush()
        result: dict[str, Any] = json.loads(replies.readline())
        return result

    try:
        assert replies.readline() == "ready\n"
        yield run_step
    finally:
        requests.close()
        replies.close()
        try:
            process.wait(100)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def report(program: Step) -> dict[str, Any]:
    """Return the report of the step that needs no Spark Connect."""
    return program("on_cores")


@pytest.fixture(scope="module")
def step(program: Step, report: dict[str, Any]) -> Step:
    """Return the function for steps that use Spark Connect."""
    pytest.importorskip("grpc_status", reason="pyspark[connect] is not installed")
    return program


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
    # The second core of an executor runs the feeding task. Spark may place both nodes in one.
    for info in ("info 2", "squared"):
        assert places(report[info]).keys() == {"ps:0", "worker:0"}
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


def test_dataframes_are_fed(step: Step) -> None:
    result = step("feed_rows")
    assert result["phase"] == "stopped"
    assert sum(int(count) for count, _ in result["sums"]) == 200
    assert sum(int(total) for _, total in result["sums"]) == 2 * sum(range(100))


def test_inference_returns_a_dataframe(step: Step) -> None:
    result = step("infer")
    assert result["twice"] == list(range(0, 200, 2))
    assert "do not fit the schema" in result["mismatch"]
    assert result["rdd"].startswith("Unsupported: ")


def test_the_error_of_a_node_is_raised(step: Step) -> None:
    result = step("fail")
    assert result["error"].startswith("NodeFailed: ")
    assert "NaN in the loss" in result["error"]
    assert result["phase"] == "failed"
    assert result["count"] == 5


def test_requests_without_support_are_refused(step: Step) -> None:
    result = step("refuse")
    assert result["slots"].startswith("NotEnoughSlots: ")
    assert result["parallel"].startswith("Unsupported: ")
