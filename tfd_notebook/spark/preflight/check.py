"""Check of a Spark application before a cluster starts on it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook.errors import NotEnoughSlots, StateError, Unsupported, UsageError
from tfd_notebook.launchers import spark_slots
from tfd_notebook.model import diagnostics
from tfd_notebook.model.spec import check_seconds
from tfd_notebook.spark.driver import application, jobs
from tfd_notebook.spark.preflight import facts, fixes
from tfd_notebook.spark.preflight.diagnostics import DYNAMIC, SLOTS, SPECULATION
from tfd_notebook.spark.preflight.facts import SparkFacts
from tfd_notebook.views.diagnostics import Findings


def check(
    spark: Any, num_executors: int | None = None, *, timeout: float = 60.0, wait: bool = True
) -> Any:
    """Check if a Spark application can run nodes, and print the findings with their fixes.

    A task in every free slot reports the versions of Python, TensorFlow and tfd-notebook of its
    executor. It also reports its free disk space, and whether it can connect to this process.
    Nothing is changed.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession or pyspark.SparkContext
    num_executors : int, optional
        Number of nodes that must run at the same time. Default: all free slots.
    timeout : float
        Timeout in seconds for the executors' answers. Default 60.
    wait : bool
        If true (default), wait; otherwise return a future. The findings are printed at its end.

    Returns
    -------
    Findings or concurrent.futures.Future of Findings
        Findings with the codes TFD870 to TFD882, worst first; empty if there is no problem.

    Raises
    ------
    StateError
        The SparkContext was stopped.
    """
    check_seconds("timeout", timeout)
    if not wait:
        return jobs.in_background(lambda: check(spark, num_executors, timeout=timeout), "check")
    spark_facts, findings = inspect_spark(spark, num_executors, timeout)
    sys.stdout.write("\n".join(report_lines(spark_facts, findings)) + "\n")
    return findings


def inspect_spark(
    spark: Any, num_executors: int | None = None, timeout: float = 60.0
) -> tuple[SparkFacts, Findings]:
    """Return the facts and the findings about a Spark application; see `check`."""
    _require_running(spark)
    spark_facts = facts.of(spark, num_executors)
    if not spark_facts.connect and not spark_facts.dynamic and spark_facts.free:
        executors, silent = facts.executors(spark, spark_facts.free, timeout)
        spark_facts = dataclasses.replace(spark_facts, executors=executors, silent=silent)
    master = spark_facts.master
    checked = f"the Spark application at {master}" if master else "the Spark Connect session"
    return spark_facts, Findings(diagnostics.run_checks("spark", spark_facts), [checked])


def report_lines(spark_facts: SparkFacts, findings: Findings) -> Iterator[str]:
    """Yield the lines that `check` prints."""
    held = "".join(
        f", {slots} held by cluster {name!r}" for name, slots in spark_facts.held.items()
    )
    requested = f", {spark_facts.needed} nodes requested" if spark_facts.needed is not None else ""
    yield f"{spark_facts.master or 'Spark Connect'}: {spark_facts.slots} slots{held}{requested}"
    free: dict[str, int] = {}
    for executor in spark_facts.executors:
        gpus = f", {executor.gpus} GPUs" if executor.gpus else ""
        line = (
            f"  {executor.host}: Python {executor.python}, TensorFlow {executor.tensorflow}, "
            f"tfd-notebook {executor.package}{gpus}"
        )
        free[line] = min(executor.free_bytes, free.get(line, executor.free_bytes))
    for line, free_bytes in sorted(free.items()):
        yield f"{line}, {free_bytes / 1e9:.1f} GB free"
    for finding in findings:
        yield f"{finding.severity}: {finding}"
    if commands := fixes.commands(spark_facts, findings.codes):
        yield "Create an environment for the executors:"
        yield from (f"  {command}" for command in commands)
    if variables := fixes.variables(spark_facts, findings.codes):
        yield "Start this process with:"
        yield from (f"  {name}={value}" for name, value in variables.items())
    if lines := fixes.settings(spark_facts, findings.codes):
        yield "Start Spark with:"
        yield from (f"  --conf {name}={value}" for name, value in lines.items())
    if not findings:
        yield "No problems found."


def require_slots(sc: Any, num: int, *, is_fed: bool = False) -> None:
    """Raise an error if `num` nodes cannot run at the same time.

    Executors that Spark has requested are waited for, up to a minute. Slots that nodes of running
    clusters hold are not free. Slots of other Spark jobs count as free.

    Parameters
    ----------
    sc : pyspark.SparkContext or pyspark.sql.SparkSession
    num : int
    is_fed : bool
        Whether tasks of Spark feed the nodes. Default false.

    Raises
    ------
    NotEnoughSlots
        The error has the numbers of required and available slots, and the slots of each cluster.
    Unsupported
        Dynamic allocation is enabled, or with `is_fed` speculative execution.
    StateError
        The SparkContext was stopped.
    UsageError
        `num` is invalid.
    """
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise UsageError(f"invalid num_executors {num!r}: expected 1 or more")
    _require_running(sc)
    spark_facts = facts.of(sc, num)
    # Dynamic allocation is rejected below, with any number of executors.
    if not application.is_connect(sc) and not spark_facts.dynamic:
        context = application.context_of(sc)
        spark_slots.wait_for_executors(context, lambda: facts.of(context).free >= num)
        spark_facts = facts.of(sc, num)
    for finding in diagnostics.run_checks("spark", spark_facts):
        if finding.code == SLOTS.code:
            raise NotEnoughSlots(finding.what, fix=finding.fix)
        if finding.code == DYNAMIC.code or (is_fed and finding.code == SPECULATION.code):
            raise Unsupported(f"{finding.what}: {finding.why}", fix=finding.fix)


def _require_running(spark: Any) -> None:
    if application.is_connect(spark):
        return
    if not hasattr(spark, "parallelize") and not hasattr(spark, "sparkContext"):
        raise UsageError(f"invalid spark={spark!r}: expected a SparkSession or a SparkContext")
    if compat_pyspark.is_stopped(application.context_of(spark)):
        raise StateError(
            "the SparkContext was stopped", fix="create another one with tfd.spark.session()"
        )
