"""Looking at all tasks of a cluster at once, as TensorFlow would reach them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from tfd_notebook.model.resolution import TaskStatus
from tfd_notebook.net.probe import Kind, Probe, Prober
from tfd_notebook.resolvers.base import NO_ACCELERATORS
from tfd_notebook.resolvers.validation import Tasks

#: Seconds for one answer.
TIMEOUT = 1.0
#: Seconds within which all tasks are looked at.
LIMIT = 4.0
#: Tasks that are asked at the same time: more threads only wait for each other.
_LEAST_PARALLEL, _MOST_PARALLEL = 32, 400
#: Clusters with more tasks are connected to anew at each look: connections are open files.
_MOST_KEPT = 200
#: Where gRPC finds its proxy, in its order.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_SERVER: Kind = "server"
#: What answers in jobs that are no ``tf.distribute.Server``.
_KINDS: dict[str, Kind] = {"dispatcher": "dispatcher", "data_worker": "data_worker"}

#: Whether a server that calls itself so can be the task of this job and index.
MayBe = Callable[[str | None, str, int], bool]


class TaskProber:
    """Look at tasks again and again; safe to use from one thread at a time.

    Parameters
    ----------
    may_be : callable
        Tells whether a server of some name can be a task.
    """

    def __init__(self, may_be: MayBe) -> None:
        self._may_be = may_be
        self._direct = Prober()
        self._proxied = Prober(via_proxy=True)

    def look(self, tasks: Tasks) -> tuple[TaskStatus, ...]:
        """Return what each task answers, in the order of `tasks`, within 4 s for 1,000 tasks."""
        wanted = [(job, index, at) for job, found in tasks.items() for index, at in found.items()]
        if not wanted:
            return ()
        proxy = next((name for name in _PROXIES if os.environ.get(name)), "")
        # One address may be given to several tasks.
        first = {address: _KINDS.get(job, _SERVER) for job, _, address in wanted}
        questions = len(first) * (2 if proxy else 1)
        parallel = min(
            max(int(questions * TIMEOUT / (LIMIT - TIMEOUT)), _LEAST_PARALLEL), questions
        )
        with ThreadPoolExecutor(min(parallel, _MOST_PARALLEL), "tfd-look") as pool:
            through = pool.map(self._probe_proxied, first, first.values()) if proxy else ()
            direct = pool.map(self._probe_direct, first, first.values())
            answers = dict(zip(first, direct, strict=True))
            proxied = dict(zip(first, through, strict=False))
        found = []
        for job, index, address in wanted:
            seen = self._judged(job, index, answers[address])
            if proxy:
                by_proxy = self._judged(job, index, proxied[address])
                seen = _as_tensorflow(seen, by_proxy, proxy)
            found.append(seen)
        if questions > _MOST_KEPT:
            self.close()
        return tuple(found)

    def close(self) -> None:
        """Close all connections; the next look opens new ones."""
        self._direct.close()
        self._proxied.close()

    def _probe_direct(self, address: str, kind: Kind) -> Probe:
        return self._direct.probe(address, TIMEOUT, kind)

    def _probe_proxied(self, address: str, kind: Kind) -> Probe:
        return self._proxied.probe(address, TIMEOUT, kind)

    def _judged(self, job: str, index: int, found: Probe) -> TaskStatus:
        kind = _KINDS.get(job, _SERVER)
        name = found.task
        identity = name or (str(found.kind) if found.alive and found.kind != "server" else "")
        state, reason = str(found.state), found.reason
        if found.alive and found.kind != kind:
            state, reason = "mismatch", f"a {_words(found.kind)} answers there"
        elif found.alive and found.kind == "server" and not self._may_be(name, job, index):
            state, reason = "mismatch", f"{identity} answers there"
        return TaskStatus(
            job,
            index,
            found.address,
            state,
            identity,
            _accelerators(found),
            round(found.latency_ms, 1),
            reason,
        )


def _as_tensorflow(direct: TaskStatus, through: TaskStatus, proxy: str) -> TaskStatus:
    """Return how TensorFlow sees a task: it obeys the variables that name a proxy."""
    if through.state == direct.state:
        return direct
    host = direct.address.rpartition(":")[0]
    return TaskStatus(
        **{
            **vars(through),
            "identity": through.identity or direct.identity,
            "reason": f"{through.reason or through.state} by the proxy of {proxy}, which "
            f"TensorFlow obeys; directly it is {direct.state}. Add {host} to no_proxy",
        }
    )


def _accelerators(found: Probe) -> str:
    counts = Counter(d.type for d in found.devices if d.type not in NO_ACCELERATORS)
    return " ".join(f"{kind}:{count}" for kind, count in sorted(counts.items()))


def _words(kind: str | None) -> str:
    words: Mapping[str | None, str] = {
        "server": "tf.distribute server",
        "data_worker": "data worker",
    }
    return words.get(kind, str(kind))
