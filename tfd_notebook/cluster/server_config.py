"""Configurations of the servers of a cluster's tasks, as JSON values."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from tfd_notebook.agent import tf_servers
from tfd_notebook.agent import work_dir as agent_work_dir
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import SERVER_ROLES, ClusterConfig, Role, Service

#: The jobs of a training cluster. An evaluator has a separate ClusterSpec.
JOBS = (Role.WORKER, Role.PS)

_DISPATCHER_FIELDS = (
    "job_gc_check_interval_ms",
    "job_gc_timeout_ms",
    "worker_timeout_ms",
    "worker_max_concurrent_snapshots",
)
_WORKER_FIELDS = (
    "heartbeat_interval_ms",
    "dispatcher_timeout_ms",
    "data_transfer_protocol",
    "data_transfer_address",
)
#: Fields of the data workers' configuration that TensorFlow's public class lacks.
_SERVICE_WORKER_FIELDS = (
    "worker_tags",
    "cross_trainer_cache_size_bytes",
    "snapshot_max_chunk_size_bytes",
)


def tf_server_configs(
    reserved: dict[str, str], present: Iterable[TaskRow]
) -> dict[str, dict[str, Any]]:
    """Return the settings of the tasks in `reserved` that are a ``tf.distribute.Server``.

    Parameters
    ----------
    reserved : dict of str to str
        Addresses of the tasks to start, by name.
    present : iterable of TaskRow
        The existing tasks.
    """
    addresses: dict[Role, dict[int, str]] = {role: {} for role in SERVER_ROLES}
    for row in present:
        if row.role in addresses:
            addresses[row.role][row.index] = row.address
    for name, address in reserved.items():
        role, index = _role_and_index(name)
        if role in addresses:
            addresses[role][index] = address
    jobs = {role: [known[index] for index in sorted(known)] for role, known in addresses.items()}
    training = {str(role): jobs[role] for role in JOBS if jobs[role]}
    configs: dict[str, dict[str, Any]] = {}
    for name in reserved:
        role, index = _role_and_index(name)
        if role in SERVER_ROLES:
            cluster = training if role in JOBS else {str(role): jobs[role]}
            configs[name] = {"cluster": cluster, "job": str(role), "index": index}
    return configs


def dispatcher_config(
    config: ClusterConfig, directory: str, is_local: bool, in_process: bool
) -> tuple[dict[str, Any], str | None]:
    """Return the dispatcher's settings, and the directory of its journal or None.

    Parameters
    ----------
    config : ClusterConfig
    directory : str
        The cluster's directory on the dispatcher's host.
    is_local : bool
        Whether the dispatcher runs on this host.
    in_process : bool
        Whether the dispatcher runs in this process.

    Raises
    ------
    WorkDirError
        The directory from the user is not usable.
    """
    service = config.service
    settings = _fields(service.dispatcher_config, _DISPATCHER_FIELDS)
    if not service.fault_tolerant:
        return settings, None
    if service.work_dir is None:
        work_dir = os.path.join(directory, "journal")
    else:
        # Each start gets a new journal: an old one lists workers that no longer exist.
        root = agent_work_dir.plain(service.work_dir)
        if is_local and not agent_work_dir.is_url(root):
            root = os.path.abspath(root)
        if not in_process:
            agent_work_dir.check_shared(root)
        if is_local:
            agent_work_dir.check_usable(root)
        work_dir = f"{root}/{config.name}-{os.urandom(4).hex()}"
    return {**settings, "work_dir": work_dir, "fault_tolerant_mode": True}, work_dir


def keep_seconds(service: Service) -> float | None:
    """Return the time after which an epoch without consumers is discarded, or None for never."""
    timeout = getattr(service.dispatcher_config, "job_gc_timeout_ms", None)
    if timeout is not None and timeout < 0:
        return None
    return timeout / 1000 if timeout else tf_servers.KEEP_SECONDS


def data_worker_config(config: ClusterConfig) -> dict[str, Any]:
    """Return the settings of data workers that the user has set."""
    service = config.service
    return {
        **_fields(service.worker_config, _WORKER_FIELDS),
        **_fields(service, _SERVICE_WORKER_FIELDS),
    }


def _role_and_index(task: str) -> tuple[Role, int]:
    role, _, index = task.partition(":")
    return Role(role), int(index)


def _fields(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of a configuration that the user has set, as JSON values."""
    return tf_servers.set_fields({name: getattr(config, name, None) for name in names})
