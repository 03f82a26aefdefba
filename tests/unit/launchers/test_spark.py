"""Errors of the launcher on Spark at the start."""

from __future__ import annotations

import pytest

import tfd_notebook as tfd
from tfd_notebook import errors
from tfd_notebook.launchers import spark

LOST = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Could not recover from a failed
barrier ResultStage. Most recent failure reason: Stage failed because a task did not finish.
ExecutorLostFailure (executor 0 exited caused by one of the running tasks) Reason: worker lost
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala)
"""
RAISED = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 failed
Traceback (most recent call last):
  File "worker.py", line 1, in main
OSError: [Errno 28] No space left on device

\tat org.apache.spark.api.python.BasePythonRunner
"""


def test_lost_executor_counts_as_unreachable() -> None:
    error = spark.launch_error(Exception(LOST))
    assert "cannot be reached: ExecutorLostFailure (executor 0 exited" in error.what
    assert "scala" not in error.what


def test_error_of_a_spark_task_is_reported() -> None:
    assert spark.launch_error(Exception(RAISED)).what.endswith("No space left on device")
    assert spark.launch_error(Exception("short")).what.endswith(": short")


def test_missing_spark_error_has_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark.private, "active_context", lambda: None)
    with pytest.raises(errors.StateError, match=r"(?s)no Spark application.*tfd\.spark\.session"):
        tfd.Cluster(data_workers=1, launcher="spark")


def test_launcher_is_restored_from_its_options() -> None:
    launcher = tfd.launchers.Spark(executors=2, grace=5)
    assert tfd.launchers.Spark(**launcher.options).options == launcher.options
    with pytest.raises(errors.Unsupported, match="ends with its Spark application"):
        launcher.reconnect("mine", [])
