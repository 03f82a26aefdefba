"""The interface of a cluster that the data package uses."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tfd_notebook._compat.tf_data.pipeline_model import Buffer, Shares, Splits
from tfd_notebook.data.bottleneck.usage import DataWorkers
from tfd_notebook.data.service.semantics import Semantics
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.spec import Policy

if TYPE_CHECKING:
    from tfd_notebook.data.consume.consumers import Consumers
    from tfd_notebook.data.service.captured_state import CapturedState
    from tfd_notebook.data.service.changes import Change
    from tfd_notebook.data.service.journal import Journal


@dataclass(frozen=True)
class Registered:
    """A dataset that is registered with the dispatcher.

    Parameters
    ----------
    cardinality : int
        Number of elements. Negative if unknown.
    splits : Splits, optional
        Splits that dynamic sharding assigns. None if unknown.
    read : weakref.ref of tf.data.Dataset, optional
        The dataset that reads it, while it is referenced.
    buffers : tuple of Buffer
        Buffers of the dataset in the memory of each data worker.
    semantics : Semantics, optional
        The changes that the service makes to its elements. None if they are unknown.
    check : {"checked", "same", "tensorflow"}
        The argument ``semantics`` of `register`.
    captured : tuple of CapturedState
        Variables and tables that it uses, as they were registered.
    alone : tuple of (weakref.ref of tf.Tensor, Change)
        The tensors of datasets that read it, and refuse a second data worker.
    shares : mapping of str to Shares or None
        The units that each static mode of sharding divides. Empty if unknown.
    """

    cardinality: int
    splits: Splits | None
    read: weakref.ref[Any] | None = None
    buffers: tuple[Buffer, ...] = ()
    semantics: Semantics | None = None
    check: str = "checked"
    captured: tuple[CapturedState, ...] = ()
    alone: tuple[tuple[weakref.ref[Any], Change], ...] = ()
    shares: Mapping[str, Shares | None] = field(default_factory=dict)

    def alone_with(self, variant: Any, refused: Change | None) -> tuple[Any, ...]:
        """Return `alone` without the datasets that have ended, and with `variant` if it belongs."""
        running = tuple(each for each in self.alone if each[0]() is not None)
        return running if refused is None else (*running, (weakref.ref(variant), refused))


@dataclass(frozen=True)
class TaskEnvironment:
    """Working directory and environment variables at the start of the cluster.

    Parameters
    ----------
    directory : str
    environment : mapping of str to str
    """

    directory: str
    environment: Mapping[str, str] = field(repr=False)

    @classmethod
    def now(cls) -> TaskEnvironment:
        """Return the current values of this process."""
        return cls(os.getcwd(), dict(os.environ))


class DataServiceProtocol(DataWorkers, Protocol):
    """A tf.data service as the data package uses it."""

    @property
    def name(self) -> str: ...

    @property
    def policy(self) -> Policy: ...

    def restart_step(self, task: str, reason: str = "", logs: bool = False) -> str:
        """Return the next step for a task that does not run; see `ClusterConfig.restart_step`."""

    @property
    def consumers(self) -> Consumers:
        """The registry of the consumers in this process that read from the service."""

    @property
    def service_target(self) -> str:
        """``"grpc://host:port"`` of the dispatcher. Raises StateError unless the cluster runs."""

    @property
    def journal(self) -> Journal | None:
        """The dispatcher's journal. None without ``fault_tolerant``."""

    @property
    def worker_tags(self) -> tuple[str, ...]:
        """The tags of its data workers."""

    @property
    def registered(self) -> MutableMapping[str, Registered]:
        """The datasets that this process registered, by id."""

    @property
    def task_environment(self) -> TaskEnvironment | None:
        """The environment that the tasks inherited. None if another process started them."""

    def inspect_tasks(self) -> Mapping[str, Mapping[str, list[str]]]:
        """Return stale modules (``stale``) and loaded ops (``ops``) of each task that answers."""

    @property
    def limit(self) -> Limit:
        """The current bottleneck of the consumer that reads now."""

    def check_room(self, needed: int) -> None:
        """Raise WorkDirError unless the journal's disk has room for `needed` bytes."""

    def install_functions(
        self, functions: Mapping[str, str], blob: bytes, dataset: Any = None
    ) -> None:
        """Send the Python functions in `blob` to every current and future data worker.

        Returns when all current workers have loaded them.

        Parameters
        ----------
        functions : mapping of str to str
            The user's name of the function of each token.
        blob : bytes
            The result of `data.service.py_functions.pack`.
        dataset : tf.data.Dataset, optional
            The workers may discard the functions after this dataset, and all others that use the
            functions, have ended. With None they keep the functions.

        Raises
        ------
        NotSerializable
            A worker cannot load them.
        """

    def enable_static_sharding(self) -> None:
        """Configure the dispatcher for FILE, DATA and FILE_OR_DATA.

        These policies need a dispatcher that has the addresses of its workers.
        """
