"""An observed dataset is a tf.data.Dataset for all operations of TensorFlow."""

import contextlib
import gc
import inspect
import json
import math
import os
import threading
import time

import pytest
import tensorflow as tf

from tests._waiting import until
from tfd_notebook.data.consume.consumers import Consumers
from tfd_notebook.data.consume.observe import load_compat, translate, watch
from tfd_notebook.data.consume.stream import Stream
from tfd_notebook.data.explain.explain import explain
from tfd_notebook.errors import DispatcherLost, PipelineError, UsageError

compat = load_compat()


@pytest.fixture
def consumers():
    return Consumers()


@pytest.fixture
def numbers(consumers):
    return watch(tf.data.Dataset.range(6), consumers, "numbers")


def ints(dataset):
    return [int(x) for x in dataset]


def test_observed_dataset_is_unchanged(numbers):
    assert isinstance(numbers, tf.data.Dataset)
    assert ints(numbers) == ints(numbers) == list(range(6))
    assert numbers.element_spec == tf.TensorSpec([], tf.int64)
    assert int(numbers.cardinality()) == len(numbers) == 6
    assert type(tf.type_spec_from_value(numbers)) is tf.data.DatasetSpec
    assert isinstance(iter(numbers), tf.data.Iterator)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, True, "1"])
@pytest.mark.parametrize(
    ("argument", "use"),
    [
        ("step_time", lambda data, value: explain(data, step_time=value)),
        ("seconds", lambda data, value: explain(data, value)),
        ("timeout", lambda data, value: Stream(data, Consumers()).wait(timeout=value)),
        ("timeout", lambda data, value: Stream(data, Consumers()).stop(value)),
        ("timeout", lambda data, value: Stream(data, Consumers()).checkpoint("p", value)),
    ],
)
def test_seconds_are_finite(argument, use, value):
    with pytest.raises(UsageError, match=f"invalid {argument}=.*: expected .* seconds"):
        use(tf.data.Dataset.range(3), value)


def test_options_survive(consumers):
    options = tf.data.Options()
    options.deterministic = False
    dataset = watch(tf.data.Dataset.range(3).with_options(options), consumers)
    assert dataset.options().deterministic is False
    assert dataset.map(lambda x: x).options().deterministic is False
    assert ints(dataset) == [0, 1, 2]


@pytest.mark.parametrize(
    "transform",
    [
        lambda d: d.map(lambda x: x + 1),
        lambda d: d.batch(2),
        lambda d: d.prefetch(2),
        lambda d: d.take(2),
        lambda d: d.skip(1).repeat(2).shuffle(3).cache(),
        lambda d: d.filter(lambda x: x > 1),
        lambda d: d.enumerate(),
        lambda d: d.concatenate(tf.data.Dataset.range(2)),
        lambda d: d.interleave(lambda x: tf.data.Dataset.from_tensors(x)),
        lambda d: d.apply(lambda d: d.map(lambda x: x)),
        lambda d: d.with_options(tf.data.Options()),
        lambda d: d.ragged_batch(2),
        lambda d: d.scan(tf.constant(0, tf.int64), lambda s, x: (s + x, s)),
    ],
)
def test_transformations_are_observed(numbers, consumers, transform):
    count = sum(1 for _ in transform(numbers))
    assert [(row.name, row.elements) for row in consumers.rows()] == [("numbers", count)]


def test_every_public_transformation_is_covered():
    unwatched = [
        name
        for name, method in inspect.getmembers(tf.data.Dataset, inspect.isfunction)
        if not name.startswith("_")
        and not isinstance(inspect.getattr_static(tf.data.Dataset, name), staticmethod)
        and name not in vars(compat.WatchedDataset)
    ]
    assert unwatched == []


def test_zip_save_load_and_reduce(numbers, tmp_path):
    assert len(list(tf.data.Dataset.zip((numbers, numbers)))) == 6
    numbers.save(str(tmp_path / "saved"))
    assert ints(tf.data.Dataset.load(str(tmp_path / "saved"))) == list(range(6))
    assert int(numbers.reduce(tf.constant(0, tf.int64), lambda a, b: a + b)) == 15


def test_functions_accept_the_dataset(numbers, consumers):
    @tf.function
    def over_argument(dataset):
        total = tf.constant(0, tf.int64)
        for x in dataset:
            total += x
        return total

    @tf.function
    def over_capture():
        total = tf.constant(0, tf.int64)
        for x in numbers.map(lambda x: x):
            total += x
        return total + next(iter(numbers))

    assert int(over_argument(numbers)) == int(over_capture()) == 15
    assert consumers.rows() == ()  # TensorFlow runs loops inside a function


def test_functions_accept_its_iterator(numbers, consumers):
    get = tf.function(lambda iterator: iterator.get_next())
    iterator = iter(numbers)
    assert [int(get(iterator)) for _ in range(4)] == [0, 1, 2, 3]
    assert int(next(iterator)) == 4
    optional = iterator.get_next_as_optional()
    assert int(optional.get_value()) == 5
    with pytest.raises(tf.errors.OutOfRangeError):
        get(iterator)
    assert consumers.rows()[0].state == "finished"
    assert len([None for _ in iterator]) == 0


@pytest.mark.slow
def test_iterator_moves_from_python_to_a_function(numbers, consumers):
    iterator = iter(numbers)
    next(iterator)
    tf.function(lambda it: next(it))(iterator)
    tf.function(lambda it: next(it))(iterator)
    until(lambda: [(row.elements, row.bytes) for row in consumers.rows()] == [(3, 24)])


