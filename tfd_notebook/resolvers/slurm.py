"""Resolver for the tasks of a Slurm step, an allocation or a different Slurm job."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from tfd_notebook.errors import Malformed, NoAnswer, NoTasks, NotThere, UsageError
from tfd_notebook.model.spec import Endpoint, check_count
from tfd_notebook.net import slurm_queue
from tfd_notebook.net.slurm_queue import het_components, why_pending
from tfd_notebook.resolvers.base import Resolver
from tfd_notebook.resolvers.validation import AddressesByJob

#: Timeout for one command that queries Slurm's controller, in seconds.
REQUEST_SECONDS = 10.0
#: Limit of the hosts, and of the tasks. A larger number is a typo.
_MAX_HOSTS = 100_000
#: Limit of the name of a host, and of the digits of a number in it.
_MAX_NAME, _MAX_DIGITS = 255, 9


class SlurmResolver(Resolver):
    """The tasks of this process's Slurm step, numbered by their ranks.

    In an allocation without a step, these are the tasks that ``srun`` would start. For a
    heterogeneous job, these are the tasks of all its components. The hosts are in Slurm's order,
    ``n2`` before ``n10``. The ranks are assigned to hosts as by Slurm (``--distribution`` block,
    cyclic or plane).

    The resolver does not change environment variables. To give each task its own GPUs, use
    Slurm's ``--gpus-per-task``.

    Parameters
    ----------
    jobs : mapping of str to int, optional
        The number of tasks of each TensorFlow job. As in TensorFlow, the first ranks go to the
        alphabetically first job. Default: all tasks are workers.
    port_base : int
        Port of the first task of a host. Each further task has the next port. Default 8888.
    gpus_per_node : int, optional
        GPUs of each host, shared evenly by its tasks. Default: the tasks are probed.
    gpus_per_task : int, optional
        GPUs of each task; replaces `gpus_per_node`.
    tasks_per_node : int or mapping of str to int, optional
        Tasks of each host, or of each host by name. Default: the numbers of Slurm.
    rpc_layer : str
        Default ``"grpc"``.
    job : int or str, optional
        The number of a different Slurm job. Each call looks up its hosts with ``squeue``.

    See Also
    --------
    tf.distribute.cluster_resolver.SlurmClusterResolver
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        rpc_layer: str | None = "grpc",
        job: int | str | None = None,
    ) -> None:
        super().__init__(rpc_layer=rpc_layer)
        for name, count in (jobs or {}).items():
            check_count(f"jobs[{name!r}]", count)
        for name, gpus in (("gpus_per_node", gpus_per_node), ("gpus_per_task", gpus_per_task)):
            if gpus is not None:
                check_count(name, gpus)
        if isinstance(tasks_per_node, int):
            check_count("tasks_per_node", tasks_per_node)
        if job is not None and not re.fullmatch(r"\d+(_\d+)?", str(job)):
            raise UsageError(
                f"invalid job={job!r}: expected the number of a Slurm job", fix="see squeue --me"
            )
        self._jobs = dict(jobs or {})
        self._port_base = check_count("port_base", port_base, 65535, 1)
        self._gpus_per_node = gpus_per_node
        self._gpus_per_task = gpus_per_task
        self._tasks_per_node = tasks_per_node
        self._job = None if job is None else str(job)

    @property
    def place(self) -> str:
        if self._job:
            return f"Slurm's job {self._job}"
        number = os.environ.get("SLURM_JOB_ID", "?")
        step = os.environ.get("SLURM_STEP_ID")
        return f"Slurm's step {number}.{step}" if _in_step() else f"Slurm's job {number}"

    def _declared_accelerators(self, *task: Any) -> Mapping[str, int] | None:
        gpus = self._gpus_per_task
        if gpus is None and self._gpus_per_node is not None:
            gpus = self._gpus_per_node // max(self._counts().values(), default=1)
        return None if gpus is None else {"GPU": gpus} if gpus else {}

    def _find(self) -> AddressesByJob:
        addresses = [
            str(Endpoint(host, check_count("port_base + task", self._port_base + rank, 65535, 1)))
            for host, rank in self._placement()
        ]
        jobs = self._jobs or {"worker": len(addresses)}
        if sum(jobs.values()) != len(addresses):
            raise UsageError(
                f"invalid jobs={self._jobs}: expected {len(addresses)} tasks as in {self.place}, "
                f"got {sum(jobs.values())}",
                fix=f"pass {len(addresses)} tasks, or change the number with srun --ntasks",
            )
        remaining = iter(addresses)
        return {job: [next(remaining) for _ in range(count)] for job, count in sorted(jobs.items())}

    def _identity(self) -> tuple[str, int] | None:
        if self._job or not _in_step():
            return None
        rank = _number("SLURM_PROCID")
        placement = self._placement()
        if rank >= len(placement):
            raise Malformed(
                f"{self.place}: invalid rank {rank}: expected less than {len(placement)}",
                fix="leave Slurm's variables as they are",
            )
        node = os.environ.get("SLURMD_NODENAME")
        if node and placement[rank][0] != node:
            raise Malformed(
                f"{self.place}: rank {rank} is on {node}, and should be on {placement[rank][0]}",
                fix="use srun --distribution block, cyclic or plane, or pass tasks_per_node=",
            )
        for job, count in sorted(self._jobs.items()):
            if rank < count:
                return job, rank
            rank -= count
        return "worker", rank

    def _placement(self) -> list[tuple[str, int]]:
        """Return host and local rank of each task, by rank."""
        counts = self._counts()
        if not counts or not all(counts.values()):
            raise NoTasks(f"{self.place} has no tasks", fix="start tasks with srun")
        if sum(counts.values()) > _MAX_HOSTS:
            raise Malformed(
                f"{self.place}: {sum(counts.values())} tasks: expected at most {_MAX_HOSTS}",
                fix="pass tasks_per_node={host: tasks}",
            )
        block = _block_size(counts) if not self._job else max(counts.values())
        placed = dict.fromkeys(counts, 0)
        placement: list[tuple[str, int]] = []
        while len(placement) < sum(counts.values()):
            for host, count in counts.items():
                for _ in range(min(block, count - placed[host])):
                    placement.append((host, placed[host]))
                    placed[host] += 1
        return placement

    def _counts(self) -> dict[str, int]:
        """Return the number of tasks of each host, in Slurm's order."""
        tasks_per_node = self._tasks_per_node
        if isinstance(tasks_per_node, Mapping):
            return dict(tasks_per_node)
        hosts, counts = self._queued_job() if self._job else _environment()
        if tasks_per_node is not None:
            counts = [tasks_per_node] * len(hosts)
        if len(counts) != len(hosts):
            raise Malformed(
                f"{self.place}: {len(hosts)} hosts, but the number of tasks of {len(counts)}",
                fix="pass tasks_per_node={host: tasks}",
            )
        tasks_by_host = dict.fromkeys(hosts, 0)
        for host, count in zip(hosts, counts, strict=True):
            tasks_by_host[host] += count  # two components of a job can share a host
        return tasks_by_host

    def _queued_job(self) -> tuple[list[str], list[int]]:
        """Return hosts and tasks of a job as ``squeue`` reports them.

        It prints a line for each component of a heterogeneous job, and for each task of an array.
        """
        columns = "State:20,NumTasks:12,HetJobOffset:12,NodeList:60000"
        command = ["squeue", "--noheader", "--job", str(self._job), "--Format", columns]
        lines = [line.split() for line in _slurm_output(command, self.place).splitlines()]
        lines = [fields for fields in lines if fields]
        if not lines:
            raise NotThere(f"{self.place} has ended or never existed", fix="see squeue and sacct")
        if len(lines) > 1:
            if not all(len(fields) > 2 and slurm_queue.is_count(fields[2]) for fields in lines):
                raise NoTasks(
                    f"{self.place} is an array of {len(lines)} jobs",
                    fix=f'pass one of them, such as job="{self._job}_1"',
                )
            lines.sort(key=lambda fields: int(fields[2]))
        hosts: list[str] = []
        counts: list[int] = []
        for fields in lines:
            more_hosts, tasks = self._component(fields)
            hosts += more_hosts
            counts += [tasks] * len(more_hosts)
        return hosts, counts

    def _component(self, fields: list[str]) -> tuple[list[str], int]:
        """Return the hosts and the tasks of each host in a line of ``squeue``."""
        if fields[0] != "RUNNING":
            reason, fix = why_pending(str(self._job)) if fields[0] == "PENDING" else ("", "")
            message = f"{self.place} does not run: it is {fields[0]}"
            raise NoTasks(
                f"{message} ({reason})" if reason else message, fix=fix or "wait until it runs"
            )
        if len(fields) < 4 or not slurm_queue.is_count(fields[1]):
            raise Malformed(
                f"{self.place}: invalid output of squeue {' '.join(fields)[:200]!r}: expected "
                "state, number of tasks, component and hosts",
                fix="check that squeue is Slurm's command",
            )
        hosts = expand(fields[3], self.place)
        tasks = int(fields[1])
        if self._tasks_per_node is None and tasks % len(hosts):
            raise Malformed(
                f"{self.place}: {tasks} tasks on {len(hosts)} hosts, and squeue does not report "
                "the number per host",
                fix="pass tasks_per_node={host: tasks}",
            )
        return hosts, tasks // len(hosts)


