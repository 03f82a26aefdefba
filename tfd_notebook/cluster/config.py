"""Validation of the arguments of `Cluster`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tfd_notebook import errors
from tfd_notebook.agent.admin_policy import limits
from tfd_notebook.cluster import gpu_allocation
from tfd_notebook.launchers import base
from tfd_notebook.model.spec import SERVER_ROLES, ClusterConfig, Policy, Role, Service, count_name

#: Classes with further options, by the name under which users know them.
_OTHER_ARGUMENTS = (
    ("Policy", Policy.__dataclass_fields__),
    ("Service", Service.__dataclass_fields__),
    ("launchers.Local", ("host", "allow")),
)
#: Arguments of `Cluster` that do not describe it.
_CALL = ("if_exists", "start")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The options of a new cluster, which `Cluster` describes."""

    data_workers: int = 0
    workers: int = 0
    ps: int = 0
    evaluator: bool = False
    gpus: str | int | Iterable[int] | Mapping[str, int] = "auto"
    launcher: str | base.Launcher = "local"
    name: str | None = None
    env: Mapping[str, str] | None = None
    preload: Iterable[str] = ()
    policy: Policy | None = None
    service: Service | None = None

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> ClusterOptions:
        """Return the options of ``Cluster(**arguments)``.

        Raises
        ------
        TypeError
            An argument is unknown. The error names the class that has an option of that name,
            or the most similar argument.
        """
        for name in sorted(arguments.keys() - cls.__dataclass_fields__.keys()):
            hint = next(
                (
                    f": pass it to tfd.{kind}({name}=...)"
                    for kind, fields in _OTHER_ARGUMENTS
                    if name in fields
                ),
                "",
            )
            if not hint and (similar := errors.nearest(name, [*cls.__dataclass_fields__, *_CALL])):
                hint = f": {similar.strip()}"
            raise TypeError(f"Cluster() got an unexpected argument {name!r}{hint}")
        return cls(**arguments)

    def configure(self) -> tuple[ClusterConfig, base.Launcher]:
        """Return the configuration of the cluster, and its launcher.

        Raises
        ------
        UsageError, Unsupported
        """
        launcher = base.launcher(self.launcher)
        env, preload = self.env or {}, self.preload
        if not isinstance(env, Mapping):
            raise errors.UsageError("invalid env: expected a mapping of names to strings")
        if not isinstance(preload, Iterable):
            raise errors.UsageError(
                f"invalid preload {preload!r}: expected names of modules or libraries"
            )
        config = ClusterConfig(
            name=self.name or "cluster",
            launcher=launcher.name,
            counts=self._counts(),
            policy=Policy() if self.policy is None else self.policy,
            service=Service() if self.service is None else self.service,
            env=dict(env),
            preload=(preload,) if isinstance(preload, str) else tuple(preload),
            allow=launcher.allow,
            options=launcher.options,
            gpus=gpu_allocation.check(self.gpus),
        )
        check_roles(launcher, config.counts)
        gpus = config.gpus
        requested = 0 if isinstance(gpus, str) else _requested_gpus(gpus, config.counts)
        limits().check_cluster(
            launcher.name, sum(config.counts.values()), requested, tuple(config.allow)
        )
        return config, launcher

    def _counts(self) -> dict[Role, Any]:
        """Return the requested number of tasks of each role, unchecked."""
        if not isinstance(self.evaluator, bool):
            raise errors.UsageError(
                f"invalid evaluator {self.evaluator!r}: expected True or False",
                fix="pass a bool; a cluster has at most one evaluator",
            )
        counts: dict[Role, Any] = {
            role: int(self.evaluator) if role is Role.EVALUATOR else getattr(self, count_name(role))
            for role in SERVER_ROLES
        }
        # A cluster with training tasks only needs no tf.data service.
        needs_service = self.data_workers or not any(counts.values())
        dispatcher = {Role.DISPATCHER: 1} if needs_service else {}
        return {**dispatcher, Role.DATA_WORKER: self.data_workers, **counts}


def _requested_gpus(gpus: tuple[int, ...] | Mapping[str, int], counts: Mapping[Role, int]) -> int:
    """Return the total number of GPUs that the tasks request."""
    if isinstance(gpus, Mapping):
        return sum(count * counts.get(Role(role), 0) for role, count in gpus.items())
    return len(gpus)


def check_roles(launcher: base.Launcher, counts: Mapping[Role, int]) -> None:
    """Raise Unsupported if the launcher cannot run one of the roles."""
    for role, count in counts.items():
        if count and role not in launcher.roles:
            supported = ", ".join(str(known) for known in Role if known in launcher.roles)
            raise errors.Unsupported(
                f"launcher {launcher.name!r} cannot run a {role}, only {supported}",
                fix='use launcher="local"',
            )
