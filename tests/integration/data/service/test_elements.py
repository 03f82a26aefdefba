"""The types of elements that a service delivers, with child processes and in this process."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attr
import numpy as np
import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tfd_notebook.errors import NotSerializable, UsageError

pytestmark = [
    pytest.mark.integration,
    # TensorFlow warns about None and extension types, whose specifications it encodes.
    pytest.mark.filterwarnings("ignore:Encoding a StructuredValue:UserWarning"),
]

Dataset = tf.data.Dataset
Optional = tf.experimental.Optional
Range = Dataset.range

Point = collections.namedtuple("Point", "x y")


@attr.s
class Attributes:
    x = attr.ib()


class Registered(tf.experimental.BatchableExtensionType):
    __name__ = "tfd_notebook.tests.Registered"
    values: tf.RaggedTensor
    label: str = "label"


class Unregistered(tf.experimental.ExtensionType):
    value: tf.Tensor


def ragged() -> Any:
    return tf.ragged.constant([[1, 2], [], [3]])


def sparse(i: Any) -> Any:
    return tf.SparseTensor([[0, 1]], [i], (2, 2))


def array(i: Any) -> Any:
    return tf.TensorArray(tf.int64, 2, element_shape=()).unstack([i, i + 1])


def strings(i: Any) -> Any:
    growing = tf.TensorArray(tf.string, 0, dynamic_size=True, infer_shape=False)
    return growing.write(0, ["a", "b"]).write(1, [tf.strings.as_string(i)])


def slices(i: Any) -> Any:
    return tf.IndexedSlices(tf.fill([1, 2], i), tf.fill([1], i), tf.constant([4, 2], tf.int64))


def variant(i: Any) -> Any:
    return tf.raw_ops.TensorListFromTensor(tensor=[i], element_shape=tf.constant([], tf.int32))


#: Types that are one scalar variant tensor, like a compressed element.
SINGLE: dict[str, Callable[[], tf.data.Dataset]] = {
    "ragged": lambda: Dataset.from_tensors(ragged()),
    "ragged of strings": lambda: Dataset.from_tensors(tf.ragged.constant([["a"], ["b", "c"]])),
    "ragged with short splits": lambda: Dataset.from_tensors(
        tf.ragged.constant([[1.5], []], row_splits_dtype=tf.int32)
    ),
    "rows of ragged": lambda: Dataset.from_tensor_slices(tf.ragged.constant([[[1], []], [[2, 3]]])),
    "batch that a function returns": lambda: Dataset.from_tensors(ragged()).batch(1).map(as_is),
    "optional": lambda: Range(2).map(Optional.from_value),
    "empty optional": lambda: Range(2).map(lambda i: Optional.empty(tf.TensorSpec((), tf.int64))),
    "optional of ragged": lambda: Range(2).map(lambda i: Optional.from_value(ragged())),
    "optional of sparse": lambda: Range(2).map(lambda i: Optional.from_value(sparse(i))),
    "optional of optional": lambda: Range(2).map(
        lambda i: Optional.from_value(Optional.from_value({"a": i}))
    ),
    "array": lambda: Range(2).map(array),
    "array of strings": lambda: Range(2).map(strings),
    "variant": lambda: Range(2).map(variant),
    "ragged shape": lambda: Dataset.from_tensors(
        tf.experimental.DynamicRaggedShape.from_tensor(ragged())
    ),
    "ragged in a tuple": lambda: Dataset.from_tensors((ragged(),)),
    "ragged and None": lambda: Dataset.from_tensors((ragged(), None)),
    "array in a dict": lambda: Range(2).map(lambda i: {"a": {"b": array(i)}}),
}

TYPES: dict[str, Callable[[], tf.data.Dataset]] = {
    **SINGLE,
    "tensor without elements": lambda: Dataset.from_tensors(tf.zeros((2, 0, 3))),
    "strings without elements": lambda: Dataset.from_tensors(tf.constant([], tf.string)),
    "tensor of unknown shape": lambda: Dataset.from_generator(
        lambda: iter([1, [2, 3]]), output_signature=tf.TensorSpec(None, tf.int64)
    ),
    "ragged batch": lambda: Dataset.from_tensors(ragged()).repeat(3).batch(2),
    "ragged batch of tensors": lambda: Range(4).map(tf.range).ragged_batch(2),
    "ragged and tensor": lambda: Dataset.from_tensors((ragged(), 1)),
    "rows and tensor": lambda: Dataset.zip(Dataset.from_tensor_slices(ragged()), Range(3)),
    "sparse": lambda: Range(2).map(sparse),
    "sparse batch": lambda: Range(4).map(sparse).batch(2),
    "sparse and tensor": lambda: Range(2).map(lambda i: (sparse(i), i)),
    "optional and array": lambda: Range(2).map(lambda i: (Optional.from_value(i), array(i))),
    "variants": lambda: Range(2).map(variant).batch(2),
    "slices": lambda: Range(2).map(slices),
    "extension type": lambda: Dataset.from_tensors(Registered(ragged())),
    "batch of an extension type": lambda: Dataset.from_tensors(Registered(ragged())).batch(1),
    "structured": lambda: Dataset.from_tensors(
        tf.experimental.StructuredTensor.from_pyval([{"a": 1}, {"a": 2}])
    ),
    "row partition": lambda: Dataset.from_tensors(
        tf.experimental.RowPartition.from_row_lengths([1, 2])
    ),
    "linear operator": lambda: Range(2).map(
        lambda i: tf.linalg.LinearOperatorDiag(tf.fill([2], tf.cast(i, tf.float32)))
    ),
    "nested": lambda: Range(2).map(lambda i: Point({"b": i, "a": (i, None)}, (i, {"c": [i, i]}))),
    "ordered dict": lambda: Range(2).map(lambda i: collections.OrderedDict(b=i, a=-i)),
}

#: Types that TensorFlow cannot encode, so that it cannot send them from a data worker.
IN_PROCESS: dict[str, tuple[Callable[[], tf.data.Dataset], str]] = {
    "datasets": (lambda: Range(4).window(2), "elements are datasets"),
    "datasets and tensors": (
        lambda: Dataset.zip(Range(4).window(2), Range(2)),
        "elements are datasets",
    ),
    "optional of a dataset": (
        lambda: Range(4).window(2).map(Optional.from_value),
        "elements are datasets",
    ),
    # Over gRPC, TensorFlow takes the single variant for a compressed element. Compressed, it
    # expects a variant where the worker has compressed a tensor.
    "rows": (
        lambda: Dataset.from_tensor_slices(ragged()),
        r"(?s)RaggedTensorSpec\(TensorShape\(\[None\]\).*map\(lambda row: row\)",
    ),
}

#: Types whose specification TensorFlow cannot encode for its dispatcher.
NEVER: dict[str, Callable[[], tf.data.Dataset]] = {
    "attrs": lambda: Range(2).map(Attributes),
    "unregistered extension type": lambda: Range(2).map(Unregistered),
}


#: TensorFlow's specifications of values that belong to a process or to a strategy.
OF_A_PROCESS = {
    "DistributedDatasetAndIteratorSpec",
    "DistributedDatasetSpec",
    "DistributedDatasetsFromFunctionSpec",
    "DistributedIteratorSpec",
    "IteratorSpec",
    "MultiDeviceIteratorSpec",
    "PerReplicaSpec",
    "PerWorkerValuesTypeSpec",
    "PerWorkerVariableSpec",
    "ShardedVariableSpec",
    "VariableSpec",
    "_DTensorIteratorSpec",
    "_SingleWorkerDatasetIteratorSpec",
}
#: Those whose values are other elements: of base classes, and of tensors with other properties.
AS_OTHERS = {
    "AnonymousExtensionTypeSpec",
    "BoundedTensorSpec",
    "EagerWeakTensor.Spec",
    "GraphWeakTensor.Spec",
    "UserRegisteredSpec",
    "WeakTensor.Spec",
    "_LinearOperatorSpec",
}


def as_is(element: Any) -> Any:
    return element


def plain(value: Any) -> Any:
    """Return a value that ``==`` compares, with types, shapes and bits.

    `from_dataset_id` returns plain dicts and other named tuples, because TensorFlow sends no
    classes.
    """
    if isinstance(value, tf.data.Dataset):
        return [plain(each) for each in value]
    if isinstance(value, Optional):
        return Optional, plain(value.get_value()) if value.has_value() else None
    if isinstance(value, tf.TensorArray):
        return tf.TensorArray, [plain(value.read(i)) for i in range(int(value.size()))]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return getattr(value, "_fields", tuple), [plain(each) for each in value]
    if value is None:
        return None
    if not isinstance(value, tf.Tensor):  # composite
        return type(value), [plain(each) for each in tf.nest.flatten(value, expand_composites=True)]
    if value.dtype == tf.variant:
        return plain(
            tf.raw_ops.TensorListStack(
                input_handle=value, element_shape=tf.constant([], tf.int32), element_dtype=tf.int64
            )
            if value.shape.rank == 0
            else tf.unstack(value)
        )
    array = np.asarray(value.numpy())
    bits = array.tolist() if value.dtype == tf.string else array.tobytes()
    return value.dtype, tuple(value.shape), bits


def first(dataset: Any, count: int) -> list[Any]:
    """Return the first elements. TensorFlow reports the end of an epoch one second later."""
    return [plain(element) for element in itertools.islice(dataset, count)]


def check(cluster: tfd.Cluster, dataset: Any) -> None:
    """Check what arrives with `distribute` and with `from_dataset_id`."""
    # A thread for autotuning that misses the end of its iterator delays the stop of the servers.
    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = dataset.with_options(options)
    expected = [plain(element) for element in dataset]
    assert expected
    for read in (
        dataset.apply(cluster.distribute("off")),
        cluster.from_dataset_id("off", cluster.register(dataset)),
    ):
        assert read.element_spec == dataset.element_spec
        assert first(read, len(expected)) == expected


def without_tfd(cluster: tfd.Cluster, dataset: Any, compression: str | None) -> Any:
    """Return `dataset` through TensorFlow's own `distribute`."""
    service = tf.data.experimental.service
    target = cluster.dispatcher.target
    return dataset.apply(service.distribute("parallel_epochs", target, compression=compression))


