"""What stands between a notebook and TensorFlow's service: what would hang is refused here."""

from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from tfd_notebook._compat.tf_data import graph
from tfd_notebook.data.consume.observe import check_dataset
from tfd_notebook.data.service import graph_inspection, py_functions
from tfd_notebook.data.service.options import STATIC, ReadOptions
from tfd_notebook.data.service.protocols import DataServiceProtocol
from tfd_notebook.errors import (
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
from tfd_notebook.net.probe import probe, probe_many

#: Bytes of a definition from which on a warning says that the data is part of it.
LARGE = 50_000_000

_DISPATCHER_SECONDS = 10.0
_REACH_SECONDS = 2.0

_said: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def print_note(text: str) -> None:
    """Tell the user one line, beside the output of the cell."""
    # In a notebook stderr is red, which this is not.
    ipython = sys.modules.get("IPython")
    notebook = ipython is not None and ipython.get_ipython() is not None
    (sys.stdout if notebook else sys.stderr).write(f"{text}\n")


def prepare(
    host: DataServiceProtocol, dataset: Any, mode: str, lasting: bool = True
) -> graph_inspection.Pipeline:
    """Check `dataset`, and send to the workers what they need to run it.

    With `lasting` they keep it until the cluster ends, because other readers can use the dataset.
    """
    import tensorflow as tf

    check_dataset(dataset)
    if graph.is_traced(dataset):
        raise UsageError(
            "a dataset that is made inside a tf.function cannot be registered or saved",
            fix="make it outside of the function",
        )
    check_host(host)
    found = graph_inspection.examine(dataset)
    if found.size > LARGE:
        warnings.warn(
            f"the dataset's definition has {found.size / 1e6:.0f} MB: the data itself is part of "
            "it, and goes to every data worker. Reading it from files is faster",
            UserWarning,
            stacklevel=5,
        )
    _check_travels(host, found, dataset, tf)
    host.check_room(found.size)
    if found.tokens and not host.service_in_process:
        user = None if lasting or not tf.executing_eagerly() else dataset
        host.install_functions(*py_functions.pack(found.tokens), user)
    if mode in STATIC:
        host.enable_static_sharding()
    if mode == "HINT" and not found.has_shard_hint:
        warnings.warn(
            'the dataset has no shard(SHARD_HINT, SHARD_HINT), so "hint" acts like "off": each '
            "data worker delivers all of it",
            UserWarning,
            stacklevel=5,
        )
    return found


def prepare_traced(host: DataServiceProtocol, dataset: Any, mode: str) -> None:
    """Send to the workers what they need for a dataset that a ``tf.function`` makes.

    TensorFlow sends such a dataset when the function runs: its size, the number of its elements
    and the objects that it uses are not known before.
    """
    import tensorflow as tf

    check_dataset(dataset)
    check_host(host)
    _check_elements(host, dataset, tf)
    found = map(py_functions.find_functions, graph.traced_definitions(dataset))
    tokens = list(dict.fromkeys(token for each in found for token in each))
    if tokens and not host.service_in_process:
        host.install_functions(*py_functions.pack(tokens))
    if mode in STATIC:
        host.enable_static_sharding()


def _check_travels(
    host: DataServiceProtocol, found: graph_inspection.Pipeline, dataset: Any, tf: Any
) -> None:
    if found.resources:
        raise NotSerializable(
            f"a function of the dataset uses {' and '.join(found.resources)} that lives outside of "
            "the dataset, and that a data worker cannot reach",
            fix="use tensors, variables or a tf.lookup.StaticHashTable",
        )
    _check_elements(host, dataset, tf)


def _check_elements(host: DataServiceProtocol, dataset: Any, tf: Any) -> None:
    specs = tf.nest.flatten(dataset.element_spec)
    if not host.service_in_process and any(isinstance(s, tf.data.DatasetSpec) for s in specs):
        raise NotSerializable(
            "the dataset's elements are datasets, which cannot be sent",
            fix="flatten them first: .flat_map(lambda window: window.batch(size))",
        )


def check_host(host: DataServiceProtocol) -> None:
    """Refuse to wait for a service that cannot answer."""
    live_workers(host)
    deadline = time.monotonic() + _DISPATCHER_SECONDS
    timeout = 1.0
    while True:
        found = probe(host.service_target, timeout=timeout, expect="dispatcher")
        if found.alive:
            _bypass_proxy(host)
            check_reach(host)
            return
        # One that just began, or on a busy machine, may be slow to answer the first call.
        timeout *= 2
        if time.monotonic() > deadline:
            raise DispatcherLost(
                f"the dispatcher of cluster {host.name!r} does not answer: {found.reason}",
                task="dispatcher:0",
                fix="see cluster.logs('dispatcher:0'), then cluster.restart('dispatcher:0')",
            )
        time.sleep(0.1)


def check_reach(host: DataServiceProtocol) -> None:
    """Refuse to read from data workers of which this process reaches none; warn of some."""
    if host.service_in_process:
        return
    rows = [row for row in host.data_workers() if row.state in (TaskState.READY, TaskState.HUNG)]
    seen = probe_many([row.address for row in rows], timeout=_REACH_SECONDS)
    said = [
        (f"{row.task} at {what}", fix)
        for row, found in zip(rows, seen, strict=True)
        if found.state == "unreachable"
        for what, fix in [why_unreached(row.address, found, row.open_to)]
    ]
    if not said:
        return
    what = f"cluster {host.name!r}: {'; '.join(what for what, _ in said[:3])}"
    if len(said) == len(rows):
        raise NoWorkers(f"{what}. Reading would wait without end", fix=said[0][1])
    warnings.warn(
        f"{what}. Readers wait for what it has of an epoch. Next: {said[0][1]}",
        UserWarning,
        stacklevel=4,
    )


def _bypass_proxy(host: DataServiceProtocol) -> None:
    """Keep TensorFlow from reading through a proxy that was set after the cluster's start."""
    addresses = [host.service_target, *(row.address for row in host.data_workers() if row.address)]
    note = proxies.bypass(Endpoint.parse(address).host for address in addresses)
    if note is not None:
        warnings.warn(note, UserWarning, stacklevel=6)


def live_workers(host: DataServiceProtocol) -> int:
    """Return how many data workers there are; refuse to wait when there is none."""
    count = len(host.data_workers())
    if not count:
        raise NoWorkers(
            f"cluster {host.name!r} has no data worker, and reading would wait for ever",
            fix="cluster.scale(data_workers=2)",
        )
    return count


def check_endless(reading: ReadOptions, cardinality: int) -> None:
    """Refuse a finite dataset where TensorFlow needs an endless one."""
    if reading.needs_infinite and cardinality >= 0:
        raise UsageError(
            f"{reading.needs_infinite} needs a dataset without an end, this one has "
            f"{cardinality} elements",
            fix="add .repeat() before distribute",
        )


def check_job(host: DataServiceProtocol, reading: ReadOptions, full_name: str | None) -> None:
    """Refuse to join a job that has delivered its data: TensorFlow would deliver nothing."""
    if full_name is None:
        return
    if host.journal is None:
        finished = any(
            row.name == listed_as(reading.job_name) and row.state == "finished"
            for row in host.consumers.rows()
        )
        taken = set()
    else:
        state = host.journal.read()
        taken = {job.name for job in state.jobs}
        job = state.job(full_name)
        if job is not None and job.mode.upper() != reading.mode:
            raise UsageError(
                f"job {reading.job_name!r} exists, with processing_mode={job.mode!r}",
                fix="use that mode, or another job_name=",
            )
        finished = state.finished(full_name)
    if finished:
        stem = full_name.removesuffix(reading.job_name or "")
        fresh = next(
            name
            for number in range(2, len(taken) + 3)
            if stem + (name := f"{reading.job_name}-{number}") not in taken
        )
        raise FinishedJob(
            f"job {reading.job_name!r} has delivered its data, and would deliver nothing more",
            fix=f"use a fresh name: job_name={fresh!r}",
        )


class BeforeReading:
    """Checks that run each time before a dataset is read; called without arguments.

    A call raises an error if no element could come, because the cluster has ended or has no data
    worker. It warns once if other readers have finished the named job.

    Parameters
    ----------
    host : ServiceHost
    full_name : str, optional
        The job as the dispatcher names it.

    Attributes
    ----------
    joined : bool
        Whether the named job was joined before it was finished.
    """

    def __init__(self, host: DataServiceProtocol, full_name: str | None) -> None:
        self._host = host
        self._name = full_name
        self._warned = False
        self.joined = False

    def __call__(self) -> None:
        _ = self._host.service_target  # raises where the cluster has ended
        live_workers(self._host)
        journal = self._host.journal
        if self._name is None or journal is None or self.joined or self._warned:
            return
        if not journal.read().finished(self._name):
            self.joined = True
            return
        self._warned = True
        warnings.warn(
            f"job {self._name!r} has delivered this epoch to other readers, and no element is "
            "left. For a complete epoch pass a new job_name=",
            UserWarning,
            stacklevel=2,
        )


def listed_as(job_name: str | None) -> str | None:
    """Return the name of a job's consumer in the views."""
    return f"job {job_name}" if job_name else None


def print_delivery(host: DataServiceProtocol, mode: str) -> None:
    """Say once for each cluster and mode how often an epoch delivers the data."""
    said = _said.setdefault(host, set())
    if mode in said:
        return
    said.add(mode)
    count = live_workers(host)
    if mode == "OFF":
        times = "once" if count == 1 else f"{count} times, once by each data worker"
        text = f'each element arrives {times}, and with "dynamic" once in all'
    elif mode == "DYNAMIC":
        text = "each element arrives once, in no fixed order"
    elif mode == "HINT":
        text = "each data worker delivers the share that shard(SHARD_HINT, SHARD_HINT) gives it"
    else:
        text = "each element arrives once, each data worker delivers a fixed share"
    print_note(f"cluster {host.name!r}, {mode.lower()}: in an epoch {text}.")


def translated(call: Callable[[], Any]) -> Any:
    """Return what TensorFlow returns, or raise its error in words of ours."""
    import tensorflow as tf

    try:
        return call()
    except TfdError:
        raise
    except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError) as error:
        raise DispatcherLost(
            f"the dispatcher does not answer: {error.message}", task="dispatcher:0"
        ) from error
    except tf.errors.NotFoundError as error:
        raise UnknownName(error.message, fix="register the dataset first") from error
    except tf.errors.AlreadyExistsError as error:
        raise UsageError(error.message, fix="choose another path") from error
    except tf.errors.FailedPreconditionError as error:
        raise NotSerializable(
            f"the dataset cannot be sent to the data workers: {error.message}",
            fix="take out what keeps state, or relax options().experimental_external_state_policy",
        ) from error
    except (tf.errors.OpError, ValueError, TypeError, RuntimeError) as error:
        raise UsageError(str(getattr(error, "message", error))) from error
