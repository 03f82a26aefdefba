"""Checks of a running cluster."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tfd_notebook.agent import memory
from tfd_notebook.agent.admin_policy import limits
from tfd_notebook.cluster import data_service
from tfd_notebook.cluster.monitor import memory_cause
from tfd_notebook.cluster.training import KERAS_2, NO_KERAS
from tfd_notebook.coordinator.connection import open_port
from tfd_notebook.data.bottleneck import advice
from tfd_notebook.errors import TfdError
from tfd_notebook.launchers.diagnostics import MEMORY, NEAR, PROXY
from tfd_notebook.model.diagnostics import Finding, check, kind, listed
from tfd_notebook.model.snapshot import Snapshot
from tfd_notebook.model.spec import Endpoint, Role, TaskState
from tfd_notebook.net import proxies

if TYPE_CHECKING:
    from tfd_notebook.cluster.cluster import Cluster

#: Number of restarts of a task, or of reconnects to a host, that is reported.
_MANY_RESTARTS = 3
#: Variables that change in a kernel without the user, and do not affect tasks.
_IGNORED = re.compile(
    r"(_|COLUMNS|LINES|OLDPWD|PWD|SHLVL|TERM|TF2_BEHAVIOR|no_grpc_proxy"
    # ParameterServerStrategy sets these in the process of its coordinator.
    r"|TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE|TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY)$"
    r"|CUDA_|ENABLE_RUNTIME_|HDF5_|IPY|JPY_|JUPYTER|KMP_|MPL|PYDEVD|PYTEST|TFD_|TPU_"
)

SHARED_GPU = kind(
    "TFD843",
    "warning",
    "GPU that two tasks share",
    "each takes the whole memory of the GPU, or both are slower",
)
LATE_ENVIRONMENT = kind(
    "TFD832",
    "warning",
    "environment variables set too late for the tasks",
    "tasks keep the environment from the start of their cluster",
)
STALE_MODULES = kind(
    "TFD833",
    "warning",
    "stale modules",
    "a process keeps the version of a module that it has imported",
)
KERAS_3 = kind(
    "TFD851",
    "warning",
    "Keras 3 with parameter servers",
    "fit, evaluate and predict raise an error under ParameterServerStrategy",
)
OPEN_TASKS = kind(
    "TFD852",
    "warning",
    "tasks open to other hosts",
    "any client that reaches such a port can run graphs, which read and write files",
)
OPEN_PROCESS = kind(
    "TFD863",
    "warning",
    "port of this process open to other hosts",
    "any client that reaches it can run graphs in this process, which read and write files",
)
FREQUENT_RESTARTS = kind(
    "TFD853",
    "warning",
    "too many restarts or reconnects",
    "each one loses or delays work in progress, and the cause persists",
)
FAILED_TASK = kind(
    "TFD854", "error", "failed, lost or hung task", "its share of the work is missing"
)
BLOCKED_FUNCTION = kind(
    "TFD855",
    "warning",
    "Python function that does not return",
    "its thread delivers no element, and an epoch does not end without them",
)
MISSING_CONSUMERS = kind(
    "TFD819",
    "warning",
    "coordinated read without all of its consumers",
    "a round is delivered only when every consumer of the job requests it",
)
SLOW_WORKER = kind(
    "TFD856",
    "warning",
    "slow data worker",
    "the consumer waits for it, and more data workers do not change that",
)
#: Seconds for which a consumer waits before it is reported.
_ROUND_SECONDS = 1.0


@check("cluster")
def missing_consumers(cluster: Cluster) -> Iterator[Finding]:
    """Report coordinated reads that wait for other consumers."""
    consumers = data_service.of(cluster).consumers
    for name in consumers.stuck(_ROUND_SECONDS):
        fix = advice.missing_consumers(consumers.named(name).live.delivery)
        if fix:
            yield MISSING_CONSUMERS.finding(f"{name!r} waits in a coordinated read", fix)


@check("cluster")
def failed_tasks(cluster: Cluster) -> Iterator[Finding]:
    """Report tasks that failed, are lost, or hang."""
    for row in cluster.snapshot().tasks:
        if row.state in (TaskState.FAILED, TaskState.LOST, TaskState.HUNG):
            fix = data_service.of(cluster).restart_step(row.task, row.reason, logs=True)
            what = f"{row.task} is {row.state}: {row.reason or 'unknown reason'}"
            if memory.is_reason(row.reason):
                fix = memory.FIX
                if row.role is Role.DATA_WORKER:
                    what += f".{memory_cause(data_service.of(cluster).registered)}"
            yield FAILED_TASK.finding(what, fix)


@check("cluster")
def blocked_functions(cluster: Cluster) -> Iterator[Finding]:
    """Report Python functions of datasets that do not return."""
    service = data_service.of(cluster)
    for blocked in service.blocked_functions():
        restart = "; ".join(map(service.restart_step, blocked.tasks))
        if service.service_in_process:
            restart = "restart the kernel"
        yield BLOCKED_FUNCTION.finding(
            f"{blocked} has not returned for {blocked.seconds:.0f} s",
            "cluster.stacks() shows the line at which it waits. Add a timeout there, then "
            f"{restart}",
        )


@check("cluster")
def slow_workers(cluster: Cluster) -> Iterator[Finding]:
    """Report ready data workers for which a consumer waits more than for the others."""
    service = data_service.of(cluster)
    ready = {row.task for row in cluster.snapshot().tasks if row.state == TaskState.READY}
    limits = ((name, each.live.limit) for name, each in service.consumers.running())
    by_task = {limit.stage: (name, limit) for name, limit in limits if limit.stage in ready}
    for task, (name, limit) in by_task.items():
        yield SLOW_WORKER.finding(
            f"{name!r} waits for {task}, which is slower than the other data workers", limit.advice
        )


@check("cluster")
def proxy(cluster: Cluster) -> Iterator[Finding]:
    """Report a proxy that was set after the cluster started."""
    rows = [row for row in cluster.snapshot().tasks if row.address and not row.state.ended]
    hosts = [Endpoint.parse(row.address).host for row in rows]
    if rows and (conflict := proxies.in_the_way(hosts)) is not None:
        variable, missing = conflict
        yield PROXY.finding(
            f"{variable} was set after the start, without an exception for {listed(missing)}",
            f'del os.environ["{variable}"], or add these hosts to os.environ["no_grpc_proxy"]',
        )


@check("cluster")
def open_tasks(cluster: Cluster) -> Iterator[Finding]:
    """Report ports that are open to all hosts, or whose peers are unknown."""
    by_peers: dict[str, list[str]] = {}
    for row in cluster.snapshot().tasks:
        if row.open_to == "everyone" or row.open_to.startswith("unknown"):
            by_peers.setdefault(row.open_to, []).append(row.task)
    for peers, tasks in by_peers.items():
        yield OPEN_TASKS.finding(
            f"{listed(tasks)} are open to {peers}",
            'allow only the networks that need them, such as allow=("10.0.0.0/8",) of the launcher',
        )


@check("process")
def open_process(_: None) -> Iterator[Finding]:
    """Report a TensorFlow server in this process whose port has no filter."""
    if (port := open_port()) is not None:
        yield OPEN_PROCESS.finding(
            f"TensorFlow's server in this process listens at port {port} without a filter",
            'use cluster.strategy() or cluster.resolver without allow="0.0.0.0/0"; restart the '
            "kernel to close the port",
        )


@check("cluster")
def frequent_restarts(cluster: Cluster) -> Iterator[Finding]:
    """Report tasks that restart often, and hosts whose connection is lost often."""
    for row in cluster.snapshot().tasks:
        if row.restarts >= _MANY_RESTARTS:
            yield FREQUENT_RESTARTS.finding(
                f"{row.task} was restarted {row.restarts} times",
                f"see cluster.logs({row.task!r}) for the cause",
            )
    for host, count in data_service.of(cluster).reconnects.items():
        if count >= _MANY_RESTARTS:
            yield FREQUENT_RESTARTS.finding(
                f"the connection to {host} was lost and restored {count} times",
                "check whether the network, the host or a firewall closes it",
            )


@check("cluster")
def near_memory_limit(cluster: Cluster) -> Iterator[Finding]:
    """Report tasks that are close to the memory limit of the administrator's policy."""
    policy = limits()
    if policy.memory_gb is None:
        return
    for row in cluster.snapshot().tasks:
        if row.rss_mb is not None and row.rss_mb > NEAR * policy.memory_gb * 1e3:
            yield MEMORY.finding(
                f"{row.task} uses {row.rss_mb / 1e3:.2f} GB of memory, and a task is ended above "
                f"{policy.memory_gb:g} GB ({policy.quote('memory_gb')})",
                "reduce the memory of each task, or ask the administrator of this host",
            )


