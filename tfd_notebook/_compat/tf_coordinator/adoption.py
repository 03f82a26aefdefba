"""Replaces the closure queue of a coordinator that TensorFlow created by the observed one."""

from __future__ import annotations

import threading
import time
from typing import Any

from tensorflow.python.distribute.coordinator import cluster_coordinator

from tfd_notebook._compat import frames
from tfd_notebook.errors import StateError, TimeLimit

_serve = cluster_coordinator.Worker._process_queue
#: Seconds to wait for the threads of idle workers to end.
_SECONDS = 10.0
_POLL = 0.005


def made_by_tensorflow(strategy: Any) -> Any:
    """Return the coordinator of a strategy if TensorFlow created it, else None."""
    coordinator = getattr(strategy, "_cluster_coordinator", None)
    return coordinator if type(coordinator) is cluster_coordinator.ClusterCoordinator else None


def is_supported(strategy: Any) -> bool:
    """Return True if TensorFlow's coordinator works with a strategy."""
    return hasattr(strategy, "_is_parameter_server_strategy_v2")


def replace_queue(cluster: Any, queue: Any) -> None:
    """Replace the queue from which the workers of an idle cluster take closures.

    Raises
    ------
    StateError
        Scheduled functions have not ended.
    """
    before = cluster.closure_queue
    with before._queue_lock:
        idle = before._queue.empty() and not before.inflight_closure_count and not before._error
        idle = idle and all(tagged.empty() for tagged in before._tagged_queue.values())
    if not idle:
        raise StateError(
            "cannot adopt TensorFlow's coordinator of this strategy: functions that it "
            "scheduled have not ended",
            fix="call its join() first, then cluster.coordinator(strategy) again",
        )
    # A thread ends at any point: it checks the flag, or gets None from the stopped queue.
    for worker in cluster.workers:
        worker._should_worker_thread_run = False
    before.stop()
    deadline = time.monotonic() + _SECONDS
    while _is_served(cluster):
        if time.monotonic() >= deadline:
            raise TimeLimit(
                f"the threads of TensorFlow's coordinator did not end within {_SECONDS:g} s",
                fix="create a new strategy: cluster.strategy()",
            )
        time.sleep(_POLL)
    cluster.closure_queue = queue
    for worker in cluster.workers:
        worker._should_worker_thread_run = True
        name = f"WorkerClosureProcessingLoop-{worker.worker_index}"
        threading.Thread(target=worker._process_queue, name=name, daemon=True).start()


def _is_served(cluster: Any) -> bool:
    """Return True while a thread takes closures for one of the workers."""
    serving = (
        frames.variable_in(frame, "self")
        for stack in frames.stacks().values()
        for frame in stack
        if frame.f_code is _serve.__code__
    )
    return any(worker in cluster.workers for worker in serving)
