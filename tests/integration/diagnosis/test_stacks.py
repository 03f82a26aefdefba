"""Python functions that do not return, in data workers and in this process."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(170)]

#: In a data worker, the event of the data worker's own process, which is never set.
RELEASE = threading.Event()


def wait_for_release(x: Any) -> Any:
    RELEASE.wait()
    return x


def hold_the_gil(x: Any) -> Any:
    ctypes.PyDLL(None).pause()
    return x


LINE = wait_for_release.__code__.co_firstlineno + 1


@pytest.fixture(params=["local", "inprocess"])
def cluster(request: pytest.FixtureRequest) -> Iterator[tfd.Cluster]:
    RELEASE.clear()
    policy = tfd.Policy(hang_seconds=5.0)
    with tfd.Cluster(
        data_workers=1, launcher=request.param, name="blocked", policy=policy
    ) as cluster:
        yield cluster
        RELEASE.set()


def mapped(cluster: tfd.Cluster, function: Callable[[Any], Any]) -> Any:
    dataset = tf.data.Dataset.range(4).map(lambda x: tf.numpy_function(function, [x], tf.int64))
    return dataset.apply(cluster.distribute("dynamic"))


def rows_of(cluster: tfd.Cluster, function: str) -> list[dict[str, Any]]:
    return [row for row in cluster.stacks().records() if row["function"] == function]


def test_function_that_does_not_return_is_named(cluster: tfd.Cluster) -> None:
    in_process = cluster.config.launcher == "inprocess"
    task = "kernel" if in_process else "data_worker:0"
    assert not rows_of(cluster, "wait_for_release")
    stream = cluster.stream(mapped(cluster, wait_for_release), "images").start()
    (row, *_) = until(lambda: rows_of(cluster, "wait_for_release"))
    assert (row["task"], row["thread"]) == (task, "tf.data")
    assert (row["file"], row["line"]) == (__file__, LINE)
    assert row["stack"][-1]["file"].endswith("threading.py")

    (finding,) = (each for each in tfd.doctor(cluster) if each.code == "TFD855")
    text = rf"wait_for_release \(test_stacks.py:{LINE}\) in {task} has not returned for (\d+) s"
    match = re.fullmatch(text, finding.what)
    assert match, finding.what
    seconds = int(match[1])
    assert seconds >= 3
    until(lambda: rows_of(cluster, "wait_for_release")[0]["seconds"] > seconds)
    # The watchdog names it, too.
    until(lambda: any("wait_for_release" in n.what for n in cluster.snapshot().notices))

    command = [sys.executable, "-m", "tfd_notebook", "stacks", "blocked", "--json"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
    shown = [each for each in json.loads(completed.stdout) if each["function"] == row["function"]]
    assert [each["line"] for each in shown] == [LINE] * len(shown)
    assert shown

    RELEASE.set()
    if in_process:
        until(lambda: stream.state == "finished")
        assert not rows_of(cluster, "wait_for_release")
        assert "TFD855" not in tfd.doctor(cluster).codes
        (row,) = cluster.stacks().records()
        assert row["note"] == "no Python function of a dataset runs in the kernel"
    stream.stop()


@pytest.mark.parametrize("cluster", ["local"], indirect=True)
def test_explain_names_the_function_of_a_data_worker(cluster: tfd.Cluster) -> None:
    limit = tfd.explain(mapped(cluster, wait_for_release), seconds=2)
    assert f"wait_for_release (test_stacks.py:{LINE}) in data_worker:0" in limit.advice


def test_function_inside_a_mapped_function_has_its_own_line(cluster: tfd.Cluster) -> None:
    """AutoGraph writes such functions to another file."""

    def prepare(x: Any) -> Any:
        def inner(value: Any) -> Any:
            RELEASE.wait()
            return value

        return tf.numpy_function(inner, [x], tf.int64)

    line = prepare.__code__.co_firstlineno + 2
    read = tf.data.Dataset.range(4).map(prepare).apply(cluster.distribute("dynamic"))
    stream = cluster.stream(read, "inner").start()
    (row, *_) = until(lambda: rows_of(cluster, "inner"))
    assert (row["file"], row["line"]) == (__file__, line)
    assert f"inner (test_stacks.py:{line})" in tfd.explain(read, seconds=1).advice
    stream.stop()


@pytest.mark.parametrize("cluster", ["local"], indirect=True)
def test_task_that_does_not_answer_has_the_reason(cluster: tfd.Cluster) -> None:
    def notes() -> dict[str, str]:
        return {row["task"]: row["note"] for row in cluster.stacks().records()}

    assert notes() == dict.fromkeys(("dispatcher:0", "data_worker:0"), "no Python code runs")
    pid = next(task.pid for task in cluster.tasks if task.name == "dispatcher:0")
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        assert notes()["dispatcher:0"] == "no reply within 2 s: its process is suspended"
    finally:
        os.kill(pid, signal.SIGCONT)
    stream = cluster.stream(mapped(cluster, hold_the_gil), "images").start()
    until(lambda: "a thread holds the GIL" in notes()["data_worker:0"])
    assert notes()["dispatcher:0"] == "no Python code runs"
    stream.stop()
