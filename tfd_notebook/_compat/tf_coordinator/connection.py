"""The eager context and the server of this process, as the coordinator of a cluster."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import parameter_server_strategy_v2
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.eager import context
from tensorflow.python.training import server_lib

from tfd_notebook._compat.tf_coordinator import cancellation, thread_parking
from tfd_notebook.errors import StateError

#: Prefix of functions that TensorFlow creates for single operations of this process's devices.
_WRAPPED = "__wrapped__"
#: Seconds to wait for a failure handler to end.
_STOP_SECONDS = 1.0
#: Seconds to wait for it to finish with a lost worker.
_UPDATE_SECONDS = 20.0
_stopping: list[threading.Thread] = []


def connection() -> Any:
    """Return an object that identifies the current connection. Each connection has its own."""
    return context.get_server_def()


def server_port() -> int | None:
    """Return the port of TensorFlow's server in this process, or None."""
    definition = context.get_server_def()
    if definition is None:
        return None
    for job in definition.cluster.job:
        if job.name == definition.job_name:
            return int(job.tasks[definition.task_index].rpartition(":")[2])
    return None


def worker_addresses() -> list[str]:
    """Return the addresses of the training workers that this process is connected to."""
    definition = context.get_server_def()
    jobs = () if definition is None else definition.cluster.job
    return [address for job in jobs if job.name == "worker" for address in job.tasks.values()]


def address_in(spec: Mapping[str, Sequence[str]]) -> str | None:
    """Return this process's address if it is connected to the cluster `spec`, else None.

    TensorFlow would choose a new address and not listen on it. It starts a server only for a
    different cluster. A new connection to the same cluster must use the old address.
    """
    definition = context.get_server_def()
    if definition is None:
        return None
    known = {
        job.name: [job.tasks[index] for index in sorted(job.tasks)]
        for job in definition.cluster.job
    }
    # TensorFlow compares the job lists without sorting, and only one of its lists is sorted.
    definition.cluster.job.sort(key=lambda job: job.name)
    own_tasks = known.pop(definition.job_name, None)
    if own_tasks is None or known != {job: list(tasks) for job, tasks in spec.items()}:
        return None
    return str(own_tasks[definition.task_index])


class _Renamed:
    """A resolver in which the coordinator's job has another name.

    Implements the part of the interface that ``ParameterServerStrategy`` uses to connect.
    """

    def __init__(self, resolver: Any, names: Mapping[str, str]) -> None:
        self.rpc_layer = resolver.rpc_layer
        self._resolver = resolver
        self._names = names

    def cluster_spec(self) -> Any:
        jobs = self._resolver.cluster_spec().as_dict()
        return tf.train.ClusterSpec({self._names.get(job, job): jobs[job] for job in jobs})


def _connect(self: Any, coordinator_name: str) -> None:
    """Connect like TensorFlow, but under the job name of this process's devices.

    TensorFlow connects as ``chief``. This replaces the devices of a process with another job name.
    All its variables, datasets, iterators and traced functions are lost.
    """
    job = thread_parking.own_job()
    resolver = self._cluster_resolver
    self._cluster_resolver = _Renamed(resolver, {coordinator_name: job})
    try:
        with getattr(resolver, "connect_within", contextlib.nullcontext)():  # see OwnResolver
            _connect_to_cluster(self, job)
    finally:
        self._cluster_resolver = resolver


_Strategy = parameter_server_strategy_v2.ParameterServerStrategyV2
_connect_to_cluster = _Strategy._connect_to_cluster
_Strategy._connect_to_cluster = _connect


def send_functions() -> None:
    """Send the traced functions of this process to the tasks that it has just connected to.

    TensorFlow sends a function only when it is traced. A worker without it answers that the
    function does not exist. TensorFlow interprets this as a restarted worker and retries
    indefinitely.
    """
    tf_context = context.context()
    with thread_parking.parked():  # another thread can call one of the functions
        for name in tf_context.list_function_names():
            if name.startswith(_WRAPPED):
                continue  # no other task calls these, and sending them writes log messages
            definition = tf_context.get_function_def(name)
            # add_function_def() only sends functions that the context does not have yet.
            tf_context.remove_function(name)
            tf_context.add_function_def(definition)


def resolver_of(strategy: Any) -> Any:
    """Return the resolver of a strategy, or None without one."""
    return getattr(strategy, "_cluster_resolver", None)


def partitioner_of(strategy: Any) -> Any:
    """Return the variable partitioner of a strategy, or None."""
    return getattr(strategy.extended, "_variable_partitioner", None)


def cluster_of(coordinator: Any) -> Any:
    """Return TensorFlow's cluster of a coordinator, or None before it has one."""
    return getattr(coordinator, "_cluster", None)


