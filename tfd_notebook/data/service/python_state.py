"""State and random numbers of the Python functions of a pipeline.

Each data worker in another process has a copy of the objects that a function refers to. The copies
do not follow the originals, and each of them changes separately.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import io
import itertools
import operator
import re
import sys
import types
from collections.abc import (
    Iterable,
    Iterator,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Sequence,
)
from typing import Any, NamedTuple

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
    "random|shuffle|permutation|permuted|rng|^secrets$|^token_(bytes|hex)$|^uuid[14]$",
    re.IGNORECASE,
)
#: Number of objects with state that a message names.
_NAMED = 3

#: Instructions of Python 3.10, and of later versions.
_ARITHMETIC = re.compile("INPLACE_|BINARY_(?!SUBSCR|SLICE)")
_MOVES = re.compile("SWAP|ROT_")
_COPIES = ("COPY", "DUP_TOP", "DUP_TOP_TWO")
_LOADS = re.compile("LOAD_GLOBAL|LOAD_DEREF|LOAD_FAST")
_CONTAINERS = (MutableMapping, MutableSequence, MutableSet)
#: Methods that add items to a container, or remove some, not by key.
_FILLING = frozenset(
    ("add", "append", "appendleft", "discard", "extend", "insert", "pop", "popitem", "popleft")
)

#: Methods that change a variable or a table.
_ASSIGNING = frozenset(("assign", "assign_add", "assign_sub", "insert", "remove"))

GENERATOR, COUNTER, FILLED = "generator", "counter", "container"
CONTENT = "variable or table"
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
    kind : {"generator", "counter", "container", "variable or table"}
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
    assigns = False
    for path, value in reachable(token, _DEPTH, leaves):
        kind = next((kind for kind, types in classes.items() if isinstance(value, types)), None)
        if kind is not None and not _is_output(value):
            found[State(f"{path} ({type(value).__name__})", kind)] = None
        elif inspect.isfunction(value) and is_users(value):
            assigns = assigns or not _ASSIGNING.isdisjoint(names_in(value.__code__))
            is_called = path in ("", "__call__")  # other methods of a class may not be
            changed = dict.fromkeys(_filled(value), FILLED)
            changed |= dict.fromkeys(_counted(value), COUNTER)
            for name, kind in changed.items():
                if is_called or not name.startswith("self."):
                    place = name if is_called else joined(path, name)
                    found[State(f"{place} (which it changes)", kind)] = None
    if assigns:
        found = {each._replace(kind=each.kind.replace(CONTENT, COUNTER)): None for each in found}
    named, others = [*found][:_NAMED], [*found][_NAMED:]
    if others:
        named.append(State(f"{len(others)} other objects", others[0].kind))
    return tuple(named)


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


def _counted(function: types.FunctionType) -> Iterator[str]:
    """Yield the variables outside of a function that it changes, as in ``count += 1``.

    A variable that a function only sets is omitted, such as a model that the first call loads.
    """
    code, shared = function.__code__, {"self", *defaults_of(function)}
    instructions = [*dis.get_instructions(code)]
    for number, instruction in enumerate(instructions):
        if not _ARITHMETIC.match(instruction.opname) or instruction.argrepr == "[]":
            continue
        after = itertools.islice(instructions, number + 1, None)
        store = next((each for each in after if not _MOVES.match(each.opname)), instruction)
        if not store.opname.startswith("STORE_"):
            continue
        path = [store]
        if store.opname in ("STORE_ATTR", "STORE_SUBSCR"):
            path = _changed_object(instructions[:number], store)
        scope, name = path[0].opname.rpartition("_")[2], path[0].argval
        is_outside = scope == "GLOBAL" or (scope == "DEREF" and name in code.co_freevars)
        if is_outside or (scope == "FAST" and path[0] is not store and name in shared):
            yield ".".join(str(each.argval) for each in path if each.opname != "STORE_SUBSCR")


def _filled(function: types.FunctionType) -> Iterator[str]:
    """Yield the containers outside of a function whose items it counts, adds or removes.

    A container that a function only fills by key is omitted, such as a cache of results. So is an
    array that it only writes, such as memory for a result.
    """
    try:
        scope = inspect.getclosurevars(function)
    except ValueError:  # a variable outside of it has no value yet
        return
    values = {**scope.globals, **scope.nonlocals, **defaults_of(function)}
    outside = {name for name, value in values.items() if isinstance(value, _CONTAINERS)}
    arrays = {name for name, value in values.items() if hasattr(value, "__array_interface__")}
    loaded: list[str] = []  # by the current statement
    computes = False
    before = [("", ""), ("", "")]
    for instruction in dis.get_instructions(function.__code__):
        if instruction.starts_line:
            loaded, computes = [], False
        name, keywords = str(instruction.argval), instruction.argval
        if instruction.opname == "KW_NAMES":  # of Python 3.11, which does not give its value
            keywords = function.__code__.co_consts[instruction.arg or 0]
        if _LOADS.match(instruction.opname) and name in outside | arrays:
            loaded.append(name)
        elif isinstance(keywords, tuple) and keywords[-1:] == ("out",):
            yield from (each for each in loaded[-1:] if each in arrays and loaded.count(each) > 1)
        elif _ARITHMETIC.match(instruction.opname) and instruction.argrepr != "[]":
            computes = True
        elif instruction.opname == "STORE_SUBSCR" and computes:
            yield from (each for each in set(loaded) if loaded.count(each) > 1)
        elif instruction.opname in ("LOAD_METHOD", "LOAD_ATTR") and name in _FILLING:
            (owner, kind), (last, last_kind) = before
            if _LOADS.match(last_kind) and last in outside:
                yield last
            elif last_kind == "LOAD_ATTR" and kind.startswith("LOAD_FAST") and owner == "self":
                yield f"self.{last}"
        before = [before[1], (name, instruction.opname)]


def _changed_object(before: list[Any], store: Any) -> list[Any]:
    """Return the instructions that load the object of an augmented assignment, then `store`.

    Only `store` if it is none, as in ``a[i + 1] = x``, whose index is computed.
    """
    copies = [number for number, each in enumerate(before) if each.opname in _COPIES]
    if not copies or before[-1].opname == store.opname:
        return [store]
    end = copies[-1]
    while end and before[end - 1].opname in _COPIES:
        end -= 1
    is_item = store.opname == "STORE_SUBSCR"
    if is_item and copies[-1] == end and before[end].opname != "DUP_TOP_TWO":
        return [store]  # a pair of copies is of an object and its key
    if is_item:
        end = _start(before, end)
    loads = [each for each in before[_start(before, end) : end] if "LOAD" in each.opname]
    attributes = itertools.takewhile(lambda each: each.opname == "LOAD_ATTR", loads[1:])
    return [*loads[:1], *attributes, store] if loads else [store]


def _start(instructions: list[Any], end: int) -> int:
    """Return the number of the first instruction that computes the value on top at `end`."""
    size = 0
    while size < 1 and end:
        end -= 1
        size += dis.stack_effect(instructions[end].opcode, instructions[end].arg)
    return end


_COUNT_STEP = "call the function after distribute, or make what it counts a part of the element"
#: The next step for an object that Python functions refer to, by its kind.
_STATE_STEPS = {
    GENERATOR: "create it inside the function, or use functions of the modules random and "
    "numpy.random, whose seeds differ on each data worker",
    COUNTER: _COUNT_STEP,
    FILLED: _COUNT_STEP,
    CONTENT: "distribute the dataset again after it has changed",
}


def counters(states: Iterable[State], kinds: Sequence[str] = (COUNTER, FILLED, GENERATOR)) -> str:
    """Return the names of the objects that the calls of Python functions change."""
    return " and ".join(state.name for state in states if state.kind in kinds)


def renewal(states: Iterable[State]) -> str:
    """Return the next step for objects with state that Python functions refer to."""
    kinds = {state.kind for state in states}
    steps = {kind: step for kind, step in _STATE_STEPS.items() if kind in kinds}
    if len(set(steps.values())) == 1:
        return next(iter(steps.values()))
    return ". ".join(
        f"{'For' if number else 'for'} the {kind}, {step}"
        for number, (kind, step) in enumerate(steps.items())
    )
