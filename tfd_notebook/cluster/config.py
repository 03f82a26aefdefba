"""Turns the arguments of `Cluster` into a checked description."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tfd_notebook import errors
from tfd_notebook.agent.admin_policy import limits
from tfd_notebook.cluster import gpu_allocation
from tfd_notebook.cluster.task_manager import check_roles
from tfd_notebook.launchers import base
from tfd_notebook.model.spec import SERVER_ROLES, ClusterConfig, Policy, Role, Service, count_name

_OPTIONS = (
    "data_workers",
    "workers",
    "ps",
    "evaluator",
    "gpus",
    "launcher",
    "env",
    "preload",
    "policy",
    "service",
    "start",
)
_ELSEWHERE = (
    ("Policy", Policy.__dataclass_fields__),
    ("Service", Service.__dataclass_fields__),
    ("launchers.Local", ("host", "allow")),
)


def build_config(
    name: str | None, options: Mapping[str, Any]
) -> tuple[ClusterConfig, base.Launcher]:
    """Return what ``Cluster(name=name, **options)`` means, and its launcher.

    Raises
    ------
    UsageError, Unsupported, TypeError
    """
    for option in options:
        if option not in _OPTIONS:
            hint = next(
                (f"{kind}({option}=...)" for kind, fields in _ELSEWHERE if option in fields), ""
            )
            raise TypeError(
                f"Cluster() got an unexpected argument {option!r}"
                + (f": it belongs into tfd.{hint}" if hint else "")
            )
    launcher = base.launcher(options.get("launcher", "local"))
    preload, env = options.get("preload", ()), options.get("env") or {}
    if not isinstance(env, Mapping):
        raise errors.UsageError(f"env={env!r} must map names to strings")
    if not isinstance(preload, Iterable):
        raise errors.UsageError(f"preload={preload!r} must be names of modules or libraries")
    config = ClusterConfig(
        name=name or "cluster",
        launcher=launcher.name,
        counts=_counts(options),
        policy=Policy() if options.get("policy") is None else options["policy"],
        service=Service() if options.get("service") is None else options["service"],
        env=dict(env),
        preload=(preload,) if isinstance(preload, str) else tuple(preload),
        allow=launcher.allow,
        options=launcher.options,
        gpus=gpu_allocation.check(options.get("gpus", "auto")),
    )
    check_roles(launcher, config.counts)
    wish = config.gpus
    asked = 0 if isinstance(wish, str) else sum(_each(wish, config.counts))
    limits().check_cluster(launcher.name, sum(config.counts.values()), asked, tuple(config.allow))
    return config, launcher


def _each(wish: tuple[int, ...] | Mapping[str, int], counts: Mapping[Role, int]) -> Iterable[int]:
    """How many GPUs are asked for."""
    if isinstance(wish, Mapping):
        return (count * counts.get(Role(role), 0) for role, count in wish.items())
    return (len(wish),)


def _counts(options: Mapping[str, Any]) -> dict[Role, Any]:
    """Return how many tasks of each role are wanted; the numbers are not checked yet."""
    evaluator = options.get("evaluator", False)
    if not isinstance(evaluator, bool):
        raise errors.UsageError(
            f"evaluator={evaluator!r} must be True or False", fix="a cluster has one or none"
        )
    data_workers = options.get("data_workers", 0)
    counts: dict[Role, Any] = {
        role: int(evaluator) if role is Role.EVALUATOR else options.get(count_name(role), 0)
        for role in SERVER_ROLES
    }
    # Who only trains needs no service for data.
    dispatcher = {Role.DISPATCHER: 1} if data_workers or not any(counts.values()) else {}
    return {**dispatcher, Role.DATA_WORKER: data_workers, **counts}
