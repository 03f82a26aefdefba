"""What can be wrong with a Spark that TensorFlow's tasks shall run on."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator

from tfd_notebook._compat import pyspark as private
from tfd_notebook._version import VERSION
from tfd_notebook.launchers.client.handshake import series
from tfd_notebook.launchers.spark_slots import report
from tfd_notebook.model.diagnostics import Finding, Kind, check, kind, listed
from tfd_notebook.net.host import tensorflow_version
from tfd_notebook.spark.preflight import facts, fixes
from tfd_notebook.spark.preflight.facts import Executor, SparkFacts

#: Bytes without which a node has no room for logs and checkpoints.
LEAST_BYTES = 1_000_000_000
_TESTED = ("local-cluster", "standalone")

SLOTS = kind(
    "TFD870",
    "error",
    "too few slots",
    "all nodes run at the same time, and a node whose turn never comes keeps the others waiting",
)
DYNAMIC = kind(
    "TFD871",
    "error",
    "dynamic allocation",
    "nodes are reserved in one barrier stage, which Spark refuses while executors come and go",
)
CONNECT = kind(
    "TFD872",
    "warning",
    "Spark Connect",
    "it has no SparkContext and no RDDs, and does not say how many tasks can run at once",
)
PYTHON = kind(
    "TFD873",
    "error",
    "another Python on executors",
    "functions travel as Python's own bytes, which another version cannot run",
)
PACKAGE = kind(
    "TFD874",
    "error",
    "tfd-notebook on executors",
    "what starts and feeds the nodes there is this package, in the version of this process",
)
TENSORFLOW = kind(
    "TFD875",
    "error",
    "TensorFlow on executors",
    "nodes import it there, and those of different versions do not understand each other",
)
UNREACHABLE = kind(
    "TFD876",
    "error",
    "driver that executors cannot reach",
    "nodes report to this process, and end where they cannot",
)
ROOM = kind(
    "TFD877",
    "warning",
    "little room on executors",
    "logs, checkpoints and shuffled rows are lost where the disk is full",
)
READABLE = kind(
    "TFD878",
    "warning",
    "Spark that anybody may join",
    "a cluster's secret travels in Spark's tasks, which others on the network can read or send",
)
UNTESTED = kind(
    "TFD879",
    "info",
    "cluster manager that was not tried",
    "this package is tested on local-cluster and standalone masters",
)
SILENT = kind(
    "TFD880",
    "warning",
    "executors that were not heard",
    "whether they have Python, TensorFlow and this package is not known",
)

SPECULATION = kind(
    "TFD881",
    "warning",
    "speculative execution",
    "a task that feeds and seems slow is run a second time, and its rows are fed twice",
)
GPUS = kind(
    "TFD882",
    "warning",
    "GPUs that no task is given",
    "every node on a host then takes the memory of all its GPUs, and the second one fails",
)


@check("spark")
def slots(seen: SparkFacts) -> Iterator[Finding]:
    """Find too few slots for the nodes that shall run."""
    if seen.connect or seen.dynamic:
        return
    if seen.needed is not None and seen.free < seen.needed:
        yield SLOTS.found(
            f"{seen.needed} nodes are to run at the same time, and {report(seen.slots, seen.held)}",
            ("shut down a cluster that holds some; or " if seen.held else "")
            + f"start Spark with {fixes.more_listed(seen)}; or have fewer nodes",
        )
    elif not seen.slots:
        yield SLOTS.found("no executor is there", "wait until Spark has some, or see its master")


@check("spark")
def dynamic(seen: SparkFacts) -> Iterator[Finding]:
    """Find dynamic allocation."""
    if seen.dynamic:
        yield DYNAMIC.found(
            "spark.dynamicAllocation.enabled is true",
            "start Spark with spark.dynamicAllocation.enabled=false and "
            f"spark.executor.instances={seen.needed or 'the number of nodes'}",
        )


@check("spark")
def connect(seen: SparkFacts) -> Iterator[Finding]:
    """Find a session of Spark Connect."""
    if seen.connect:
        yield CONNECT.found(
            "this session is one of Spark Connect: what its executors have cannot be looked at",
            "feed DataFrames, and give inference a schema; for RDDs, streams, dfutil, pipelines, "
            "TFParallel and tasks beside executors use a session of the driver's own process, such "
            "as tfd.spark.session()",
        )


@check("spark")
def python(seen: SparkFacts) -> Iterator[Finding]:
    """Find executors with another Python than this process."""
    mine = platform.python_version_tuple()[:2]
    yield from _each(
        seen,
        PYTHON,
        lambda one: (
            f"has Python {one.python} ({one.executable}), and this process "
            f"{platform.python_version()}"
            if tuple(one.python.split(".")[:2]) != mine
            else ""
        ),
        fixes.environment(seen),
    )


@check("spark")
def package(seen: SparkFacts) -> Iterator[Finding]:
    """Find executors without this package, or with another version."""

    def wrong(one: Executor) -> str:
        if one.package == VERSION:
            return ""
        have = one.package or "none"
        return f"has tfd-notebook {have} in {one.executable}, and this process {VERSION}"

    yield from _each(seen, PACKAGE, wrong, fixes.environment(seen))


@check("spark")
def tensorflow(seen: SparkFacts) -> Iterator[Finding]:
    """Find executors without TensorFlow, or with one of another series."""
    mine = tensorflow_version()

    def wrong(one: Executor) -> str:
        if one.tensorflow is None:
            return f"has no TensorFlow in {one.executable}"
        known = mine is not None and "unknown" not in (mine, one.tensorflow)
        if known and series(str(mine)) != series(one.tensorflow):
            return f"has TensorFlow {one.tensorflow}, and this process {mine}"
        return ""

    yield from _each(seen, TENSORFLOW, wrong, fixes.environment(seen))


@check("spark")
def unreachable(seen: SparkFacts) -> Iterator[Finding]:
    """Find executors that cannot connect to this process."""
    host = seen.setting("spark.driver.host", "localhost")
    yield from _each(
        seen,
        UNREACHABLE,
        lambda one: one.unreachable and f"cannot connect to {host}: {one.unreachable}",
        f"start Spark with spark.driver.host={fixes.reachable(seen)}, or where else executors "
        "reach this process, and let them connect to all of its ports",
    )


@check("spark")
def room(seen: SparkFacts) -> Iterator[Finding]:
    """Find executors with little room on their disk."""
    yield from _each(
        seen,
        ROOM,
        lambda one: (
            f"has {one.free_bytes / 1e6:.0f} MB free where it works"
            if one.free_bytes < LEAST_BYTES
            else ""
        ),
        "make room there, or have spark.local.dir on another disk",
    )


@check("spark")
def readable(seen: SparkFacts) -> Iterator[Finding]:
    """Find a Spark on several hosts that takes tasks from anybody, or sends them in the open."""
    if seen.connect or fixes.stays_here(seen):
        return
    wanted = ("spark.authenticate", "spark.network.crypto.enabled")
    encrypted = seen.setting(wanted[1]) == "true" or seen.setting("spark.ssl.rpc.enabled") == "true"
    missing = [name for name in wanted[:1] if seen.setting(name) != "true"]
    missing += [] if encrypted else [wanted[1]]
    if missing:
        yield READABLE.found(
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set",
            f"start Spark with {', '.join(f'{name}=true' for name in missing)}",
        )


@check("spark")
def untested(seen: SparkFacts) -> Iterator[Finding]:
    """Find a cluster manager that nobody has tried."""
    if not seen.connect and seen.manager not in _TESTED:
        yield UNTESTED.found(
            f"the master is {seen.master!r}", "try it, and tell how it went; see the matrix"
        )


@check("spark")
def silent(seen: SparkFacts) -> Iterator[Finding]:
    """Find that executors could not be asked."""
    if seen.silent:
        if "PYTHON_VERSION_MISMATCH" in seen.silent or "Cannot run program" in seen.silent:
            yield PYTHON.found(
                f"executors cannot run this Python's functions: {seen.silent}",
                fixes.environment(seen),
            )
        else:
            yield SILENT.found(
                f"executors could not be asked: {seen.silent}",
                "look again when no job keeps them busy; their own logs say more",
            )


@check("spark")
def speculation(seen: SparkFacts) -> Iterator[Finding]:
    """Find tasks that are run twice."""
    if seen.setting("spark.speculation") == "true":
        yield SPECULATION.found(
            "spark.speculation is true", "start Spark with spark.speculation=false"
        )


@check("spark")
def gpus(seen: SparkFacts) -> Iterator[Finding]:
    """Find GPUs that Spark knows, or that hosts have, and of which tasks are given none."""
    if seen.connect or fixes.amount(seen, "spark.task.resource.gpu.amount"):
        return
    have = seen.setting("spark.executor.resource.gpu.amount")
    hosts = sorted({f"{one.host} has {one.gpus}" for one in seen.executors if one.gpus})
    if have or hosts:
        known = f"executors have {have}" if have else ", ".join(hosts)
        yield GPUS.found(
            f"spark.task.resource.gpu.amount is not set, and of GPUs {known}",
            f"start Spark with {fixes.gpus_listed(seen)} and a script that names them, "
            "spark.executor.resource.gpu.discoveryScript; or have CUDA_VISIBLE_DEVICES empty there",
        )


@check("process")
def in_this_process(_: None) -> Iterator[Finding]:
    """Look at the Spark that lives in this process, without running anything there."""
    context = private.active_context()
    if context is None or private.is_stopped(context):
        return
    seen = facts.of(context)
    for one in (slots, dynamic, readable, untested, speculation):
        yield from one(seen)


def _each(
    seen: SparkFacts, found: Kind, wrong: Callable[[Executor], str], fix: str
) -> Iterator[Finding]:
    """Yield one finding for all executors with which the same is wrong, by host."""
    hosts: dict[str, set[str]] = {}
    for one in seen.executors:
        if said := wrong(one):
            hosts.setdefault(said, set()).add(one.host)
    for said, names in hosts.items():
        yield found.found(f"{listed(sorted(names))} {said}", fix)
