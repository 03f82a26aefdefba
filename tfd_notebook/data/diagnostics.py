"""Checks for problems of a dataset that TensorFlow does not report."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from tfd_notebook._compat.tf_data import graph
from tfd_notebook._compat.tf_data.elements import static_bytes
from tfd_notebook._compat.tf_data.pipeline_model import READERS, Stage, stages_of
from tfd_notebook.data.bottleneck import advice, classification
from tfd_notebook.data.bottleneck.usage import ServiceReadOptions
from tfd_notebook.data.consume.memory_datasets import check_transfer
from tfd_notebook.data.consume.observe import FEWER_WORKERS, check_dataset
from tfd_notebook.data.service import captured_state, graph_inspection, validation
from tfd_notebook.data.service.changes import steps
from tfd_notebook.data.service.division import keeping
from tfd_notebook.data.service.options import STATIC, ReadOptions
from tfd_notebook.data.service.protocols import DataServiceProtocol
from tfd_notebook.data.variable_names import variable_of
from tfd_notebook.errors import FinishedJob, NotSerializable, NoWorkers, TfdError
from tfd_notebook.model.diagnostics import Finding, check, kind, listed
from tfd_notebook.net import tf_messages

#: Number of splits above which one message to the dispatcher per split is noticeable.
_MANY_SPLITS = 1_000
#: Bytes at which the cost of an element's transfer is ten times that of its bytes.
_SMALL = int(classification.TRANSFER_PER_ELEMENT / classification.TRANSFER_PER_BYTE / 10)

FINISHED = kind(
    "TFD814",
    "warning",
    "finished job name",
    "a reader that joins a job after it has delivered its data gets no elements and no error",
)
NEEDS_ADDRESSES = kind(
    "TFD815",
    "warning",
    "mode that needs worker addresses",
    "a dispatcher without the addresses of its workers rejects reads in this mode",
)
IN_MEMORY = kind(
    "TFD816",
    "error",
    "data in the memory of another process",
    "elements can only be passed in memory within one process. A reader in another process waits",
)
TOO_FEW = kind(
    "TFD820",
    "error",
    "fewer files or elements than data workers",
    "the mode gives each data worker a fixed share, and an empty share fails the epoch",
)
SINGLE = kind(
    "TFD821",
    "warning",
    "dynamic sharding over single elements",
    "each split is a message to the dispatcher and a record in its journal",
)
EMBEDDED = kind(
    "TFD822",
    "warning",
    "data embedded in the graph",
    "it is sent to the dispatcher and to every data worker before the first element, and a size "
    "of 2 GB aborts the process",
)
ENDLESS = kind(
    "TFD823",
    "info",
    "infinite dataset",
    "a loop over it does not end, and model.fit needs the length of an epoch",
)
PACKED = kind(
    "TFD824",
    "warning",
    "compression that costs more than it saves",
    "compression takes CPU time on both sides and only helps if the transfer is the bottleneck",
)
SMALL = kind(
    "TFD825",
    "warning",
    "small elements",
    "each element is a separate message, which costs far more than its bytes",
)
REPEATED = kind(
    "TFD826",
    "warning",
    "epoch that delivers each element several times",
    "each data worker reads the whole dataset, so an epoch is longer than the dataset",
)
WRONG = kind(
    "TFD827",
    "error",
    "service that changes the elements",
    "the data workers join elements that do not belong together, or lose some",
)
CHANGED = kind(
    "TFD828",
    "warning",
    "epoch that differs through the service",
    "the operation runs on each data worker, on its own share of the data or with its own state",
)
STALE = kind(
    "TFD829",
    "warning",
    "variable or table that has changed",
    "the data workers keep the content that it had when the dataset was sent",
)
UNREADABLE = kind(
    "TFD830",
    "warning",
    "dataset that cannot be sent",
    "a data worker gets the graph of the dataset, and TensorFlow cannot create that",
)
RELATIVE = kind(
    "TFD831",
    "error",
    "relative paths in workers",
    "a data worker resolves them against its own working directory",
)
NO_LIBRARY = kind(
    "TFD834",
    "error",
    "op library that the workers have not loaded",
    "a data worker cannot run an op of a library that it has not loaded",
)


@dataclass(frozen=True)
class InspectedDataset:
    """A dataset under inspection, with the service options it is read with.

    Parameters
    ----------
    dataset : tf.data.Dataset
        The dataset that is read.
    """

    dataset: Any

    @cached_property
    def last(self) -> Stage:
        """The last stage."""
        return stages_of(self.dataset)

    @cached_property
    def use(self) -> ServiceReadOptions | None:
        """The options with which it is read through a service. None without a service of tfd."""
        return next((stage.service for stage in self.last.walk() if stage.service), None)

    @property
    def origin(self) -> Any:
        """The pipeline that the data workers, or this process, run. None if unknown."""
        return self.dataset if self.use is None else self.use.origin

    @property
    def cluster(self) -> DataServiceProtocol | None:
        """The cluster that runs the pipeline. None without a running one."""
        service = None if self.use is None else self.use.delivery.cluster()
        # The package `bottleneck`, which defines `Delivery`, uses only its data workers.
        cluster = cast("DataServiceProtocol | None", service)
        # A stopped cluster has no information about its tasks.
        return cluster if cluster is not None and _serves(cluster) else None

    @property
    def place(self) -> str:
        """The name of that cluster in findings."""
        return "" if self.cluster is None else self.cluster.name

    @cached_property
    def definition(self) -> bytes:
        """The graph of `origin`. Empty if it has none or a large one."""
        pipeline = self.examined
        is_small = pipeline is not None and pipeline.size <= validation.LARGE
        return graph.serialized(self.origin) if is_small else b""

    @cached_property
    def examined(self) -> graph_inspection.Pipeline | None:
        """The properties of the graph of `origin`. None without a graph."""
        result = self._examination
        return None if isinstance(result, NotSerializable) else result

    @property
    def problem(self) -> NotSerializable | None:
        """The reason for which the graph of `origin` cannot be read, or None."""
        result = self._examination
        return result if isinstance(result, NotSerializable) else None

    @cached_property
    def _examination(self) -> graph_inspection.Pipeline | NotSerializable | None:
        try:
            return None if self.origin is None else graph_inspection.examine(self.origin)
        except NotSerializable as error:
            return error


def inspect_dataset(dataset: Any) -> InspectedDataset:
    """Return `dataset` in the form that the checks expect.

    Raises
    ------
    UsageError
        It is not a ``tf.data.Dataset``.
    """
    check_dataset(dataset)
    return InspectedDataset(dataset)


def _serves(cluster: DataServiceProtocol) -> bool:
    try:
        return bool(cluster.service_target)
    except TfdError:
        return False


@check("dataset")
def finished_job(inspected: InspectedDataset) -> Iterator[Finding]:
    """Detect a dataset whose job other readers finished before this one joined it."""
    cluster, use = inspected.cluster, inspected.use
    if cluster is None or use is None or use.delivery.job_name is None:
        return
    if use.joined():  # reading this dataset again starts the next epoch of the job
        return
    name = use.delivery.job_name
    if use.origin is None:
        service = next(s for s in inspected.last.walk() if s.service is use)
        name = f"dataset_id=/{graph.service_id(service.dataset)}/{name}"
    try:
        validation.check_job(cluster, ReadOptions(use.delivery.mode, use.delivery.job_name), name)
    except FinishedJob as error:
        yield FINISHED.finding(error.what, str(error.fix))


@check("dataset")
def needs_addresses(inspected: InspectedDataset) -> Iterator[Finding]:
    """Detect a mode that TensorFlow's service rejects without special configuration."""
    for stage in inspected.last.walk():
        packed_mode = graph.processing_mode(stage.dataset)
        if stage.service is not None or packed_mode is None:
            continue
        policy = tf_messages.ProcessingModeDef.FromString(packed_mode).sharding_policy
        if (mode := tf_messages.SHARDING_POLICIES[policy].upper()) in STATIC:
            yield NEEDS_ADDRESSES.finding(
                f"{stage.name} reads {mode} from a service that tfd_notebook did not start",
                "pass worker_addresses=[...] in its DispatcherConfig, one per worker in order, "
                "or read with cluster.distribute, which configures the dispatcher",
            )