@pytest.fixture(scope="module", params=["local", "inprocess"])
def cluster(request: pytest.FixtureRequest) -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=1, name="elements", launcher=request.param) as cluster:
        yield cluster


@pytest.mark.parametrize("kind", TYPES)
def test_each_type_arrives_unchanged(cluster: tfd.Cluster, kind: str) -> None:
    check(cluster, TYPES[kind]())


def specifications(spec: Any) -> Iterator[str]:
    """Yield the classes of a specification and of those in it."""
    for each in tf.nest.flatten(spec):
        yield from (base.__qualname__ for base in type(each).__mro__)
        if isinstance(each, tf.OptionalSpec):
            yield from specifications(each.value_type)


def test_each_specification_of_tensorflow_has_a_type_above() -> None:
    creates = [*TYPES.values(), *(create for create, _ in IN_PROCESS.values()), *NEVER.values()]
    tested = {name for create in creates for name in specifications(create().element_spec)}
    specs: list[type] = [tf.TypeSpec]
    for each in specs:  # grows
        specs += each.__subclasses__()
    names = {each.__qualname__ for each in specs if each.__module__.startswith("tensorflow.")}
    assert names - OF_A_PROCESS - AS_OTHERS <= tested
    assert {"RaggedTensorSpec", "OptionalSpec", "TensorArraySpec"} <= names


