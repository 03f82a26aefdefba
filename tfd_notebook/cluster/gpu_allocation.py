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

#: A request for GPUs as `check` returns it.
GpuRequest = str | tuple[int, ...] | Mapping[str, int]
#: Takes the role and index of a task and returns the index of its host.
Place = Callable[[str, int], int]

_GPU_ROLES = (Role.WORKER, Role.EVALUATOR)
_FIX = 'use gpus="auto", 0 (none), [0, 1] (by index) or {"worker": 1} (count for each task)'
_EQUAL = "and TensorFlow needs the same number for each worker"


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
                    f"{_plural(workers_on[host], 'worker')}{share.on} need "
                    f"{_plural(needed, 'GPU')}, {self.each} each like the running workers, and "
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
    if isinstance(request, str):
        return _allocate_all(
            workers_on,
            _deduplicate(
                hosts, lambda h, kept: kept / workers_on[h] if workers_on[h] else math.inf
            ),
        )
    if not isinstance(request, Mapping):
        return _allocate_numbers(request, workers_on, hosts)
    per_worker, per_evaluator = (
        request.get(str(Role.WORKER), 0),
        request.get(str(Role.EVALUATOR), 0),
    )
    evaluators_on = Counter(place(Role.EVALUATOR, index) for index in range(evaluators))
    hosts = _deduplicate(
        hosts,
        lambda host, kept: (
            kept - workers_on[host] * per_worker - evaluators_on[host] * per_evaluator
        ),
    )
    shares = [
        _allocate_counts(
            request,
            workers_on[host],
            per_worker,
            evaluators_on[host] * per_evaluator,
            gpus,
            _suffix(gpus, hosts),
        )
        for host, gpus in enumerate(hosts)
    ]
    return GpuAllocation(per_worker, tuple(shares))


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


def _allocate_all(workers_on: Mapping[int, int], hosts: Sequence[HostGpus]) -> GpuAllocation:
    """Allocate all GPUs. Each worker gets the count available on the most constrained host."""
    if not any(hosts[host].gpus for host in workers_on):
        return GpuAllocation()
    for host, count in workers_on.items():
        gpus = hosts[host]
        if count > len(gpus.gpus):
            available = f"{_plural(len(gpus.gpus), 'GPU')}{_suffix(gpus, hosts)}"
            limit = f", or at most {_plural(len(gpus.gpus), 'worker')}" if gpus.gpus else ""
            placement = ", or place= the workers on hosts with GPUs" if len(hosts) > 1 else ""
            raise UsageError(
                f"{available} cannot be divided among {_plural(count, 'worker')}, {_EQUAL}"
                + (f": {gpus.why}" if gpus.why else ""),
                fix=f"use gpus=0{limit}{placement}",
            )
    per_worker = min(len(hosts[host].gpus) // count for host, count in workers_on.items())
    shares = []
    for host, gpus in enumerate(hosts):
        # On a host without workers, a worker that is added later may use any of them.
        cut = per_worker * workers_on[host] if host in workers_on else len(gpus.gpus)
        shares.append(HostAllocation(_suffix(gpus, hosts), gpus.gpus[:cut], left=gpus.gpus[cut:]))
    return GpuAllocation(per_worker, tuple(shares))


def _allocate_numbers(
    request: tuple[int, ...], workers_on: Mapping[int, int], hosts: Sequence[HostGpus]
) -> GpuAllocation:
    """Allocate GPUs by index, the same on each host."""
    for holders in _holders(hosts).values():
        if len(same := [hosts[host].host for host in holders if workers_on.get(host)]) > 1:
            raise UsageError(
                f"gpus={list(request)!r}: {listed(same)} are one machine, and see the same GPUs",
                fix='use gpus="auto" or gpus={"worker": 1}, which allocate each GPU once',
            )
    for host in workers_on or range(len(hosts)):
        gpus, on = hosts[host], _suffix(hosts[host], hosts)
        count = workers_on.get(host, 0)
        if not gpus.gpus:
            raise _no_gpus_error(list(request), gpus, on)
        if missing := [gpu for gpu in request if gpu not in gpus.gpus]:
            raise UsageError(
                f"invalid gpus {list(request)!r}: GPU {missing[0]} does not exist{on}",
                fix=f"choose from GPUs {', '.join(map(str, gpus.gpus))}",
            )
        if not count or len(request) % count:
            raise UsageError(
                f"{_plural(len(request), 'GPU')} cannot be divided evenly among "
                f"{_plural(count, 'worker')}{on}, {_EQUAL}",
                fix="name one GPU for each worker, or a multiple of that number",
            )
    most, least = (
        max(workers_on, key=workers_on.__getitem__),
        min(workers_on, key=workers_on.__getitem__),
    )
    per_worker, other = len(request) // workers_on[most], len(request) // workers_on[least]
    if per_worker != other:
        raise UsageError(
            f"gpus={list(request)!r} gives {per_worker} to each worker"
            f"{_suffix(hosts[most], hosts)} and {other}{_suffix(hosts[least], hosts)}, {_EQUAL}",
            fix='use the same number of workers on each host, or gpus={"worker": 1}',
        )
    shares = [
        HostAllocation(_suffix(gpus, hosts), request if set(request) <= set(gpus.gpus) else ())
        for gpus in hosts
    ]
    return GpuAllocation(per_worker, tuple(shares))


def _allocate_counts(
    request: Mapping[str, int],
    workers: int,
    per_worker: int,
    evaluator: int,
    gpus: HostGpus,
    on: str,
) -> HostAllocation:
    """Allocate GPUs of one host by the requested counts."""
    needed = workers * per_worker + evaluator
    if needed and not gpus.gpus:
        raise _no_gpus_error(dict(request), gpus, on)
    if needed > len(gpus.gpus):
        raise UsageError(
            f"{_plural(workers, 'worker')} with {_plural(per_worker, 'GPU')} each"
            + (f" and an evaluator with {evaluator}" if evaluator else "")
            + f" need{'s' if workers + evaluator == 1 else ''} {needed}, "
            f"and there are {len(gpus.gpus)}{on}" + (f": {gpus.why}" if gpus.why else ""),
            fix="request fewer GPUs, or use fewer workers" + on,
        )
    # The evaluator gets the last ones, so that workers can be added.
    cut = len(gpus.gpus) - evaluator
    return HostAllocation(on, gpus.gpus[:cut], gpus.gpus[cut:])


def _no_gpus_error(request: object, gpus: HostGpus, on: str) -> Unsupported:
    return Unsupported(
        f"gpus={request} failed{on}: {gpus.why or 'no GPU found'}",
        fix="use gpus=0 to run on the CPU only",
    )


def _suffix(gpus: HostGpus, hosts: Sequence[HostGpus]) -> str:
    return f" on {gpus.host}" if len(hosts) > 1 else ""


def _plural(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"
