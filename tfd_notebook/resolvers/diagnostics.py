"""Checks of a cluster description, and of the servers at its addresses."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import psutil

from tfd_notebook._compat.tf_coordinator import context
from tfd_notebook.errors import ResolveError, nearest
from tfd_notebook.model.diagnostics import Finding, check, kind
from tfd_notebook.model.resolution import (
    SEPARATE_EVALUATOR,
    SEPARATE_PORTS,
    TaskStatus,
    missing_step,
)
from tfd_notebook.model.spec import Endpoint
from tfd_notebook.net.task_probe import MayBe, is_same_task, probe_tasks
from tfd_notebook.resolvers.validation import (
    Tasks,
    checked,
    task_of,
    tf_config,
    unlisted,
)

#: The jobs that TensorFlow's strategies and ``TF_CONFIG`` support.
JOBS = ("chief", "master", "worker", "ps", "evaluator")
_PROBE_SECONDS = 2.0
_WHERE = "TF_CONFIG"

UNKNOWN_JOB = kind(
    "TFD801",
    "warning",
    "unknown job name",
    "strategies ignore the job, so that its tasks do nothing",
)
NO_CHIEF = kind(
    "TFD802",
    "warning",
    "no chief",
    "the chief coordinates parameter servers; without a chief, nothing is scheduled",
)
INVALID = kind(
    "TFD803",
    "error",
    "invalid TF_CONFIG",
    "strategies raise an error, or train on this host alone",
)
LATE = kind(
    "TFD804",
    "warning",
    "TF_CONFIG set too late",
    "TensorFlow has set up its devices for this process alone, and strategies of several hosts "
    "must be created before that",
)
DUPLICATE = kind(
    "TFD805",
    "error",
    "duplicate address",
    "only one of the tasks can listen there, and TensorFlow waits for the other indefinitely",
)
LOOPBACK = kind(
    "TFD806",
    "error",
    "localhost advertised to other hosts",
    "other hosts resolve it to themselves, and the task does not run there",
)
WRONG_TASK = kind(
    "TFD807",
    "error",
    "another task answers",
    "TensorFlow would hang or compute on the wrong task: it does not check the server's identity",
)
SHARED = kind(
    "TFD808",
    "error",
    "port shared by two servers",
    "each connection reaches one of them at random",
)
EVALUATOR = kind(
    "TFD810",
    "error",
    "evaluator in a cluster with parameter servers",
    "the coordinator connects to every task of the cluster, and waits without a message for the "
    "evaluator, which starts no server",
)
NO_ANSWER = kind("TFD809", "error", "no answer", "TensorFlow would wait for it without a message")


@dataclass(frozen=True)
class ClusterDescription:
    """The tasks of a cluster description, and their states.

    Parameters
    ----------
    tasks : mapping of str to mapping of int to str
        Addresses by job and index.
    place : str
        Source of the description.
    statuses : tuple of TaskStatus
        Empty if no task was probed.
    """

    tasks: Tasks
    place: str
    statuses: tuple[TaskStatus, ...] = ()

    @classmethod
    def probe(
        cls,
        tasks: Tasks,
        place: str,
        may_be: MayBe = is_same_task,
        own: tuple[str, int] | None = None,
    ) -> ClusterDescription:
        """Probe all tasks; see `tfd_notebook.net.task_probe.TaskProber`."""
        return cls(tasks, place, probe_tasks(tasks, _PROBE_SECONDS, may_be, own))


def _flat(tasks: Tasks) -> dict[str, str]:
    return {
        f"{job}:{index}": address
        for job, addresses in tasks.items()
        for index, address in addresses.items()
    }


def _read() -> tuple[Tasks, tuple[str, int] | None]:
    """Return the tasks that TF_CONFIG names, and the task of this process.

    Raises
    ------
    ResolveError
        TF_CONFIG is invalid.
    """
    config = tf_config()
    return checked(config.get("cluster") or {}, _WHERE), task_of(config.get("task"), _WHERE)


def own_task_in(tasks: Tasks) -> tuple[str, int] | None:
    """Return the task of this process by TF_CONFIG, if `tasks` has the same address for it."""
    try:
        described, own = _read()
    except ResolveError:
        return None
    if own is None:
        return None
    addresses = [each.get(own[0], {}).get(own[1]) for each in (described, tasks)]
    return own if addresses[0] is not None and addresses[0] == addresses[1] else None


def from_environment() -> ClusterDescription | None:
    """Return the cluster of TF_CONFIG; None if it is not set or invalid."""
    try:
        tasks, own = _read()
    except ResolveError:
        return None
    return ClusterDescription.probe(tasks, _WHERE, own=own) if tasks else None


@check("process")
def invalid(_: None) -> Iterator[Finding]:
    """Find an invalid TF_CONFIG."""
    try:
        tasks, own = _read()
    except ResolveError as error:
        yield INVALID.finding(error.what, str(error.fix), _WHERE)
        return
    if tasks and (what := unlisted(own, tasks)):
        yield INVALID.finding(what, 'correct "task", or add its address to "cluster"', _WHERE)


@check("process")
def late(_: None) -> Iterator[Finding]:
    """Find a TF_CONFIG that names several tasks after TensorFlow was set up for one."""
    try:
        count = len(_flat(_read()[0]))
    except ResolveError:
        return
    if count > 1 and context.runs_alone():
        yield LATE.finding(
            f"TF_CONFIG names {count} tasks, but TensorFlow is in use without them",
            "restart the kernel, set TF_CONFIG first, and then create the strategy",
            _WHERE,
        )


@check("tasks")
def unknown_jobs(description: ClusterDescription) -> Iterator[Finding]:
    """Find jobs that TensorFlow does not support."""
    for job in description.tasks:
        if job not in JOBS:
            fix = nearest(job, JOBS) + f"use {', '.join(JOBS)}"
            yield UNKNOWN_JOB.finding(f"unsupported job {job!r}", fix)


@check("tasks")
def no_chief(description: ClusterDescription) -> Iterator[Finding]:
    """Find parameter servers without a chief."""
    if (
        description.place == _WHERE
        and "ps" in description.tasks
        and not {"chief", "master"} & set(description.tasks)
    ):
        yield NO_CHIEF.finding(
            "the cluster has parameter servers but no chief",
            'add "chief": ["host:port"], and run the coordinator in that task',
        )


def _blocks_coordinator(status: TaskStatus, description: ClusterDescription) -> bool:
    is_evaluator = status.job == "evaluator" and "ps" in description.tasks
    return is_evaluator and status.state not in ("alive", "mismatch")


@check("tasks")
def waiting_for_evaluator(description: ClusterDescription) -> Iterator[Finding]:
    """Find an evaluator for which a coordinator of parameter servers waits."""
    for status in description.statuses:
        if _blocks_coordinator(status, description):
            what = f"{status.name} at {status.address} does not listen, as usual for an evaluator"
            if status.state not in ("own", "refused"):
                what = status.trouble
            yield EVALUATOR.finding(what, SEPARATE_EVALUATOR)


@check("tasks")
def duplicates(description: ClusterDescription) -> Iterator[Finding]:
    """Find addresses that several tasks share."""
    holders: dict[str, list[str]] = {}
    for task, address in _flat(description.tasks).items():
        holders.setdefault(address, []).append(task)
    for address, tasks in holders.items():
        if len(tasks) > 1:
            yield DUPLICATE.finding(
                f"{address} is the address of {', '.join(tasks)}",
                SEPARATE_PORTS,
            )


@check("tasks")
def localhost(description: ClusterDescription) -> Iterator[Finding]:
    """Find loopback addresses among those of several hosts."""
    yield from advertised(_flat(description.tasks))


def advertised(addresses: Mapping[str, str], remote: bool = False) -> Iterator[Finding]:
    """Find loopback addresses that other hosts use.

    Parameters
    ----------
    addresses : mapping of str to str
        Addresses by task.
    remote : bool
        True if other hosts use the addresses. If False, they do if any address is not loopback.
        Default False.
    """
    local = {task: at for task, at in addresses.items() if is_loopback(Endpoint.parse(at).host)}
    if local and (remote or len(local) < len(addresses)):
        named = ", ".join(f"{task} at {address}" for task, address in list(local.items())[:3])
        yield LOOPBACK.finding(
            f"{named}: other hosts cannot reach this address",
            "use a name or an address under which other hosts can reach this host",
        )


def is_loopback(host: str) -> bool:
    """Return True if a name or address is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


