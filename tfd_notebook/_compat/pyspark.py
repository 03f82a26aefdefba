"""Private names of pyspark: its Java process, executors, task slots, Arrow schemas and rows.

If this version of Spark lacks a name, `Unsupported` is raised and names it.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tfd_notebook.errors import Unsupported


@contextlib.contextmanager
def private_name(name: str) -> Iterator[None]:
    """Raise `Unsupported` in place of the error of Python or Py4J for a name that is missing.

    Errors of methods that exist pass, as does the AttributeError of a context that was stopped.
    """
    try:
        yield
    except (AttributeError, ImportError, TypeError) as error:
        if isinstance(error, AttributeError) and error.obj is None:
            raise
        raise _unsupported(name) from error
    except Exception as error:
        # Py4J's subclasses are exceptions of Java code, and a lost connection to Java.
        if type(error).__name__ == "Py4JError" and "does not exist" in str(error):
            raise _unsupported(name) from error
        raise


def _unsupported(name: str) -> Unsupported:
    import pyspark

    return Unsupported(
        f"pyspark {pyspark.__version__} has no {name}, which tfd-notebook needs",
        fix="pip install 'pyspark>=4.0,<5', or a newer tfd-notebook",
    )


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

    with private_name("SparkContext._gateway"):
        gateway = SparkContext._gateway
    process: subprocess.Popen[bytes] | None = getattr(gateway, "proc", None)
    return process


def forget_java() -> None:
    """Let go of the Java process: it ends, and the next context starts another one."""
    from pyspark import SparkContext

    with private_name("SparkContext._gateway"):
        gateway = SparkContext._gateway
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
    with private_name("SparkContext.getExecutorIds"):
        found, ids = [], context._jsc.sc().getExecutorIds().iterator()
        while ids.hasNext():
            found.append(str(ids.next()))
    return sorted(found)


def executor_slots(context: Any) -> dict[str, tuple[str, int]]:
    """Return the host of each executor, and how many tasks it runs at once, by its id."""
    with private_name("SparkContext.statusStore().executorList"):
        found, every = {}, context._jsc.sc().statusStore().executorList(True).iterator()
        while every.hasNext():
            one = every.next()
            found[str(one.id())] = str(one.hostPort()).rpartition(":")[0], int(one.maxTasks())
    return found


def slots(context: Any) -> int:
    """Return how many tasks can run at once now: what a barrier stage is compared with."""
    with private_name("SparkContext.maxNumConcurrentTasks"):
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


def spark_home() -> str:
    """Return the directory of the Spark that pyspark starts."""
    with private_name("pyspark.find_spark_home._find_spark_home"):
        from pyspark.find_spark_home import _find_spark_home
    return str(_find_spark_home())


def arrow_schema(struct: Any) -> Any:
    """Return the ``pyarrow.Schema`` of a ``StructType``."""
    with private_name("pyspark.sql.pandas.types.to_arrow_schema"):
        from pyspark.sql.pandas.types import to_arrow_schema
    return to_arrow_schema(struct)


def row_fields(values: Sequence[Any]) -> list[str] | None:
    """Return the names of the fields of Rows; None if these differ, or if not all are Rows."""
    names = getattr(values[0], "__fields__", None)
    if names is None or any(getattr(value, "__fields__", None) != names for value in values):
        return None
    return list(names)


def named_row(values: Sequence[Any], names: list[str]) -> Any:
    """Return a Row; its fields may have any names, also the same one twice."""
    made = _row_type()(*values)
    made.__fields__ = names
    return made


@functools.cache
def _row_type() -> Any:
    from pyspark.sql import Row

    with private_name("Row.__fields__"):
        Row(n=1).__fields__  # noqa: B018
    return Row


def default_fs(sc: Any) -> str:
    """Return the file system of paths without a scheme, such as ``hdfs://namenode:8020``."""
    with private_name("SparkContext.hadoopConfiguration"):
        found = str(sc._jsc.hadoopConfiguration().get("fs.defaultFS") or "")
    # The slash belongs to the path.
    return found[:-1] if found.startswith("file:") and found.endswith("///") else found


def cancel_stage(sc: Any, stage: int, reason: str) -> None:
    """End the jobs that need a stage; who waits for them gets an error with `reason`."""
    with private_name("SparkContext.cancelStage"):
        sc._jsc.sc().cancelStage(stage, reason)


def cancel_group(sc: Any, group: str) -> None:
    """End the jobs of a group, those that are still to come among them."""
    with private_name("SparkContext.cancelJobGroupAndFutureJobs"):
        sc._jsc.sc().cancelJobGroupAndFutureJobs(group)
