"""Functions that join the rows of a batch.

A function that treats each row separately has the same result for a row in any batch. Others have
results that depend on the members of their batch. The functions are examined op by op. An op that
is not in the lists of `row_ops` joins rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfd_notebook._compat.tf_data.graph import captured_inputs, data_inputs
from tfd_notebook.data.service.function_facts import CALLS, Functions
from tfd_notebook.data.service.known_numbers import (
    COUNTER,
    EACH_ROW,
    ROWS,
    axes_of_ellipsis,
    is_number,
    joins_bits,
    numbers_of,
    parts_of,
)
from tfd_notebook.data.service.operations import OPERATIONS, SELECTORS, is_dataset, node_kind
from tfd_notebook.data.service.row_ops import (
    ELEMENTWISE,
    FROM_RAGGED,
    OF_AXES,
    OF_FIRST_INPUT,
    OF_LAST_AXES,
    OF_OTHER_RANK,
    OF_SAME_RANK,
    OF_SHAPES,
    RESIZING,
    TO_RAGGED,
)

#: How a value depends on the rows of a batch. An elementwise op has the largest of its inputs.
#: Its first axis can have the rows, or the parts of rows that have different lengths. A loop
#: reads one row at a time.
_NOT, _BY_ROW, _BY_PART, _JOINED, _ONE = range(5)

#: Number of functions that call each other.
_DEPTH = 20
#: Operations whose function receives an element and returns another one, or a dataset.
_REPLACING = ("Map", "MapAndBatch", "FlatMap", "Interleave", "LegacyParallelInterleave")


class Rows(NamedTuple):
    """A value of a function.

    Parameters
    ----------
    status : int
    shape : tuple of int, optional
        Its shape, with -1 for an unknown size. None if its rank is unknown.
    numbers : numpy.ndarray, optional
        Its numbers, if it is computed from sizes and constants. NaN for an unknown number.
    fold : int
        Number of elements of the first axis that belong to each row.
    least : numpy.ndarray, optional
        A number that it is not smaller than.
    """

    status: int = _NOT
    shape: tuple[int, ...] | None = None
    numbers: Any = None
    fold: int = 1
    least: Any = None

    def axis(self, number: int) -> int | None:
        """Return an axis as a number from the start. None if it is unknown."""
        if number >= 0:
            return int(number)
        return None if self.shape is None or number != number else int(number) + len(self.shape)


#: The outputs of a node, also by their names if these differ.
_Outputs = Sequence[Rows] | Mapping[str, Rows]
_ALL_JOINED = (Rows(_JOINED),)
_FIRST = np.array(float(COUNTER))


class BatchRows:
    """The functions of a graph that join the rows of a batch.

    Parameters
    ----------
    functions : Functions

    Attributes
    ----------
    visited : int
        Number of nodes of functions that were examined. None is, in a pipeline without batches.
    """

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self.visited = 0

    def joins(self, node: Any, inputs: Sequence[Any], padded: bool = False) -> bool:
        """Return True if the function of an operation on batches can join their rows.

        Parameters
        ----------
        node : tf.compat.v1.NodeDef
        inputs : sequence of tf.compat.v1.NodeDef
            The operations whose elements it reads.
        padded : bool
            Whether the sizes of the rows depend on the members of their batch.
        """
        kind = node_kind(node)
        parts = [
            _of_shape(shape) for each in inputs for shape in each.attr["output_shapes"].list.shape
        ]
        if kind in ("Filter", "TakeWhile"):
            found = self._results(node.attr[SELECTORS[kind]].func.name, parts, padded)
            return any(each.status != _NOT for each in found)
        if kind in _REPLACING:
            found = self._results(node.attr["f"].func.name, parts, padded)
            return any(each.status >= _JOINED or each.fold != 1 for each in found)
        return False

    def joins_group(self, window: Any) -> bool:
        """Return True if the function of a ``group_by_window`` joins elements of a group."""
        batches: dict[str, Any] = {}
        for node, _, _ in self._functions.body_of(window.attr["reduce_func"].func.name):
            if not is_dataset(node):
                continue
            inputs = (name.partition(":")[0] for name in data_inputs(node))
            before = [batches[name] for name in inputs if name in batches]
            if before and self.joins(node, before):
                return True
            if before or OPERATIONS.get(node_kind(node)) == "grouping":
                batches[node.name] = node
        return False

    def groups_to_batches(self, window: Any) -> bool:
        """Return True if the function of a ``group_by_window`` makes batches."""
        body = self._functions.body_of(window.attr["reduce_func"].func.name)
        return any(OPERATIONS.get(node_kind(node)) == "grouping" for node, _, _ in body)

    def _results(
        self, name: str, arguments: Sequence[Rows], padded: bool, depth: int = 0
    ) -> Sequence[Rows]:
        """Return the results of a function. That of a dataset is that of its elements."""
        if depth > _DEPTH:
            return _ALL_JOINED
        names = self._functions.arguments_of(name)
        captured = map(_of_captured, self._functions.shapes_of(name)[len(arguments) :])
        values: dict[str, _Outputs] = {
            each: [value] for each, value in zip(names, (*arguments, *captured), strict=False)
        }
        nodes = {node.name: node for node, _, _ in self._functions.body_of(name)}
        results = self._functions.results_of(name)
        todo = [(each.partition(":")[0], False) for each in results]
        while todo:
            each, ready = todo.pop()
            node = nodes.get(each)
            if node is None or each in values:
                continue
            if ready:
                self.visited += 1
                read = [_value(source, values) for source in data_inputs(node)]
                values[each] = self._of_node(node, read, padded, depth)
            else:
                todo.append((each, True))
                todo += [(source.partition(":")[0], False) for source in data_inputs(node)]
        return [_value(each, values) for each in results]

    def _of_node(self, node: Any, inputs: list[Rows], padded: bool, depth: int) -> _Outputs:
        status = max((each.status for each in inputs), default=_NOT)
        numbers = numbers_of(node, [each.numbers for each in inputs])
        if node.op == "SplitV" and status == _NOT:
            return [Rows(_NOT, None, each) for each in parts_of(*(v.numbers for v in inputs))]
        if node.op in ("Maximum", "Minimum") and status == _JOINED:
            numbers, least = _limit(node.op, *inputs)
            if least is not None:
                return [Rows(_JOINED, least=least)]
        if status == _NOT or (numbers is not None and not (numbers != numbers).any()):
            return [Rows(_NOT, _constant_shape(node), numbers)]
        if status == _ONE:
            return [_of_one(node, inputs)]
        if node.op in OF_SHAPES and status != _JOINED:
            is_same = not (padded and -1 in (inputs[0].shape or (-1, -1))[1:])
            if is_same or node.op == "Shape":
                sizes = _sizes(inputs[0]) if node.op == "Shape" else None
                return [Rows(_NOT if is_same else _JOINED, None, sizes)]
        if node.op in CALLS:
            return self._results(node.attr["f"].func.name, inputs, padded, depth + 1)
        if node.op in ("If", "StatelessIf") and inputs[0].status == _NOT:
            branches = [
                self._results(node.attr[each].func.name, inputs[1:], padded, depth + 1)
                for each in ("then_branch", "else_branch")
            ]
            return [max(pair, key=_status) for pair in zip(*branches, strict=True)]
        if node.op in ("While", "StatelessWhile"):
            return self._of_loop(node, inputs, padded, depth)
        if node.op == "TensorListGetItem" and is_number(inputs[1].numbers, COUNTER):
            return [Rows(_ONE if status == _BY_ROW else _JOINED)]
        if node.op == "IdentityN":
            return inputs
        if is_dataset(node):
            return [self._of_dataset(node, inputs)]
        folds = {each.fold for each in inputs if each.status}
        if len(folds) > 1:
            return _ALL_JOINED
        if node.op == "Reshape" and status == _BY_ROW:
            return [_reshaped(*inputs)]
        if node.op == "StringNGrams" and inputs[0].status == _BY_PART:
            return {"ngrams": inputs[0]}
        if node.op in TO_RAGGED and status == _BY_ROW and folds == {1}:
            return {each: Rows(_BY_PART) for each in TO_RAGGED[node.op]}
        if node.op in FROM_RAGGED and inputs[FROM_RAGGED[node.op]].status == _BY_PART:
            is_joined = node.op == "RaggedBincount" and inputs[2].status  # with its size
            return [Rows(_JOINED if is_joined else _BY_ROW)]
        if node.op in ELEMENTWISE and status != _JOINED:
            return [_elementwise(node, inputs)._replace(fold=folds.pop())]
        if status == _BY_ROW and _keeps_rows(node, inputs):
            return [Rows(_BY_ROW, _shape_after(node, inputs), None, folds.pop())]
        return _ALL_JOINED

    def _of_loop(self, node: Any, inputs: list[Rows], padded: bool, depth: int) -> Sequence[Rows]:
        """Return the results of a loop. That of ``tf.map_fn`` reads and writes row by row."""
        values = [
            each._replace(numbers=each.numbers if is_number(each.numbers, 0) else None)
            for each in inputs
        ]
        before: list[Rows] = []
        while [_state(each) for each in values] != [_state(each) for each in before]:
            before = values
            given = [v if v.numbers is None else v._replace(numbers=_FIRST) for v in values]
            go_on, results = (
                self._results(node.attr[name].func.name, given, padded, depth + 1)
                for name in ("cond", "body")
            )
            folds = {each.fold for each in (*values, *results)}
            if any(each.status for each in go_on) or folds != {1} or len(results) != len(values):
                return _ALL_JOINED
            values = [
                each
                if each.numbers is not None and is_number(after.numbers, COUNTER + 1)
                else Rows(
                    max(each.status, min(after.status, _JOINED)),
                    each.shape if each.shape == after.shape else None,
                )
                for each, after in zip(values, results, strict=True)
            ]
        return values

    def _of_dataset(self, node: Any, inputs: list[Rows]) -> Rows:
        """Return the elements of a dataset that a function on a batch creates."""
        kind = node_kind(node)
        status = max(each.status if each.fold == 1 else _JOINED for each in inputs)
        if kind in ("Tensor", "TensorSlice"):
            return Rows(status)
        effect, captured = OPERATIONS.get(kind), inputs[captured_inputs(node)]
        if any(each.status for each in captured) or effect not in ("sound", "ordering"):
            return Rows(_JOINED)
        return Rows(status)  # its function receives rows


def _limit(op: str, *values: Rows) -> tuple[Any, Any]:
    """Return the number that a limit of other numbers is, and the one that it is not below.

    A value that is at least 9, and at most 9, is 9.
    """
    limit = next((each.numbers for each in values if each.numbers is not None), None)
    if limit is None or limit.size != 1:
        return None, None
    if op == "Maximum":
        return None, limit
    least = [each.least for each in values if each.least is not None]
    return (limit if least and least[0] >= limit else None), None


def _of_one(node: Any, inputs: list[Rows]) -> Rows:
    """Return the result of an op on one row."""
    others = {each.status for each in inputs} - {_NOT, _ONE}
    if node.op != "TensorListSetItem":
        return Rows(_JOINED if others else _ONE)
    is_next = is_number(inputs[1].numbers, COUNTER) and inputs[0].status in (_NOT, _BY_ROW)
    return Rows(_BY_ROW if is_next else _JOINED)


def _elementwise(node: Any, inputs: list[Rows]) -> Rows:
    dependent = [each for each in inputs if each.status]
    status = max(each.status for each in dependent)
    rank = _rank(inputs)
    if rank == 0 or not _is_separate(node, inputs) or _is_by_position(node, inputs, rank):
        return Rows(_JOINED)
    if node.op in ("BroadcastTo", "Select") or node.op.startswith(
        ("DecodePa", "DecodeRaw", "Parse")
    ):
        return Rows(status)
    shape = _broadcast([each.shape for each in dependent])
    if shape is not None and node.op in RESIZING:
        shape = (shape[0], *(-1,) * (len(shape) - 1))
    return Rows(status, shape)


def _is_separate(node: Any, inputs: list[Rows]) -> bool:
    """Return False if an elementwise op has an argument with which it joins rows."""
    first, *others = inputs
    if node.op in OF_FIRST_INPUT:
        return not any(each.status for each in others)
    if node.op == "BroadcastTo":
        sizes = others[0].numbers
        return sizes is not None and first.shape is not None and len(sizes) == len(first.shape)
    return not node.op.startswith("Quantize") or bool(node.attr["range_given"].b)


def _is_by_position(node: Any, inputs: list[Rows], rank: int | None) -> bool:
    """Return True if the result for a row depends on its position in the batch."""
    if node.op in OF_FIRST_INPUT or node.op.startswith(("Decode", "Lookup", "Parse")):
        return False
    others = [e for e in inputs if not e.status and e.shape and len(e.shape) == rank]
    return any(
        each.shape[0] > 1 and (each.numbers is None or (each.numbers != each.numbers[:1]).any())
        for each in others
        if each.shape
    )


def _rank(inputs: list[Rows]) -> int | None:
    """Return the number of axes of the inputs with rows, and None if it is unknown.

    It is 0 if an input has more axes, so that the shorter shape begins with another axis.
    """
    ranks = [(len(each.shape), each.status) for each in inputs if each.shape is not None]
    own = {rank for rank, status in ranks if status}
    if len(own) > 1 or (own and max(ranks)[0] > max(own)):
        return 0
    return max(own, default=None)


def _broadcast(shapes: list[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    known = [shape for shape in shapes if shape is not None]
    if len(known) != len(shapes):
        return None
    # The sizes of constants are unknown, so a size of 1 is.
    return tuple(max(sizes) if max(sizes) > 1 else -1 for sizes in zip(*known, strict=True))


def _keeps_rows(node: Any, inputs: list[Rows]) -> bool:
    """Return True if the result of an op has the rows in its first axis."""
    first, *others = inputs
    alone = first.status == _BY_ROW and not any(each.status for each in others)
    dependent = [each for each in inputs if each.status]
    rank = 0 if any(each.shape is None for each in dependent) else _rank(inputs) or 0

    def constant(index: int) -> Any:
        numbers = inputs[index].numbers if index < len(inputs) else None
        return None if numbers is None or not numbers.size else numbers

    op = node.op
    if op in ("TensorListFromTensor", "TensorListStack"):
        return alone and first.fold == 1
    if op in OF_AXES:
        axes = constant(len(inputs) - 1)
        return alone and axes is not None and all(map(first.axis, axes.ravel()))
    if op in OF_LAST_AXES:
        needed = OF_LAST_AXES[op]
        if op == "MatrixDiagV3":
            needed = 1 if inputs[1].numbers is not None and inputs[1].numbers.size == 1 else 2
        elif op == "Bitcast" and not joins_bits(node):
            needed = 0
        return rank > needed
    if op in ("Split", "SplitV"):
        value, axes = (others[0], constant(0)) if op == "Split" else (first, constant(2))
        return bool(value.status and axes is not None and value.axis(axes.ravel()[0]))
    if op == "Einsum":
        terms, _, result = node.attr["equation"].s.decode().partition("->")
        read = [t for t, each in zip(terms.split(","), inputs, strict=True) if each.status]
        label = result[: 3 if result.startswith("...") else 1]
        if not label.isalpha() and not axes_of_ellipsis(terms, [e.shape for e in inputs]):
            return False
        return terms.count(label) == len(read) and all(term.startswith(label) for term in read)
    if op == "DenseBincount":
        return len(first.shape or ()) == 2 and not inputs[1].status
    if op in ("ExpandDims", "ConcatV2"):
        axes = constant(len(inputs) - 1)
        if axes is None or np.isnan(axes).any():
            return False
        if op == "ExpandDims":
            return alone and int(axes.ravel()[0]) != 0 and first.axis(axes.ravel()[0]) != -1
        return bool(dependent[0].axis(axes.ravel()[0]))
    if op == "Pack":
        return bool(node.attr["axis"].i > 0 or node.attr["axis"].i == -1)
    if op == "Unpack":
        return bool(first.axis(node.attr["axis"].i))
    if op == "OneHot":
        return alone and node.attr["axis"].i != 0
    if op == "Squeeze":
        return alone and 0 not in node.attr["squeeze_dims"].list.i
    if op in ("Transpose", "Tile", "Pad", "PadV2", "MirrorPad"):
        numbers = constant(1)
        expected = {"Transpose": 0, "Tile": 1}.get(op, 0)
        return alone and numbers is not None and bool((numbers[0] == expected).all())
    if op in ("MatMul", "BatchMatMul", "BatchMatMulV2"):
        transposed = node.attr["transpose_a"].b or node.attr["adj_x"].b
        return rank > 2 or (rank == 2 and alone and not transposed)
    if op == "StridedSlice":
        begin, end, strides = map(constant, (1, 2, 3))
        if strides is None or not alone:
            return False
        every = begin is not None and end is not None and begin[0] == 0
        every = every and end[0] == _row_count(first) * first.fold
        return _slices_rows(node, first, list(strides), every)
    if op == "Slice":
        begin, size = constant(1), constant(2)
        if begin is None or size is None or begin[0] != 0:
            return False
        return alone and (size[0] == -1 or size[0] == _row_count(first) * first.fold)
    if op == "GatherV2":
        axis = constant(2)
        if first.status == _NOT:  # a table
            return axis is not None and axis.item() == 0
        if node.attr["batch_dims"].i > 0:
            return True
        if _is_each_row(others[0]) and first.fold == 1:
            return alone
        return alone and axis is not None and bool(first.axis(axis.item()))
    return False


def _slices_rows(node: Any, value: Rows, strides: list[Any], every: bool) -> bool:
    """Return True if a slice has all rows. `every` is its first part, without the masks."""

    def is_first(name: str) -> bool:
        return bool(node.attr[name].i & 1)

    if is_first("ellipsis_mask"):
        others = len(strides) - 1 - bin(node.attr["new_axis_mask"].i).count("1")
        return others == 0 or (value.shape is not None and len(value.shape) > others)
    if is_first("new_axis_mask") or is_first("shrink_axis_mask"):
        return False
    return (every or (is_first("begin_mask") and is_first("end_mask"))) and strides[0] == 1


def _row_count(value: Rows) -> int:
    size = (value.shape or (-1,))[0]
    return ROWS if size < 0 else size // value.fold


def _sizes(value: Rows) -> Any:
    """Return the shape of a value with rows in its first axis as numbers."""
    if value.shape is None or value.status != _BY_ROW:
        return None
    rest = (np.nan if size < 0 else size for size in value.shape[1:])
    return np.array([_row_count(value) * value.fold, *rest], float)


def _reshaped(value: Rows, sizes: Rows) -> Rows:
    numbers = sizes.numbers
    if value.status != _BY_ROW or sizes.status or numbers is None or not numbers.size:
        return Rows(_JOINED)
    count, known = _row_count(value), _sizes(value)
    fold = numbers[0] / count
    if numbers[0] == -1 and known is not None:  # NaN if a size is unknown
        rest = np.where(numbers[1:] <= 0, np.nan, numbers[1:])
        fold = value.fold * known[1:].prod() / rest.prod()
    if not (fold >= 1 and fold == int(fold)):
        return Rows(_JOINED)
    first = -1 if count == ROWS else count * int(fold)
    shape = (first, *(int(size) if 0 <= size < ROWS else -1 for size in numbers[1:]))
    return Rows(_BY_ROW, shape, None, int(fold))


def _shape_after(node: Any, inputs: list[Rows]) -> tuple[int, ...] | None:
    """Return the shape of a result with the rows in its first axis, or None."""
    shape = next(each.shape for each in inputs if each.status)
    if node.op == "Einsum":
        terms, _, result = node.attr["equation"].s.decode().partition("->")
        width = axes_of_ellipsis(terms, [each.shape for each in inputs])
        if "..." in result and not width:
            return None
        return (-1,) * (len(result.replace("...", "")) + (width if "..." in result else 0))
    if node.op == "TensorListStack":
        sizes = inputs[1].numbers
        if sizes is None or not sizes.ndim or np.isnan(sizes).any():
            return None
        return (-1, *map(int, sizes))
    if shape is None:
        return None
    if node.op == "MatMul":
        other = inputs[1].shape
        return (shape[0], -1 if not other or node.attr["transpose_b"].b else other[-1])
    if node.op in ("ReverseV2", "Cumsum", "Cumprod", "Roll", "Softmax", "LogSoftmax"):
        return shape
    if node.op == "GatherV2" and _is_each_row(inputs[1]):
        return shape
    if node.op in OF_AXES:
        axes = {inputs[0].axis(each) for each in inputs[1].numbers.ravel()}
        if node.attr["keep_dims"].b:
            return tuple(-1 if axis in axes else size for axis, size in enumerate(shape))
        return tuple(size for axis, size in enumerate(shape) if axis not in axes)
    if node.op == "StridedSlice":
        new, dropped = (
            bin(node.attr[f"{name}_axis_mask"].i).count("1") for name in ("new", "shrink")
        )
        return (shape[0], *(-1,) * (len(shape) - 1 + new - dropped))
    if node.op in ("ExpandDims", "OneHot"):
        return (*shape, -1) if len(shape) == 1 else (shape[0], *(-1,) * len(shape))
    if node.op in (*OF_LAST_AXES, *OF_SAME_RANK) and node.op not in OF_OTHER_RANK:
        return (shape[0], *(-1,) * (len(shape) - 1))
    return None


def _of_shape(shape: Any) -> Rows:
    if shape.unknown_rank:
        return Rows(_BY_ROW)
    sizes = tuple(dimension.size for dimension in shape.dim)
    return Rows(_BY_ROW if sizes else _NOT, sizes)  # a scalar has no rows


def _of_captured(shape: Any) -> Rows:
    """Return a value that does not depend on the batch. `shape` may be None."""
    return Rows() if shape is None else _of_shape(shape)._replace(status=_NOT)


def _constant_shape(node: Any) -> tuple[int, ...] | None:
    if node.op != "Const":
        return None
    return tuple(dimension.size for dimension in node.attr["value"].tensor.tensor_shape.dim)


def _value(source: str, values: Mapping[str, _Outputs]) -> Rows:
    """Return an input of a node, such as ``"node:output:1"``."""
    name, *output = source.split(":")
    parts = values.get(name, ())
    if isinstance(parts, Mapping):
        return parts.get(output[0] if output else "", Rows(_JOINED))
    if len(parts) < 2:
        return parts[0] if parts else Rows()
    return parts[int(output[-1])] if output else parts[0]


def _status(value: Rows) -> int:
    return value.status


def _is_each_row(value: Rows) -> bool:
    return is_number(value.numbers, EACH_ROW) and value.numbers.ndim == 0


def _state(value: Rows) -> tuple[int, bool]:
    return value.status, value.numbers is None
