"""Properties of the functions of a pipeline that matter to a tf.data service."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tfd_notebook._compat.tf_data.graph import data_inputs, is_registered
from tfd_notebook._compat.tf_data.pipeline_model import READERS, kind_of
from tfd_notebook._compat.tf_data.py_functions import OPS, is_debugged, lookup
from tfd_notebook.data.service.operations import OPERATIONS, is_dataset, is_examined, node_kind
from tfd_notebook.data.service.python_state import State, copied_state, names_random

#: Ops that call a function with their inputs, and return its results.
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
#: Ops that draw from the attributes ``seed`` and ``seed2``, by the start of their names.
_DRAWING = (
    "Multinomial",
    "NonDeterministicInts",
    "ParameterizedTruncatedNormal",
    "Random",
    "SampleDistorted",
    "SamplingDataset",
    "Timestamp",
    "TruncatedNormal",
)
#: Ops that change a table.
_INSERTING = ("LookupTableInsert", "LookupTableRemove")
#: Ops that draw from a ``tf.random.Generator``, whose state is a variable.
_GENERATING = ("RngReadAndSkip", "RngSkip", "Stateful")


class Write(NamedTuple):
    """An operation of a function that writes elements to a path.

    Parameters
    ----------
    kind : str
        ``"Cache"`` or ``"Save"``. A snapshot has other files for other elements.
    path : str
        Empty if it is not a constant of the function.
    path_of, elements_of : tuple of int
        The arguments of the function on which the path and the elements depend.
    """

    kind: str
    path: str
    path_of: tuple[int, ...]
    elements_of: tuple[int, ...]


class Facts(NamedTuple):
    """Properties of the functions of an operation."""

    draws: bool = False  # other numbers in each call
    seeded: bool = False  # the same numbers in each iterator
    generates: bool = False  # numbers of a tf.random.Generator
    derives: bool = False  # numbers from an explicit state
    assigns: bool = False  # changes a variable or a table
    shuffles: bool = False  # a shuffle without a seed
    gets: bool = False  # elements of a dataset by their number
    states: tuple[State, ...] = ()  # objects of Python functions
    unknown: tuple[str, ...] = ()
    names: bool = False  # a Python function that may draw numbers
    groups: bool = False  # elements to batches
    drops: bool = False  # an incomplete last batch
    condenses: bool = False  # a dataset to a result, or to some of its elements
    reads: bool = False  # files
    orders: tuple[bytes, ...] = ()  # settings of parallel calls
    writes: tuple[Write, ...] = ()

    def plus(self, other: Facts) -> Facts:
        """Return the properties of two functions together."""
        if _NONE in (self, other):
            return self if other == _NONE else other
        pairs: Iterable[tuple[Any, Any]] = zip(self, other, strict=True)
        return Facts(*(a + b if isinstance(a, tuple) else a or b for a, b in pairs))


#: The attribute of an argument with its shape.
SHAPES = "_output_shapes"
#: Most nodes have no such property, and call no function.
_NONE = Facts()


class Functions:
    """The functions of a graph.

    Parameters
    ----------
    library : iterable of FunctionDef

    Attributes
    ----------
    visited : int
        Number of nodes that were examined. Each function is examined once.
    """

    def __init__(self, library: Iterable[Any]) -> None:
        self._library = {each.signature.name: each for each in library}
        self._facts: dict[str, Facts] = {}
        self._bodies: dict[str, list[tuple[Any, Facts, Facts]]] = {}
        # By the identity of the node, which the entry keeps.
        self._calls: dict[int, tuple[Any, Facts]] = {}
        self.visited = 0

    @property
    def nodes(self) -> Iterator[Any]:
        """The nodes of all functions."""
        return (node for function in self._library.values() for node in function.node_def)

    def arguments_of(self, name: str) -> list[str]:
        """Return the names of the arguments of a function, with those that it captures."""
        function = self._library.get(name)
        return [] if function is None else [each.name for each in function.signature.input_arg]

    def shapes_of(self, name: str) -> list[Any]:
        """Return the shapes of the arguments of a function, as protocol buffers, or None."""
        function = self._library.get(name)
        if function is None:
            return []
        attributes = [function.arg_attr.get(n) for n in range(len(function.signature.input_arg))]
        shapes = [each and each.attr[SHAPES].list.shape for each in attributes]
        return [each[0] if each else None for each in shapes]

    def results_of(self, name: str) -> list[str]:
        """Return the outputs of nodes that a function returns."""
        function = self._library.get(name)
        if function is None:
            return []
        return [function.ret[each.name] for each in function.signature.output_arg]

    def body_of(self, name: str) -> list[tuple[Any, Facts, Facts]]:
        """Return the nodes of a function, with their facts and those of functions they call."""
        self._function(name)
        return self._bodies.get(name, [])

    def facts_of(self, node: Any) -> Facts:
        """Return the facts of the functions that a node calls, and of those that they call."""
        known, facts = self._calls.get(id(node), (None, _NONE))
        if known is not node:
            facts = self._facts_of_called(node)
            self._calls[id(node)] = node, facts
        return facts

    def _facts_of_called(self, node: Any) -> Facts:
        facts = _NONE
        for name in _called(node):
            facts = facts.plus(self._function(name))
        return facts

    def _function(self, name: str) -> Facts:
        if name in self._facts or name not in self._library:
            return self._facts.get(name, Facts())
        self._facts[name] = facts = Facts()  # for a function that calls itself
        nodes = self._library[name].node_def
        constants = {each.name: each for each in nodes if each.op == "Const"}
        body = []
        for node in nodes:
            self.visited += 1
            is_call = node.op in self._library
            own = _NONE if is_call else own_facts(node, constants)
            called = self._facts_of_called(node)
            if own is not _NONE or called.writes:
                own = own._replace(writes=self._writes(name, node, called, constants))
                called = called._replace(writes=())
            body.append((node, own, called))
            facts = facts.plus(own).plus(called)
        self._facts[name], self._bodies[name] = facts, body
        return facts

    def _writes(
        self, name: str, node: Any, called: Facts, constants: dict[str, Any]
    ) -> tuple[Write, ...]:
        """Return what a node of a function writes, and the functions that it calls."""
        inputs, kind = list(data_inputs(node)), node_kind(node)
        if kind in ("Cache", "Save"):
            path = _value(inputs[1], constants)
            if path == b"":  # in memory
                return ()
            text = path.decode(errors="replace") if isinstance(path, bytes) else ""
            path_of, elements_of = (self._origins(name, inputs[i : i + 1]) for i in (1, 0))
            return (Write(kind, text, path_of, elements_of),)
        found = []
        for write in called.writes:
            if node.op in CALLS:
                parts = (
                    [inputs[number] for number in numbers]
                    for numbers in (write.path_of, write.elements_of)
                )
                path_of, elements_of = (self._origins(name, part) for part in parts)
            else:  # a function of a dataset, which also receives the elements of that
                path_of, elements_of = (), self._origins(name, inputs)
            found.append(Write(write.kind, write.path, path_of, elements_of))
        return tuple(found)

    def _origins(self, name: str, sources: list[str]) -> tuple[int, ...]:
        """Return the numbers of the arguments of a function on which values depend."""
        nodes = {each.name: each for each in self._library[name].node_def}
        found = set()
        while sources:
            source = sources.pop().partition(":")[0]
            if source not in found:
                found.add(source)
                sources += data_inputs(nodes[source]) if source in nodes else ()
        return tuple(i for i, each in enumerate(self.arguments_of(name)) if each in found)


def own_facts(node: Any, constants: Mapping[str, Any]) -> Facts:
    """Return the facts of a node, without those of functions that it calls.

    `constants` are nodes by name, of which only those with the op ``Const`` are used.
    """
    if _is_plain(node.op):
        return _NONE
    inputs = list(data_inputs(node))
    seeded = any(node.attr[name].i for name in ("seed", "seed2") if name in node.attr)
    draws = node.op.startswith(_DRAWING) or node.op.endswith("CandidateSampler")
    draws = draws and node.op != "RandomIndexShuffle"  # its seed is an input
    kind = node_kind(node)
    effect = OPERATIONS.get(kind)
    unseeded = effect in ("ordering", "random") and all(
        _value(inputs[number], constants) == 0 for number in seeds_of(node)
    )
    if effect == "random":  # with a seed, it gives each call the same numbers
        draws = unseeded
    token = node.attr["token"].s.decode() if node.op in OPS else ""
    return Facts(
        draws=draws and not seeded,
        seeded=draws and seeded,
        derives=node.op.startswith("StatelessRandom"),
        generates=node.op.startswith(_GENERATING) and node.op != "StatefulPartitionedCall",
        assigns=node.op.startswith(_INSERTING)
        or (node.op.startswith("Assign") and node.op.endswith("VariableOp")),
        shuffles=effect == "ordering" and unseeded,
        gets=node.op == "GetElementAtIndex",
        states=copied_state(token) if token else (),
        unknown=tuple(_unknown(node, token)),
        names=bool(token) and names_random(token),
        groups=effect == "grouping",
        drops=effect == "grouping" and _value(inputs[-1], constants) is True,
        condenses=node.op == "ReduceDataset"
        or effect in ("counting", "neighbors", "pairing", "reducing"),
        reads=kind in READERS,
        orders=(order_of(node),) if is_dataset(node) else (),
    )


def _unknown(node: Any, token: str) -> Iterator[str]:
    """Yield what the check does not cover."""
    if not (is_examined(node) if is_dataset(node) else is_registered(node.op)):
        yield node.op
    if token and is_debugged(lookup(token)):
        yield "a function in the debug mode of tf.data"


@functools.cache
def _is_plain(op: str) -> bool:
    """Return True for an op that has none of the facts, with all attributes and inputs."""
    return not (
        op.startswith((*_DRAWING, *_GENERATING, *_INSERTING, "StatelessRandom", "Assign"))
        or op.endswith("CandidateSampler")
        or op in OPS
        or op == "GetElementAtIndex"
        or "Dataset" in op
        or kind_of(op) in OPERATIONS
        or not is_registered(op)
    )


def seeds_of(node: Any) -> tuple[int, int]:
    """Return the numbers of the inputs of a shuffle, or of a random source, that are its seeds."""
    return {"Random": (0, 1), "GlobalShuffle": (1, 2)}.get(node_kind(node), (2, 3))


def order_of(node: Any) -> bytes:
    """Return ``b"false"`` if parallel calls of a dataset's node deliver in any order.

    ``b"default"`` leaves it to the options of the dataset.
    """
    if "sloppy" in node.attr and node.attr["sloppy"].b:
        return b"false"
    return bytes(node.attr["deterministic"].s) if "deterministic" in node.attr else b""


def _called(node: Any) -> Iterator[str]:
    for attr in node.attr.values():
        kind = attr.WhichOneof("value")
        if kind in ("func", "list"):
            for function in (attr.func,) if kind == "func" else attr.list.func:
                if function.name:
                    yield function.name
    yield node.op


def _value(source: str, constants: Mapping[str, Any]) -> Any:
    """Return the value of an input that is a constant, else None."""
    import tensorflow as tf

    constant = constants.get(source.partition(":")[0])
    if constant is None or constant.op != "Const":
        return None
    value = tf.make_ndarray(constant.attr["value"].tensor)
    return value.item() if value.size == 1 else None
