"""Validation of the arguments of `Cluster`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tfd_notebook import errors
from tfd_notebook.agent.admin_policy import limits
from tfd_notebook.cluster import gpu_allocation
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
_OTHER_ARGUMENTS = (
    ("Policy", Policy.__dataclass_fields__),
    ("Service", Service.__dataclass_fields__),
    ("launchers.Local", ("host", "allow")),
)


def build_config(
    name: str | None, options: Mapping[str, Any]
) -> tuple[ClusterConfig, base.Launcher]:
    """Return the configuration of ``Cluster(name=name, **options)``, and its launcher.

    Raises
    ------
    UsageError, Unsupported, TypeError
    """
    for option in options:
        if option not in _OPTIONS:
            hint = next(
                (f"{kind}({option}=...)" for kind, fields in _OTHER_ARGUMENTS if option in fields),
                "",
            )
            raise TypeError(
                f"Cluster() got an unexpected argument {option!r}"
                + (f": pass it to tfd.{hint}" if hint else "")
            )
    launcher = base.launcher(options.get("launcher", "local"))
    preload, env = options.get("preload", ()), options.get("env") or {}
    if not isinstance(env, Mapping):
        raise errors.UsageError(f"invalid env {env!r}: expected a mapping of names to strings")
    if not isinstance(preload, Iterable):
        raise errors.UsageError(
            f"invalid preload {preload!r}: expected names of modules or libraries"
        )
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
    gpus = config.gpus
    requested = 0 if isinstance(gpus, str) else _requested_gpus(gpus, config.counts)
    limits().check_cluster(
        launcher.name, sum(config.counts.values()), requested, tuple(config.allow)
    )
    return config, launcher


def _requested_gpus(gpus: tuple[int, ...] | Mapping[str, int], counts: Mapping[Role, int]) -> int:
    """Return the total number of GPUs that the tasks request."""
    if isinstance(gpus, Mapping):
        return sum(count * counts.get(Role(role), 0) for role, count in gpus.items())
    return len(gpus)


def _counts(options: Mapping[str, Any]) -> dict[Role, Any]:
    """Return the requested number of tasks of each role, unchecked."""
    evaluator = options.get("evaluator", False)
    if not isinstance(evaluator, bool):
        raise errors.UsageError(
            f"invalid evaluator {evaluator!r}: expected True or False",
            fix="pass a bool; a cluster has at most one evaluator",
        )
    data_workers = options.get("data_workers", 0)
    counts: dict[Role, Any] = {
        role: int(evaluator) if role is Role.EVALUATOR else options.get(count_name(role), 0)
        for role in SERVER_ROLES
    }
    # A cluster with training tasks only needs no tf.data service.
    dispatcher = {Role.DISPATCHER: 1} if data_workers or not any(counts.values()) else {}
    return {**dispatcher, Role.DATA_WORKER: data_workers, **counts}


def check_roles(launcher: base.Launcher, counts: Mapping[Role, int]) -> None:
    """Raise Unsupported if the launcher cannot run one of the roles."""
    for role, count in counts.items():
        if count and role not in launcher.roles:
            supported = ", ".join(str(known) for known in Role if known in launcher.roles)
            raise errors.Unsupported(
                f"launcher {launcher.name!r} cannot run a {role}, only {supported}",
                fix='use launcher="local"',
            )
