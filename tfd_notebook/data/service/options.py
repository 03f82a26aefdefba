"""The arguments of ``tf.data.experimental.service.distribute``, validated before any request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfd_notebook.errors import NoWorkers, UnknownName, UsageError, one_of
from tfd_notebook.model.spec import check_count

#: Users' names of processing modes in lower case, with TensorFlow's ShardingPolicy.
MODES = {
    "off": "OFF",
    "dynamic": "DYNAMIC",
    "file": "FILE",
    "data": "DATA",
    "file_or_data": "FILE_OR_DATA",
    "hint": "HINT",
    "parallel_epochs": "OFF",
    "distributed_epoch": "DYNAMIC",
}

#: Policies that give each worker a share by its position in a list of workers.
STATIC = frozenset(("FILE", "DATA", "FILE_OR_DATA", "HINT"))

#: The tag of data workers that serve only consumers in their own process.
COLOCATED = "COLOCATED"

_TARGETS = ("AUTO", "ANY", "LOCAL")


@dataclass(frozen=True)
class ReadOptions:
    """Arguments of ``distribute``, with the name of a sharding policy as `mode`."""

    mode: str
    job_name: str | None = None
    consumer_index: int | None = None
    num_consumers: int | None = None
    max_outstanding_requests: int | None = None
    data_transfer_protocol: str | None = None
    cross_trainer_cache: Any = None
    target_workers: str = "AUTO"

    def __post_init__(self) -> None:
        if self.job_name is not None and (
            not isinstance(self.job_name, str) or not self.job_name.strip()
        ):
            raise UsageError(f"invalid job_name={self.job_name!r}: expected a non-empty string")
        if (self.consumer_index is None) != (self.num_consumers is None):
            raise UsageError(
                "consumer_index and num_consumers need each other",
                fix="pass both for a coordinated read, or neither",
            )
        if self.num_consumers is not None and self.consumer_index is not None:
            check_count("num_consumers", self.num_consumers, None, 1)
            check_count("consumer_index", self.consumer_index, None, 0)
            if self.consumer_index >= self.num_consumers:
                raise UsageError(
                    f"invalid consumer_index={self.consumer_index}: "
                    f"expected 0 to {self.num_consumers - 1}"
                )
        for feature, argument in (
            ("a coordinated read (num_consumers)", self.num_consumers),
            ("a cross-trainer cache", self.cross_trainer_cache),
        ):
            if argument is not None and self.job_name is None:
                raise UsageError(
                    f"{feature} needs a job shared by its consumers",
                    fix="pass the same job_name= in each of them",
                )
        if self.num_consumers is not None and self.data_transfer_protocol == "local":
            raise UsageError(
                'data_transfer_protocol="local" cannot serve a coordinated read: TensorFlow would '
                "wait indefinitely for incomplete rounds",
                fix='omit data_transfer_protocol, or use "grpc"',
            )
        if self.max_outstanding_requests is not None:
            check_count("max_outstanding_requests", self.max_outstanding_requests, None, 1)
        if self.target_workers not in _TARGETS:
            raise UnknownName(
                f"invalid target_workers={self.target_workers!r}",
                fix=f"use {', '.join(_TARGETS)}",
            )

    @property
    def needs_infinite(self) -> str | None:
        """The feature that needs an infinite dataset, or None."""
        if self.num_consumers is not None:
            return "a coordinated read"
        return "a cross-trainer cache" if self.cross_trainer_cache is not None else None

    @property
    def consumer(self) -> tuple[int, int] | None:
        """Index and number of the consumers of a coordinated read. None for other reads."""
        if self.consumer_index is None or self.num_consumers is None:
            return None
        return self.consumer_index, self.num_consumers

    def transfer(self, in_process: bool) -> str | None:
        """Return the data transfer protocol.

        Parameters
        ----------
        in_process : bool
            Whether the data workers run in this process.

        Raises
        ------
        NoWorkers
            The arguments need data workers in this process, and it has none.
        """
        local = self.data_transfer_protocol == "local" or self.target_workers == "LOCAL"
        if local and not in_process:
            raise NoWorkers(
                'data_transfer_protocol="local" and target_workers="LOCAL" need data workers in '
                "this process, and it has none",
                fix='omit these arguments, or use launcher="inprocess"',
            )
        if self.data_transfer_protocol is None and in_process:
            return "local" if self.num_consumers is None else "grpc"
        return self.data_transfer_protocol

    def check_tags(self, in_process: bool, tags: tuple[str, ...]) -> None:
        """Raise NoWorkers if consumers of this process read from no data worker with these `tags`.

        TensorFlow would wait indefinitely.
        """
        # TensorFlow ignores the case. Coordinated reads always use all data workers.
        if in_process or self.target_workers != "AUTO" or self.num_consumers is not None:
            return
        if any(tag.upper() == COLOCATED for tag in tags):
            raise NoWorkers(
                f"the data workers have the tag {COLOCATED!r}, so only consumers in their own "
                "process read from them",
                fix='pass target_workers="ANY", or omit the tag in Service(worker_tags=...)',
            )

    def tensorflow_arguments(self, in_process: bool) -> dict[str, Any]:
        """Return the arguments for TensorFlow, including the processing mode."""
        from tensorflow.data.experimental import service

        return {
            "processing_mode": service.ShardingPolicy[self.mode],
            "job_name": self.job_name,
            "consumer_index": self.consumer_index,
            "num_consumers": self.num_consumers,
            "max_outstanding_requests": self.max_outstanding_requests,
            "data_transfer_protocol": self.transfer(in_process),
            "cross_trainer_cache": self.cross_trainer_cache,
            "target_workers": self.target_workers,
        }


def mode_of(processing_mode: Any) -> str:
    """Return the name of TensorFlow's ShardingPolicy for `processing_mode`.

    Parameters
    ----------
    processing_mode : str or tf.data.experimental.service.ShardingPolicy
        One of `MODES`, in upper or lower case, or the policy itself.

    Raises
    ------
    UnknownName
        The mode does not exist. The error suggests the most similar one.
    """
    if isinstance(processing_mode, str):
        spelling = processing_mode.lower()
        if spelling in MODES:
            return MODES[spelling]
        raise UnknownName(
            f"invalid processing_mode={processing_mode!r}",
            fix=one_of(spelling, MODES),
        )
    name = getattr(processing_mode, "name", None)
    if type(processing_mode).__name__ != "ShardingPolicy" or name not in MODES.values():
        raise UnknownName(
            f"invalid processing_mode={processing_mode!r}",
            fix=f"use one of {', '.join(MODES)}",
        )
    return str(name)
