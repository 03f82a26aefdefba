"""`Cluster`: a group of TensorFlow server processes that a user starts and controls."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from tfd_notebook import errors, views
from tfd_notebook._compat.tf_data import autograph
from tfd_notebook.cluster import registry, runs
from tfd_notebook.cluster.config import ClusterOptions
from tfd_notebook.cluster.data_service import ClusterDataService
from tfd_notebook.cluster.handles import ClusterDispatcher, TaskHandle
from tfd_notebook.cluster.lifecycle import Lifecycle
from tfd_notebook.cluster.servers import ClusterServers
from tfd_notebook.cluster.training import ParameterServerTraining
from tfd_notebook.data.consume import observe
from tfd_notebook.data.service import distribute as service
from tfd_notebook.launchers import base
from tfd_notebook.model.handle import Handle
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.snapshot import Snapshot
from tfd_notebook.model.spec import ClusterConfig, Policy, Service

if TYPE_CHECKING:
    import pandas as pd

    from tfd_notebook.data.consume.stream import Stream
    from tfd_notebook.resolvers.cluster import OwnResolver

_Method = TypeVar("_Method", bound=Callable[..., Any])
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _part(
    part: str, function: Callable[Concatenate[Any, _P], _R]
) -> Callable[Concatenate[Cluster, _P], _R]:
    """Return a method of `Cluster` that calls `function` with a part as the first argument.

    It has the name, the signature and the docstring of `function`, without the part.
    """

    @functools.wraps(function)
    def call(self: Cluster, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return function(getattr(self, part), *args, **kwargs)

    call.__module__, call.__qualname__ = __name__, f"Cluster.{function.__name__}"
    if "." in function.__qualname__:
        function.__qualname__ = call.__qualname__  # Python names it in errors of a call
    return _documented_by(function)(cast("Callable[Concatenate[Cluster, _P], _R]", call))


def _documented_by(source: Any) -> Callable[[_Method], _Method]:
    """Copy the docstring of the function that a method calls, without the parameter of the part."""

    def copy(method: _Method) -> _Method:
        # Python 3.13 removes the indentation of docstrings.
        parameter = r"(?m)^ *(cluster : DataServiceProtocol|servers : ClusterServers)\n"
        method.__doc__ = re.sub(parameter, "", source.__doc__)
        autograph.keep_unconverted(method)  # a tf.function may call it
        return method

    return copy


class _ClusterType(type):
    """The type of `Cluster`. A call returns the running cluster of that name, if there is one.

    A new cluster is initialized under the lock of the registry, because other threads may use a
    registered one.
    """

    def __call__(
        cls, *args: Any, if_exists: str = "reuse", start: bool = True, **arguments: Any
    ) -> Any:
        if args:
            raise TypeError(
                "Cluster() takes keyword arguments only, such as Cluster(data_workers=2)"
            )
        config, launcher = ClusterOptions.read(arguments).configure()
        create = partial(Cluster._create, config, launcher)
        cluster = cast(Cluster, registry.get_or_create(config, if_exists, create))
        return cluster.start() if start and cluster.state == "new" else cluster


class Cluster(Handle, metaclass=_ClusterType):
    """A cluster of TensorFlow servers, started by a launcher and supervised from this process.

    The tasks form a tf.data service, a parameter server training, or both.

    The same call again returns the running cluster, so a cell can be run repeatedly. A cluster ends
    with `stop`, its ``with`` block, its time limit or its kernel. Rebinding the variable does not
    end it. After `detach`, it outlives the block and the kernel.

    Parameters
    ----------
    data_workers : int
        Number of tf.data service workers. Default 0. The first one adds the dispatcher. Without
        any task, as in ``Cluster()``, only a dispatcher is started.
    workers, ps : int
        Number of training workers and of parameter servers. Each is a ``tf.distribute.Server``.
        Default 0. ``ParameterServerStrategy`` needs at least one of each.
    evaluator : bool
        Whether to start an evaluator. It is a ``tf.distribute.Server`` in a separate cluster
        specification. Default false.
    gpus : {"auto", 0}, list of int or mapping
        The GPUs that the workers see on their host. ``"auto"`` (default) divides all of them
        evenly and 0 gives none. A list gives GPUs by index, numbered as in ``nvidia-smi``. A
        mapping gives counts per task: ``{"worker": 1, "evaluator": 1}``. Every worker gets the
        same number; a role that the mapping omits gets none. If the cluster has workers and
        parameter servers, the kernel itself does not use the GPUs. Otherwise it keeps its view.
    launcher : str or Launcher
        Where the tasks run. Default ``"local"`` (child processes). Also ``"inprocess"``, another
        name from ``%tfd_cluster launchers``, or an object from `tfd_notebook.launchers`.
    name : str, optional
        Up to 64 letters, digits, ``.``, ``_`` and ``-``. Default ``"cluster"``.
    if_exists : {"reuse", "replace", "error"}
        What to do if a cluster of that name is running. ``"reuse"`` (default) returns it if its
        specification is the same, ``"replace"`` stops it first, and ``"error"`` raises
        `NameTaken`.
    env : mapping of str to str, optional
        Environment variables for the tasks, in addition to the kernel's environment at the start.
    preload : iterable of str
        Modules and op libraries (``*.so``) that each task loads before its server starts.
    policy : Policy
        Restarts, timeouts and other supervision of the tasks.
    service : Service
        Configuration of the tf.data service.
    start : bool
        Whether to start at once. Default true; otherwise call `start`.

    Raises
    ------
    UsageError
        Invalid argument.
    NameTaken
        A cluster of that name is running with another specification.
    LaunchError
        A task failed to start. All tasks are stopped again.

    See Also
    --------
    tf.data.experimental.service, tf.distribute.Server : The underlying TensorFlow APIs.
    """

    _instead = "pass its name, and call tfd.attach(name) there after cluster.detach()"

    def __init__(
        self,
        *,
        data_workers: int = 0,
        workers: int = 0,
        ps: int = 0,
        evaluator: bool = False,
        gpus: str | int | Iterable[int] | Mapping[str, int] = "auto",
        launcher: str | base.Launcher = "local",
        name: str | None = None,
        if_exists: str = "reuse",
        env: Mapping[str, str] | None = None,
        preload: Iterable[str] = (),
        policy: Policy | None = None,
        service: Service | None = None,
        start: bool = True,
    ) -> None:
        # Declares the arguments for type checkers and editors. `_ClusterType` initializes.
        pass

    #: Without this, `inspect.signature` shows the parameters of `_ClusterType.__call__`.
    __signature__ = inspect.signature(__init__).replace(
        parameters=list(inspect.signature(__init__).parameters.values())[1:],
        return_annotation=inspect.Signature.empty,
    )

    def __init_subclass__(cls, **_: Any) -> None:
        raise errors.UsageError(
            f"class {cls.__name__} cannot be derived from Cluster, whose call returns the running "
            "cluster of its name",
            fix="keep a cluster in an attribute of the class",
        )

    @classmethod
    def _create(cls, config: ClusterConfig, launcher: base.Launcher) -> Cluster:
        """Return a new cluster that is neither registered nor started."""
        cluster = cls.__new__(cls)
        cluster._initialize(config, launcher)
        return cluster

    def _initialize(self, config: ClusterConfig, launcher: base.Launcher) -> None:
        self._servers = servers = ClusterServers(config, launcher, self)
        self._monitor, self._task_manager = servers.monitor, servers.task_manager
        self._data_service = ClusterDataService(servers)
        self._training = ParameterServerTraining(servers)
        self._lifecycle = Lifecycle(servers, self._data_service, self._training)
        self._dispatcher = ClusterDispatcher(servers, self._lifecycle)
        # atexit runs callbacks in reverse order: register again, to run before the launchers'.
        atexit.unregister(_stop_all)
        atexit.register(_stop_all)

    # Start and end

    @_documented_by(Lifecycle.start)
    def start(self) -> Cluster:
        self._lifecycle.start()
        return self

    stop = _part("_lifecycle", Lifecycle.stop)
    join = _part("_lifecycle", Lifecycle.join)
    scale = _part("_lifecycle", Lifecycle.scale)
    adapt = _part("_lifecycle", Lifecycle.adapt)
    restart = _part("_lifecycle", Lifecycle.restart)
    kill = _part("_lifecycle", Lifecycle.kill)
    interrupt = _part("_lifecycle", Lifecycle.interrupt)

    def job_script(self) -> str:
        """Return what the launcher submits to its scheduler, or would submit, without secrets.

        Returns
        -------
        str
            The jobs in the scheduler's own format, such as scripts for ``sbatch``.

        Raises
        ------
        Unsupported
            The launcher does not submit jobs.
        """
        return self._task_manager.job_script()

    leave = _part("_lifecycle", Lifecycle.leave)

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.leave()

    # Lease

    detach = _part("_servers", ClusterServers.detach)
    renew = _part("_servers", ClusterServers.renew)

    # Data service

    @property
    def _service(self) -> ClusterDataService:
        """The data service. Raises StateError unless the cluster runs and has a dispatcher."""
        self._data_service.require_service()
        return self._data_service

    distribute = _part("_service", service.distribute)
    register = _part("_service", service.register)

    from_dataset_id = _part("_service", service.from_dataset_id)
    save = _part("_service", service.save)

    def observe(self, dataset: Any, name: str | None = None) -> Any:
        """Return `dataset` with its throughput shown under `name`.

        The result is still a ``tf.data.Dataset``.
        """
        self._servers.require_running()
        return observe.watch(dataset, self._servers.consumers, name)

    stream = _part("_data_service", ClusterDataService.stream)

    @property
    def streams(self) -> Mapping[str, Stream]:
        """The streams that `stream` created, by name."""
        return self._data_service.streams

    @property
    def limit(self) -> Limit:
        """The bottleneck of the current consumer. If there are several, of the one served last."""
        return self._data_service.limit

    # Training

    @property
    def resolver(self) -> OwnResolver:
        """A ClusterResolver of the workers and parameter servers, always up to date.

        `coordinator` accepts a strategy that you create with it.

        See Also
        --------
        tf.distribute.cluster_resolver.ClusterResolver
        """
        return self._training.resolver

    strategy = _part("_training", ParameterServerTraining.strategy)
    coordinator = _part("_training", ParameterServerTraining.coordinator)
    run = _part("_servers", runs.run)
    recover = _part("_training", ParameterServerTraining.recover)

    @property
    def has_coordinator(self) -> bool:
        """True if the cluster has a coordinator that is not stopped."""
        return self._training.has_coordinator

    current_coordinator = _part("_training", ParameterServerTraining.current_coordinator)

    # Reports

    def snapshot(self) -> Snapshot:
        """Return the current state of the cluster."""
        # Otherwise the last sample of a loop that has just ended could be missing.
        self._data_service.consumers.sample(None)
        return self._monitor.snapshot()

    def to_frame(self) -> pd.DataFrame:
        """Return the tasks as a DataFrame with the columns `model.snapshot.TASK_COLUMNS`."""
        return self.snapshot().to_frame()

    logs = _part("_servers", ClusterServers.logs)
    stacks = _part("_servers", ClusterServers.stacks)
    gpus = _part("_servers", ClusterServers.gpus)
    limits = _part("_data_service", ClusterDataService.limits)
    jobs = _part("_data_service", ClusterDataService.jobs)
    what_if = _part("_data_service", ClusterDataService.what_if)

    # State

    @property
    def name(self) -> str:
        """The name of the cluster."""
        return self._servers.name

    @property
    def config(self) -> ClusterConfig:
        """The checked configuration of the cluster."""
        return self._servers.config

    @property
    def state(self) -> str:
        """One of new, starting, ready, degraded, stopping, stopped, failed, lost and left."""
        return self._monitor.state

    @property
    def version(self) -> Hashable:
        """A value that is different after each change of `snapshot`."""
        return self._monitor.version

    @property
    def detached(self) -> bool:
        """True if the cluster outlives this kernel."""
        return self._servers.detached

    @property
    def ended(self) -> bool:
        """True if the cluster has ended, or if this process has left it."""
        return self._lifecycle.ended

    @property
    def _is_ending(self) -> bool:
        return self._lifecycle.is_ending

    @property
    def tasks(self) -> tuple[TaskHandle, ...]:
        """The current tasks, the dispatcher first."""
        manager, limit = self._task_manager, self._data_service.worker_limit
        return tuple(
            TaskHandle(row.task, row.role, row.state, row.address, row.pid, manager, limit)
            for row in self._monitor.tasks()
        )

    @property
    def dispatcher(self) -> ClusterDispatcher:
        """The dispatcher, with the contract of TensorFlow's ``DispatchServer``.

        Raises
        ------
        StateError
            The cluster has no data worker, and therefore no dispatcher.
        """
        self._servers.require_dispatcher()
        return self._dispatcher

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return views.mimebundle(self.snapshot())

    def __repr__(self) -> str:
        snapshot = self._monitor.snapshot()  # without sampling the consumers
        ready = ", ".join(f"{count} {role}" for role, count in snapshot.observed.items())
        state = f"{self.state} on {snapshot.launcher}: {ready or 'no task'} ready"
        return f"<Cluster {self.name!r} {state}>"


def running() -> dict[str, Cluster]:
    """Return the running clusters of this process by name."""
    return cast("dict[str, Cluster]", registry.clusters())


def _stop_all() -> None:
    for cluster in running().values():
        with contextlib.suppress(Exception):
            cluster.leave()