@check("cluster")
def keras_3(cluster: Cluster) -> Iterator[Finding]:
    """Report models of a Keras that does not support the strategy of this cluster."""
    keras = sys.modules.get("keras")  # TensorFlow itself may have imported it.
    version = str(getattr(keras, "__version__", ""))
    if version.startswith("3.") and cluster.snapshot().planned.get(Role.PS) and _has_model(keras):
        yield KERAS_3.finding(
            f"{NO_KERAS}, and this process has a model of Keras {version}", KERAS_2
        )


def _has_model(keras: Any) -> bool:
    """Return True if this process holds a Keras model."""
    # isinstance() would run the code of objects that define __class__.
    kinds = {type(value) for value in gc.get_objects()}
    return any(keras.Model in kind.__mro__ and kind is not keras.Model for kind in kinds)


@check("cluster")
def late_environment(cluster: Cluster) -> Iterator[Finding]:
    """Report variables that were set, changed or removed after the cluster had started."""
    initial = data_service.of(cluster).task_environment
    if initial is None or data_service.of(cluster).service_in_process:
        return
    names = sorted(
        name
        for name in initial.environment.keys() | os.environ.keys()
        if initial.environment.get(name) != os.environ.get(name)
        and name not in cluster.config.env
        and not _IGNORED.match(name)
    )
    if names:
        yield LATE_ENVIRONMENT.finding(
            f"{listed(names)} changed after the cluster had started",
            "set them before the cluster starts, or pass env={...}, and start it again",
        )