def dtypes() -> Iterator[tf.DType]:
    """Yield the dtypes of tensors that can be elements."""
    modules = (tf, tf.dtypes, tf.dtypes.experimental)
    found = {v for module in modules for v in vars(module).values() if isinstance(v, tf.DType)}
    # A handle of a resource belongs to its process. The types above have variants.
    yield from sorted(found - {tf.resource, tf.variant}, key=lambda dtype: dtype.name)


def constant(dtype: tf.DType) -> Any:
    if dtype == tf.string:
        return tf.constant([b"a", b"", b"\xff\0"])
    numpy = np.dtype(dtype.as_numpy_dtype)
    stored = numpy[0] if numpy.fields else numpy
    return tf.constant(np.array([0, 1, 1]).astype(stored).view(numpy), dtype)


def test_each_dtype_arrives_unchanged(cluster: tfd.Cluster) -> None:
    tensors, refused = {}, set()
    for dtype in dtypes():
        tensor = constant(dtype)
        try:
            assert len(list(Dataset.from_tensors(tensor))) == 1
        except tf.errors.UnimplementedError:
            refused.add(dtype.name)
        else:
            tensors[dtype.name] = tensor
    # TensorFlow 2.21 fails with "Converting f8E5M2 to DataType", without a service too.
    assert refused <= {"float8_e5m2"}
    assert {"bfloat16", "bool", "complex128", "float16", "int4", "qint16", "string"} <= {*tensors}
    check(cluster, Dataset.from_tensors(tensors))
    check(cluster, Dataset.from_tensor_slices(tensors))
    check_explained(cluster, Dataset.from_tensors(tensors))


