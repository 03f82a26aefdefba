"""Functions that join the rows of a batch.

A function that treats each row separately has the same result for a row in any batch. Others have
results that depend on the members of their batch. The functions are examined op by op. An op that
is not in the lists below joins rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfd_notebook._compat.tf_data.graph import captured_inputs, data_inputs
from tfd_notebook.data.service.function_facts import CALLS, Functions
from tfd_notebook.data.service.operations import OPERATIONS, is_dataset, node_kind
from tfd_notebook.data.service.random_parts import OF_SHAPES, SELECTORS

#: How a value depends on the rows of a batch. An elementwise op has the largest of its inputs.
#: Its first axis can have the rows, or the parts of rows that have different lengths.
_NOT, _BY_ROW, _BY_PART, _JOINED = range(4)

_ELEMENTWISE_OPS = (
    "Abs Acos Acosh Add AddN AddV2 AdjustContrast AdjustContrastv2 AdjustHue AdjustSaturation "
    "ApproximateEqual AsString Asin Asinh Atan Atan2 Atanh AvgPool BiasAdd BitwiseAnd BitwiseOr "
    "BitwiseXor BroadcastTo Bucketize Cast Ceil CheckNumerics ClipByValue Conv2D Cos Cosh "
    "DebugGradientIdentity DecodeBase64 DecodeRaw DepthwiseConv2dNative Digamma Div DivNoNan Elu "
    "EncodeBase64 EnsureShape Equal Erf Exp Expm1 ExtractImagePatches Floor FloorDiv FloorMod "
    "Greater GreaterEqual HSVToRGB Identity ImageProjectiveTransformV2 "
    "ImageProjectiveTransformV3 Inv Invert IsFinite IsInf IsNan LeakyRelu LeftShift Less LessEqual "
    "Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr LookupTableFind LookupTableFindV2 MaxPool "
    "Maximum Minimum Mod Mul MulNoNan Neg NextAfter NotEqual OnesLike ParseExample ParseExampleV2 "
    "Pow PreventGradient QuantizeAndDequantizeV2 RGBToHSV RealDiv Reciprocal RegexFullMatch "
    "RegexReplace Relu Relu6 ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor "
    "RightShift Rint Round Rsqrt ScaleAndTranslate Select SelectV2 Selu Sigmoid Sign Sin Sinh "
    "Snapshot Softplus Softsign Sqrt Square SquaredDifference StaticRegexFullMatch "
    "StaticRegexReplace StopGradient StringJoin StringLength StringLower StringStrip "
    "StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper "
    "Sub Substr Tan Tanh TruncateDiv TruncateMod UnicodeTranscode Xdivy Xlog1py Xlogy "
    "ZerosLike"
)
_ELEMENTWISE = frozenset(_ELEMENTWISE_OPS.split())
#: Ops that join the elements of the axes that their second input contains.
_OF_AXES = (
    "All",
    "Any",
    "ArgMax",
    "ArgMin",
    "Cumprod",
    "Cumsum",
    "Max",
    "Mean",
    "Min",
    "Prod",
    "ReverseV2",
    "Sum",
)
#: Ops that join the elements of the last axis.
_OF_LAST_AXIS = ("LogSoftmax", "Softmax", "TopKV2")
#: Ops that divide rows into parts, with their outputs of parts.
_TO_RAGGED = {"StringSplitV2": ("values",), "RaggedTensorFromVariant": ("output_dense_values",)}
#: Ops that join the parts of each row, with the number of the input of parts.
_FROM_RAGGED = {"RaggedTensorToTensor": 1, "RaggedTensorToVariant": -1}
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
    """

    status: int = _NOT
    shape: tuple[int, ...] | None = None

    def axis(self, number: int) -> int | None:
        """Return an axis as a number from the start. None if it is unknown."""
        if number >= 0:
            return int(number)
        return None if self.shape is None else int(number) + len(self.shape)


