"""Whether a Spark can run TensorFlow's nodes: said before anything starts."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from tfd_notebook._compat import pyspark as private
from tfd_notebook.errors import NotEnoughSlots, StateError, Unsupported, UsageError
from tfd_notebook.launchers import spark_slots
from tfd_notebook.model import diagnostics
from tfd_notebook.spark.driver import application, jobs
from tfd_notebook.spark.preflight import facts, fixes
from tfd_notebook.spark.preflight.diagnostics import DYNAMIC, SLOTS, SPECULATION
from tfd_notebook.spark.preflight.facts import SparkFacts
from tfd_notebook.views.diagnostics import Findings


def check(
    spark: Any, num_executors: int | None = None, *, timeout: float = 60.0, wait: bool = True
) -> Any:
    """Look whether a Spark can run TensorFlow's nodes, and print what mends what it lacks.

    A task in every free slot tells which Python, TensorFlow and tfd-notebook its executor has, how
    much room there is, and whether it reaches this process; nothing is changed.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession or pyspark.SparkContext
    num_executors : int, optional
        Nodes that shall run at the same time. Default: what fits.
    timeout : float
        Seconds that the executors are given to answer. Default 60.
    wait : bool
        Whether to wait (default), or return the future of what follows; it prints when it is there.

    Returns
    -------
    Findings or concurrent.futures.Future of Findings
        Codes TFD870 to TFD882, the worst first; none where nothing is wrong.

    Raises
    ------
    StateError
        The SparkContext was stopped.
    """
    if not wait:
        return jobs.in_background(lambda: check(spark, num_executors, timeout=timeout), "check")
    seen, found = looked(spark, num_executors, timeout)
    sys.stdout.write("\n".join(said(seen, found)) + "\n")
    return found


def looked(
    spark: Any, num_executors: int | None = None, timeout: float = 60.0
) -> tuple[SparkFacts, Findings]:
    """Return what a Spark says of itself and what is wrong with it; see `check`."""
    _alive(spark)
    seen = facts.of(spark, num_executors)
    if not seen.connect and not seen.dynamic and seen.free:
        heard, silent = facts.executors(spark, seen.free, timeout)
        seen = dataclasses.replace(seen, executors=heard, silent=silent)
    named = seen.master or "Spark Connect"
    return seen, Findings(diagnostics.look("spark", seen), [f"the Spark at {named}"])


def said(seen: SparkFacts, found: Findings) -> Iterator[str]:
    """Yield the lines that `check` prints."""
    held = "".join(f", {slots} held by cluster {name!r}" for name, slots in seen.held.items())
    wanted = f", {seen.needed} nodes wanted" if seen.needed is not None else ""
    yield f"{seen.master or 'Spark Connect'}: {seen.slots} tasks at once{held}{wanted}"
    rooms: dict[str, int] = {}
    for one in seen.executors:
        gpus = f", {one.gpus} GPUs" if one.gpus else ""
        line = (
            f"  {one.host}: Python {one.python}, TensorFlow {one.tensorflow}, tfd-notebook "
            f"{one.package}{gpus}"
        )
        rooms[line] = min(one.free_bytes, rooms.get(line, one.free_bytes))
    for line, room in sorted(rooms.items()):
        yield f"{line}, {room / 1e9:.1f} GB free"
    for finding in found:
        yield f"{finding.severity}: {finding}"
    if commands := fixes.commands(seen, found.codes):
        yield "Make an environment for the executors:"
        yield from (f"  {command}" for command in commands)
    if variables := fixes.variables(seen, found.codes):
        yield "Start this process with:"
        yield from (f"  {name}={value}" for name, value in variables.items())
    if lines := fixes.settings(seen, found.codes):
        yield "Start Spark with:"
        yield from (f"  --conf {name}={value}" for name, value in lines.items())
    if not found:
        yield "Nothing is missing."


def needed(sc: Any, num: int, *, is_fed: bool = False) -> None:
    """Raise where `num` nodes cannot run at the same time, before anything starts.

    Executors that Spark was asked for and that are not there yet are waited for, up to a
    minute. Slots that nodes of our living clusters keep are not free; those of other jobs are.

    Parameters
    ----------
    sc : pyspark.SparkContext or pyspark.sql.SparkSession
    num : int
    is_fed : bool
        Whether tasks of Spark feed the nodes. Default false.

    Raises
    ------
    NotEnoughSlots
        With how many are needed, how many there are, and which cluster holds how many.
    Unsupported
        Dynamic allocation, or speculative execution where `is_fed`.
    StateError
        The SparkContext was stopped.
    UsageError
        `num` is no number of nodes.
    """
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise UsageError(f"num_executors={num!r} must be 1 or more")
    _alive(sc)
    seen = facts.of(sc, num)
    # Where executors come and go it is refused, however many there are.
    if not application.is_connect(sc) and not seen.dynamic:
        context = application.context_of(sc)
        spark_slots.wait_for_executors(context, lambda: facts.of(context).free >= num)
        seen = facts.of(sc, num)
    for one in diagnostics.look("spark", seen):
        if one.code == SLOTS.code:
            raise NotEnoughSlots(one.what, fix=one.fix)
        if one.code == DYNAMIC.code or (is_fed and one.code == SPECULATION.code):
            raise Unsupported(f"{one.what}: {one.why}", fix=one.fix)


def _alive(spark: Any) -> None:
    if application.is_connect(spark):
        return
    if not hasattr(spark, "parallelize") and not hasattr(spark, "sparkContext"):
        raise UsageError(f"{spark!r} is neither a SparkSession nor a SparkContext")
    if private.is_stopped(application.context_of(spark)):
        raise StateError(
            "the SparkContext was stopped", fix="make another one, with tfd.spark.session()"
        )
