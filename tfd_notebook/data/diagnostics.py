"""What can be wrong with a dataset, though TensorFlow runs it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tfd_notebook._compat.tf_data import graph
from tfd_notebook._compat.tf_data.pipeline_model import READERS, Stage, bytes_of, stages_of
from tfd_notebook.data.consume.observe import check_dataset
from tfd_notebook.data.explain import advice, classification
from tfd_notebook.data.service import graph_inspection, validation
from tfd_notebook.data.service.memory_datasets import check_transfer
from tfd_notebook.data.service.options import STATIC, ReadOptions
from tfd_notebook.data.service.protocols import DataServiceProtocol
from tfd_notebook.data.service.usage import ServiceReadOptions
from tfd_notebook.data.variable_names import variable_of
from tfd_notebook.errors import FinishedJob, NotSerializable, NoWorkers, TfdError
from tfd_notebook.model.diagnostics import Finding, check, kind, listed
from tfd_notebook.net import tf_messages

#: Splits from which on one message to the dispatcher for each is felt.
_MANY_SPLITS = 1_000
#: Bytes at which the way of an element costs ten times what the way of its bytes costs.
_SMALL = int(classification.TRANSFER_PER_ELEMENT / classification.TRANSFER_PER_BYTE / 10)

FINISHED = kind(
    "TFD814",
    "warning",
    "finished job name",
    "a reader that joins a job which has delivered its data gets no element and no error",
)
NEEDS_ADDRESSES = kind(
    "TFD815",
    "warning",
    "mode that needs worker addresses",
    "a dispatcher that was not given its workers' addresses refuses to read so",
)
IN_MEMORY = kind(
    "TFD816",
    "error",
    "data in the memory of another process",
    "elements are handed over in memory only within one process; a reader in another one waits",
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
    "it goes to the dispatcher and to every data worker before the first element comes, and 2 GB "
    "end the process",
)
ENDLESS = kind(
    "TFD823",
    "info",
    "endless dataset",
    "a loop over it does not end, and model.fit needs to be told where an epoch does",
)
PACKED = kind(
    "TFD824",
    "warning",
    "compression that costs more than it saves",
    "packing takes processor time on both sides, where the way between them is not the limit",
)
SMALL = kind(
    "TFD825",
    "warning",
    "small elements",
    "each element is a message of its own, which costs far more than its bytes do",
)
REPEATED = kind(
    "TFD826",
    "warning",
    "epoch that delivers each element several times",
    "each data worker reads the whole dataset, so that an epoch is longer than the dataset",
)
RELATIVE = kind(
    "TFD831",
    "error",
    "relative paths in workers",
    "a data worker looks for them in its own directory",
)
NO_LIBRARY = kind(
    "TFD834",
    "error",
    "op library that the workers have not loaded",
    "a data worker cannot run an op that it does not know",
)


@dataclass(frozen=True)
class InspectedDataset:
    """A dataset on its way to whoever reads it.

    Parameters
    ----------
    dataset : tf.data.Dataset
        As it is read.
    """

    dataset: Any

    @cached_property
    def last(self) -> Stage:
        """Its last stage."""
        return stages_of(self.dataset)

    @cached_property
    def use(self) -> ServiceReadOptions | None:
        """How it is read through a service of ours; None where it is not."""
        return next((stage.service for stage in self.last.walk() if stage.service), None)

    @property
    def origin(self) -> Any:
        """What the data workers run, or this process; None where it is not known."""
        return self.dataset if self.use is None else self.use.origin

    @property
    def host(self) -> DataServiceProtocol | None:
        """The cluster that makes the elements, None where it is none or none any more."""
        host = None if self.use is None else self.use.delivery.host()
        # What a cluster knows of its tasks is gone with them.
        return host if host is not None and _serves(host) else None

    @cached_property
    def definition(self) -> bytes:
        """The graph of `origin`; empty where it has none, or one that is too large to look at."""
        found = self.examined
        return graph.serialized(self.origin) if found and found.size <= validation.LARGE else b""

    @cached_property
    def examined(self) -> graph_inspection.Pipeline | None:
        """What the graph of `origin` tells, None where it has none."""
        try:
            return None if self.origin is None else graph_inspection.examine(self.origin)
        except NotSerializable:
            return None


def inspect_dataset(dataset: Any) -> InspectedDataset:
    """Return `dataset` as checks take it.

    Raises
    ------
    UsageError
        It is no ``tf.data.Dataset``.
    """
    check_dataset(dataset)
    return InspectedDataset(dataset)


def _serves(host: DataServiceProtocol) -> bool:
    try:
        return bool(host.service_target)
    except TfdError:
        return False


@check("dataset")
def finished_job(path: InspectedDataset) -> Iterator[Finding]:
    """Find a dataset whose job other readers have finished before this one joined it."""
    host, use = path.host, path.use
    if host is None or use is None or use.delivery.job_name is None:
        return
    if use.joined():  # reading this dataset again starts another pass of the job
        return
    name = use.delivery.job_name
    if use.origin is None:
        service = next(s for s in path.last.walk() if s.service is use)
        name = f"dataset_id=/{graph.service_id(service.dataset)}/{name}"
    try:
        validation.check_job(host, ReadOptions(use.delivery.mode, use.delivery.job_name), name)
    except FinishedJob as error:
        yield FINISHED.found(error.what, str(error.fix), host.name)


@check("dataset")
def needs_addresses(path: InspectedDataset) -> Iterator[Finding]:
    """Find a mode that TensorFlow's own service refuses unless it was prepared for it."""
    for stage in path.last.walk():
        packed_mode = graph.processing_mode(stage.dataset)
        if stage.service is not None or packed_mode is None:
            continue
        policy = tf_messages.ProcessingModeDef.FromString(packed_mode).sharding_policy
        if (mode := tf_messages.SHARDING_POLICIES[policy].upper()) in STATIC:
            yield NEEDS_ADDRESSES.found(
                f"{stage.name} reads {mode} from a service that is not one of tfd_notebook's",
                "give its DispatcherConfig worker_addresses=[...], one for each worker in order, "
                "or read by cluster.distribute, which sees to it",
            )


