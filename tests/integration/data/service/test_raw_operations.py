"""Dataset operations that no function of the public API creates, through a real service."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops, structured_function

import tfd_notebook as tfd
from tfd_notebook import errors
from tfd_notebook.data.service import graph_inspection

pytestmark = pytest.mark.integration

D = tf.data.Dataset
NUMBER = tf.TensorSpec((), tf.int64)
TYPES: dict[str, Any] = {"output_types": [tf.int64], "output_shapes": [[]]}


@pytest.fixture(scope="module")
def cluster() -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=2, launcher="inprocess", name="raw") as cluster:
        yield cluster


def created(variant: Any) -> Any:
    return dataset_ops._VariantDataset(variant, NUMBER)


def global_shuffle(dataset: Any, seed: int = 7) -> Any:
    variant = tf.raw_ops.GlobalShuffleDataset(
        input_dataset=dataset._variant_tensor,
        seed=seed,
        seed2=seed,
        seed_generator=tf.raw_ops.DummySeedGenerator(),
        reshuffle_each_iteration=True,
        **TYPES,
    )
    return created(variant)


def auto_shard(dataset: Any, policy: tf.data.experimental.AutoShardPolicy) -> Any:
    variant = tf.raw_ops.AutoShardDataset(
        input_dataset=dataset._variant_tensor,
        num_workers=2,
        index=0,
        auto_shard_policy=policy.value,
        num_replicas=0,
        **TYPES,
    )
    return created(variant)


def from_graph(dataset: Any) -> Any:
    graph = dataset._as_serialized_graph()
    return created(tf.raw_ops.DatasetFromGraph(graph_def=graph))


def in_function(dataset: Any, constant: bool = False) -> Any:
    """Return the dataset once for each of three elements, from its graph."""
    graph = dataset._as_serialized_graph()
    value = graph.numpy()

    def create(_: Any) -> Any:
        text = tf.constant(value) if constant else graph
        return created(tf.raw_ops.DatasetFromGraph(graph_def=text))

    return D.range(3).flat_map(create)


def index_flat_map() -> Any:
    rows = D.from_tensor_slices(tf.reshape(tf.range(8, dtype=tf.int64), (4, 2)))
    function = structured_function.StructuredFunctionWrapper(lambda x: x, "map", dataset=rows)
    index = structured_function.StructuredFunctionWrapper(
        lambda i: (i // 2, i % 2), "map", input_structure=NUMBER
    )
    variant = tf.raw_ops.IndexFlatMapDataset(
        input_dataset=rows._variant_tensor,
        map_func_other_args=function.function.captured_inputs,
        index_map_func_other_args=index.function.captured_inputs,
        output_cardinality=tf.constant(8, tf.int64),
        map_func=function.function,
        index_map_func=index.function,
        **TYPES,
    )
    return created(variant)


def weighted_flat_map() -> Any:
    variant = tf.raw_ops.WeightedFlatMapDataset(
        input_datasets=[D.range(5)._variant_tensor, D.range(50, 55)._variant_tensor],
        weights=[0.5, 0.5],
        **TYPES,
    )
    return created(variant)


DATA = tf.data.experimental.AutoShardPolicy.DATA
#: Pipelines with the kinds of changes in the modes "off", "dynamic" and "data".
PIPELINES: dict[str, tuple[Callable[[], Any], set[str], set[str], set[str]]] = {
    "global shuffle": (
        lambda: global_shuffle(D.range(20)),
        {"random"},
        {"random", "counting"},
        {"random"},
    ),
    "global shuffle without a seed": (
        lambda: global_shuffle(D.range(40), seed=0),
        set(),
        {"counting"},
        {"order"},
    ),
    "global shuffle in a function": (
        lambda: D.range(3).flat_map(lambda _: global_shuffle(D.range(4))),
        set(),
        set(),
        set(),
    ),
    "auto shard": (lambda: auto_shard(D.range(20), DATA), set(), {"counting"}, set()),
    "auto shard in a function": (
        lambda: D.range(3).flat_map(lambda _: auto_shard(D.range(4), DATA)),
        set(),
        set(),
        set(),
    ),
    "graph": (lambda: from_graph(D.range(9).map(lambda x: x + 1)), set(), set(), set()),
    "graph with take": (lambda: from_graph(D.range(20).take(8)), set(), {"counting"}, set()),
    "graph in a function": (lambda: in_function(D.range(8).take(3)), set(), set(), set()),
    "graph with a shuffle in a function": (
        lambda: in_function(D.range(20).shuffle(20)),
        set(),
        set(),
        {"order"},
    ),
    "graph in a graph": (
        lambda: in_function(in_function(D.range(20).shuffle(20))),
        set(),
        set(),
        {"order"},
    ),
    "index flat_map": (index_flat_map, set(), set(), set()),
    "weighted flat_map": (weighted_flat_map, set(), {"undivided"}, set()),
    "weighted flat_map in a function": (
        lambda: D.range(3).flat_map(lambda _: weighted_flat_map()),
        set(),
        set(),
        set(),
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_finding_is_the_difference_of_an_epoch(cluster: tfd.Cluster, name: str) -> None:
    create, *expected = PIPELINES[name]
    semantics = graph_inspection.examine(create()).semantics
    local = Counter(create().as_numpy_iterator())
    for mode, kinds in zip(("off", "dynamic", "data"), expected, strict=True):
        found = semantics.changes(mode.upper(), 2)
        assert {each.kind for each in found} == kinds, mode
        read = create().apply(cluster.distribute(mode, semantics="tensorflow"))
        try:
            elements = Counter(read.as_numpy_iterator())
        except errors.TfdError:
            assert "reading fails" in found[0].what
            continue
        same = elements == (local + local if mode == "off" else local)
        assert same >= semantics.keeps_elements(mode.upper())
        if kinds & {"order", "counting"} and name != "graph with take":
            assert not same or name == "auto shard"
        else:
            assert same or kinds


def test_global_shuffle_delivers_all_elements_of_each_data_worker(cluster: tfd.Cluster) -> None:
    dataset = global_shuffle(D.range(20))
    with pytest.warns(UserWarning, match=r"global_shuffle.*each of them occurs up to 2 times"):
        read = dataset.apply(cluster.distribute("dynamic"))
    assert Counter(read.as_numpy_iterator()) == dict.fromkeys(range(20), 2)
    unseeded = global_shuffle(D.range(20), seed=0)
    with pytest.raises(errors.DataChanged, match=r"global_shuffle.*order differs") as caught:
        unseeded.apply(cluster.distribute("data"))
    assert "with a seed" in str(caught.value.fix)


def test_weighted_flat_map_is_warned_of_and_read_in_mode_data(cluster: tfd.Cluster) -> None:
    with pytest.warns(UserWarning, match=r"weighted_flat_map.*reading fails.*concatenate"):
        weighted_flat_map().apply(cluster.distribute("dynamic"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        read = weighted_flat_map().apply(cluster.distribute("data"))
    assert sorted(read.as_numpy_iterator()) == [*range(5), *range(50, 55)]


def test_python_function_in_a_graph_of_a_function_is_found() -> None:
    doubled = D.range(3).map(lambda x: tf.numpy_function(lambda v: 2 * v, [x], tf.int64))
    pipeline = graph_inspection.examine(in_function(doubled))
    assert len(pipeline.tokens) == 1
    assert pipeline.tokens == graph_inspection.examine(doubled).tokens


def test_constant_of_a_function_is_expanded() -> None:
    # TensorFlow 2.21 can send this dataset, but not read it: it folds the op to a constant.
    pipeline = graph_inspection.examine(in_function(D.range(9).shuffle(9), constant=True))
    (change,) = pipeline.semantics.changes("DATA", 2)
    assert (change.kind, change.refused) == ("order", True)


def test_graph_that_is_not_a_constant_is_not_examined() -> None:
    dataset = D.range(3).flat_map(lambda _: from_graph(D.range(9).shuffle(9)))
    (change,) = graph_inspection.examine(dataset).semantics.changes("DYNAMIC", 2)
    assert "DatasetFromGraph" in change.what
    assert change.kind == "unknown"
