"""What to change for each limit, where nothing was tried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfd_notebook._compat.tf_data.pipeline_model import READERS, Splits
from tfd_notebook.data.explain.classification import Bottleneck
from tfd_notebook.data.variable_names import variable_of

if TYPE_CHECKING:
    from tfd_notebook.data.service.usage import Delivery

PARALLEL = "give it num_parallel_calls=tf.data.AUTOTUNE"
PYTHON = (
    "use TensorFlow's own ops in it, or let data workers run it, each a process with a lock of its "
    "own"
)
COPY = "add prefetch(2) behind it, so that the copy runs beside the step"
PLAIN = "pass compression=None: packing costs more than it saves here"
#: Elements of a batch, where advice names a number.
BATCH_SIZE = 64
BATCH = "send more at a time: batch() before distribute"
MEMORY = 'hand the data over in memory: launcher="inprocess", or no service at all'
SLOW_SOURCE = "read from faster storage, from more files, or cache() what fits"
GENERATOR = "make the generator faster, or interleave() several of them"
ALL_PROCESSORS = (
    "it has all processors: do less in it, batch() before it so that it works on many at once, or "
    "cache() what it makes"
)
LESS = "do less in it, or cache() what it makes"
ALL_CORES_BUSY = (
    "all cores of this machine are in use, so that more data workers on it would not help: do "
    "less in the pipeline, or add data workers on other machines"
)
SOMEBODYS = "its data workers are not ours to see: look at their processors, or add some"
STEP = "the data is there in time, so make the step itself faster"
SINGLE = "it takes single elements: batch() before it, and look at batches instead"


#: What gives a source more splits, by the kind of its stage.
_MORE_SPLITS = {
    "Generator": "make several generators from tf.data.Dataset.range(n), with "
    "interleave(lambda i: from_generator(..., args=(i,))), or do less in the one",
    **dict.fromkeys(READERS, "write the data as several files, at least one for each data worker"),
}
_FINER = "make the source finer, such as one element for each file or range of rows"


def dataset_variable(dataset: Any, default: str = "") -> str:
    """Return the name of the user's variable that holds a dataset, watched or not."""
    # Imports TensorFlow, which magics that import this module do without.
    from tfd_notebook._compat.tf_data.iterator import WatchedDataset

    return variable_of(
        dataset, default, lambda one: one.bare if type(one) is WatchedDataset else one
    )


def batch(origin: Any) -> str:
    """Return the advice to make batches of `origin`, with the code if a variable holds it."""
    name = dataset_variable(origin)
    return f"{BATCH}: {name}.batch({BATCH_SIZE})" if name else BATCH


def copy(dataset: Any, default: str = "") -> str:
    """Return the advice to overlap the copy to a device, with the code if a name is known."""
    name = dataset_variable(dataset, default)
    return f"{COPY}: {name} = {name}.prefetch(2)" if name else COPY


def look_at(task: str) -> str:
    """Return what to do about a data worker that does not keep up."""
    return f"look at its log and its machine, then restart or replace {task}"


def few_splits(splits: Splits) -> str:
    """Return why more data workers cannot read a source, and what to change."""
    count = "one split" if splits.count == 1 else f"{splits.count} splits"
    return (
        f"more data workers cannot help: {splits.source} has {count}, and dynamic sharding gives "
        f"a split to one data worker; {_MORE_SPLITS.get(splits.kind, _FINER)}"
    )


def more_workers(workers: int, delivery: Delivery | None, saturated: bool, wanted: int = 0) -> str:
    """Return the advice for data workers that have no time left.

    Parameters
    ----------
    workers : int
        The present number of data workers.
    delivery : Delivery, optional
        How the dataset is read.
    saturated : bool
        Whether the cores that the data workers may use are busy.
    wanted : int
        How many there should be. Default one more.
    """
    if delivery is not None and delivery.can_use(workers + 1) <= workers:
        assert delivery.shared is not None
        return few_splits(delivery.shared)
    if saturated:
        return ALL_CORES_BUSY
    cluster = "cluster" if delivery is None else variable_of(delivery.host(), "cluster")
    return f"{cluster}.scale(data_workers={wanted or workers + 1})"


def advise(
    verdict: Bottleneck,
    workers: int,
    delivery: Delivery | None = None,
    dataset: Any = None,
    origin: Any = None,
) -> str:
    """Return the change to make for a verdict.

    Parameters
    ----------
    verdict : Verdict
    workers : int
        The number of data workers of the pipeline.
    delivery : Delivery, optional
        How the dataset is read.
    dataset, origin : tf.data.Dataset, optional
        The dataset that is read, and the one that was distributed: advice names their variables.
    """
    stage = verdict.stage
    if verdict.kind == "consumer":
        return SINGLE if stage is not None else STEP
    if verdict.kind == "stage":
        if stage is not None and stage.kind == "Map" and not (stage.parallel or verdict.saturated):
            return PARALLEL
        return ALL_PROCESSORS if verdict.saturated else LESS
    if verdict.kind == "source" and stage is not None and stage.kind == "Generator":
        return GENERATOR
    if verdict.kind == "workers":
        if verdict.task:
            return look_at(verdict.task)
        return more_workers(workers, delivery, verdict.saturated)
    return {
        "source": SLOW_SOURCE,
        "python": PYTHON,
        "transfer": f"{batch(origin)}, or {MEMORY}",
        "device_copy": copy(dataset),
        "none": "",
    }[verdict.kind]
