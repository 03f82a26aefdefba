"""Access to clusters that this process did not start: listing, attaching, watching."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfd_notebook import errors, views
from tfd_notebook.cluster import registry, servers
from tfd_notebook.cluster.cluster import Cluster, running
from tfd_notebook.cluster.config import ClusterOptions
from tfd_notebook.cluster.gpu_allocation import GpuAllocation
from tfd_notebook.cluster.view import ClusterView
from tfd_notebook.launchers import base, external
from tfd_notebook.launchers.client import detached
from tfd_notebook.launchers.client.detached import RemoteDetachedCluster
from tfd_notebook.model import spec
from tfd_notebook.model.spec import Policy, Role, TaskState, check_hours
from tfd_notebook.net import control_calls
from tfd_notebook.resolvers import validation
from tfd_notebook.resolvers.diagnostics import own_task_in


class Clusters(Mapping[str, ClusterView]):
    """The clusters of this process by name. Its display lists all clusters of the user.

    Lookup by name also returns clusters of remote kernels that this process controls.
    """

    def __init__(self, clusters: dict[str, Cluster]) -> None:
        self._clusters = clusters

    def __getitem__(self, name: str) -> ClusterView:
        known = {**registry.running_clusters(), **self._clusters}
        if name not in known:
            raise errors.UnknownName(
                f"this process has no cluster {name!r}",
                fix=f"{errors.nearest(name, known)}clusters: {', '.join(known) or 'none'}",
            )
        return known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._clusters)

    def __len__(self) -> int:
        return len(self._clusters)

    def __repr__(self) -> str:
        return repr(self._clusters)

    @property
    def everywhere(self) -> views.Table:
        """The clusters of all processes of this user on this host, and the detached clusters."""
        return views.clusters_table(all_clusters())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        table = self.everywhere
        return {"text/plain": table.text(), "text/html": table.html()}


def clusters() -> Clusters:
    """Return the running clusters of this process by name.

    In a notebook, the display also lists the clusters of the user's other processes, and the
    detached clusters. `attach` connects to those.

    Returns
    -------
    Clusters
        A mapping of str to `Cluster`. Its ``everywhere`` is the table of all clusters. Lookup by
        name also returns clusters of remote kernels, which have a part of its methods.
    """
    return Clusters(running())


def all_clusters(unanswered: list[errors.TfdError] | None = None) -> list[dict[str, Any]]:
    """Return all clusters of this user on this host, in the format of `tfd_notebook.views.brief`.

    ``pid`` is the process that holds the cluster, or None for a detached cluster without one. Such
    a cluster has ``agent``, the pid of its agent, which distinguishes clusters of the same name.
    The list `unanswered` is extended by the error of each process without a valid reply.
    """
    summaries = control_calls.clusters(unanswered=unanswered)
    leased = {summary["name"] for summary in summaries if summary.get("lease") is not None}
    for cluster in detached.detached():
        # A cluster that is ending, or does not respond, must not hide the others.
        with contextlib.suppress(errors.TfdError):
            for summary in _summaries(cluster):
                # `has_listeners` is False once the agent has lost its kernel. The agent notices a
                # killed kernel later than the control socket. Remote agents are not queried.
                if not (summary.pop("has_listeners", True) and summary["name"] in leased):
                    summaries.append(summary)
    return summaries


def attach(
    target: Any,
    name: str | None = None,
    *,
    connect: bool = True,
    agent: int | None = None,
) -> Cluster:
    """Attach to a detached cluster, or use a cluster that was not started by tfd.

    Parameters
    ----------
    target : str, mapping, tf.train.ClusterSpec or ClusterResolver
        The name of a cluster detached by `Cluster.detach` or ``--detach``. For an external cluster,
        ``"grpc://host:port"`` of a dispatcher, or the jobs of a ClusterSpec. A resolver names the
        task of this process, too, which is then not reported as lost.
    name : str, optional
        Name for an external cluster. Default ``"external"``.
    connect : bool
        Whether this process can coordinate its workers. Default true. Pass false to only inspect
        or stop the cluster.
    agent : int, optional
        The pid of the cluster's agent, as ``tfd list`` shows it. Needed if several detached
        clusters have the same name.

    Returns
    -------
    Cluster
        A detached cluster can be read from, scaled and stopped. It keeps running when this process
        exits. If this process already has the cluster, that object is returned. An external
        cluster can be watched, read from and coordinated, but not started, changed or stopped.
        Its `stop` only disconnects.

    Raises
    ------
    UnknownName
        No detached cluster has that name.
    NameTaken
        This process has another cluster of that name.
    LaunchError
        The address does not respond.
    """
    if not isinstance(target, str) or "://" in target or ":" in target:
        return _attach_external(target, name or "external", connect)
    name = target
    existing = running().get(name)
    if existing is not None and existing.detached and agent is None:
        return existing
    location = find(name, agent)
    agents = location.connect()
    try:
        reports = agents.clusters()
        description = next(
            (report["description"] for report in reports if report["name"] == name), None
        )
        if not description:
            raise errors.UnknownName(
                f"cluster {name!r} has just ended",
                fix="list the running clusters with tfd.clusters()",
            )
        if isinstance(location, RemoteDetachedCluster):
            # A compromised host must not choose what runs or is opened on this one.
            description = location.description
            if not description:
                raise errors.StateError(
                    f"attach to cluster {name!r} failed: {location.path} does not describe it",
                    fix="detach it again in the process that holds it",
                )
        config = spec.unpack(description["config"])

        def adopt(publish: base.OnEvent) -> tuple[base.TaskHost, base.AdoptedCluster]:
            task_host, adopted = agents.adopt(config, publish)
            if isinstance(location, RemoteDetachedCluster):
                adopted = dataclasses.replace(adopted, description=description)
            return task_host, adopted

        launcher = base.launcher(config.launcher, config.options)
        return _from_running_tasks(config, launcher, adopt, connect)
    except BaseException:
        agents.close()
        raise


def _attach_external(target: Any, name: str, connect: bool) -> Cluster:
    known: dict[str, Any] = {}
    target = getattr(target, "resolver", target)  # of a Resolution
    if hasattr(target, "cluster_spec"):
        known["own"] = validation.own_task(target)
        if hasattr(target, "may_be"):
            known["may_be"] = target.may_be
        target = target.cluster_spec()
    if not isinstance(target, (str, Mapping)) and not hasattr(target, "as_dict"):
        raise errors.UsageError(
            f"invalid target {target!r}",
            fix='use a name, "grpc://host:port" of a dispatcher, or {"worker": ["host:port"]}',
        )
    jobs = target if isinstance(target, (str, Mapping)) else target.as_dict()
    launcher = external.External(target=jobs)
    counts: dict[Role, int] = {}
    tasks: dict[str, dict[int, str]] = {}
    for task, address in external.addresses_of(jobs).items():
        job, _, index = task.partition(":")
        counts[Role(job)] = counts.get(Role(job), 0) + 1
        tasks.setdefault(job, {})[int(index)] = address
    known.setdefault("own", own_task_in(tasks))
    config = spec.ClusterConfig(
        name, launcher.name, counts, Policy(recycle=False), options=launcher.options
    )

    def adopt(publish: base.OnEvent) -> tuple[base.TaskHost, base.AdoptedCluster]:
        task_host = external.ExternalTaskHost(jobs, name, publish, **known)
        # The task of this process may never listen, and the cluster is ready without it.
        numbers = dict.fromkeys((event.task.partition(":")[0] for event in task_host.first), 0)
        for event in task_host.first:
            numbers[event.task.partition(":")[0]] += event.state is not TaskState.PLANNED
        task_manager: dict[str, Any] = {
            "counts": numbers,
            "gpu_allocation": GpuAllocation().pack(),
            "static_addresses": [],
            "removed_addresses": [],
            "work_dir": None,
        }
        description = {"task_manager": task_manager, "used": True}
        return task_host, base.AdoptedCluster(description, task_host.first)

    existing = running().get(name)
    if existing is not None and existing.config == config:
        return existing
    return _from_running_tasks(config, launcher, adopt, connect)


def _from_running_tasks(
    config: spec.ClusterConfig,
    launcher: base.Launcher,
    adopt: Callable[[base.OnEvent], tuple[base.TaskHost, base.AdoptedCluster]],
    connect: bool,
) -> Cluster:
    """Return a cluster of tasks that are running already; see `Lifecycle.adopt`."""
    with registry.locked() as registered:
        if config.name in registry.clusters():
            raise errors.NameTaken(
                f"another cluster {config.name!r} is running in this process",
                fix="stop or leave that cluster first",
            )
        cluster = registered[config.name] = Cluster._create(config, launcher)
    cluster._lifecycle.adopt(adopt, connect)
    return cluster


def start(options: ClusterOptions, hours: float | None) -> Cluster:
    """Return a cluster with these options, detached for `hours` unless that is None.

    If a detached cluster of the same name and specification runs, attach to it and renew its lease.

    Raises
    ------
    NameTaken
        A detached cluster of that name has another specification.
    """
    if hours is None:
        return Cluster(**vars(options))
    check_hours(hours)
    config, _ = options.configure()
    before = registry.clusters()
    if config.name in before or not servers.is_detached(config.name):
        cluster = Cluster(**vars(options))
        try:
            cluster.detach(hours)
        except BaseException:
            if config.name not in before:
                cluster.stop()
            raise
    else:
        cluster = attach(config.name)
        if not spec.is_same(cluster.config, config):
            cluster.leave()
            raise errors.NameTaken(
                f"a detached cluster {config.name!r} is running with another specification",
                fix=f"use tfd.attach({config.name!r}) or stop it: tfd stop {config.name}",
            )
        cluster.detach(hours)
    return cluster


def find(name: str, agent: int | None = None) -> detached.Detached | RemoteDetachedCluster:
    """Return the location of a detached cluster.

    Raises
    ------
    UnknownName
        No detached cluster has that name.
    UsageError
        Several detached clusters have that name.
    """
    candidates = detached.detached()
    matches = [c for c in candidates if c.name == name and agent in (None, c.pid)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        # A cluster on other hosts has no local agent. It remains when the local ones are stopped.
        pids = [cluster.pid for cluster in matches if cluster.pid is not None]
        raise errors.UsageError(
            f"{len(matches)} detached clusters are named {name!r}",
            fix=f"pass the pid of its agent, one of {', '.join(map(str, pids))}: "
            f"tfd.attach({name!r}, agent={pids[0]}), tfd stop {name} --pid {pids[0]}"
            if pids
            else "stop one in the process that holds it",
        )
    if name in registry.running_clusters():
        raise errors.UnknownName(
            f"no detached cluster is named {name!r}",
            fix=f"this process already has it: tfd.clusters()[{name!r}]",
        )
    names = [cluster.name for cluster in candidates]
    similar = errors.nearest(name, [*names, *registry.running_clusters()])
    raise errors.UnknownName(
        f"no detached cluster is named {name!r}",
        fix=f"{similar}detached clusters: {', '.join(names) or 'none'}",
    )


def _summaries(location: detached.Detached | RemoteDetachedCluster) -> list[dict[str, Any]]:
    """Return the summary of a detached cluster. Remote hosts are not queried for a list."""
    if isinstance(location, RemoteDetachedCluster):
        return [
            {
                "name": location.name,
                "state": "detached",
                "launcher": location.launcher,
                "planned": location.planned,
                "observed": None,
                "reading": 0,
                "lease": location.lease,
                "pid": None,
                "agent": None,
            }
        ]
    agents = location.connect()
    try:
        return [
            {**summary_of(report, location.pid), "has_listeners": report["has_listeners"]}
            for report in agents.clusters(5.0)
            if report["name"] == location.name
        ]
    finally:
        agents.close()


def summary_of(report: Mapping[str, Any], agent: int) -> dict[str, Any]:
    """Return the summary of a cluster from the report of its agent."""
    description = report["description"]
    planned = (
        sum(description["task_manager"]["counts"].values()) if description else len(report["tasks"])
    )
    observed = report["tasks"].count("ready")
    return {
        "name": report["name"],
        "state": "ready" if observed >= planned else "degraded",
        "launcher": description["config"]["launcher"] if description else "",
        "planned": planned,
        "observed": observed,
        "reading": 0,
        "lease": None if report["lease"] is None else time.time() + report["lease"],
        "pid": None,
        "agent": agent,
    }
