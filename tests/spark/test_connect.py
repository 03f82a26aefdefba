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
    """Have a step of `_connected` done, and return what came of it."""
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
    asked, answers = process.stdin, process.stdout

    def do(name: str) -> dict[str, Any]:
        asked.write(f"{name}\n")
        asked.flush()
        result: dict[str, Any] = json.loads(answers.readline())
        return result

    try:
        assert answers.readline() == "ready\n"
        yield do
    finally:
        asked.close()
        answers.close()
        try:
            process.wait(100)
        finally:
            process.kill()


def test_dataframes_are_fed(step: Step) -> None:
    found = step("feeds")
    assert found["phase"] == "stopped"
    assert sum(int(count) for count, _ in found["taken"]) == 200
    assert sum(int(total) for _, total in found["taken"]) == 2 * sum(range(100))


def test_results_are_dataframes(step: Step) -> None:
    found = step("infers")
    assert found["twice"] == list(range(0, 200, 2))
    assert "do not fit the schema" in found["misfit"]
    assert found["rdd"].startswith("Unsupported: ")


def test_a_function_that_raises(step: Step) -> None:
    found = step("fails")
    assert found["raised"].startswith("NodeFailed: ")
    assert "NaN in the loss" in found["raised"]
    assert found["phase"] == "failed"
    assert found["count"] == 5


def test_what_cannot_be_had(step: Step) -> None:
    found = step("refuses")
    assert found["slots"].startswith("NotEnoughSlots: ")
    assert found["parallel"].startswith("Unsupported: ")
