"""What can be wrong with a description of a cluster, and with what answers at its addresses."""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import psutil

from tfd_notebook._compat.tf_coordinator import context
from tfd_notebook.errors import ResolveError
from tfd_notebook.model.diagnostics import Finding, check, kind
from tfd_notebook.model.spec import Endpoint
from tfd_notebook.net.probe import Probe, probe_many
from tfd_notebook.resolvers.validation import TF_CONFIG_FORM, Tasks, checked, parsed

#: The jobs that TensorFlow's strategies and ``TF_CONFIG`` know.
JOBS = ("chief", "master", "worker", "ps", "evaluator")
_ASK_SECONDS = 2.0
_WHERE = "TF_CONFIG"

ODD_JOB = kind(
    "TFD801", "warning", "odd job name", "strategies know no such job, and its tasks do nothing"
)
NO_CHIEF = kind(
    "TFD802",
    "warning",
    "no chief",
    "with parameter servers it is the chief that coordinates, and without one nothing is scheduled",
)
UNREADABLE = kind(
    "TFD803",
    "error",
    "TF_CONFIG that cannot be read",
    "strategies raise an error, or train on this host alone",
)
LATE = kind(
    "TFD804",
    "warning",
    "TF_CONFIG that came too late",
    "TensorFlow set up its devices for this process alone, and strategies of several hosts need "
    "to be made before that",
)
TWICE = kind(
    "TFD805",
    "error",
    "duplicate address",
    "the tasks cannot both listen there, and one of them is waited for for ever",
)
LOOPBACK = kind(
    "TFD806",
    "error",
    "localhost advertised to other hosts",
    "on each other host it means that host, where the task is not",
)
ANOTHER = kind(
    "TFD807",
    "error",
    "another task answers",
    "TensorFlow would hang or compute at the wrong place: it does not look who answers",
)
SHARED = kind(
    "TFD808",
    "error",
    "port shared by two servers",
    "each connection gets to one of them by chance",
)
SILENT = kind("TFD809", "error", "nobody answers", "TensorFlow would wait for it without a word")


def _is(who: str | None, job: str, index: int) -> bool:
    return who in (None, f"{job}:{index}")


@dataclass(frozen=True)
class Described:
    """The tasks that a description names, and who answered at their addresses.

    Parameters
    ----------
    tasks : mapping of str to mapping of int to str
        Addresses by job and index.
    place : str
        What describes them.
    answers : mapping of str to Probe
        By address; empty where nobody was asked.
    may_be : callable
        Whether a server that calls itself so, or tells nothing, can be the task of a job and index.
    """

    tasks: Tasks
    place: str
    answers: Mapping[str, Probe]
    may_be: Callable[[str | None, str, int], bool] = _is

    @classmethod
    def asked(
        cls, tasks: Tasks, place: str, may_be: Callable[[str | None, str, int], bool] = _is
    ) -> Described:
        """Ask all addresses at the same time."""
        addresses = list(dict.fromkeys(_flat(tasks).values()))
        answers = probe_many(addresses, _ASK_SECONDS)
        return cls(tasks, place, dict(zip(addresses, answers, strict=True)), may_be)


def _flat(tasks: Tasks) -> dict[str, str]:
    return {f"{job}:{index}": at for job, found in tasks.items() for index, at in found.items()}


def _parts(task: str) -> tuple[str, int]:
    job, _, index = task.partition(":")
    return job, int(index)


def _read() -> Tasks:
    """Return the tasks that TF_CONFIG names.

    Raises
    ------
    ResolveError
    """
    text = os.environ.get(_WHERE, "").strip()
    found = parsed(text, _WHERE, TF_CONFIG_FORM) if text else {}
    cluster = found.get("cluster") or {} if isinstance(found, Mapping) else found
    return checked(cluster, _WHERE)


def of_environment() -> Described | None:
    """Return what TF_CONFIG describes; None where there is none, or it cannot be read."""
    try:
        tasks = _read()
    except ResolveError:
        return None
    return Described.asked(tasks, _WHERE) if tasks else None


@check("process")
def unreadable(_: None) -> Iterator[Finding]:
    """Find a TF_CONFIG that cannot be meant."""
    try:
        _read()
    except ResolveError as error:
        yield UNREADABLE.found(error.what, str(error.fix), _WHERE)


