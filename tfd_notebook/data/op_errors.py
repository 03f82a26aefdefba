"""Errors that are both a `TfdError` and one of TensorFlow's ``tf.errors.OpError``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tfd_notebook import errors

#: The class of ``tf.errors`` that fits an error, most specific first.
_FITTING: dict[type[errors.TfdError], str] = {
    errors.PortInUse: "AlreadyExistsError",
    errors.WorkDirError: "FailedPreconditionError",
    errors.StateError: "FailedPreconditionError",
    errors.UsageError: "InvalidArgumentError",
    errors.LaunchError: "UnavailableError",
    errors.DispatcherLost: "UnavailableError",
    errors.TimeLimit: "DeadlineExceededError",
    errors.Unsupported: "UnimplementedError",
    errors.TfdError: "UnknownError",
}


def combine(error: errors.TfdError, cause: Any) -> errors.TfdError:
    """Return `error` as an instance of both its class and the class of TensorFlow's `cause`.

    A pickled copy is only an instance of the class of `error`.
    """
    kind, base = type(error), type(cause)

    class Both(kind, base):  # type: ignore[misc, valid-type]
        def __init__(self, what: str, *, task: str | None = None, fix: str | None = None) -> None:
            base.__init__(self, cause.node_def, cause.op, cause.message)
            self.what, self.task, self.fix = what, task, fix

        def __reduce__(self) -> Any:
            return kind(self.what, task=self.task, fix=self.fix).__reduce__()

    Both.__name__ = Both.__qualname__ = kind.__name__
    Both.__module__ = kind.__module__
    result: errors.TfdError = Both(error.what, task=error.task, fix=error.fix)
    return result


@contextlib.contextmanager
def as_op_errors() -> Iterator[None]:
    """Raise each `TfdError` of the block also as a suitable ``tf.errors.OpError``."""
    import tensorflow as tf

    try:
        yield
    except errors.TfdError as error:
        if isinstance(error, tf.errors.OpError):
            raise
        cause = error.__cause__
        if not isinstance(cause, tf.errors.OpError):
            name = next(name for kind, name in _FITTING.items() if isinstance(error, kind))
            cause = getattr(tf.errors, name)(None, None, error.what)
        raise combine(error, cause).with_traceback(error.__traceback__) from error.__cause__
