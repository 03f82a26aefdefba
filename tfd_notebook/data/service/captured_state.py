"""Variables and tables that a dataset uses, and that have changed since it was sent.

The data workers keep the values that these had when the dataset was distributed. TensorFlow does
not report a later change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfd_notebook._compat.tf_data import captured
from tfd_notebook._compat.tf_data.pipeline_model import stages_of
from tfd_notebook.data.service.semantics import Semantics
from tfd_notebook.data.variable_names import variable_of

#: The next step after a change.
RENEW = (
    'distribute or register the dataset again, or use distribute(..., semantics="same"), which '
    "reads the current content in each epoch"
)


@dataclass(frozen=True, eq=False)
class CapturedState:
    """A variable or table as it was when a dataset was sent.

    Parameters
    ----------
    operation : str
        The operation that uses it, in the user's notation.
    resource : Resource
    sent : tuple of int, optional
        The fingerprint of its content. None if it is not compared.
    """

    operation: str
    resource: captured.Resource
    sent: tuple[int, ...] | None

    @property
    def name(self) -> str:
        """The name of the user's variable that holds it, with its kind."""
        resource = self.resource

        def held(value: Any) -> Any:
            return resource if resource.is_held_by(value) else value

        return f"the {resource.kind} {variable_of(resource, resource.name, held)}".rstrip()

    @property
    def has_changed(self) -> bool:
        """True if its content is known to differ from the one that was sent."""
        if self.sent is None:
            return False
        now = self.resource.fingerprint()
        return now is not None and now != self.sent

    def __str__(self) -> str:
        return (
            f"{self.operation}: {self.name} has changed since the dataset was sent, and the data "
            "workers use its earlier content"
        )


def states_of(dataset: Any, semantics: Semantics) -> tuple[CapturedState, ...]:
    """Return the variables and tables that a dataset uses, as they are now.

    The state of random generators is omitted, because each use of one changes it.
    """
    changes = semantics.changes("OFF", 1)
    captures = {change.operation for change in changes if change.kind == "captured"}
    if not captures:
        return ()
    drawing = {change.operation for change in changes if change.kind == "random"} - captures
    return tuple(
        CapturedState(stage.name, resource, resource.fingerprint())
        for stage in stages_of(dataset).walk()
        if stage.name not in drawing
        for resource in captured.resources_of(stage.dataset)
        if resource.can_change
    )


def changed(states: Sequence[CapturedState]) -> list[CapturedState]:
    """Return those of `states` that have changed, each once."""
    found = {id(state.resource.handle()): state for state in states if state.has_changed}
    return list(found.values())


def names_in(states: Sequence[CapturedState], operation: str) -> str:
    """Return the names of the variables and tables of an operation, in parentheses, or ""."""
    names = [
        state.name + (", which is too large to be compared" if state.sent is None else "")
        for state in states
        if state.operation == operation
    ]
    return f" ({'; '.join(dict.fromkeys(names))})" if names else ""
