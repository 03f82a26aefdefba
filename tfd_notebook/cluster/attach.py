"""Clusters that this process did not start: found, taken over, watched."""

from __future__ import annotations

import contextlib
import difflib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tfd_notebook import errors, views
from tfd_notebook.cluster import control_socket, registry
from tfd_notebook.cluster.cluster import Cluster
from tfd_notebook.cluster.config import build_config
from tfd_notebook.cluster.gpu_allocation import GpuAllocation
from tfd_notebook.cluster.lease import check_hours
from tfd_notebook.launchers import base, external
from tfd_notebook.launchers.client import detached
from tfd_notebook.launchers.client.detached import RemoteDetachedCluster
from tfd_notebook.model import spec
from tfd_notebook.model.spec import Policy, Role


class Clusters(Mapping[str, Cluster]):
    """The clusters that this process holds, by name; it shows all of this user's.

    A name finds those of kernels elsewhere, too, which are seen and steered here.
    """

    def __init__(self, held: dict[str, Cluster]) -> None:
        self._held = held

    def __getitem__(self, name: str) -> Cluster:
        held: Cluster = {**registry.running_clusters(), **self._held}[name]
        return held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return repr(self._held)

    @property
    def everywhere(self) -> views.Table:
        """The clusters of all processes of this user on this host, and those without a process."""
        return views.clusters_table(everywhere())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        table = self.everywhere
        return {"text/plain": table.text(), "text/html": table.html()}


def clusters() -> Clusters:
    """Return the clusters of this process that have not ended, by name.

    Shown in a notebook it lists those of the user's other processes, too, and the detached ones,
    which `attach` takes over.

    Returns
    -------
    Clusters
        A mapping of str to `Cluster`, whose ``everywhere`` is the table of all.
    """
    return Clusters(registry.clusters())


def everywhere() -> list[dict[str, Any]]:
    """Return all clusters of this user on this host, as `tfd_notebook.views.brief` gives them.

    Each has a ``pid``, of the process that holds it; None for a detached one that none holds, and
    for that an ``agent``: the process that looks after it, which tells those of one name apart.
    """
    found = control_socket.clusters()
    held = {one["name"] for one in found if one["lease"] is not None}
    for where in detached.detached():
        # One that ends just now, or does not answer, must not hide the others.
        with contextlib.suppress(errors.TfdError):
            for one in _summaries(where):
                # Of a kernel that was killed the agent learns later than others. One on other hosts
                # is not asked.
                if not (one.pop("heard", True) and one["name"] in held):
                    found.append(one)
    return found


def attach(
    target: str | Mapping[str, Iterable[str]],
    name: str | None = None,
    *,
    connect: bool = True,
    agent: int | None = None,
) -> Cluster:
    """Take over a cluster that outlives its kernel, or use one that somebody else runs.

    Parameters
    ----------
    target : str, mapping or tf.train.ClusterSpec
        The name of a cluster that `Cluster.detach` or ``--detach`` let stay; or
        ``"grpc://host:port"`` of a dispatcher; or the jobs of a ClusterSpec.
    name : str, optional
        How a foreign cluster is called here. Default ``"foreign"``.
    connect : bool
        Whether this process shall be able to coordinate its workers. Default true; false is for
        one that only looks at it or ends it.
    agent : int, optional
        The process of its agent, as ``tfd list`` shows it; where several detached clusters have
        the name.

    Returns
    -------
    Cluster
        A detached one is whole: it can be read from, scaled and stopped, and this process's end
        does not end it. The one that this process has already, where it has it. A foreign one can
        be watched, read from and coordinated; it is never started, changed or ended, and `stop`
        only lets go of it.

    Raises
    ------
    UnknownName
        No such cluster is detached.
    NameTaken
        This process has another one of that name.
    LaunchError
        Nobody answers at the address.
    """
    if not isinstance(target, str) or "://" in target or ":" in target:
        return _foreign(target, name or "foreign", connect)
    name = target
    living = registry.clusters().get(name)
    if living is not None and living.detached and agent is None:
        return living
    where = find(name, agent)
    reached = where.reach()
    try:
        about = next((one["about"] for one in reached.clusters() if one["name"] == name), None)
        if not about:
            raise errors.UnknownName(f"cluster {name!r} has just ended", fix="tfd.clusters()")
        if isinstance(where, RemoteDetachedCluster):
            # A compromised host must not choose what runs or is opened on this one.
            about = where.about
            if not about:
                raise errors.StateError(
                    f"attach to cluster {name!r} failed: {where.path} does not describe it",
                    fix="detach it again in the process that holds it",
                )
        config = spec.unpack(about["config"])

        def adopt(one: Cluster) -> tuple[base.Node, Mapping[str, Any]]:
            node, found = reached.adopt(config, one._monitor.handle_event)
            return node, {**found, "about": about} if isinstance(
                where, RemoteDetachedCluster
            ) else found

        made = Cluster._from_running_tasks(
            config, base.launcher(config.launcher, config.options), adopt
        )
    except BaseException:
        reached.close()
        raise
    if connect:
        made._hide_gpus_from_kernel()
    return made


