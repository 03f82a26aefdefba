"""Advice for each kind of bottleneck that needs no experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfd_notebook._compat.tf_data import graph
from tfd_notebook._compat.tf_data.elements import can_be_batched
from tfd_notebook._compat.tf_data.pipeline_model import READERS
from tfd_notebook.data.bottleneck.classification import Bottleneck
from tfd_notebook.data.variable_names import variable_of

if TYPE_CHECKING:
    from tfd_notebook.data.bottleneck.usage import Delivery

PARALLEL = "pass num_parallel_calls=tf.data.AUTOTUNE"
PYTHON = "use TensorFlow ops, or data workers, where each process has its own GIL"
COPY = "add prefetch(2) after it, so that the copy and the step overlap"
PLAIN = "pass compression=None, because compressing costs more than it saves here"
#: Size of a batch in advice that contains a number.
BATCH_SIZE = 64
BATCH = "call batch() before distribute"
MEMORY = 'pass the data in memory with launcher="inprocess", or use no service'
SLOW_SOURCE = "read from faster storage or from more files, or cache() the data if it fits"
GENERATOR = "make the generator faster, or interleave() several of them"
ALL_PROCESSORS = (
    "it uses all cores: reduce its work per element, call batch() before it, or cache() its output"
)
LESS = "reduce its work per element, or cache() its output"
ALL_CORES_BUSY = (
    "do less in the pipeline, or add data workers on other hosts. More data workers on this "
    "host would not help, because all cores are busy"
)
EXTERNAL_WORKERS = (
    "check the CPU use of the data workers, or add some. This process cannot measure external ones"
)
BLOCKED = (
    "no element arrived, and the pipeline cannot be interrupted. It waits in an op of TensorFlow, "
    "such as a read of a file"
)
NO_ANSWER = (
    "see the logs of the data workers, and run tfd.explain on the dataset before distribute. No "
    "element has arrived"
)
STEP = "make the step faster; the data arrives in time"
SINGLE = "call batch() before the consumer, which now takes single elements"
_CONVERT = "turn the elements into tensors"


_MORE_FILES = "write the data to several files, at least one per data worker"
#: Advice to give a source more splits, by the kind of its stage.
_MORE_SPLITS = {
    "Generator": "create several generators from tf.data.Dataset.range(n), with "
    "interleave(lambda i: from_generator(..., args=(i,))), or do less in the generator",
    **dict.fromkeys(READERS, _MORE_FILES),
}
#: For a mode that divides elements, of which there are fewer than data workers.
_LESS_DIVIDED = 'use distribute("dynamic")'
_BY_DATA = (
    'use distribute("dynamic"). More data workers cannot help: with "data", each of them computes '
    "all elements"
)
_FINER = "split the source into smaller parts, such as one per file or range of rows"


def blocked(function: str) -> str:
    """Return the advice for a Python function that does not return."""
    return f"add a timeout to {function}, which has not returned. It continues to run"


def silent(kind: str) -> str:
    """Return the advice for a stage of a kind that receives elements and returns none."""
    if kind == "Filter":
        return "check the condition of the filter, which has accepted no element"
    return (
        "make the function faster, or check it for a loop without an end. It has returned no "
        "element, or not enough for a batch"
    )


def occupied(function: str) -> str:
    """Return the advice for a Python function of another pipeline that does not return."""
    return (
        f"run tfd.doctor(). No element has arrived, and {function} of another pipeline has not "
        "returned. It may occupy the threads of the data worker"
    )


def dataset_variable(dataset: Any, default: str = "") -> str:
    """Return the name of the user's variable that holds a dataset, observed or not.

    The tensor of the dataset is accepted, too.
    """
    return variable_of(dataset, default, graph.variant_of)


def batch(origin: Any) -> str:
    """Return the advice to batch `origin`, with the code if a variable holds it."""
    if not _can_be_batched(origin):
        return f"{_CONVERT}, and {BATCH}"
    name = dataset_variable(origin)
    return f"{BATCH}: {name}.batch({BATCH_SIZE})" if name else BATCH


def single(dataset: Any) -> str:
    """Return the advice for a consumer of `dataset` that takes single elements."""
    return SINGLE if _can_be_batched(dataset) else f"{_CONVERT}, and {SINGLE}"


def _can_be_batched(dataset: Any) -> bool:
    return dataset is None or can_be_batched(dataset.element_spec)


def copy(dataset: Any, default: str = "") -> str:
    """Return the advice to overlap the copy to a device, with the code for a known name."""
    name = dataset_variable(dataset, default)
    return f"{COPY}: {name} = {name}.prefetch(2)" if name else COPY


def inspect_worker(task: str) -> str:
    """Return the advice for a data worker that is slower than the others."""
    return f"check its log and its host, then restart or replace {task}"


def waits_for(task: str) -> str:
    """Return why more data workers cannot help while a consumer waits for a slow one."""
    return f"{inspect_worker(task)}. More data workers cannot help: the consumer waits for {task}"


def missing_consumers(delivery: Delivery | None, unregistered: int = 0) -> str:
    """Return the consumers that a coordinated read without elements waits for, or "".

    Parameters
    ----------
    delivery : Delivery, optional
        Parameters of the dataset of a consumer that waits.
    unregistered : int
        Number of readers of this process that its cluster does not list. Default 0.
    """
    cluster = None if delivery is None else delivery.cluster()
    if delivery is None or delivery.consumer is None or cluster is None:
        return ""
    index, count = delivery.consumer
    local, others = cluster.readers(delivery.job_name)
    known = max(0, (others or 0) - unregistered)
    missing = sorted({*range(count)} - {index, *local})
    if len(missing) <= known:
        return ""
    reads, waits = (
        " and ".join(f"consumer_index={each}" for each in indices)
        for indices in (sorted({index, *local}), missing)
    )
    others_read = f". Other processes read with {known} of these" if known else ""
    if others is None:
        others_read = ". Other processes may read with these"
    return (
        f"start the missing consumers of job {delivery.job_name!r}, because each round waits for "
        f"all {count}. This process reads with {reads}, but not with {waits}{others_read}"
    )


#: For a pipeline that `semantics="checked"` refuses with more than one data worker.
_ONE_WORKER = (
    'distribute the dataset with semantics="same". Now, a second data worker would join elements '
    "wrongly, or lose some"
)


def few_splits(delivery: Delivery) -> str:
    """Return why more data workers cannot help, and a change that helps."""
    if delivery.one_worker:
        return _ONE_WORKER
    splits = delivery.shared
    if delivery.mode == "DATA":
        return _BY_DATA
    if delivery.shares is not None:
        failure = delivery.failure(min(delivery.shares.counts) + 1)
        return f"{_MORE_FILES if delivery.shares.unit == 'file' else _LESS_DIVIDED}; {failure}"
    if splits is None:
        return _BY_DATA
    count = "one split" if splits.count == 1 else f"{splits.count} splits"
    mode = "dynamic sharding" if delivery.mode == "DYNAMIC" else "sharding by file"
    return (
        f"{_MORE_SPLITS.get(splits.kind, _FINER)}. More data workers cannot help: "
        f"{splits.source} has {count}, and {mode} assigns each split to one data worker"
    )


def more_workers(
    workers: int, delivery: Delivery | None, saturated: bool, suggested: int = 0
) -> str:
    """Return the advice for data workers that are always busy.

    Parameters
    ----------
    workers : int
        The current number of data workers.
    delivery : Delivery, optional
        Parameters of the dataset.
    saturated : bool
        Whether the cores that the data workers may use are busy.
    suggested : int
        Suggested number of data workers. Default: one more.
    """
    if delivery is not None and delivery.can_use(workers + 1) <= workers:
        return few_splits(delivery)
    if saturated:
        return ALL_CORES_BUSY
    cluster = None if delivery is None else delivery.cluster()
    variable = "cluster" if cluster is None else variable_of(cluster.owner, "cluster")
    return f"{variable}.scale(data_workers={suggested or workers + 1})"


def advise(
    bottleneck: Bottleneck,
    workers: int,
    delivery: Delivery | None = None,
    dataset: Any = None,
    origin: Any = None,
) -> str:
    """Return the advice for a bottleneck.

    Parameters
    ----------
    bottleneck : Bottleneck
    workers : int
        The number of data workers of the pipeline.
    delivery : Delivery, optional
        Parameters of the dataset.
    dataset, origin : tf.data.Dataset, optional
        The dataset that is read, and the one that was distributed. The advice names the variables
        that hold them.
    """
    stage = bottleneck.stage
    if bottleneck.kind == "consumer":
        return single(dataset) if stage is not None else STEP
    if bottleneck.kind == "stage":
        if (
            stage is not None
            and stage.kind == "Map"
            and not (stage.parallel or bottleneck.saturated)
        ):
            return PARALLEL
        return ALL_PROCESSORS if bottleneck.saturated else LESS
    if bottleneck.kind == "source" and stage is not None and stage.kind == "Generator":
        return GENERATOR
    if bottleneck.kind == "workers":
        if bottleneck.task:
            return inspect_worker(bottleneck.task)
        return more_workers(workers, delivery, bottleneck.saturated)
    return {
        "source": SLOW_SOURCE,
        "python": PYTHON,
        "transfer": f"{batch(origin)}, or {MEMORY}",
        "device_copy": copy(dataset),
        "none": "",
    }[bottleneck.kind]
