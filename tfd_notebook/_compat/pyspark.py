"""Private names of pyspark: its Java process, executors, task slots, Arrow schemas and rows.

`Unsupported` is raised if this version of Spark lacks a name.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tfd_notebook.errors import Unsupported


@contextlib.contextmanager
def private_name(name: str) -> Iterator[None]:
    """Raise `Unsupported` instead of the error of Python or Py4J for a missing name.

    Errors of existing methods propagate, as does the AttributeError of a stopped context.
    """
    try:
        yield
    except (AttributeError, ImportError, TypeError) as error:
        if isinstance(error, AttributeError) and error.obj is None:
            raise
        raise _unsupported(name) from error
    except Exception as error:
        # Subclasses of Py4JError are exceptions of Java code, or a lost connection to Java.
        if type(error).__name__ == "Py4JError" and "does not exist" in str(error):
            raise _unsupported(name) from error
        raise


def _unsupported(name: str) -> Unsupported:
    import pyspark

    return Unsupported(
        f"pyspark {pyspark.__version__} has no {name}, which tfd_notebook needs",
        fix="pip install 'pyspark>=4.0,<5', or a newer tfd-notebook",
    )


def active_context() -> Any | None:
    """Return the SparkContext of this process, or None."""
    if "pyspark" not in sys.modules:
        return None
    from pyspark import SparkContext

    return getattr(SparkContext, "_active_spark_context", None)


def active_session() -> Any | None:
    """Return the SparkSession of this process from any thread, or None.

    Spark's own active session is specific to one thread.
    """
    context = active_context()
    if context is None or is_stopped(context):
        return None
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def java_process() -> subprocess.Popen[bytes] | None:
    """Return the Java process of Spark if this process started it, else None."""
    if "pyspark" not in sys.modules:
        return None
    from pyspark import SparkContext

    with private_name("SparkContext._gateway"):
        gateway = SparkContext._gateway
    process: subprocess.Popen[bytes] | None = getattr(gateway, "proc", None)
    return process


def close_java() -> None:
    """Close the Java process. The next context starts another one."""
    from pyspark import SparkContext

    with private_name("SparkContext._gateway"):
        gateway = SparkContext._gateway
    if gateway is None:
        return
    with contextlib.suppress(Exception):
        gateway.shutdown()
    if gateway.proc is not None and gateway.proc.stdin is not None:
        with contextlib.suppress(OSError):
            gateway.proc.stdin.close()  # the process ends with its standard input
    SparkContext._gateway = SparkContext._jvm = None


def executors(context: Any) -> list[str]:
    """Return the ids of the registered executors. Empty if the driver runs the tasks."""
    with private_name("SparkContext.getExecutorIds"):
        ids, iterator = [], context._jsc.sc().getExecutorIds().iterator()
        while iterator.hasNext():
            ids.append(str(iterator.next()))
    return sorted(ids)


def executor_slots(context: Any) -> dict[str, tuple[str, int]]:
    """Return the host and the number of concurrent tasks of each executor by its id."""
    with private_name("SparkContext.statusStore().executorList"):
        slots_by_id = {}
        iterator = context._jsc.sc().statusStore().executorList(True).iterator()
        while iterator.hasNext():
            info = iterator.next()
            host = str(info.hostPort()).rpartition(":")[0]
            slots_by_id[str(info.id())] = host, int(info.maxTasks())
    return slots_by_id


def slots(context: Any) -> int:
    """Return the number of tasks that can run at once, which limits a barrier stage."""
    with private_name("SparkContext.maxNumConcurrentTasks"):
        scala = context._jsc.sc()
        profile = scala.resourceProfileManager().defaultResourceProfile()
        most = scala.maxNumConcurrentTasks(profile)
        return int(most if isinstance(most, int) else most._1())


def is_stopped(context: Any) -> bool:
    """Return True if a SparkContext was stopped, by tfd or by Spark."""
    java = getattr(context, "_jsc", None)
    return java is None or bool(java.sc().isStopped())


def session_key(session: Any) -> Any:
    """Return a key that is equal for all Python objects of one session."""
    return getattr(session, "_jsparkSession", session)


def spark_home() -> str:
    """Return the directory of the Spark installation that pyspark starts."""
    with private_name("pyspark.find_spark_home._find_spark_home"):
        from pyspark.find_spark_home import _find_spark_home
    return str(_find_spark_home())


def arrow_schema(struct: Any) -> Any:
    """Return the ``pyarrow.Schema`` of a ``StructType``."""
    with private_name("pyspark.sql.pandas.types.to_arrow_schema"):
        from pyspark.sql.pandas.types import to_arrow_schema
    if "timezone" in inspect.signature(to_arrow_schema).parameters:
        return to_arrow_schema(struct, timezone="UTC")
    return to_arrow_schema(struct)  # pyspark 4.0 always uses UTC


def row_fields(values: Sequence[Any]) -> list[str] | None:
    """Return the field names of Rows, or None if they differ or a value is not a Row."""
    names = getattr(values[0], "__fields__", None)
    if names is None or any(getattr(value, "__fields__", None) != names for value in values):
        return None
    return list(names)


def named_row(values: Sequence[Any], names: list[str]) -> Any:
    """Return a Row. Field names may be arbitrary and occur twice."""
    row = _row_type()(*values)
    row.__fields__ = names
    return row


@functools.cache
def _row_type() -> Any:
    from pyspark.sql import Row

    with private_name("Row.__fields__"):
        Row(n=1).__fields__  # noqa: B018
    return Row


def default_fs(sc: Any) -> str:
    """Return the default file system of paths, such as ``hdfs://namenode:8020``."""
    with private_name("SparkContext.hadoopConfiguration"):
        url = str(sc._jsc.hadoopConfiguration().get("fs.defaultFS") or "")
    # The slash belongs to the path.
    return url[:-1] if url.startswith("file:") and url.endswith("///") else url


def cancel_stage(sc: Any, stage: int, reason: str) -> None:
    """Cancel the jobs that need a stage. Callers that wait for them get an error with `reason`."""
    with private_name("SparkContext.cancelStage"):
        sc._jsc.sc().cancelStage(stage, reason)


def cancel_group(sc: Any, group: str) -> None:
    """Cancel the current and future jobs of a group."""
    with private_name("SparkContext.cancelJobGroupAndFutureJobs"):
        sc._jsc.sc().cancelJobGroupAndFutureJobs(group)


def lost_executor(error: BaseException) -> str:
    """Return the line of Spark's error that names a lost executor, or an empty string."""
    match = re.search(r"ExecutorLostFailure \([^\n]*", str(error))
    return match[0] if match else ""


def error_summary(error: BaseException) -> str:
    """Return the essential line of Spark's error, whose text fills a page."""
    text = str(error).strip()
    if lost := lost_executor(error):
        return lost
    lines = re.findall(r"^(?:\w+\.)*\w+(?:Error|Exception): [^\n]+", text, re.M)
    return lines[-1] if lines else text.partition("\n")[0] or type(error).__name__