#: The outputs of a node, also by their names if these differ.
_Outputs = Sequence[Rows] | Mapping[str, Rows]
_ALL_JOINED = (Rows(_JOINED),)


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
            return any(each.status == _JOINED for each in found)
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
        values: dict[str, _Outputs] = {
            each: [value] for each, value in zip(names, arguments, strict=False)
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
                values[each] = self._of_node(node, read, nodes, padded, depth)
            else:
                todo.append((each, True))
                todo += [(source.partition(":")[0], False) for source in data_inputs(node)]
        return [_value(each, values) for each in results]

    def _of_node(
        self,
        node: Any,
        inputs: list[Rows],
        nodes: dict[str, Any],
        padded: bool,
        depth: int,
    ) -> _Outputs:
        status = max((each.status for each in inputs), default=_NOT)
        if status == _NOT or _counts_rows(node, nodes):
            return [Rows(_NOT, _constant_shape(node))]
        if node.op in OF_SHAPES and not (padded and -1 in (inputs[0].shape or (-1, -1))[1:]):
            return [Rows(_NOT)]
        if node.op in CALLS:
            return self._results(node.attr["f"].func.name, inputs, padded, depth + 1)
        if node.op in ("If", "StatelessIf") and inputs[0].status == _NOT:
            branches = [
                self._results(node.attr[each].func.name, inputs[1:], padded, depth + 1)
                for each in ("then_branch", "else_branch")
            ]
            return [max(pair, key=_status) for pair in zip(*branches, strict=True)]
        if node.op == "IdentityN":
            return inputs
        if is_dataset(node):
            return [self._of_dataset(node, inputs)]
        if node.op in _TO_RAGGED and status == _BY_ROW:
            return {each: Rows(_BY_PART) for each in _TO_RAGGED[node.op]}
        if node.op in _FROM_RAGGED and inputs[_FROM_RAGGED[node.op]].status == _BY_PART:
            return [Rows(_BY_ROW)]
        if node.op in _ELEMENTWISE and status != _JOINED:
            return [_elementwise(node, inputs)]
        if status == _BY_ROW and _keeps_rows(node, inputs, nodes):
            return [Rows(_BY_ROW, _shape_after(node, inputs, nodes))]
        return _ALL_JOINED

    def _of_dataset(self, node: Any, inputs: list[Rows]) -> Rows:
        """Return the elements of a dataset that a function on a batch creates."""
        kind = node_kind(node)
        status = max(each.status for each in inputs)
        if kind in ("Tensor", "TensorSlice"):
            return Rows(status)
        effect, captured = OPERATIONS.get(kind), inputs[captured_inputs(node)]
        if any(each.status for each in captured) or effect not in ("sound", "ordering"):
            return Rows(_JOINED)
        return Rows(status)  # its function receives rows


def _elementwise(node: Any, inputs: list[Rows]) -> Rows:
    dependent = [each for each in inputs if each.status != _NOT]
    status = max(each.status for each in dependent)
    ranks = {len(each.shape) for each in inputs if each.shape is not None}
    own = {len(each.shape) for each in dependent if each.shape is not None}
    if len(own) > 1 or (own and max(ranks) > max(own)):
        return Rows(_JOINED)  # the shorter shape begins with another axis
    if node.op in ("BroadcastTo", "DecodeRaw", "Select") or node.op.startswith("Parse"):
        return Rows(status)
    return Rows(status, _broadcast([each.shape for each in dependent]))


def _broadcast(shapes: list[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    known = [shape for shape in shapes if shape is not None]
    if len(known) != len(shapes):
        return None
    # The sizes of constants are unknown, so a size of 1 is.
    return tuple(max(sizes) if max(sizes) > 1 else -1 for sizes in zip(*known, strict=True))


def _keeps_rows(node: Any, inputs: list[Rows], nodes: dict[str, Any]) -> bool:
    """Return True if the result of an op has the rows in its first axis."""
    first, *others = inputs
    alone = first.status == _BY_ROW and not any(each.status for each in others)
    sources = list(data_inputs(node))

    def constant(index: int) -> Any:
        return _constant(sources[index], nodes) if index < len(sources) else None

    op = node.op
    if op in _OF_AXES:
        axes = constant(1)
        numbers = [] if axes is None else [first.axis(each) for each in axes.ravel()]
        return alone and bool(numbers) and all(numbers)
    if op in _OF_LAST_AXIS:
        return alone and first.shape is not None and len(first.shape) > 1
    if op in ("ExpandDims", "ConcatV2"):
        axes = constant(len(sources) - 1)
        if axes is None:
            return False
        if op == "ExpandDims":
            return alone and int(axes.ravel()[0]) != 0 and first.axis(axes.ravel()[0]) != -1
        dependent = next(each for each in inputs if each.status == _BY_ROW)
        return bool(dependent.axis(axes.ravel()[0]))
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
        return alone and numbers is not None and not (numbers[0] != expected).any()
    if op in ("MatMul", "BatchMatMul", "BatchMatMulV2"):
        if not alone:
            return op != "MatMul" and all(len(each.shape or ()) > 2 for each in inputs)
        rank = len(first.shape or ())
        return (rank == 2 and not node.attr["transpose_a"].b and not node.attr["adj_x"].b) or (
            rank > 2
        )
    if op == "StridedSlice":
        strides = constant(3)
        return (
            alone and strides is not None and _slices_rows(node, first, [int(n) for n in strides])
        )
    if op == "Slice":
        begin, size = constant(1), constant(2)
        return alone and begin is not None and size is not None and (begin[0], size[0]) == (0, -1)
    if op == "GatherV2":
        axis = constant(2)
        if first.status == _NOT:  # a table
            return axis is not None and axis.item() == 0
        if node.attr["batch_dims"].i > 0:
            return True
        return alone and axis is not None and bool(first.axis(axis.item()))
    return op == "Reshape" and alone and _reshapes_rows(first, sources[1], nodes)


def _counts_rows(node: Any, nodes: dict[str, Any]) -> bool:
    """Return True for ``tf.shape(rows)[0]``."""
    if node.op != "StridedSlice" or node.attr["shrink_axis_mask"].i != 1:
        return False
    begin, shape = _constant(node.input[1], nodes), _source(node.input[0], nodes)
    return begin is not None and begin.item() == 0 and shape is not None and shape.op == "Shape"


def _slices_rows(node: Any, value: Rows, strides: list[int]) -> bool:
    def is_first(name: str) -> bool:
        return bool(node.attr[name].i & 1)

    if is_first("ellipsis_mask"):
        others = len(strides) - 1 - bin(node.attr["new_axis_mask"].i).count("1")
        return others == 0 or (value.shape is not None and len(value.shape) > others)
    if is_first("new_axis_mask") or is_first("shrink_axis_mask"):
        return False
    return is_first("begin_mask") and is_first("end_mask") and strides[0] == 1


def _reshapes_rows(value: Rows, source: str, nodes: dict[str, Any]) -> bool:
    sizes = _constant(source, nodes)
    if sizes is None:  # such as [tf.shape(x)[0], -1]
        packed = _source(source, nodes)
        if packed is None or packed.op != "Pack":
            return packed is not None and packed.op == "Shape"
        size = _source(packed.input[0], nodes)
        return size is not None and _counts_rows(size, nodes)
    if value.shape is None or not sizes.size or -1 in value.shape[1:] or -1 in sizes[1:]:
        return bool(sizes.size) and value.shape is not None and value.shape[0] == sizes[0] != -1
    row = 1
    for size in value.shape[1:]:
        row *= size
    return row == int(sizes[1:].prod())


def _shape_after(node: Any, inputs: list[Rows], nodes: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of a result with the rows in its first axis, or None."""
    sources = list(data_inputs(node))
    shape = inputs[0].shape
    if node.op == "Reshape":
        sizes = _constant(sources[1], nodes)
        return None if sizes is None else tuple(int(size) for size in sizes)
    if shape is None:
        return None
    if node.op in ("ReverseV2", "Cumsum", "Cumprod"):
        return shape
    if node.op in _OF_AXES:
        axes = {inputs[0].axis(each) for each in _constant(sources[1], nodes).ravel()}
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
    if node.op in ("Pad", "PadV2", "MirrorPad", "Tile", "Transpose", "Slice", "ConcatV2"):
        return (shape[0], *(-1,) * (len(shape) - 1))
    return None


def _of_shape(shape: Any) -> Rows:
    if shape.unknown_rank:
        return Rows(_BY_ROW)
    sizes = tuple(dimension.size for dimension in shape.dim)
    return Rows(_BY_ROW if sizes else _NOT, sizes)  # a scalar has no rows


def _constant_shape(node: Any) -> tuple[int, ...] | None:
    if node.op != "Const":
        return None
    return tuple(dimension.size for dimension in node.attr["value"].tensor.tensor_shape.dim)


def _source(source: str, nodes: dict[str, Any]) -> Any:
    return nodes.get(source.partition(":")[0])


def _constant(source: str, nodes: dict[str, Any]) -> Any:
    """Return the value of an input that is a constant, else None."""
    import tensorflow as tf

    node = _source(source, nodes)
    if node is None or node.op != "Const":
        return None
    return tf.make_ndarray(node.attr["value"].tensor)


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
