"""Inference on the executors: Arrow batches through a signature of a SavedModel."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook.errors import DataError, UnknownName, UsageError

#: Spark types for the dtypes of output tensors. All conversions are lossless.
_TYPES = {
    "bool": "boolean",
    "string": "binary",
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), "double"),
    **dict.fromkeys(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"), "bigint"),
}
#: Key and value of a cache with one entry: the last model of this process.
_loaded: tuple[tuple[Any, ...], Any] | None = None


@dataclass(frozen=True)
class Signature:
    """A signature of a SavedModel with the mapping of columns to its tensors.

    Parameters
    ----------
    directory : str
    tags : tuple of str
    key : str
    inputs : mapping of str to str
        Columns to input tensors.
    outputs : mapping of str to str
        Output tensors to columns.
    batch_size : int
        Maximum number of rows per call.
    """

    directory: str
    tags: tuple[str, ...]
    key: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    batch_size: int


@dataclass(frozen=True)
class Input:
    """Dtype and shape of an input tensor.

    Parameters
    ----------
    dtype : str
    shape : tuple of int or None, optional
        None if any shape is accepted.
    """

    dtype: str
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True)
class SignatureInfo:
    """Inputs and outputs of a signature.

    Parameters
    ----------
    inputs : mapping of str to Input
    outputs : sequence of (str, str, int)
        Column, Spark type, and number of dimensions within a row, in the order of the
        tensors' names.
    """

    inputs: Mapping[str, Input]
    outputs: Sequence[tuple[str, str, int]]


def describe(signature: Signature) -> SignatureInfo:
    """Return the inputs and outputs of a signature.

    Raises
    ------
    UsageError, UnknownName
        The model, the signature or a tensor does not exist. The error names those that exist.
    """
    function = _function(signature)
    _, inputs = function.structured_input_signature
    results = function.structured_outputs
    _check(signature, "input", signature.inputs.values(), inputs)
    _check(signature, "output", signature.outputs, results)
    missing = inputs.keys() - set(signature.inputs.values())
    if missing:
        raise UsageError(
            f"signature {signature.key!r} of {signature.directory} also requires "
            f"the input {', '.join(sorted(missing))}",
            fix="add a column for it to the input_mapping",
        )
    inputs = {
        tensor: Input(
            spec.dtype.name, None if spec.shape.rank is None else tuple(spec.shape.as_list())
        )
        for tensor, spec in inputs.items()
    }
    outputs = []
    for tensor, column in sorted(signature.outputs.items()):
        spec = results[tensor]
        kind = _TYPES.get(spec.dtype.name)
        if kind is None or spec.shape.rank is None or spec.shape.rank < 1:
            raise UsageError(
                f"output {tensor!r} is {spec.dtype.name} of shape {spec.shape}, which cannot "
                "become a column: expected a tensor whose first dimension is the batch",
                fix="export a signature with such an output",
            )
        outputs.append((column, kind, spec.shape.rank - 1))
    return SignatureInfo(inputs, outputs)


def run(
    signature: Signature, inputs: Mapping[str, Input], schema: Any, batches: Iterable[Any]
) -> Iterator[Any]:
    """Yield the results of `batches`, for ``DataFrame.mapInArrow``.

    Parameters
    ----------
    signature : Signature
    inputs : mapping of str to Input
    schema : object
        JSON value of the ``StructType`` of the results.
    batches : iterable of pyarrow.RecordBatch
        Columns in the order of ``signature.inputs``.
    """
    import pyarrow as pa
    from pyspark.sql.types import StructType

    shape = compat_pyspark.arrow_schema(StructType.fromJson(schema))
    # Number of rows that every call must have, if the signature has a fixed batch size.
    fixed_rows = next(
        (spec.shape[0] for spec in inputs.values() if spec.shape and spec.shape[0]), None
    )
    rows = fixed_rows or signature.batch_size
    function, first = None, 0
    for batch in batches:
        for start in range(0, batch.num_rows, rows):
            part = batch.slice(start, rows)
            # Check rows before the model is loaded. Spark runs a failing task four times, and the
            # import of TensorFlow takes seconds.
            arrays_by_tensor = {
                tensor: _fit_input(_array(values, column), inputs[tensor], column, tensor, first)
                for (column, tensor), values in zip(
                    signature.inputs.items(), part.columns, strict=True
                )
            }
            function = function or _function(signature)
            results = _call(function, inputs, arrays_by_tensor, fixed_rows or part.num_rows)
            arrays = [
                _column(results[tensor][: part.num_rows], tensor, part.num_rows, field.type)
                for tensor, field in zip(sorted(signature.outputs), shape, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=shape)
            first += part.num_rows


def _call(
    function: Any, inputs: Mapping[str, Input], arrays: Mapping[str, Any], rows: int
) -> dict[str, Any]:
    """Call a signature with arrays padded to `rows` rows, and return its outputs."""
    import tensorflow as tf

    tensors = {
        tensor: tf.constant(_pad(array, rows), inputs[tensor].dtype)
        for tensor, array in arrays.items()
    }
    return {name: value.numpy() for name, value in function(**tensors).items()}


def _function(signature: Signature) -> Any:
    global _loaded
    _restrict_gpus()
    import tensorflow as tf

    file = f"{signature.directory.rstrip('/')}/saved_model.pb"
    if not tf.io.gfile.exists(file):
        raise UsageError(
            f"no SavedModel found in {signature.directory} on the executor",
            fix="use an export_dir that all hosts share, and let the chief export to it",
        )
    stat = tf.io.gfile.stat(file)
    key = (signature.directory, signature.tags, stat.mtime_nsec, stat.length)
    if _loaded is None or _loaded[0] != key:
        _loaded = None  # two models at the same time may exceed the memory
        try:
            _loaded = key, tf.saved_model.load(signature.directory, list(signature.tags))
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"loading {signature.directory} with the tags {', '.join(signature.tags)} failed: "
                f"{error}"
            ) from None
    signatures = _loaded[1].signatures
    if signature.key not in signatures:
        raise UnknownName(
            f"{signature.directory} has no signature {signature.key!r}",
            fix=f"it has {', '.join(signatures) or 'none: export the model with signatures'}",
        )
    return signatures[signature.key]


def _restrict_gpus() -> None:
    """Restrict TensorFlow to the GPUs that Spark assigned to this task."""
    import sys

    from pyspark import TaskContext

    context = TaskContext.get()
    gpus = context.resources().get("gpu") if context is not None else None
    if gpus is not None and "tensorflow" not in sys.modules:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)


def _check(
    signature: Signature, kind: str, named: Iterable[str], available: Mapping[str, Any]
) -> None:
    for name in named:
        if name not in available:
            raise UnknownName(
                f"signature {signature.key!r} of {signature.directory} has no {kind} {name!r}",
                fix=f"it has {', '.join(sorted(available))}",
            )


def _array(values: Any, column: str) -> Any:
    """Return an Arrow array as a NumPy array, with lists as dimensions."""
    import numpy as np
    import pyarrow as pa

    shape = []
    while True:
        if values.null_count:
            raise DataError(f"column {column!r} has a null", fix="df.na.drop() or df.na.fill(...)")
        if not (pa.types.is_list(values.type) or pa.types.is_large_list(values.type)):
            break
        lengths = np.unique(np.diff(values.offsets.to_numpy()))
        if len(lengths) > 1:
            raise DataError(
                f"column {column!r} has arrays of {lengths.min()} to {lengths.max()} values in one "
                "batch: a tensor requires equal lengths",
                fix="pad the arrays to one length",
            )
        shape.append(int(lengths[0]) if len(lengths) else 0)
        values = values.flatten()
    flat = values.to_numpy(zero_copy_only=False)
    return flat.reshape(-1, *shape) if shape else flat


def _fit_input(array: Any, spec: Input, column: str, tensor: str, first: int) -> Any:
    """Return rows with the shape and dtype of an input. `first` is the number of the first row."""
    from tfd_notebook.spark import casts

    own = array.shape[1:]
    shape = own if spec.shape is None else spec.shape[1:]
    try:
        if len(own) != len(shape) or any(
            size not in (None, has) for has, size in zip(own, shape, strict=True)
        ):
            array = array.reshape(len(array), *(-1 if size is None else size for size in shape))
    except ValueError:
        raise DataError(
            f"column {column!r} has rows of shape {array.shape[1:]}, but input {tensor!r} requires "
            f"{shape}"
        ) from None
    fitted, lost = casts.fit(array, None if spec.dtype == "string" else _dtype(spec.dtype))
    if lost is not None:
        row, *parts = lost.at
        name = ".".join(map(str, [column, *parts]))
        raise DataError(
            f"row {first + row}, column {name}: {lost.text} does not fit {spec.dtype}, the type of "
            f"input {tensor!r}",
            fix="cast the column",
        )
    return fitted


def _dtype(name: str) -> Any:
    """Return the NumPy dtype for the name of a TensorFlow dtype."""
    import numpy as np

    try:
        return np.dtype(name)
    except TypeError:  # such as bfloat16
        import tensorflow as tf

        return np.dtype(tf.as_dtype(name).as_numpy_dtype)


def _pad(array: Any, rows: int) -> Any:
    import numpy as np

    if len(array) == rows:
        return array
    return np.concatenate([array, np.repeat(array[-1:], rows - len(array), axis=0)])


def _column(values: Any, tensor: str, rows: int, kind: Any) -> Any:
    """Return a NumPy array as an Arrow array, with dimensions as lists."""
    import numpy as np
    import pyarrow as pa

    if values.shape[:1] != (rows,):
        raise DataError(
            f"output {tensor!r} has shape {values.shape} for {rows} rows: its first dimension is "
            "not the batch",
            fix="export a signature that returns one result per row",
        )
    sizes, kinds = values.shape[1:], [kind]
    for _ in sizes:
        kinds.append(kinds[-1].value_type)
    flat = values.reshape(-1)
    # Arrow has no bfloat16, which for NumPy is raw data.
    column = pa.array(flat.astype(np.float64) if flat.dtype.kind == "V" else flat, kinds[-1])
    count = values.size
    for size, outer in zip(reversed(sizes), reversed(kinds[:-1]), strict=True):
        count = count // size if size else int(np.prod(values.shape[: values.ndim - 1]))
        column = pa.ListArray.from_arrays(
            np.arange(count + 1, dtype=np.int32) * size, column, type=outer
        )
    return column
