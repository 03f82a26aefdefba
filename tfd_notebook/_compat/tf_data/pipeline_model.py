"""The stages of a pipeline, as the user wrote them and as TensorFlow's model counts them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tfd_notebook._compat.tf_data import autograph, py_functions, source_locations
from tfd_notebook._compat.tf_data.elements import static_bytes

#: Classes that do not count as stages.
_TRANSPARENT = ("Options", "Watched", "Variant", "AssertCardinality", "Restructured")

#: Stages that keep the number of elements.
_ONE_TO_ONE = ("Map", "Prefetch", "Shuffle", *_TRANSPARENT)

#: Stages that read files.
READERS = ("TFRecord", "TextLine", "FixedLengthRecord")

#: Users' names of stages whose class has another name.
_USER_NAMES = {
    "CSV": "CsvDataset",
    "DenseToRagged": "ragged_batch",
    "List": "from_list",
    "MatchingFiles": "list_files",
    "SparseTensorSlice": "from_tensor_slices",
    "Sql": "SqlDataset",
    "TensorSlice": "from_tensor_slices",
    "Tensor": "from_tensors",
    "PaddedBatch": "padded_batch",
    "CopyToDevice": "copy_to_device",
    "MapOnGpu": "map_on_gpu",
    "DataService": "distribute",
    "DirectedInterleave": "sample_from_datasets",
    "LegacyParallelInterleave": "parallel_interleave",
}

#: Attributes of a dataset with the number that describes a stage.
_NUMBERS = ("_batch_size", "_buffer_size", "_count", "_size")

_T = TypeVar("_T")


def inputs_first(
    ends: Iterable[_T], inputs: Callable[[_T], Iterable[_T]], key: Callable[[_T], Hashable] = id
) -> list[_T]:
    """Return `ends` and all before them, each once and after its inputs.

    Parameters
    ----------
    ends : iterable
    inputs : callable
        Returns the inputs of one of them. It is called once for each.
    key : callable
        Returns a key that is equal for the same ones. Default: the identity.
    """
    found: dict[Hashable, _T] = {}
    todo = [(each, False) for each in ends]
    while todo:
        each, ready = todo.pop()
        if key(each) in found:
            continue
        if ready:
            found[key(each)] = each
        else:
            todo.append((each, True))
            todo += [(before, False) for before in inputs(each)]
    return list(found.values())


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of a pipeline, as the user wrote it.

    Parameters
    ----------
    kind : str
        TensorFlow's name without prefixes and versions: ``"Map"``, ``"Batch"``.
    label : str
        As in the code: ``"map(decode)"``, ``"shuffle(1000)"``.
    site : str
        Source location: ``"In[3], line 4"``. Empty if unknown.
    inputs : tuple of Stage
        Empty for a source.
    python : bool
        Whether it runs Python functions (``py_function``, ``numpy_function``, a generator).
    service : object
        The options of a dataset that reads through a tf.data service of tfd.
    dataset : tf.data.Dataset or None
    number : int, optional
        Its size or count, if it has a known one.
    parallel : bool
        Whether the user requested several threads.
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
        """The label with its source location."""
        return f"{self.label} ({self.site})" if self.site else self.label

    @property
    def is_source(self) -> bool:
        """True if it reads data, or has no input."""
        return not self.inputs or self.kind in READERS

    def walk(self) -> Iterator[Stage]:
        """Yield this stage and all before it, each once and before its inputs."""
        yield from reversed(inputs_first([self], lambda stage: stage.inputs))


#: A dataset, and the datasets in place of its inputs, by their ``id``.
_Part = tuple[Any, Mapping[int, Any]]
_NOTHING: Mapping[int, Any] = {}


def stages_of(dataset: Any, keep: bool = True) -> Stage:
    """Return the last stage of `dataset`. Stages refer to their datasets if `keep` is true.

    Each dataset is one stage, also if several others read it.
    """
    described: dict[Hashable, tuple[Stage, list[_Part]]] = {}

    def key(part: _Part) -> Hashable:
        return id(part[0]), id(part[1])

    def inputs(part: _Part) -> list[_Part]:
        stage, datasets = _described(part[0], keep)
        before = [_visible(each, part[1]) for each in datasets]
        described[key(part)] = stage, before
        return before

    last = _visible(dataset, _NOTHING)
    stages: dict[Hashable, Stage] = {}
    for part in inputs_first([last], inputs, key):
        stage, parts = described[key(part)]
        before = tuple(stages[key(each)] for each in parts)
        stages[key(part)] = dataclasses.replace(stage, inputs=before)
    return stages[key(last)]


def _visible(dataset: Any, replaced: Mapping[int, Any]) -> _Part:
    """Return the dataset that counts as a stage in place of `dataset`."""
    while True:
        dataset = getattr(dataset, "_dataset", dataset)  # one of TensorFlow 1 wraps another one
        if id(dataset) in replaced:
            dataset, replaced = replaced[id(dataset)], _NOTHING
        elif (original := getattr(dataset, "original", None)) is not None:
            dataset, replaced = original, dataset.replaced
        elif (
            getattr(dataset, "_tfd_service", None) is None
            and kind_of(type(dataset).__name__) in _TRANSPARENT
            and len(inputs := dataset._inputs()) == 1
        ):
            (dataset,) = inputs
        else:
            return dataset, replaced


def _described(dataset: Any, keep: bool) -> tuple[Stage, tuple[Any, ...]]:
    """Return the stage of `dataset` without its inputs, and the datasets that it reads."""
    used = getattr(dataset, "_tfd_service", None)
    kind = kind_of(type(dataset).__name__)
    inputs = tuple(dataset._inputs())
    if used is not None:
        kind, inputs = "DataService", ()
    functions = [] if used is not None else list(_functions(dataset))
    generator = _generator(functions) if kind == "FlatMap" else None
    python = generator is not None or any(map(_runs_python, functions))
    if generator is not None:
        label, inputs, kind = f"from_generator({_display_name(generator)})", (), "Generator"
    else:
        label = _label(kind, source_locations.call_of(dataset), _argument(dataset, functions))
    stage = Stage(
        kind=kind,
        label=label,
        site=source_locations.named(source_locations.site_of(dataset) or _first_line(functions)),
        python=python,
        service=used if keep else None,
        dataset=dataset if keep else None,
        number=_number(dataset),
        parallel="Parallel" in type(dataset).__name__,
    )
    return stage, inputs


def nodes_of(definition: Any, last: Stage) -> dict[str, Stage]:
    """Return the stage of each node of a graph that has one, by the node's name.

    Parameters
    ----------
    definition : tf.compat.v1.GraphDef
        The graph of a dataset.
    last : Stage
        The dataset's last stage.
    """
    nodes = {node.name: node for node in definition.node}

    def before(node: Any) -> list[Any]:
        names = (name.split(":")[0] for name in node.input if not name.startswith("^"))
        return [nodes[name] for name in names if "Dataset" in nodes[name].op]

    found: dict[str, Stage] = {}
    ends = [node for node in definition.node if node.op == "_Retval"]
    todo = [(nodes[end.input[0].split(":")[0]], last) for end in ends]
    visited = set()
    while todo:
        node, stage = todo.pop()
        if node.name in visited:
            continue
        visited.add(node.name)
        kind = kind_of(node.op)
        reads = kind in ("FlatMap", "Interleave") and stage.kind in (*READERS, "Generator")
        converts = kind == "Map" and stage.kind == "DenseToRagged"  # before ragged_batch
        if kind == stage.kind or reads or converts:
            found[node.name] = stage
            todo += list(zip(before(node), stage.inputs, strict=False))
        else:  # a node without a stage: options
            todo += [(each, stage) for each in before(node)[:1]]
    return found


def delivery_of(dataset: Any) -> Any:
    """Return the expected result of an epoch of `dataset` through a service of tfd, or None.

    Its cardinality is unknown after stages that change the number of elements.
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
    """The units in which sharding distributes a source to data workers.

    Parameters
    ----------
    count : int
    source : str
        The name of the source's stage, or of the first one if there are several.
    kind : str
        The kind of that stage.
    """

    count: int
    source: str
    kind: str