@check("dataset")
def in_memory(inspected: InspectedDataset) -> Iterator[Finding]:
    """Detect in-memory transfer from data workers in other processes."""
    try:
        check_transfer(inspected.dataset)
    except NoWorkers as error:
        yield IN_MEMORY.finding(error.what, str(error.fix))


@check("dataset")
def too_few(inspected: InspectedDataset) -> Iterator[Finding]:
    """Detect a mode that needs a file or element for each data worker."""
    cluster, use = inspected.cluster, inspected.use
    if cluster is None or use is None:
        return
    if failure := use.delivery.failure(len(cluster.data_workers())):
        yield TOO_FEW.finding(failure, FEWER_WORKERS)


@check("dataset")
def single_elements(inspected: InspectedDataset) -> Iterator[Finding]:
    """Detect splits that are too small."""
    if (
        inspected.use is None
        or inspected.use.delivery.mode != "DYNAMIC"
        or inspected.origin is None
    ):
        return
    stages = list(stages_of(inspected.origin).walk())
    if any(s.kind in (*READERS, "Interleave", "FlatMap") for s in stages):
        return  # its elements are names of files
    for source in stages:
        count = -1 if source.inputs else int(source.dataset.cardinality())
        if count >= _MANY_SPLITS:
            yield SINGLE.finding(
                f"{source.name} is divided into {count:,} splits of one element",
                "use a source of files or ranges, and flat_map() or interleave() their content, or "
                'use distribute("off")',
            )


