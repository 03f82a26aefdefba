"""Resolvers for static descriptions: TF_CONFIG, SageMaker's variables, and files."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfd_notebook.errors import Malformed, NotThere, UsageError
from tfd_notebook.model.spec import Endpoint, check_count
from tfd_notebook.resolvers.base import Resolver
from tfd_notebook.resolvers.validation import AddressesByJob, mapping, parsed, task_of, tf_config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class TFConfigResolver(Resolver):
    """The tasks in the environment variable TF_CONFIG, which is read at each call.

    Without the variable, or without a ``"cluster"`` in it, the cluster is empty, as in TensorFlow.
    Strategies then train on this host alone.

    Parameters
    ----------
    task_type, task_id, rpc_layer : optional
        Values that take precedence over those of the variable.
    environment : str
        Default empty.

    See Also
    --------
    tf.distribute.cluster_resolver.TFConfigClusterResolver
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str = "",
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer, environment)

    @property
    def place(self) -> str:
        return "TF_CONFIG"

    def _default_layer(self) -> str | None:
        return tf_config().get("rpc_layer") or "grpc"

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return ``"grpc://host:port"`` of a task, or the ``"session_master"``.

        Empty for a cluster of one task, as in TensorFlow.
        """
        master = tf_config().get("session_master")
        if master is not None:
            return str(master)
        if sum(map(len, self.tasks().values())) < 2:
            return ""
        return super().master(task_type, task_id, rpc_layer)

    def _find(self) -> AddressesByJob:
        cluster: AddressesByJob = tf_config().get("cluster") or {}
        return cluster

    def _identity(self) -> tuple[str, int] | None:
        return task_of(tf_config().get("task"), self.place)


class SageMakerResolver(Resolver):
    """The hosts of a SageMaker training job, each with one worker.

    They are numbered as in TensorFlow: by the lexicographic order of their names.

    Parameters
    ----------
    port : int
        Port of each worker. Default 2223.
    task_type, task_id : optional
        Values that take precedence over the position of this host.
    rpc_layer : str
        Default ``"grpc"``.
    environment : str
        Default empty.
    """

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = "grpc",
        environment: str = "",
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer, environment)
        self._port = check_count("port", port, 65535, 1)

    @property
    def place(self) -> str:
        return "SageMaker's SM_HOSTS"

    def _find(self) -> AddressesByJob:
        hosts = self._hosts()
        self._index(hosts)
        return {"worker": [str(Endpoint(host, self._port)) for host in hosts]}

    def _identity(self) -> tuple[str, int] | None:
        return "worker", self._index(self._hosts())

    def _hosts(self) -> list[str]:
        hosts = parsed(self._variable("SM_HOSTS"), self.place, "leave it as SageMaker sets it")
        if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            raise Malformed(
                f"{self.place}: invalid hosts {hosts!r}: expected a list of names",
                fix="leave it as SageMaker sets it",
            )
        return sorted(hosts)

    def _index(self, hosts: list[str]) -> int:
        current = self._variable("SM_CURRENT_HOST")
        if hosts and current not in hosts:
            raise Malformed(
                f"{self.place}: invalid SM_CURRENT_HOST={current!r}: expected one of "
                f"{', '.join(hosts)}",
                fix="leave both variables as SageMaker sets them",
            )
        return hosts.index(current) if hosts else 0

    def _variable(self, name: str) -> str:
        try:
            return os.environ[name]
        except KeyError:
            raise NotThere(
                f"{name} is not set: this process is not in a SageMaker training job",
                fix="use this resolver in the script of the training job, or use a different one",
            ) from None


class ClusterFileResolver(Resolver):
    """The tasks in a JSON or TOML file, which is read at each call.

    Parameters
    ----------
    path : str or path
        A file with ``{"worker": ["host:port", ...], "ps": [...]}``, or in the format of TF_CONFIG.
        TOML if the name ends in ``.toml``, otherwise JSON.
    task_type, task_id : optional
        The task of this process. Default: the ``"task"`` of the file.
    rpc_layer : str
        Default ``"grpc"``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = "grpc",
    ) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise UsageError(f"invalid path={path!r}: expected a path")
        super().__init__(task_type, task_id, rpc_layer)
        self._path = Path(path).expanduser()

    @property
    def place(self) -> str:
        return str(self._path)

    def _find(self) -> AddressesByJob:
        content = self._read()
        cluster: AddressesByJob = content.get("cluster", content)
        return cluster

    def _identity(self) -> tuple[str, int] | None:
        content = self._read()
        return task_of(content.get("task"), self.place) if "cluster" in content else None

    def _read(self) -> Mapping[str, Any]:
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise NotThere(
                f"file {self.place} not found", fix="write it, or correct the path"
            ) from None
        except (OSError, ValueError) as error:
            raise Malformed(
                f"{self.place} cannot be read: {error}", fix="make it readable"
            ) from error
        if self._path.suffix != ".toml":
            return mapping(parsed(text, self.place), self.place)
        try:
            return dict(tomllib.loads(text))
        except (ValueError, RecursionError) as error:
            raise Malformed(
                f"{self.place}: invalid TOML: {error}", fix='write worker = ["host:port"]'
            ) from error