def splits_of(dataset: Any, by_file: bool = False) -> Splits | None:
    """Return the splits of the source of `dataset`, or None if their number is unknown.

    A repetition creates more splits. With `by_file`, files are assigned before they are read, and a
    repetition of what they contain does not count.
    """
    stages = list(stages_of(dataset).walk())
    sources = [stage for stage in stages if not stage.inputs]
    reads = (*READERS, "Interleave", "FlatMap") if by_file else ()
    counts = {id(source): _count_of(source) for source in sources}
    reading: dict[int, bool] = {}
    for stage in reversed(stages):
        before = list(map(id, stage.inputs))
        reading[id(stage)] = stage.kind in reads or any(map(reading.__getitem__, before))
        if before:  # each of several readers of one dataset has its own splits
            counts[id(stage)] = sum(map(counts.__getitem__, before))
    repeats = any(stage.kind == "Repeat" and not reading[id(stage)] for stage in stages)
    if repeats or any(counts[id(source)] < 0 for source in sources):
        return None
    # The source of a reader is its file names, but the user only wrote the reader.
    named = next((stage for stage in stages if stage.kind in READERS), sources[-1])
    return Splits(counts[id(stages[0])], named.name, named.kind)


def _count_of(source: Stage) -> int:
    """Return the number of splits of a source. Negative if it is unknown."""
    if source.kind == "Generator":
        return 1  # TensorFlow implements it as one element and a flat_map
    known = source.kind in ("Range", "TensorSlice", "SparseTensorSlice", "Tensor")
    return int(source.dataset.cardinality()) if known else -1