@check("dataset")
def embedded(inspected: InspectedDataset) -> Iterator[Finding]:
    """Detect data that is part of the graph."""
    if inspected.origin is None:
        return
    size = graph.constant_bytes(inspected.origin)
    if inspected.use is not None and inspected.examined is not None:
        size = max(size, inspected.examined.size)
    # Without a service, the data only takes memory up to the size that no service accepts.
    if size > (graph_inspection.LARGEST if inspected.use is None else validation.LARGE):
        yield EMBEDDED.finding(
            f"the dataset's definition is {size / 1e6:.0f} MB",
            "write the data to files and read those, or load it inside the pipeline",
        )


@check("dataset")
def unreadable(inspected: InspectedDataset) -> Iterator[Finding]:
    """Detect a dataset without a graph, which the other checks cannot examine."""
    problem = inspected.problem
    if problem is not None and not any(embedded(inspected)):
        yield UNREADABLE.finding(f"{problem.what}. The dataset was not examined", problem.fix or "")


@check("dataset")
def infinite(inspected: InspectedDataset) -> Iterator[Finding]:
    """Detect an infinite dataset."""
    import tensorflow as tf

    if inspected.use is not None and inspected.use.delivery.infinite:
        return
    infinite = tf.data.INFINITE_CARDINALITY
    ends = any(stage.kind in ("Take", "TakeWhile") for stage in inspected.last.walk())
    whole = int(inspected.dataset.cardinality()) == infinite
    origin = inspected.use is not None and inspected.origin is not None and not ends
    if whole or (origin and int(inspected.origin.cardinality()) == infinite):
        name = advice.dataset_variable(inspected.dataset)
        finite = f"{name}.take(n)" if name else "take(n)"
        yield ENDLESS.finding(
            "the dataset has no end",
            f"use {finite}, remove repeat(), or pass steps_per_epoch= to model.fit",
        )


@check("dataset")
def repeated(inspected: InspectedDataset) -> Iterator[Finding]:
    """Detect a finite dataset that several data workers each deliver completely."""
    import tensorflow as tf

    cluster, use = inspected.cluster, inspected.use
    if cluster is None or use is None or inspected.origin is None or use.delivery.infinite:
        return
    mode = use.delivery.mode
    hinted = inspected.examined is not None and inspected.examined.semantics.has_hint
    if mode != "OFF" and not (mode == "HINT" and not hinted):
        return
    workers = len(cluster.data_workers())
    if workers > 1 and int(inspected.origin.cardinality()) != tf.data.INFINITE_CARDINALITY:
        semantics = None if inspected.examined is None else inspected.examined.semantics
        same = semantics is not None and semantics.keeps_elements("OFF")
        once = semantics is not None and semantics.keeps_elements("DYNAMIC")
        distribute = f'{variable_of(cluster.owner, "cluster")}.distribute("dynamic")'
        yield REPEATED.finding(
            f'with "{mode.lower()}" an epoch contains '
            + (f"each element {workers} times, once" if same else f"{workers} whole epochs, one")
            + " from each data worker",
            f"use {distribute} to " + ("get each element once" if once else "divide the sources"),
        )


