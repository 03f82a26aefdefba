"""Allocation of the hosts' GPUs to tasks, and validation of ``Cluster(gpus=...)``.

A task gets only GPUs of the host that it is placed on. TensorFlow's strategies need the same number
at every worker. Parameter servers, dispatcher and data workers see none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tfd_notebook.errors import Unsupported, UsageError
from tfd_notebook.model.diagnostics import listed
from tfd_notebook.model.spec import Role, check_count
from tfd_notebook.views.formatting import plural

#: A request for GPUs as `check` returns it.
GpuRequest = str | tuple[int, ...] | Mapping[str, int]
#: Takes the role and index of a task and returns the index of its host.
Place = Callable[[str, int], int]

_GPU_ROLES = (Role.WORKER, Role.EVALUATOR)
_FIX = 'use gpus="auto", 0 (none), [0, 1] (by index) or {"worker": 1} (count for each task)'


def check(request: Any) -> GpuRequest:
    """Return the checked value of ``Cluster(gpus=...)``: ``"auto"``, indices, or counts by role.

    Raises
    ------
    UsageError
    """
    if isinstance(request, str) and request == "auto":
        return "auto"
    if isinstance(request, int) and not isinstance(request, bool) and request == 0:
        return ()
    if isinstance(request, Mapping):
        for role, count in request.items():
            if role not in _GPU_ROLES:
                raise UsageError(
                    f"invalid gpus {dict(request)!r}: a {role} cannot use a GPU",
                    fix="name worker or evaluator only: other tasks do not compute",
                )
            check_count(f"gpus[{str(role)!r}]", count)
        return {str(role): count for role, count in request.items()}
    if isinstance(request, Iterable) and not isinstance(request, (str, bytes)):
        numbers = tuple(request)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise UsageError(f"invalid gpus {request!r}: bad GPU index {number!r}", fix=_FIX)
            if numbers.count(number) > 1:
                raise UsageError(
                    f"invalid gpus {request!r}: GPU {number} appears twice",
                    fix="name each GPU once: tasks cannot share one",
                )
        return numbers
    raise UsageError(f"invalid gpus {request!r}", fix=_FIX)


@dataclass(frozen=True)
class HostGpus:
    """The GPUs of a host that tasks may use.

    Parameters
    ----------
    host : str
        Display name of the host.
    gpus : tuple of int
    why : str
        Reason why the host has none, if known.
    hidden : bool
        Whether the host seems to have GPUs that cannot be used.
    ids : tuple of str
        Globally unique id of each of `gpus`, if known.
    """

    host: str
    gpus: tuple[int, ...] = ()
    why: str = ""
    hidden: bool = False
    ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostAllocation:
    """The allocation of one host's GPUs.

    Parameters
    ----------
    on : str
        Suffix for messages about this host, such as `` on HOST``. Empty if it is the only host.
    workers : tuple of int
        GPUs of the host's workers, in the order of the workers.
    evaluator : tuple of int
        GPUs of the evaluator.
    left : tuple of int
        Unused GPUs, because they do not divide evenly.
    """

    on: str = ""
    workers: tuple[int, ...] = ()
    evaluator: tuple[int, ...] = ()
    left: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """The number of the host's GPUs, allocated or not."""
        return len(self.workers) + len(self.evaluator) + len(self.left)