def expand(hosts: str, place: str) -> list[str]:
    """Return the hosts of a Slurm host list, in its order: ``"n[1-2,10]"`` has 3 hosts.

    Raises
    ------
    Malformed
        The list is invalid.
    """
    expanded: list[str] = []
    try:
        if not re.fullmatch(r"(?!,)(?:[^\[\],]|\[[\d,-]+\]|,(?!,|$))+", hosts):
            raise ValueError
        for part in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", hosts):
            expanded += _expand_part(part)
            if len(expanded) > _MAX_HOSTS:
                raise ValueError
    except (ValueError, RecursionError):
        raise Malformed(
            f"{place}: invalid list of hosts {hosts[:200]!r}", fix='use a list as "n[1-2,10],login"'
        ) from None
    return expanded


def _expand_part(part: str) -> list[str]:
    head, bracket, tail = part.partition("[")
    if len(head) > _MAX_NAME:
        raise ValueError
    if not bracket:
        return [part]
    ranges, _, rest = tail.partition("]")
    ends = _expand_part(rest)
    if len(head) + _MAX_DIGITS + len(ends[0]) > _MAX_NAME:
        raise ValueError
    numbers: list[str] = []
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        if max(len(first), len(last)) > _MAX_DIGITS:
            raise ValueError
        span = range(int(first), int(last or first) + 1)
        if not 0 < (len(numbers) + len(span)) * len(ends) <= _MAX_HOSTS or not span:
            raise ValueError
        numbers += [str(number).zfill(len(first)) for number in span]
    return [f"{head}{number}{end}" for number in numbers for end in ends]


