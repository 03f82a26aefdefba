"""Arrow batches through a signature of a SavedModel, on the executors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfd_notebook._compat import pyspark as private
from tfd_notebook.errors import DataError, UnknownName, UsageError

#: Types of Spark's for what TensorFlow gives: none of them loses anything.
_TYPES = {
    "bool": "boolean",
    "string": "binary",
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), "double"),
    **dict.fromkeys(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"), "bigint"),
}
#: The model that this process used last, and how it is known.
_loaded: tuple[tuple[Any, ...], Any] | None = None


@dataclass(frozen=True)
class Signature:
    """Which signature of which SavedModel, and what goes in and comes out.

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
        Rows that are one call.
    """

    directory: str
    tags: tuple[str, ...]
    key: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    batch_size: int


@dataclass(frozen=True)
class Input:
    """What an input tensor takes.

    Parameters
    ----------
    dtype : str
    shape : tuple of int or None, optional
        None where any will do.
    """

    dtype: str
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True)
class Described:
    """What a signature takes and gives.

    Parameters
    ----------
    inputs : mapping of str to Input
    outputs : sequence of (str, str, int)
        Column, type of Spark's, and number of dimensions within a row, in the order of the
        tensors' names.
    """

    inputs: Mapping[str, Input]
    outputs: Sequence[tuple[str, str, int]]


def describe(wanted: Signature) -> Described:
    """Return what a signature takes and gives.

    Raises
    ------
    UsageError
        There is no such model, signature or tensor; it names those that are there.
    """
    function = _function(wanted)
    _, given = function.structured_input_signature
    results = function.structured_outputs
    _check(wanted, "input", wanted.inputs.values(), given)
    _check(wanted, "output", wanted.outputs, results)
    missing = given.keys() - set(wanted.inputs.values())
    if missing:
        raise UsageError(
            f"signature {wanted.key!r} of {wanted.directory} also needs "
            f"the input {', '.join(sorted(missing))}",
            fix="name the column for it in the input_mapping",
        )
    inputs = {
        tensor: Input(
            spec.dtype.name, None if spec.shape.rank is None else tuple(spec.shape.as_list())
        )
        for tensor, spec in given.items()
    }
    outputs = []
    for tensor, column in sorted(wanted.outputs.items()):
        spec = results[tensor]
        kind = _TYPES.get(spec.dtype.name)
        if kind is None or spec.shape.rank is None or spec.shape.rank < 1:
            raise UsageError(
                f"output {tensor!r} is {spec.dtype.name} of shape {spec.shape}, which is no "
                "column: a tensor whose first dimension is the batch is needed",
                fix="export a signature with such an output",
            )
        outputs.append((column, kind, spec.shape.rank - 1))
    return Described(inputs, outputs)


def run(
    wanted: Signature, inputs: Mapping[str, Input], schema: Any, batches: Iterable[Any]
) -> Iterator[Any]:
    """Yield the results of `batches`, for ``DataFrame.mapInArrow``.

    Parameters
    ----------
    wanted : Signature
    inputs : mapping of str to Input
    schema : object
        JSON values of the ``StructType`` of the results.
    batches : iterable of pyarrow.RecordBatch
        Columns in the order of ``wanted.inputs``.
    """
    import pyarrow as pa
    from pyspark.sql.types import StructType

    shape = private.arrow_schema(StructType.fromJson(schema))
    #: How many rows every call has, where the signature leaves no choice.
    fixed = next((one.shape[0] for one in inputs.values() if one.shape and one.shape[0]), None)
    rows = fixed or wanted.batch_size
    function = None
    for batch in batches:
        for start in range(0, batch.num_rows, rows):
            part = batch.slice(start, rows)
            # Before the model: Spark tries rows that do not fit four times, and TensorFlow is long
            # to import.
            fitted = {
                tensor: _fitted(_array(values, column), inputs[tensor], column, tensor)
                for (column, tensor), values in zip(
                    wanted.inputs.items(), part.columns, strict=True
                )
            }
            function = function or _function(wanted)
            results = _call(function, inputs, fitted, fixed or part.num_rows)
            arrays = [
                _column(results[tensor][: part.num_rows], tensor, part.num_rows, field.type)
                for tensor, field in zip(sorted(wanted.outputs), shape, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=shape)


def _call(
    function: Any, inputs: Mapping[str, Input], arrays: Mapping[str, Any], rows: int
) -> dict[str, Any]:
    """Return what a signature gives for arrays, of which it gets so many rows."""
    import tensorflow as tf

    tensors = {
        tensor: tf.constant(_padded(array, rows), inputs[tensor].dtype)
        for tensor, array in arrays.items()
    }
    return {name: value.numpy() for name, value in function(**tensors).items()}


def _function(wanted: Signature) -> Any:
    global _loaded
    _take_gpus()
    import tensorflow as tf

    file = f"{wanted.directory.rstrip('/')}/saved_model.pb"
    if not tf.io.gfile.exists(file):
        raise UsageError(
            f"there is no SavedModel in {wanted.directory} on the executor",
            fix="an export_dir that all hosts share, into which the chief has exported",
        )
    stat = tf.io.gfile.stat(file)
    known = (wanted.directory, wanted.tags, stat.mtime_nsec, stat.length)
    if _loaded is None or _loaded[0] != known:
        _loaded = None  # two of them may not fit
        try:
            _loaded = known, tf.saved_model.load(wanted.directory, list(wanted.tags))
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"{wanted.directory} cannot be loaded with the tags {', '.join(wanted.tags)}: "
                f"{error}"
            ) from None
    signatures = _loaded[1].signatures
    if wanted.key not in signatures:
        raise UnknownName(
            f"{wanted.directory} has no signature {wanted.key!r}",
            fix=f"it has {', '.join(signatures) or 'none: export the model with signatures'}",
        )
    return signatures[wanted.key]


def _take_gpus() -> None:
    """Have TensorFlow see the GPUs that Spark gave to this task, and no others."""
    import sys

    from pyspark import TaskContext

    context = TaskContext.get()
    given = context.resources().get("gpu") if context is not None else None
    if given is not None and "tensorflow" not in sys.modules:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(given.addresses)


def _check(wanted: Signature, kind: str, named: Iterable[str], there: Mapping[str, Any]) -> None:
    for name in named:
        if name not in there:
            raise UnknownName(
                f"signature {wanted.key!r} of {wanted.directory} has no {kind} {name!r}",
                fix=f"it has {', '.join(sorted(there))}",
            )


def _array(values: Any, column: str) -> Any:
    """Return an Arrow array as one of numpy's, lists as dimensions."""
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
                "batch, which no tensor can hold",
                fix="pad them to one length",
            )
        shape.append(int(lengths[0]) if len(lengths) else 0)
        values = values.flatten()
    flat = values.to_numpy(zero_copy_only=False)
    return flat.reshape(-1, *shape) if shape else flat


