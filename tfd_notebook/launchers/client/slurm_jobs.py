"""Slurm jobs by the commands of Slurm, and connections from their nodes."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfd_notebook.agent.bridges import stdio
from tfd_notebook.agent.task_supervisor import read_log
from tfd_notebook.errors import AgentLost, LaunchError, UsageError
from tfd_notebook.launchers.client.rendezvous import Rendezvous, RendezvousHost
from tfd_notebook.launchers.client.session import Channel
from tfd_notebook.launchers.engine import POLL_SECONDS, Engine, HostState, Phase
from tfd_notebook.net import secure_channel, slurm_queue, validation
from tfd_notebook.net.host import address_towards

_REQUEST_SECONDS = 20.0
#: Seconds to wait for the final state of a job whose nodes have reported its end. By default,
#: Slurm kills a job 30 s after the first signal.
_LOSS_SECONDS = 40.0
#: Seconds in which a step ends by itself.
_STEP_SECONDS = 15.0
_OUTPUT_BYTES = 2000
#: Options of sbatch that have the names of the launcher's options.
_NAMED = ("partition", "account", "qos", "gres", "mem", "time", "constraint")
_EXTRA = re.compile(r"--[a-z][a-z-]*(=[^\s].*)?")
#: Options of sbatch that the launcher sets itself.
_OWN = (
    *("array", "cpus-per-task", "error", "input", "job-name", "no-kill", "nodes", "ntasks"),
    *("ntasks-per-node", "output", "time", "wait", "wrap"),
)
#: Variables of the kernel that a Slurm job must not inherit.
_PRIVATE = re.compile(
    r"TFD_|XDG_RUNTIME_DIR|JPY_|JUPYTER|SBATCH_(OUTPUT|ERROR|ARRAY|TIMELIMIT|REQUEUE|WAIT|JOB_NAME)"
    r"|.*(TOKEN|SECRET|PASSWORD)"
)
#: Phases of states in which a job has not ended. COMPLETING stays if a node is unreachable.
_PHASES: dict[str, Phase] = {
    "COMPLETING": "ending",
    "CONFIGURING": "starting",
    "PENDING": "queued",
    "RUNNING": "starting",
    "SUSPENDED": "starting",
}
_STATES = {
    "CANCELLED": "was cancelled",
    "COMPLETED": "has ended",
    "COMPLETING": "is ending",
    "FAILED": "failed",
    "NODE_FAIL": "lost a node",
    "OUT_OF_MEMORY": "used more memory than it requested; increase mem=",
    "PREEMPTED": "was preempted by another job",
    "RUNNING": "is starting its agents",
    "TIMEOUT": "reached its time limit",
}


@dataclass(frozen=True)
class JobState(HostState):
    """The state of a Slurm job: also the number of its nodes and the seconds of its time limit."""

    #: 0 before it runs, and without information.
    nodes: int = 0
    #: None without a limit.
    seconds_left: float | None = None


class Job:
    """A Slurm job, or a step in the allocation of this process.

    Parameters
    ----------
    options : mapping
        Those of the launcher.
    cluster : str
    role : str
        The role of its tasks; empty for all roles.
    count : int
        The largest number of nodes.
    part : str, optional
        Names the job in the connections of its nodes. Default: the role.
    exclude : sequence of str
        Names of nodes on which it must not run. Default: none.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        cluster: str,
        role: str,
        count: int,
        part: str | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        self.role, self.count, self.id = role, count, ""
        self.part, self._exclude = role if part is None else part, exclude
        self._options, self._name = options, f"tfd-{cluster}" + (f"-{role}" if role else "")
        self._least = min(options["minimum"] or count, count)
        #: The number of nodes, or the smallest and the largest.
        self._nodes = str(count) if self._least == count else f"{self._least}-{count}"
        self._output: Path | None = None
        self._step: subprocess.Popen[bytes] | None = None
        self._state = JobState("starting", "Slurm does not report the state of the job")
        self._read_at = float("-inf")

    def script(self, directory: str, payload: str) -> str:
        """Return the batch script; the agents read `payload` from standard input."""
        options = [
            f"--job-name={self._name}",
            f"--nodes={self._nodes}",
            # With a range and a number of tasks, Slurm allocates the smallest number of nodes.
            *(["--ntasks-per-node=1"] if self._nodes.isdecimal() else []),
            *(f"--{name}={self._options[name]}" for name in _NAMED if self._options[name]),
            *([f"--cpus-per-task={self._options['cpus']}"] if self._options["cpus"] else []),
            f"--output={directory}/job-%j.log",
            "--no-requeue",
            "--no-kill",
            *self._options["extra"],
            *self._excluded(),
        ]
        lines = [f"#SBATCH {shlex.quote(option)}" for option in options]
        count = '"$SLURM_JOB_NUM_NODES"'
        start = f"srun --nodes={count} --ntasks={count} {shlex.join(self._srun())}"
        here = ["exec " + start + " <<'TFD_END'", payload, "TFD_END", ""]
        return "\n".join(["#!/bin/sh", *lines, *self._options["prologue"].splitlines(), *here])

    def _excluded(self) -> list[str]:
        """Return the option for the excluded nodes, with those of `extra`, which it replaces."""
        options = [option.partition("=") for option in self._options["extra"]]
        nodes = [value for name, _, value in options if name == "--exclude"][-1:]
        is_file = any("/" in value for value in nodes)
        if not self._exclude or is_file:
            return []
        return [f"--exclude={','.join([*nodes, *self._exclude])}"]

    def _srun(self) -> list[str]:
        """Return the arguments of srun that start an agent, without the number of nodes."""
        container = self._options["container"]
        kind = "--container" if container.startswith("/") else "--container-image"
        return [
            "--ntasks-per-node=1",
            "--no-kill",
            *([f"--cpus-per-task={self._options['cpus']}"] if self._options["cpus"] else []),
            *([f"{kind}={container}"] if container else []),
            self._options["python"] or sys.executable,
            "-u",
            "-c",
            stdio.bootstrap("slurm_node"),
        ]

    def submit(self, directory: Path, payload: str) -> None:
        """Submit the job, or start its step in the allocation of this process."""
        environment = {k: v for k, v in os.environ.items() if not _PRIVATE.match(k)}
        allocation = os.environ.get("SLURM_JOB_ID", "")
        if allocation and "SLURM_STEP_ID" not in os.environ:
            self.id, self._output = allocation, directory / f"{self.role or 'step'}.log"
            nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
            count = min(int(nodes), self.count) if nodes.isdecimal() else self.count
            if count < self._least:
                raise LaunchError(
                    f"the allocation {allocation} has {nodes} nodes, and the cluster needs "
                    f"{self._nodes}",
                    fix="pass another number as nodes= or minimum=, or allocate more nodes",
                )
            srun = ["srun", "--overlap", f"--nodes={count}", f"--ntasks={count}"]
            with self._output.open("wb") as log:
                self._step = subprocess.Popen(
                    [*srun, *self._srun()],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            assert self._step.stdin is not None
            with contextlib.suppress(BrokenPipeError), self._step.stdin as pipe:
                pipe.write(payload.encode() + b"\n")
            return
        script = self.script(str(directory), payload)
        completed = _run(
            ["sbatch", "--parsable"], input=script, env=environment, start_new_session=True
        )
        number = completed.stdout.strip().partition(";")[0]
        if completed.returncode or not number.isdecimal():
            raise LaunchError(
                f"Slurm refused the job: {_message(completed.stderr)}",
                fix=_limits(self._options["partition"]),
            )
        self.id, self._output = number, directory / f"job-{number}.log"

    def state(self) -> JobState:
        """Return the last state that Slurm has reported, which is less than a second old."""
        if self._step is not None and (status := self._step.poll()) is not None:
            return JobState("ended", f"srun in Slurm job {self.id} ended with status {status}")
        if time.monotonic() - self._read_at > POLL_SECONDS / 2:
            self._state = _read_state(self.id) or self._state
            self._read_at = time.monotonic()
        return self._state

    @property
    def is_step(self) -> bool:
        """True for a step in the allocation of this process."""
        return self._step is not None

    def log(self) -> bytes:
        """Return the end of the output."""
        data = b"" if self._output is None else read_log(self._output, _OUTPUT_BYTES)[0]
        return validation.output(data.decode(errors="replace"), "output").encode()

    def cancel(self, is_connected: bool) -> None:
        """End the job. A step with agents ends with their connections, and removes their files."""
        if self._step is None:
            if self.id:
                with contextlib.suppress(LaunchError):
                    _run(["scancel", self.id])
            return
        for seconds in (_STEP_SECONDS if is_connected else 0.0, _REQUEST_SECONDS):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._step.wait(seconds)
            self._step.terminate()


class SlurmHost(RendezvousHost):
    """A node of a Slurm job.

    Parameters
    ----------
    engine : Engine
    rendezvous : Rendezvous
    job : Job
    number : int
        Slurm's number of the node in the job.
    """

    def __init__(
        self, engine: Engine[SlurmHost], rendezvous: Rendezvous, job: Job, number: int
    ) -> None:
        super().__init__(f"node {number}" + (f"/{job.role}" if job.role else ""), rendezvous)
        self._engine, self.job, self.number = engine, job, number
        self.arrived = False

    def offer(
        self, channel: secure_channel.AuthenticatedChannel, header: Mapping[str, Any]
    ) -> bool:
        if not self.arrived:
            node = validation.host(header.get("node"), "node")
            self.label = f"{node}/{self.job.role}" if self.job.role else node
            self.arrived = True
            self._engine.changed.set()
        return super().offer(channel, header)

    def connect(self, agent: str, start: bool) -> Channel:
        try:
            return super().connect(agent, start)
        except OSError:
            if (state := self.job.state()).phase == "ended":
                raise super().loss(state.reason) from None
            raise

    def loss(self, reason: str) -> AgentLost:
        # The node reports the end before the controller.
        state = self._engine.await_end(self, _LOSS_SECONDS)
        return super().loss(state.reason if state.ends else reason)


def check_extra(extra: Sequence[object]) -> None:
    """Raise UsageError unless these are options of sbatch that the launcher does not set."""
    for option in extra:
        text = option if isinstance(option, str) and option.isprintable() else ""
        if not _EXTRA.fullmatch(text):
            raise UsageError(
                f"invalid extra {option!r}: expected an option", fix='such as "--exclusive"'
            )
        if text[2:].partition("=")[0] in _OWN:
            raise UsageError(f"invalid extra {option!r}: the launcher sets this option")


def _read_state(job: str) -> JobState | None:
    """Return the state of a job; None if Slurm does not answer."""
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r|%S|%L|%D"]
    try:
        completed = _run(command)
    except LaunchError:
        return None
    if completed.returncode:
        is_unknown = "Invalid job id" in completed.stderr
        return JobState("ended", f"Slurm job {job} has ended") if is_unknown else None
    fields = completed.stdout.strip().split("|")
    if len(fields) != 5:
        return None
    name, reason, start, left, nodes = (validation.text(field, "squeue") for field in fields)
    phase = _PHASES.get(name, "ended")
    if phase == "queued":
        meaning, fix = slurm_queue.why_pending(job)
        expected = "" if start in ("", "N/A") else f"; expected start {start}"
        what = f"Slurm job {job} is pending: {meaning or reason}{expected}"
        return JobState(phase, what, _as_arguments(fix))
    what = f"Slurm job {job} {_STATES.get(name, f'is {name.lower()}')}"
    if phase == "starting" or reason in ("", "None"):
        reason = ""
    is_running = name == "RUNNING" and slurm_queue.is_count(nodes)
    return JobState(
        phase,
        f"{what} ({reason})" if reason else what,
        nodes=int(nodes) if is_running else 0,
        seconds_left=slurm_queue.seconds(left),
    )


def _as_arguments(fix: str) -> str:
    """Return a text with options of ``sbatch`` as arguments of the launcher."""

    def argument(option: re.Match[str]) -> str:
        return f"{option[1]}={option[2] if option[2].isdecimal() else repr(option[2])}"

    return re.sub(r"(?:#SBATCH )?--(\w+)=([^\s,]+)", argument, fix)


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


def address_towards_controller() -> str:
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


def output_directory(parent: str) -> Path:
    """Create a directory for the output of the jobs of a cluster."""
    base = Path(parent or os.path.expanduser("~/.cache/tfd_notebook"))
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="slurm-", dir=base))
    except OSError as error:
        raise LaunchError(
            f"creating a directory for the output of Slurm jobs failed: {error}",
            fix="pass output= with a directory on a shared file system",
        ) from None


def _run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm; raise LaunchError if it does not end in time."""
    try:
        return slurm_queue.run(command, _REQUEST_SECONDS, **options)
    except FileNotFoundError:
        fix = "install Slurm's commands on this host"
        raise LaunchError(f"{command[0]} was not found", fix=fix) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{command[0]} failed: {error}", fix="see scontrol ping") from None


def _message(text: str) -> str:
    """Return the errors of a command of Slurm in one line."""
    lines = [re.sub(r"^\w+: (?:error|fatal): ", "", line) for line in text.splitlines()]
    return "; ".join(line for line in lines if line) or "no reason given"
