"""States of the tasks of a cluster: the classification that resolvers, doctor and attach share.

All tasks are probed concurrently, by the route that TensorFlow uses.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tfd_notebook.model.resolution import ANOTHER_ANSWERS, SAME_ADDRESS, TaskStatus
from tfd_notebook.net.probe import Kind, Probe, Prober

#: Addresses by job and index.
Tasks = Mapping[str, Mapping[int, str]]
#: Device types that do not count as accelerators.
NO_ACCELERATORS = ("CPU", "XLA_CPU", "XLA_GPU")
#: Default timeout in seconds of a probe.
TIMEOUT = 1.0
#: Seconds within which 1,000 tasks are probed with the default timeout.
LIMIT = 4.0
#: Minimum and maximum number of threads. More threads only wait for each other.
_MIN_THREADS, _MAX_THREADS = 32, 400
#: Maximum number of probes whose connections stay open: connections are open files.
_MAX_OPEN = 200
#: Variables that name gRPC's proxy, in gRPC's order.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_SERVER: Kind = "server"
#: Kinds of servers in jobs that do not run a ``tf.distribute.Server``.
_KINDS: dict[str, Kind] = {"dispatcher": "dispatcher", "data_worker": "data_worker"}
#: Reasons of the state ``own``: of an evaluator, and of the other jobs.
_OWN_EVALUATOR = "this process: it starts no server, because an evaluator reads checkpoints"
_OWN = "this process: it listens once it starts its server or strategy"

#: Returns True if a server with this task name, or None, can be the task of this job and index.
MayBe = Callable[[str | None, str, int], bool]


def is_same_task(reported: str | None, job: str, index: int) -> bool:
    """Return True if a server that reports the task `reported`, or none, can be this task."""
    return reported is None or _with_chief(reported) == _with_chief(f"{job}:{index}")


def is_same_job(reported: str | None, job: str, index: int) -> bool:
    """Return True if a server that reports the task `reported`, or none, can be of this job.

    For coordinators: TensorFlow's client assigns the index when it connects.
    """
    return reported is None or is_same_task(f"{reported.partition(':')[0]}:{index}", job, index)


def _with_chief(task: str) -> str:
    """Return the name of a task, in which the old name of the job ``chief`` is replaced."""
    return re.sub("^master:", "chief:", task)


class TaskProber:
    """A prober of tasks that keeps its connections. Only one thread at a time may use it.

    Parameters
    ----------
    may_be : callable
        Returns True if a server with a task name can be the task of a job and index. Default:
        `is_same_task`.
    own : tuple of (str, int), optional
        Job and index of this process. If nothing listens at its address, its state is ``own``.
        Default: this process is not a task.
    timeout : float
        Seconds for each answer. Default 1.
    """

    def __init__(
        self,
        may_be: MayBe = is_same_task,
        own: tuple[str, int] | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self._may_be = may_be
        self._own = own
        self._timeout = timeout
        self._direct = Prober()
        self._proxied = Prober(via_proxy=True)

    def probe(self, tasks: Tasks) -> tuple[TaskStatus, ...]:
        """Return the state of each task, in the order of `tasks`.

        1,000 tasks take at most 4 s with the default timeout.
        """
        places = [
            (job, index, address)
            for job, addresses in tasks.items()
            for index, address in addresses.items()
        ]
        if not places:
            return ()
        proxy = next((name for name in _PROXIES if os.environ.get(name)), "")
        # Several tasks may have the same address.
        kinds = {address: _KINDS.get(job, _SERVER) for job, _, address in places}
        count = len(kinds) * (2 if proxy else 1)
        threads = min(max(int(count * TIMEOUT / (LIMIT - TIMEOUT)), _MIN_THREADS), count)
        with ThreadPoolExecutor(min(threads, _MAX_THREADS), "tfd-probe") as pool:
            arguments = (kinds, [self._timeout] * len(kinds), kinds.values())
            through = pool.map(self._proxied.probe, *arguments) if proxy else ()
            results = dict(zip(kinds, pool.map(self._direct.probe, *arguments), strict=True))
            proxied = dict(zip(kinds, through, strict=False))
        statuses = []
        for job, index, address in places:
            status = status_of(job, index, results[address], self._may_be, self._own)
            if proxy:
                via_proxy = status_of(job, index, proxied[address], self._may_be, self._own)
                status = _status_for_tensorflow(status, via_proxy, proxy)
            statuses.append(status)
        if count > _MAX_OPEN:
            self.close()
        return tuple(_mark_shared(statuses))

    def close(self) -> None:
        """Close all connections. The next probe opens new ones."""
        self._direct.close()
        self._proxied.close()


def status_of(
    job: str,
    index: int,
    result: Probe,
    may_be: MayBe = is_same_task,
    own: tuple[str, int] | None = None,
) -> TaskStatus:
    """Return the state of a task by the result of a probe of its address; see `TaskProber`."""
    kind = _KINDS.get(job, _SERVER)
    name = result.task
    identity = name or (str(result.kind) if result.alive and result.kind != "server" else "")
    state, reason = str(result.state), result.reason
    if result.alive and result.kind != kind:
        state, reason = "mismatch", f"a {_label(result.kind)} {ANOTHER_ANSWERS}"
    elif result.alive and result.kind == "server" and not may_be(name, job, index):
        state, reason = "mismatch", f"{identity} {ANOTHER_ANSWERS}"
    elif state == "refused" and (job, index) == own:
        state, reason = "own", _OWN_EVALUATOR if job == "evaluator" else _OWN
    return TaskStatus(
        job,
        index,
        result.address,
        state,
        identity,
        _accelerators(result),
        round(result.latency_ms, 1),
        reason,
    )


def probe_tasks(
    tasks: Tasks,
    timeout: float = TIMEOUT,
    may_be: MayBe = is_same_task,
    own: tuple[str, int] | None = None,
) -> tuple[TaskStatus, ...]:
    """Probe all tasks once; see `TaskProber`."""
    prober = TaskProber(may_be, own, timeout)
    try:
        return prober.probe(tasks)
    finally:
        prober.close()


def _mark_shared(statuses: Sequence[TaskStatus]) -> Iterator[TaskStatus]:
    """Yield the statuses. A task at the address of others names one of them in its reason.

    Only one of the tasks at an address is alive: the one that the server reports, or the first.
    """
    by_address: dict[str, list[TaskStatus]] = {}
    for status in statuses:
        by_address.setdefault(status.address, []).append(status)
    for status in statuses:
        alive = [other for other in by_address[status.address] if other.state == "alive"]
        alive.sort(key=lambda other: other.identity != other.name)
        others = [other.name for other in by_address[status.address] if other is not status]
        if not others or status in alive[:1]:
            yield status
            continue
        state = "mismatch" if status in alive else status.state
        shared = f"{others[0]} {SAME_ADDRESS}"
        yield replace(status, state=state, reason="; ".join(filter(None, (status.reason, shared))))


def _status_for_tensorflow(direct: TaskStatus, through: TaskStatus, proxy: str) -> TaskStatus:
    """Return the status by the route that TensorFlow uses: its gRPC follows proxy variables."""
    if through.state == direct.state:
        return direct
    host = direct.address.rpartition(":")[0]
    return TaskStatus(
        **{
            **vars(through),
            "identity": through.identity or direct.identity,
            "reason": f"{through.reason or through.state} through the proxy of {proxy}, which "
            f"TensorFlow uses; directly it is {direct.state}. Add {host} to no_proxy",
        }
    )


def _accelerators(result: Probe) -> str:
    counts = Counter(d.type for d in result.devices if d.type not in NO_ACCELERATORS)
    return " ".join(f"{kind}:{count}" for kind, count in sorted(counts.items()))


def _label(kind: str | None) -> str:
    labels: Mapping[str | None, str] = {
        "server": "tf.distribute server",
        "data_worker": "data worker",
    }
    return labels.get(kind, str(kind))
