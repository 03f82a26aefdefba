"""The same function on several executors at once."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tfd_notebook.errors import NodeFailed, NotEnoughSlots, SparkError, UsageError
from tfd_notebook.spark import TFParallel

pytestmark = pytest.mark.integration

#: Seconds within which one task hears of another's end.
SOON = 60.0


def note(args: Any, ctx: Any) -> None:
    said = {
        "number": ctx.worker_num,
        "executor_id": ctx.executor_id,
        "workers": ctx.num_workers,
        "nodes": getattr(ctx, "nodes", None),
        "job": ctx.job_name,
        "index": ctx.task_index,
        "root": ctx.defaultFS,
    }
    (Path(args.out) / f"{ctx.worker_num}.json").write_text(json.dumps(said))


def read(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(directory.iterdir())]


@pytest.mark.parametrize("use_barrier", [True, False])
def test_each_task_knows_its_number_and_how_many_there_are(
    sc: Any, tmp_path: Path, use_barrier: bool
) -> None:
    args = argparse.Namespace(out=str(tmp_path))
    assert TFParallel.run(sc, note, args, 2, use_barrier=use_barrier) is None
    seen = read(tmp_path)
    assert [one["number"] for one in seen] == [0, 1]
    assert all(one["executor_id"] == one["index"] == one["number"] for one in seen)
    assert all(one["workers"] == 2 and one["job"] == "worker" for one in seen)
    assert all(one["root"].startswith("file:") for one in seen)
    assert all(len(one["nodes"]) == (2 if use_barrier else 0) for one in seen)


def test_it_can_be_a_future(sc: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def function(args: Any, ctx: Any) -> None:
        while not gate.exists():
            time.sleep(0.05)
        if args:
            raise ValueError(args)

    running = TFParallel.run(sc, function, "", 2, wait=False)
    assert not running.done()
    gate.touch()
    assert running.result(SOON) is None
    with pytest.raises(NodeFailed, match="no such shard"):
        TFParallel.run(sc, function, "no such shard", 1, wait=False).result(SOON)


def test_tensorflow_works_in_each(sc: Any, tmp_path: Path) -> None:
    def square(args: Any, ctx: Any) -> None:
        import tensorflow as tf

        value = int(tf.square(tf.constant(ctx.worker_num + 2)))
        (Path(args["out"]) / str(ctx.worker_num)).write_text(str(value))

    TFParallel.run(sc, square, {"out": str(tmp_path)}, 2)
    assert [file.read_text() for file in sorted(tmp_path.iterdir())] == ["4", "9"]


@pytest.mark.parametrize("use_barrier", [True, False])
def test_an_error_ends_all_and_has_number_and_traceback(
    sc: Any, tmp_path: Path, use_barrier: bool
) -> None:
    def fail(args: Any, ctx: Any) -> None:
        with open(Path(args) / f"{ctx.worker_num}", "a") as runs:
            runs.write("run\n")
        if ctx.worker_num == 1:
            raise ValueError("no such column: lable")
        time.sleep(10 * SOON)

    before = time.monotonic()
    with pytest.raises(NodeFailed) as raised:
        TFParallel.run(sc, fail, str(tmp_path), 2, use_barrier=use_barrier)
    assert time.monotonic() - before < SOON
    assert raised.value.task == "worker:1"
    assert "ValueError: no such column: lable" in str(raised.value)
    assert 'raise ValueError("no such column: lable")' in str(raised.value)
    # It is not tried again, and the context lives.
    assert (tmp_path / "1").read_text() == "run\n"
    assert sc.parallelize(range(4), 2).sum() == 6


def test_more_than_there_are_slots_is_refused_at_once(sc: Any) -> None:
    def never(args: Any, ctx: Any) -> None:
        raise AssertionError("it ran")

    with pytest.raises(NotEnoughSlots, match="3"):
        TFParallel.run(sc, never, None, 3)
    with pytest.raises(UsageError, match="num_executors 0"):
        TFParallel.run(sc, never, None, 0)


def test_arguments_that_cannot_travel_are_an_error_here(sc: Any) -> None:
    import threading

    with pytest.raises(SparkError, match="pickle"):
        TFParallel.run(sc, note, threading.Lock(), 1, use_barrier=False)
