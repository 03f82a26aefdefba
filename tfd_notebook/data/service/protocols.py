"""What the data path asks of the cluster that it belongs to."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tfd_notebook._compat.tf_data.pipeline_model import Buffer, Splits
from tfd_notebook.model.limit import Limit
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import Policy

if TYPE_CHECKING:
    from tfd_notebook.data.consume.consumers import Consumers
    from tfd_notebook.data.service.journal import Journal


@dataclass(frozen=True)
class Registered:
    """A dataset that the dispatcher knows.

    Parameters
    ----------
    cardinality : int
        Negative where it is not known.
    splits : Splits, optional
        Splits that dynamic sharding assigns; None if that is not known.
    read : weakref.ref of tf.data.Dataset, optional
        What reads it, while somebody holds that.
    buffers : tuple of Buffer
        Buffers of the dataset in the memory of each data worker.
    """

    cardinality: int
    splits: Splits | None
    read: weakref.ref[Any] | None = None
    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True)
class TaskEnvironment:
    """What tasks share with this process as it was when their cluster started.

    Parameters
    ----------
    directory : str
    environment : mapping of str to str
    """

    directory: str
    environment: Mapping[str, str] = field(repr=False)

    @classmethod
    def now(cls) -> TaskEnvironment:
        """Return those of now."""
        return cls(os.getcwd(), dict(os.environ))


class DataServiceProtocol(Protocol):
    """A tf.data service as `tfd_notebook.data` sees it; `Cluster` is one."""

    @property
    def name(self) -> str: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def consumers(self) -> Consumers:
        """Everything in this process that reads from the service."""

    @property
    def service_target(self) -> str:
        """``"grpc://host:port"`` of the dispatcher; raises StateError unless the cluster runs."""

    @property
    def journal(self) -> Journal | None:
        """The dispatcher's journal, None without ``fault_tolerant``."""

    @property
    def registered(self) -> MutableMapping[str, Registered]:
        """What is known of the datasets that this process registered, by their ids."""

    @property
    def service_in_process(self) -> bool:
        """Whether the data workers live in this very process."""

    @property
    def service_on_this_host(self) -> bool:
        """Whether all data workers live on this host."""

    @property
    def surroundings(self) -> TaskEnvironment | None:
        """What the tasks know of this process; None where another one started them."""

    def inspect_tasks(self) -> Mapping[str, Mapping[str, list[str]]]:
        """Return stale modules (``stale``) and loaded ops (``ops``) of each task that answers."""

    @property
    def limit(self) -> Limit:
        """What limits the consumer that reads now."""

    def data_workers(self) -> tuple[TaskRow, ...]:
        """The data workers that have not ended, by index."""

    def check_room(self, needed: int) -> None:
        """Raise WorkDirError unless so many bytes can be written beside the journal."""

    def install_functions(
        self, functions: Mapping[str, str], blob: bytes, dataset: Any = None
    ) -> None:
        """Give every present and future data worker the Python functions in `blob`.

        `functions` maps each token to the name of its function as the user wrote it, `blob` is
        what `data.service.py_functions.install` takes. Returns when all present workers have
        them; raises NotSerializable when one cannot load them. The workers may forget the functions
        after `dataset`, and any other that uses them, has ended; never if it is None.
        """

    def enable_static_sharding(self) -> None:
        """Make the dispatcher know its workers' addresses (FILE, DATA and FILE_OR_DATA need it)."""
