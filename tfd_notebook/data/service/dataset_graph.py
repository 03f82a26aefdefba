"""The dataset operations of a graph, in their order and with their arguments."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from tfd_notebook._compat.tf_data.graph import captured_inputs, data_inputs, expanded
from tfd_notebook._compat.tf_data.pipeline_model import READERS, inputs_first
from tfd_notebook.data.service.batch_rows import BatchRows
from tfd_notebook.data.service.function_facts import (
    SHAPES,
    Facts,
    Functions,
    Write,
    order_of,
    own_facts,
    seeds_of,
)
from tfd_notebook.data.service.operations import (
    COUNTER,
    EXPANDING,
    NUMBERED,
    OPERATIONS,
    is_dataset,
    is_examined,
    node_kind,
    uses_datasets,
)

_VARIABLES = ("VarHandleOp", "_VarHandlesOp")
#: Tables that can change after their creation.
_TABLES = ("MutableHashTable", "MutableDenseHashTable", "AnonymousMutable")
_BATCHES = ("Batch", "PaddedBatch", "MapAndBatch", "DenseToSparseBatch")
#: Operations after which random numbers, or constants, still go with any element.
_KEEPS_ANY = ("Batch", "Map", "Options", "PaddedBatch", "Prefetch", "Shuffle")
#: Operations through which TensorFlow's auto-sharding finds the files, and others.
_DIVIDED_BY_FILE = (
    "AssertCardinality",
    "Batch",
    "Cache",
    "Concatenate",
    "Filter",
    "FlatMap",
    "Interleave",
    "Map",
    "MapAndBatch",
    "Options",
    "PaddedBatch",
    "Prefetch",
    "Rebatch",
    "Repeat",
    "Shard",
    "Shuffle",
    "ShuffleAndRepeat",
    "Skip",
    "Take",
    "Unbatch",
    "Window",
    "Zip",
)
_NOT_BY_FILE = (
    "CSV",
    "DirectedInterleave",
    "GlobalShuffle",
    "GroupByReducer",
    "GroupByWindow",
    "IgnoreErrors",
    "IndexFlatMap",
    "LMDB",
    "List",
    "Load",
    "Random",
    "Range",
    "Scan",
    "Snapshot",
    "SparseTensorSlice",
    "Sql",
    "TakeWhile",
    "Tensor",
    "TensorSlice",
    "Unique",
    "WeightedFlatMap",
)
_NO_END = (1 << 62) - 1
#: Bytes of a constant above which it is data. The analysis reads scalars only.
_DATA_BYTES = 10_000


class DatasetGraph:
    """The dataset operations of a graph.

    Parameters
    ----------
    definition : tf.compat.v1.GraphDef
    deterministic : bool
        Whether parallel operations keep the order of the elements by default.

    Attributes
    ----------
    nodes : dict of str to NodeDef
        All nodes by name.
    functions : Functions
    rows : BatchRows
    """

    def __init__(self, definition: Any, deterministic: bool = True) -> None:
        small = _without_data(expanded(definition))
        self.nodes = {node.name: node for node in small.node}
        self.functions = Functions(small.library.function)
        self.rows = BatchRows(self.functions)
        self._before: dict[str, tuple[Any, ...]] = {}
        self._constants: dict[tuple[str, int], Any] = {}
        self._facts: dict[str, Facts] = {}
        self._captured: dict[str, list[list[Any]]] = {}
        self._deterministic = deterministic

    @cached_property
    def has_hint(self) -> bool:
        """True if the pipeline has a ``shard(SHARD_HINT, SHARD_HINT)``."""
        return any(
            node_kind(node) == "Shard" and self.constant(node, 1) == -1
            for node in self.nodes.values()
        )

    @cached_property
    def only_numbers(self) -> set[str]:
        """The names of the datasets whose only reader is an enumeration that they number."""
        readers = Counter(each.name for node in self.ordered for each in self.before(node))
        return {
            each.name
            for node in self.ordered
            if self.is_enumeration(node)
            for each in self.before(node)
            if self._numbers(each) and readers[each.name] == 1
        }

    @cached_property
    def joined_batches(self) -> dict[str, Any]:
        """The operations that can join the rows of batches, by the names of the batches."""
        found: dict[str, Any] = {}
        batches: dict[str, set[str]] = {}
        for node in self.ordered:
            kind, before = node_kind(node), self.before(node)
            inner = set().union(*(batches[each.name] for each in before))
            padded = any(node_kind(self.nodes[name]) != "Batch" for name in inner)
            if inner and (
                kind in (*_BATCHES, "GroupByWindow") or self.rows.joins(node, before, padded)
            ):
                found = dict.fromkeys(inner, node) | found
            if kind in EXPANDING:
                inner = set()
            if kind in (*_BATCHES, "Rebatch") and not self.is_single(node):
                inner.add(node.name)
            elif kind == "GroupByWindow":
                if self.rows.joins_group(node):
                    found.setdefault(node.name, node)
                inner = {node.name} if self.rows.groups_to_batches(node) else set()
            batches[node.name] = inner
        return found

    @cached_property
    def file_or_data(self) -> tuple[str, Any]:
        """The mode that TensorFlow uses for ``"FILE_OR_DATA"``, and the node that ends another one.

        It is ``"FILE"`` or ``"DATA"``, or ``"FILE_OR_DATA"`` if that is unknown. The node is the
        reason for ``"DATA"`` if TensorFlow has divided files before it. Otherwise it is None.
        """
        by_file = False
        todo = [(node, node) for node in self.ordered[-1:]]
        while todo:  # in TensorFlow's order
            node, reader = todo.pop()
            kind, before = node_kind(node), self.before(node)
            if self._reads(node):
                by_file = True
            elif kind in _DIVIDED_BY_FILE and before:
                todo += [(each, node) for each in reversed(before)]
            elif kind in _NOT_BY_FILE:
                if kind == "Tensor" and self._generates(reader):
                    node = reader  # `from_generator`
                return "DATA", node if by_file else None
            else:
                return "FILE_OR_DATA", None
        return "FILE", None

    @cached_property
    def before_files(self) -> set[str]:
        """The operations before the readers of files, such as those on the names of files.

        In mode ``"FILE"``, each data worker runs all of them, and reads its share of the results.
        """
        after, readers = self._up_to(self.ordered[-1:], self._reads)
        before, _ = self._up_to([each for node in readers for each in self.before(node)])
        return before - after

    @cached_property
    def before_shuffle(self) -> set[str]:
        """The operations on the names of files that TensorFlow puts before a shuffle of these.

        In mode ``"FILE"``, it moves a shuffle behind the division of the files.
        """
        found: set[str] = set()
        for node in self.ordered:
            shuffled = any(
                OPERATIONS.get(node_kind(each)) == "ordering" or each.name in found
                for each in self.before(node)
            )
            if shuffled and node.name in self.before_files:
                found.add(node.name)
        return found

    @cached_property
    def ordered(self) -> list[Any]:
        """The dataset operations of the pipeline, each after those that it reads."""
        datasets = [node for node in self.nodes.values() if is_dataset(node)]
        users = [node for node in self.nodes.values() if uses_datasets(node)]
        inputs = (self.input(name) for node in users for name in node.input)
        used = {each.name for each in inputs if each is not None}
        ends = [node for node in datasets if node.name not in used]
        return inputs_first(ends, self.before, lambda node: node.name)

    def _generates(self, node: Any) -> bool:
        """Return True if the function of an operation calls a Python generator."""
        body = self.functions.body_of(node.attr["f"].func.name)
        return any(node_kind(inner) == "Generator" for inner, _, _ in body)

    def _reads(self, node: Any) -> bool:
        """Return True if an operation reads files."""
        return node_kind(node) in READERS or self.functions.facts_of(node).reads

    def _up_to(
        self, todo: list[Any], ends: Callable[[Any], bool] = lambda node: False
    ) -> tuple[set[str], list[Any]]:
        """Return operations and those before them, up to some, and these."""
        found: dict[str, Any] = {}
        last = []
        while todo:
            node = todo.pop()
            if node.name in found:
                continue
            found[node.name] = node
            if ends(node):
                last.append(node)
            else:
                todo += self.before(node)
        return set(found), last

    def input(self, name: str) -> Any:
        """Return the node that an input names, without the nodes that only pass it on."""
        node = self.nodes.get(name.lstrip("^").partition(":")[0])
        while node is not None and node.op == "Identity":
            node = self.nodes.get(node.input[0].lstrip("^").partition(":")[0])
        return node

    def before(self, node: Any) -> tuple[Any, ...]:
        """Return the operations whose elements `node` reads."""
        if node.name not in self._before:
            names = list(data_inputs(node))
            del names[captured_inputs(node)]
            inputs = map(self.input, names)
            found = tuple(each for each in inputs if each is not None and is_dataset(each))
            self._before[node.name] = found
        return self._before[node.name]

    def _is_outside(self, node: Any) -> bool:
        """Return True if a node is not one of a function, which can have the same name."""
        return self.nodes.get(node.name) is node

    def facts_of(self, node: Any) -> Facts:
        """Return the facts of the functions of a node, and of the datasets that these capture."""
        if not self._is_outside(node):
            return self.functions.facts_of(node)
        if node.name not in self._facts:
            for reader in self.captured_first(node):
                facts = self.functions.facts_of(reader)
                for each in self._used(reader):
                    facts = facts.plus(own_facts(each, self.nodes)).plus(self._facts[each.name])
                self._facts[reader.name] = facts
        return self._facts[node.name]

    def captured_first(self, node: Any) -> list[Any]:
        """Return `node` and all operations of captured datasets, each after those that it uses."""
        return inputs_first([node], self._used, lambda node: node.name)

    def _used(self, node: Any) -> list[Any]:
        return [each for nodes in self.captured(node) for each in nodes]

    def captured(self, node: Any) -> list[list[Any]]:
        """Return the operations of each input that is captured, each after its own inputs.

        A list is empty if the input is not a dataset. Each call of a function reads all of such a
        dataset, which the service does not divide.
        """
        if not self._is_outside(node):
            return []
        if node.name not in self._captured:
            inputs = map(self.input, list(data_inputs(node))[captured_inputs(node)])
            self._captured[node.name] = [
                inputs_first([each], self.before, lambda node: str(node.name))
                if each is not None and is_dataset(each)
                else []
                for each in inputs
            ]
        return self._captured[node.name]

    def is_examined(self, node: Any) -> bool:
        """Return True if the effects of all datasets that the functions of `node` use are known."""
        facts = self.facts_of(node)
        changes = facts.draws or facts.seeded or facts.generates or facts.shuffles or facts.states

        def is_known(each: Any) -> bool:
            kind = node_kind(each)
            if facts.gets or not is_examined(each):
                return kind in NUMBERED
            if OPERATIONS[kind] == "external":
                return kind == "Cache" and not self.path(each) and not changes
            # Each call takes the next order of a seed.
            return OPERATIONS[kind] != "ordering" or not (self.is_seeded(each) and reshuffles(each))

        return all(map(is_known, self._used(node)))

    def constant(self, node: Any, index: int) -> Any:
        """Return the value of an input that is a constant, else None."""
        key = node.name, index
        if key not in self._constants:
            self._constants[key] = self._constant(node, index)
        return self._constants[key]

    def _constant(self, node: Any, index: int) -> Any:
        import tensorflow as tf

        source = self.input(node.input[index]) if index < len(node.input) else None
        if source is None or source.op != "Const":
            return None
        value = tf.make_ndarray(source.attr["value"].tensor)
        return value.item() if value.size == 1 else None

    def is_seeded(self, node: Any) -> bool:
        """Return True if a shuffle, or a random source, has a seed."""
        return any(self.constant(node, index) not in (0, None) for index in seeds_of(node))

    def repeats_numbers(self, node: Any) -> bool:
        """Return True if a seed gives each element the same number in each iteration."""
        orders = order_of(node), *self.facts_of(node).orders
        name = "rerandomize_each_iteration"
        return not any(orders) and not (name in node.attr and node.attr[name].b)

    def drops_last(self, node: Any) -> bool:
        """Return True if an incomplete last group is dropped, which the last input decides."""
        return self.constant(node, len(node.input) - 1) is True

    def keeps_all(self, node: Any) -> bool:
        """Return True for ``take(-1)`` and ``skip(0)``, and for ``skip(-1)``, which keeps none."""
        kind, count = node_kind(node), self.constant(node, 1)
        return count is not None and (
            (kind == "Take" and count < 0) or (kind == "Skip" and count <= 0)
        )

    def repeats(self, node: Any) -> bool:
        """Return True if an operation can read its elements several times."""
        kind = node_kind(node)
        return kind == "ShuffleAndRepeat" or (kind == "Repeat" and self.constant(node, 1) != 1)

    def reads_again(self, node: Any) -> bool:
        """Return True if an operation can read its sources several times."""
        return self.repeats(node) and all(node_kind(each) != "Cache" for each in self.before(node))

    def selects_by_position(self, node: Any) -> bool:
        """Return True if the elements after `node` depend on the order of those before it."""
        effect = self.effect(node)
        if effect == "grouping":
            return self.drops_last(node)
        return effect in ("pairing", "counting", "neighbors", "reducing") and not (
            node_kind(node) in ("Unique", "AssertCardinality") or self.keeps_all(node)
        )

    def added_windows(self, node: Any, workers: int) -> str:
        """Return the largest change of the number of windows, or an empty text."""
        size, shift, stride = (self.constant(node, index) for index in (1, 2, 3))
        if not size or not shift or not stride:
            return ""
        length = (size - 1) * stride + 1
        return f" by up to {(workers - 1) * math.ceil(length / shift)}"

    def is_late(self, node: Any) -> bool:
        """Return True if an operation creates iterators of its input when an element is read."""
        return OPERATIONS.get(node_kind(node)) == "ordering" or self.reads_again(node)

    def reads_all(self, node: Any) -> bool:
        """Return True if an operation makes iterators that are created late read whole sources.

        In mode "dynamic", these have no connection to the dispatcher, which divides the sources
        (2.21). A parallel ``interleave`` keeps the connection.
        """
        return node.op == "InterleaveDataset" or node_kind(node) == "GroupByWindow"

    def is_endless(self, node: Any, before: Sequence[bool]) -> bool:
        """Return True if an operation has no end. `before` is this of its inputs."""
        kind = node_kind(node)
        if kind == "Repeat":
            count = self.constant(node, 1)
            return (count is not None and count < 0) or any(before)
        if kind in ("Take", "TakeWhile"):
            return False
        return kind == "Random" or (bool(before) and (all if kind == "Zip" else any)(before))

    def partitions(self, window: Any) -> bool:
        """Return True if each element is in one window."""
        size, shift, stride = (self.constant(window, index) for index in (1, 2, 3))
        return size is not None and size == shift and stride == 1

    def is_enumeration(self, node: Any) -> bool:
        """Return True if all inputs of a zip but one are alike, and some of them count.

        An example is ``enumerate``.
        """
        return self.joins_one(node) and any(map(self._numbers, self.before(node)))

    def joins_one(self, zipped: Any) -> bool:
        """Return True if a zip has one dataset, and numbers or constants that have no end."""
        if node_kind(zipped) != "Zip":
            return False  # else the time for a long pipeline is quadratic
        before = self.before(zipped)
        others = [each for each in before if not (self._numbers(each) or self._is_any_part(each))]
        return len(others) <= 1

    def _numbers(self, node: Any) -> bool:
        """Return True for a dataset that counts without end."""
        return self.is_counter(node) or (node_kind(node) == "Scan" and self._counts(node))

    def _is_any_part(self, node: Any) -> bool:
        """Return True for endless random numbers, or an endless constant, and batches of them."""
        while node_kind(node) in _KEEPS_ANY:
            (node,) = self.before(node)
        if node_kind(node) == "Random":
            return not self.is_seeded(node)
        return self._is_any_constant(node)

    def _is_any_constant(self, node: Any) -> bool:
        """Return True for an endless constant."""
        count = self.constant(node, 1) if node_kind(node) == "Repeat" else None
        return count is not None and count < 0 and node_kind(self.before(node)[0]) == "Tensor"

    def is_counter(self, node: Any) -> bool:
        """Return True for the endless source of ``enumerate``."""
        import tensorflow as tf

        return (
            node_kind(node) == "Range"
            and (self.constant(node, 1) or 0) > _NO_END
            and self.constant(node, 2) == 1
            and list(node.attr["output_types"].list.type) == [tf.int64.as_datatype_enum]
        )

    def effect(self, node: Any) -> str | None:
        """Return the effect of an operation, as in `Operation`."""
        if self.is_counter(node):
            return COUNTER
        if node_kind(node) == "DirectedInterleave" and self.selects_at_random(node):
            return "pairing" if stops_early(node) else "random"
        return OPERATIONS["Map"] if self.is_single(node) else OPERATIONS.get(node_kind(node))

    def is_single(self, node: Any) -> bool:
        """Return True if each batch, or the buffer of a shuffle, has one element."""
        kinds = ("Batch", "PaddedBatch", "Rebatch", "Shuffle")
        return node_kind(node) in kinds and self.constant(node, 1) == 1

    def _counts(self, scan: Any) -> bool:
        """Return True for the scan of ``tf.data.Dataset.counter``."""
        repeats = self.before(scan)
        return bool(repeats) and self._is_any_constant(repeats[0])

    def selects_at_random(self, node: Any) -> bool:
        """Return True if a random source selects the dataset of each element."""
        selector = self.input(node.input[0])
        before, _ = self._up_to([] if selector is None else [selector])
        return any(node_kind(self.nodes[name]) == "Random" for name in before)

    def selects_all(self, node: Any) -> bool:
        """Return True if a selection of datasets delivers all of their elements."""
        return self.selects_at_random(node) and not stops_early(node)

    def is_unordered(self, node: Any) -> bool:
        """Return True if its parallel calls, or those in its functions, deliver in any order."""
        return self._is_any_order(order_of(node)) or self.is_unordered_inside(node)

    def is_unordered_inside(self, node: Any) -> bool:
        """Return True if parallel calls in the functions of `node` deliver in any order."""
        return any(map(self._is_any_order, self.facts_of(node).orders))

    def _is_any_order(self, setting: bytes) -> bool:
        return setting == b"false" or (setting == b"default" and not self._deterministic)

    def path(self, node: Any) -> str:
        """Return the path that an operation writes to, or an empty text."""
        if node_kind(node) == "Cache":
            value = self.constant(node, 1)
        else:
            value = next((v for i in (1, 2) if isinstance(v := self.constant(node, i), bytes)), "")
        return value.decode(errors="replace") if isinstance(value, bytes) else ""

    def writes(self, node: Any) -> Iterator[tuple[Write, bool]]:
        """Yield what the functions of `node` write, and whether each element has its own path."""
        captured = captured_inputs(node)
        count = len(self.functions.arguments_of(node.attr["f"].func.name))
        count -= captured.stop - captured.start
        for write in self.functions.facts_of(node).writes:
            yield write, any(number < count for number in write.path_of)

    def joins_calls(self, node: Any) -> bool:
        """Return True if calls of a function use one file, with the elements of one of them."""
        return any(write.elements_of and not own for write, own in self.writes(node))

    def captured_state(self, node: Any) -> tuple[bool, bool]:
        """Return whether the functions of `node` use variables, and tables that can change."""
        inputs = (self.input(name) for each in self.captured_first(node) for name in each.input)
        ops = [each.op for each in inputs if each is not None]
        return any(op in _VARIABLES for op in ops), any(op.startswith(_TABLES) for op in ops)


def _without_data(definition: Any) -> Any:
    """Return a copy of a ``GraphDef`` without large constants.

    A reference to a single node keeps the memory of its whole graph.
    """
    small = type(definition)()
    small.node.extend(_without_constants(definition.node))
    for function in definition.library.function:
        copied = small.library.function.add()
        copied.signature.CopyFrom(function.signature)
        for number, attributes in function.arg_attr.items():
            copied.arg_attr[number].attr[SHAPES].CopyFrom(attributes.attr[SHAPES])
        copied.node_def.extend(_without_constants(function.node_def))
        copied.ret.update(function.ret)
    return small


def _without_constants(nodes: Any) -> Iterator[Any]:
    return (node for node in nodes if node.op != "Const" or node.ByteSize() < _DATA_BYTES)


def reshuffles(shuffle: Any) -> bool:
    """Return True if a shuffle gives each epoch another order."""
    name = "reshuffle_each_iteration"
    return name not in shuffle.attr or bool(shuffle.attr[name].b)


def stops_early(interleave: Any) -> bool:
    """Return True if a selection of datasets ends with the first of them."""
    name = "stop_on_empty_dataset"
    return name in interleave.attr and bool(interleave.attr[name].b)
