"""The ClusterResolver of a cluster of ours: its answers are those of this moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfd_notebook.probe import probe_many


class OwnResolver(tf.distribute.cluster_resolver.ClusterResolver):
    """Resolves the workers and parameter servers of a cluster; nothing is remembered.

    Parameters
    ----------
    spec : callable
        Returns the addresses by job.
    chief : str, optional
        The address of the coordinator, where it has one already. Default: TensorFlow chooses it.

    See Also
    --------
    tf.distribute.cluster_resolver.ClusterResolver
    """

    def __init__(
        self, spec: Callable[[], Mapping[str, list[str]]], chief: str | None = None
    ) -> None:
        self._spec = spec
        self._chief = {} if chief is None else {"chief": [chief]}
        self.task_type: str | None = None
        self.task_id: int | None = None
        self._rpc_layer = "grpc"

    def cluster_spec(self) -> Any:
        """Return the ``tf.train.ClusterSpec`` of the tasks that have not ended."""
        spec = {job: list(tasks) for job, tasks in self._spec().items()}
        return tf.train.ClusterSpec({**spec, **self._chief})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return ``"grpc://host:port"`` of a task; empty without one, as TensorFlow does."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        layer = rpc_layer if rpc_layer is not None else self._rpc_layer
        return f"{layer}://{address}" if layer else str(address)

    @property
    def environment(self) -> str:
        """Where this runs: empty, as TensorFlow's own resolvers say outside of Google."""
        return ""

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Ask the tasks themselves which accelerators they have.

        Parameters
        ----------
        task_type, task_id : optional
            One task. Default: the first worker, since TensorFlow takes workers to be alike.
        config_proto : optional
            For TensorFlow's sake; not used.

        Returns
        -------
        dict of str to int
            ``{"GPU": 2}``, empty without any.
        """
        spec = self._spec()
        addresses = spec.get(task_type or "worker", [])
        index = task_id or 0
        if index >= len(addresses):
            return {}
        found: dict[str, int] = {}
        for device in probe_many([addresses[index]], timeout=5.0)[0].devices:
            if device.type not in ("CPU", "XLA_CPU", "XLA_GPU"):
                found[device.type] = found.get(device.type, 0) + 1
        return found

    @property
    def rpc_layer(self) -> str:
        return self._rpc_layer
