"""Checks before reading through TensorFlow's service, which reject reads that would hang."""

from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from tfd_notebook._compat.keras import most_batches
from tfd_notebook._compat.tf_data import graph
from tfd_notebook._compat.tf_data.elements import encoding_error
from tfd_notebook._compat.tf_data.source_locations import warn
from tfd_notebook.data.consume.observe import plain
from tfd_notebook.data.service import graph_inspection, py_functions
from tfd_notebook.data.service.captured_state import RENEW, CapturedState, changed
from tfd_notebook.data.service.changes import Change, refuse, reported, summary
from tfd_notebook.data.service.division import keeping
from tfd_notebook.data.service.options import STATIC, ReadOptions
from tfd_notebook.data.service.protocols import DataServiceProtocol
from tfd_notebook.data.service.semantics import Semantics
from tfd_notebook.errors import (
    DataChanged,
    DispatcherLost,
    FinishedJob,
    NotSerializable,
    NoWorkers,
    TfdError,
    UnknownName,
    UsageError,
)
from tfd_notebook.model.spec import Endpoint, TaskState
from tfd_notebook.net import proxies
from tfd_notebook.net.host import why_unreached
from tfd_notebook.net.probe import dataset_graph, probe, probe_many

#: Size of a definition in bytes above which a warning reports that it contains the data.
LARGE = 50_000_000

_DISPATCHER_SECONDS = 10.0
#: Seconds without an answer of the dispatcher after which a note names it.
_NOTE_SECONDS = 2.5
_REACH_SECONDS = 2.0

_printed_modes: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def print_note(text: str) -> None:
    """Print one line for the user, next to the output of the cell."""
    # Notebooks highlight stderr in red as an error.
    ipython = sys.modules.get("IPython")
    notebook = ipython is not None and ipython.get_ipython() is not None
    (sys.stdout if notebook else sys.stderr).write(f"{text}\n")


def prepare(
    cluster: DataServiceProtocol,
    dataset: Any,
    mode: str,
    semantics: str,
    permanent: bool = True,
    divisible: bool = False,
) -> graph_inspection.Pipeline:
    """Check `dataset`, and send the Python functions that it needs to the workers.

    With `permanent`, the workers keep the functions until the cluster stops, because other
    readers can use the dataset. With `divisible`, a part of it can run in this process.
    """
    import tensorflow as tf

    if graph.is_traced(dataset):
        raise UsageError(
            "a dataset that is created inside a tf.function cannot be registered or saved",
            fix="create it outside of the function",
        )
    check_service(cluster)
    pipeline = graph_inspection.examine(dataset)
    if pipeline.size > LARGE:
        warn(
            f"the dataset's definition is {pipeline.size / 1e6:.0f} MB, because it contains the "
            "data. Every data worker receives all of it. Reading the data from files is faster",
        )
    _check_sendable(pipeline)
    sends = pipeline.tokens and not cluster.service_in_process
    packed = py_functions.pack(pipeline.tokens) if sends else None  # an error precedes warnings
    whole = dataset if divisible else None
    check_changes(cluster, pipeline.semantics, mode, semantics, dataset=whole)
    cluster.check_room(pipeline.size)
    if packed is not None:
        user = None if permanent or not tf.executing_eagerly() else dataset
        cluster.install_functions(*packed, user)
    if mode in STATIC:
        cluster.enable_static_sharding()
    if mode == "HINT" and not pipeline.semantics.has_hint:
        warn(
            'the dataset has no shard(SHARD_HINT, SHARD_HINT), so "hint" works like "off": each '
            "data worker delivers the whole dataset",
        )
    return pipeline


