"""Immutable, validated description of a cluster."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from tfd_notebook.errors import UnknownName, UsageError, one_of
from tfd_notebook.model import resolution

#: Larger numbers of tasks per role are rejected as typos.
MAX_TASKS_PER_ROLE = 1024
#: Maximum duration of a lease in hours.
_MAX_HOURS = 24.0 * 365
#: Maximum of other times in seconds, about 31 years. `threading.TIMEOUT_MAX` is larger on Linux.
_MAX_SECONDS = 1e9
#: The largest number of bytes in TensorFlow's configurations (int64).
_MAX_BYTES = 2**63 - 1
#: The only protocol of tf.data servers in TensorFlow's binary packages.
PROTOCOL = "grpc"
#: TensorFlow's classes of the configs of `Service`.
_CONFIGS = {"dispatcher_config": "DispatcherConfig", "worker_config": "WorkerConfig"}
#: The names of clusters. An option of a command line is not a name.
CLUSTER_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)


class Role(str, Enum):
    """The role of a task. The values are TensorFlow's terms."""

    DISPATCHER = "dispatcher"
    DATA_WORKER = "data_worker"
    PS = "ps"
    WORKER = "worker"
    CHIEF = "chief"
    EVALUATOR = "evaluator"

    def __str__(self) -> str:
        return self.value


#: The order in which tasks are stopped: clients before the servers that they use.
STOP_ORDER = (
    (Role.CHIEF, Role.WORKER, Role.EVALUATOR),
    (Role.PS,),
    (Role.DATA_WORKER,),
    (Role.DISPATCHER,),
)
#: The tasks that are a ``tf.distribute.Server``.
SERVER_ROLES = (Role.PS, Role.WORKER, Role.EVALUATOR)


class TaskState(str, Enum):
    """The lifecycle state of a task."""

    PLANNED = "planned"
    STARTING = "starting"
    READY = "ready"
    HUNG = "hung"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"

    def __str__(self) -> str:
        return self.value

    @property
    def ended(self) -> bool:
        """True if the task has no process and is not restarted automatically."""
        return self in (TaskState.STOPPED, TaskState.FAILED, TaskState.LOST)


@dataclass(frozen=True)
class Endpoint:
    """The address on which a task listens.

    Parameters
    ----------
    host : str
        Host name or address for its peers.
    port : int
        TCP port, 1 to 65535.
    """

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @classmethod
    def parse(cls, address: str) -> Endpoint:
        """Parse ``"host:port"`` or ``"grpc://host:port"``."""
        match = re.fullmatch(r"(?:grpc://)?(\[[^\]]+\]|[^:/]+):(\d{1,5})/?", address.strip())
        if not match or not 1 <= int(match[2]) <= 65535:
            raise UsageError(
                f"invalid address {address!r}",
                fix='write it as "host:port" or "grpc://host:port"',
            )
        return cls(match[1].strip("[]"), int(match[2]))