@dataclass(frozen=True)
class GpuAllocation:
    """The GPUs that each task sees.

    Parameters
    ----------
    each : int
        Number of GPUs per worker.
    shares : tuple of HostAllocation
        One for each host, in order. Empty if no task gets a GPU.
    """

    each: int = 0
    shares: tuple[HostAllocation, ...] = ()

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> GpuAllocation:
        """Return the allocation that `pack` converted to `packed`."""
        shares = (
            HostAllocation(
                share["on"], *(tuple(share[name]) for name in ("workers", "evaluator", "left"))
            )
            for share in packed["shares"]
        )
        return cls(packed["each"], tuple(shares))

    def pack(self) -> dict[str, Any]:
        """Return the allocation as JSON values."""
        return asdict(self)

    @property
    def gives(self) -> bool:
        """True if any task sees a GPU."""
        return bool(self.each or any(share.evaluator for share in self.shares))

    def of(self, role: Role, index: int, place: Place) -> tuple[int, ...]:
        """Return the GPUs of its host that a task sees."""
        if not self.shares or role not in _GPU_ROLES:
            return ()
        host = place(role, index)
        if role is Role.EVALUATOR:
            return self.shares[host].evaluator
        before = sum(place(role, other) == host for other in range(index))
        return self.shares[host].workers[before * self.each : (before + 1) * self.each]

    def count(self, workers: int, evaluators: int, place: Place) -> int:
        """Return the total number of GPUs that the given number of tasks see."""
        counts = {Role.WORKER: workers, Role.EVALUATOR: evaluators}
        return sum(len(self.of(role, i, place)) for role, n in counts.items() for i in range(n))

    def check(self, workers: int, place: Place) -> None:
        """Raise UsageError if the hosts have too few GPUs for `workers`."""
        workers_on = Counter(place(Role.WORKER, index) for index in range(workers))
        for host, share in enumerate(self.shares):
            needed = workers_on[host] * self.each
            if needed > len(share.workers):
                raise UsageError(
                    f"{plural(workers_on[host], 'worker')}{share.on} need "
                    f"{plural(needed, 'GPU')}, {self.each} each like the running workers, and "
                    f"there are {len(share.workers)} for workers",
                    fix=f"create a new cluster with workers={workers}: a running worker keeps its "
                    "GPUs",
                )