@check("dataset")
def in_memory(path: InspectedDataset) -> Iterator[Finding]:
    """Find in-memory transfer from data workers of other processes."""
    try:
        check_transfer(path.dataset)
    except NoWorkers as error:
        yield IN_MEMORY.found(error.what, str(error.fix))


@check("dataset")
def single_elements(path: InspectedDataset) -> Iterator[Finding]:
    """Find splits that are too fine."""
    if path.use is None or path.use.delivery.mode != "DYNAMIC" or path.origin is None:
        return
    stages = list(stages_of(path.origin).walk())
    if any(s.kind in (*READERS, "Interleave", "FlatMap") for s in stages):
        return  # its elements are names of what is read
    for source in stages:
        count = -1 if source.inputs else int(source.dataset.cardinality())
        if count >= _MANY_SPLITS:
            yield SINGLE.found(
                f"{source.name} is cut into {count:,} splits of one element",
                "let the source give files or ranges, and flat_map() or interleave() what is in "
                'them; or use "off"',
                _name(path),
            )


@check("dataset")
def embedded(path: InspectedDataset) -> Iterator[Finding]:
    """Find data that is part of the graph."""
    if path.origin is None:
        return
    size = graph.constant_bytes(path.origin)
    if path.use is not None and path.examined is not None:
        size = max(size, path.examined.size)
    # Without a service the data only takes memory, until it is too large for any service.
    if size > (graph_inspection.LARGEST if path.use is None else validation.LARGE):
        yield EMBEDDED.found(
            f"the dataset's definition has {size / 1e6:.0f} MB",
            "write the data to files and read those, or load it inside of the pipeline",
            _name(path),
        )


