"""Datasets that data workers write to files, and the progress of the writing."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.text_encoding import CUnescape

from tfd_notebook.data.consume import observe
from tfd_notebook.data.service import validation
from tfd_notebook.data.service.protocols import DataServiceProtocol
from tfd_notebook.errors import DataError, StateError, TimeLimit
from tfd_notebook.model.handle import Handle

_POLL_SECONDS = 0.1
#: Seconds between two lines about the progress.
_NOTE_SECONDS = 10.0


@dataclass(frozen=True)
class SaveProgress:
    """The progress of a `Saving`, from the files at its path.

    Parameters
    ----------
    state : {"writing", "done", "failed", "incomplete"}
        ``"incomplete"`` if the cluster has stopped, or this process has detached from it.
    streams : int
        Number of streams. Each data worker writes one or more of them.
    streams_done : int
        Number of complete streams.
    chunks : int
        Number of complete chunks. ``tf.data.Dataset.load(path, wait=True)`` reads these.
    elements : int
        Number of elements in complete chunks.
    bytes : int
        Size of all chunks, also of those that are not complete.
    splits : int
        Number of splits of the source that were given to data workers.
    splits_total : int, optional
        Number of all splits of the source. None if it is unknown.
    """

    state: str
    streams: int
    streams_done: int
    chunks: int
    elements: int
    bytes: int
    splits: int
    splits_total: int | None

    def __str__(self) -> str:
        total = "" if self.splits_total is None else f" of {self.splits_total:,}"
        return (
            f"{self.state}: {self.splits:,}{total} splits given to data workers, "
            f"{self.streams_done} of {self.streams} streams complete, "
            f"{self.elements:,} elements in complete chunks, {self.bytes / 1e6:.1f} MB"
        )


class Saving(Handle):
    """A dataset that the data workers write. `Cluster.save` returns it.

    Parameters
    ----------
    cluster : DataServiceProtocol
    path : str
        The directory that the data workers write to.
    splits_total : int, optional
        Number of splits of the dataset's source, if known.

    Attributes
    ----------
    path : str

    See Also
    --------
    tf.data.experimental.distributed_save
    """

    _instead = "send its path"

    def __init__(
        self, cluster: DataServiceProtocol, path: str, splits_total: int | None = None
    ) -> None:
        self._cluster = cluster
        self._splits_total = splits_total
        self.path = path

    def __repr__(self) -> str:
        return f"<Saving {self.path}, {self.progress()}>"

    @property
    def done(self) -> bool:
        """True if the dataset is complete."""
        return _exists(f"{self.path}/DONE")

    def progress(self) -> SaveProgress:
        """Return the current progress.

        A data worker completes its chunks every 30 minutes, and at the end of its stream.
        """
        streams = [f"{self.path}/streams/{name}" for name in _names(f"{self.path}/streams")]
        # chunk_<stream>_<number>_<elements>
        chunks = [
            int(found[1])
            for name in _names(f"{self.path}/chunks")
            if (found := re.fullmatch(r"chunk_\d+_\d+_(\d+)", name))
        ]
        return SaveProgress(
            state=self._state(),
            streams=len(streams),
            streams_done=sum(_exists(f"{stream}/DONE") for stream in streams),
            chunks=len(chunks),
            elements=sum(chunks),
            bytes=sum(_sizes(f"{self.path}/chunks"))
            + sum(sum(_sizes(f"{stream}/uncommitted_chunks")) for stream in streams),
            splits=sum(
                len(_names(f"{stream}/splits/{source}/{repetition}"))
                for stream in streams
                for source in _names(f"{stream}/splits")
                for repetition in _names(f"{stream}/splits/{source}")
            ),
            splits_total=self._splits_total,
        )

    def _state(self) -> str:
        if self.done:
            return "done"
        if _exists(f"{self.path}/ERROR"):
            return "failed"
        try:
            _ = self._cluster.service_target
        except StateError:
            return "incomplete"
        return "writing"

    def wait(self, timeout: float = 600.0) -> Saving:
        """Wait until the dataset is complete, and return this object.

        Prints the progress every 10 seconds. Ctrl-C cancels the wait, not the writing.

        Parameters
        ----------
        timeout : float
            Seconds to wait. Default 600.

        Raises
        ------
        DataError
            A data worker failed to write.
        NoWorkers
            The cluster has no data worker.
        TimeLimit
            The dataset is not complete after `timeout` seconds. The data workers keep writing.
        """
        deadline = time.monotonic() + timeout
        note = time.monotonic() + _NOTE_SECONDS
        while not self.done:
            if _exists(f"{self.path}/ERROR"):
                raise DataError(f"saving to {self.path} failed: {self._error()}")
            validation.require_workers(self._cluster)
            if time.monotonic() > deadline:
                raise TimeLimit(
                    f"{self.path} is not complete after {timeout:g} s ({self.progress()})",
                    fix="the workers keep writing: it is complete when it contains a file DONE",
                )
            if time.monotonic() > note:
                note = time.monotonic() + _NOTE_SECONDS
                validation.print_note(f"{self.path}: {self.progress()}")
            time.sleep(_POLL_SECONDS)
        return self

    def _error(self) -> str:
        """Return a description of the error that a data worker has written."""
        text = _text(f"{self.path}/ERROR")
        found = re.search(r'^message: "(.*)"$', text, re.MULTILINE)
        if found is None:
            return text
        return observe.failure(CUnescape(found[1]).decode(errors="replace"), "a data worker")


def _gfile() -> Any:
    import tensorflow as tf

    return tf.io.gfile


def _exists(path: str) -> bool:
    return bool(_gfile().exists(path))


def _text(path: str) -> str:
    with _gfile().GFile(path) as file:
        return str(file.read()).strip()


def _names(directory: str) -> list[str]:
    """Return the names in a directory, empty if it does not exist."""
    from tensorflow.errors import NotFoundError

    try:
        return [name.rstrip("/") for name in _gfile().listdir(directory)]
    except NotFoundError:
        return []


def _sizes(directory: str) -> Iterator[int]:
    """Yield the sizes of the chunks in a directory."""
    from tensorflow.errors import NotFoundError

    for name in _names(directory):
        try:
            yield int(_gfile().stat(f"{directory}/{name}").length)
        except NotFoundError:  # a chunk was completed since
            continue