def _in_step() -> bool:
    return "SLURM_STEP_NODELIST" in os.environ


def _environment() -> tuple[list[str], list[int]]:
    """Return the hosts, and the tasks of each, of this process's step or Slurm job."""
    if _in_step():
        return _hosts_and_tasks("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
    # The variables without a component are missing, or describe the first one only.
    hosts: list[str] = []
    counts: list[int] = []
    for component in range(het_components()):
        suffix = f"_HET_GROUP_{component}"
        names = (f"SLURM_JOB_NODELIST{suffix}", f"SLURM_TASKS_PER_NODE{suffix}")
        more_hosts, more_counts = _hosts_and_tasks(*names)
        hosts += more_hosts
        counts += more_counts
    if hosts:
        return hosts, counts
    if not os.environ.get("SLURM_JOB_NODELIST"):
        raise NotThere(
            "SLURM_JOB_NODELIST is not set: this process is not in a Slurm allocation",
            fix="start it with srun or sbatch, or pass a job: SlurmResolver(job=1234)",
        )
    return _hosts_and_tasks("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE")


def _hosts_and_tasks(hosts: str, tasks: str) -> tuple[list[str], list[int]]:
    """Return the hosts, and the tasks of each, in these two variables."""
    counts: list[int] = []
    text = os.environ.get(tasks, "")
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part)
        if not match or len(counts) + int(match[2] or 1) > _MAX_HOSTS:
            raise Malformed(f"invalid {tasks}={text[:200]!r}", fix='use a list as "3(x2),1"')
        counts += [int(match[1])] * int(match[2] or 1)
    return expand(os.environ[hosts], f"Slurm's {hosts}"), counts


def _block_size(counts: Mapping[str, int]) -> int:
    """Return the number of consecutive ranks that Slurm places on one host."""
    method = re.split(r"[:,]", os.environ.get("SLURM_DISTRIBUTION", "block").lower())[0]
    if not _in_step() or method in ("block", "*", ""):
        return max(counts.values())
    if method == "cyclic":
        return 1
    if method.startswith("plane"):
        return _number("SLURM_DIST_PLANESIZE", least=1)
    raise Malformed(
        f"unsupported SLURM_DISTRIBUTION={method!r}: the hosts of the ranks are unknown",
        fix="use srun --distribution block, cyclic or plane",
    )


def _number(name: str, least: int = 0) -> int:
    text = os.environ.get(name, "")
    if not re.fullmatch(r"\d{1,9}", text) or int(text) < least:
        raise Malformed(
            f"invalid {name}={text[:200]!r}: expected a number",
            fix="leave Slurm's variables as they are",
        )
    return int(text)


def _slurm_output(command: list[str], place: str) -> str:
    if shutil.which(command[0]) is None:
        raise NotThere(
            f"{place}: command {command[0]} not found", fix="use a host that can submit jobs"
        )
    try:
        completed = slurm_queue.run(command, REQUEST_SECONDS)
    except subprocess.TimeoutExpired:
        raise NoAnswer(
            f"{place}: {command[0]} did not answer within {REQUEST_SECONDS:g} s",
            fix="see scontrol ping",
        ) from None
    if completed.returncode == 0:
        return completed.stdout
    error = completed.stderr.strip()
    if "Invalid job id" in error:
        return ""
    raise NoAnswer(f"{place}: {command[0]} failed: {error}", fix="see scontrol ping")