def test_default_strategy_distributes_it(numbers, consumers):
    strategy = tf.distribute.get_strategy()
    assert ints(strategy.experimental_distribute_dataset(numbers)) == list(range(6))
    assert consumers.rows()[0].elements == 6


@pytest.mark.slow
@pytest.mark.parametrize("function_first", [True, False])
def test_iterators_can_be_checkpointed(numbers, tmp_path, function_first):
    get = tf.function(lambda iterator: next(iterator)) if function_first else next
    iterator = iter(numbers)
    get(iterator)
    get(iterator)
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "checkpoint"))
    fresh = iter(numbers)
    tf.train.Checkpoint(iterator=fresh).read(path)
    assert ints(fresh) == [2, 3, 4, 5]


def test_bytes_of_varying_shapes_are_counted(consumers):
    dataset = watch(tf.data.Dataset.range(10).map(lambda i: (i, "text")).batch(4), consumers)
    for _ in dataset:
        pass
    assert consumers.rows()[0].bytes == 80


@pytest.mark.parametrize(
    "spec_maker",
    [
        lambda i: {"a": i, "b": (i, [i, i])},
        lambda i: tf.RaggedTensor.from_row_lengths(tf.range(i), [i]),
        lambda i: tf.sparse.from_dense(tf.fill([2], i)),
        lambda i: tf.data.Dataset.range(i),
    ],
)
def test_elements_are_unchanged(spec_maker, consumers):
    bare = tf.data.Dataset.range(1, 4).map(spec_maker)
    for observed, expected in zip(watch(bare, consumers), bare, strict=True):
        tf.nest.assert_same_structure(observed, expected, expand_composites=True)
        assert type(observed) is type(expected)


def test_unknown_rank_is_supported(consumers):
    bare = tf.data.Dataset.range(3).map(
        lambda i: tf.numpy_function(lambda i: i.repeat(int(i)), [i], tf.int64)
    )
    assert [x.shape[0] for x in watch(bare, consumers)] == [0, 1, 2]
    assert consumers.rows()[0].bytes == 24


def from_environment(x):
    return x + int(os.environ["TFD_TEST_UNSET"])


def from_json(x):
    return x + json.loads("{")


def from_its_own_line(x):
    raise ValueError(f"bad label {x}")


@pytest.mark.parametrize("function", [from_environment, from_json, from_its_own_line])
@pytest.mark.parametrize("call", [tf.numpy_function, tf.py_function])
def test_error_names_the_line_of_the_users_function(consumers, call, function):
    """The innermost frame is in `<frozen os>`, in the standard library, or in the function."""
    bare = tf.data.Dataset.range(3).map(lambda i: call(function, [i], tf.int64))
    with pytest.raises(PipelineError) as caught:
        list(watch(bare, consumers))
    line = function.__code__.co_firstlineno + 1
    assert f"in {function.__name__} ({__file__}:{line})" in str(caught.value)


@pytest.mark.slow
def test_collected_iterator_is_not_running(numbers, consumers):
    next(iter(numbers))
    gc.collect()
    until(lambda: [(row.state, row.elements) for row in consumers.rows()] == [("stopped", 1)])


@pytest.mark.slow
@pytest.mark.parametrize("left", ["loop", "next", "numpy", "error", "function"])
def test_collection_of_an_iterator_does_not_block(consumers, left):
    """TensorFlow waits for running functions, and sometimes a minute for its autotuning."""
    go_on, running, waited = threading.Event(), threading.Event(), threading.Event()

    def slow(x):
        if x > 0:
            running.set()
            if not go_on.wait(20):
                waited.set()
        return x

    dataset = watch(
        tf.data.Dataset.range(5).map(
            lambda x: tf.numpy_function(slow, [x], tf.int64), num_parallel_calls=2
        ),
        consumers,
    )

    def leave():
        if left == "loop":
            for _ in dataset:
                assert running.wait(60)
                break
            return
        iterator = dataset.as_numpy_iterator() if left == "numpy" else iter(dataset)
        if left == "function":
            tf.function(lambda: next(iterator))()
        else:
            next(iterator)
        assert running.wait(60)
        if left == "error":
            held = [iterator]
            held.append(held)  # a reference cycle, as of an exception and its traceback
            raise RuntimeError(held)

    try:
        with contextlib.suppress(RuntimeError):
            leave()
        gc.collect()
        assert not waited.is_set()
        until(lambda: consumers.rows()[0].state in ("stopped", "finished"))
    finally:
        go_on.set()


@pytest.mark.slow
def test_cache_file_is_released_for_the_next_loop(consumers, tmp_path):
    """TensorFlow refuses a second iterator while the first one has the file."""
    running = threading.Event()

    def slow(x):
        if x > 0:
            running.set()
            time.sleep(0.5)
        return x

    def cached():
        mapped = tf.data.Dataset.range(4).map(
            lambda x: tf.numpy_function(slow, [x], tf.int64), num_parallel_calls=2
        )
        return watch(mapped.cache(str(tmp_path / "cache")).prefetch(1), consumers)

    for _ in cached():
        assert running.wait(60)
        break
    dataset = cached()
    for _ in dataset:
        break
    assert ints(dataset.take(9)) == [0, 1, 2, 3]


def test_suspended_process_is_named_as_the_cause(consumers):
    message = (
        "{{function_node __wrapped__IteratorGetNext}} Failed to get tasks: Iteration client id "
        "not found: 3000 [Op:IteratorGetNext] name: "
    )
    error = translate(tf.errors.NotFoundError(None, None, message), consumers)
    assert isinstance(error, DispatcherLost)
    assert isinstance(error, tf.errors.NotFoundError)
    assert "no heartbeat" in error.what