def _fitted(array: Any, wanted: Input, column: str, tensor: str) -> Any:
    """Return rows in the shape and type of an input."""
    import numpy as np

    own = array.shape[1:]
    shape = own if wanted.shape is None else wanted.shape[1:]
    try:
        if len(own) != len(shape) or any(
            size not in (None, has) for has, size in zip(own, shape, strict=True)
        ):
            array = array.reshape(len(array), *(-1 if size is None else size for size in shape))
    except ValueError:
        raise DataError(
            f"column {column!r} has rows of shape {array.shape[1:]}, and input {tensor!r} takes "
            f"{shape}"
        ) from None
    if wanted.dtype == "string":
        return array
    dtype = _dtype(wanted.dtype)
    if array.dtype == dtype:
        return array
    if array.dtype == object:
        raise DataError(f"column {column!r} is no column of numbers, which {tensor!r} takes")
    made = array.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(made, array):
        raise DataError(
            f"column {column!r} has values that {tensor!r} cannot hold, which takes {dtype}",
            fix="cast the column",
        )
    return made


def _dtype(name: str) -> Any:
    """Return numpy's type for one of TensorFlow's."""
    import numpy as np

    try:
        return np.dtype(name)
    except TypeError:  # such as bfloat16
        import tensorflow as tf

        return np.dtype(tf.as_dtype(name).as_numpy_dtype)


def _padded(array: Any, rows: int) -> Any:
    import numpy as np

    if len(array) == rows:
        return array
    return np.concatenate([array, np.repeat(array[-1:], rows - len(array), axis=0)])


def _column(values: Any, tensor: str, rows: int, kind: Any) -> Any:
    """Return one of numpy's arrays as one of Arrow's, dimensions as lists."""
    import numpy as np
    import pyarrow as pa

    if values.shape[:1] != (rows,):
        raise DataError(
            f"output {tensor!r} has shape {values.shape} for {rows} rows: its first dimension is "
            "not the batch",
            fix="export a signature that gives one result for each row",
        )
    sizes, kinds = values.shape[1:], [kind]
    for _ in sizes:
        kinds.append(kinds[-1].value_type)
    made = pa.array(values.reshape(-1), kinds[-1])
    count = values.size
    for size, outer in zip(reversed(sizes), reversed(kinds[:-1]), strict=True):
        count = count // size if size else int(np.prod(values.shape[: values.ndim - 1]))
        made = pa.ListArray.from_arrays(
            np.arange(count + 1, dtype=np.int32) * size, made, type=outer
        )
    return made
