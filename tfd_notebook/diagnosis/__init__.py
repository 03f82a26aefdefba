"""The doctor: runs the checks that every package registers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from tfd_notebook.cluster import data_service
from tfd_notebook.cluster.cluster import Cluster, running
from tfd_notebook.data.diagnostics import inspect_dataset
from tfd_notebook.diagnosis import cluster_checks, data_service_checks
from tfd_notebook.errors import UnknownName, UsageError
from tfd_notebook.model import diagnostics
from tfd_notebook.model.diagnostics import Finding
from tfd_notebook.model.spec import SERVER_ROLES, Role, TaskState
from tfd_notebook.net import probe
from tfd_notebook.net.task_probe import is_same_job, is_same_task
from tfd_notebook.resolvers import validation
from tfd_notebook.resolvers.diagnostics import ClusterDescription, from_environment, own_task_in
from tfd_notebook.views.diagnostics import Findings

__all__ = ["doctor", "load"]

#: The modules that register findings and checks.
_CHECK_MODULES = (
    "tfd_notebook.launchers.diagnostics",
    "tfd_notebook.resolvers.diagnostics",
    "tfd_notebook.data.diagnostics",
    "tfd_notebook.diagnosis.data_service_checks",
    "tfd_notebook.diagnosis.cluster_checks",
    "tfd_notebook.spark.preflight.diagnostics",
)
_PROBE_SECONDS = 2.0


def load() -> None:
    """Import the modules that register findings and checks."""
    for module in _CHECK_MODULES:
        importlib.import_module(module)


def doctor(target: Any = None) -> Findings:
    """Find current and future problems that have not raised an error yet.

    It changes nothing. Its network requests have a timeout of a few seconds.

    Parameters
    ----------
    target : optional
        The object to check:

        * a cluster, or its name
        * the address ``"host:port"`` of a dispatcher or of another task
        * a mapping, a ``tf.train.ClusterSpec`` or a resolver that names tasks
        * a ``tf.data.Dataset``
        * a SparkSession

        Default: this process, the tasks that TF_CONFIG names, and all clusters of this process.
        Datasets that read from these clusters are included.

    Returns
    -------
    Findings
        A sequence of `Finding`, the most severe first, each with
        ``code severity where what why fix``.

    Raises
    ------
    UnknownName
        This process has no cluster with this name.
    UsageError
        `target` is of another type.
    ResolveError
        The description of the tasks is invalid.
    """
    load()
    if target is None:
        return check_all()
    if isinstance(target, str) and ":" in target:
        return _check_address(target)
    if isinstance(target, (str, Cluster)):
        cluster = _cluster_by_name(target) if isinstance(target, str) else target
        return Findings(check_cluster(cluster), [_place(cluster)])
    if type(target).__module__.startswith("pyspark."):
        # Import time: no other target needs Spark.
        from tfd_notebook.spark.preflight import check

        return check.inspect_spark(target)[1]
    if hasattr(target, "element_spec"):
        return Findings(diagnostics.run_checks("dataset", inspect_dataset(target)), ["the dataset"])
    return _check_tasks(target)


def check_all() -> Findings:
    """Check this process, TF_CONFIG, and all clusters of this process."""
    load()
    findings = list(diagnostics.run_checks("process", None))
    checked = ["this process"]
    description = from_environment()
    if description is not None:
        findings += diagnostics.run_checks("tasks", description)
        checked.append("TF_CONFIG")
    clusters = running()
    for cluster in clusters.values():
        findings += check_cluster(cluster)
        checked.append(_place(cluster))
    snapshots = {name: cluster.snapshot() for name, cluster in clusters.items()}
    return Findings([*findings, *cluster_checks.oversubscribed_gpus(snapshots)], checked)


def check_cluster(cluster: Cluster) -> Iterator[Finding]:
    """Check a cluster, its service, its servers and the datasets that read from it."""
    load()
    for finding in diagnostics.run_checks("cluster", cluster):
        yield finding.at(cluster.name)
    snapshot = cluster.snapshot()
    target = cluster_checks.target_of(cluster)
    if target is not None and "dispatcher:0" in _ready(cluster):
        service = data_service_checks.Service.inspect(
            target,
            snapshot.launcher != "external",
            data_service.of(cluster).removed_addresses,
            [row for row in snapshot.tasks if row.role is Role.DATA_WORKER],
            snapshot.journal_bytes,
        )
        for finding in diagnostics.run_checks("service", service):
            yield finding.at(cluster.name)
    tasks: dict[str, dict[int, str]] = {}
    for row in snapshot.tasks:
        if row.role in SERVER_ROLES and row.task in _ready(cluster):
            tasks.setdefault(str(row.role), {})[row.index] = row.address
    if tasks:
        # The coordinator assigns the indexes of external tasks when it connects.
        may_be = is_same_job if snapshot.launcher == "external" else is_same_task
        description = ClusterDescription.probe(tasks, cluster.name, may_be)
        yield from diagnostics.run_checks("tasks", description)
    for known in list(data_service.of(cluster).registered.values()):  # other threads add some
        if known.read is not None and (read := known.read()) is not None:
            yield from diagnostics.run_checks("dataset", inspect_dataset(read))


def _place(cluster: Cluster) -> str:
    kept = data_service.of(cluster).kept()
    return f"cluster {cluster.name!r}" + (f" ({kept})" if kept else "")


def _ready(cluster: Cluster) -> set[str]:
    return {row.task for row in cluster.snapshot().tasks if row.state is TaskState.READY}


def _cluster_by_name(name: str) -> Cluster:
    known = running()
    if name not in known:
        raise UnknownName(
            f"no cluster {name!r} in this process",
            fix=f"clusters here: {', '.join(known) or 'none'}; for another process: "
            f"tfd doctor {name}",
        )
    return known[name]


def _check_address(address: str) -> Findings:
    result = probe.probe(address, _PROBE_SECONDS)
    if result.alive and result.kind == "server" and result.task is not None:
        job, _, index = result.task.partition(":")
        tasks = {job: {int(index): result.address}}
        description = ClusterDescription.probe(tasks, address)
        checked = f"{result.task} at {result.address}"
        return Findings(diagnostics.run_checks("tasks", description), [checked])
    if result.alive and result.kind == "data_worker":
        return Findings([], [f"data worker at {result.address}"])
    service = data_service_checks.Service.inspect(address)
    return Findings(diagnostics.run_checks("service", service), [service.place])


def _check_tasks(target: Any) -> Findings:
    place = str(getattr(target, "place", "the named tasks"))
    spec = target.cluster_spec() if hasattr(target, "cluster_spec") else target
    spec = validation.tasks_of(spec) if hasattr(spec, "jobs") else spec
    if not isinstance(spec, Mapping):
        raise UsageError(
            f"invalid target of type {type(target).__name__}",
            fix="name a cluster, an address, tasks or a dataset",
        )
    tasks = validation.checked(spec, place)
    # A resolver of several clusters renumbers their tasks, and then has `may_be`.
    may_be = getattr(target, "may_be", is_same_task)
    own = validation.own_task(target) if hasattr(target, "cluster_spec") else own_task_in(tasks)
    description = ClusterDescription.probe(tasks, place, may_be, own)
    return Findings(diagnostics.run_checks("tasks", description), [place])
