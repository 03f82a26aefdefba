"""Checkpoints of a stream's position in its dataset."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tfd_notebook.errors import Unsupported, UsageError


def save(
    path: str, iterator: Any, element_spec: Any, elements: int, buffered: Iterable[Any]
) -> None:
    """Write a ``tf.train.Checkpoint`` of `iterator`, its position and the buffered elements.

    After the end of the data, `iterator` is None.

    Raises
    ------
    Unsupported
        TensorFlow cannot save the iterator. It reads from a tf.data service, or its pipeline has
        external state (a generator, a hash table).
    """
    import tensorflow as tf

    flat = [
        tf.io.serialize_tensor(tensor).numpy()
        for element in buffered
        for tensor in tf.nest.flatten(element, expand_composites=True)
    ]
    checkpoint = tf.train.Checkpoint(
        **({} if iterator is None else {"iterator": iterator}),
        spec=tf.Variable(repr(element_spec)),
        elements=tf.Variable(elements, dtype=tf.int64),
        buffered=tf.Variable(tf.constant(flat, dtype=tf.string, shape=[len(flat)])),
    )
    try:
        checkpoint.write(path)
    except (tf.errors.UnimplementedError, tf.errors.FailedPreconditionError) as error:
        raise Unsupported(
            f"saving the position in this dataset failed: {error.message}",
            fix="save the number of elements read, and skip() them in a dataset of fixed order",
        ) from error


def load(path: str, iterator: Any) -> tuple[int, list[Any], bool]:
    """Restore `iterator` from `save`.

    Return its position, the buffered elements, and whether no data follows them. In that case,
    `iterator` is unchanged.

    Raises
    ------
    UsageError
        The file is not a checkpoint of a stream, or one of another dataset.
    """
    import tensorflow as tf

    try:
        reader = tf.train.load_checkpoint(path)
        elements = int(reader.get_tensor(_key("elements")))
        texts = reader.get_tensor(_key("buffered"))
        saved = reader.get_tensor(_key("spec")).decode()
        ended = not any(key.startswith("iterator/") for key in reader.get_variable_to_shape_map())
    except (tf.errors.OpError, TypeError, ValueError) as error:
        raise UsageError(f"{path!r} is not a checkpoint of a stream: {error}") from error
    spec = iterator.element_spec
    fix = "create the stream from the dataset of the checkpoint, with the same stages"
    if saved != repr(spec):
        raise UsageError(
            f"{path!r} is a position in a dataset of elements {saved}, and those of this stream "
            f"are {spec}",
            fix=fix,
        )
    if not ended:
        try:
            tf.train.Checkpoint(iterator=iterator).read(path).expect_partial()
        except tf.errors.OpError as error:
            raise UsageError(f"{path!r} is a position in another dataset", fix=fix) from error
    parts = tf.nest.flatten(spec, expand_composites=True)
    tensors = [
        tf.io.parse_tensor(text, parts[number % len(parts)].dtype)
        for number, text in enumerate(texts)
    ]
    buffered = [
        tf.nest.pack_sequence_as(spec, tensors[i : i + len(parts)], expand_composites=True)
        for i in range(0, len(tensors), len(parts))
    ]
    return elements, buffered, ended


def _key(name: str) -> str:
    return f"{name}/.ATTRIBUTES/VARIABLE_VALUE"
