"""Publish a directory that was written under another name, without losing the one it replaces."""

from __future__ import annotations

import posixpath
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from tfd_notebook.errors import DataError, UsageError
from tfd_notebook.spark.tfrecords import translate_filesystem_errors

#: A file that is written last: the directory that holds it is complete.
SUCCESS = "_SUCCESS"


@contextmanager
def publish(place: str, overwrite: bool) -> Iterator[str]:
    """Yield a hidden directory, and rename it to `place` when the block ends without an error.

    A directory that is replaced is renamed first and removed last. If a rename fails, it gets its
    name back. A hidden directory that holds ``_SUCCESS`` is never removed.

    Parameters
    ----------
    place : str
        Path or URI of the directory.
    overwrite : bool
        Whether `place` may exist.

    Raises
    ------
    UsageError
        `place` exists, and `overwrite` is false.
    DataError
        A rename failed. The error names the directories that hold the old and the new data.
    """
    import tensorflow as tf

    with translate_filesystem_errors(place):
        if tf.io.gfile.exists(place) and not overwrite:
            raise UsageError(f"{place} exists", fix="another directory, or overwrite=True")
    new = _temporary_path(place)
    try:
        tf.io.gfile.makedirs(new)
        yield new
        with tf.io.gfile.GFile(posixpath.join(new, SUCCESS), "w") as file:
            file.write("")
    except BaseException:
        if tf.io.gfile.exists(new) and not tf.io.gfile.exists(posixpath.join(new, SUCCESS)):
            _remove(new, "incomplete")
        raise
    _rename(new, place, overwrite)


def _rename(new: str, place: str, overwrite: bool) -> None:
    import tensorflow as tf

    old = _temporary_path(place) if overwrite and tf.io.gfile.exists(place) else ""
    try:
        if old:
            tf.io.gfile.rename(place, old)
        tf.io.gfile.rename(new, place)
    except BaseException as error:
        hint = _restore(old, place) if old else ""
        what = f"{error}; the new data is in {new}{hint}"
        if isinstance(error, tf.errors.OpError):
            fix = f"remove the cause, then rename {new} to {place}"
            raise DataError(f"saveAsTFRecords failed: {what}", fix=fix) from error
        warnings.warn(f"saveAsTFRecords was interrupted: {what}", RuntimeWarning, stacklevel=2)
        raise
    if old:
        _remove(old, "replaced")


def _restore(old: str, place: str) -> str:
    """Rename the old directory back; if that fails, return text that names it."""
    import tensorflow as tf

    try:
        if tf.io.gfile.exists(old):
            tf.io.gfile.rename(old, place)
    except tf.errors.OpError as error:
        return f", and the old data is in {old}, which cannot be renamed back: {error}"
    return ""


def _remove(directory: str, what: str) -> None:
    import tensorflow as tf

    try:
        tf.io.gfile.rmtree(directory)
    except tf.errors.OpError as error:
        warnings.warn(
            f"the {what} directory {directory} could not be removed: {error}; remove it yourself",
            RuntimeWarning,
            stacklevel=2,
        )


def _temporary_path(place: str) -> str:
    parent, name = posixpath.split(place.rstrip("/"))
    return posixpath.join(parent, f".{name}.{uuid.uuid4().hex[:8]}")
