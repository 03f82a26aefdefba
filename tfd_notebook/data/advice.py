"""What to change for each limit, where nothing was tried."""

from __future__ import annotations

from tfd_notebook.data.verdict import Verdict

PARALLEL = "give it num_parallel_calls=tf.data.AUTOTUNE"
PYTHON = (
    "use TensorFlow's own ops in it, or let data workers run it, each a process with a lock of its "
    "own"
)
COPY = "add prefetch(2) behind it, so that the copy runs beside the step"
PLAIN = "pass compression=None: packing costs more than it saves here"
BATCH = "send more at a time: batch() before distribute"
MEMORY = 'hand the data over in memory: launcher="inprocess", or no service at all'
SLOW_SOURCE = "read from faster storage, from more files, or cache() what fits"
GENERATOR = "make the generator faster, or interleave() several of them"
ALL_PROCESSORS = (
    "it has all processors: do less in it, batch() before it so that it works on many at once, or "
    "cache() what it makes"
)
LESS = "do less in it, or cache() what it makes"
ELSEWHERE = "this machine's processors are all in use: add workers on other machines"
SOMEBODYS = "its data workers are not ours to see: look at their processors, or add some"
STEP = "the data is there in time, so make the step itself faster"
SINGLE = "it takes single elements: batch() before it, and look at batches instead"


def look_at(task: str) -> str:
    """Return what to do about a data worker that does not keep up."""
    return f"look at its log and its machine, then restart or replace {task}"


def advise(verdict: Verdict, workers: int) -> str:
    """Return what to change for a `verdict` on a pipeline with so many data workers."""
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
        return ELSEWHERE if verdict.saturated else f"cluster.scale(data_workers={workers + 1})"
    return {
        "source": SLOW_SOURCE,
        "python": PYTHON,
        "transfer": f"{BATCH}, or {MEMORY}",
        "device_copy": COPY,
        "none": "",
    }[verdict.kind]
