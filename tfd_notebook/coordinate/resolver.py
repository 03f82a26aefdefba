"""The ClusterResolver of a cluster of ours: its answers are those of this moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfd_notebook._compat import connecting
from tfd_notebook.probe import probe_many


class OwnResolver(tf.distribute.cluster_resolver.ClusterResolver):
    """Resolves the workers and parameter servers of a cluster; nothing is remembered.

    Parameters
    ----------
    spec : callable
        Returns the addresses by job.
    connected : callable
        Called when this process is found to be connected to them.

    See Also
    --------
    tf.distribute.cluster_resolver.ClusterResolver
    """

    def __init__(
        self, spec: Callable[[], Mapping[str, list[str]]], connected: Callable[[], None]
    ) -> None:
        self._spec = spec
        self._connected = connected
        self.task_type: str | None = None
        self.task_id: int | None = None
        self._rpc_layer = "grpc"

    def cluster_spec(self) -> Any:
        """Return the ``tf.train.ClusterSpec`` of the tasks that have not ended.

        Once this process is connected to them it is the ``chief`` among them.
        """
        spec = {job: list(tasks) for job, tasks in self._spec().items()}
        chief = connecting.address_in(spec)
        if chief is not None:
            # A strategy asks again when it has connected: here it is noticed, whoever makes it.
            self._connected()
            spec["chief"] = [chief]
        return tf.train.ClusterSpec(spec)

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
