"""Findings about a Spark application that runs TensorFlow's nodes."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator

from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook._version import VERSION
from tfd_notebook.launchers.client.handshake import incompatible
from tfd_notebook.launchers.spark_slots import report
from tfd_notebook.model.diagnostics import Finding, Kind, check, kind, listed
from tfd_notebook.net.host import tensorflow_version
from tfd_notebook.spark.preflight import facts, fixes
from tfd_notebook.spark.preflight.facts import Executor, SparkFacts

#: Minimum free disk space in bytes for logs and checkpoints of a node.
MIN_FREE_BYTES = 1_000_000_000
_TESTED = ("local-cluster", "standalone")

SLOTS = kind(
    "TFD870",
    "error",
    "too few slots",
    "all nodes run at the same time: a node without a slot keeps the others waiting",
)
DYNAMIC = kind(
    "TFD871",
    "error",
    "dynamic allocation",
    "nodes are reserved in one barrier stage, which Spark rejects with dynamic allocation",
)
CONNECT = kind(
    "TFD872",
    "warning",
    "Spark Connect",
    "it has no SparkContext and no RDDs, and does not report the number of slots",
)
PYTHON = kind(
    "TFD873",
    "error",
    "different Python on executors",
    "functions are sent as bytecode, which another Python version cannot run",
)
PACKAGE = kind(
    "TFD874",
    "error",
    "missing or different tfd-notebook on executors",
    "this package starts and feeds the nodes there, and needs the version of this process",
)
TENSORFLOW = kind(
    "TFD875",
    "error",
    "missing or different TensorFlow on executors",
    "nodes import TensorFlow there, and different versions cannot communicate",
)
UNREACHABLE = kind(
    "TFD876",
    "error",
    "driver not reachable from executors",
    "nodes report to this process, and stop if they cannot reach it",
)
ROOM = kind(
    "TFD877",
    "warning",
    "little disk space on executors",
    "logs, checkpoints and shuffled rows are lost when the disk is full",
)
READABLE = kind(
    "TFD878",
    "warning",
    "Spark without authentication or encryption",
    "Spark's tasks contain a cluster's secret, and others on the network can read or send tasks",
)
UNTESTED = kind(
    "TFD879",
    "info",
    "untested cluster manager",
    "this package is tested on local-cluster and standalone masters",
)
SILENT = kind(
    "TFD880",
    "warning",
    "no answer from executors",
    "their versions of Python, TensorFlow and this package are unknown",
)

SPECULATION = kind(
    "TFD881",
    "warning",
    "speculative execution",
    "Spark runs a task that seems slow a second time, and the rows of a feed arrive twice",
)
GPUS = kind(
    "TFD882",
    "warning",
    "GPUs not assigned to tasks",
    "every node takes the memory of all GPUs of its host, and a second node there fails",
)


@check("spark")
def slots(spark: SparkFacts) -> Iterator[Finding]:
    """Find too few slots for the requested nodes."""
    if spark.connect or spark.dynamic:
        return
    if spark.needed is not None and spark.free < spark.needed:
        yield SLOTS.finding(
            f"{spark.needed} nodes must run at the same time, but "
            f"{report(spark.slots, spark.held)}",
            ("shut down a cluster that holds slots, " if spark.held else "")
            + f"start Spark with {fixes.as_text(fixes.slot_settings(spark))}, or use fewer nodes",
        )
    elif not spark.slots:
        yield SLOTS.finding(
            "Spark has no executor", "wait until Spark has executors, or check its master"
        )


@check("spark")
def dynamic(spark: SparkFacts) -> Iterator[Finding]:
    """Find dynamic allocation."""
    if spark.dynamic:
        yield DYNAMIC.finding(
            "spark.dynamicAllocation.enabled is true",
            "start Spark with spark.dynamicAllocation.enabled=false and "
            f"spark.executor.instances={spark.needed or 'the number of nodes'}",
        )


@check("spark")
def connect(spark: SparkFacts) -> Iterator[Finding]:
    """Find a session of Spark Connect."""
    if spark.connect:
        yield CONNECT.finding(
            "this session uses Spark Connect: its executors cannot be inspected",
            "feed DataFrames, and pass a schema to inference; for RDDs, streams, dfutil, "
            "pipelines, TFParallel and tasks on executors use a session of the driver's process, "
            "such as tfd.spark.session()",
        )


@check("spark")
def python(spark: SparkFacts) -> Iterator[Finding]:
    """Find executors with a different Python version."""
    expected = platform.python_version()
    yield from _each(
        spark,
        PYTHON,
        lambda executor: (
            f"has Python {executor.python} ({executor.executable}), but this process has {expected}"
            if incompatible(expected, executor.python)
            else ""
        ),
        fixes.environment(spark),
    )


@check("spark")
def package(spark: SparkFacts) -> Iterator[Finding]:
    """Find executors without this package, or with a different version."""

    def mismatch(executor: Executor) -> str:
        if executor.package == VERSION:
            return ""
        installed = executor.package or "none"
        return (
            f"has tfd-notebook {installed} in {executor.executable}, but this process has {VERSION}"
        )

    yield from _each(spark, PACKAGE, mismatch, fixes.environment(spark))


@check("spark")
def tensorflow(spark: SparkFacts) -> Iterator[Finding]:
    """Find executors without TensorFlow, or with a different minor version."""
    expected = tensorflow_version()

    def mismatch(executor: Executor) -> str:
        if executor.tensorflow is None:
            return f"has no TensorFlow in {executor.executable}"
        if expected is not None and incompatible(expected, executor.tensorflow):
            return f"has TensorFlow {executor.tensorflow}, but this process has {expected}"
        return ""

    yield from _each(spark, TENSORFLOW, mismatch, fixes.environment(spark))


@check("spark")
def unreachable(spark: SparkFacts) -> Iterator[Finding]:
    """Find executors that cannot connect to this process."""
    host = spark.setting("spark.driver.host", "localhost")
    yield from _each(
        spark,
        UNREACHABLE,
        lambda executor: (
            executor.unreachable and f"cannot connect to {host}: {executor.unreachable}"
        ),
        f"start Spark with spark.driver.host={fixes.reachable(spark)}, or another address of this "
        "process that executors can reach, and allow connections to all ports of it",
    )


@check("spark")
def room(spark: SparkFacts) -> Iterator[Finding]:
    """Find executors with little disk space."""
    yield from _each(
        spark,
        ROOM,
        lambda executor: (
            f"has {executor.free_bytes / 1e6:.0f} MB free in its working directory"
            if executor.free_bytes < MIN_FREE_BYTES
            else ""
        ),
        "free disk space there, or set spark.local.dir to another disk",
    )


@check("spark")
def readable(spark: SparkFacts) -> Iterator[Finding]:
    """Find a Spark application on several hosts without authentication or encryption."""
    if spark.connect or fixes.is_local(spark):
        return
    names = ("spark.authenticate", "spark.network.crypto.enabled")
    encrypted = (
        spark.setting(names[1]) == "true" or spark.setting("spark.ssl.rpc.enabled") == "true"
    )
    missing = [name for name in names[:1] if spark.setting(name) != "true"]
    missing += [] if encrypted else [names[1]]
    if missing:
        yield READABLE.finding(
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set",
            f"start Spark with {', '.join(f'{name}=true' for name in missing)}",
        )


@check("spark")
def untested(spark: SparkFacts) -> Iterator[Finding]:
    """Find a cluster manager that this package is not tested with."""
    if not spark.connect and spark.manager not in _TESTED:
        yield UNTESTED.finding(
            f"the master is {spark.master!r}",
            "try it, and report the result; docs/spark.md lists what is tested",
        )


@check("spark")
def silent(spark: SparkFacts) -> Iterator[Finding]:
    """Find executors that did not answer the probe."""
    if spark.silent:
        if "PYTHON_VERSION_MISMATCH" in spark.silent or "Cannot run program" in spark.silent:
            yield PYTHON.finding(
                f"executors cannot run this Python's functions: {spark.silent}",
                fixes.environment(spark),
            )
        else:
            yield SILENT.finding(
                f"the probe of the executors failed: {spark.silent}",
                "try again when no other job uses the executors, or see their logs",
            )


@check("spark")
def speculation(spark: SparkFacts) -> Iterator[Finding]:
    """Find speculative execution, which runs tasks twice."""
    if spark.setting("spark.speculation") == "true":
        yield SPECULATION.finding(
            "spark.speculation is true", "start Spark with spark.speculation=false"
        )


@check("spark")
def gpus(spark: SparkFacts) -> Iterator[Finding]:
    """Find GPUs that Spark or the hosts have, but that Spark does not assign to tasks."""
    if spark.connect or fixes.amount(spark, "spark.task.resource.gpu.amount"):
        return
    per_executor = spark.setting("spark.executor.resource.gpu.amount")
    hosts = sorted(
        {f"{executor.host} has {executor.gpus}" for executor in spark.executors if executor.gpus}
    )
    if per_executor or hosts:
        known = f"executors have {per_executor}" if per_executor else ", ".join(hosts)
        yield GPUS.finding(
            f"spark.task.resource.gpu.amount is not set, but there are GPUs: {known}",
            f"start Spark with {fixes.as_text(fixes.gpus(spark))} and a script that prints their "
            "addresses, spark.executor.resource.gpu.discoveryScript; or set CUDA_VISIBLE_DEVICES= "
            "there",
        )


@check("process")
def in_this_process(_: None) -> Iterator[Finding]:
    """Check the Spark application of this process without running a job."""
    context = compat_pyspark.active_context()
    if context is None or compat_pyspark.is_stopped(context):
        return
    spark = facts.of(context)
    for find in (slots, dynamic, readable, untested, speculation):
        yield from find(spark)


def _each(
    spark: SparkFacts, code: Kind, problem_of: Callable[[Executor], str], fix: str
) -> Iterator[Finding]:
    """Yield one finding per problem, with the hosts of all executors that have it."""
    hosts: dict[str, set[str]] = {}
    for executor in spark.executors:
        if problem := problem_of(executor):
            hosts.setdefault(problem, set()).add(executor.host)
    for problem, names in hosts.items():
        yield code.finding(f"{listed(sorted(names))} {problem}", fix)
