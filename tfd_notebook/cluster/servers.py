"""The servers of a cluster: state, lease and output of its tasks."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tfd_notebook import errors, views
from tfd_notebook._compat.tf_data import source_locations
from tfd_notebook.agent.admin_policy import limits
from tfd_notebook.cluster.monitor import Monitor
from tfd_notebook.cluster.task_manager import TaskManager
from tfd_notebook.launchers import base
from tfd_notebook.launchers.client import detached
from tfd_notebook.model.events import LeaseChanged
from tfd_notebook.model.spec import ClusterConfig, Policy, Role, check_hours
from tfd_notebook.model.stacks import stack_records

if TYPE_CHECKING:
    from tfd_notebook.views import Table


class ClusterServers:
    """The servers of a `Cluster`, which its data service and its training use.

    Parameters
    ----------
    config : ClusterConfig
    launcher : Launcher
    cluster : object
        Advice names the user's variable that holds it.

    Attributes
    ----------
    config : ClusterConfig
    monitor : Monitor
    task_manager : TaskManager
    consumers : Consumers
        The consumers in this process that read from the cluster.
    lock : RLock
        Serializes changes of the tasks, the streams and the strategy.
    run_lock : Lock
        Held while `Cluster.run` calls a function.
    """

    def __init__(self, config: ClusterConfig, launcher: base.Launcher, cluster: object) -> None:
        self.config = config
        self.monitor = Monitor(config)
        self.task_manager = TaskManager(config, launcher, self.monitor)
        self.consumers = self.monitor.consumers
        self.lock, self.run_lock = threading.RLock(), threading.Lock()
        self._cluster = weakref.ref(cluster)
        self._description_lock = threading.Lock()

    @property
    def cluster(self) -> object:
        """The cluster, if it is still referenced."""
        return self._cluster()

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

    # Lease

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
        return self.monitor.detached

    def _set_lease(self, hours: float, renew: bool) -> float:
        check_hours(hours)
        limits().check_lease(hours)
        # Not under the cluster's lock, which `start` and `scale` can hold for minutes.
        self.require_running()
        if not renew and not self.detached:
            self._require_no_detached_namesake()
        left = self.task_manager.task_host.lease(hours * 3600.0, renew)
        self.monitor.apply(LeaseChanged(left))
        self.store_description()
        return time.time() + left

    def notify_of_namesake(self) -> None:
        """Publish a notice if another cluster of this name is detached."""
        if is_detached(self.name):
            self.monitor.notice(
                "info",
                f"another cluster named {self.name!r} is detached",
                fix=f"stop this cluster, then connect to that one: tfd.attach({self.name!r})",
            )

    def _require_no_detached_namesake(self) -> None:
        if is_detached(self.name):
            raise errors.NameTaken(
                f"another cluster named {self.name!r} is already detached",
                fix=f"stop that one (tfd stop {self.name}), or start this one with another name=",
            )

    def store_description(self) -> None:
        """Store the re-attach metadata with the agents. No-op unless the cluster is detached."""
        if not self.detached:
            return
        # Serialized, so that an older description cannot replace a newer one. The loss of an agent
        # is reported by its own event.
        with self._description_lock, contextlib.suppress(errors.AgentLost, errors.TimeLimit):
            self.task_manager.task_host.describe(self.task_manager.description())

    # Output

    def gpus(self) -> Table:
        """Return the table of the GPUs available to tasks, used or not.

        Returns
        -------
        Table
            Displays itself. ``to_frame()`` returns a DataFrame with the columns
            `model.snapshot.GPU_COLUMNS`. Utilization and memory are those of the whole GPU, by all
            processes. Empty if no worker or evaluator can get a GPU.
        """
        return views.gpus_table(self.monitor.snapshot().gpus)

    def logs(
        self, task: str | None = None, lines: int = 100, follow: bool = False
    ) -> str | Iterator[str]:
        """Return the standard output and error of tasks.

        Parameters
        ----------
        task : str, optional
            Name of a task. Default: all tasks, each under a heading.
        lines : int
            Number of lines of each task. Default 100.
        follow : bool
            Return an iterator over these and all later lines instead. It ends with the task or
            at Ctrl-C. Needs `task`.
        """
        if follow:
            if task is None:
                raise errors.UsageError(
                    "follow=True needs a task", fix='logs("data_worker:0", ...)'
                )
            return self.task_manager.follow(task, lines)
        if task is not None:
            return self.task_manager.log(task, lines)
        names = [row.task for row in self.monitor.snapshot().tasks]
        return "\n".join(f"--- {name}\n{self.task_manager.log(name, lines)}" for name in names)

    def stacks(self, task: str | None = None) -> Table:
        """Return the Python stacks of tasks at this moment.

        Parameters
        ----------
        task : str, optional
            Name of a task. Default: all tasks.

        Returns
        -------
        Table
            One row for each thread that runs Python code. Columns: ``task thread function file
            line seconds note``. Records and ``to_frame()`` also have ``stack``, the frames from
            the outermost to the innermost.

            - ``thread``: ``tf.data`` for a thread that runs a Python function of a dataset. Its
              stack starts with that function.
            - ``function``, ``file``, ``line``: of the innermost frame of the user's code, or else
              of the innermost frame.
            - ``seconds``: seconds since this call of ``function`` was first observed. Data workers
              are observed once a second while they run, so a call may be one second older. None
              outside of functions of datasets, in a generator that the user's code iterates, and
              under a debugger.
            - ``note``: the reason if a task has no stacks, for example because a thread holds the
              GIL.

            Threads of ``launcher="inprocess"`` have the task ``kernel``: the data workers of a
            kernel share them. Only those that run functions of datasets are shown.

        Raises
        ------
        UnknownName
            The cluster has no such task.
        StateError
            The cluster does not run.
        """
        self.require_running()
        if task is not None:
            self.task_manager.row(task)  # raises UnknownName
        names = [row.task for row in self.monitor.rows()] if task is None else [task]
        stacks = self.task_manager.stacks(names)
        return views.stacks_table(stack_records(stacks, source_locations.cell_of))


def is_detached(name: str) -> bool:
    """Return True if a detached cluster of this user on this host has that name."""
    return any(cluster.name == name for cluster in detached.detached())