@pytest.mark.parametrize("kind", IN_PROCESS)
def test_types_that_only_local_memory_can_pass(cluster: tfd.Cluster, kind: str) -> None:
    create, message = IN_PROCESS[kind]
    dataset = create()
    if cluster.snapshot().launcher == "inprocess":
        check(cluster, dataset)
        return
    for send in (
        lambda: dataset.apply(cluster.distribute("off")),
        lambda: cluster.register(dataset),
    ):
        with pytest.raises(NotSerializable, match=message):
            send()
    for compression in (None, "AUTO"):
        with pytest.raises(tf.errors.OpError):
            first(without_tfd(cluster, dataset, compression), 1)


@pytest.mark.parametrize("kind", NEVER)
def test_types_that_tensorflow_cannot_register(cluster: tfd.Cluster, kind: str) -> None:
    with pytest.raises(NotSerializable, match=r"(?s)No encoder for .*__name__"):
        NEVER[kind]().apply(cluster.distribute("off"))
    with pytest.raises(NotSerializable, match=r"(?s)No encoder for .*__name__"):
        cluster.register(NEVER[kind]())
    with pytest.raises(Exception, match="No encoder for"):
        without_tfd(cluster, NEVER[kind](), "AUTO")


@pytest.mark.parametrize("kind", SINGLE)
def test_compression_none_is_refused_where_it_cannot_work(cluster: tfd.Cluster, kind: str) -> None:
    dataset = SINGLE[kind]()
    expected = r"(?s)invalid compression=None: .*Spec.*omit compression="
    with pytest.raises(UsageError, match=expected):
        cluster.register(dataset, compression=None)
    if cluster.snapshot().launcher == "inprocess":
        read = dataset.apply(cluster.distribute("off", compression=None))
        assert len(first(read, 1)) == 1
    else:
        with pytest.raises(UsageError, match=expected):
            dataset.apply(cluster.distribute("off", compression=None))


def test_coordinated_reads_use_grpc_in_this_process_too(cluster: tfd.Cluster) -> None:
    options = {"num_consumers": 1, "consumer_index": 0}
    ragged = TYPES["ragged"]().repeat()
    expected = first(ragged, 1)
    read = ragged.apply(cluster.distribute("off", job_name="distributed", **options))
    assert first(read, 1) == expected
    registered = cluster.register(ragged)
    read = cluster.from_dataset_id("off", registered, job_name="registered", **options)
    assert first(read, 1) == expected
    for create, message in IN_PROCESS.values():
        dataset = create().repeat()
        with pytest.raises(NotSerializable, match=message):
            dataset.apply(cluster.distribute("off", job_name="refused", **options))
        if cluster.snapshot().launcher == "inprocess":
            registered = cluster.register(dataset)
            with pytest.raises(NotSerializable, match=message):
                cluster.from_dataset_id("off", registered, job_name="refused", **options)


def test_traced_datasets_are_compressed_if_needed(cluster: tfd.Cluster) -> None:
    @tf.function
    def total() -> Any:
        dataset = Range(3).map(Optional.from_value).repeat().apply(cluster.distribute("off"))
        return dataset.take(3).reduce(np.int64(0), lambda sum, each: sum + each.get_value())

    assert total() == 3


def test_datasets_cannot_be_saved(cluster: tfd.Cluster, tmp_path: Path) -> None:
    with pytest.raises(NotSerializable, match="elements are datasets"):
        cluster.save(Range(4).window(2), str(tmp_path / "saved"))


def check_explained(cluster: tfd.Cluster, dataset: Any) -> None:
    """Check that `explain` and the doctor read the elements."""
    options = tf.data.Options()
    options.autotune.enabled = False  # its thread can delay the end of a data worker by 60 s
    read = dataset.repeat().with_options(options).apply(cluster.distribute("off"))
    # On a busy host, no element may arrive in this time.
    limits = iter(lambda: tfd.explain(read, seconds=0.3), None)
    limit = next(limit for limit in limits if limit.figures["elements_per_s"] > 0)
    assert "compression" not in limit.advice
    assert "TFD824" not in [finding.code for finding in tfd.doctor(read)]


@pytest.mark.parametrize("kind", TYPES)
def test_explain_reads_each_type(cluster: tfd.Cluster, kind: str) -> None:
    check_explained(cluster, TYPES[kind]())


@pytest.mark.parametrize("cluster", ["inprocess"], indirect=True)
@pytest.mark.parametrize("kind", IN_PROCESS)
def test_explain_reads_types_of_local_memory(cluster: tfd.Cluster, kind: str) -> None:
    check_explained(cluster, IN_PROCESS[kind][0]())
