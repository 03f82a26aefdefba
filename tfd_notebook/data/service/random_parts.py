"""Parts of elements that depend on random numbers, and operations that select by such parts.

An element consists of tensors, its parts. The functions of a pipeline are examined op by op. So a
``filter`` on a label does not depend on the random numbers of its image.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tfd_notebook._compat.tf_data.graph import captured_inputs, data_inputs
from tfd_notebook.data.service.dataset_graph import DatasetGraph
from tfd_notebook.data.service.function_facts import CALLS, Facts
from tfd_notebook.data.service.operations import EXPANDING, SELECTORS, is_dataset, node_kind
from tfd_notebook.data.service.row_ops import OF_SHAPES

#: Whether a value depends on random numbers.
NEVER, POSSIBLY, CERTAINLY = range(3)
#: A degree for each part of an element. Empty if none depends on random numbers.
Parts = tuple[int, ...]

#: Ops whose result is an element of a dataset, or computed from all of them.
_OF_DATASETS = ("DatasetToSingleElement", "GetElementAtIndex", "ReduceDataset")
#: Operations with a function that replaces elements.
REPLACING = ("Map", "MapAndBatch")


class RandomParts:
    """The parts that depend on random numbers in the pipelines of a graph.

    Parameters
    ----------
    graph : DatasetGraph
    by_order : bool
        Find the parts that depend on the order of the calls instead. These are numbers of a seed
        or of a generator, and state that calls change. Default false.

    Attributes
    ----------
    visited : int
        Number of nodes of functions that were examined. None is, in a pipeline without randomness.
    """

    def __init__(self, graph: DatasetGraph, by_order: bool = False) -> None:
        self._graph = graph
        self._functions = graph.functions
        self._by_order = by_order
        self._captured: dict[str, tuple[Parts, bool]] = {}
        self._results: dict[tuple[str, Parts, bool, bool], Parts] = {}
        self.visited = 0

    def after(self, node: Any, inputs: Sequence[Any], before: Sequence[Parts]) -> Parts:
        """Return the parts of the elements that an operation delivers.

        Parameters
        ----------
        node : tf.compat.v1.NodeDef
        inputs : sequence of tf.compat.v1.NodeDef
            The operations whose elements it reads.
        before : sequence of Parts
            The parts of the elements of each of them.
        """
        kind, width = node_kind(node), _width(node)
        facts = self._graph.facts_of(node)
        if not (any(before) or self._is_random(facts)):
            return ()
        if kind in REPLACING:
            return self._result(node, "f", before[0], *self._of_captured(node))
        columns = [_filled(parts, _width(each)) for each, parts in zip(inputs, before, strict=True)]
        if kind == "Zip":
            return _known(degree for parts in columns for degree in parts)
        if kind == "DirectedInterleave":
            del columns[0]
        keeps = kind in SELECTORS or not _functions_of(node)
        if kind == "Window" or not keeps or any(len(parts) != width for parts in columns):
            return (POSSIBLY,) * width
        return _known(map(max, zip(*columns, strict=True)))

    def selection(
        self, node: Any, before: Sequence[Parts], captured: Parts = (), noisy: bool = False
    ) -> int:
        """Return the degree to which the selection or order of an operation is random.

        Parameters
        ----------
        node : tf.compat.v1.NodeDef
        before : sequence of Parts
            The parts of the elements of each of its inputs.
        captured : Parts
            The degrees of the values that its functions capture.
        noisy : bool
            Whether datasets that it reads can have elements that depend on random numbers.
        """
        kind = node_kind(node)
        facts = self._graph.facts_of(node)
        first = before[0] if before else ()
        if kind in ("Unique", "DirectedInterleave"):
            return max(first, default=NEVER)
        if not captured and self._is_random(facts):
            captured, is_noisy = self._of_captured(node)
            noisy = noisy or is_noisy
        if not (any(before) or any(captured) or noisy or self._is_random(facts)):
            return NEVER
        if kind in ("Unbatch", "Rebatch"):  # a part that is not random proves the order of rows
            return POSSIBLY if all(_filled(first, _width(node))) else NEVER
        if kind in EXPANDING and _functions_of(node):
            return max(self._result(node, "f", first, captured, noisy), default=NEVER)
        if kind in SELECTORS:
            inner = captured if kind in ("Filter", "TakeWhile") else ()
            results = self._result(node, SELECTORS[kind], first, inner, noisy)
            degree = max(results, default=NEVER)
            if degree and (facts.draws or facts.generates):
                degree = CERTAINLY
            if any(captured) and not inner:  # of one of several functions
                degree = max(degree, POSSIBLY)
            if kind == "GroupByWindow":  # its arguments are the key and the elements
                found = self._result(node, "reduce_func", (), (), noisy or any(first))
                degree = max(degree, *found, NEVER)
            return degree
        return POSSIBLY if kind == "Generator" and self._draws(facts) else NEVER

    def _result(
        self,
        node: Any,
        attribute: str,
        parts: Parts,
        captured: Parts = (),
        noisy: bool = False,
    ) -> Parts:
        """Return the degrees of the results of a function of a dataset's node."""
        if node_kind(node) == "IndexFlatMap":
            attribute = "map_func"
        name = node.attr[attribute].func.name
        facts = self._graph.facts_of(node)
        # Parallel calls take the numbers of one sequence in any order.
        in_any_order = node.op.startswith("Parallel") and (facts.seeded or facts.assigns)
        count = len(self._functions.arguments_of(name)) - len(captured)
        return self._of_function(name, (*_filled(parts, count), *captured), noisy, in_any_order)

    def _of_captured(self, node: Any) -> tuple[Parts, bool]:
        """Return the degrees of the values that the functions of `node` capture.

        That of a dataset is its selection. Also return True if elements of datasets depend on
        random numbers.
        """
        if not self._graph.captured(node):
            return (), False
        for reader in self._graph.captured_first(node):
            if reader.name not in self._captured:
                self._captured[reader.name] = self._of_inputs(reader)
        return self._captured[node.name]

    def _of_inputs(self, node: Any) -> tuple[Parts, bool]:
        degrees, noisy = [], False
        for operations in self._graph.captured(node):
            parts: dict[str, Parts] = {}
            degrees.append(NEVER)
            for each in operations:
                inputs = self._graph.before(each)
                before = [parts[other.name] for other in inputs]
                degrees[-1] = max(degrees[-1], self.selection(each, before))
                if node_kind(each) == "Random" and not self._graph.is_seeded(each):
                    parts[each.name] = (POSSIBLY,)
                else:
                    parts[each.name] = self.after(each, inputs, before)
                noisy = noisy or any(parts[each.name])
        return tuple(degrees), noisy

    def _of_function(
        self, name: str, arguments: Parts, noisy: bool = False, in_any_order: bool = False
    ) -> Parts:
        """Return the degrees of the results of a function. That of a dataset is its selection."""
        key = (name, arguments, noisy, in_any_order)
        if key in self._results:
            return self._results[key]
        self._results[key] = ()  # for a function that calls itself
        names = self._functions.arguments_of(name)
        values: dict[str, Parts] = {
            each: (degree,) for each, degree in zip(names, arguments, strict=False)
        }
        is_new = True
        while is_new:  # most bodies have each node after its inputs
            is_new = False
            for node, own, called in self._functions.body_of(name):
                self.visited += 1
                inputs = [_value(source, values) for source in data_inputs(node)]
                if is_dataset(node):
                    noisy = noisy or any(inputs) or self._draws(own.plus(called))
                    found = _known([self._of_dataset(node, inputs, noisy)])
                elif node.op in CALLS:
                    called_name = node.attr["f"].func.name
                    found = self._of_function(called_name, tuple(inputs), noisy, in_any_order)
                elif node.op == "IdentityN":
                    found = _known(inputs)
                else:
                    if noisy and node.op in _OF_DATASETS:
                        inputs.append(POSSIBLY)
                    found = _known([self._of_op(node, inputs, own, called, in_any_order)])
                if found != values.get(node.name, ()):
                    values[node.name], is_new = found, True
        self._results[key] = _known(
            _value(source, values) for source in self._functions.results_of(name)
        )
        return self._results[key]

    def _of_dataset(self, node: Any, inputs: list[int], noisy: bool) -> int:
        """Return the degree of the selection of a dataset that a function creates."""
        kind = node_kind(node)
        if kind == "Tensor":
            return NEVER
        inside = captured_inputs(node) if _functions_of(node) else slice(0)
        captured = tuple(inputs[inside])
        del inputs[inside]
        degree = max(inputs, default=NEVER)
        if kind == "TensorSlice":  # their number can depend on random numbers
            return min(degree, POSSIBLY)
        elements = [(POSSIBLY,) * _width(node)] if noisy else []
        return max(degree, self.selection(node, elements, captured, noisy))

    def _of_op(
        self, node: Any, inputs: list[int], own: Facts, called: Facts, in_any_order: bool
    ) -> int:
        """Return the degree of all outputs of an op of a function."""
        degree = max(inputs, default=NEVER)
        facts = own.plus(called)
        if self._by_order:
            if self._draws(facts):
                degree = CERTAINLY
        else:
            if facts.names or (in_any_order and (own.seeded or own.derives)):
                degree = max(degree, POSSIBLY)
            if facts.draws or facts.generates:
                degree = CERTAINLY
        if degree < CERTAINLY:
            return degree
        results = max((len(attr.list.type) for attr in node.attr.values()), default=0)
        if node.op in OF_SHAPES or (_functions_of(node) and results > 1):
            return min(degree, POSSIBLY)  # of several results, only some may depend on it
        return degree

    def _draws(self, facts: Facts) -> bool:
        """Return True if numbers can differ on each data worker, or in another order of calls."""
        if self._by_order:
            return facts.seeded or facts.generates or facts.assigns or bool(facts.states)
        return facts.draws or facts.generates or facts.names

    def _is_random(self, facts: Facts) -> bool:
        """Return True if numbers, or their order in parallel calls, can differ."""
        return self._draws(facts) or facts.seeded or (facts.assigns and facts.derives)


def _functions_of(node: Any) -> list[str]:
    return [attr.func.name for attr in node.attr.values() if attr.func.name]


def _width(node: Any) -> int:
    """Return the number of parts of the elements of a dataset's node."""
    names = ("output_types", "Toutput_types")
    return next((len(node.attr[name].list.type) for name in names if name in node.attr), 1)


def _filled(parts: Parts, count: int) -> Parts:
    return (*parts, *(NEVER,) * count)[:count]


def _known(parts: Iterable[int]) -> Parts:
    """Return `parts`, or an empty tuple if none depends on random numbers."""
    found = tuple(parts)
    return found if any(found) else ()


def _value(source: str, values: dict[str, Parts]) -> int:
    """Return the degree of an input of a node, such as ``"node:output:1"``."""
    name, *output = source.split(":")
    parts = values.get(name, ())
    if len(parts) < 2:
        return parts[0] if parts else NEVER
    return parts[int(output[-1])] if output else parts[0]
