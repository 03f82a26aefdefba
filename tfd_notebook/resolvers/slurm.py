"""The tasks of a Slurm step, of an allocation, or of any other job."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tfd_notebook.errors import Malformed, NoAnswer, NoTasks, NotThere, UsageError
from tfd_notebook.model.spec import Endpoint, check_count
from tfd_notebook.resolvers.base import Resolver
from tfd_notebook.resolvers.slurm_queue import why_pending
from tfd_notebook.resolvers.validation import Found, check_port

#: Seconds for an answer of Slurm's controller.
_ASK_SECONDS = 10.0
#: More hosts than any cluster has: a range with a slip of the finger.
_MOST_HOSTS = 100_000


class SlurmResolver(Resolver):
    """The tasks of the Slurm step that this process is in, numbered by their ranks.

    In an allocation, but in no step, these are the tasks that ``srun`` would start there. The hosts
    come in Slurm's order, ``n2`` before ``n10``, and each rank is where Slurm put it
    (``--distribution`` block, cyclic or plane).

    No environment variable is changed: let Slurm show each task its GPUs (``--gpus-per-task``).

    Parameters
    ----------
    jobs : mapping of str to int, optional
        How many tasks each job of TensorFlow has; the first ranks go to the job whose name comes
        first in the alphabet, as TensorFlow has it. Default: all are workers.
    port_base : int
        Port of the first task of a host; each further one has the next. Default 8888.
    gpus_per_node : int, optional
        GPUs of each host, shared evenly by its tasks. Default: the tasks themselves are asked.
    gpus_per_task : int, optional
        GPUs of each task, instead.
    tasks_per_node : int or mapping of str to int, optional
        Tasks of each host, or of each host by name. Default: what Slurm says.
    rpc_layer : str
        Default ``"grpc"``.
    job : int or str, optional
        The number of another Slurm job: Slurm is asked where it runs, each time.

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
            raise UsageError(f"job={job!r} is no number of a Slurm job", fix="see squeue --me")
        self._jobs = dict(jobs or {})
        self._port_base = check_port("port_base", port_base)
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

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Return the GPUs of a task: as given, or else as `Resolver.num_accelerators` does."""
        gpus = self._gpus_per_task
        if gpus is None and self._gpus_per_node is not None:
            gpus = self._gpus_per_node // max(self._counts().values(), default=1)
        if gpus is None:
            return super().num_accelerators(task_type, task_id, config_proto)
        return Counter({"GPU": gpus} if gpus else {})

    def _find(self) -> Found:
        addresses = [
            str(Endpoint(host, check_port("port_base + task", self._port_base + local)))
            for host, local in self._places()
        ]
        jobs = self._jobs or {"worker": len(addresses)}
        if sum(jobs.values()) != len(addresses):
            raise UsageError(
                f"jobs={self._jobs} has {sum(jobs.values())} tasks, but {self.place} has "
                f"{len(addresses)}",
                fix=f"name {len(addresses)} in all, or start as many with srun --ntasks",
            )
        rest = iter(addresses)
        return {job: [next(rest) for _ in range(count)] for job, count in sorted(jobs.items())}

    def _identity(self) -> tuple[str, int] | None:
        if self._job or not _in_step():
            return None
        rank = _number("SLURM_PROCID")
        places = self._places()
        if rank >= len(places):
            raise Malformed(
                f"{self.place}: this is rank {rank}, and there are {len(places)} tasks",
                fix="leave Slurm's variables as they are",
            )
        node = os.environ.get("SLURMD_NODENAME")
        if node and places[rank][0] != node:
            raise Malformed(
                f"{self.place}: rank {rank} is on {node}, and should be on {places[rank][0]}",
                fix="use srun --distribution block, cyclic or plane, or say tasks_per_node=",
            )
        for job, count in sorted(self._jobs.items()):
            if rank < count:
                return job, rank
            rank -= count
        return "worker", rank

    def _places(self) -> list[tuple[str, int]]:
        """Return host and number on that host of each task, by rank."""
        counts = self._counts()
        if not counts or not all(counts.values()):
            raise NoTasks(f"{self.place} has no tasks", fix="start some with srun")
        rounds = _round(counts) if not self._job else max(counts.values())
        taken = dict.fromkeys(counts, 0)
        places: list[tuple[str, int]] = []
        while len(places) < sum(counts.values()):
            for host, count in counts.items():
                for _ in range(min(rounds, count - taken[host])):
                    places.append((host, taken[host]))
                    taken[host] += 1
        return places

    def _counts(self) -> dict[str, int]:
        """Return the number of tasks of each host, in Slurm's order."""
        wanted = self._tasks_per_node
        if isinstance(wanted, Mapping):
            return dict(wanted)
        hosts, counts = self._asked() if self._job else _environment()
        if wanted is not None:
            counts = [wanted] * len(hosts)
        if len(counts) != len(hosts):
            raise Malformed(
                f"{self.place}: {len(hosts)} hosts, but the tasks of {len(counts)}",
                fix="say tasks_per_node={host: tasks}",
            )
        return dict(zip(hosts, counts, strict=True))

    def _asked(self) -> tuple[list[str], list[int]]:
        """Return hosts and tasks of a job as Slurm tells them now."""
        form = "State:20,NumTasks:12,NodeList:60000"
        command = ["squeue", "--noheader", "--job", str(self._job), "--Format", form]
        words = _said_by_slurm(command, self.place).split()
        if not words:
            raise NotThere(f"{self.place} is over, or never was", fix="see squeue and sacct")
        if words[0] != "RUNNING":
            why, fix = why_pending(str(self._job)) if words[0] == "PENDING" else ("", "")
            what = f"{self.place} does not run: it is {words[0]}"
            raise NoTasks(f"{what} ({why})" if why else what, fix=fix or "wait until it runs")
        if len(words) < 3 or not words[1].isdecimal():
            raise Malformed(
                f"{self.place}: squeue says {' '.join(words)!r}, and not how many tasks are where",
                fix="see what squeue is: it should be Slurm's own",
            )
        hosts = expand(words[2], self.place)
        tasks = int(words[1])
        if self._tasks_per_node is None and tasks % len(hosts):
            raise Malformed(
                f"{self.place}: {tasks} tasks on {len(hosts)} hosts; Slurm does not tell which",
                fix="say tasks_per_node={host: tasks}",
            )
        return hosts, [tasks // len(hosts)] * len(hosts)


def expand(hosts: str, place: str) -> list[str]:
    """Return the hosts of a list of Slurm's, in its order: ``"n[1-2,10]"`` are three.

    Raises
    ------
    Malformed
        It is no such list.
    """
    found: list[str] = []
    try:
        if not re.fullmatch(r"(?!,)(?:[^\[\],]|\[[\d,-]+\]|,(?!,|$))+", hosts):
            raise ValueError
        for part in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", hosts):
            found += _expand_one(part)
    except ValueError:
        raise Malformed(
            f"{place}: {hosts!r} is no list of hosts", fix='such as "n[1-2,10],login"'
        ) from None
    return found


def _expand_one(part: str) -> Iterable[str]:
    head, bracket, tail = part.partition("[")
    if not bracket:
        return [part]
    ranges, _, rest = tail.partition("]")
    numbers: list[str] = []
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        span = range(int(first), int(last or first) + 1)
        if not 0 < len(span) <= _MOST_HOSTS:
            raise ValueError(piece)
        numbers += [str(number).zfill(len(first)) for number in span]
    return [f"{head}{number}{end}" for number in numbers for end in _expand_one(rest)]


def _in_step() -> bool:
    return "SLURM_STEP_NODELIST" in os.environ


def _environment() -> tuple[list[str], list[int]]:
    """Return hosts, and tasks of each, of the step that this process is in, or of its job."""
    hosts, tasks = (
        ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
        if _in_step()
        else ("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE")
    )
    place = f"Slurm's {hosts}"
    if not os.environ.get(hosts):
        raise NotThere(
            "SLURM_JOB_NODELIST is not set: this process is in no allocation of Slurm",
            fix="start it with srun or sbatch, or name a job: SlurmResolver(job=1234)",
        )
    counts: list[int] = []
    text = os.environ.get(tasks, "")
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match or int(match[2] or 1) > _MOST_HOSTS:
            raise Malformed(f"{tasks}={text!r} cannot be read", fix='such as "3(x2),1"')
        counts += [int(match[1])] * int(match[2] or 1)
    return expand(os.environ[hosts], place), counts


def _round(counts: Mapping[str, int]) -> int:
    """Return how many ranks in a row a host gets, before it is the next one's turn."""
    method = re.split(r"[:,]", os.environ.get("SLURM_DISTRIBUTION", "block").lower())[0]
    if not _in_step() or method in ("block", "*", ""):
        return max(counts.values())
    if method == "cyclic":
        return 1
    if method.startswith("plane"):
        return _number("SLURM_DIST_PLANESIZE", least=1)
    raise Malformed(
        f"SLURM_DISTRIBUTION={method!r}: which rank is on which host is not known",
        fix="use srun --distribution block, cyclic or plane",
    )


def _number(name: str, least: int = 0) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal() or int(text) < least:
        raise Malformed(f"{name}={text!r} is no number", fix="leave Slurm's variables as they are")
    return int(text)


def _said_by_slurm(command: list[str], place: str) -> str:
    if shutil.which(command[0]) is None:
        raise NotThere(
            f"{place}: there is no command {command[0]} here",
            fix="ask on a host that can submit jobs",
        )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS)
    except subprocess.TimeoutExpired:
        raise NoAnswer(
            f"{place}: {command[0]} did not answer within {_ASK_SECONDS:g} s",
            fix="see scontrol ping",
        ) from None
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.strip()
    if "Invalid job id" in said:
        return ""
    raise NoAnswer(f"{place}: {command[0]} failed: {said}", fix="see scontrol ping")
