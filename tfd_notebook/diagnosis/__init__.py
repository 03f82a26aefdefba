"""The doctor: has every feature look for what it knows can be wrong."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from tfd_notebook.cluster import registry
from tfd_notebook.cluster.cluster import Cluster
from tfd_notebook.errors import UnknownName, UsageError
from tfd_notebook.model import diagnostics
from tfd_notebook.model.diagnostics import Finding
from tfd_notebook.model.spec import SERVER_ROLES, Role, TaskState
from tfd_notebook.net import probe
from tfd_notebook.views.diagnostics import Findings

__all__ = ["doctor", "load"]

#: The modules that register what they look for.
_OWNERS = (
    "tfd_notebook.launchers.diagnostics",
    "tfd_notebook.resolvers.diagnostics",
    "tfd_notebook.data.diagnostics",
    "tfd_notebook.diagnosis.data_service_checks",
    "tfd_notebook.diagnosis.cluster_checks",
    "tfd_notebook.spark.preflight.diagnostics",
)
_ASK_SECONDS = 2.0


def load() -> None:
    """Have all owners register what they look for."""
    for owner in _OWNERS:
        importlib.import_module(owner)


def doctor(target: Any = None) -> Findings:
    """Look for what is wrong, or will be, though nothing has raised an error.

    It changes nothing. What it asks over the network has a limit of a few seconds.

    Parameters
    ----------
    target : optional
        A cluster, or its name; ``"host:port"`` of a dispatcher or of another task; a mapping, a
        ``tf.train.ClusterSpec`` or a resolver that names tasks; a ``tf.data.Dataset``; or a
        SparkSession. Default: this process, what TF_CONFIG names, and all clusters of this process
        with the datasets that read from them.

    Returns
    -------
    Findings
        A sequence of `Finding`, the worst first, each with ``code severity where what why fix``.

    Raises
    ------
    UnknownName
        There is no cluster of that name in this process.
    UsageError
        `target` is nothing of all that.
    ResolveError
        What names the tasks cannot be meant.
    """
    load()
    if target is None:
        return everything()
    if isinstance(target, str) and ":" in target:
        return _address(target)
    if isinstance(target, (str, Cluster)):
        cluster = _named(target) if isinstance(target, str) else target
        return Findings(of_cluster(cluster), [f"cluster {cluster.name!r}"])
    if type(target).__module__.startswith("pyspark."):
        from tfd_notebook.spark.preflight import check

        return check.inspect_spark(target)[1]
    if hasattr(target, "element_spec"):
        from tfd_notebook.data.diagnostics import inspect_dataset

        return Findings(diagnostics.look("dataset", inspect_dataset(target)), ["the dataset"])
    return _described(target)


def everything() -> Findings:
    """Look at this process, at TF_CONFIG, and at all clusters of this process."""
    from tfd_notebook.resolvers.diagnostics import of_environment

    load()
    found = list(diagnostics.look("process", None))
    looked_at = ["this process"]
    described = of_environment()
    if described is not None:
        found += diagnostics.look("tasks", described)
        looked_at.append("TF_CONFIG")
    clusters = registry.clusters()
    for name, cluster in clusters.items():
        found += of_cluster(cluster)
        looked_at.append(f"cluster {name!r}")
    return Findings([*found, *_together(clusters)], looked_at)


def of_cluster(cluster: Cluster) -> Iterator[Finding]:
    """Look at one cluster, its service, its servers and the datasets that read from it."""
    from tfd_notebook.diagnosis import cluster_checks, data_service_checks
    from tfd_notebook.resolvers.diagnostics import Described

    load()
    yield from diagnostics.look("cluster", cluster)
    snapshot = cluster.snapshot()
    target = cluster_checks.target_of(cluster)
    if target is not None and "dispatcher:0" in _ready(cluster):
        ours = snapshot.launcher != "foreign"
        seen = data_service_checks.Service.asked(
            target,
            ours,
            cluster.removed_addresses,
            [row for row in snapshot.tasks if row.role is Role.DATA_WORKER],
        )
        for one in diagnostics.look("service", seen):
            yield one.at(cluster.name)
    tasks: dict[str, dict[int, str]] = {}
    for row in snapshot.tasks:
        if row.role in SERVER_ROLES and row.task in _ready(cluster):
            tasks.setdefault(str(row.role), {})[row.index] = row.address
    if tasks:
        yield from diagnostics.look("tasks", Described.asked(tasks, cluster.name))
    reads = [known.read() for known in cluster.registered.values() if known.read is not None]
    if any(read is not None for read in reads):
        from tfd_notebook.data.diagnostics import inspect_dataset

        for read in reads:
            if read is not None:
                yield from diagnostics.look("dataset", inspect_dataset(read))


def _ready(cluster: Cluster) -> set[str]:
    return {row.task for row in cluster.snapshot().tasks if row.state is TaskState.READY}


def _together(clusters: Mapping[str, Cluster]) -> Iterator[Finding]:
    from tfd_notebook.diagnosis import cluster_checks

    yield from cluster_checks.double_booked(
        {name: one.snapshot() for name, one in clusters.items()}
    )


def _named(name: str) -> Cluster:
    known = registry.clusters()
    if name not in known:
        raise UnknownName(
            f"there is no cluster {name!r} in this process",
            fix=f"clusters here: {', '.join(known) or 'none'}; tfd doctor {name} finds others",
        )
    return known[name]


def _address(address: str) -> Findings:
    from tfd_notebook.diagnosis.data_service_checks import Service
    from tfd_notebook.resolvers.diagnostics import Described

    found = probe.probe(address, _ASK_SECONDS)
    if found.alive and found.kind == "server" and found.task is not None:
        job, _, index = found.task.partition(":")
        described = Described({job: {int(index): found.address}}, address, {found.address: found})
        return Findings(diagnostics.look("tasks", described), [f"{found.task} at {found.address}"])
    if found.alive and found.kind == "data_worker":
        return Findings([], [f"data worker at {found.address}"])
    seen = Service.asked(address)
    return Findings(diagnostics.look("service", seen), [seen.place])


def _described(target: Any) -> Findings:
    from tfd_notebook.resolvers.diagnostics import Described
    from tfd_notebook.resolvers.validation import checked

    place = str(getattr(target, "place", "the tasks that were named"))
    spec = target.cluster_spec() if hasattr(target, "cluster_spec") else target
    jobs = {job: spec.task_indices(job) for job in spec.jobs} if hasattr(spec, "jobs") else None
    if jobs is not None:
        spec = {
            job: {index: spec.task_address(job, index) for index in indices}
            for job, indices in jobs.items()
        }
    if not isinstance(spec, Mapping):
        raise UsageError(
            f"a {type(target).__name__} is nothing that the doctor knows",
            fix="name a cluster, an address, tasks or a dataset",
        )
    tasks = checked(spec, place)
    # Some resolvers number the tasks of several clusters anew.
    same = getattr(target, "may_be", None)
    described = Described.asked(tasks, place, same) if same else Described.asked(tasks, place)
    return Findings(diagnostics.look("tasks", described), [place])