@dataclass(frozen=True)
class Shares:
    """The units that a fixed division gives to data workers: at least one of each source to each.

    Parameters
    ----------
    unit : {"file", "element"}
    counts : tuple of int
        The number of units of each source whose number is known and finite. Never empty. Without
        empty sources, which all data workers can share.
    complete : bool
        Whether these are all sources.
    """

    unit: str
    counts: tuple[int, ...]
    complete: bool = True


def shares_of(dataset: Any, mode: str) -> Shares | None:
    """Return the units that a static `mode` divides, or None if they are unknown or infinite.

    Parameters
    ----------
    dataset : tf.data.Dataset
    mode : str
        One of `tfd_notebook.net.tf_messages.SHARDING_POLICIES`.
    """
    found: list[int] | None = None
    if mode in ("FILE", "FILE_OR_DATA"):
        found = _file_counts(stages_of(dataset))
    unit = "file"
    if mode == "DATA" or (mode == "FILE_OR_DATA" and found is None):
        unit, found = "element", [int(dataset.cardinality())]
    known = tuple(count for count in found or () if count > 0)
    return Shares(unit, known, len(known) == len(found or ())) if known else None


def _file_counts(stage: Stage) -> list[int] | None:
    """Return the number of files of each source. None if a source reads no files.

    TensorFlow's sharding by file divides the input of the stage that reads them.
    """
    if stage.kind in READERS:
        names: Any = getattr(stage.dataset, "_filenames", None)
        return [int(names.cardinality()) if hasattr(names, "cardinality") else -1]
    if stage.kind in ("Interleave", "FlatMap"):
        nodes = itertools.chain(*map(_nodes, _functions(stage.dataset)))
        if any(kind_of(node.op) in READERS for node in nodes):
            return [int(stage.inputs[0].dataset.cardinality())]
    if len(stage.inputs) > 1 and stage.kind not in ("Concatenate", "Zip"):
        return [-1]
    counts = [_file_counts(each) for each in stage.inputs]
    if not counts or None in counts:
        return None
    return [count for each in counts for count in each or ()]


@dataclass(frozen=True)
class Buffer:
    """A stage that keeps elements in memory.

    Parameters
    ----------
    name : str
    elements : int, optional
        Maximum number of its elements. None if unknown.
    bytes : int, optional
        Size of these elements. None if unknown.
    """

    name: str
    elements: int | None
    bytes: int | None

    @property
    def words(self) -> str:
        """A description of the buffer with its size."""
        count = "all elements" if self.elements is None else f"{self.elements:,} elements"
        size = "" if self.bytes is None else f", {self.bytes / 1e9:.2g} GB"
        return f"{self.name}: it holds {count}{size}"


def buffers_of(dataset: Any) -> tuple[Buffer, ...]:
    """Return the shuffle buffers and in-memory caches of `dataset`."""
    buffers = []
    for stage in stages_of(dataset).walk():
        if stage.kind == "Shuffle" or (stage.kind == "Cache" and not _file_of(stage.dataset)):
            elements = stage.number if stage.kind == "Shuffle" else None
            count = int(stage.inputs[0].dataset.cardinality())
            if count >= 0:
                elements = count if elements is None else min(count, elements)
            each = static_bytes(stage.dataset.element_spec)
            size = None if each is None or elements is None else each * elements
            buffers.append(Buffer(stage.name, elements, size))
    return tuple(buffers)


def _file_of(cache: Any) -> str:
    import tensorflow as tf

    value = tf.get_static_value(getattr(cache, "_filename", None))
    return "" if value is None else value.decode() if isinstance(value, bytes) else str(value)


@functools.cache
def kind_of(name: str) -> str:
    """Return the kind of a class or of a node: ``_ParallelMapDataset`` and ``ParallelMapV2``."""
    name = name.lstrip("_").removeprefix("Experimental")
    name = re.sub(r"(Dataset)?(V\d+)?$", "", name)
    return re.sub(r"^(Parallel|Forever|Finite)(?=[A-Z])", "", name)


def user_name(kind: str) -> str:
    """Return the name of a kind of stages in the user's code, such as ``"take_while"``."""
    import tensorflow as tf

    if kind in _USER_NAMES:
        return _USER_NAMES[kind]
    if hasattr(tf.data, f"{kind}Dataset"):
        return f"{kind}Dataset"
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()


