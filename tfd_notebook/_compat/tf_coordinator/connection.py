"""The eager context of this process, and the server in it, as the coordinator of a cluster."""

from __future__ import annotations

import copy
import sys
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

#: Functions that TensorFlow makes of single operations, for the devices of this process only.
_WRAPPED = "__wrapped__"
#: Seconds for a failure handler to come to its end.
_STOP_SECONDS = 1.0
#: Seconds for it to be through with a worker that was lost.
_UPDATE_SECONDS = 20.0
_stopping: list[threading.Thread] = []


def connection() -> Any:
    """Return what stands for the present connection: another object for each that is made."""
    return context.get_server_def()


def server_port() -> int | None:
    """Return the port of the server that TensorFlow opened here; None where it has none."""
    definition = context.get_server_def()
    if definition is None:
        return None
    for job in definition.cluster.job:
        if job.name == definition.job_name:
            return int(job.tasks[definition.task_index].rpartition(":")[2])
    return None


def address_in(spec: Mapping[str, Sequence[str]]) -> str | None:
    """Return this process's address in the cluster that it is connected to, if that is `spec`.

    TensorFlow would choose a new address for it and then not listen there: it starts a server only
    for another cluster. Whoever connects to the same one again has to name the old address.
    """
    definition = context.get_server_def()
    if definition is None:
        return None
    known = {
        job.name: [job.tasks[index] for index in sorted(job.tasks)]
        for job in definition.cluster.job
    }
    # TensorFlow compares the lists of jobs as they are, and its own are sorted in the one only.
    definition.cluster.job.sort(key=lambda job: job.name)
    own = known.pop(definition.job_name, None)
    if own is None or known != {job: list(tasks) for job, tasks in spec.items()}:
        return None
    return str(own[definition.task_index])


class _Renamed:
    """A resolver in which the coordinator's job has another name.

    It has what ``ParameterServerStrategy`` uses to connect.
    """

    def __init__(self, resolver: Any, names: Mapping[str, str]) -> None:
        self.rpc_layer = resolver.rpc_layer
        self._resolver = resolver
        self._names = names

    def cluster_spec(self) -> Any:
        jobs = self._resolver.cluster_spec().as_dict()
        return tf.train.ClusterSpec({self._names.get(job, job): jobs[job] for job in jobs})


def _connect(self: Any, coordinator_name: str) -> None:
    """Connect like TensorFlow, but under the job name that the devices of this process have.

    TensorFlow connects as ``chief``. That replaces the devices of a process that has not been
    ``chief`` before, and every variable, dataset, iterator and traced function is lost with them.
    """
    present = context.get_server_def()
    job = thread_parking.LOCAL_JOB if present is None else present.job_name
    resolver = self._cluster_resolver
    self._cluster_resolver = _Renamed(resolver, {coordinator_name: job})
    try:
        _connect_to_cluster(self, job)
    finally:
        self._cluster_resolver = resolver


_Strategy = parameter_server_strategy_v2.ParameterServerStrategyV2
_connect_to_cluster = _Strategy._connect_to_cluster
_Strategy._connect_to_cluster = _connect


def send_functions() -> None:
    """Have the tasks that this process has just connected to know the functions it has traced.

    TensorFlow sends a function when it is traced, and never again. Without it a worker answers that
    there is no such function, which TensorFlow takes for a worker that was restarted: it tries for
    ever.
    """
    here = context.context()
    with thread_parking.parked():  # another thread may call one of them
        for name in here.list_function_names():
            if name.startswith(_WRAPPED):
                continue  # no other task calls these, and sending them causes log messages
            definition = here.get_function_def(name)
            # add_function_def() sends only functions that the context does not have yet.
            here.remove_function(name)
            here.add_function_def(definition)


def resolver_of(strategy: Any) -> Any:
    """Return the resolver that a strategy was made with; None where it needed none."""
    return getattr(strategy, "_cluster_resolver", None)


def options_of(strategy: Any) -> dict[str, Any]:
    """Return what a strategy was made with, besides its resolver."""
    return {"variable_partitioner": getattr(strategy.extended, "_variable_partitioner", None)}