def check_changes(
    cluster: DataServiceProtocol,
    pipeline: Semantics,
    mode: str,
    semantics: str,
    warned_mode: str | None = None,
    dataset: Any = None,
) -> None:
    """Refuse a pipeline whose elements would be wrong, and warn of other changes.

    Changes in `warned_mode` have been warned of before. `dataset` is as in `keeping`.
    """
    if semantics == "tensorflow":
        return
    workers, in_process = require_workers(cluster), cluster.service_in_process
    changes = pipeline.changes(mode, workers, in_process)
    if semantics == "same" and changes:
        raise DataChanged(
            f'{changes[0]} (mode "{mode.lower()}")',
            fix='use dataset.apply(cluster.distribute(..., semantics="same")) outside of a '
            "tf.function. To save it, call save(path) of the result",
        )
    known = [] if warned_mode is None else pipeline.changes(warned_mode, workers, in_process)
    new = [change for change in reported(changes) if change.refused or change not in known]
    if not new:
        return
    other = keeping(pipeline, new, mode, in_process, dataset, workers)
    refuse(new, mode, other)
    what, fix = summary(new, other)
    warn(f"an epoch through the service may differ from one without it. {what}. Next: {fix}")


def external_dataset(cluster: DataServiceProtocol, dataset_id: str) -> Semantics | None:
    """Return the operations of a dataset that another process has registered.

    Returns None, with a warning, if the dispatcher does not give its graph.
    """
    import tensorflow as tf

    address = cluster.service_target.rpartition("/")[2]
    try:
        serialized = dataset_graph(address, dataset_id)
        return Semantics(tf.compat.v1.GraphDef.FromString(serialized)) if serialized else None
    except (TfdError, DecodeError):
        warn(
            f"dataset {dataset_id!r} was registered in another process, and its graph was not read "
            "(at most 64 MB), so an epoch may differ from one without the service. Next: compare "
            "the elements with and without the service",
        )
        return None


def refused_later(pipeline: Semantics, mode: str, semantics: str) -> Change | None:
    """Return the change for which a second data worker refuses an accepted pipeline, if any."""
    if semantics != "checked":
        return None
    return next((change for change in pipeline.changes(mode, 2) if change.refused), None)


def keeps_workers(pipeline: Semantics, mode: str, semantics: str) -> bool:
    """Return True if the elements of a data worker that leaves do not arrive again."""
    return semantics == "checked" and any(
        change.kind == "cached" for change in pipeline.changes(mode, 2)
    )


def prepare_traced(
    cluster: DataServiceProtocol, dataset: Any, mode: str, semantics: str
) -> list[str]:
    """Send to the workers the functions of a dataset that a ``tf.function`` creates.

    Return the ops of the dataset.

    TensorFlow sends such a dataset when the function runs. Its size, its number of elements and
    the resources that it uses are not known before.
    """
    check_service(cluster)
    definitions = list(graph.traced_definitions(dataset))
    _check_single_service(any(map(graph_inspection.reads_service, definitions)))
    with warnings.catch_warnings():
        # TensorFlow cannot read options of datasets that are arguments of the function.
        warnings.filterwarnings("ignore", "To make it possible to preserve tf.data options")
        deterministic = dataset.options().deterministic is not False
    ops: list[str] = []
    for definition in definitions:
        pipeline = Semantics(definition, deterministic=deterministic)
        ops += pipeline.ops
        check_changes(cluster, pipeline, mode, semantics)
    token_lists = map(py_functions.find_functions, definitions)
    tokens = list(dict.fromkeys(token for found_tokens in token_lists for token in found_tokens))
    if tokens and not cluster.service_in_process:
        cluster.install_functions(*py_functions.pack(tokens))
    if mode in STATIC:
        cluster.enable_static_sharding()
    return ops


def _check_single_service(reads_service: bool) -> None:
    # The op has its state in this process. A data worker that runs it can wait without an end.
    if reads_service:
        raise NotSerializable(
            "the dataset already reads a tf.data service, and data workers cannot read another one",
            fix="call distribute once, on the dataset without a service",
        )


def _check_sendable(pipeline: graph_inspection.Pipeline) -> None:
    _check_single_service(pipeline.reads_service)
    if pipeline.resources:
        raise NotSerializable(
            f"a function of the dataset uses {' and '.join(pipeline.resources)} outside of the "
            "dataset, which a data worker cannot access",
            fix="use tensors, variables or a tf.lookup.StaticHashTable",
        )


