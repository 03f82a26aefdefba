"""What all resolvers have in common: TensorFlow's contract, kept in one place."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import tensorflow as tf

from tfd_notebook.errors import TasksMissing, UnknownName, UsageError
from tfd_notebook.net.probe import Probe, probe_many
from tfd_notebook.resolvers.validation import Found, Tasks, checked

#: Seconds for a task's answer about its devices.
_ASK_SECONDS = 5.0
#: Devices that are no accelerators.
NO_ACCELERATORS = ("CPU", "XLA_CPU", "XLA_GPU")


class Resolver(tf.distribute.cluster_resolver.ClusterResolver):
    """A ClusterResolver that finds its tasks anew at every call, and remembers none.

    A subclass overrides `cluster_spec`, as TensorFlow's skeleton does, with `master` and
    `num_accelerators` if they differ from those here; everything else works with that. It need not
    call ``__init__``.

    Parameters
    ----------
    task_type : str, optional
        The job of this process. Default: what the system says, None where it says nothing.
    task_id : int, optional
        Its index in that job, from 0. Default: as for `task_type`.
    rpc_layer : str
        The protocol between tasks. Default ``"grpc"``.
    environment : str
        ``"google"`` inside of Google, empty (the default) elsewhere.

    See Also
    --------
    tf.distribute.cluster_resolver.ClusterResolver
    """

    #: Whether the servers know themselves by the same numbers: not those of several clusters. To
    #: TensorFlow that is all one: who connects to a server says which task it is.
    _numbers_are_theirs: ClassVar[bool] = True

    # Of a subclass that does not call `__init__`.
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
        """Where the tasks are looked for, in words: errors begin with it."""
        return type(self).__name__

    def _find(self) -> Found:
        """Return the addresses of all tasks by job, as they are now."""
        if type(self).cluster_spec is Resolver.cluster_spec:
            raise NotImplementedError(f"{type(self).__name__} must override cluster_spec()")
        spec: Found = self.cluster_spec().as_dict()
        return spec

    def _identity(self) -> tuple[str, int] | None:
        """Return job and index of this process; None where they are not known."""
        return None

    def tasks(self) -> Tasks:
        """Return the address of each task by job and index, as they are now.

        Returns
        -------
        dict of str to dict of int to str
            ``{"worker": {0: "host:port"}}``; an index may be missing while its task is not there.

        Raises
        ------
        ResolveError
            With the place, what is wrong there and the next step.
        """
        return checked(self._find(), self.place)

    def cluster_spec(self) -> Any:
        """Return the ``tf.train.ClusterSpec`` of the tasks of now; raises like `tasks`."""
        return tf.train.ClusterSpec(self.tasks())

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return ``"grpc://host:port"`` of a task; empty without one, as TensorFlow does.

        Parameters
        ----------
        task_type, task_id : optional
            The task. Default: the one that this process is.
        rpc_layer : str, optional
            Another protocol than the resolver's; ``""`` leaves it out.

        Raises
        ------
        UnknownName
            There is no such task.
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
        """Return how many accelerators a task has; other tasks than this process are asked.

        Parameters
        ----------
        task_type, task_id : optional
            The task. Without `task_id`, what each task of the job has: where hosts differ, the
            smallest number. Default: this process where it is a task, else the workers.
        config_proto : optional
            For TensorFlow's sake; not used.

        Returns
        -------
        dict of str to int
            ``{"GPU": 2}``, empty without any; of each other kind it has 0.

        Raises
        ------
        TasksMissing
            A task does not answer within 5 s, or another one answers in its place.
        UnknownName
            There is no such task.
        """
        own = self._own()
        here = task_type is None and task_id is None
        tasks = {} if here and own else self.tasks()
        # Without tasks there is this process, which is how strategies understand it.
        if (here and not tasks) or (own and own == (task_type, task_id)):
            return _count(device.device_type for device in tf.config.get_visible_devices())
        job = task_type or (own[0] if own else "worker")
        if here and job not in tasks:
            return Counter()
        if task_id is None:
            wanted = tasks.get(job) or {0: self._address(tasks, job, 0)}
        else:
            wanted = {task_id: self._address(tasks, job, task_id)}
        counts = [
            _count(device.type for device in found.devices)
            for found in self._ask({job: wanted}, _ASK_SECONDS).values()
        ]
        least = {kind: min(count.get(kind, 0) for count in counts) for kind in sorted(counts[0])}
        return Counter({kind: count for kind, count in least.items() if count})

    def check(self, timeout: float = 5.0) -> None:
        """Ask every task who it is, and raise what TensorFlow would wait for without a word.

        Parameters
        ----------
        timeout : float
            Seconds for each answer; all are asked at the same time. Default 5.

        Raises
        ------
        TasksMissing
            The host of a task is not known or cannot be reached, the task does not answer, or
            another one answers in its place.
        """
        self._ask(self.tasks(), timeout)

    def watch(self, seconds: float | None = None, every: float = 1.0) -> Iterator[Any]:
        """Yield the ``tf.train.ClusterSpec`` of now, and then each one that is different.

        Parameters
        ----------
        seconds : float, optional
            For how long. Default: until the loop is left, or interrupted.
        every : float
            Seconds between two looks, where the system does not tell of changes itself. Default 1.
        """
        if not every > 0:
            raise UsageError(f"every={every!r} must be more than 0 seconds")
        end = None if seconds is None else time.monotonic() + seconds
        seen: Tasks | None = None
        for _ in self._looks(end, every):
            tasks = self.tasks()
            if tasks != seen:
                seen = tasks
                yield tf.train.ClusterSpec(tasks)

    def _looks(self, end: float | None, every: float) -> Iterator[None]:
        """Yield when it is worth looking, until `end` of the monotonic clock: at once, and on."""
        never = threading.Event()
        yield
        while end is None or (left := end - time.monotonic()) > 0:
            never.wait(every if end is None else min(every, left))
            yield

    @property
    def environment(self) -> str:
        """``"google"`` inside of Google, empty elsewhere."""
        return self._environment

    @property
    def task_type(self) -> str | None:
        """The job of this process; None where it is not known, or none of the tasks."""
        if self._task_type is not None:
            return self._task_type
        found = self._identity()
        return found[0] if found else None

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None where it is not known."""
        if self._task_id is not None:
            return self._task_id
        found = self._identity()
        return found[1] if found else None

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol between tasks."""
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def may_be(self, who: str | None, job: str, index: int) -> bool:
        """Whether a server that calls itself `who` can be this task."""
        if who is None or not self._numbers_are_theirs:
            return who is None or who.partition(":")[0] == job
        return who == f"{job}:{index}"

    def _own(self) -> tuple[str, int] | None:
        """Return which task this process itself is."""
        job, index = self.task_type, self.task_id
        return None if job is None or index is None else (job, index)

    def _address(self, tasks: Tasks, job: str, index: int) -> str:
        try:
            return tasks[job][index]
        except KeyError:
            raise self._unknown(tasks, job, index) from None

    def _unknown(self, tasks: Tasks, job: str, index: int) -> UnknownName:
        names = [f"{job}:{index}" for job, found in tasks.items() for index in found]
        listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        return UnknownName(
            f"{self.place} has no task {job}:{index}", fix=f"tasks there: {listed or 'none'}"
        )

    def _ask(self, tasks: Mapping[str, Mapping[int, str]], timeout: float) -> dict[str, Probe]:
        """Return what each task answered; all of them are the ones that they should be."""
        names = [(job, index) for job, found in tasks.items() for index in found]
        addresses = [tasks[job][index] for job, index in names]
        missing: dict[str, str] = {}
        answers: dict[str, Probe] = {}
        for (job, index), found in zip(names, probe_many(addresses, timeout), strict=True):
            name = f"{job}:{index}"
            answers[name] = found
            if not found.alive:
                missing[name] = f"{name} at {found.address}: {found.state}, {found.reason}"
            elif found.kind != "server":
                missing[name] = f"{name} at {found.address}: a {found.kind} answers there"
            elif not self.may_be(found.task, job, index):
                missing[name] = f"{name} at {found.address}: {found.task} answers there"
        if missing:
            said = list(missing.values())
            rest = f"; and {len(said) - 8} more" if len(said) > 8 else ""
            raise TasksMissing(
                f"{self.place}: {'; '.join(said[:8])}{rest}",
                task=next(iter(missing)) if len(missing) == 1 else None,
                fix="start what is missing and correct addresses; TensorFlow would wait for it",
            )
        return answers


def _count(types: Any) -> dict[str, int]:
    return Counter(kind for kind in types if kind not in NO_ACCELERATORS)