@check("dataset")
def endless(path: InspectedDataset) -> Iterator[Finding]:
    """Find a dataset without an end."""
    import tensorflow as tf

    if path.use is not None and path.use.delivery.endless:
        return
    infinite = tf.data.INFINITE_CARDINALITY
    ends = any(stage.kind in ("Take", "TakeWhile") for stage in path.last.walk())
    whole = int(path.dataset.cardinality()) == infinite
    origin = path.use is not None and path.origin is not None and not ends
    if whole or (origin and int(path.origin.cardinality()) == infinite):
        name = advice.dataset_variable(path.dataset)
        finite = f"{name}.take(n)" if name else "take(n) of it"
        yield ENDLESS.found(
            "the dataset has no end",
            f"{finite}, leave repeat() out, or give model.fit steps_per_epoch=",
            _name(path),
        )


@check("dataset")
def repeated(path: InspectedDataset) -> Iterator[Finding]:
    """Find a finite dataset that several data workers each deliver as a whole."""
    import tensorflow as tf

    host, use = path.host, path.use
    if host is None or use is None or path.origin is None or use.delivery.endless:
        return
    mode = use.delivery.mode
    hinted = path.examined is not None and path.examined.has_shard_hint
    if mode != "OFF" and not (mode == "HINT" and not hinted):
        return
    workers = len(host.data_workers())
    if workers > 1 and int(path.origin.cardinality()) != tf.data.INFINITE_CARDINALITY:
        yield REPEATED.found(
            f'with "{mode.lower()}" an epoch delivers each element {workers} times, once by each '
            "data worker",
            f'{variable_of(host, "cluster")}.distribute("dynamic") delivers each element once',
            host.name,
        )


@check("dataset")
def packed(path: InspectedDataset) -> Iterator[Finding]:
    """Find compression where it does not pay."""
    host, use = path.host, path.use
    if host is None or use is None or not use.compressed:
        return
    if host.service_on_this_host:
        yield PACKED.found(
            "elements are compressed on their way within one host", advice.PLAIN, host.name
        )
    elif (limit := host.limit).kind == "transfer":
        yield PACKED.found(f"compressed elements come too slowly: {limit}", advice.PLAIN, host.name)


@check("dataset")
def small_elements(path: InspectedDataset) -> Iterator[Finding]:
    """Find elements that are too small to be sent one by one."""
    host = path.host
    if host is None or host.service_in_process or path.origin is None:
        return
    size = bytes_of(path.origin.element_spec)
    if size is not None and size < _SMALL:
        yield SMALL.found(
            f"the data workers send elements of {size:,} bytes",
            advice.batch(path.origin),
            host.name,
        )


@check("dataset")
def relative_paths(path: InspectedDataset) -> Iterator[Finding]:
    """Find names of files that only this process can find."""
    host = path.host
    if host is None or host.service_in_process or host.surroundings is None:
        return
    here = os.getcwd()
    if host.service_on_this_host and host.surroundings.directory == here:
        return
    names = [name for name in graph.strings_of(path.definition) if _is_relative(name)]
    if names:
        there = host.surroundings.directory if host.service_on_this_host else "on another host"
        yield RELATIVE.found(
            f"{listed(names)} lie in {here}, the data workers are {there}",
            "use absolute paths, to where all hosts find the files",
            host.name,
        )


def _is_relative(name: str) -> bool:
    if not 0 < len(name) < 1024 or "\0" in name or "://" in name or os.path.isabs(name):
        return False
    return os.path.isfile(name)


@check("dataset")
def missing_library(path: InspectedDataset) -> Iterator[Finding]:
    """Find ops of a library that a data worker has not loaded."""
    host = path.host
    if host is None or host.service_in_process or host.surroundings is None:
        return
    used = graph.loaded_ops() & graph.ops_of(path.definition)
    if not used:
        return
    workers = {row.task for row in host.data_workers()}
    known = [set(one["ops"]) for task, one in host.inspect_tasks().items() if task in workers]
    if ops := sorted(set().union(*(used - ops for ops in known))):
        yield NO_LIBRARY.found(
            f"the dataset uses {listed(ops)} of a library that was loaded here",
            'add it to preload=["/path/of/the/library.so"] when the cluster starts',
            host.name,
        )


def _name(path: InspectedDataset) -> str:
    return path.host.name if path.host is not None else ""