def check_service(cluster: DataServiceProtocol) -> None:
    """Raise an error if the service has no data workers or its dispatcher does not answer."""
    require_workers(cluster)
    start = time.monotonic()
    timeout = 1.0
    noted = False
    while True:
        result = probe(cluster.service_target, timeout=timeout, expect="dispatcher")
        if result.alive:
            _bypass_proxy(cluster)
            check_reach(cluster)
            return
        waited = time.monotonic() - start
        if waited >= _NOTE_SECONDS and not noted:
            noted = True
            print_note(
                f"cluster {cluster.name!r}: dispatcher:0 has not answered for {waited:.0f} s "
                f"({result.reason}). This call waits up to {_DISPATCHER_SECONDS:g} s. If the "
                f"dispatcher hangs: {cluster.restart_step('dispatcher:0', result.reason)}"
            )
        if waited > _DISPATCHER_SECONDS:
            raise DispatcherLost(
                f"the dispatcher of cluster {cluster.name!r} has not answered for {waited:.0f} s. "
                f"Last attempt: {result.reason}",
                task="dispatcher:0",
                fix=cluster.restart_step("dispatcher:0", result.reason, logs=True),
            )
        # A dispatcher that just started, or on a busy host, can be slow to answer the first call.
        timeout = min(2 * timeout, max(0.5, _DISPATCHER_SECONDS - waited))
        time.sleep(0.1)


def check_reach(cluster: DataServiceProtocol) -> None:
    """Raise NoWorkers if this process can reach no data worker. Warn if it cannot reach some."""
    if cluster.service_in_process:
        return
    rows = [row for row in cluster.data_workers() if row.state in (TaskState.READY, TaskState.HUNG)]
    results = probe_many([row.address for row in rows], timeout=_REACH_SECONDS)
    unreachable = [
        (f"{row.task} at {what}", fix)
        for row, result in zip(rows, results, strict=True)
        if result.state == "unreachable"
        for what, fix in [why_unreached(row.address, result, row.open_to)]
    ]
    if not unreachable:
        return
    what = f"cluster {cluster.name!r}: {'; '.join(what for what, _ in unreachable[:3])}"
    if len(unreachable) == len(rows):
        raise NoWorkers(f"{what}. Reading would wait indefinitely", fix=unreachable[0][1])
    warn(
        f"{what}. Readers wait for the elements of these workers. Next: {unreachable[0][1]}",
    )


def _bypass_proxy(cluster: DataServiceProtocol) -> None:
    """Exclude the servers from a proxy that was configured after the cluster's start."""
    addresses = [
        cluster.service_target,
        *(row.address for row in cluster.data_workers() if row.address),
    ]
    note = proxies.bypass(Endpoint.parse(address).host for address in addresses)
    if note is not None:
        warn(note)


def require_workers(cluster: DataServiceProtocol) -> int:
    """Return the number of data workers. Raise NoWorkers if it is 0."""
    count = len(cluster.data_workers())
    if not count:
        raise NoWorkers(
            f"cluster {cluster.name!r} has no data worker, so reading would wait indefinitely",
            fix="cluster.scale(data_workers=2)",
        )
    return count


def check_infinite(reading: ReadOptions, cardinality: int) -> None:
    """Raise UsageError for a finite dataset if TensorFlow needs an infinite one."""
    if reading.needs_infinite and cardinality >= 0:
        raise UsageError(
            f"{reading.needs_infinite} needs an infinite dataset, this one has "
            f"{cardinality} elements",
            fix="add .repeat() before distribute",
        )


def check_job(cluster: DataServiceProtocol, reading: ReadOptions, full_name: str | None) -> None:
    """Raise FinishedJob for a job that has delivered its data.

    TensorFlow would deliver no elements, without an error.
    """
    if full_name is None:
        return
    if cluster.journal is None:
        finished = cluster.consumers.has_finished(listed_as(reading.job_name) or "")
        taken = set()
    else:
        state = cluster.journal.read()
        taken = {job.name for job in state.jobs}
        job = state.job(full_name)
        if job is not None and job.mode.upper() != reading.mode:
            raise UsageError(
                f"job {reading.job_name!r} exists with processing_mode={job.mode!r}",
                fix="use that mode, or another job_name=",
            )
        finished = state.finished(full_name)
    if finished:
        stem = full_name.removesuffix(reading.job_name or "")
        unused = next(
            name
            for number in range(2, len(taken) + 3)
            if stem + (name := f"{reading.job_name}-{number}") not in taken
        )
        raise FinishedJob(
            f"job {reading.job_name!r} has already delivered its data",
            fix=f"use a new name: job_name={unused!r}",
        )