def allocate_gpus(
    request: GpuRequest, workers: int, evaluators: int, hosts: Sequence[HostGpus], place: Place
) -> GpuAllocation:
    """Allocate the GPUs of some hosts to workers and evaluators.

    Parameters
    ----------
    request : "auto", tuple of int or mapping of str to int
        As `check` returns it. Indices apply to each host that has workers.
    workers, evaluators : int
        Number of tasks.
    hosts : sequence of HostGpus
        The GPUs of each host, in order.
    place : callable
        Returns the index of a task's host.

    Raises
    ------
    UsageError
        The GPUs are too few, or do not divide evenly. The error names the host.
    Unsupported
        GPUs are requested on a host that has none.
    """
    if request == ():
        return GpuAllocation()
    workers_on = Counter(place(Role.WORKER, index) for index in range(workers))
    evaluators_on = Counter(place(Role.EVALUATOR, index) for index in range(evaluators))
    counts = request if isinstance(request, Mapping) else {}
    each, per_evaluator = (counts.get(str(role), 0) for role in _GPU_ROLES)
    if isinstance(request, tuple):
        each = _check_indices(request, workers_on, hosts)
        pools = [request if set(request) <= set(gpus.gpus) else () for gpus in hosts]
    else:

        def rank(host: int, kept: int) -> float:
            if request == "auto":
                return kept / workers_on[host] if workers_on[host] else math.inf
            return kept - workers_on[host] * each - evaluators_on[host] * per_evaluator

        hosts = _deduplicate(hosts, rank)
        pools = [gpus.gpus for gpus in hosts]
    if request == "auto":
        if not any(pools[host] for host in workers_on):
            return GpuAllocation()
        # The host with the fewest GPUs for each worker decides. With none, the error names it.
        each = max(1, min(len(pools[host]) // count for host, count in workers_on.items()))
    shares = []
    for host, (gpus, pool) in enumerate(zip(hosts, pools, strict=True)):
        count, evaluator = workers_on[host], evaluators_on[host] * per_evaluator
        used = count * each + evaluator
        if used > len(pool):
            raise _too_few(request, count, each, evaluator, gpus, hosts)
        # A worker that is added later may use the others, unless each gets an equal share.
        end = used if request == "auto" and count else len(pool)
        cut = end - evaluator
        on = _suffix(gpus, hosts)
        shares.append(HostAllocation(on, pool[:cut], pool[cut:end], pool[end:]))
    return GpuAllocation(each, tuple(shares))


def _deduplicate(
    hosts: Sequence[HostGpus], rank: Callable[[int, int], float]
) -> Sequence[HostGpus]:
    """Assign each GPU that several hosts see to the host with the lowest rank.

    Two Spark executors on a machine, or two names of a machine, see the same GPUs. `rank` takes the
    index of a host and the number of GPUs that it got so far.
    """
    holders = _holders(hosts)
    if all(len(candidates) == 1 for candidates in holders.values()):
        return hosts
    owner: dict[str, int] = {}
    given = Counter[int]()
    # GPUs that only one host sees come first, so that they count when shared ones are assigned.
    for name, candidates in sorted(holders.items(), key=lambda item: len(item[1])):
        owner[name] = min(candidates, key=lambda host: (rank(host, given[host]), given[host]))
        given[owner[name]] += 1
    result = []
    for host, gpus in enumerate(hosts):
        kept = [gpu for gpu, name in zip(gpus.gpus, gpus.ids, strict=False) if owner[name] == host]
        others = listed(sorted({hosts[owner[name]].host for name in gpus.ids} - {gpus.host}))
        why = f"its other GPUs are for {others}, which is the same machine" if others else ""
        result.append(replace(gpus, gpus=tuple(kept), why=gpus.why or why) if gpus.ids else gpus)
    return result


def _holders(hosts: Sequence[HostGpus]) -> dict[str, list[int]]:
    """Return the hosts that see each GPU, by its globally unique id."""
    holders: dict[str, list[int]] = {}
    for host, gpus in enumerate(hosts):
        for name in gpus.ids:
            holders.setdefault(name, []).append(host)
    return holders


def _check_indices(
    request: tuple[int, ...], workers_on: Mapping[int, int], hosts: Sequence[HostGpus]
) -> int:
    """Return the number of GPUs of each worker for GPUs by index, the same on each host."""
    for holders in _holders(hosts).values():
        if len(same := [hosts[host].host for host in holders if workers_on.get(host)]) > 1:
            raise UsageError(
                f"gpus={list(request)!r}: {listed(same)} are one machine, and see the same GPUs",
                fix='use gpus="auto" or gpus={"worker": 1}, which allocate each GPU once',
            )
    for gpus in (hosts[host] for host in workers_on or range(len(hosts))):
        if not gpus.gpus:
            raise _no_gpus_error(list(request), gpus, hosts)
        if missing := [gpu for gpu in request if gpu not in gpus.gpus]:
            raise UsageError(
                f"invalid gpus {list(request)!r}: GPU {missing[0]} does not exist"
                + _suffix(gpus, hosts),
                fix=f"choose from GPUs {', '.join(map(str, gpus.gpus))}",
            )
    each = {divmod(len(request), count) for count in workers_on.values()}
    if len(each) != 1 or any(rest for _, rest in each):
        workers = " and ".join(
            f"{plural(count, 'worker')}{_suffix(hosts[host], hosts)}"
            for host, count in workers_on.items()
        )
        raise UsageError(
            f"{plural(len(request), 'GPU')} cannot be divided evenly among "
            f"{workers or '0 workers'}, and TensorFlow needs the same number for each worker",
            fix="name one GPU for each worker of a host, or a multiple of that number, or use "
            'gpus={"worker": 1}',
        )
    return each.pop()[0]


def _too_few(
    request: GpuRequest,
    workers: int,
    each: int,
    evaluator: int,
    gpus: HostGpus,
    hosts: Sequence[HostGpus],
) -> Exception:
    """Return the error for a host that has fewer GPUs than its tasks need."""
    if isinstance(request, Mapping) and not gpus.gpus:
        return _no_gpus_error(dict(request), gpus, hosts)
    on = _suffix(gpus, hosts)
    return UsageError(
        f"{plural(workers, 'worker')} with {plural(each, 'GPU')} each"
        + (f" and an evaluator with {evaluator}" if evaluator else "")
        + f" need{'s' if workers + evaluator == 1 else ''} {workers * each + evaluator}, and there "
        f"{'is' if len(gpus.gpus) == 1 else 'are'} {len(gpus.gpus)}{on}"
        + (f": {gpus.why}" if gpus.why else ""),
        fix=f"use fewer workers{on}, fewer GPUs for each, or gpus=0"
        + (", or place= the workers on hosts with GPUs" if len(hosts) > 1 else ""),
    )


def _no_gpus_error(request: object, gpus: HostGpus, hosts: Sequence[HostGpus]) -> Unsupported:
    return Unsupported(
        f"gpus={request} failed{_suffix(gpus, hosts)}: {gpus.why or 'no GPU found'}",
        fix="use gpus=0 to run on the CPU only",
    )


def _suffix(gpus: HostGpus, hosts: Sequence[HostGpus]) -> str:
    return f" on {gpus.host}" if len(hosts) > 1 else ""
