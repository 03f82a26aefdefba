"""Leases of detached clusters: detach, renew, and attach to running tasks."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from tfd_notebook import errors
from tfd_notebook.agent.admin_policy import limits
from tfd_notebook.cluster.training import ParameterServerTraining
from tfd_notebook.launchers import base
from tfd_notebook.launchers.client import detached
from tfd_notebook.model.spec import ClusterConfig, Role, pack, without_values
from tfd_notebook.net.clock import Deadline

_MAX_HOURS = 24.0 * 365


def check_hours(hours: object) -> None:
    """Raise UsageError unless `hours` is a valid duration of a lease."""
    if isinstance(hours, bool) or not isinstance(hours, (int, float)):
        raise errors.UsageError(f"invalid hours {hours!r}: expected a number")
    try:
        number = float(hours)
    except OverflowError:
        number = math.inf  # an int too large for float; a negative one is out of range, too
    if not 0 < number <= _MAX_HOURS:
        raise errors.UsageError(
            f"hours={number:g} is out of range", fix=f"use more than 0 and up to {_MAX_HOURS:g}"
        )


class LeasedCluster(ParameterServerTraining):
    """The lease of a `Cluster`: detach, renew and attach."""

    def _initialize(self, config: ClusterConfig, launcher: base.Launcher) -> None:
        super()._initialize(config, launcher)
        self._description_lock = threading.Lock()

    def detach(self, hours: float = 8.0) -> float:
        """Detach the cluster from this kernel for `hours`.

        A detached cluster ends by `stop` from any process of this user (``tfd stop``,
        `tfd_notebook.attach`), or when its lease expires. It does not end with the kernel or with a
        ``with`` block. A second call sets a new lease.

        Parameters
        ----------
        hours : float
            Duration of the lease. Default 8. `renew` prolongs it.

        Returns
        -------
        float
            End of the lease, in seconds since the epoch.

        Raises
        ------
        UsageError
            Invalid `hours`.
        StateError
            The cluster is not running.
        Unsupported
            The tasks run in this process.
        """
        return self._set_lease(hours, renew=False)

    def renew(self, hours: float = 8.0) -> float:
        """Renew the lease of a detached cluster for `hours` from now.

        Returns
        -------
        float
            End of the lease, in seconds since the epoch.

        Raises
        ------
        UsageError, StateError
            As `detach` raises. Also StateError if the cluster is not detached.
        """
        return self._set_lease(hours, renew=True)

    @property
    def detached(self) -> bool:
        """True if the cluster outlives this kernel."""
        return self._monitor.lease is not None

    def _set_lease(self, hours: float, renew: bool) -> float:
        check_hours(hours)
        limits().check_lease(hours)
        # Not under the cluster's lock, which `start` and `scale` can hold for minutes.
        self._require_running()
        if not renew and not self.detached:
            self._require_no_detached_namesake()
        left = float(self._task_manager.ask("lease", seconds=hours * 3600.0, renew=renew))
        self._monitor.handle_event({"event": "lease", "cluster": self.name, "left": left})
        self._store_description()
        return time.time() + left

    def _notify_of_detached_namesake(self) -> None:
        if any(cluster.name == self.name for cluster in detached.detached()):
            self._monitor.notice(
                "info",
                f"another cluster of the name {self.name!r} is detached",
                fix=f"stop this cluster, then connect to that one: tfd.attach({self.name!r})",
            )

    def _require_no_detached_namesake(self) -> None:
        if any(cluster.name == self.name for cluster in detached.detached()):
            raise errors.NameTaken(
                f"another cluster of the name {self.name!r} is detached already",
                fix=f"stop that one (tfd stop {self.name}), or start this one with another name=",
            )

    def _store_description(self) -> None:
        """Store the re-attach metadata with the agents. No-op unless the cluster is detached."""
        if not self.detached:
            return
        # Serialized, so that an older description cannot replace a newer one.
        with self._description_lock:
            about = {
                # The values of env may be secrets, and attaching does not need them.
                "config": pack(without_values(self._config)),
                "fleet": self._task_manager.about(),
                "used": self._used,
                "pid": os.getpid(),
                "since": time.time(),
            }
            # The loss of an agent is reported by its own event.
            with contextlib.suppress(errors.AgentLost, errors.TimeLimit):
                self._task_manager.ask("describe", about=about)

    def _scale(self, counts: Mapping[Role, int]) -> None:
        try:
            super()._scale(counts)
        finally:
            self._store_description()

    def strategy(self, *args: Any, **options: Any) -> Any:
        strategy = super().strategy(*args, **options)
        self._store_description()
        return strategy

    strategy.__doc__ = ParameterServerTraining.strategy.__doc__

    def enable_static_sharding(self) -> None:
        """Give the dispatcher the addresses of its workers. Restart it if they have changed."""
        super().enable_static_sharding()
        self._store_description()

    def _adopt_tasks(self, node: base.Node, report: Mapping[str, Any]) -> None:
        """Set the state of the cluster from an agent's report; see `AgentNode.adopt`."""
        about = report["about"]
        self._task_manager.adopt(node, about["fleet"], report["tasks"])
        # The servers may still hold variables of an earlier coordinator.
        self._used = bool(about["used"])
        self._monitor.handle_event(
            {"event": "lease", "cluster": self.name, "left": report["lease"]}
        )
        if report["left"] is not None:
            self._monitor.expires = Deadline(report["left"])
