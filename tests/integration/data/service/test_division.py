"""``semantics="same"``: the elements of an epoch without a service."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tfd_notebook import errors

pytestmark = pytest.mark.integration

D = tf.data.Dataset


@pytest.fixture(scope="module", params=["inprocess", "local"])
def cluster(request: pytest.FixtureRequest) -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=2, launcher=request.param, name=request.param) as cluster:
        yield cluster


def filtered(count: int = 9) -> tf.data.Dataset:
    return D.range(count).filter(lambda x: x != 3)


def test_pairs_stay_together(cluster: tfd.Cluster) -> None:
    sources = (D.from_tensor_slices(np.arange(300)), D.from_tensor_slices(np.arange(300) * 2))
    pairs = D.zip(sources).map(lambda a, b: (a, b))
    read = pairs.apply(cluster.distribute("dynamic", semantics="same"))
    for _ in range(10):
        assert sorted(read.as_numpy_iterator()) == [(x, 2 * x) for x in range(300)]


def test_pairs_of_mapped_sources_stay_together(cluster: tfd.Cluster) -> None:
    variable = tf.Variable(1, dtype=tf.int64)

    def add(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return x + constant, tf.random.uniform(())

    constant = variable.read_value()
    sources = D.range(300).map(add), D.range(600).map(lambda x: 2 * x).skip(20)
    read = D.zip(sources).apply(cluster.distribute("dynamic", semantics="same"))
    drawn: list[float] = []
    for _ in range(2):
        epoch = list(read.as_numpy_iterator())
        assert sorted((a, b) for (a, _), b in epoch) == [(x + 1, 2 * x + 40) for x in range(300)]
        drawn += [number for (_, number), _ in epoch]
    assert len(set(drawn)) > 590


def test_python_functions_of_numbered_elements_reach_the_data_workers(cluster: tfd.Cluster) -> None:
    def double(x: np.int64) -> np.int64:
        return np.int64(2 * x)

    mapped = D.range(20).take(5).map(lambda x: tf.numpy_function(double, [x], tf.int64))
    read = mapped.apply(cluster.distribute("dynamic", semantics="same"))
    assert sorted(read.as_numpy_iterator()) == [0, 2, 4, 6, 8]


def test_variables_and_tables_are_read_in_each_epoch(cluster: tfd.Cluster) -> None:
    variable = tf.Variable(0, dtype=tf.int64)
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
    dataset = filtered().map(lambda x: (x + variable, table.lookup(x)))
    read = dataset.apply(cluster.distribute("dynamic", semantics="same"))
    for _ in range(2):
        assert sorted(read.as_numpy_iterator()) == sorted(dataset.as_numpy_iterator())
        variable.assign_add(1000)
        table.insert(tf.range(9, dtype=tf.int64), tf.range(9, dtype=tf.int64) * 7)


def test_note_names_the_operations_of_this_process(
    cluster: tfd.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    filtered().batch(4).apply(cluster.distribute("dynamic", semantics="same"))
    assert "batch(4)" in capsys.readouterr().err


def test_consumer_shows_where_this_process_begins(cluster: tfd.Cluster) -> None:
    read = filtered(1000).batch(4).apply(cluster.distribute("dynamic", semantics="same"))
    iterator = iter(read)
    next(iterator)
    assert any("batch(4)" in consumer.name for consumer in cluster.snapshot().streams)


def test_explain_has_the_cost_of_the_operations_of_this_process(cluster: tfd.Cluster) -> None:
    read = filtered(10_000).batch(4).apply(cluster.distribute("dynamic", semantics="same"))
    limit = tfd.explain(read, seconds=2)
    assert "this process runs batch(4)" in limit.service


def test_incomplete_batch_is_dropped_once(cluster: tfd.Cluster) -> None:
    read = D.range(50).batch(4, drop_remainder=True).take(30)
    read = read.apply(cluster.distribute("dynamic", semantics="same"))
    assert len(list(read)) == 12


def test_number_of_elements_is_known(cluster: tfd.Cluster) -> None:
    sources = (D.from_tensor_slices(np.arange(30)), D.range(30))
    read = D.zip(sources).apply(cluster.distribute("dynamic", semantics="same"))
    assert int(read.cardinality()) == 30  # so an epoch with fewer elements raises DataLoss


def test_options_are_kept(cluster: tfd.Cluster) -> None:
    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = filtered().batch(4).with_options(options)
    read = dataset.apply(cluster.distribute("dynamic", semantics="same"))
    assert read.options().autotune.enabled is False
    assert read.element_spec == dataset.element_spec


def test_shared_job_with_operations_in_this_process_is_refused(cluster: tfd.Cluster) -> None:
    with pytest.raises(errors.UsageError, match="each consumer"):
        filtered().batch(4).apply(cluster.distribute("dynamic", job_name="j", semantics="same"))


def test_registered_dataset_and_function_refuse_every_change(cluster: tfd.Cluster) -> None:
    variable = tf.Variable(0, dtype=tf.int64)
    captured = D.range(9).map(lambda x: x + variable)
    with pytest.raises(errors.DataChanged, match=r"map\("):
        cluster.register(captured, semantics="same")
    registered = cluster.register(filtered().batch(4), semantics="same")
    with pytest.raises(errors.DataChanged, match=r"batch\(4\)"):
        cluster.from_dataset_id("dynamic", registered)

    @tf.function
    def first() -> tf.Tensor:
        dataset = D.range(9).take(4).apply(cluster.distribute("dynamic", semantics="same"))
        return next(iter(dataset))

    with pytest.raises(Exception, match=r"(?s)take.*outside of a tf.function"):
        first()


def test_doctor_finds_no_change(cluster: tfd.Cluster) -> None:
    read = D.range(40).enumerate().apply(cluster.distribute("dynamic", semantics="same"))
    assert not {"TFD827", "TFD828"} & set(tfd.doctor(read).codes)


@pytest.mark.parametrize("part", ["numbers", "numbers of a function", "random order", "key"])
@pytest.mark.filterwarnings("error::UserWarning")
def test_parts_for_training_and_validation_do_not_overlap(cluster: tfd.Cluster, part: str) -> None:
    source = D.from_tensor_slices(np.arange(120))
    mode, check = "dynamic", "same"
    parts = source.take(24), source.skip(24)
    if part == "numbers of a function":
        mapped = source.map(lambda x: x * 1)
        parts = mapped.shard(5, 0), mapped.skip(24)
        assert set(mapped.shard(5, 0).as_numpy_iterator()) == set(range(0, 120, 5))
    elif part == "random order":
        mode, check = "data", "checked"
        order = source.shuffle(120, seed=1, reshuffle_each_iteration=False)
        parts = order.take(24), order.skip(24)
    elif part == "key":
        mode = "file_or_data"
        parts = source.filter(lambda x: x % 5 == 0), source.filter(lambda x: x % 5 != 0)
    expected = [sorted(each.as_numpy_iterator()) for each in parts]
    for _ in range(2):
        read = [each.apply(cluster.distribute(mode, semantics=check)) for each in parts]
        assert [sorted(each.as_numpy_iterator()) for each in read] == expected


def test_numbers_of_a_seed_stay_with_their_elements_in_mode_data(cluster: tfd.Cluster) -> None:
    drawn = D.range(60).map(lambda x: (x, tf.random.uniform((), seed=1)))
    expected = sorted(drawn.as_numpy_iterator())
    for check in ("checked", "same"):
        read = drawn.apply(cluster.distribute("data", semantics=check))
        for _ in range(2):
            assert sorted(read.as_numpy_iterator()) == expected