@check("cluster")
def stale_modules(cluster: Cluster) -> Iterator[Finding]:
    """Report modules of the user that were edited after a task had imported them."""
    if (
        data_service.of(cluster).task_environment is None
        or data_service.of(cluster).service_in_process
    ):
        return
    tasks: dict[str, list[str]] = {}
    for task, report in sorted(data_service.of(cluster).inspect_tasks().items()):
        for name in report["stale"]:
            tasks.setdefault(name, []).append(task)
    for name, stale in sorted(tasks.items()):
        yield STALE_MODULES.finding(
            f"{name} was edited after {listed(stale)} had imported it",
            f"importlib.reload({name}) in this process, then "
            + "; ".join(f"cluster.restart({task!r})" for task in stale),
        )


def oversubscribed_gpus(snapshots: Mapping[str, Snapshot]) -> Iterator[Finding]:
    """Report GPUs that several tasks use, of one cluster or of several."""
    users: dict[tuple[str, int], list[str]] = {}
    for name, snapshot in snapshots.items():
        for gpu in snapshot.gpus:
            if gpu.task:
                users.setdefault((gpu.host, gpu.index), []).append(f"{name}/{gpu.task}")
    for (host, index), tasks in users.items():
        if len(tasks) > 1:
            yield SHARED_GPU.finding(
                f"GPU {index} of {host} is used by {', '.join(tasks)}",
                "give each cluster different GPUs: gpus=[0], gpus=[1]",
            )


def target_of(cluster: Cluster) -> str | None:
    """Return the address of a cluster's dispatcher, or None without one."""
    try:
        return data_service.of(cluster).service_target.partition("://")[2]
    except TfdError:
        return None
