"""What a pipeline is made of: as its user wrote it, and as TensorFlow's model of it counts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tfd_notebook._compat.tf_data import py_functions, source_locations

#: Classes that are no stage of their own.
_TRANSPARENT = ("Options", "Watched", "Variant", "AssertCardinality")

#: Stages behind which as many elements come as before.
_ONE_TO_ONE = ("Map", "Prefetch", "Shuffle", *_TRANSPARENT)

#: Stages that read files.
READERS = ("TFRecord", "TextLine", "FixedLengthRecord")

#: What users call the stages whose class has another name.
_WORDS = {
    "TensorSlice": "from_tensor_slices",
    "Tensor": "from_tensors",
    "PaddedBatch": "padded_batch",
    "CopyToDevice": "copy_to_device",
    "MapOnGpu": "map_on_gpu",
    "DataService": "distribute",
    "DirectedInterleave": "sample_from_datasets",
}

#: Attributes of a dataset that hold the number by which a stage is known.
_NUMBERS = ("_batch_size", "_buffer_size", "_count", "_size")


@dataclass(frozen=True, eq=False)
class Stage:
    """One step of a pipeline, as its user wrote it.

    Parameters
    ----------
    kind : str
        TensorFlow's name for it without prefixes and versions: ``"Map"``, ``"Batch"``.
    label : str
        As in the code: ``"map(decode)"``, ``"shuffle(1000)"``.
    site : str
        Where it was made: ``"In[3], line 4"``, empty where that is not known.
    inputs : tuple of Stage
        Nothing for a source.
    python : bool
        Whether it runs Python functions (``py_function``, ``numpy_function``, a generator).
    service : object
        For a dataset through a tf.data service of ours, what it was made from.
    dataset : tf.data.Dataset or None
    number : int, optional
        The size or count that it was given, if it has one that is known.
    parallel : bool
        Whether it was asked to work in several threads.
    """

    kind: str
    label: str
    site: str
    inputs: tuple[Stage, ...] = ()
    python: bool = False
    service: Any = None
    dataset: Any = field(default=None, repr=False)
    number: int | None = None
    parallel: bool = False

    @property
    def name(self) -> str:
        """The label with its place."""
        return f"{self.label} ({self.site})" if self.site else self.label

    @property
    def is_source(self) -> bool:
        """Whether data begins here: it reads, or has no input."""
        return not self.inputs or self.kind in READERS

    def walk(self) -> Iterator[Stage]:
        """Give this stage and all before it, the last one first."""
        yield self
        for stage in self.inputs:
            yield from stage.walk()


def stages_of(dataset: Any, keep: bool = True) -> Stage:
    """Return the last stage of `dataset`, with those before it; they refer to it with `keep`."""
    dataset = getattr(dataset, "_dataset", dataset)  # of TensorFlow 1, around a dataset of today
    used = getattr(dataset, "_tfd_service", None)
    kind = kind_of(type(dataset).__name__)
    inputs = dataset._inputs()
    if used is None and len(inputs) == 1 and kind in _TRANSPARENT:
        return stages_of(inputs[0], keep)
    if used is not None:
        kind, inputs = "DataService", ()
    functions = [] if used is not None else list(_functions(dataset))
    generator = _generator(functions) if kind == "FlatMap" else None
    python = generator is not None or any(map(_runs_python, functions))
    if generator is not None:
        label, inputs, kind = f"from_generator({_called(generator)})", (), "Generator"
    else:
        label = f"{_word(kind)}({_argument(dataset, functions)})"
    return Stage(
        kind=kind,
        label=label,
        site=source_locations.named(source_locations.site_of(dataset) or _first_line(functions)),
        inputs=tuple(stages_of(each, keep) for each in inputs),
        python=python,
        service=used if keep else None,
        dataset=dataset if keep else None,
        number=_number(dataset),
        parallel="Parallel" in type(dataset).__name__,
    )


def delivery_of(dataset: Any) -> Any:
    """Return what a pass of `dataset` should deliver, if it reads through a service of ours.

    Behind stages that change the number of elements only the job is known.
    """
    counts = True
    while (used := getattr(dataset, "_tfd_service", None)) is None:
        inputs = dataset._inputs()
        if len(inputs) != 1:
            return None
        counts = counts and kind_of(type(dataset).__name__) in _ONE_TO_ONE
        (dataset,) = inputs
    return used.delivery if counts else dataclasses.replace(used.delivery, cardinality=-1)


@dataclass(frozen=True)
class Splits:
    """The units in which dynamic sharding gives a source to data workers.

    Parameters
    ----------
    count : int
    source : str
        The name of the source's stage; of several, of the first one.
    kind : str
        That stage's kind.
    """

    count: int
    source: str
    kind: str


def splits_of(dataset: Any) -> Splits | None:
    """Return the splits of the source of `dataset`; None if their number is not known."""
    stages = list(stages_of(dataset).walk())
    sources = [stage for stage in stages if not stage.inputs]
    counts = [
        1  # TensorFlow makes it of one element and a flat_map
        if stage.kind == "Generator"
        else int(stage.dataset.cardinality())
        if stage.kind in ("Range", "TensorSlice", "SparseTensorSlice", "Tensor")
        else -1
        for stage in sources
    ]
    again = any(stage.kind == "Repeat" for stage in stages)
    if again or min(counts) < 0:
        return None
    # The file names of a reader are its source, and the reader is what the user wrote.
    named = next((stage for stage in stages if stage.kind in READERS), sources[-1])
    return Splits(sum(counts), named.name, named.kind)


@dataclass(frozen=True)
class Buffer:
    """A stage that holds elements in memory.

    Parameters
    ----------
    name : str
    elements : int, optional
        Maximum number of elements that it holds; None if that is not known.
    bytes : int, optional
        Size of these elements; None if that is not known.
    """

    name: str
    elements: int | None
    bytes: int | None

    @property
    def words(self) -> str:
        """The buffer with its size."""
        count = "all elements" if self.elements is None else f"{self.elements:,} elements"
        size = "" if self.bytes is None else f", {self.bytes / 1e9:.2g} GB"
        return f"{self.name}: it holds {count}{size}"


def buffers_of(dataset: Any) -> tuple[Buffer, ...]:
    """Return the shuffle buffers and caches in memory of `dataset`."""
    found = []
    for stage in stages_of(dataset).walk():
        if stage.kind == "Shuffle" or (stage.kind == "Cache" and not _file_of(stage.dataset)):
            elements = stage.number if stage.kind == "Shuffle" else None
            count = int(stage.inputs[0].dataset.cardinality())
            if count >= 0:
                elements = count if elements is None else min(count, elements)
            each = bytes_of(stage.dataset.element_spec)
            size = None if each is None or elements is None else each * elements
            found.append(Buffer(stage.name, elements, size))
    return tuple(found)


def _file_of(cache: Any) -> str:
    import tensorflow as tf

    value = tf.get_static_value(getattr(cache, "_filename", None))
    return "" if value is None else value.decode() if isinstance(value, bytes) else str(value)


def bytes_of(spec: Any) -> int | None:
    """Return the bytes of an element; None if its shape is not known."""
    import tensorflow as tf

    total = 0
    for one in tf.nest.flatten(spec):
        count = one.shape.num_elements() if isinstance(one, tf.TensorSpec) else None
        if count is None or one.dtype in (tf.string, tf.variant, tf.resource):
            return None
        total += int(count) * int(one.dtype.size)
    return total


def kind_of(name: str) -> str:
    """Return the kind of a class or of a node: ``_ParallelMapDataset`` and ``ParallelMapV2``."""
    name = re.sub(r"(Dataset)?(V\d+)?$", "", name.lstrip("_"))
    return re.sub(r"^(Parallel|Forever|Finite)(?=[A-Z])", "", name)


def _word(kind: str) -> str:
    import tensorflow as tf

    if kind in _WORDS:
        return _WORDS[kind]
    if hasattr(tf.data, f"{kind}Dataset"):
        return f"{kind}Dataset"
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()


def _argument(dataset: Any, functions: list[Any]) -> str:
    if functions:
        return _called(_written(functions[0]))
    number = _number(dataset)
    return "" if number is None else str(number)


def _number(dataset: Any) -> int | None:
    import tensorflow as tf

    for name in _NUMBERS:
        value = getattr(dataset, name, None)
        number = tf.get_static_value(value) if tf.is_tensor(value) else None
        if number is not None and number.ndim == 0:
            return int(number) if number >= 0 else None
    return None


def _functions(dataset: Any) -> Iterator[Any]:
    yield from dataset._functions()


def _written(function: Any) -> Any:
    """Return the function that the user wrote, out of TensorFlow's wrapper."""
    return py_functions.user_function(getattr(function, "_func", function))


