"""What pyspark does not tell in public: its Java process, its executors, and how many tasks fit."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any


def active_context() -> Any | None:
    """Return the SparkContext that lives in this process; None where none does."""
    if "pyspark" not in sys.modules:
        return None
    from pyspark import SparkContext

    return getattr(SparkContext, "_active_spark_context", None)


def active_session() -> Any | None:
    """Return the SparkSession that lives in this process, whichever thread asks; None: none does.

    What Spark itself calls active is so for one thread alone.
    """
    context = active_context()
    if context is None or is_stopped(context):
        return None
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def java_process() -> subprocess.Popen[bytes] | None:
    """Return the process of Spark's Java that this process started; None where there is none."""
    if "pyspark" not in sys.modules:
        return None
    from pyspark import SparkContext

    process: subprocess.Popen[bytes] | None = getattr(
        getattr(SparkContext, "_gateway", None), "proc", None
    )
    return process


def forget_java() -> None:
    """Let go of the Java process: it ends, and the next context starts another one."""
    from pyspark import SparkContext

    gateway = getattr(SparkContext, "_gateway", None)
    if gateway is None:
        return
    with contextlib.suppress(Exception):
        gateway.shutdown()
    if gateway.proc is not None and gateway.proc.stdin is not None:
        with contextlib.suppress(OSError):
            gateway.proc.stdin.close()  # it ends with its pipe
    SparkContext._gateway = SparkContext._jvm = None


def executors(context: Any) -> list[str]:
    """Return the ids of the executors that have registered; none where the driver runs tasks."""
    found, ids = [], context._jsc.sc().getExecutorIds().iterator()
    while ids.hasNext():
        found.append(str(ids.next()))
    return sorted(found)


def executor_slots(context: Any) -> dict[str, tuple[str, int]]:
    """Return the host of each executor, and how many tasks it runs at once, by its id."""
    found, every = {}, context._jsc.sc().statusStore().executorList(True).iterator()
    while every.hasNext():
        one = every.next()
        found[str(one.id())] = str(one.hostPort()).rpartition(":")[0], int(one.maxTasks())
    return found


def slots(context: Any) -> int:
    """Return how many tasks can run at once now: what a barrier stage is compared with."""
    scala = context._jsc.sc()
    profile = scala.resourceProfileManager().defaultResourceProfile()
    most = scala.maxNumConcurrentTasks(profile)
    return int(most if isinstance(most, int) else most._1())


def is_stopped(context: Any) -> bool:
    """Whether a SparkContext was stopped, by us or by Spark itself."""
    java = getattr(context, "_jsc", None)
    return java is None or bool(java.sc().isStopped())


def session_key(session: Any) -> Any:
    """Return what is equal for all of Python's objects of one session."""
    return getattr(session, "_jsparkSession", session)
