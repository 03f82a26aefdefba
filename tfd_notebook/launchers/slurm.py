"""``launcher="slurm"``: tasks on the nodes of Slurm jobs."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from tfd_notebook.errors import LaunchError, UsageError
from tfd_notebook.launchers.base import OnEvent
from tfd_notebook.launchers.client import slurm_jobs
from tfd_notebook.launchers.client.multi_host import TaskHostGroup
from tfd_notebook.launchers.client.rendezvous import Rendezvous
from tfd_notebook.launchers.client.slurm_jobs import Job, SlurmHost
from tfd_notebook.launchers.engine import POLL_SECONDS, Engine, EngineLauncher, HostState
from tfd_notebook.launchers.remote import RemoteHost
from tfd_notebook.model.events import ClusterEnded, Event, ExpiryChanged, Notice
from tfd_notebook.model.spec import ClusterConfig, Role, check_count, check_text
from tfd_notebook.net import optional_packages

_TIME = re.compile(r"\d{1,6}(:\d{1,2}){0,2}|\d{1,4}-\d{1,2}(:\d{1,2}){0,2}")


class Slurm(EngineLauncher):
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
        allocate more. Another job requests the missing nodes, which run their share of the data
        workers as soon as they start. They are dropped instead in an existing allocation, with
        `secure`, a `place` of data workers, or no data workers. Default: `nodes`.
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
            "python": python,
            "container": container,
            "address": address,
            "output": output,
        }
        for option, text in texts.items():
            check_text(option, text)
        if not _TIME.fullmatch(time):
            raise UsageError(
                f"invalid time {time!r}: expected Slurm's format", fix='such as "2:00:00" or "1-12"'
            )
        if not isinstance(prologue, str) or "\0" in prologue:
            raise UsageError(f"invalid prologue {prologue!r}: expected lines of shell")
        extra = [extra] if isinstance(extra, str) else list(extra)
        slurm_jobs.check_extra(extra)
        self._nodes = {str(role): count for role, count in by_role.items()}
        own: dict[str, Any] = {**texts, "nodes": self._nodes.get("", self._nodes)}
        own |= {"minimum": minimum, "cpus": cpus, "prologue": prologue, "extra": extra}
        super().__init__(own, grace=grace, place=place, secure=secure, host=host, allow=allow)

    def place_on(self, labels: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        by_role: dict[str, tuple[str, ...]] = {}
        for label in labels:
            _, slash, role = label.partition("/")
            if slash:
                by_role[role] = (*by_role.get(role, ()), label)
        return {**by_role, **self._place}

    def job_script(self, config: ClusterConfig) -> str:
        directory = self._own["output"] or "~/.cache/tfd_notebook"
        secret = "(the address and the key of the cluster)"
        return "\n".join(job.script(directory, secret) for job in self._jobs(config))

    def _jobs(self, config: ClusterConfig) -> list[Job]:
        return [Job(self._own, config.name, *item) for item in self._nodes.items()]

    def new_start(self, config: ClusterConfig, on_event: OnEvent) -> _Slurm:
        optional_packages.load("cryptography", 'launcher "slurm"', "slurm")
        return _Slurm(config, on_event, self._jobs(config), self.options)

    def _open(
        self, hosts: Sequence[RemoteHost], config: ClusterConfig, on_event: OnEvent
    ) -> TaskHostGroup:
        start = self._starting[config.name]

        def explain(event: Event) -> None:
            # Slurm signals all processes of a job, so the agent may report its end first.
            if isinstance(event, ClusterEnded):
                event = replace(event, reason=start.end_reason() or event.reason)
            on_event(event)

        return super()._open(hosts, config, explain)


class _Slurm(Engine[SlurmHost]):
    """The jobs of one cluster, which end together. Each group of hosts is a job."""

    kind = "nodes"
    unreached_fix = "check output=, and see scontrol ping"
    end_seconds = 8.0
    close_seconds = 60.0

    def __init__(
        self, config: ClusterConfig, on_event: OnEvent, jobs: list[Job], options: dict[str, Any]
    ) -> None:
        super().__init__(config, on_event, options["minimum"])
        self._jobs, self._options = jobs, options
        #: The jobs of nodes that join later.
        self._late_jobs: list[Job] = []
        self._directory: Path | None = None
        address = options["address"] or slurm_jobs.address_towards_controller()
        self._rendezvous = Rendezvous(address)
        self._rendezvous.on_close = self.stop
        self.groups = [
            [SlurmHost(self, self._rendezvous, job, n) for n in range(job.count)] for job in jobs
        ]
        self._rendezvous.expect({(host.job.part, host.number): host for host in self.hosts})

    def submit(self) -> None:
        self._directory = slurm_jobs.output_directory(self._options["output"])
        for job in self._jobs:
            self.check()
            self._submit(job)

    def _submit(self, job: Job) -> None:
        assert self._directory is not None
        arguments = self._rendezvous.arguments(self._options["grace"])
        job.submit(self._directory, json.dumps({**arguments, "part": job.part}))

    def later(self, missing: list[SlurmHost]) -> list[SlurmHost]:
        # A job that runs gets no more nodes, so another one requests them.
        roles = ("", Role.DATA_WORKER)
        missing = [host for host in missing if host.job.role in roles and not host.job.is_step]
        if not missing:
            return []
        role, running = missing[0].job.role, [host for host in self.hosts if host.arrived]
        job = Job(
            {**self._options, "minimum": 1},
            self.config.name,
            role,
            len(missing),
            part=f"{role}+{len(self._late_jobs) + 1}",
            exclude=[host.label.partition("/")[0] for host in running],
        )
        late = [SlurmHost(self, self._rendezvous, job, n) for n in range(job.count)]
        self._rendezvous.expect_more({(job.part, host.number): host for host in late})
        self._late_jobs.append(job)
        try:
            self._submit(job)
        except LaunchError as error:
            what = f"requesting the missing nodes failed: {error.what}"
            self.on_event(Notice("warning", what, fix=error.fix))
            for host in late:
                host.close()
            return []
        return late

    def state(self, host: SlurmHost) -> HostState:
        state = host.job.state()
        if host.arrived and not state.ends:
            return HostState("running")
        if 0 < state.nodes <= host.number:
            return HostState("missing", f"Slurm job {host.job.id} gets no more nodes")
        return state

    def cancel(self) -> None:
        for job, hosts in zip(self._jobs, self.groups, strict=True):
            job.cancel(all(host.arrived for host in hosts))
        for job in self._late_jobs:
            job.cancel(True)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def log(self, host: SlurmHost) -> bytes:
        return host.job.log()

    def runs(self, host: SlurmHost, role: str, index: int) -> bool:
        return host.job.role in ("", role)

    def complete(self) -> None:
        left = [job.state().seconds_left for job in self._jobs]
        if known := [seconds for seconds in left if seconds is not None]:
            self.on_event(ExpiryChanged(min(known), "the allocation reached its time limit"))

    def interrupt(self) -> None:
        self._rendezvous.close()

    def end_reason(self) -> str:
        """Return why a job has ended; wait for it while Slurm ends the job."""
        hosts = [*(group[0] for group in self.groups), *self.joined]
        deadline = time.monotonic() + self.end_seconds
        while True:
            states = [self.state(host) for host in hosts]
            is_last = self.stopped or time.monotonic() > deadline
            for state in states:
                if state.phase == "ended" or (is_last and state.ends):
                    return state.reason
            if is_last:
                return ""
            time.sleep(POLL_SECONDS)

    def start_error(self, host: SlurmHost, state: HostState) -> LaunchError:
        if missing := sum(not other.arrived for other in self.hosts if other.job is host.job):
            what = f"{missing} of its {host.job.count} nodes cannot be reached or started no agent"
            fix = (
                "check python=, container=, prologue= and output=, and that the nodes reach "
                f"{host.kernel_address} (TCP); address= selects another address of this host"
            )
            state = HostState("ended", f"{state.reason}: {what}", fix)
        return super().start_error(host, state)