@check("tasks")
def answers(description: ClusterDescription) -> Iterator[Finding]:
    """Find tasks that do not answer, and addresses where a different task answers."""
    for status in description.statuses:
        fix = missing_step(status.name, status.reason, "ps" in description.tasks)
        if status.state == "mismatch":
            yield WRONG_TASK.finding(status.trouble, fix)
        elif status.is_missing and not _blocks_coordinator(status, description):
            yield NO_ANSWER.finding(status.trouble, fix)


@check("tasks")
def shared(description: ClusterDescription) -> Iterator[Finding]:
    """Find ports of this host on which several processes listen."""
    yield from shared_ports(_flat(description.tasks))


def shared_ports(addresses: Mapping[str, str]) -> Iterator[Finding]:
    """Find ports of this host, of these addresses by task, on which several processes listen."""
    local_hosts = _local_hosts()
    for task, address in addresses.items():
        endpoint = Endpoint.parse(address)
        if endpoint.host not in local_hosts:
            continue
        pids = sorted(set(_listening(endpoint.port)))
        if len(pids) > 1:
            yield SHARED.finding(
                f"processes {', '.join(map(str, pids))} listen on port {endpoint.port} of {task}",
                "end all but one of them, or give them separate ports",
            )


def _local_hosts() -> set[str]:
    hosts = {"localhost", "127.0.0.1", "::1"}
    hosts.update(a.address for interface in psutil.net_if_addrs().values() for a in interface)
    return hosts


def _listening(port: int) -> Iterable[int]:
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):  # some systems allow this to root only
        return ()
    return (
        c.pid
        for c in connections
        if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid
    )