def _label(kind: str, call: str, argument: str) -> str:
    """Return the label of a stage. `call` is the method in the user's code, if known."""
    name = user_name(kind)
    if call and (kind == "DirectedInterleave" or (kind, call) == ("Zip", "enumerate")):
        return f"{call}()"
    return f"{name}({argument})" + (f" of {call}()" if call not in ("", name) else "")


def _argument(dataset: Any, functions: list[Any]) -> str:
    if functions:
        return _display_name(_python_function(functions[0]))
    number = _number(dataset)
    return "" if number is None else str(number)


def _number(dataset: Any) -> int | None:
    import tensorflow as tf

    for name in _NUMBERS:
        value = getattr(dataset, name, None)
        if value is None:
            continue  # most of them; is_tensor is slow for other values than tensors
        number = tf.get_static_value(value) if tf.is_tensor(value) else None
        if number is not None and number.ndim == 0:
            return int(number) if number >= 0 else None
    return None


def _functions(dataset: Any) -> Iterator[Any]:
    yield from dataset._functions()


def _python_function(function: Any) -> Any:
    """Return the user's function inside TensorFlow's wrapper."""
    return py_functions.user_function(getattr(function, "_func", function))


def _display_name(function: Any) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "lambda" if name == "<lambda>" else name


def _first_line(functions: list[Any]) -> tuple[str, int] | None:
    code = getattr(_python_function(functions[0]), "__code__", None) if functions else None
    if code is None or _is_tensorflows(code):
        return None
    return code.co_filename, code.co_firstlineno


def _is_tensorflows(code: types.CodeType) -> bool:
    return "tensorflow/" in code.co_filename


def _generator(functions: list[Any]) -> Any:
    """Return the user's generator if a flat_map implements from_generator, else None."""
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
    """Yield the tokens of the Python functions that a traced function calls."""
    for node in _nodes(function):
        if node.op in py_functions.OPS:
            yield node.attr["token"].s.decode()


def _nodes(function: Any) -> Iterator[Any]:
    """Yield the nodes of a traced function and of those that it calls."""
    graph = getattr(getattr(function, "function", None), "graph", None)
    if graph is None:
        return
    definition = graph.as_graph_def()
    bodies = [definition.node, *(each.node_def for each in definition.library.function)]
    for body in bodies:
        yield from body


def running_function(last: Stage) -> tuple[Stage, str, Any] | None:
    """Return the stage whose Python function runs now, the function's line, and its frame."""
    for frames in py_functions.running():
        called = {frame.f_code for frame in frames}
        for stage in last.walk():
            if not called.isdisjoint(_codes(stage)):
                frame = next(filter(source_locations.is_users, frames), frames[0])
                site = source_locations.named((frame.f_code.co_filename, frame.f_lineno))
                return stage, f"{frame.f_code.co_name} ({site})", frame
    return None


def calls(last: Stage, function: str, file: str) -> bool:
    """Return True if a stage calls the Python function of this name and file."""
    return any(
        autograph.definition(code)[::2] == (file, function)
        for stage in last.walk()
        for code in _codes(stage)
    )


def _codes(stage: Stage) -> set[types.CodeType]:
    """Return the code of the Python functions that a stage calls, and of their wrappers."""
    if not stage.python:
        return set()
    tokens = (token for function in _functions(stage.dataset) for token in _tokens(function))
    functions = (
        each for token in tokens for each in py_functions.unwrapped(py_functions.lookup(token))
    )
    called = (each if hasattr(each, "__code__") else type(each).__call__ for each in functions)
    codes = (each.__code__ for each in called if hasattr(each, "__code__"))
    return {code for code in codes if not _is_tensorflows(code)}


@dataclass(frozen=True)
class Node:
    """One node of TensorFlow's model of an iterator, with totals since its creation.

    Parameters
    ----------
    id : int
    kind : str
        As in `Stage`.
    asynchronous : bool
        Whether its inputs run in separate threads.
    inputs : tuple of int
    elements : int
        Number of elements that it produced.
    seconds : float
        Busy time of all its threads, without that of its inputs.
    parallelism : float
        Number of its threads, 1 for most kinds.
    buffered : int
        Number of elements in its buffer.
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
    """Return the model of an iterator's resource, or None if TensorFlow has none."""
    import tensorflow as tf
    from tensorflow.core.framework import model_pb2

    model_op = getattr(tf.raw_ops, "IteratorGetModelProto", None)
    if model_op is None:
        return None
    try:
        text = model_op(iterator=resource).numpy()
    except tf.errors.OpError:
        return None
    model = model_pb2.ModelProto.FromString(text)
    nodes = {}
    for key, node in model.nodes.items():
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
    return Model(nodes, model.output)