def _foreign(target: Any, name: str, connect: bool) -> Cluster:
    if not isinstance(target, (str, Mapping)) and not hasattr(target, "as_dict"):
        raise errors.UsageError(
            f"target={target!r} is no cluster",
            fix='a name, "grpc://host:port" of a dispatcher, or {"worker": ["host:port"]}',
        )
    jobs = target if isinstance(target, (str, Mapping)) else target.as_dict()
    launcher = external.External(target=jobs)
    counts: dict[Role, int] = {}
    for task in external.addresses_of(jobs):
        role = Role(task.partition(":")[0])
        counts[role] = counts.get(role, 0) + 1
    config = spec.ClusterConfig(
        name, launcher.name, counts, Policy(recycle=False), options=launcher.options
    )

    def adopt(one: Cluster) -> tuple[external.ExternalNode, dict[str, Any]]:
        node = external.ExternalNode(jobs, name, one._monitor.handle_event)
        seen = [event["task"].partition(":")[0] for event in node.first]
        fleet: dict[str, Any] = {
            "counts": {role: seen.count(role) for role in seen},
            "deal": GpuAllocation().pack(),
            "static": [],
            "removed": [],
            "work_dir": None,
        }
        about = {"fleet": fleet, "used": True}
        return node, {"about": about, "lease": None, "left": None, "tasks": node.first}

    living = registry.clusters().get(name)
    if living is not None and living.config == config:
        return living
    made = Cluster._from_running_tasks(config, launcher, adopt)
    if connect:
        made._hide_gpus_from_kernel()
    return made


def start(hours: float | None, **options: Any) -> Cluster:
    """Return ``Cluster(**options)``, detached for so many hours where that is not None.

    A detached cluster of the same name and specification is taken over, and stays so long from now.

    Raises
    ------
    NameTaken
        One of that name is detached that has another specification.
    """
    if hours is None:
        return Cluster(**options)
    check_hours(hours)
    config, _ = build_config(options.get("name"), {k: v for k, v in options.items() if k != "name"})
    living = registry.clusters()
    if config.name in living or not is_detached(config.name):
        made = Cluster(**options)
        try:
            made.detach(hours)
        except BaseException:
            if config.name not in living:
                made.stop()
            raise
    else:
        made = attach(config.name)
        if not spec.is_same(made.config, config):
            made.leave()
            raise errors.NameTaken(
                f"a detached cluster {config.name!r} lives, with another specification",
                fix=f"use tfd.attach({config.name!r}) or end it: tfd stop {config.name}",
            )
        made.detach(hours)
    return made


def is_detached(name: str) -> bool:
    """Whether a detached cluster of this user on this host has that name."""
    return any(one.name == name for one in detached.detached())


def find(name: str, agent: int | None = None) -> detached.Detached | RemoteDetachedCluster:
    """Return where a detached cluster is.

    Raises
    ------
    UnknownName
        There is none of that name.
    UsageError
        There are several.
    """
    known = detached.detached()
    found = [one for one in known if one.name == name and agent in (None, one.pid)]
    if len(found) == 1:
        return found[0]
    if found:
        # One on other hosts has no agent here, and is the one that is left when these are stopped.
        pids = [one.pid for one in found if one.pid is not None]
        raise errors.UsageError(
            f"{len(found)} detached clusters are called {name!r}",
            fix=f"name its agent, which is one of {', '.join(map(str, pids))}: "
            f"tfd.attach({name!r}, agent={pids[0]}), tfd stop {name} --pid {pids[0]}"
            if pids
            else "stop one in the process that holds it",
        )
    if name in registry.running_clusters():
        raise errors.UnknownName(
            f"no detached cluster is called {name!r}",
            fix=f"this process has it already: tfd.clusters()[{name!r}]",
        )
    names = [one.name for one in known]
    near = difflib.get_close_matches(name, names, n=1)
    raise errors.UnknownName(
        f"no detached cluster is called {name!r}",
        fix=(f"did you mean {near[0]!r}? " if near else "")
        + f"detached clusters: {', '.join(names) or 'none'}",
    )


def _summaries(where: detached.Detached | RemoteDetachedCluster) -> list[dict[str, Any]]:
    """Return a detached cluster in a few words; hosts are not asked just for a list."""
    if isinstance(where, RemoteDetachedCluster):
        return [
            {
                "name": where.name,
                "state": "detached",
                "launcher": where.launcher,
                "planned": where.planned,
                "observed": None,
                "reading": 0,
                "lease": where.lease,
                "pid": None,
                "agent": None,
            }
        ]
    reached = where.reach()
    try:
        return [
            {**_summary(one, where.pid), "heard": one["heard"]}
            for one in reached.clusters(5.0)
            if one["name"] == where.name
        ]
    finally:
        reached.close()


def _summary(said: Mapping[str, Any], agent: int) -> dict[str, Any]:
    about = said["about"]
    planned = sum(about["fleet"]["counts"].values()) if about else len(said["tasks"])
    observed = said["tasks"].count("ready")
    return {
        "name": said["name"],
        "state": "ready" if observed >= planned else "degraded",
        "launcher": about["config"]["launcher"] if about else "",
        "planned": planned,
        "observed": observed,
        "reading": 0,
        "lease": None if said["lease"] is None else time.time() + said["lease"],
        "pid": None,
        "agent": agent,
    }
