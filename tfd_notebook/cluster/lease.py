"""The part of `Cluster` that outlives its kernel: leases, and how one that lives is taken over."""

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
    """Raise UsageError unless a cluster can stay for so many hours."""
    if isinstance(hours, bool) or not isinstance(hours, (int, float)):
        raise errors.UsageError(f"hours={hours!r} is no number")
    try:
        number = float(hours)
    except OverflowError:
        number = math.inf  # or less than any number, which is as wrong
    if not 0 < number <= _MAX_HOURS:
        raise errors.UsageError(
            f"hours={number:g} is out of range", fix=f"use more than 0 and up to {_MAX_HOURS:g}"
        )


class LeasedCluster(ParameterServerTraining):
    """The part of `Cluster` that is detached, renewed, left and attached to."""

    def _initialize(self, config: ClusterConfig, launcher: base.Launcher) -> None:
        super()._initialize(config, launcher)
        self._description_lock = threading.Lock()

    def detach(self, hours: float = 8.0) -> float:
        """Let the cluster outlive this kernel, for so long.

        From then on it ends by `stop` here or from any process of this user (``tfd stop``,
        `tfd_notebook.attach`), or when the time is over; not with the kernel and not with a
        ``with`` block. Calling it again sets the time anew.

        Parameters
        ----------
        hours : float
            Default 8. `renew` prolongs it.

        Returns
        -------
        float
            Until when it stays, in seconds since the epoch.

        Raises
        ------
        UsageError
            `hours` cannot be meant.
        StateError
            The cluster does not run.
        Unsupported
            Its tasks live in this process.
        """
        return self._set_lease(hours, renew=False)

    def renew(self, hours: float = 8.0) -> float:
        """Have a detached cluster stay for so many hours from now.

        Returns
        -------
        float
            Until when it stays, in seconds since the epoch.

        Raises
        ------
        UsageError, StateError
            As `detach`; or it is not detached.
        """
        return self._set_lease(hours, renew=True)

    @property
    def detached(self) -> bool:
        """Whether the cluster outlives this kernel."""
        return self._monitor.lease is not None

    def _set_lease(self, hours: float, renew: bool) -> float:
        check_hours(hours)
        limits().check_lease(hours)
        # Without the cluster's lock, which `start` and `scale` hold for minutes.
        self._require_running()
        if not renew and not self.detached:
            self._require_no_detached_namesake()
        left = float(self._task_manager.ask("lease", seconds=hours * 3600.0, renew=renew))
        self._monitor.handle_event({"event": "lease", "cluster": self.name, "left": left})
        self._store_description()
        return time.time() + left

    def _notify_of_detached_namesake(self) -> None:
        if any(one.name == self.name for one in detached.detached()):
            self._monitor.notice(
                "info",
                f"another cluster {self.name!r} of yours is detached",
                fix=f"tfd.attach({self.name!r}) takes that one up, once this one has ended",
            )

    def _require_no_detached_namesake(self) -> None:
        if any(one.name == self.name for one in detached.detached()):
            raise errors.NameTaken(
                f"another cluster {self.name!r} of yours is detached, and one could not be told "
                "from the other",
                fix=f"end it, tfd stop {self.name}, or start this one under another name=",
            )

    def _store_description(self) -> None:
        """Store with the agents what an attach needs. No-op unless the cluster is detached."""
        if not self.detached:
            return
        # One at a time: an older description must not replace a newer one.
        with self._description_lock:
            about = {
                # The values of env are secrets, which an attach does not need.
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
        """Have the dispatcher know its workers by address, restarting it if that is news."""
        super().enable_static_sharding()
        self._store_description()

    def _adopt_tasks(self, node: base.Node, found: Mapping[str, Any]) -> None:
        """Make a cluster of what an agent says of one; see `AgentNode.adopt`."""
        about = found["about"]
        self._task_manager.adopt(node, about["fleet"], found["tasks"])
        # Whoever comes later meets the variables of whoever was there before.
        self._used = bool(about["used"])
        self._monitor.handle_event({"event": "lease", "cluster": self.name, "left": found["lease"]})
        if found["left"] is not None:
            self._monitor.expires = Deadline(found["left"])