def cluster_of(coordinator: Any) -> Any:
    """Return TensorFlow's cluster of a coordinator, None while it has none."""
    return getattr(coordinator, "_cluster", None)


def is_made(coordinator: Any) -> bool:
    """Whether TensorFlow's part of a coordinator is there already: there is one per strategy."""
    return bool(getattr(coordinator, "_has_initialized", False))


def watch_variables(strategy: Any, made: Callable[[Any], None]) -> None:
    """Have `made` called with each variable that `strategy` creates from now on."""
    extended = strategy.extended
    create = extended._create_variable

    def creating(*args: Any, **kwargs: Any) -> Any:
        variable = create(*args, **kwargs)
        for part in getattr(variable, "variables", None) or (variable,):
            made(part)
        return variable

    extended._create_variable = creating


def refuse_keras(strategy: Any, error: Callable[[], Exception]) -> None:
    """Have Keras 3, which cannot train under `strategy`, get `error` instead of TensorFlow's.

    What it would do is iterate over a dataset for all workers, in this process.
    """
    distribute = strategy.experimental_distribute_dataset

    def distributing(dataset: Any, options: Any = None) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        # Keras 2.15 has modules of the same names, and can.
        old = getattr(sys.modules.get("keras"), "__version__", "").startswith("2.")
        if caller.startswith("keras.src.") and not old:
            raise error()
        return distribute(dataset, options)

    strategy.experimental_distribute_dataset = distributing


def stop(cluster: Any) -> bool:
    """Stop a coordinator's cluster, as its own ``stop`` does, in an order that leaves no trace.

    Its failure handler cannot be stopped while it waits for a worker that was lost, which may be
    for ever: then this is False, and it goes on in a thread, see `await_stopped`.
    """
    # First, lest a worker's thread begin a closure without a failure handler, and fail.
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
    """Wait for coordinators that wait for a lost worker; return whether none is left.

    A connection that is made meanwhile would crash the process.
    """
    deadline = time.monotonic() + seconds
    for thread in list(_stopping):
        thread.join(max(0.0, deadline - time.monotonic()))
        if not thread.is_alive():
            _stopping.remove(thread)
    return not _stopping


def resize(coordinator: Any, workers: Sequence[str]) -> None:
    """Have a coordinator's cluster consist of the workers at these addresses from now on.

    Workers that are new get closures at once; the threads of those that went end with what they
    are doing. Values that were made for each worker before have no part for the new ones.
    """
    cluster = cluster_of(coordinator)
    definition = copy.deepcopy(context.get_server_def())
    job = next(job for job in definition.cluster.job if job.name == "worker")
    job.tasks.clear()
    job.tasks.update(enumerate(workers))
    _filter_devices(definition)
    present = len(cluster.workers)
    handler = cluster.failure_handler
    # Two updates at a time, this one and one that brings a lost worker back, crash the process.
    if not handler._cluster_update_lock.acquire(timeout=_UPDATE_SECONDS):
        raise StateError(
            "TensorFlow waits for a worker that was lost, and takes no other meanwhile",
            fix="see the table of tasks for the one that is not ready, and cluster.restart() it",
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
    """Have the last `workers` of a cluster end with what they are doing."""
    for worker in workers:
        if hasattr(cluster.closure_queue, "retire"):
            cluster.closure_queue.retire(worker.worker_index)
        worker.stop()
    del cluster.workers[len(cluster.workers) - len(workers) :]


def _filter_devices(definition: Any) -> None:
    """Have each worker see the parameter servers and the coordinator only, as TensorFlow does."""
    count: Mapping[str, int] = {job.name: len(job.tasks) for job in definition.cluster.job}
    filters = server_lib.ClusterDeviceFilters()
    for job, others in (("worker", "ps"), ("ps", "worker")):
        for index in range(count.get(job, 0)):
            filters.set_device_filters(
                job, index, [f"/job:{others}", f"/job:{definition.job_name}"]
            )
    definition.cluster_device_filters.CopyFrom(filters._as_cluster_device_filters())