class BeforeReading:
    """Checks that run before each iteration of a dataset. Called without arguments.

    A call raises an error if no element can arrive, because the cluster has stopped or has no
    data worker. It also raises one if data workers were added that would join elements wrongly,
    or lose some. It warns once if other readers have finished the named job, or if Keras may end
    the epoch early. It also warns once of each variable or table that has changed since it was
    sent.

    Parameters
    ----------
    cluster : DataServiceProtocol
    full_name : str, optional
        The name of the job in the dispatcher.
    captured : sequence of CapturedState
        Variables and tables as they were sent.
    refused : Change, optional
        The reason to refuse the dataset with more than one data worker.
    mode : str
    batches : int
        The number of batches without a service. -1 if it is unknown.
    groups : int
        Number of operations of which each data worker may make a short batch.

    Attributes
    ----------
    joined : bool
        Whether the named job was joined before it was finished.
    """

    def __init__(
        self,
        cluster: DataServiceProtocol,
        full_name: str | None,
        captured: Sequence[CapturedState] = (),
        refused: Change | None = None,
        mode: str = "",
        batches: int = -1,
        groups: int = 0,
    ) -> None:
        self._cluster = cluster
        self._batches, self._groups, self._workers = batches, groups, 0
        self._captured = list(captured)
        self._refused, self._mode = refused, mode
        self._name = full_name
        self._warned = False
        self.joined = False

    def __call__(self) -> None:
        _ = self._cluster.service_target  # raises if the cluster has stopped
        workers = require_workers(self._cluster)
        if self._refused is not None and workers > 1:
            raise DataChanged(
                f'{self._refused} (mode "{self._mode.lower()}"). Cluster {self._cluster.name!r} '
                f"had one data worker when the dataset was sent, and now has {workers}",
                fix="cluster.scale(data_workers=1), or distribute the dataset again with "
                'semantics="same"',
            )
        for captured in changed(self._captured):
            handle = captured.resource.handle
            self._captured = [each for each in self._captured if each.resource.handle is not handle]
            warn(f"{captured}. Next: {RENEW}. Later changes are only listed by tfd.doctor(dataset)")
        self._check_batches(workers)
        journal = self._cluster.journal
        if self._name is None or journal is None or self.joined or self._warned:
            return
        state = journal.read()
        if not state.finished(self._name):
            self.joined = True
            left = state.iteration(self._name)
            if left is not None and left.discarded:
                warn(
                    f"job {self._name!r} had no reader for a long time, and the dispatcher "
                    "discards such an epoch. It can start again at its first element. For a longer "
                    "time, use Service(dispatcher_config=DispatcherConfig(job_gc_timeout_ms=...))",
                )
            return
        self._warned = True
        warn(
            f"job {self._name!r} has delivered this epoch to other readers, and no element is "
            "left. For a complete epoch pass a new job_name=",
        )

    def _check_batches(self, workers: int) -> None:
        """Warn if Keras reads fewer batches than the epoch can have."""
        limit = most_batches() if self._groups else None
        if limit is None:  # its first epoch, in which it counts
            self._workers = workers
            return
        most = self._batches + (workers - 1) * self._groups
        if self._batches < 0:
            most = limit - 1 + (workers - self._workers) * self._groups
        if most > limit:
            self._groups = 0
            warn(
                f"elements may be missing in this epoch and in the next ones: Keras reads at most "
                f"{limit} batches, because its first epoch had {limit - 1}. With {workers} data "
                f"workers, an epoch can have {most}. Next: call batch() after distribute, or use "
                'semantics="same"',
            )


def listed_as(job_name: str | None) -> str | None:
    """Return the display name of a job's consumer."""
    return f"job {job_name}" if job_name else None