@dataclass(frozen=True)
class TaskSpec:
    """The specification of one task.

    Parameters
    ----------
    role : Role
    index : int
        Position among the tasks of the role, from 0.
    host : str
        Host name or address for its peers.
    port : int
        TCP port. With 0, the agent chooses one and reserves it until the cluster stops.
    settings : mapping
        JSON values for the server that the task runs, such as ``dispatcher_address``.
    gpus : tuple of int
        Indices of the GPUs that the task can use, in the order of ``nvidia-smi``.
    """

    role: Role
    index: int
    host: str = "localhost"
    port: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    gpus: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name of the task, such as ``"data_worker:1"``."""
        return f"{self.role}:{self.index}"


@dataclass(frozen=True)
class Policy:
    """Supervision settings for the tasks of a cluster.

    Parameters
    ----------
    on_hang : {"warn", "restart"}
        Reaction to a task that does not answer for `hang_seconds`.
    hang_seconds : float
        Seconds without an answer before a task counts as hung. Default 30.
    on_loss : {"raise", "warn"}
        Effect on a consumer if a data worker fails and a part of its data is lost. ``"raise"``
        raises an error that names the worker. ``"warn"`` delivers the rest with a warning.
    restarts : int
        Number of restarts in a row, on the same port, before a task counts as failed. The count
        starts again after the task has been ready for a minute. Default 3.
    start_timeout : float
        Seconds from the start of a task to its first successful probe. Default 180.
    time_limit : float, optional
        Seconds after which the cluster stops. Default: none. The end of a Slurm allocation is
        a time limit, too. The earlier one applies.
    time_limit_notice : float
        Seconds before the time limit at which a notice is published. Default 600.
    minimum : int, optional
        Number of data workers that must be ready for a successful start. Default: all.
    recycle : bool
        Whether parameter servers and workers restart when a new coordinator attaches.
        TensorFlow otherwise keeps the variables of the previous coordinator. Default true.
    """

    on_hang: str = "warn"
    hang_seconds: float = 30.0
    on_loss: str = "raise"
    restarts: int = 3
    start_timeout: float = 180.0
    time_limit: float | None = None
    time_limit_notice: float = 600.0
    minimum: int | None = None
    recycle: bool = True

    def __post_init__(self) -> None:
        _one_of("on_hang", self.on_hang, ("warn", "restart"))
        _one_of("on_loss", self.on_loss, ("raise", "warn"))
        for name in ("hang_seconds", "start_timeout", "time_limit", "time_limit_notice"):
            if (value := getattr(self, name)) is not None:
                check_seconds(name, value)
        check_count("restarts", self.restarts, maximum=1000)
        if self.minimum is not None:
            check_count("minimum", self.minimum)


@dataclass(frozen=True)
class Service:
    """Settings of a cluster's tf.data service.

    Parameters
    ----------
    port : int
        TCP port of the dispatcher. 0 (the default) selects a free one.
    fault_tolerant : bool
        Whether the dispatcher keeps a journal, from which it continues after a restart. Default
        true. The journal only costs time with ``processing_mode="dynamic"`` over single elements.
    work_dir : str, optional
        Directory for journals. Each start creates a subdirectory named after the cluster. A path,
        or a URL of a file system of TensorFlow, such as ``"gs://bucket/journals"``. ``ram://``
        needs ``launcher="inprocess"``. Default: a temporary directory that is removed when the
        cluster stops.
    dispatcher_config, worker_config : tuple, optional
        A ``tf.data.experimental.service.DispatcherConfig`` or ``WorkerConfig``. The cluster sets
        its port, addresses, ``work_dir`` and ``fault_tolerant_mode``, and uses the other fields.
        ``protocol`` must be ``"grpc"``.
    worker_tags : iterable of str
        Tags of each data worker, ``WorkerConfig.worker_tags`` of ``service_config.proto``.
        ``"COLOCATED"`` reserves them for consumers in their own process, unless these pass
        ``target_workers="ANY"``. Default: none.
    cross_trainer_cache_size_bytes : int, optional
        Size in bytes of the cache that each data worker has for a read with
        ``cross_trainer_cache=``. Default: TensorFlow's choice (10 GiB).
    snapshot_max_chunk_size_bytes : int, optional
        Size in bytes of the files of `Cluster.save`, its chunks. Default: TensorFlow's choice
        (6 GB).
    """

    port: int = 0
    fault_tolerant: bool = True
    work_dir: str | None = None
    dispatcher_config: Any = field(default=None, hash=False)
    worker_config: Any = field(default=None, hash=False)
    worker_tags: tuple[str, ...] = ()
    cross_trainer_cache_size_bytes: int | None = None
    snapshot_max_chunk_size_bytes: int | None = None

    def __post_init__(self) -> None:
        check_count("port", self.port, 65535)
        object.__setattr__(self, "worker_tags", _tags(self.worker_tags))
        for name in ("cross_trainer_cache_size_bytes", "snapshot_max_chunk_size_bytes"):
            if (size := getattr(self, name)) is not None:
                check_count(name, size, _MAX_BYTES, minimum=1)
        if self.work_dir is not None and not isinstance(self.work_dir, (str, os.PathLike)):
            raise UsageError(f"invalid work_dir={self.work_dir!r}: expected a path")
        for name, kind in _CONFIGS.items():
            value = getattr(self, name)
            if value is not None and type(value).__name__ != kind:
                raise UsageError(
                    f"invalid {name}={value!r}: expected a {kind}",
                    fix=f"create it with tf.data.experimental.service.{kind}(...)",
                )
            if value is not None:
                check_protocol(value)

    def __reduce__(self) -> tuple[Any, ...]:
        # TensorFlow creates the copy of a config again, and changes its default times of 0 to 1 ms.
        return _service, (_packed(self),)


def _packed(service: Service) -> dict[str, Any]:
    """Return the fields of `service`, with its configs as dictionaries."""
    configs = {name: getattr(service, name) for name in _CONFIGS}
    return vars(service) | {name: config and config._asdict() for name, config in configs.items()}


def _service(packed: Mapping[str, Any]) -> Service:
    """Return the settings from the result of `_packed`."""
    configs = {
        name: namedtuple(kind, packed[name])(**packed[name])
        for name, kind in _CONFIGS.items()
        if packed[name] is not None
    }
    return Service(**{**packed, **configs})


def _tags(tags: object) -> tuple[str, ...]:
    """Return the tags of data workers as a tuple, or raise UsageError."""
    if isinstance(tags, str) or not isinstance(tags, Iterable):
        raise UsageError(
            f"invalid worker_tags={tags!r}: expected a list of strings", fix='write ["tag"]'
        )
    checked = tuple(tags)
    for tag in checked:
        if not isinstance(tag, str) or not tag.strip() or not tag.isprintable():
            raise UsageError(f"invalid worker_tags entry {tag!r}: expected a non-empty string")
    if len(set(checked)) < len(checked):
        raise UsageError(f"invalid worker_tags={checked!r}: expected different tags")
    return checked


@dataclass(frozen=True)
class ClusterConfig:
    """The complete configuration of a cluster. Equal configurations are the same cluster.

    Parameters
    ----------
    name : str
    launcher : str
        Name of the launcher.
    counts : mapping of Role to int
        Planned number of tasks by role.
    policy : Policy
    service : Service
    env : mapping of str to str
        Variables added to the environment of each task.
    preload : tuple of str
        Modules and op libraries (``*.so``) that each task imports before its server starts.
    allow : tuple of str
        Networks in CIDR form that may connect in addition to this host.
    options : mapping of str to JSON values
        Arguments of the launcher, without secrets.
    gpus : "auto", tuple of int or mapping of str to int
        Assignment of GPUs to tasks, as `tfd_notebook.cluster.gpu_allocation.check` returns it.
    """

    name: str
    launcher: str = "local"
    counts: Mapping[Role, int] = field(default_factory=dict, hash=False)
    policy: Policy = field(default_factory=Policy)
    service: Service = field(default_factory=Service)
    env: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)
    preload: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)
    gpus: str | tuple[int, ...] | Mapping[str, int] = field(default="auto", hash=False)

    def __post_init__(self) -> None:
        for field_name, kind in (("policy", Policy), ("service", Service)):
            value = getattr(self, field_name)
            if not isinstance(value, kind):
                raise UsageError(
                    f"invalid {field_name}={value!r}: expected a tfd.{kind.__name__}",
                    fix=f"write {field_name}=tfd.{kind.__name__}(...)",
                )
        for module in self.preload:
            if not isinstance(module, str):
                raise UsageError(
                    f"invalid preload entry {module!r}: expected the name of a module or library"
                )
        if not CLUSTER_NAME.fullmatch(self.name):
            raise UsageError(
                f"invalid cluster name {self.name!r}",
                fix="use up to 64 ASCII letters, digits, '.', '_' and '-', a letter or digit first",
            )
        for role, count in self.counts.items():
            check_count(count_name(role), count)
        for network in self.allow:
            try:
                ipaddress.ip_network(network, strict=False)
            except ValueError as error:
                raise UsageError(
                    f"invalid network allow={network!r}: {error}", fix='write it as "10.0.0.0/8"'
                ) from None
        for key, value in self.env.items():
            if not isinstance(key, str) or not isinstance(value, str) or "=" in key:
                name = str(key).partition("=")[0]  # the value may be a secret
                raise UsageError(f"invalid entry {name!r} in env: expected a name and a string")

    def tasks(self) -> Iterator[tuple[Role, int]]:
        """Return the role and the index of each task."""
        for role, count in self.counts.items():
            for index in range(count):
                yield role, index

    def restart_step(self, task: str, reason: str = "", logs: bool = False) -> str:
        """Return the next step for a task that does not run or answer, for this `reason`.

        With `logs`, the step also names its logs.
        """
        if self.launcher == "external":
            return self._external_step(task, reason)
        return (f"see cluster.logs({task!r}), then " if logs else "") + f"cluster.restart({task!r})"

    def _external_step(self, task: str, reason: str) -> str:
        step = resolution.missing_step(task, reason, bool(self.counts.get(Role.PS)))
        is_silent = "nothing listens there" in reason or "accepts connections" in reason
        if step == resolution.START_OR_CORRECT and (is_silent or not reason):
            return f"start {task} again where it was started"
        return step


def pack(config: ClusterConfig) -> dict[str, Any]:
    """Return `config` as JSON values."""
    service = _packed(config.service)
    gpus = config.gpus
    return {
        **vars(config),
        "counts": {str(role): count for role, count in config.counts.items()},
        "policy": vars(config.policy),
        "service": {
            **service,
            "work_dir": service["work_dir"] and str(service["work_dir"]),
            "worker_tags": list(service["worker_tags"]),
        },
        "env": dict(config.env),
        "options": dict(config.options),
        "gpus": gpus
        if isinstance(gpus, str)
        else dict(gpus)
        if isinstance(gpus, Mapping)
        else list(gpus),
    }


def without_values(config: ClusterConfig) -> ClusterConfig:
    """Return a copy of `config` without the values of its environment variables."""
    return replace(config, env=dict.fromkeys(config.env, ""))


def is_same(known: ClusterConfig, config: ClusterConfig) -> bool:
    """Return True if both describe the same cluster. `known` may lack the values of `env`."""
    return known in (config, without_values(config))


def unpack(packed: Mapping[str, Any]) -> ClusterConfig:
    """Return the configuration from the JSON values of `pack`."""
    gpus = packed["gpus"]
    return ClusterConfig(
        **{
            **packed,
            "counts": {Role(role): count for role, count in packed["counts"].items()},
            "policy": Policy(**packed["policy"]),
            "service": _service(packed["service"]),
            "preload": tuple(packed["preload"]),
            "allow": tuple(packed["allow"]),
            "gpus": tuple(gpus) if isinstance(gpus, list) else gpus,
        }
    )


def check_protocol(config: Any) -> None:
    """Raise UnknownName unless TensorFlow supports the protocol of a server's config."""
    if config.protocol != PROTOCOL:
        raise UnknownName(
            f"protocol={config.protocol!r} is not supported by TensorFlow's tf.data servers",
            fix=f"use protocol={PROTOCOL!r}",
        )


