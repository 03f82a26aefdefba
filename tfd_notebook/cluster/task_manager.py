"""Start, scaling, restart and requests for the tasks of a cluster, through its launcher."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfd_notebook import errors
from tfd_notebook._compat.tf_data import autograph, source_locations
from tfd_notebook.agent import admin_policy, work_dir
from tfd_notebook.cluster import gpu_allocation, server_config
from tfd_notebook.cluster.config import check_roles
from tfd_notebook.cluster.journal_copy import JournalCopy
from tfd_notebook.cluster.monitor import Monitor
from tfd_notebook.cluster.server_config import JOBS
from tfd_notebook.data.service.journal import Journal
from tfd_notebook.launchers import base
from tfd_notebook.model.events import (
    ExpiryChanged,
    GpusMeasured,
    LeaseChanged,
    PlanChanged,
    TaskChanged,
    TaskRemoved,
)
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import (
    ClusterConfig,
    Role,
    TaskSpec,
    TaskState,
    pack,
    without_values,
)
from tfd_notebook.model.stacks import (
    BlockedFunction,
    TaskStacks,
    blocked_functions,
    observed_seconds,
)
from tfd_notebook.net import ports, probe, proxies

DISPATCHER = f"{Role.DISPATCHER}:0"
#: With TensorFlow's default of 30 s, a worker starts and ends a save up to 30 s late.
_HEARTBEAT_MS = 1000
_BYTES_PER_LINE = 400
_FOLLOW_SECONDS = 0.2
_FOLLOW_BYTES = 65_536
#: Seconds of waiting after which the connectivity between the hosts is checked.
_PEER_CHECK_SECONDS = 5.0
#: Seconds to wait for `ClusterEnded`, which arrives after the last `TaskChanged`.
_END_SECONDS = 2.0
#: Timeout of the dispatcher's probe before data workers are added.
_PROBE_SECONDS = 3.0
_STACKS_SECONDS = 10.0
_STACKS_PAUSE_SECONDS = 0.25
#: Seconds after which a call of a dataset's Python function is reported as blocked.
BLOCKED_SECONDS = 3.0


class TaskManager:
    """The tasks of one cluster.

    Parameters
    ----------
    config : ClusterConfig
    launcher : Launcher
    monitor : Monitor
        Receives the planned and requested numbers, and has the current state of the tasks.
    """

    def __init__(self, config: ClusterConfig, launcher: base.Launcher, monitor: Monitor) -> None:
        self._config = config
        self._launcher = launcher
        self._monitor = monitor
        self._task_host: base.TaskHost | None = None
        self._gpu_allocation = gpu_allocation.GpuAllocation()
        #: The worker addresses in the dispatcher's configuration, for static sharding.
        self._static_addresses: tuple[str, ...] = ()
        #: Addresses of the tasks that `scale` removed.
        self._removed_addresses: set[str] = set()
        self._journal_copy: JournalCopy | None = None
        self._journal: Journal | None = None
        self.work_dir: str | None = None
        #: Whether a coordinator has used the tasks since they were started.
        self.used = False

    def job_script(self) -> str:
        """Return the jobs that the launcher submits, or raise Unsupported."""
        return self._launcher.job_script(self._config)

    @property
    def in_process(self) -> bool:
        """True if the tasks run in this process."""
        return self._launcher.in_process

    @property
    def on_this_host(self) -> bool:
        """True if the tasks run on this host."""
        return self._task_host is not None and self._task_host.is_local

    @property
    def is_external(self) -> bool:
        """True if the tasks are external: not started by tfd."""
        return self._launcher.name == "external"

    @property
    def gives_gpus(self) -> bool:
        """True if tasks of this cluster see GPUs."""
        return self._gpu_allocation.gives

    @property
    def journal(self) -> Journal | None:
        """The dispatcher's journal, or None if it keeps none."""
        directory, refresh = self.work_dir, None
        if directory is None:
            return None
        if self._journal_copy is not None and not work_dir.is_url(directory):
            directory, refresh = self._journal_copy.directory, self._journal_copy.refresh
        if self._journal is None or self._journal.work_dir != directory:
            keep_seconds = server_config.keep_seconds(self._config.service)
            self._journal = Journal(directory, refresh, keep_seconds)
        return self._journal

    # All tasks

    def start_all(self) -> None:
        """Start all tasks and return when they are ready."""
        config = self._config
        if note := proxies.bypass():
            self._monitor.notice("info", note)
        (self._task_host,) = self._launcher.connect(config, self._monitor.apply)
        self._copy_journal()
        self._gpu_allocation = self._allocate_gpus(config.counts.get(Role.WORKER, 0))
        for role, count in config.counts.items():
            self._monitor.apply(PlanChanged(role, requested=count))
        self._add({role: range(n) for role, n in config.counts.items()}, config.policy.minimum)

    def _copy_journal(self) -> None:
        if not self.on_this_host:
            self._journal_copy = JournalCopy(self.task_host.journal)

    def scale(self, counts: Mapping[Role, int], minimum: int | None = None) -> None:
        """Change the number of tasks of these roles.

        Return when new tasks are ready. `minimum` is the number of new data workers for which
        the call waits. Default: all.
        """
        requested = dict(counts)
        if requested.get(Role.DATA_WORKER) and not self.rows_of(Role.DISPATCHER):
            requested[Role.DISPATCHER] = 1
        self.check_scale(requested)
        if Role.WORKER in requested:
            if self.rows_of(Role.WORKER):
                self._check_gpus(requested[Role.WORKER])
            else:
                self._gpu_allocation = self._allocate_gpus(requested[Role.WORKER])
        data_workers = len(self.rows_of(Role.DATA_WORKER))
        if minimum is None and requested.get(Role.DATA_WORKER, 0) > data_workers:
            self._require_dispatcher()
        missing: dict[Role, list[int]] = {}
        #: Data workers that an earlier call did not wait for.
        starting: list[str] = []
        fewer_data_workers = False
        for role, count in requested.items():
            present = self.rows_of(role)
            self._monitor.apply(PlanChanged(role, planned=count))
            surplus = [row.task for row in reversed(present) if row.index >= count]
            if surplus:
                self._remove(surplus)
                fewer_data_workers |= role is Role.DATA_WORKER
            self._monitor.apply(PlanChanged(role, requested=count))
            # A task without an address waits for its host.
            known = {row.index for row in present if row.address}
            missing[role] = [index for index in range(count) if index not in known]
            for row in present:
                if row.index < count and row.state.ended:
                    self.restart(row.task, {})
                elif row.index in known and row.state in (TaskState.PLANNED, TaskState.STARTING):
                    starting.append(row.task)
        try:
            self._add(missing, minimum)
            self._await_ready(starting, minimum)
        except BaseException:
            # Stop the tasks that are starting.
            self._remove([f"{role}:{index}" for role in missing for index in missing[role]])
            for role in requested:
                left = len(self.rows_of(role))
                self._monitor.apply(PlanChanged(role, planned=left, requested=left))
            raise
        if fewer_data_workers and self._static_addresses:
            self.enable_static_sharding()

    def has_joined(self) -> bool:
        """Show why data workers wait for their hosts, and return True if one has joined."""
        joined = False
        for row in self._waiting():
            why = self.task_host.why_waiting(row.task)
            joined |= why is None
            if why is not None and why != row.reason:
                self._monitor.apply(TaskChanged(row.task, TaskState.PLANNED, why))
        return joined

    def start_joined(self) -> None:
        """Request the data workers whose hosts have joined. Their start is not awaited."""
        joined = [row for row in self._waiting() if self.task_host.why_waiting(row.task) is None]
        try:
            self._add({Role.DATA_WORKER: [row.index for row in joined]}, minimum=0)
        except BaseException:
            self._remove([row.task for row in joined])
            raise

    def _waiting(self) -> list[TaskRow]:
        """Return the data workers that wait for their hosts, which have no address yet."""
        rows = self.rows_of(Role.DATA_WORKER)
        return [row for row in rows if row.state is TaskState.PLANNED and not row.address]

    def check_scale(self, counts: Mapping[Role, int]) -> None:
        """Raise Unsupported or Refused if the cluster cannot have these numbers of tasks."""
        if self.is_external:
            raise errors.Unsupported(
                f"cluster {self._config.name!r} was not started by tfd and cannot be scaled"
            )
        check_roles(self._launcher, counts)
        total = sum({**self._monitor.planned, **counts}.values())
        admin_policy.limits().check_cluster(self._config.launcher, total, 0, ())

    def _require_dispatcher(self) -> None:
        """Raise StateError for a suspended dispatcher, which would not answer new data workers."""
        for row in self.rows_of(Role.DISPATCHER):
            if row.state is not TaskState.READY or self.in_process:
                continue
            result = probe.probe(row.address, _PROBE_SECONDS)
            if result.state == "hung":  # a dispatcher that has ended is restarted
                raise errors.StateError(
                    f"adding data workers failed: {row.task} does not answer ({result.reason})",
                    task=row.task,
                    fix=f"cluster.restart({row.task!r})",
                )

    def close(self, timeout: float) -> None:
        """Stop all tasks. Never raises."""
        if self._journal_copy is not None:
            self._journal_copy.close()
        if self._task_host is None:
            self._launcher.abort(self._config.name)
        else:
            rows = [row for role in JOBS for row in self.rows_of(role) if row.pid != os.getpid()]
            self._task_host.close(timeout)
            ports.shutdown_connections_to(row.address for row in rows if row.address)

    def detach(self) -> None:
        """Disconnect from the tasks, which keep running. Never raises."""
        if self._journal_copy is not None:
            self._journal_copy.close()
        if self._task_host is not None:
            self._task_host.detach()

    def description(self) -> dict[str, Any]:
        """Return what a process needs that attaches, in addition to the tasks, as JSON values."""
        return {
            # The values of env may be secrets, and attaching does not need them.
            "config": pack(without_values(self._config)),
            "task_manager": {
                "counts": {str(role): count for role, count in self._monitor.planned.items()},
                "gpu_allocation": self._gpu_allocation.pack(),
                "static_addresses": list(self._static_addresses),
                "removed_addresses": sorted(self._removed_addresses),
                "work_dir": self.work_dir,
                # Another process may still change those of other tasks.
                "addresses": {
                    row.task: row.address
                    for row in self._monitor.rows()
                    if row.address and row.state not in (TaskState.PLANNED, TaskState.STOPPED)
                },
            },
            "used": self.used,
        }

    def adopt(self, task_host: base.TaskHost, adopted: base.AdoptedCluster) -> None:
        """Connect to tasks that are running already, with the description of their process."""
        description = adopted.description["task_manager"]
        # The servers may still hold variables of an earlier coordinator.
        self.used = bool(adopted.description["used"])
        self._task_host = task_host
        self._copy_journal()
        self._gpu_allocation = gpu_allocation.GpuAllocation.unpack(description["gpu_allocation"])
        self._static_addresses = tuple(description["static_addresses"])
        self._removed_addresses = set(description["removed_addresses"])
        self.work_dir = description["work_dir"]
        for role, count in description["counts"].items():
            self._monitor.apply(PlanChanged(Role(role), planned=count, requested=count))
        for event in adopted.tasks:
            self._monitor.apply(event)
        self._monitor.apply(LeaseChanged(adopted.lease))
        if adopted.time_limit_left is not None:
            self._monitor.apply(ExpiryChanged(adopted.time_limit_left))

    def enable_static_sharding(self) -> None:
        """Give the dispatcher the addresses of its workers. Restart it if they have changed."""
        addresses = self.worker_addresses()
        if addresses != self._static_addresses:
            self.restart(DISPATCHER, {"worker_addresses": list(addresses)})
            self._static_addresses = addresses

    def removed_addresses(self) -> frozenset[str]:
        """Return the addresses of tasks that `scale` removed and did not add again."""
        return frozenset(self._removed_addresses - {row.address for row in self._monitor.rows()})

    @property
    def has_static_sharding(self) -> bool:
        """True if the dispatcher has a fixed list of data workers, for sharding by file or data."""
        return bool(self._static_addresses)

    def has_current_workers(self) -> bool:
        """Return True if the dispatcher has the addresses of exactly the current workers."""
        return self.worker_addresses() == self._static_addresses

    def worker_addresses(self) -> tuple[str, ...]:
        """Return the addresses of the data workers that have not ended, by index."""
        return tuple(filter(None, self._addresses(Role.DATA_WORKER)))

    def cluster_spec(self) -> dict[str, list[str]]:
        """Return the addresses of the workers and parameter servers that have not ended, by index.

        Returns
        -------
        dict of str to list of str
            Argument for ``tf.train.ClusterSpec``. Jobs without tasks are left out.
        """
        spec = {str(role): list(self._addresses(role)) for role in JOBS}
        return {job: addresses for job, addresses in spec.items() if addresses}

    def rows_of(self, role: Role) -> tuple[TaskRow, ...]:
        """Return the tasks of `role`, by index."""
        rows = (row for row in self._monitor.rows() if row.role is role)
        return tuple(sorted(rows, key=lambda row: row.index))

    def _addresses(self, role: Role) -> tuple[str, ...]:
        return tuple(row.address for row in self.rows_of(role) if not row.state.ended)

    # Single tasks

    def row(self, task: str) -> TaskRow:
        """Return the row of `task`, or raise UnknownName."""
        rows = {row.task: row for row in self._monitor.rows()}
        if task not in rows:
            raise errors.unknown_task(self._config.name, task, rows)
        return rows[task]

    def restart(self, task: str, settings: Mapping[str, Any]) -> None:
        """Start a new process for `task` and return when it is ready."""
        self.row(task)  # raises UnknownName
        # The state is `restarting` when the reply arrives, so `ready` refers to the new process.
        self.task_host.restart(task, settings)
        self._await_ready([task])

    def restart_all(self, tasks: Sequence[str]) -> None:
        """Start new processes for `tasks` concurrently and return when all are ready."""
        for task in tasks:
            self.task_host.restart(task, {})
        self._await_ready(list(tasks))

    def await_servers(self) -> None:
        """Return when all workers and parameter servers are ready. Restart those that failed."""
        rows = [row for role in JOBS for row in self.rows_of(role)]
        for row in rows:
            if row.state.ended:
                self.restart(row.task, {})
        self._await_ready([row.task for row in rows])

    def serve_errors_for_lost_workers(self) -> None:
        """Start error servers at the addresses of workers that have failed."""
        lost = [row.task for row in self.rows_of(Role.WORKER) if row.state.ended]
        if lost:
            self.task_host.serve_errors(lost)

    def install(self, tokens: Iterable[str], blob: bytes, removed: Iterable[str]) -> None:
        """Send functions to current and future data workers. Remove those in `removed`."""
        self.task_host.install(blob, list(tokens), list(removed))

    def log(self, task: str, lines: int) -> str:
        """Return the last `lines` lines of a task's log."""
        return self.log_from(task, None, lines)[0]

    def log_from(self, task: str, offset: int | None, lines: int = 100) -> tuple[str, int]:
        """Return a task's log from `offset`, and the next offset.

        Without `offset`, return the last `lines` lines.
        """
        if offset is None:
            text, after = self.task_host.logs(task, lines * _BYTES_PER_LINE)
            return "\n".join(text.splitlines()[-lines:]), after
        text, after = self.task_host.logs(task, _FOLLOW_BYTES, offset)
        return text.removesuffix("\n"), after

    def follow(self, task: str, lines: int) -> Iterator[str]:
        """Yield the last `lines` lines of a task's log, then new lines until the task ends."""
        text, offset = self.log_from(task, None, lines)
        yield from text.splitlines()
        while not self.row(task).state.ended:
            text, offset = self.log_from(task, offset)
            yield from text.splitlines()
            if not text:
                time.sleep(_FOLLOW_SECONDS)

    def stacks(self, tasks: Sequence[str]) -> dict[str, TaskStacks]:
        """Return the Python stacks of tasks. A task without them has the reason."""
        note = "its agent does not have the task"
        found: dict[str, TaskStacks] = {}
        try:
            found = self.task_host.stacks(tasks, timeout=_STACKS_SECONDS)
        except errors.TfdError as error:
            note = error.what
        threads = (thread for entry in found.values() for thread in entry["threads"])
        for frame in (frame for thread in threads for frame in thread["frames"]):
            position = autograph.original(frame["file"], frame["line"], frame["function"])
            frame["file"], frame["line"], frame["function"] = position
        if self.in_process:  # the tasks share the threads of the kernel
            return found
        return {name: found.get(name, {"note": note, "threads": []}) for name in tasks}

    def blocked_functions(self, seconds: float = BLOCKED_SECONDS) -> list[BlockedFunction]:
        """Return the Python functions of datasets with a call that has not returned for `seconds`.

        Calls that have not been observed for this time are observed until then.
        """
        workers = [row.task for row in self.rows_of(Role.DATA_WORKER) if not row.state.ended]
        if not workers:
            return []
        latest, began, waited = self.stacks(workers), time.monotonic(), 0.0
        # A call of less than `waited` seconds began during the wait.
        while any(waited <= each < seconds for each in observed_seconds(latest)):
            time.sleep(_STACKS_PAUSE_SECONDS)
            waited = time.monotonic() - began
            latest = self.stacks(workers)
        return blocked_functions(latest, source_locations.named, seconds)

    @property
    def task_host(self) -> base.TaskHost:
        """The host of the tasks, or of several hosts one that forwards each call."""
        if self._task_host is None:
            raise errors.StateError(
                f"cluster {self._config.name!r} was not started", fix="cluster.start()"
            )
        return self._task_host

    # Internals

    def _add(self, requested: Mapping[Role, Iterable[int]], minimum: int | None = None) -> None:
        """Start tasks by role and index. Return when they are ready.

        Data workers wait for their dispatcher, and for hosts that join later. All other tasks start
        concurrently.
        """
        if self._task_host is None:
            return
        specs = []
        for role, index in ((role, n) for role, indexes in requested.items() for n in indexes):
            if (why := self._task_host.why_waiting(f"{role}:{index}")) is None:
                specs.append(self._task_spec(role, index))
            else:
                self._monitor.apply(TaskChanged(f"{role}:{index}", TaskState.PLANNED, why))
        if not specs:
            return
        reserved = self.task_host.reserve_ports(specs)
        starting = server_config.tf_server_configs(reserved, self._monitor.rows())
        if DISPATCHER in reserved:
            starting[DISPATCHER], self.work_dir = server_config.dispatcher_config(
                self._config, self._task_host.directory, self._task_host.is_local, self.in_process
            )
        if starting:
            self.task_host.start(starting)
        if starting.pop(DISPATCHER, None) is not None:
            self._await_ready([DISPATCHER])
        data_workers = {
            name: address
            for name, address in reserved.items()
            if name.startswith(f"{Role.DATA_WORKER}:")
        }
        if data_workers:
            self._add_data_workers(data_workers, minimum)
        self._await_ready(list(starting))

    def _add_data_workers(self, reserved: Mapping[str, str], minimum: int | None) -> None:
        if self._static_addresses:
            # A dispatcher with a list of workers rejects workers that are not in it.
            addresses = (*self._static_addresses, *reserved.values())
            self.restart(DISPATCHER, {"worker_addresses": list(addresses)})
            self._static_addresses = addresses
        config = {
            "heartbeat_interval_ms": _HEARTBEAT_MS,
            **server_config.data_worker_config(self._config),
            "dispatcher_address": self.row(DISPATCHER).address,
        }
        tasks = {name: dict(config, worker_address=address) for name, address in reserved.items()}
        if minimum == 0:
            # Nothing waits for their first event, and a change that follows needs their rows.
            for name, address in reserved.items():
                self._monitor.apply(TaskChanged(name, TaskState.PLANNED, address=address))
        self.task_host.start(tasks)
        self._await_ready(list(tasks), minimum)

    def _remove(self, tasks: list[str]) -> None:
        rows = {row.task: row.address for row in self._monitor.rows()}
        self._removed_addresses.update(rows[task] for task in tasks if rows.get(task))
        with contextlib.suppress(errors.UnknownName):
            self.task_host.stop(tasks)
        for task in tasks:
            self._monitor.apply(TaskRemoved(task))

    def _task_spec(self, role: Role, index: int) -> TaskSpec:
        port = self._config.service.port if role is Role.DISPATCHER else 0
        gpus = self._gpu_allocation.of(role, index, self._host_index_of)
        return TaskSpec(role, index, self._launcher.host_of(role), port, gpus=gpus)

    def _host_index_of(self, role: str, index: int) -> int:
        return self.task_host.place_of(role, index)

    def _allocate_gpus(self, workers: int) -> gpu_allocation.GpuAllocation:
        """Allocate the GPUs of the tasks' hosts to `workers`."""
        request, evaluators = self._config.gpus, self._config.counts.get(Role.EVALUATOR, 0)
        if request == () or (request == "auto" and (not workers or self.in_process)):
            return gpu_allocation.GpuAllocation()
        if self.in_process:
            raise errors.Unsupported(
                "tasks inside this process share its view of the GPUs",
                fix='omit gpus, or use launcher="local"',
            )
        reports = self.task_host.gpus()
        for report in reports:
            # This sets the display order of the hosts. Agents send tasks and utilization later.
            self._monitor.apply(GpusMeasured(tuple(report["gpus"]), report["host"]))
        hosts = [
            gpu_allocation.HostGpus(
                report["host"],
                tuple(gpu["index"] for gpu in report["gpus"]),
                report["reason"],
                report["hidden"],
                tuple(gpu["uuid"] for gpu in report["gpus"]),
            )
            for report in reports
        ]
        allocation = gpu_allocation.allocate_gpus(
            request, workers, evaluators, hosts, self._host_index_of
        )
        admin_policy.limits().check_gpus(allocation.count(workers, evaluators, self._host_index_of))
        for host, share in zip(
            hosts, allocation.shares or [gpu_allocation.HostAllocation()] * len(hosts), strict=True
        ):
            if host.hidden and request == "auto":
                self._monitor.notice(
                    "warning",
                    f"the workers get no GPUs{share.on}, although some seem to exist: {host.why}",
                    fix="fix the cause, or pass gpus=0 to use none",
                )
            if share.left:
                self._monitor.notice(
                    "info",
                    f"each worker gets {allocation.each} of the {share.count} GPUs{share.on}, the "
                    f"same for all: {', '.join(map(str, share.left))} stay unused",
                )
        return allocation

    def _check_gpus(self, workers: int) -> None:
        """Raise an error if the hosts have too few GPUs for `workers`."""
        self._gpu_allocation.check(workers, self._host_index_of)
        evaluators = self._config.counts.get(Role.EVALUATOR, 0)
        admin_policy.limits().check_gpus(
            self._gpu_allocation.count(workers, evaluators, self._host_index_of)
        )

    def _await_ready(self, tasks: list[str], minimum: int | None = None) -> None:
        """Wait until `minimum` (default: all) of `tasks` are ready, or too many have failed."""
        enough = len(tasks) if minimum is None else min(minimum, len(tasks))

        def settled(rows: dict[str, TaskRow]) -> bool:
            states = [rows[task].state for task in tasks if task in rows]
            hopeless = len(tasks) - sum(state.ended for state in states) < enough
            return hopeless or states.count(TaskState.READY) >= enough

        limit = self._config.policy.start_timeout
        in_time = self._wait_settled(settled, limit)
        rows = {row.task: row for row in self._monitor.rows()}
        waiting = [t for t in tasks if t not in rows or rows[t].state is not TaskState.READY]
        if len(tasks) - len(waiting) >= enough:
            return
        if not in_time:
            raise errors.StartTimeout(
                f"{len(tasks) - len(waiting)} of {len(tasks)} tasks were ready after {limit:g} s; "
                f"missing: {', '.join(waiting[:5])}",
                fix="increase Policy(start_timeout=...), or see %tfd_cluster logs",
            )
        task = next(t for t in waiting if t in rows and rows[t].state.ended)
        reason = rows[task].reason
        if not reason:
            self._monitor.wait(lambda rows: bool(self._monitor.end_reason), _END_SECONDS)
            reason = f"the cluster ended: {self._monitor.end_reason}".removesuffix(": ")
        raise errors.LaunchError(
            f"start of {task} failed: {reason}{self._last_output(task)}",
            task=task,
            fix="fix the cause and start again",
        )

    def _wait_settled(self, settled: Callable[[dict[str, TaskRow]], bool], limit: float) -> bool:
        """Wait until tasks have settled. Raise LaunchError if hosts cannot reach each other."""
        assert self._task_host is not None
        deadline, before = time.monotonic() + limit, ""
        while not self._monitor.wait(
            settled, min(_PEER_CHECK_SECONDS, deadline - time.monotonic())
        ):
            if time.monotonic() >= deadline:
                return False
            # A single failure may be a task that is just ending, so only a repeated one counts.
            unreachable = "; ".join(self.unreachable_peers())
            if unreachable and unreachable == before:
                raise errors.LaunchError(
                    unreachable, fix="allow connections between these hosts, then start again"
                )
            before = unreachable
        return True

    def journal_size(self) -> int | None:
        """Return the bytes of the dispatcher's journal, or None if it keeps none.

        Raises
        ------
        OSError, TfdError
            It cannot be read.
        """
        if self.work_dir is None:
            return None
        if self.on_this_host or work_dir.is_url(self.work_dir):
            return work_dir.total_bytes(self.work_dir)
        return self.task_host.journal_size()

    def free_disk_space(self) -> int | None:
        """Return the bytes free for the dispatcher's journal, or None if there is no limit."""
        if self.work_dir is None or work_dir.is_url(self.work_dir):
            return None
        if self.on_this_host:
            return shutil.disk_usage(self.work_dir).free
        return self.task_host.free_disk_space()

    def unreachable_peers(self) -> list[str]:
        """Return a sentence for each host that cannot reach a ready task. Takes a few seconds."""
        ready = {
            row.task: row.address for row in self._monitor.rows() if row.state is TaskState.READY
        }
        return [] if self._task_host is None else self._task_host.unreachable_peers(ready)

    def _last_output(self, task: str) -> str:
        with contextlib.suppress(errors.TfdError):
            if output := self.log(task, 5):
                return "\n  Last output:" + "".join(f"\n    {t}" for t in output.splitlines())
        return ""