def _called(function: Any) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "lambda" if name == "<lambda>" else name


def _first_line(functions: list[Any]) -> tuple[str, int] | None:
    code = getattr(_written(functions[0]), "__code__", None) if functions else None
    if code is None or "tensorflow/" in code.co_filename:
        return None
    return code.co_filename, code.co_firstlineno


def _generator(functions: list[Any]) -> Any:
    """Return the user's generator if a flat_map is what from_generator made, else None."""
    for function in functions:
        inner = getattr(function, "_func", None)
        if getattr(inner, "__name__", "") == "flat_map_fn" and "from_generator" in getattr(
            getattr(inner, "__code__", None), "co_filename", ""
        ):
            for token in _tokens(function):
                return py_functions.user_function(py_functions.lookup(token))
            return inner
    return None


def _runs_python(function: Any) -> bool:
    return next(_tokens(function), None) is not None


def _tokens(function: Any) -> Iterator[str]:
    """Give the tokens of the Python functions that a traced function calls."""
    graph = getattr(getattr(function, "function", None), "graph", None)
    if graph is None:
        return
    definition = graph.as_graph_def()
    bodies = [definition.node, *(each.node_def for each in definition.library.function)]
    for body in bodies:
        for node in body:
            if node.op in py_functions.OPS:
                yield node.attr["token"].s.decode()