def print_delivery(
    cluster: DataServiceProtocol,
    mode: str,
    pipeline: Semantics | None = None,
    infinite: bool = False,
    failure: str = "",
) -> None:
    """Print, once for each cluster and mode, how the data workers share the data.

    The note contains how often an epoch has every element only if `pipeline` keeps its elements.
    It contains `failure`, the reason for which an epoch fails, in place of that.
    It is printed again for the first pipeline that has incomplete batches.
    """
    printed = _printed_modes.setdefault(cluster, set())
    count = require_workers(cluster)
    batches = "" if pipeline is None else _incomplete(pipeline, mode, count)
    noted = f"{mode} batches" if batches else mode
    if noted in printed:
        return
    printed.update((mode, noted))
    hinted = pipeline is None or pipeline.has_hint
    whole = mode == "OFF" or (mode == "HINT" and not hinted)
    keeps = pipeline is not None and pipeline.keeps_elements("OFF" if whole else mode)
    if whole:
        reader = "the data worker" if count == 1 else f"each of the {count} data workers"
        text = f"{reader} reads the whole {'infinite ' if infinite else ''}dataset"
        if keeps and not infinite:
            times = {1: "once", 2: "twice"}.get(count, f"{count} times")
            text += f", so an epoch contains every element {times}"
        if count > 1 and not infinite:
            text += '. Use mode "dynamic" to '
            once = keeps and pipeline is not None and pipeline.keeps_elements("DYNAMIC")
            text += "get every element once" if once else "divide the sources"
    elif mode == "DYNAMIC" and keeps:
        text = "an epoch contains every element once, in no fixed order"
    elif mode == "DYNAMIC":
        text = "the data workers share the sources, and elements arrive in no fixed order"
    elif mode == "HINT":
        text = "each data worker reads the share that shard(SHARD_HINT, SHARD_HINT) selects"
    else:
        text = "each data worker reads a fixed share"
        if failure:
            text += f". But {failure}"
        elif keeps:
            text += ", so an epoch contains every element once"
    print_note(f'cluster {cluster.name!r}: mode "{mode.lower()}" - {text}{batches}.')


def short_batches(pipeline: Semantics, mode: str, workers: int = 2) -> list[Change]:
    """Return the changes by operations of which each data worker makes a short batch."""
    return [each for each in pipeline.changes(mode, workers) if each.kind == "grouping"]


def _incomplete(pipeline: Semantics, mode: str, workers: int) -> str:
    """Return a sentence about batches that more data workers end, or an empty text."""
    changes = short_batches(pipeline, mode, workers)
    if workers < 2 or not changes:
        return ""
    by_key = any("each key" in each.what for each in changes)
    text = f"so up to {workers * len(changes)} more are incomplete"
    if any(op.startswith(("Repeat", "ShuffleAndRepeat")) for op in pipeline.ops):
        text += " in each repetition"
    text += " for each key" if by_key else ""
    return f". Each data worker makes its own {'groups' if by_key else 'batches'}, {text}"


def translated(call: Callable[[], Any]) -> Any:
    """Return the result of a TensorFlow call, or raise its error as a TfdError."""
    import tensorflow as tf

    try:
        return call()
    except TfdError:
        raise
    except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError) as error:
        raise DispatcherLost(
            f"the dispatcher does not answer: {plain(error.message)}", task="dispatcher:0"
        ) from error
    except tf.errors.NotFoundError as error:
        raise UnknownName(plain(error.message), fix="register the dataset first") from error
    except tf.errors.AlreadyExistsError as error:
        raise UsageError(plain(error.message), fix="choose another path") from error
    except tf.errors.FailedPreconditionError as error:
        raise NotSerializable(
            f"the dataset cannot be sent to the data workers: {plain(error.message)}",
            fix="remove stateful stages, or set options().experimental_external_state_policy",
        ) from error
    except (tf.errors.OpError, ValueError, TypeError, RuntimeError) as error:
        raise UsageError(str(getattr(error, "message", error))) from error
    except encoding_error() as error:
        raise NotSerializable(
            f"the type of the dataset's elements cannot be sent to the dispatcher: {error}",
            fix='give an extension type a __name__ = "package.Name", and replace classes of attrs '
            "by named tuples or dicts",
        ) from error
