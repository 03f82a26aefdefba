"""Resolver that combines several resolvers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfd_notebook.errors import Malformed, UsageError
from tfd_notebook.resolvers.base import Resolver
from tfd_notebook.resolvers.validation import AddressesByJob, tasks_of

_Any = tf.distribute.cluster_resolver.ClusterResolver


class UnionResolver(Resolver):
    """The tasks of several resolvers.

    The lists of a job are concatenated in the order of the resolvers. A task of several resolvers
    counts once. If the indexes of one of them have gaps, all indexes are kept. They must not
    conflict then.

    Parameters
    ----------
    *resolvers : tf.distribute.cluster_resolver.ClusterResolver
        Resolvers of `tfd.resolvers` or of TensorFlow. The task of this process, the protocol and
        the environment come from the first resolver that defines them.
    task_type, task_id, rpc_layer : optional
        Values that take precedence over those of the resolvers. Index 0 is a value, too.

    See Also
    --------
    tf.distribute.cluster_resolver.UnionResolver
    """

    _server_indexes = False

    def __init__(
        self,
        *resolvers: Any,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not resolvers:
            raise UsageError(
                "invalid resolvers: expected at least 1, got none", fix="pass a resolver"
            )
        for resolver in resolvers:
            if not isinstance(resolver, _Any):
                raise UsageError(
                    f"invalid resolver {resolver!r}: expected a ClusterResolver",
                    fix="use a resolver of tfd.resolvers, or of tf.distribute.cluster_resolver",
                )
        super().__init__(task_type, task_id, rpc_layer)
        self._resolvers = resolvers

    @property
    def place(self) -> str:
        return "the union of " + " and ".join(_name(resolver) for resolver in self._resolvers)

    @property
    def environment(self) -> str:
        return next(filter(None, (r.environment for r in self._resolvers)), "")

    def _default_layer(self) -> str | None:
        layers = (getattr(resolver, "rpc_layer", None) for resolver in self._resolvers)
        return next(filter(None, layers), "grpc")

    def _declared_accelerators(self, *task: Any) -> Mapping[str, int] | None:
        """Return the numbers that a ``SimpleClusterResolver`` declares."""
        simple = tf.distribute.cluster_resolver.SimpleClusterResolver
        declared = (r.num_accelerators(*task) for r in self._resolvers if isinstance(r, simple))
        return next(filter(None, declared), None)

    def _identity(self) -> tuple[str, int] | None:
        for resolver in self._resolvers:
            if resolver.task_type is not None and resolver.task_id is not None:
                return resolver.task_type, resolver.task_id
        return None

    def _find(self) -> AddressesByJob:
        parts = [tasks_of(resolver.cluster_spec()) for resolver in self._resolvers]
        union: dict[str, dict[int, str]] = {}
        for job in dict.fromkeys(job for part in parts for job in part):
            groups = [part[job] for part in parts if job in part]
            gaps = any(list(tasks) != list(range(len(tasks))) for tasks in groups)
            union[job] = self._merged(job, groups) if gaps else _concatenated(groups)
        return union

    def _merged(self, job: str, groups: list[dict[int, str]]) -> dict[int, str]:
        merged: dict[int, str] = {}
        for tasks in groups:
            for index, address in tasks.items():
                if merged.setdefault(index, address) != address:
                    raise Malformed(
                        f"{self.place}: {job}:{index} is at {merged[index]} and at {address}",
                        task=f"{job}:{index}",
                        fix="use different indexes for the tasks of a job in each resolver",
                    )
        return dict(sorted(merged.items()))


def _concatenated(groups: list[dict[int, str]]) -> dict[int, str]:
    addresses = dict.fromkeys(address for tasks in groups for address in tasks.values())
    return dict(enumerate(addresses))


def _name(resolver: Any) -> str:
    return resolver.place if isinstance(resolver, Resolver) else type(resolver).__name__