def count_name(role: Role) -> str:
    """Return the name of the argument for the number of tasks of `role`."""
    return {Role.DATA_WORKER: "data_workers", Role.WORKER: "workers"}.get(role, str(role))


def check_count(
    name: str, value: object, maximum: int | None = MAX_TASKS_PER_ROLE, minimum: int = 0
) -> int:
    """Return `value` if it is an integer from `minimum` to `maximum`, else raise UsageError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"invalid {name}={value!r}: expected an integer")
    if value < minimum or (maximum is not None and value > maximum):
        limit = "or more" if maximum is None else f"to {maximum}"
        # Python does not convert integers with thousands of digits to text.
        shown = value if abs(value) < 2**64 else f"{_as_float(value):g}"
        raise UsageError(f"invalid {name}={shown}: expected {minimum} {limit}")
    return value


def check_seconds(name: str, value: Any, minimum: float | None = None) -> float:
    """Return `value` if it is a valid number of seconds, else raise UsageError.

    Parameters
    ----------
    name : str
        Name of the argument.
    value : object
    minimum : float, optional
        The least valid number. Default: any number above 0.
    """
    least = "more than 0" if minimum is None else f"{minimum:g} or more"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"invalid {name}={value!r}: expected {least} seconds")
    # NaN is in no range.
    if not ((value > 0 if minimum is None else value >= minimum) and value <= _MAX_SECONDS):
        shown = f"{_as_float(value):g}"
        raise UsageError(
            f"invalid {name}={shown}: expected {least} seconds, up to {_MAX_SECONDS:g}"
        )
    return value


def check_timeout(timeout: Any) -> None:
    """Raise UsageError unless `timeout` is None, or 0 or more seconds."""
    if timeout is not None:
        check_seconds("timeout", timeout, 0)


def check_text(name: str, value: object) -> None:
    """Raise UsageError unless `value` is one line of printable text without a leading ``-``."""
    if not isinstance(value, str) or not value.isprintable() or value.startswith("-"):
        raise UsageError(
            f"invalid {name} {value!r}: expected one line that does not start with '-'"
        )


def check_hours(hours: object) -> None:
    """Raise UsageError unless `hours` is a valid duration of a lease."""
    if isinstance(hours, bool) or not isinstance(hours, (int, float)):
        raise UsageError(f"invalid hours {str(hours)[:100]!r}: expected a number")
    number = _as_float(hours)
    if not 0 < number <= _MAX_HOURS:
        raise UsageError(f"invalid hours={number:g}: expected more than 0, up to {_MAX_HOURS:g}")


def _as_float(number: float) -> float:
    """Return `number` as a float, which is infinite if an int is too large for it."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"invalid {name}={value!r}", fix=one_of(value, choices))
