"""Which task gets which GPUs: what a user may ask for, and how it is dealt out over the hosts.

A task gets only GPUs of the host that it is placed on. TensorFlow's strategies want the same number
at every worker; parameter servers, dispatcher and data workers see none.
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

#: What a user may ask for, once `check` has looked at it.
GpuRequest = str | tuple[int, ...] | Mapping[str, int]
#: Takes role and index of a task, returns the position of its host.
Place = Callable[[str, int], int]

_GPU_ROLES = (Role.WORKER, Role.EVALUATOR)
_FIX = 'write gpus="auto", 0 (none), [0, 1] (these) or {"worker": 1} (so many to each)'
_EQUAL = "and TensorFlow wants all workers alike"


def check(wish: Any) -> GpuRequest:
    """Return what ``Cluster(gpus=...)`` means: ``"auto"``, numbers of GPUs, or how many to each.

    Raises
    ------
    UsageError
    """
    if isinstance(wish, str) and wish == "auto":
        return "auto"
    if isinstance(wish, int) and not isinstance(wish, bool) and wish == 0:
        return ()
    if isinstance(wish, Mapping):
        for role, count in wish.items():
            if role not in _GPU_ROLES:
                raise UsageError(
                    f"gpus={dict(wish)!r}: a {role} gets no GPU",
                    fix="name worker or evaluator only: other tasks do not compute",
                )
            check_count(f"gpus[{str(role)!r}]", count)
        return {str(role): count for role, count in wish.items()}
    if isinstance(wish, Iterable) and not isinstance(wish, (str, bytes)):
        numbers = tuple(wish)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise UsageError(f"gpus={wish!r}: {number!r} is no number of a GPU", fix=_FIX)
            if numbers.count(number) > 1:
                raise UsageError(
                    f"gpus={wish!r}: GPU {number} is there twice",
                    fix="name each GPU once: tasks cannot share one",
                )
        return numbers
    raise UsageError(f"gpus={wish!r} cannot be meant", fix=_FIX)


@dataclass(frozen=True)
class HostGpus:
    """The GPUs of a host that may be used.

    Parameters
    ----------
    host : str
        How a person calls it.
    gpus : tuple of int
    why : str
        Why there are none, where that is known.
    hidden : bool
        Whether there seem to be some all the same.
    ids : tuple of str
        What each of `gpus` is called everywhere, where that is known.
    """

    host: str
    gpus: tuple[int, ...] = ()
    why: str = ""
    hidden: bool = False
    ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostAllocation:
    """What is dealt out of the GPUs of one host.

    Parameters
    ----------
    on : str
        What follows a sentence about this host, empty where there is only one.
    workers : tuple of int
        Those of the workers there, in the order in which they are dealt out.
    evaluator : tuple of int
        Those of the evaluator.
    left : tuple of int
        Those that nobody gets because they do not divide evenly.
    """

    on: str = ""
    workers: tuple[int, ...] = ()
    evaluator: tuple[int, ...] = ()
    left: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many GPUs of the host are dealt out, or left."""
        return len(self.workers) + len(self.evaluator) + len(self.left)


