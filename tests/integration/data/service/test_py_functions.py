"""Python functions that AutoGraph converted, in the processes of data workers."""

from __future__ import annotations

import functools
import importlib
import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfd_notebook as tfd

pytestmark = pytest.mark.integration

Range = tf.data.Dataset.range
SCALAR = tf.TensorSpec((), tf.int64)
EXPECTED = [1, 4, 7]


@pytest.fixture(scope="module")
def importable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a directory from which this process and its tasks import modules."""
    directory = tmp_path_factory.mktemp("importable")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(directory))
        yield directory


@pytest.fixture(scope="module")
def cluster(importable: Path) -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=1, name="functions") as cluster:
        yield cluster


def triple(v: Any) -> Any:
    return 3 * v


def plus_one(v: Any) -> Any:
    return triple(v) + 1


def doubled(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(function)
    def called(v: Any) -> Any:
        return function(v) + function(v)

    return called


@doubled
def decorated(v: Any) -> Any:
    return (3 * v + 1) / 2


class Adder:
    def __init__(self, by: int) -> None:
        self.by = by

    def method(self, v: Any) -> Any:
        return triple(v) + self.by

    def __call__(self, v: Any) -> Any:
        return self.method(v)


def nested() -> Callable[[Any], Any]:
    def inner(v: Any) -> Any:
        def innermost(w: Any) -> Any:
            return triple(w)

        return innermost(v) + 1

    return inner


def comprehension(v: Any) -> Any:
    return sum([triple(x) for x in (v,)]) + sum(dict.fromkeys("a", 1).values())


def numbers(v: Any) -> Iterator[Any]:
    yield triple(v)
    yield 1


def generator(v: Any) -> Any:
    return sum(number for number in numbers(v))


def from_cell() -> Callable[[Any], Any]:
    """Define a function as a cell does. Only the notebook process has its source."""
    source = "def helper(v):\n    return 3 * v\n\ndef in_cell(v):\n    return helper(v) + 1\n"
    name = "<ipython-input-7>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), namespace)
    return namespace["in_cell"]


@pytest.fixture
def reloaded(importable: Path) -> Iterator[Callable[[Any], Any]]:
    file = importable / "tfd_reloaded.py"
    file.write_text("def function(v):\n    return v\n")
    importlib.invalidate_caches()
    module: Any = importlib.import_module("tfd_reloaded")
    helper = "def helper(v):\n    return 3 * v\n"
    file.write_text(f"{helper}\ndef function(v):\n    return helper(v) + 1\n")
    importlib.reload(module)
    yield lambda v: module.function(v)
    del sys.modules["tfd_reloaded"]


KINDS: dict[str, Callable[[Any], Any]] = {
    "calls a converted function": plus_one,
    "lambda": lambda v: (lambda w: triple(w))(v) + 1,
    "nested def": nested(),
    "comprehension": comprehension,
    "decorated": decorated,
    "method": Adder(1).method,
    "callable": Adder(1),
    "partial": functools.partial(lambda by, v: triple(v) + by, 1),
    "generator": generator,
    "cell": from_cell(),
}


def every_form(function: Callable[[Any], Any]) -> Any:
    """Return a dataset of the results of a function in each place where a pipeline calls one."""

    def in_py_function(x: Any) -> Any:
        return tf.py_function(lambda v: tf.cast(function(v), tf.int64), [x], tf.int64)

    def in_numpy_function(x: Any) -> Any:
        return tf.numpy_function(lambda v: np.int64(function(v)), [x], tf.int64)

    def in_interleave(x: Any) -> Any:
        return Range(1).map(lambda y: in_py_function(x + y))

    def in_filter(x: Any) -> Any:
        return tf.numpy_function(lambda v: np.bool_(function(v) % 3 == 1), [x], tf.bool)

    def in_generator(x: Any) -> Any:
        return tf.data.Dataset.from_generator(
            lambda v: [np.int64(function(v))], args=(x,), output_signature=SCALAR
        )

    def generate() -> Iterator[Any]:
        for v in range(3):
            yield np.int64(function(v))

    return tf.data.Dataset.zip(
        (
            Range(3).map(in_py_function),
            Range(3).map(in_numpy_function),
            Range(3).interleave(in_interleave),
            Range(3).filter(in_filter).map(in_py_function),
            Range(3).flat_map(in_generator),
            tf.data.Dataset.from_generator(generate, output_signature=SCALAR),
        )
    )


def results(dataset: Any) -> list[tuple[int, ...]]:
    return [tuple(map(int, row)) for row in dataset.as_numpy_iterator()]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_function_works_in_every_stage(cluster: tfd.Cluster, kind: str) -> None:
    dataset = every_form(KINDS[kind])
    assert results(dataset) == [(number,) * 6 for number in EXPECTED]
    assert results(dataset.apply(cluster.distribute("off"))) == results(dataset)


def test_function_of_a_reloaded_module_works(
    cluster: tfd.Cluster, reloaded: Callable[[Any], Any]
) -> None:
    dataset = every_form(reloaded)
    assert results(dataset.apply(cluster.distribute("off"))) == results(dataset)


def test_functions_work_after_a_restart_of_the_worker(cluster: tfd.Cluster) -> None:
    dataset = every_form(plus_one).apply(cluster.distribute("off"))
    before = results(dataset)
    cluster.restart("data_worker:0")
    assert results(dataset) == before == [(number,) * 6 for number in EXPECTED]


def distributed(cluster: tfd.Cluster, x: Any) -> Any:
    read = Range(3).map(lambda y: tf.py_function(lambda v: plus_one(v), [y], tf.int64))
    return read.map(lambda y: y + x).apply(cluster.distribute("off"))


class TestTraced:
    """Datasets that are distributed inside of a traced function."""

    def test_distribute_works_in_a_tf_function(self, cluster: tfd.Cluster) -> None:
        @tf.function
        def total(x: Any) -> Any:
            result = tf.constant(0, tf.int64)
            for element in distributed(cluster, x):
                result += element
            return result

        assert int(total(tf.constant(0, tf.int64))) == 12
        assert int(total(tf.constant(1, tf.int64))) == 15

    @pytest.mark.parametrize("method", ["interleave", "flat_map"])
    def test_distribute_works_in_functions_of_transformations(
        self, cluster: tfd.Cluster, method: str
    ) -> None:
        read = getattr(Range(2), method)(lambda x: distributed(cluster, x))
        assert sorted(map(int, read.as_numpy_iterator())) == [1, 2, 4, 5, 7, 8]

    def test_outer_dataset_can_be_distributed_in_a_tf_function(self, cluster: tfd.Cluster) -> None:
        outside = every_form(plus_one)
        mapped = Range(3).map(lambda y: tf.py_function(lambda v: plus_one(v), [y], tf.int64))

        @tf.function
        def total() -> Any:
            result = tf.constant(0, tf.int64)
            for row in outside.apply(cluster.distribute("off")):
                result += tf.add_n(list(row))
            for element in mapped.map(lambda y: y + 1).apply(cluster.distribute("off")):
                result += element
            return result

        assert int(total()) == 6 * 12 + 15

    def test_function_that_cannot_be_serialized_is_refused(self, cluster: tfd.Cluster) -> None:
        lock = threading.Lock()

        def locked(v: Any) -> Any:
            with lock:
                return v

        @tf.function
        def first() -> Any:
            mapped = Range(3).map(lambda y: tf.numpy_function(locked, [y], tf.int64))
            return next(iter(mapped.apply(cluster.distribute("off"))))

        # AutoGraph raises its own error class, which contains this text.
        with pytest.raises(Exception, match=r"(?s)NotSerializable: .*locked .*uses lock"):
            first()