def dataset_function(dataset: Any) -> Any:
    """Return the concrete function that creates a per-worker dataset, or None if it has none."""
    function = getattr(dataset, "_dataset_fn", None)
    return function if hasattr(function, "graph") else None


def is_constructed(coordinator: Any) -> bool:
    """Return True if TensorFlow's part of a coordinator exists. A strategy has one coordinator."""
    return bool(getattr(coordinator, "_has_initialized", False))


def watch_variables(strategy: Any, on_created: Callable[[Any], None]) -> None:
    """Call `on_created` with each variable that `strategy` creates from now on."""
    extended = strategy.extended
    create = extended._create_variable

    def create_and_notify(*args: Any, **kwargs: Any) -> Any:
        variable = create(*args, **kwargs)
        for part in getattr(variable, "variables", None) or (variable,):
            on_created(part)
        return variable

    extended._create_variable = create_and_notify


def stop(cluster: Any) -> bool:
    """Stop a coordinator's cluster like its own ``stop``, in an order that avoids errors.

    Its failure handler cannot be stopped while it waits for a lost worker, possibly indefinitely.
    The result is False then, and the handler keeps running in a thread, see `await_stopped`.
    """
    # Stop the queue first, so that no worker starts a closure without a failure handler.
    cluster.closure_queue.stop()
    for worker in cluster.workers:
        worker.stop()
    cluster.resource_cancellation_mgr.start_cancel()
    stopping = threading.Thread(
        target=cluster.failure_handler.stop, name="tfd-coordinator-stop", daemon=True
    )
    stopping.start()
    stopping.join(_STOP_SECONDS)
    if stopping.is_alive():
        _stopping.append(stopping)
        return False
    return True


def await_stopped(seconds: float) -> bool:
    """Wait for coordinators that wait for a lost worker. Return True if all have stopped.

    A new connection before that would crash the process.
    """
    deadline = time.monotonic() + seconds
    for thread in list(_stopping):
        thread.join(max(0.0, deadline - time.monotonic()))
        if not thread.is_alive():
            _stopping.remove(thread)
    return not _stopping


def resize(coordinator: Any, workers: Sequence[str]) -> None:
    """Replace the workers of a coordinator's cluster by the workers at these addresses.

    New workers get closures at once. Threads of removed workers end after their current closure.
    Existing per-worker values have no part for the new workers.
    """
    cluster = cluster_of(coordinator)
    definition = copy.deepcopy(context.get_server_def())
    job = next(job for job in definition.cluster.job if job.name == "worker")
    job.tasks.clear()
    job.tasks.update(enumerate(workers))
    _filter_devices(definition)
    present = len(cluster.workers)
    handler = cluster.failure_handler
    # Concurrent updates, by this function and by the recovery of a worker, crash the process.
    if not handler._cluster_update_lock.acquire(timeout=_UPDATE_SECONDS):
        raise StateError(
            "TensorFlow waits for a lost worker and accepts no other update until then",
            fix="find the task that is not ready in the table of tasks, and cluster.restart() it",
        )
    try:
        _retire(cluster, cluster.workers[len(workers) :])
        context.context().update_server_def(definition)
        handler._server_def = definition
    finally:
        handler._cluster_update_lock.release()
    strategy = coordinator.strategy
    for owner in (strategy, strategy.extended, cluster):
        owner._num_workers = len(workers)
    for index in range(present, len(workers)):
        device = f"/job:worker/replica:0/task:{index}"
        cluster.workers.append(cluster_coordinator.Worker(index, device, cluster))
    cancellation.quieten(cluster.workers[present:])
    with cluster.closure_queue._queue_lock:
        cluster.closure_queue._closures_queued_condition.notify_all()


def _retire(cluster: Any, workers: Sequence[Any]) -> None:
    """Remove the last `workers` of a cluster. They end after their current closure."""
    for worker in workers:
        if hasattr(cluster.closure_queue, "retire"):
            cluster.closure_queue.retire(worker.worker_index)
        worker.stop()
    del cluster.workers[len(cluster.workers) - len(workers) :]


def _filter_devices(definition: Any) -> None:
    """Restrict each worker to the parameter servers and the coordinator, as TensorFlow does."""
    count: Mapping[str, int] = {job.name: len(job.tasks) for job in definition.cluster.job}
    filters = server_lib.ClusterDeviceFilters()
    for job, others in (("worker", "ps"), ("ps", "worker")):
        for index in range(count.get(job, 0)):
            filters.set_device_filters(
                job, index, [f"/job:{others}", f"/job:{definition.job_name}"]
            )
    definition.cluster_device_filters.CopyFrom(filters._as_cluster_device_filters())
