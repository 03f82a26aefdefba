"""State and random numbers of the Python functions of a pipeline.

Each data worker in another process has a copy of the objects that a function refers to. The copies
do not follow the originals, and each of them changes separately.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import operator
import re
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tfd_notebook._compat.tf_data.py_functions import closed_over
from tfd_notebook.data.service.function_changes import COUNTER, EARLIER, FILLED, changed_by
from tfd_notebook.data.service.py_functions import (
    defaults_of,
    is_users,
    joined,
    names_in,
    reachable,
)

#: Depth to which objects that a function refers to are examined for state.
_DEPTH = 6
#: As `_DEPTH`, for the search for names, which are less certain in code that is further away.
_NEAR = 3
#: Names that suggest random numbers, or a random order.
_RANDOM = re.compile(
    "random|shuffle|permutation|permuted|rng|^secrets$|^token_(bytes|hex)$|^uuid[14]$|"
    "^as_completed$|^imap_unordered$",
    re.IGNORECASE,
)
#: Number of objects with state that a message names.
_NAMED = 3

#: Methods that change a variable or a table.
_ASSIGNING = frozenset(("assign", "assign_add", "assign_sub", "insert", "remove"))

GENERATOR, CONTENT = "generator", "variable or table"
#: Classes of objects whose state changes while they are used, by module and name.
_CLASSES = {
    GENERATOR: (
        ("numpy.random", "BitGenerator"),
        ("numpy.random", "Generator"),
        ("numpy.random", "RandomState"),
        ("random", "Random"),
        ("tensorflow", "random.Generator"),
        ("keras", "random.SeedGenerator"),
    ),
    COUNTER: (("collections.abc", "Iterator"),),
    CONTENT: (
        ("tensorflow", "Variable"),
        ("tensorflow", "lookup.experimental.DenseHashTable"),
        ("tensorflow", "lookup.experimental.MutableHashTable"),
        ("keras", "Variable"),
    ),
}


class State(NamedTuple):
    """An object with changing state that a Python function refers to.

    Parameters
    ----------
    name : str
        Its path and its class.
    kind : {"generator", "counter", "value of earlier elements", "container", "variable or table"}
        A counter is any object that the calls of the function change, except a container. The
        results need not depend on the items of that.
    """

    name: str
    kind: str


def copied_state(token: str) -> tuple[State, ...]:
    """Return the objects with changing state that a function refers to.

    Of long containers, only the first items are examined.
    """
    classes = {kind: tuple(_imported(names)) for kind, names in _CLASSES.items()}
    leaves = tuple(each for kind in classes.values() for each in kind)
    found: dict[State, None] = {}
    functions: list[tuple[str, types.FunctionType]] = []
    objects: dict[str, Any] = {}
    for path, value in reachable(token, _DEPTH, leaves):
        kind = next((kind for kind, types in classes.items() if isinstance(value, types)), None)
        if kind is not None and not _is_output(value):
            found[State(f"{path} ({type(value).__name__})", kind)] = None
        elif inspect.isfunction(value) and is_users(value):
            functions.append((path, value))
        objects.setdefault(path, value)
    found |= dict.fromkeys(_changes(functions, objects))
    if any(_ASSIGNING & names_in(function.__code__) for _, function in functions):
        found = {each._replace(kind=each.kind.replace(CONTENT, COUNTER)): None for each in found}
    named, others = [*found][:_NAMED], [*found][_NAMED:]
    if others:
        named.append(State(f"{len(others)} other objects", others[0].kind))
    return tuple(named)


def _changes(
    functions: Sequence[tuple[str, types.FunctionType]], objects: dict[str, Any]
) -> Iterator[State]:
    """Yield the objects that functions change, without the methods that none of them calls."""
    called, before = {""}, set[str]()
    while called != before:
        before = called
        codes = (each.__code__ for path, each in functions if _method(path) in called)
        called = called.union(*({*names_in(code), *code.co_freevars} for code in codes))
    for path, function in functions:
        values = {**function.__globals__, **closed_over(function), **defaults_of(function)}
        is_users_own, (owner, _, _) = path in ("", "__call__"), path.rpartition(".")
        bound = objects if is_users_own else {}  # by partial()
        for name, kind in changed_by(function, {**values, **bound}, bound).items():
            place = name if is_users_own else joined(path, name)
            if name.startswith("self."):
                place = joined(owner or "self", name.removeprefix("self."))
                if _method(path) not in called or isinstance(objects.get(owner), type):
                    continue  # or of an object that a call creates
            yield State(f"{place} (which it changes)", kind)


def _method(path: str) -> str:
    """Return the name of the function at `path`, which is that of an object that is called."""
    last = path.removesuffix("__call__").rstrip(".").rpartition(".")[2]
    return last.partition("[")[0]


def _is_output(value: Any) -> bool:
    """Return True for a file that is only written, such as that of a logger."""
    return isinstance(value, io.IOBase) and not value.closed and not value.readable()


def names_random(token: str) -> bool:
    """Return True if a function, or an object that it refers to, has a name for random numbers."""
    return any(_names_random(value) for _, value in reachable(token, _NEAR))


def _names_random(value: Any) -> bool:
    if inspect.ismodule(value):
        return _RANDOM.search(value.__name__) is not None
    kind = type(getattr(value, "__self__", value))
    names = {kind.__name__, kind.__module__}
    function = getattr(value, "__func__", value)  # of a method
    if inspect.isfunction(function):
        names |= names_in(function.__code__)
    return any(map(_RANDOM.search, names))


def _imported(classes: Iterable[tuple[str, str]]) -> Iterator[type]:
    for module, name in classes:
        if module in sys.modules:
            with contextlib.suppress(AttributeError):
                yield operator.attrgetter(name)(sys.modules[module])


_COUNT_STEP = "call the function after distribute, or deliver what it counts with each element"
#: The next step for an object that Python functions refer to, by its kind.
_STATE_STEPS = {
    GENERATOR: "create it inside the function, or use functions of the modules random and "
    "numpy.random, whose seeds differ on each data worker",
    COUNTER: _COUNT_STEP,
    EARLIER: 'use processing_mode="data" and data workers in other processes, which call the '
    "function for all elements in their order",
    FILLED: _COUNT_STEP,
    CONTENT: "distribute the dataset again after it has changed",
}


def counters(
    states: Iterable[State], kinds: Sequence[str] = (COUNTER, EARLIER, FILLED, GENERATOR)
) -> str:
    """Return the names of the objects that the calls of Python functions change."""
    return " and ".join(state.name for state in states if state.kind in kinds)


def renewal(states: Iterable[State], divided: bool = True) -> str:
    """Return the next step for objects with state that Python functions refer to.

    If `divided` is false, each data worker calls the functions for all elements.
    """
    kinds = {state.kind for state in states}
    if EARLIER in kinds:  # its step is one for all that a function changes
        kinds -= {COUNTER, FILLED}
    steps = {kind: step for kind, step in _STATE_STEPS.items() if kind in kinds}
    if EARLIER in kinds and not divided:
        steps[EARLIER] = "no step is needed if only the function uses it"
    if len(set(steps.values())) == 1:
        return next(iter(steps.values()))
    return ". ".join(
        f"{'For' if number else 'for'} the {kind}, {step}"
        for number, (kind, step) in enumerate(steps.items())
    )
