"""Base class of all resolvers: the implementation of TensorFlow's contract."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import tensorflow as tf

from tfd_notebook.errors import TasksMissing, UnknownName, UsageError
from tfd_notebook.model.resolution import START_OR_CORRECT, TaskStatus, missing_step
from tfd_notebook.model.spec import check_seconds
from tfd_notebook.net import task_probe
from tfd_notebook.resolvers.validation import AddressesByJob, Tasks, checked

#: Timeout for probing the devices of a task, in seconds.
_PROBE_SECONDS = 5.0


class Resolver(tf.distribute.cluster_resolver.ClusterResolver):
    """A ClusterResolver that looks up its tasks at every call and does not cache them.

    A subclass overrides `cluster_spec`, as in TensorFlow's skeleton. It overrides `master` and
    `num_accelerators` only if they differ from the defaults. It need not call ``__init__``.

    Parameters
    ----------
    task_type : str, optional
        The job of this process. Default: the job that the system reports, or None.
    task_id : int, optional
        The index of this process in its job, from 0. Default: as for `task_type`.
    rpc_layer : str
        The protocol between tasks. Default ``"grpc"``.
    environment : str
        ``"google"`` inside Google, otherwise empty. Default empty.

    See Also
    --------
    tf.distribute.cluster_resolver.ClusterResolver
    """

    #: True if servers report the same task index as this resolver. False when several clusters
    #: are combined. TensorFlow does not care: the client assigns the task identity on connect.
    _server_indexes: ClassVar[bool] = True

    # Defaults for a subclass that does not call `__init__`.
    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = "grpc"
    _environment: str = ""

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = "grpc",
        environment: str = "",
    ) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment

    @property
    def place(self) -> str:
        """Description of the source of the addresses, as the first words of errors."""
        return type(self).__name__

    def __repr__(self) -> str:
        name, place = type(self).__name__, self.place
        return f"<{name}>" if place == name else f"<{name} of {place}>"

    def _find(self) -> AddressesByJob:
        """Return the current addresses of all tasks by job."""
        if type(self).cluster_spec is Resolver.cluster_spec:
            raise UsageError(
                f"{type(self).__name__} defines no tasks", fix="override cluster_spec()"
            )
        spec: AddressesByJob = self.cluster_spec().as_dict()
        return spec

    def _identity(self) -> tuple[str, int] | None:
        """Return job and index of this process; None if they are unknown."""
        return None

    def tasks(self) -> Tasks:
        """Return the current address of each task by job and index.

        Returns
        -------
        dict of str to dict of int to str
            ``{"worker": {0: "host:port"}}``. An index is missing while its task is absent.

        Raises
        ------
        ResolveError
            The tasks cannot be resolved. The error has the source, the cause and the next step.
        """
        return checked(self._find(), self.place)

    def cluster_spec(self) -> Any:
        """Return the current ``tf.train.ClusterSpec``; raises like `tasks`."""
        return tf.train.ClusterSpec(self.tasks())

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return ``"grpc://host:port"`` of a task; empty without a task, as TensorFlow does.

        Parameters
        ----------
        task_type, task_id : optional
            The task. Default: the task of this process.
        rpc_layer : str, optional
            A protocol that replaces the resolver's; ``""`` omits it.

        Raises
        ------
        UnknownName
            The task does not exist.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        address = self._address(self.tasks(), task_type, task_id)
        layer = self.rpc_layer if rpc_layer is None else rpc_layer
        return f"{layer}://{address}" if layer else address

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Return the number of accelerators of a task.

        It is the declared number, if the resolver has one. Otherwise, a task is probed unless it
        is this process.

        Parameters
        ----------
        task_type, task_id : optional
            The task. Without `task_id`, the number that each task of the job has: the smallest
            if hosts differ. Default: this process if it is a task, otherwise the workers.
        config_proto : optional
            Part of TensorFlow's signature.

        Returns
        -------
        dict of str to int
            For example ``{"GPU": 2}``. Absent types count 0; empty without accelerators.

        Raises
        ------
        TasksMissing
            A task does not answer within 5 s, or a different task answers at its address.
        UnknownName
            The task does not exist.
        """
        declared = self._declared_accelerators(task_type, task_id, config_proto)
        if declared is not None:
            return Counter(declared)
        own = self.own_task()
        here = task_type is None and task_id is None
        tasks = {} if here and own else self.tasks()
        # Strategies take an empty cluster for training in this process alone.
        if (here and not tasks) or (own and own == (task_type, task_id)):
            return _own_accelerators()
        job = task_type or (own[0] if own else "worker")
        if here and job not in tasks:
            return Counter()
        if task_id is None:
            wanted = tasks.get(job) or {0: self._address(tasks, job, 0)}
        else:
            wanted = {task_id: self._address(tasks, job, task_id)}
        counts = [
            _own_accelerators() if status.state == "own" else _parse_counts(status.accelerators)
            for status in self._probe_tasks({job: wanted}, _PROBE_SECONDS)
        ]
        least = {kind: min(count.get(kind, 0) for count in counts) for kind in sorted(counts[0])}
        return Counter({kind: count for kind, count in least.items() if count})

    def _declared_accelerators(self, *task: Any) -> Mapping[str, int] | None:
        """Return the accelerators of a task that need no probe; takes the caller's arguments."""
        return None

    def check(self, timeout: float = 5.0) -> None:
        """Probe every task, and raise an error where TensorFlow would block silently.

        The task of this process is not missing if it does not listen yet.

        Parameters
        ----------
        timeout : float
            Seconds for each answer. All tasks are probed concurrently. Default 5.

        Raises
        ------
        TasksMissing
            The host of a task is unknown or cannot be reached. Or the task does not answer, or a
            different task answers at its address.
        """
        check_seconds("timeout", timeout)
        self._probe_tasks(self.tasks(), timeout)

    def watch(self, seconds: float | None = None, every: float = 1.0) -> Iterator[Any]:
        """Yield the current ``tf.train.ClusterSpec``, and then one after each change.

        Parameters
        ----------
        seconds : float, optional
            The time after which the iterator ends. Default: unlimited.
        every : float
            Seconds between two polls if the system does not push changes. Default 1.
        """
        check_seconds("every", every)
        if seconds is not None:
            check_seconds("seconds", seconds, 0)
        end = None if seconds is None else time.monotonic() + seconds
        previous: Tasks | None = None
        for _ in self._polls(end, every):
            tasks = self.tasks()
            if tasks != previous:
                previous = tasks
                yield tf.train.ClusterSpec(tasks)

    def _polls(self, end: float | None, every: float) -> Iterator[None]:
        """Yield at once, and then before each poll, until `end` of the monotonic clock."""
        never = threading.Event()
        yield
        while end is None or (left := end - time.monotonic()) > 0:
            never.wait(every if end is None else min(every, left))
            yield

    @property
    def environment(self) -> str:
        """``"google"`` inside Google, otherwise empty."""
        return self._environment

    @property
    def task_type(self) -> str | None:
        """The job of this process; None if it is unknown, or this process is not a task."""
        if self._task_type is not None:
            return self._task_type
        identity = self._identity()
        return identity[0] if identity else None

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None if it is unknown."""
        if self._task_id is not None:
            return self._task_id
        identity = self._identity()
        return identity[1] if identity else None

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol between tasks: of the argument or of the system, by default ``"grpc"``."""
        return self._rpc_layer or self._default_layer()

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _default_layer(self) -> str | None:
        """Return the protocol if no argument is given."""
        return self._rpc_layer

    def may_be(self, reported: str | None, job: str, index: int) -> bool:
        """Return True if a server that reports the task `reported` can be this task."""
        same = task_probe.is_same_task if self._server_indexes else task_probe.is_same_job
        return same(reported, job, index)

    def own_task(self) -> tuple[str, int] | None:
        """Return job and index of this process; None if it is not a task."""
        job, index = self.task_type, self.task_id
        return None if job is None or index is None else (job, index)

    def _address(self, tasks: Tasks, job: str, index: int) -> str:
        try:
            return tasks[job][index]
        except KeyError:
            raise self._unknown(tasks, job, index) from None

    def _unknown(self, tasks: Tasks, job: str, index: int) -> UnknownName:
        names = [f"{job}:{index}" for job, indexes in tasks.items() for index in indexes]
        listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        return UnknownName(
            f"{self.place} has no task {job}:{index}",
            fix=f"use one of these tasks: {listed or 'none'}",
        )

    def _probe_tasks(
        self, tasks: Mapping[str, Mapping[int, str]], timeout: float
    ) -> tuple[TaskStatus, ...]:
        """Return the states of the tasks.

        Raises
        ------
        TasksMissing
            A task does not answer, or a different task answers at its address.
        """
        statuses = task_probe.probe_tasks(tasks, timeout, self.may_be, self.own_task())
        missing = [status for status in statuses if status.is_missing]
        if missing:
            reasons = [status.trouble for status in missing]
            rest = f"; and {len(reasons) - 8} more" if len(reasons) > 8 else ""
            steps = [missing_step(each.name, each.reason, "ps" in tasks) for each in missing]
            start = "start the missing tasks and correct the addresses; TensorFlow would block"
            fixes = dict.fromkeys(start if step == START_OR_CORRECT else step for step in steps)
            raise TasksMissing(
                f"{self.place}: {'; '.join(reasons[:8])}{rest}",
                task=missing[0].name if len(missing) == 1 else None,
                fix="; ".join(fixes),
            )
        return statuses


def _own_accelerators() -> dict[str, int]:
    types = (device.device_type for device in tf.config.get_visible_devices())
    return Counter(kind for kind in types if kind not in task_probe.NO_ACCELERATORS)


def _parse_counts(accelerators: str) -> dict[str, int]:
    """Return the numbers in a text such as ``"GPU:2 TPU:8"``."""
    pairs = (text.split(":") for text in accelerators.split())
    return Counter({kind: int(count) for kind, count in pairs})
