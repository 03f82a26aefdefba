"""Clusters by Spark Connect, which has no RDDs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc_status", reason="pyspark[connect] is not installed")

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
Step = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Step]:
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