@dataclass(frozen=True)
class GpuAllocation:
    """Which GPUs each task sees.

    Parameters
    ----------
    each : int
        How many each worker sees.
    shares : tuple of Share
        One for each host, in order; none where nobody gets any.
    """

    each: int = 0
    shares: tuple[HostAllocation, ...] = ()

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> GpuAllocation:
        """Return the one of which `pack` returned `packed`."""
        shares = (
            HostAllocation(
                one["on"], *(tuple(one[name]) for name in ("workers", "evaluator", "left"))
            )
            for one in packed["shares"]
        )
        return cls(packed["each"], tuple(shares))

    def pack(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    @property
    def gives(self) -> bool:
        """Whether any task sees a GPU."""
        return bool(self.each or any(share.evaluator for share in self.shares))

    def of(self, role: Role, index: int, place: Place) -> tuple[int, ...]:
        """Return the GPUs that a task sees, all of them of its host."""
        if not self.shares or role not in _GPU_ROLES:
            return ()
        host = place(role, index)
        if role is Role.EVALUATOR:
            return self.shares[host].evaluator
        before = sum(place(role, other) == host for other in range(index))
        return self.shares[host].workers[before * self.each : (before + 1) * self.each]

    def count(self, workers: int, evaluators: int, place: Place) -> int:
        """Return how many GPUs so many tasks see together."""
        wanted = {Role.WORKER: workers, Role.EVALUATOR: evaluators}
        return sum(len(self.of(role, i, place)) for role, n in wanted.items() for i in range(n))

    def check(self, workers: int, place: Place) -> None:
        """Raise UsageError unless there is enough for so many workers."""
        there = Counter(place(Role.WORKER, index) for index in range(workers))
        for host, share in enumerate(self.shares):
            needed = there[host] * self.each
            if needed > len(share.workers):
                raise UsageError(
                    f"{_plural(there[host], 'worker')}{share.on} need {_plural(needed, 'GPU')}, "
                    f"{self.each} each as those that run, and there are {len(share.workers)} for "
                    "workers",
                    fix=f"make a new cluster with workers={workers}: a worker that runs keeps "
                    "its GPUs",
                )


def allocate_gpus(
    wish: GpuRequest, workers: int, evaluators: int, found: Sequence[HostGpus], place: Place
) -> GpuAllocation:
    """Deal out the GPUs of some hosts.

    Parameters
    ----------
    wish : "auto", tuple of int or mapping of str to int
        As `check` returns it. Numbers of GPUs mean those of each host that has workers.
    workers, evaluators : int
        How many there shall be.
    found : sequence of Found
        What each host has, in order.
    place : callable
        Where each task runs.

    Raises
    ------
    UsageError
        They do not go round, or not evenly; it names the host.
    Unsupported
        Some are asked for, and a host has none.
    """
    if wish == ():
        return GpuAllocation()
    there = Counter(place(Role.WORKER, index) for index in range(workers))
    if isinstance(wish, str):
        return _allocate_all(
            there, _deduplicate(found, lambda h, kept: kept / there[h] if there[h] else math.inf)
        )
    if not isinstance(wish, Mapping):
        return _allocate_numbers(wish, there, found)
    each, rest = wish.get(str(Role.WORKER), 0), wish.get(str(Role.EVALUATOR), 0)
    judging = Counter(place(Role.EVALUATOR, index) for index in range(evaluators))
    found = _deduplicate(found, lambda host, kept: kept - there[host] * each - judging[host] * rest)
    shares = [
        _allocate_counts(wish, there[host], each, judging[host] * rest, one, _suffix(one, found))
        for host, one in enumerate(found)
    ]
    return GpuAllocation(each, tuple(shares))


def _deduplicate(found: Sequence[HostGpus], has: Callable[[int, int], float]) -> Sequence[HostGpus]:
    """Give each GPU that several hosts see to that one of them which has least.

    Two executors of Spark on a machine, or two names of it, see the same ones. How much a host has
    `has` tells, by its position and how many were given to it.
    """
    holders = _holders(found)
    if all(len(hosts) == 1 for hosts in holders.values()):
        return found
    owner: dict[str, int] = {}
    given = Counter[int]()
    # First those that one host alone sees.
    for name, hosts in sorted(holders.items(), key=lambda item: len(item[1])):
        owner[name] = min(hosts, key=lambda host: (has(host, given[host]), given[host]))
        given[owner[name]] += 1
    parted = []
    for host, one in enumerate(found):
        kept = [gpu for gpu, name in zip(one.gpus, one.ids, strict=False) if owner[name] == host]
        others = listed(sorted({found[owner[name]].host for name in one.ids} - {one.host}))
        why = f"others of its GPUs are for {others}, which is the same machine" if others else ""
        parted.append(replace(one, gpus=tuple(kept), why=one.why or why) if one.ids else one)
    return parted


def _holders(found: Sequence[HostGpus]) -> dict[str, list[int]]:
    """Return which hosts see each GPU, by what it is called everywhere."""
    holders: dict[str, list[int]] = {}
    for host, one in enumerate(found):
        for name in one.ids:
            holders.setdefault(name, []).append(host)
    return holders


def _allocate_all(there: Mapping[int, int], found: Sequence[HostGpus]) -> GpuAllocation:
    """Deal out what there is, as many to each worker as the host that has fewest can."""
    if not any(found[host].gpus for host in there):
        return GpuAllocation()
    for host, count in there.items():
        one = found[host]
        if count > len(one.gpus):
            have = f"{_plural(len(one.gpus), 'GPU')}{_suffix(one, found)}"
            most = f", or no more than {len(one.gpus)} of them" if one.gpus else ""
            elsewhere = ", or place= the workers on hosts with GPUs" if len(found) > 1 else ""
            raise UsageError(
                f"{have} cannot be dealt out to {_plural(count, 'worker')}, {_EQUAL}"
                + (f": {one.why}" if one.why else ""),
                fix=f"use gpus=0{most}{elsewhere}",
            )
    each = min(len(found[host].gpus) // count for host, count in there.items())
    shares = []
    for host, one in enumerate(found):
        # Where no worker is yet, one that comes may take of all.
        cut = each * there[host] if host in there else len(one.gpus)
        shares.append(HostAllocation(_suffix(one, found), one.gpus[:cut], left=one.gpus[cut:]))
    return GpuAllocation(each, tuple(shares))


def _allocate_numbers(
    wish: tuple[int, ...], there: Mapping[int, int], found: Sequence[HostGpus]
) -> GpuAllocation:
    """Deal out GPUs by their numbers, the same on each host."""
    for hosts in _holders(found).values():
        if len(same := [found[host].host for host in hosts if there.get(host)]) > 1:
            raise UsageError(
                f"gpus={list(wish)!r}: {listed(same)} are one machine, and see the same GPUs",
                fix='use gpus="auto" or gpus={"worker": 1}, which deal each of them out once',
            )
    for host in there or range(len(found)):
        one, on = found[host], _suffix(found[host], found)
        count = there.get(host, 0)
        if not one.gpus:
            raise _no_gpus_error(list(wish), one, on)
        if missing := [gpu for gpu in wish if gpu not in one.gpus]:
            raise UsageError(
                f"gpus={list(wish)!r}: there is no GPU {missing[0]}{on}",
                fix=f"the GPUs {'there' if on else 'here'} are {', '.join(map(str, one.gpus))}",
            )
        if not count or len(wish) % count:
            raise UsageError(
                f"{_plural(len(wish), 'GPU')} cannot be dealt out evenly to "
                f"{_plural(count, 'worker')}{on}, {_EQUAL}",
                fix="name as many GPUs as there are workers, or a multiple",
            )
    most, least = max(there, key=there.__getitem__), min(there, key=there.__getitem__)
    each, more = len(wish) // there[most], len(wish) // there[least]
    if each != more:
        raise UsageError(
            f"gpus={list(wish)!r} are {each} for each worker{_suffix(found[most], found)} and {more}"
            f"{_suffix(found[least], found)}, {_EQUAL}",
            fix='have as many workers on each host, or use gpus={"worker": 1}',
        )
    shares = [
        HostAllocation(_suffix(one, found), wish if set(wish) <= set(one.gpus) else ())
        for one in found
    ]
    return GpuAllocation(each, tuple(shares))


def _allocate_counts(
    wish: Mapping[str, int], workers: int, each: int, evaluator: int, one: HostGpus, on: str
) -> HostAllocation:
    """Deal out so many GPUs of one host."""
    needed = workers * each + evaluator
    if needed and not one.gpus:
        raise _no_gpus_error(dict(wish), one, on)
    if needed > len(one.gpus):
        raise UsageError(
            f"{_plural(workers, 'worker')} with {_plural(each, 'GPU')} each"
            + (f" and an evaluator with {evaluator}" if evaluator else "")
            + f" need{'s' if workers + evaluator == 1 else ''} {needed}, "
            f"and there are {len(one.gpus)}{on}" + (f": {one.why}" if one.why else ""),
            fix="ask for fewer, or have fewer workers" + (" there" if on else ""),
        )
    # The evaluator takes the last ones, so that workers may come.
    cut = len(one.gpus) - evaluator
    return HostAllocation(on, one.gpus[:cut], one.gpus[cut:])


def _no_gpus_error(wish: object, one: HostGpus, on: str) -> Unsupported:
    return Unsupported(
        f"gpus={wish} cannot be given{on}: {one.why or 'there is no GPU'}",
        fix="use gpus=0 for the processor alone",
    )


def _suffix(one: HostGpus, found: Sequence[HostGpus]) -> str:
    return f" on {one.host}" if len(found) > 1 else ""


def _plural(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"
