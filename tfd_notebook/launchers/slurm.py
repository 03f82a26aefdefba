"""``launcher="slurm"``: tasks on the nodes of Slurm jobs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from tfd_notebook.agent.bridges import stdio
from tfd_notebook.agent.task_supervisor import read_log
from tfd_notebook.errors import (
    AgentLost,
    InvalidMessage,
    LaunchError,
    StartTimeout,
    Unsupported,
    UsageError,
)
from tfd_notebook.launchers.base import OnEvent
from tfd_notebook.launchers.client.handshake import read_handshake
from tfd_notebook.launchers.client.multi_host import TaskHostGroup
from tfd_notebook.launchers.client.rendezvous import Rendezvous, RendezvousHost
from tfd_notebook.launchers.client.session import Channel
from tfd_notebook.launchers.remote import RemoteHost, RemoteLauncher
from tfd_notebook.model.events import ClusterEnded, Event, ExpiryChanged, Notice, TaskChanged
from tfd_notebook.model.spec import (
    ClusterConfig,
    Endpoint,
    Role,
    TaskState,
    check_count,
    check_text,
)
from tfd_notebook.net import optional_packages, secure_channel, slurm_queue, validation
from tfd_notebook.net.host import address_towards

_REQUEST_SECONDS = 20.0
_POLL_SECONDS = 1.0
#: Maximum seconds between the end of a Slurm job and a connection or an event of its nodes.
_END_SECONDS = 8.0
#: Seconds to wait for the final state of a job whose nodes have reported its end. By default,
#: Slurm kills a job 30 s after the first signal.
_LOSS_SECONDS = 40.0
#: Seconds in which a step ends by itself.
_STEP_SECONDS = 15.0
_OUTPUT_BYTES = 2000
_TIME = re.compile(r"\d{1,6}(:\d{1,2}){0,2}|\d{1,4}-\d{1,2}(:\d{1,2}){0,2}")
_EXTRA = re.compile(r"--[a-z][a-z-]*(=[^\s].*)?")
#: Options of sbatch that this launcher sets itself.
_OWN = (
    *("array", "cpus-per-task", "error", "input", "job-name", "no-kill", "nodes", "ntasks"),
    *("ntasks-per-node", "output", "time", "wait", "wrap"),
)
#: Variables of the kernel that a Slurm job must not inherit.
_PRIVATE = re.compile(
    r"TFD_|XDG_RUNTIME_DIR|JPY_|JUPYTER|SBATCH_(OUTPUT|ERROR|ARRAY|TIMELIMIT|REQUEUE|WAIT|JOB_NAME)"
    r"|.*(TOKEN|SECRET|PASSWORD)"
)
_SECRET_SHOWN = "(the address and the key of the cluster)"


class Slurm(RemoteLauncher):
    """Nodes of Slurm: a job starts an agent on each, which connects back to this process.

    Inside an allocation without a step, such as that of ``salloc``, the agents run there as steps.
    The agents end with the job, with the cluster, or after the grace time without a connection to
    this process. Then the job ends, too. Needs the extra ``slurm``.

    Parameters
    ----------
    nodes : int or mapping of str to int
        Number of nodes. A mapping submits one job for each role, such as
        ``{"data_worker": 2, "ps": 1}``. Tasks of another role run on all of them. Default 1.
    minimum : int, optional
        Smallest number of nodes of a job. It starts with fewer than `nodes` if Slurm cannot
        allocate more. They run all tasks. Default: `nodes`.
    partition, account, qos, gres, constraint : str, optional
        Options of ``sbatch`` with these names. Default: those of the site.
    cpus : int, optional
        CPUs of each node (``--cpus-per-task``).
    mem : str, optional
        Memory of each node, such as ``"16G"``.
    time : str
        Time limit of the jobs in Slurm's format. Default ``"1:00:00"``. The cluster ends with the
        first of them.
    prologue : str
        Lines of shell that run on the first node before the agents start, such as ``module load``.
        An existing allocation ignores them.
    python : str, optional
        Path of Python on the nodes. Default: that of this process.
    container : str, optional
        Container of the agents. An absolute path is an OCI bundle (``srun --container``). Other
        values are images for the pyxis plugin (``--container-image``).
    extra : sequence of str
        Further options of ``sbatch``, such as ``"--exclusive"``.
    address : str, optional
        Name or address of this host under which the nodes reach it. Default: the source address
        of connections to Slurm's controller.
    output : str, optional
        Directory on a shared file system for the output of the jobs, which is removed with them.
        Default ``~/.cache/tfd_notebook``.
    grace, place, secure, host, allow
        See `RemoteLauncher` and `Launcher`.
    """

    name: ClassVar[str] = "slurm"
    summary: ClassVar[str] = "on the nodes of Slurm jobs (extra: slurm)"
    ends_with: ClassVar[str] = "its kernel"

    def __init__(
        self,
        nodes: int | Mapping[str, int] = 1,
        *,
        minimum: int | None = None,
        partition: str = "",
        account: str = "",
        qos: str = "",
        gres: str = "",
        cpus: int | None = None,
        mem: str = "",
        time: str = "1:00:00",
        constraint: str = "",
        prologue: str = "",
        python: str = "",
        container: str = "",
        extra: Sequence[str] = (),
        address: str = "",
        output: str = "",
        grace: float = 600.0,
        place: Mapping[str, str | Sequence[str]] | None = None,
        secure: bool = False,
        host: str | Mapping[str, str] = "",
        allow: Iterable[str] = (),
    ) -> None:
        super().__init__(grace=grace, place=place, secure=secure, host=host, allow=allow)
        by_role = nodes if isinstance(nodes, Mapping) else {"": nodes}
        roles = [str(role) for role in Role]
        for role, count in by_role.items():
            check_count(f"nodes[{role!r}]" if role else "nodes", count, minimum=1)
            if role and role not in roles:
                raise UsageError(f"invalid nodes {role!r}: expected one of {', '.join(roles)}")
        if not by_role:
            raise UsageError("invalid nodes: expected a number, or a number for each role")
        if minimum is not None:
            check_count("minimum", minimum, minimum=1, maximum=min(by_role.values()))
        if cpus is not None:
            check_count("cpus", cpus, minimum=1)
        texts = {
            "partition": partition,
            "account": account,
            "qos": qos,
            "gres": gres,
            "mem": mem,
            "time": time,
            "constraint": constraint,
        }
        paths = {"python": python, "container": container, "address": address, "output": output}
        for option, text in {**texts, **paths}.items():
            check_text(option, text)
        if not _TIME.fullmatch(time):
            raise UsageError(
                f"invalid time {time!r}: expected Slurm's format", fix='such as "2:00:00" or "1-12"'
            )
        if not isinstance(prologue, str) or "\0" in prologue:
            raise UsageError(f"invalid prologue {prologue!r}: expected lines of shell")
        self._extra = (extra,) if isinstance(extra, str) else tuple(extra)
        for option in self._extra:
            if (
                not isinstance(option, str)
                or not option.isprintable()
                or not _EXTRA.fullmatch(option)
            ):
                raise UsageError(
                    f"invalid extra {option!r}: expected an option", fix='such as "--exclusive"'
                )
            if option[2:].partition("=")[0] in _OWN:
                raise UsageError(f"invalid extra {option!r}: the launcher sets this option")
        self._nodes = {str(role): count for role, count in by_role.items()}
        self._minimum = minimum
        self._cpus, self._texts, self._paths = cpus, texts, paths
        self._prologue = prologue
        #: The jobs of clusters that are starting, by the name of the cluster.
        self._starting: dict[str, _Jobs] = {}

    @property
    def options(self) -> dict[str, Any]:
        return {
            **super().options,
            **self._texts,
            **self._paths,
            "nodes": self._nodes.get("", dict(self._nodes)),
            "minimum": self._minimum,
            "cpus": self._cpus,
            "prologue": self._prologue,
            "extra": list(self._extra),
        }

    def hosts(self) -> list[RemoteHost]:
        raise Unsupported("the nodes of a Slurm job are known when it runs")

    def place_on(self, labels: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        by_role: dict[str, tuple[str, ...]] = {}
        for label in labels:
            _, slash, role = label.partition("/")
            if slash:
                by_role[role] = (*by_role.get(role, ()), label)
        return {**by_role, **self._place}

    def job_script(self, config: ClusterConfig) -> str:
        output = Path(self._paths["output"] or "~/.cache/tfd_notebook")
        return "\n".join(
            self._script(config, role, str(output), _SECRET_SHOWN) for role in self._nodes
        )

    def hosts_for(self, config: ClusterConfig, on_event: OnEvent) -> list[RemoteHost]:
        optional_packages.load("cryptography", 'launcher "slurm"', "slurm")
        address = self._paths["address"] or _address_towards_controller()
        rendezvous = Rendezvous(address)
        jobs = self._starting[config.name] = _Jobs(rendezvous)
        try:
            endpoint = Endpoint(address.strip("[]"), rendezvous.port)
            for role, count in self._nodes.items():
                job = _Job(role)
                job.hosts += [_SlurmHost(job, rendezvous) for _ in range(count)]
                jobs.jobs.append(job)
            rendezvous.expect(
                {
                    (str(part), node): host
                    for part, job in enumerate(jobs.jobs)
                    for node, host in enumerate(job.hosts)
                }
            )
            jobs.directory = _output_directory(self._paths["output"])
            for part, job in enumerate(jobs.jobs):
                payload = {
                    "address": str(endpoint),
                    "secret": rendezvous.secret.hex(),
                    "grace": self._grace,
                    "part": str(part),
                }
                self._submit(config, job, jobs.directory, json.dumps(payload), on_event)
                jobs.check_open(config.name)
            jobs.await_nodes(config, self._minimum, on_event)
        except BaseException:
            jobs.close()
            raise
        finally:
            self._starting.pop(config.name, None)
        return [host for job in jobs.jobs for host in job.hosts]

    def _open(
        self, hosts: Sequence[RemoteHost], config: ClusterConfig, on_event: OnEvent
    ) -> TaskHostGroup:
        jobs = list(
            {id(host.job): host.job for host in hosts if isinstance(host, _SlurmHost)}.values()
        )

        def explain(event: Event) -> None:
            # Slurm signals all processes of a job, so the agent may report its end first.
            if isinstance(event, ClusterEnded):
                ended = next(filter(None, (job.await_end(_END_SECONDS) for job in jobs)), "")
                event = replace(event, reason=ended or event.reason)
            on_event(event)

        return super()._open(hosts, config, explain)

    def abort(self, cluster: str) -> None:
        if (jobs := self._starting.get(cluster)) is not None:
            jobs.close()

    def _submit(
        self, config: ClusterConfig, job: _Job, directory: Path, payload: str, on_event: OnEvent
    ) -> None:
        """Submit a job, or start its step in this process's allocation."""
        environment = {k: v for k, v in os.environ.items() if not _PRIVATE.match(k)}
        allocation = os.environ.get("SLURM_JOB_ID", "")
        if allocation and "SLURM_STEP_ID" not in os.environ:
            job.id, job.output = allocation, directory / f"{job.role or 'step'}.log"
            nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
            if nodes.isdecimal():
                job.drop_missing(int(nodes), self._minimum, on_event)
                if int(nodes) < len(job.hosts):
                    raise LaunchError(
                        f"the allocation {allocation} has {nodes} nodes, and the cluster needs "
                        f"{self._range(job.role)}",
                        fix="pass another number as nodes= or minimum=, or allocate more nodes",
                    )
            count = len(job.hosts)
            srun = [_program("srun"), "--overlap", f"--nodes={count}", f"--ntasks={count}"]
            with job.output.open("wb") as log:
                job.step = subprocess.Popen(
                    [*srun, *self._srun()],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            assert job.step.stdin is not None
            with contextlib.suppress(BrokenPipeError), job.step.stdin as pipe:
                pipe.write(payload.encode() + b"\n")
            return
        script = self._script(config, job.role, str(directory), payload)

        def submit() -> None:
            completed = _run(
                ["sbatch", "--parsable"], input=script, env=environment, start_new_session=True
            )
            number = completed.stdout.strip().partition(";")[0]
            if completed.returncode or not number.isdecimal():
                raise LaunchError(
                    f"Slurm refused the job: {_message(completed.stderr)}",
                    fix=_limits(self._texts["partition"]),
                )
            job.id, job.output = number, directory / f"job-{number}.log"

        # Ctrl-C does not end sbatch, which may have submitted the job: its id is needed to cancel.
        with concurrent.futures.ThreadPoolExecutor(1, "tfd-sbatch") as pool:
            pool.submit(submit).result()

    def _script(self, config: ClusterConfig, role: str, directory: str, payload: str) -> str:
        """Return the batch script of a role's job."""
        nodes = self._range(role)
        set_options = {name: text for name, text in self._texts.items() if text}
        options = [
            f"--job-name=tfd-{config.name}" + (f"-{role}" if role else ""),
            f"--nodes={nodes}",
            # With a range and a number of tasks, Slurm allocates the smallest number of nodes.
            *(["--ntasks-per-node=1"] if nodes.isdecimal() else []),
            *(f"--{name}={text}" for name, text in set_options.items()),
            *([f"--cpus-per-task={self._cpus}"] if self._cpus else []),
            f"--output={directory}/job-%j.log",
            "--no-requeue",
            "--no-kill",
            *self._extra,
        ]
        lines = [f"#SBATCH {shlex.quote(option)}" for option in options]
        count = '"$SLURM_JOB_NUM_NODES"'
        start = f"srun --nodes={count} --ntasks={count} {shlex.join(self._srun())}"
        here = ["exec " + start + " <<'TFD_END'", payload, "TFD_END", ""]
        return "\n".join(["#!/bin/sh", *lines, *self._prologue.splitlines(), *here])

    def _range(self, role: str) -> str:
        """Return the number of a job's nodes, or the smallest and the largest."""
        count = self._nodes[role]
        least = count if self._minimum is None else min(self._minimum, count)
        return str(count) if least == count else f"{least}-{count}"

    def _srun(self) -> list[str]:
        """Return the arguments of srun that start an agent, without the number of nodes."""
        container = self._paths["container"]
        kind = "--container" if container.startswith("/") else "--container-image"
        return [
            "--ntasks-per-node=1",
            "--no-kill",
            *([f"--cpus-per-task={self._cpus}"] if self._cpus else []),
            *([f"{kind}={container}"] if container else []),
            self._paths["python"] or sys.executable,
            "-u",
            "-c",
            stdio.bootstrap("slurm_node"),
        ]


@dataclass
class _Job:
    """A Slurm job, or a step in the allocation of this process.

    Parameters
    ----------
    role : str
        The role of its tasks; empty for all roles.
    hosts : list of _SlurmHost
        Its nodes, by Slurm's number of the node in the job.
    """

    role: str
    hosts: list[_SlurmHost] = field(default_factory=list)
    id: str = ""
    output: Path | None = None
    step: subprocess.Popen[bytes] | None = None
    cancelled: bool = False

    def drop_missing(self, nodes: int, minimum: int | None, on_event: OnEvent) -> None:
        """Drop the hosts that the job lacks, if it has at least `minimum` nodes."""
        if minimum is None or not minimum <= nodes < len(self.hosts):
            return
        on_event(Notice("info", f"Slurm job {self.id} has {nodes} of {len(self.hosts)} nodes"))
        for host in self.hosts[nodes:]:
            host.close()
        del self.hosts[nodes:]

    def ended(self) -> str:
        """Return a sentence with Slurm's state if the job has ended, or an empty string."""
        if self.step is not None and self.step.poll() is not None:
            return f"srun in Slurm job {self.id} ended with status {self.step.returncode}"
        status = _status(self.id)
        return status.ended(self.id) if status is not None else ""

    def await_end(self, seconds: float) -> str:
        """Return the result of `ended`; wait for it while Slurm ends the job, `seconds` at most."""
        deadline = time.monotonic() + seconds
        while (not (ended := self.ended()) or _ENDING in ended) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return ended

    def end_of_output(self) -> str:
        """Return the end of the job's output."""
        if self.output is None:
            return ""
        data, _ = read_log(self.output, _OUTPUT_BYTES)
        return validation.output(data.decode(errors="replace"), "output")


class _Jobs:
    """The jobs of one cluster, which end together."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._closing = threading.Lock()
        self.jobs: list[_Job] = []
        self.directory: Path | None = None
        rendezvous.on_close = self.close

    def await_nodes(self, config: ClusterConfig, minimum: int | None, on_event: OnEvent) -> None:
        """Return when all nodes have connected; show Slurm's reasons in the rows until then.

        A running job with at least `minimum` nodes is complete.

        Raises
        ------
        LaunchError
            A job has ended, or the cluster is stopped.
        StartTimeout
        """
        deadline = time.monotonic() + config.policy.start_timeout
        ended_at: dict[str, float] = {}
        shown: dict[str, str] = {}
        fixes: dict[str, str] = {}
        while missing := [
            job for job in self.jobs if not all(h.arrived.is_set() for h in job.hosts)
        ]:
            for job in missing:
                status = _status(job.id)
                if status is not None and job.step is None:
                    job.drop_missing(status.nodes, minimum, on_event)
                if ended := job.ended():
                    since = ended_at.setdefault(job.role, time.monotonic())
                    if time.monotonic() - since > _END_SECONDS:
                        raise _start_failed(job, ended)
                reason, fix = status.pending(job.id) if status is not None else ("", "")
                if reason and reason != shown.get(job.role):
                    shown[job.role], fixes[job.role] = reason, fix
                    for role, index in config.tasks():
                        if job.role in ("", role):
                            task = f"{role}:{index}"
                            on_event(TaskChanged(task, TaskState.PLANNED, reason))
            if time.monotonic() > deadline:
                job = missing[0]
                reason = shown.get(job.role) or f"Slurm job {job.id} did not start its agents"
                raise StartTimeout(
                    f"Slurm started no agents within {config.policy.start_timeout:g} s: {reason}",
                    fix=fixes.get(job.role)
                    or "allow more time with tfd.Policy(start_timeout=...), or request less",
                )
            self.check_open(config.name)
            missing[0].hosts[-1].arrived.wait(_POLL_SECONDS)
        left = [s.seconds_left for job in self.jobs if (s := _status(job.id)) is not None]
        if known := [seconds for seconds in left if seconds is not None]:
            on_event(ExpiryChanged(min(known), "the allocation reached its time limit"))

    def check_open(self, cluster: str) -> None:
        """Raise LaunchError if the cluster was stopped."""
        if self._rendezvous.closed:
            raise LaunchError(f"cluster {cluster!r} was stopped while it started")

    def close(self) -> None:
        """Cancel the jobs and remove their output; never raises."""
        self._rendezvous.close()
        with self._closing:  # a job may be submitted while another thread stops the cluster
            left = [job for job in self.jobs if job.id and not job.cancelled]
            for job in left:
                job.cancelled = True
        for job in left:
            if job.step is not None:
                if all(host.arrived.is_set() for host in job.hosts):
                    # The closed connections end the step, and the agents remove their files.
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        job.step.wait(_STEP_SECONDS)
                job.step.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.step.wait(_REQUEST_SECONDS)
        if submitted := [job.id for job in left if job.step is None]:
            with contextlib.suppress(LaunchError):
                _run(["scancel", *submitted])
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


class _SlurmHost(RendezvousHost):
    """A node of a Slurm job."""

    def __init__(self, job: _Job, rendezvous: Rendezvous) -> None:
        super().__init__("", rendezvous)
        self.job = job
        self.arrived = threading.Event()

    def offer(
        self, channel: secure_channel.AuthenticatedChannel, header: Mapping[str, Any]
    ) -> bool:
        if not self.arrived.is_set():
            node = validation.host(header.get("node"), "node")
            self.label = f"{node}/{self.job.role}" if self.job.role else node
            self.arrived.set()
        return super().offer(channel, header)

    def connect(self, agent: str, start: bool) -> Channel:
        try:
            return super().connect(agent, start)
        except OSError:
            ended = self.job.ended()
            if ended and _ENDING not in ended:
                raise AgentLost(f"{self.label}: {ended}", fix="start the cluster again") from None
            raise

    def loss(self, reason: str) -> AgentLost:
        # The node reports the end before the controller.
        return super().loss(self.job.await_end(_LOSS_SECONDS) or reason)


@dataclass(frozen=True)
class _Status:
    """The state of a Slurm job as ``squeue`` reports it."""

    state: str
    reason: str
    start: str
    left: str
    allocated: str = ""

    @property
    def nodes(self) -> int:
        """The number of nodes of a running job; 0 before and without information."""
        running = self.state == "RUNNING" and slurm_queue.is_count(self.allocated)
        return int(self.allocated) if running else 0

    def pending(self, job: str) -> tuple[str, str]:
        """Return why the job waits, as a sentence, and the change that helps. Empty if it runs."""
        if self.state != "PENDING":
            return "", ""
        reason, fix = slurm_queue.why_pending(job)
        start = "" if self.start in ("", "N/A") else f"; expected start {self.start}"
        return f"Slurm job {job} is pending: {reason or self.reason}{start}", _as_arguments(fix)

    def ended(self, job: str) -> str:
        """Return a sentence if the job has ended, or an empty string."""
        if self.state in ("PENDING", "RUNNING", "CONFIGURING", "SUSPENDED"):
            return ""
        state = _STATES.get(self.state, f"is {self.state.lower()}")
        reason = "" if self.reason in ("", "None") else f" ({self.reason})"
        return f"Slurm job {job} {state}{reason}"

    @property
    def seconds_left(self) -> float | None:
        """Seconds before the time limit; None without a limit."""
        return slurm_queue.seconds(self.left)


def _as_arguments(fix: str) -> str:
    """Return a text with options of ``sbatch`` as arguments of the launcher."""

    def argument(option: re.Match[str]) -> str:
        return f"{option[1]}={option[2] if option[2].isdecimal() else repr(option[2])}"

    return re.sub(r"(?:#SBATCH )?--(\w+)=([^\s,]+)", argument, fix)


#: The final state, such as CANCELLED, follows. A job stays in this one if a node is unreachable.
_ENDING = "is ending"
_STATES = {
    "CANCELLED": "was cancelled",
    "COMPLETED": "has ended",
    "COMPLETING": _ENDING,
    "FAILED": "failed",
    "NODE_FAIL": "lost a node",
    "OUT_OF_MEMORY": "used more memory than it requested; increase mem=",
    "PREEMPTED": "was preempted by another job",
    "TIMEOUT": "reached its time limit",
}


def _status(job: str) -> _Status | None:
    """Return the state of a job; None if Slurm does not answer."""
    try:
        completed = _run(
            ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r|%S|%L|%D"]
        )
    except LaunchError:
        return None
    if completed.returncode:
        unknown = "Invalid job id" in completed.stderr
        return _Status("COMPLETED", "", "", "") if unknown else None
    fields = completed.stdout.strip().split("|")
    if len(fields) != 5:
        return None
    return _Status(*(validation.text(field, "squeue") for field in fields))


def _start_failed(job: _Job, ended: str) -> LaunchError:
    """Return the error of a job that ended before its agents have connected."""
    lines = job.end_of_output().encode().splitlines()
    try:
        read_handshake(f"Slurm job {job.id}", iter(lines))
    except (LaunchError, InvalidMessage) as error:
        if any(line.startswith(stdio.HANDSHAKE.encode()) for line in lines):
            return LaunchError(error.what, fix=error.fix)
    output = "; ".join(line.decode() for line in lines[-3:] if line.strip())
    missing = sum(not host.arrived.is_set() for host in job.hosts)
    return LaunchError(
        f"{ended}: {missing} of its {len(job.hosts)} nodes cannot be reached or started no agent"
        + (f"; its output ends with {output!r}" if output else ""),
        fix="check python=, container=, prologue= and output=, and that the nodes reach "
        f"{job.hosts[0].kernel_address} (TCP); address= selects another address of this host",
    )


def _limits(partition: str) -> str:
    """Return the limits of the partition as a sentence."""
    for known in slurm_queue.partitions():
        if known.name == partition or (not partition and known.default):
            return (
                f"partition {known.name} allows {known.time} on {known.nodes} nodes with "
                f"{known.cpus} CPUs: request less, or choose another partition="
            )
    names = ", ".join(known.name for known in slurm_queue.partitions())
    return f"the partitions are {names}" if names else "see sinfo"


def _address_towards_controller() -> str:
    """Return the address of this host for connections from the nodes."""
    completed = _run(["scontrol", "show", "config"])
    match = re.search(
        r"^SlurmctldHost\[0\]\s*=\s*([^\s(]+)(?:\(([^)\s]+)\))?", completed.stdout, re.M
    )
    try:
        if match is None:
            raise OSError(_message(completed.stderr) or "scontrol names no controller")
        return address_towards(match[2] or match[1])
    except OSError as error:
        raise LaunchError(
            f"finding the address for the nodes failed: {error}",
            fix="check that scontrol ping answers, or pass address=",
        ) from None


def _output_directory(parent: str) -> Path:
    base = Path(parent or os.path.expanduser("~/.cache/tfd_notebook"))
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="slurm-", dir=base))
    except OSError as error:
        raise LaunchError(
            f"creating a directory for the output of Slurm jobs failed: {error}",
            fix="pass output= with a directory on a shared file system",
        ) from None


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise LaunchError(f"{name} was not found", fix="install Slurm's commands on this host")
    return path


def _run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm; raise LaunchError if it does not end in time."""
    try:
        return slurm_queue.run([_program(command[0]), *command[1:]], _REQUEST_SECONDS, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{command[0]} failed: {error}", fix="see scontrol ping") from None


def _message(text: str) -> str:
    """Return the errors of a command of Slurm in one line."""
    lines = [re.sub(r"^\w+: (?:error|fatal): ", "", line) for line in text.splitlines()]
    return "; ".join(line for line in lines if line) or "no reason given"
