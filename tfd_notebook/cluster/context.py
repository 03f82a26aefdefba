"""The parts of a cluster that its components share."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tfd_notebook import errors
from tfd_notebook.cluster.monitor import Monitor
from tfd_notebook.cluster.task_manager import TaskManager
from tfd_notebook.data.consume.consumers import Consumers
from tfd_notebook.model.spec import ClusterConfig, Policy, Role


@dataclass(frozen=True, eq=False)
class ClusterContext:
    """The parts of a cluster that its components share.

    Parameters
    ----------
    config : ClusterConfig
    consumers : Consumers
        The consumers in this process that read from the cluster.
    monitor : Monitor
    task_manager : TaskManager
    lock : RLock
        Serializes changes of the tasks, the streams and the strategy.
    """

    config: ClusterConfig
    consumers: Consumers
    monitor: Monitor
    task_manager: TaskManager
    lock: threading.RLock

    @property
    def name(self) -> str:
        """The name of the cluster."""
        return self.config.name

    @property
    def policy(self) -> Policy:
        """The restarts, timeouts and other supervision of the tasks."""
        return self.config.policy

    def require_running(self) -> None:
        """Raise StateError unless the cluster runs or starts."""
        state = self.monitor.state
        if state not in ("ready", "degraded", "starting"):
            fix = {
                "new": "cluster.start()",
                "left": "tfd.attach(...) connects to it again",
            }.get(state, "create a new one: tfd.Cluster(...)")
            raise errors.StateError(f"cluster {self.name!r} is {state}", fix=fix)

    def require_dispatcher(self) -> None:
        """Raise StateError unless the cluster has a dispatcher."""
        if not self.monitor.planned.get(Role.DISPATCHER):
            raise errors.StateError(
                f"cluster {self.name!r} has no dispatcher, because it has no data worker",
                fix="cluster.scale(data_workers=2) starts both",
            )
