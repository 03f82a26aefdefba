"""Objects that stand for something running, such as a cluster or a stream."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from tfd_notebook.errors import UsageError

Self = TypeVar("Self", bound="Handle")


class Handle:
    """A base class for objects that stand for something running in this process, or start it.

    A copy is the same object, so that containers with handles can be copied. Handles are equal and
    have equal hashes if they are the same object, unless a subclass defines more. They cannot be
    pickled.
    """

    __slots__ = ()

    #: What to send to another process instead.
    _instead = "use it in the process that created it"

    def __copy__(self: Self) -> Self:
        return self

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            f"this {type(self).__name__} cannot be sent to another process: it belongs to this one",
            fix=self._instead,
        )
