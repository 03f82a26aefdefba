"""Import of TensorFlow on executors before the first cluster needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook.spark.driver.application import Application
from tfd_notebook.spark.driver.jobs import Job
from tfd_notebook.spark.executor import executor, launch_plan
from tfd_notebook.spark.executor.fork_server import ForkServerClient


def warm(sc: Any) -> None:
    """Import TensorFlow on every executor, in the process that nodes are forked from.

    Return at once. Errors are not reported: they occur again in a cluster that needs the import.

    Parameters
    ----------
    sc : pyspark.SparkContext
    """
    if slots := compat_pyspark.slots(sc):
        # A barrier stage: Spark may run single tasks one after another on the same executor.
        application = Application(sc)
        tasks = application.in_barrier(application.numbers(range(slots)), _import)
        Job(application, "TensorFlow is imported", tasks)


def _import(_: Iterable[int]) -> Iterator[int]:
    with contextlib.suppress(Exception):
        ForkServerClient(executor.current(), launch_plan.node_environment({}, None)).close()
    return iter(())
