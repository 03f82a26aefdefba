"""Concurrent probes of all tasks of a cluster, by the route that TensorFlow uses."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from tfd_notebook.model.resolution import TaskStatus
from tfd_notebook.net.probe import Kind, Probe, Prober
from tfd_notebook.resolvers.base import NO_ACCELERATORS
from tfd_notebook.resolvers.validation import Tasks

#: Timeout in seconds of a probe.
TIMEOUT = 1.0
#: Seconds within which all tasks are probed.
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

#: Returns True if a server with this task name can be the task of this job and index.
MayBe = Callable[[str | None, str, int], bool]


class TaskProber:
    """A prober of tasks that keeps its connections. Only one thread at a time may use it.

    Parameters
    ----------
    may_be : callable
        Returns True if a server with a task name can be the task of a job and index.
    """

    def __init__(self, may_be: MayBe) -> None:
        self._may_be = may_be
        self._direct = Prober()
        self._proxied = Prober(via_proxy=True)

    def probe(self, tasks: Tasks) -> tuple[TaskStatus, ...]:
        """Return the state of each task, in the order of `tasks`.

        1,000 tasks take at most 4 s.
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
            arguments = (kinds, [TIMEOUT] * len(kinds), kinds.values())
            through = pool.map(self._proxied.probe, *arguments) if proxy else ()
            results = dict(zip(kinds, pool.map(self._direct.probe, *arguments), strict=True))
            proxied = dict(zip(kinds, through, strict=False))
        statuses = []
        for job, index, address in places:
            status = self._status(job, index, results[address])
            if proxy:
                via_proxy = self._status(job, index, proxied[address])
                status = _status_for_tensorflow(status, via_proxy, proxy)
            statuses.append(status)
        if count > _MAX_OPEN:
            self.close()
        return tuple(statuses)

    def close(self) -> None:
        """Close all connections. The next probe opens new ones."""
        self._direct.close()
        self._proxied.close()

    def _status(self, job: str, index: int, result: Probe) -> TaskStatus:
        kind = _KINDS.get(job, _SERVER)
        name = result.task
        identity = name or (str(result.kind) if result.alive and result.kind != "server" else "")
        state, reason = str(result.state), result.reason
        if result.alive and result.kind != kind:
            state, reason = "mismatch", f"a {_label(result.kind)} answers there"
        elif result.alive and result.kind == "server" and not self._may_be(name, job, index):
            state, reason = "mismatch", f"{identity} answers there"
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