@check("dataset")
def changed(inspected: InspectedDataset) -> Iterator[Finding]:
    """Detect operations whose results differ through a service.

    A dataset without a service is examined as if ``distribute("dynamic")`` read it.
    """
    if inspected.origin is None or inspected.examined is None:
        return
    mode = "DYNAMIC" if inspected.use is None else inspected.use.delivery.mode
    cluster = inspected.cluster
    workers = 2 if cluster is None else len(cluster.data_workers())
    in_process = cluster is not None and cluster.service_in_process
    semantics = inspected.examined.semantics
    delivery = None if inspected.use is None else inspected.use.delivery
    shared = delivery is not None and (delivery.job_name is not None or delivery.consumer)
    dataset = None if shared else inspected.origin
    for change in semantics.changes(mode, workers, in_process):
        kind = WRONG if change.refused else CHANGED
        names = ""
        if change.kind == "captured" and inspected.use is not None:
            names = captured_state.names_in(inspected.use.captured, change.operation)
        other = keeping(semantics, [change], mode, in_process, dataset, workers)
        finding = kind.finding(f'with "{mode.lower()}", {change}{names}', steps([change], other))
        # distribute prints a line about incomplete batches, and warns of none.
        mild = not change.refused and (inspected.use is None or change.kind == "grouping")
        yield replace(finding, severity="info") if mild else finding


@check("dataset")
def stale(inspected: InspectedDataset) -> Iterator[Finding]:
    """Detect variables and tables that have changed since the dataset was sent."""
    if inspected.use is not None:
        for state in captured_state.changed(inspected.use.captured):
            yield STALE.finding(str(state), captured_state.RENEW)


@check("dataset")
def packed(inspected: InspectedDataset) -> Iterator[Finding]:
    """Detect compression that costs more than it saves."""
    cluster, use = inspected.cluster, inspected.use
    if cluster is None or use is None or not use.compressed:
        return
    if cluster.service_on_this_host:
        yield PACKED.finding("elements are compressed for transfers within one host", advice.PLAIN)
    elif (limit := cluster.limit).kind == "transfer":
        yield PACKED.finding(f"compressed elements arrive too slowly: {limit}", advice.PLAIN)


@check("dataset")
def small_elements(inspected: InspectedDataset) -> Iterator[Finding]:
    """Detect elements that are too small to be sent one by one."""
    cluster = inspected.cluster
    if cluster is None or cluster.service_in_process or inspected.origin is None:
        return
    size = static_bytes(inspected.origin.element_spec)
    if size is not None and size < _SMALL:
        yield SMALL.finding(
            f"the data workers send elements of {size:,} bytes",
            advice.batch(inspected.origin),
        )


@check("dataset")
def relative_paths(inspected: InspectedDataset) -> Iterator[Finding]:
    """Detect names of files that only this process can find."""
    cluster = inspected.cluster
    if cluster is None or cluster.service_in_process or cluster.task_environment is None:
        return
    directory = os.getcwd()
    if cluster.service_on_this_host and cluster.task_environment.directory == directory:
        return
    names = [name for name in graph.strings_of(inspected.definition) if _is_relative(name)]
    if names:
        local = cluster.service_on_this_host
        location = f"in {cluster.task_environment.directory}" if local else "on another host"
        yield RELATIVE.finding(
            f"{listed(names)} are relative to {directory}, but the data workers run {location}",
            "use absolute paths that are valid on all hosts",
        )


def _is_relative(name: str) -> bool:
    if not 0 < len(name) < 1024 or "\0" in name or "://" in name or os.path.isabs(name):
        return False
    return os.path.isfile(name)


@check("dataset")
def missing_library(inspected: InspectedDataset) -> Iterator[Finding]:
    """Detect ops of a library that a data worker has not loaded."""
    cluster = inspected.cluster
    if cluster is None or cluster.service_in_process or cluster.task_environment is None:
        return
    used = graph.loaded_ops() & graph.ops_of(inspected.definition)
    if not used:
        return
    workers = {row.task for row in cluster.data_workers()}
    loaded = [set(task["ops"]) for name, task in cluster.inspect_tasks().items() if name in workers]
    if ops := sorted(set().union(*(used - ops for ops in loaded))):
        yield NO_LIBRARY.finding(
            f"the dataset uses {listed(ops)} of a library that this process has loaded",
            'start the cluster with preload=["/path/of/the/library.so"]',
        )
