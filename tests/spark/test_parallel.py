"""`TFParallel.run`: one function on several executors at the same time."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests._waiting import until
from tfd_notebook.errors import NodeFailed, NotEnoughSlots, SparkError, UsageError
from tfd_notebook.spark import TFParallel

pytestmark = pytest.mark.integration

#: Timeout in seconds of the end of one task after the end of another.
SOON = 60.0


def note(args: Any, ctx: Any) -> None:
    report = {
        "number": ctx.worker_num,
        "executor_id": ctx.executor_id,
        "workers": ctx.num_workers,
        "nodes": getattr(ctx, "nodes", None),
        "job": ctx.job_name,
        "index": ctx.task_index,
        "root": ctx.defaultFS,
    }
    (Path(args.out) / f"{ctx.worker_num}.json").write_text(json.dumps(report))


def read(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(directory.iterdir())]


@pytest.mark.parametrize("use_barrier", [True, False])
def test_each_task_has_its_number_and_the_number_of_tasks(
    sc: Any, tmp_path: Path, use_barrier: bool
) -> None:
    args = argparse.Namespace(out=str(tmp_path))
    assert TFParallel.run(sc, note, args, 2, use_barrier=use_barrier) is None
    reports = read(tmp_path)
    assert [report["number"] for report in reports] == [0, 1]
    assert all(r["executor_id"] == r["index"] == r["number"] for r in reports)
    assert all(r["workers"] == 2 and r["job"] == "worker" for r in reports)
    assert all(r["root"].startswith("file:") for r in reports)
    assert all(len(r["nodes"]) == (2 if use_barrier else 0) for r in reports)


def test_run_can_return_a_future(sc: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def function(args: Any, ctx: Any) -> None:
        while not gate.exists():
            time.sleep(0.05)
        if args:
            raise ValueError(args)

    future = TFParallel.run(sc, function, "", 2, wait=False)
    assert not future.done()
    gate.touch()
    assert future.result(SOON) is None
    with pytest.raises(NodeFailed, match="no such shard"):
        TFParallel.run(sc, function, "no such shard", 1, wait=False).result(SOON)


def test_tensorflow_works_in_each_task(sc: Any, tmp_path: Path) -> None:
    def square(args: Any, ctx: Any) -> None:
        import tensorflow as tf

        value = int(tf.square(tf.constant(ctx.worker_num + 2)))
        (Path(args["out"]) / str(ctx.worker_num)).write_text(str(value))

    TFParallel.run(sc, square, {"out": str(tmp_path)}, 2)
    assert [file.read_text() for file in sorted(tmp_path.iterdir())] == ["4", "9"]


@pytest.mark.parametrize("use_barrier", [True, False])
def test_a_lost_executor_is_named(sc: Any, use_barrier: bool) -> None:
    def lose(args: Any, ctx: Any) -> None:
        ancestors = psutil.Process().parents()
        next(process for process in ancestors if process.name() == "java").kill()
        time.sleep(10 * SOON)

    with pytest.raises(SparkError, match="ExecutorLostFailure") as caught:
        TFParallel.run(sc, lose, None, 1, use_barrier=use_barrier)
    assert "could not run all 1 tasks" in caught.value.what


@pytest.mark.parametrize("use_barrier", [True, False])
def test_an_error_ends_all_tasks_and_has_the_traceback(
    sc: Any, tmp_path: Path, use_barrier: bool
) -> None:
    def fail(args: Any, ctx: Any) -> None:
        with open(Path(args) / f"{ctx.worker_num}", "a") as runs:
            runs.write(f"{os.getpid()}\n")
        if ctx.worker_num == 1:
            while not (Path(args) / "0").exists():
                time.sleep(0.05)
            raise ValueError("no such column: lable")
        time.sleep(10 * SOON)

    with pytest.raises(NodeFailed) as caught:
        TFParallel.run(sc, fail, str(tmp_path), 2, use_barrier=use_barrier)
    assert caught.value.task == "worker:1"
    assert "ValueError: no such column: lable" in str(caught.value)
    assert 'raise ValueError("no such column: lable")' in str(caught.value)
    # Spark does not retry the task, and the SparkContext keeps running.
    assert len((tmp_path / "1").read_text().split()) == 1
    other_task = int(until((tmp_path / "0").read_text))
    until(lambda: not psutil.pid_exists(other_task), SOON)
    assert sc.parallelize(range(4), 2).sum() == 6


def test_too_few_slots_are_refused_at_once(sc: Any) -> None:
    def never(args: Any, ctx: Any) -> None:
        raise AssertionError("the function ran")

    with pytest.raises(NotEnoughSlots, match="3"):
        TFParallel.run(sc, never, None, 3)
    with pytest.raises(UsageError, match="num_executors 0"):
        TFParallel.run(sc, never, None, 0)


def test_arguments_that_cannot_be_pickled_are_refused(sc: Any) -> None:
    import threading

    with pytest.raises(SparkError, match="pickle"):
        TFParallel.run(sc, note, threading.Lock(), 1, use_barrier=False)
