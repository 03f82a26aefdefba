"""TensorFlow is imported on executors before the first cluster asks for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from tfd_notebook._compat import pyspark as private
from tfd_notebook.spark.driver import launch_plan
from tfd_notebook.spark.driver.application import Application
from tfd_notebook.spark.driver.jobs import Job
from tfd_notebook.spark.executor import executor
from tfd_notebook.spark.executor.fork_server import ForkServerClient


def warm(sc: Any) -> None:
    """Have every executor import TensorFlow in the process that nodes are forked from.

    Returns at once; what goes wrong is told by the cluster that needs it.

    Parameters
    ----------
    sc : pyspark.SparkContext
    """
    if slots := private.slots(sc):
        # A barrier: as single tasks, all might go to the executor that came first.
        application = Application(sc)
        tasks = application.in_barrier(application.numbers(range(slots)), _import)
        Job(application, "TensorFlow is imported", tasks)


def _import(_: Iterable[int]) -> Iterator[int]:
    with contextlib.suppress(Exception):
        ForkServerClient(executor.here(), launch_plan.environment_of({}, None)).close()
    return iter(())
