"""Leases of detached clusters: detach, renew, and attach to running tasks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from tfd_notebook import errors
from tfd_notebook.agent.admin_policy import limits
from tfd_notebook.cluster.context import ClusterContext
from tfd_notebook.launchers.client import detached
from tfd_notebook.model.events import LeaseChanged
from tfd_notebook.model.spec import check_hours, pack, without_values


class Lease:
    """The lease of a detached cluster, and its description for processes that attach.

    Parameters
    ----------
    context : ClusterContext
    used : callable
        Returns True if a coordinator has used the tasks.
    """

    def __init__(self, context: ClusterContext, used: Callable[[], bool]) -> None:
        self._context = context
        self._used = used
        self._monitor, self._task_manager = context.monitor, context.task_manager
        self._description_lock = threading.Lock()

    def detach(self, hours: float = 8.0) -> float:
        """Detach the cluster from this kernel for `hours`.

        A detached cluster ends with `stop` from any process of this user (``tfd stop``,
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
        return self._set(hours, renew=False)

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
        return self._set(hours, renew=True)

    @property
    def detached(self) -> bool:
        """True if the cluster outlives this kernel."""
        return self._monitor.detached

    def _set(self, hours: float, renew: bool) -> float:
        check_hours(hours)
        limits().check_lease(hours)
        # Not under the cluster's lock, which `start` and `scale` can hold for minutes.
        self._context.require_running()
        if not renew and not self.detached:
            self._require_no_detached_namesake()
        left = self._task_manager.task_host.lease(hours * 3600.0, renew)
        self._monitor.apply(LeaseChanged(left))
        self.store_description()
        return time.time() + left

    def notify_of_namesake(self) -> None:
        """Publish a notice if another cluster of this name is detached."""
        if any(cluster.name == self._context.name for cluster in detached.detached()):
            self._monitor.notice(
                "info",
                f"another cluster named {self._context.name!r} is detached",
                fix="stop this cluster, then connect to that one: "
                f"tfd.attach({self._context.name!r})",
            )

    def _require_no_detached_namesake(self) -> None:
        if any(cluster.name == self._context.name for cluster in detached.detached()):
            raise errors.NameTaken(
                f"another cluster named {self._context.name!r} is already detached",
                fix=f"stop that one (tfd stop {self._context.name}), or start this one with "
                "another name=",
            )

    def store_description(self) -> None:
        """Store the re-attach metadata with the agents. No-op unless the cluster is detached."""
        if not self.detached:
            return
        # Serialized, so that an older description cannot replace a newer one.
        with self._description_lock:
            description = {
                # The values of env may be secrets, and attaching does not need them.
                "config": pack(without_values(self._context.config)),
                "task_manager": self._task_manager.description(),
                "used": self._used(),
            }
            # The loss of an agent is reported by its own event.
            with contextlib.suppress(errors.AgentLost, errors.TimeLimit):
                self._task_manager.task_host.describe(description)