@dataclass(frozen=True)
class Node:
    """One node of TensorFlow's model of an iterator; totals since the iterator was made.

    Parameters
    ----------
    id : int
    kind : str
        As in `Stage`.
    asynchronous : bool
        Whether what is before it runs in threads of its own.
    inputs : tuple of int
    elements : int
        Elements that it gave.
    seconds : float
        Time that it worked, all its threads together, without what is before it.
    parallelism : float
        Threads that do its work; 1 for most.
    buffered : int
        Elements that wait in it.
    """

    id: int
    kind: str
    asynchronous: bool
    inputs: tuple[int, ...]
    elements: int
    seconds: float
    parallelism: float
    buffered: int


@dataclass(frozen=True)
class Model:
    """TensorFlow's model of an iterator at one moment."""

    nodes: dict[int, Node]
    output: int


def model_of(resource: Any) -> Model | None:
    """Return the model of an iterator's resource; None where TensorFlow keeps none."""
    import tensorflow as tf
    from tensorflow.core.framework import model_pb2

    model_op = getattr(tf.raw_ops, "IteratorGetModelProto", None)
    if model_op is None:
        return None
    try:
        text = model_op(iterator=resource).numpy()
    except tf.errors.OpError:
        return None
    found = model_pb2.ModelProto.FromString(text)
    nodes = {}
    for key, node in found.nodes.items():
        parallel = [p.value for p in node.parameters if p.name == "parallelism"]
        nodes[key] = Node(
            id=key,
            kind=kind_of(node.name),
            asynchronous="ASYNC" in model_pb2.NodeClass.Name(node.node_class),
            inputs=tuple(node.inputs),
            elements=node.num_elements,
            seconds=node.processing_time / 1e9,
            parallelism=max(1.0, *parallel) if parallel else 1.0,
            buffered=node.buffered_elements,
        )
    return Model(nodes, found.output)