@check("process")
def late(_: None) -> Iterator[Finding]:
    """Find a TF_CONFIG that names several tasks after TensorFlow was set up for one."""
    try:
        count = len(_flat(_read()))
    except ResolveError:
        return
    if count > 1 and context.runs_alone():
        yield LATE.found(
            f"TF_CONFIG names {count} tasks, and TensorFlow is in use without them",
            "restart the kernel, set TF_CONFIG before anything else, and make the strategy first",
            _WHERE,
        )


@check("tasks")
def odd_jobs(seen: Described) -> Iterator[Finding]:
    """Find jobs that TensorFlow does not know."""
    for job in seen.tasks:
        if job not in JOBS:
            near = difflib.get_close_matches(job, JOBS, n=1)
            yield ODD_JOB.found(
                f"there is a job {job!r}",
                (f"did you mean {near[0]!r}? " if near else "") + f"use {', '.join(JOBS)}",
                seen.place,
            )


@check("tasks")
def no_chief(seen: Described) -> Iterator[Finding]:
    """Find parameter servers that nobody coordinates."""
    if seen.place == _WHERE and "ps" in seen.tasks and not {"chief", "master"} & set(seen.tasks):
        yield NO_CHIEF.found(
            "there are parameter servers and no chief",
            'add "chief": ["host:port"], and have that task run the coordinator',
            seen.place,
        )


@check("tasks")
def duplicates(seen: Described) -> Iterator[Finding]:
    """Find addresses of several tasks."""
    holders: dict[str, list[str]] = {}
    for task, address in _flat(seen.tasks).items():
        holders.setdefault(address, []).append(task)
    for address, tasks in holders.items():
        if len(tasks) > 1:
            yield TWICE.found(
                f"{address} is the address of {', '.join(tasks)}",
                "give each task a port of its own",
                seen.place,
            )


@check("tasks")
def localhost(seen: Described) -> Iterator[Finding]:
    """Find loopback addresses among those of several hosts."""
    yield from advertised(_flat(seen.tasks), seen.place)


def advertised(addresses: Mapping[str, str], place: str, others: bool = False) -> Iterator[Finding]:
    """Find loopback addresses where others than this host use them.

    Parameters
    ----------
    addresses : mapping of str to str
        By task.
    place : str
    others : bool
        Whether it is known that other hosts use them. Default: where some address is another host.
    """
    local = {task: at for task, at in addresses.items() if is_loopback(Endpoint.parse(at).host)}
    if local and (others or len(local) < len(addresses)):
        named = ", ".join(f"{task} at {address}" for task, address in list(local.items())[:3])
        yield LOOPBACK.found(
            f"{named}: other hosts cannot reach it there",
            "use a name or an address by which the other hosts reach this one",
            place,
        )


def is_loopback(host: str) -> bool:
    """Whether a name or address means each host itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


@check("tasks")
def answers(seen: Described) -> Iterator[Finding]:
    """Find tasks that do not answer, and addresses where somebody else does."""
    for task, address in _flat(seen.tasks).items():
        found = seen.answers.get(address)
        if found is None:
            continue
        if not found.alive:
            where = f"{found.state}, {found.reason}" if found.reason else found.state
            yield SILENT.found(
                f"{task} at {address}: {where}", "start it, or correct its address", seen.place
            )
        elif found.kind != "server" or not seen.may_be(found.task, *_parts(task)):
            yield ANOTHER.found(
                f"{found.task or f'a {found.kind}'} answers at {address}, the address of {task}",
                "correct the address, or the numbers of the tasks",
                seen.place,
            )


@check("tasks")
def shared(seen: Described) -> Iterator[Finding]:
    """Find ports of this host at which several processes listen."""
    yield from shared_ports(_flat(seen.tasks), seen.place)


def shared_ports(addresses: Mapping[str, str], place: str) -> Iterator[Finding]:
    """Find ports of this host at which several processes listen.

    Parameters
    ----------
    addresses : mapping of str to str
        By task.
    place : str
    """
    mine = _own_hosts()
    for task, address in addresses.items():
        at = Endpoint.parse(address)
        if at.host in mine and len(pids := sorted(set(_listening(at.port)))) > 1:
            yield SHARED.found(
                f"processes {', '.join(map(str, pids))} listen at port {at.port}, that of {task}",
                "end all but one, or give them ports of their own",
                place,
            )


def _own_hosts() -> set[str]:
    found = {"localhost", "127.0.0.1", "::1"}
    found.update(a.address for some in psutil.net_if_addrs().values() for a in some)
    return found


def _listening(port: int) -> Iterable[int]:
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):  # not for every user on every system
        return ()
    return (
        c.pid
        for c in connections
        if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid
    )
