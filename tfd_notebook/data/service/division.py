"""Division of a pipeline between the data workers and the consumer, for ``semantics="same"``.

The data workers run all operations whose results do not depend on the division of the sources.
The consumer runs the others, and the operations after them.

Where elements have a number, no division is needed. The data workers then share the numbers, and
compute the elements with these numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tfd_notebook._compat.tf_data import elements
from tfd_notebook._compat.tf_data.pipeline_model import inputs_first, stages_of
from tfd_notebook.data.service import graph_inspection
from tfd_notebook.data.service.changes import Change, reported, steps
from tfd_notebook.data.service.flow import Flow, Operation
from tfd_notebook.data.service.operations import COUNTER, EXPANDING, NUMBERED
from tfd_notebook.data.service.random_parts import Parts
from tfd_notebook.data.service.semantics import Semantics
from tfd_notebook.errors import DataChanged

#: Number of elements of a finite dataset in place of an endless one.
_MANY = 1 << 61
#: Operations whose result depends on the order of the elements before them. The sizes of batches
#: do not.
_ORDERED = ("Take", "Skip", "TakeWhile", "Scan", "Shard", "Window", "SlidingWindow")
#: Operations that deliver elements of their inputs, of which the numbers are known.
_PASSING = ("Model", "Options", "Prefetch", "Shard", "Skip", "Take", "Zip")
_JOIN = (
    "let one source deliver what belongs together, or join sources with numbers, such as "
    "from_tensor_slices, before they are shuffled or filtered"
)
_SELECT = "select file names or indices in its place, before the dataset is made"
_SHUFFLED = (
    "call shuffle() with a seed and reshuffle_each_iteration=False, so that each epoch selects the "
    'same elements, and use processing_mode="data"'
)
#: Next steps for operations that need the order of the elements, by their kind.
_FIXES = {"Zip": _JOIN, "Take": _SELECT, "Skip": _SELECT, "Shard": _SELECT}
#: Modes in which the data workers together deliver each element once.
_DIVIDING = ("DYNAMIC", "DATA", "FILE", "FILE_OR_DATA")
#: The elements of an operation at ``number * factor + first``: its name, the factor and the first.
_Place = tuple[str, int, int]


@dataclass
class Division:
    """The operations of a dataset that do not run on the data workers as they are.

    Parameters
    ----------
    dataset : tf.data.Dataset
    definition : tf.compat.v1.GraphDef
    semantics : Semantics
    operations : dict of str to Operation
        All operations, by node.
    numbered : set of str
        The operations whose elements the data workers compute from their numbers.
    mapped : set of str
        Operations with elements that TensorFlow does not compute from their numbers, because they
        depend on a ``map``. Those of its inputs and its function give them.
    local : list of str
        The operations that the consumer runs, each after its inputs.
    shuffled : set of str
        The operations whose elements have any order in each epoch, also without a service.
    """

    dataset: Any
    definition: Any
    semantics: Semantics
    operations: dict[str, Operation] = field(default_factory=dict)
    numbered: set[str] = field(default_factory=set)
    mapped: set[str] = field(default_factory=set)
    local: list[str] = field(default_factory=list)
    shuffled: set[str] = field(default_factory=set)

    def build(self, distribute: Callable[[Any], Any]) -> Any:
        """Return the dataset, with `distribute` applied to the parts for the data workers."""
        options = self.dataset.options()
        numbered = {name: (self.dataset_of(name), self._by_number(name)) for name in self.sources()}

        def part(name: str) -> Any:
            dataset = self._rebuilt(name, numbered) if self.numbered else self.dataset_of(name)
            return distribute(dataset.with_options(options))

        if not self.local:
            return part(self.end)
        reads = {name: (self.dataset_of(name), part(name)) for name in self.boundary}
        return self._rebuilt(self.end, reads).with_options(options)

    def _rebuilt(self, name: str, inputs: dict[str, tuple[Any, Any]]) -> Any:
        """Return the dataset of a node, with other datasets in place of some nodes."""
        from tfd_notebook._compat.tf_data.rebuild import rebuilt

        datasets = {
            name: operation.stage.dataset
            for name, operation in self.operations.items()
            if operation.stage is not None
        }
        return rebuilt(self.dataset_of(name), self.definition, name, inputs, datasets)

    def _by_number(self, name: str) -> Any:
        """Return the dataset of a node. Each element is computed from its number."""
        import tensorflow as tf

        dataset = self.dataset_of(name)
        numbers = tf.data.Dataset.range(int(dataset.cardinality()))
        element = self._element_of(name)
        return numbers.map(
            lambda number: elements.from_tensors(dataset.element_spec, element(number)),
            num_parallel_calls=tf.data.AUTOTUNE,
        )

    def _element_of(self, name: str) -> Callable[[Any], list[Any]]:
        """Return the function that computes the tensors of an element from its number."""
        parts = inputs_first([(name, 1, 0)], self._parts_before, key=lambda part: part)
        sources = {each: self._source_of(each) for each, _, _ in parts if each not in self.mapped}

        def tensors(number: Any) -> list[Any]:
            found: dict[_Place, list[Any]] = {}
            for part in parts:
                each, factor, first = part
                if each in sources:
                    found[part] = sources[each](number * factor + first)
                    continue
                before = [tensor for place in self._parts_before(part) for tensor in found[place]]
                is_map = self.operations[each].kind == "Map"
                found[part] = (
                    elements.map_tensors(self.dataset_of(each), before) if is_map else before
                )
            return found[parts[-1]]

        return tensors

    def _parts_before(self, part: _Place) -> list[_Place]:
        """Return the elements from which an element of `mapped` is computed."""
        name, factor, first = part
        if name not in self.mapped:
            return []
        operation = self.operations[name]
        distance, skipped = self.place_of(operation)
        return [(e, factor * distance, first * distance + skipped) for e in operation.inputs]

    def _source_of(self, name: str) -> Callable[[Any], list[Any]]:
        """Return the function by which TensorFlow computes an element from its number."""
        import tensorflow as tf

        dataset = self.dataset_of(name)
        counters = {}
        for each, counter in self.operations.items():
            if counter.effect == COUNTER:  # TensorFlow computes elements of finite datasets only
                start = self.semantics.constant(counter.node, 0)
                counters[each] = (None, tf.data.Dataset.range(start, start + _MANY))
        if name in counters:
            dataset = counters[name][1]
        elif counters:
            dataset = self._rebuilt(name, counters)
        # TensorFlow's replacements of stages do not compute an element from its number.
        options = tf.data.Options()
        options.experimental_optimization.apply_default_optimizations = False
        options.experimental_optimization.map_and_batch_fusion = False
        options.experimental_optimization.parallel_batch = False
        dataset = dataset.with_options(options)

        return lambda number: elements.to_tensors(
            dataset.element_spec, tf.data.experimental.at(dataset, number)
        )

    def place_of(self, operation: Operation) -> tuple[int, int]:
        """Return the distance between elements of an operation in its input, and the first one."""
        count, first = (self.semantics.constant(operation.node, index) for index in (1, 2))
        if operation.kind == "Shard":
            return count, first
        return 1, count if operation.kind == "Skip" else 0

    @property
    def end(self) -> str:
        """The node of the whole dataset."""
        return list(self.operations)[-1]

    def dataset_of(self, name: str) -> Any:
        """Return the dataset of a node. None if it has none in Python."""
        if name == self.end:
            return self.dataset
        operation = self.operations[name]
        while operation.stage is None and len(operation.inputs) == 1:
            operation = self.operations[operation.inputs[0]]
        return None if operation.stage is None else operation.stage.dataset

    def sources(self) -> list[str]:
        """Return the operations of `numbered` that no other one includes."""
        found: dict[str, None] = {}
        todo, visited = [self.end], set()
        while todo:
            name = todo.pop()
            if name in self.numbered:
                found[name] = None
            elif name not in visited:
                visited.add(name)
                todo += self.operations[name].inputs
        return list(found)

    @property
    def boundary(self) -> list[str]:
        """The last operations that the data workers run."""
        local = set(self.local)
        inputs = (each for name in self.local for each in self.operations[name].inputs)
        return [
            name
            for name in dict.fromkeys(inputs)
            if name not in local and self.operations[name].effect != COUNTER
        ]

    def local_names(self) -> str:
        """Return the operations with which this process begins, or an empty text."""
        operations = map(self.operations.__getitem__, self.local)
        local = [operation for operation in operations if not operation.flow.only_drawn]
        later = {operation.node.name for operation in local}
        first = [operation for operation in local if later.isdisjoint(operation.inputs)]
        return " and ".join(dict.fromkeys(operation.name for operation in first))

    def note(self, mode: str, in_process: bool) -> str:
        """Return what this process runs and why, what it costs, and how to avoid it."""
        local = list(map(self.operations.__getitem__, self.local))
        text = (
            f"this process runs {self.local_names()} and the operations after it, because their "
            "result would change on the data workers."
        )
        if self.boundary and any(
            change.kind == "python" or (change.kind == "random" and each.effect != "ordering")
            for each in local
            for change in each.changes
        ):
            text += " Numbers that they draw or count go to elements in the order of arrival."
        batches = [each for each in local if each.effect == "grouping"]
        if any(
            each.name.startswith("batch(") and not self.mapped.isdisjoint(each.inputs)
            for each in batches
        ):
            text += " If the function of map() accepts batches, put batch() before it: then the "
            text += "data workers run both."
        changes = [change for each in local for change in each.changes]
        other = keeping(self.semantics, changes, mode, in_process)
        if other and mode != "DATA":
            text += f" With {other}, the data workers run all of it, and each reads all sources."
        return text


def divide(dataset: Any, mode: str, in_process: bool) -> Division | None:
    """Return the division of `dataset`, or None if the data workers can run all of it.

    Parameters
    ----------
    dataset : tf.data.Dataset
    mode : str
        The name of TensorFlow's ShardingPolicy.
    in_process : bool
        Whether the data workers run in this process.

    Raises
    ------
    DataChanged
        An operation would have other results.
    """
    definition = graph_inspection.definition_of(dataset)
    deterministic = dataset.options().deterministic is not False
    semantics = Semantics(definition, stages_of(dataset), deterministic)
    division = Division(dataset, definition, semantics)
    by_number: set[str] = set()
    alone: set[str] = set()
    for operation in semantics.operations(mode, 2, in_process):
        name = operation.node.name
        division.operations[name] = operation
        if _in_random_order(operation, division):
            division.shuffled.add(name)
        if not operation.flow.endless and by_number.issuperset(operation.inputs):
            if _is_mapped(operation, division):
                division.mapped.add(name)
                by_number.add(name)
            elif _is_computed(operation, division):
                by_number.add(name)
        if not any(each in division.local for each in operation.inputs):
            if not operation.changes or operation.effect == COUNTER:
                continue
            if mode == "DYNAMIC" and name in by_number and _is_numbered(operation):
                division.numbered.add(name)
                operation.flow = Flow(divided=True, random=operation.flow.random)
                continue
        before = [n for n in operation.inputs if division.operations[n].effect != COUNTER]
        # No service sends the elements between the two operations of `ragged_batch`.
        parts = (division.operations[n].stage for n in before if n not in division.local)
        if any(part is not None and part.kind == "DenseToRagged" for part in parts):
            division.local += before
        if alone.issuperset(before):
            alone.add(name)  # all of it runs here, as without a service
        else:
            _check(operation, division, mode, in_process)
        division.local.append(name)
    _check_selections(division, alone, mode, in_process)
    return division if division.numbered or division.local else None


def _in_random_order(operation: Operation, division: Division) -> bool:
    """Return True if the elements have any order in each epoch, also without a service."""
    if operation.reorders and operation.stage is not None and operation.stage.inputs:
        count = int(operation.stage.inputs[0].dataset.cardinality())
        return 0 <= count <= (operation.stage.number or 0)
    inputs = [n for n in operation.inputs if division.operations[n].effect != COUNTER]
    kept = operation.kind not in EXPANDING and bool(inputs)
    return kept and division.shuffled.issuperset(inputs)


def _is_mapped(operation: Operation, division: Division) -> bool:
    """Return True if an element depends on those with its number, by functions without state."""
    if operation.stage is None:
        return False
    if operation.kind == "Map":
        return not operation.changes and not operation.flow.stateful
    if operation.kind not in _PASSING or division.mapped.isdisjoint(operation.inputs):
        return False
    return operation.kind not in ("Shard", "Skip") or all(
        value is not None and value >= 0 for value in division.place_of(operation)
    )


def _is_computed(operation: Operation, division: Division) -> bool:
    """Return True if TensorFlow computes an element from its number."""
    is_known = operation.kind in NUMBERED and not operation.node.op.startswith("ParallelBatch")
    return is_known and division.mapped.isdisjoint(operation.inputs)


def _is_numbered(operation: Operation) -> bool:
    import tensorflow as tf

    if operation.stage is None:
        return False
    dataset = operation.stage.dataset
    dense = all(isinstance(each, tf.TensorSpec) for each in tf.nest.flatten(dataset.element_spec))
    return dense and int(dataset.cardinality()) >= 0


def keeping(
    semantics: Semantics,
    changes: list[Change],
    mode: str,
    in_process: bool,
    dataset: Any = None,
    workers: int = 0,
) -> str:
    """Return the arguments of ``distribute`` that avoid changes, or an empty text.

    Parameters
    ----------
    semantics : Semantics
    changes : list of Change
    mode : str
        The name of TensorFlow's ShardingPolicy, with which they occur.
    in_process : bool
        Whether the data workers run in this process.
    dataset : tf.data.Dataset, optional
        To offer ``semantics="same"``, if that does not refuse it.
    workers : int
        Number of data workers. Default 0, if it is unknown.
    """
    found = []
    if _is_divided(dataset, mode, in_process):
        found.append('semantics="same"')
    if mode not in _DIVIDING:
        return " or ".join(found)
    # Mode "data" needs an element for each data worker.
    too_few = dataset is not None and 0 <= int(dataset.cardinality()) < workers
    known = {(change.kind, change.operation) for change in changes}
    for other in ("DYNAMIC",) if too_few else ("DYNAMIC", "DATA"):
        others = {(each.kind, each.operation) for each in semantics.changes(other, 2, in_process)}
        if other != mode and semantics.keeps_elements(other) and known.isdisjoint(others):
            found.append(f'processing_mode="{other.lower()}"')
    if not found and not too_few and _is_divided(dataset, "DATA", in_process):
        found.append('processing_mode="data" with semantics="same"')
    return " or ".join(found)


def _is_divided(dataset: Any, mode: str, in_process: bool) -> bool:
    """Return True if ``semantics="same"`` accepts a dataset, and the data workers run a part."""
    if dataset is None:
        return False
    try:
        division = divide(dataset, mode, in_process)
    except DataChanged:
        return False
    return division is None or not division.local or bool(division.boundary)


def _check(operation: Operation, division: Division, mode: str, in_process: bool) -> None:
    """Raise DataChanged for an operation whose result would differ in the consumer."""
    known = {change.kind: change for change in operation.changes}
    fix = 'use semantics="checked", and read what changes'
    offers = False
    node = operation.node
    if "unknown" in known:
        reason = known["unknown"].what
    elif division.semantics.is_before_files(mode, node):
        reason = "it precedes the readers of the files, and the data workers divide these"
        fix = "omit its seed" if operation.effect == "ordering" else fix
    elif mode not in _DIVIDING:
        reason = "in this mode, the data workers can deliver elements several times"
        fix = 'use processing_mode="dynamic"'
    elif operation.flow.earlier:
        reason = "its function keeps values of earlier elements, which arrive in no fixed order"
        fix = fix if mode == "DATA" else known["python"].fix
    elif node.name not in division.shuffled and (
        operation.effect == "pairing" or operation.kind in _ORDERED or "neighbors" in known
    ):
        reason = "the elements arrive in no fixed order, so it cannot select or join the right ones"
        offers, fix = True, _FIXES.get(operation.kind, fix)
        if fix == _SELECT and any(division.operations[n].flow.shuffled for n in operation.inputs):
            fix = _SHUFFLED
    elif any(
        division.dataset_of(each) is None
        for each in operation.inputs
        if division.operations[each].effect != COUNTER
    ):
        reason = "the operations before it cannot be separated from it"
    else:
        return
    raise _refused(operation, reason, fix, division, mode, in_process, offers)


def _check_selections(division: Division, alone: set[str], mode: str, in_process: bool) -> None:
    """Raise DataChanged for an operation that selects by numbers that depend on the order."""
    if alone.issuperset(division.local):
        return
    numbers = division.semantics.numbers_by_order()
    parts: dict[str, Parts] = {}
    for name, operation in division.operations.items():
        before = [parts[each] for each in operation.inputs]
        parts[name] = ()
        if name not in division.local or name in alone:
            continue
        if numbers.selection(operation.node, before):
            reason = "it selects by numbers that go to elements in the order of arrival"
            fix = "select by a part of the element, such as a hash of its key"
            raise _refused(operation, reason, fix, division, mode, in_process)
        inputs = [division.operations[each].node for each in operation.inputs]
        parts[name] = numbers.after(operation.node, inputs, before)


def _refused(
    operation: Operation,
    reason: str,
    fix: str,
    division: Division,
    mode: str,
    in_process: bool,
    offers: bool = True,
) -> DataChanged:
    changes = reported(division.semantics.changes(mode, 2, in_process))
    other = keeping(division.semantics, changes, mode, in_process) if offers else ""
    change = Change("same", operation.name, reason, fix)
    return DataChanged(f'{change} (mode "{mode.lower()}")', fix=steps([change], other))
