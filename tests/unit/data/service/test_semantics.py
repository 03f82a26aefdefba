"""Changes that a service makes to the elements of a pipeline, found in its graph."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import pickle
import random
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.data.ops import dataset_ops, debug_mode

import tfd_notebook as tfd
from tfd_notebook import errors
from tfd_notebook._compat.tf_data.pipeline_model import kind_of
from tfd_notebook.data.service import changes as reports
from tfd_notebook.data.service import function_facts, graph_inspection, semantics

D = tf.data.Dataset
GENERATOR = np.random.default_rng(1)
MODES = ("OFF", "DYNAMIC", "FILE", "DATA", "FILE_OR_DATA", "HINT")
SHARE = tf.data.experimental.SHARD_HINT
FILES = [__file__, graph_inspection.__file__]


def changes(dataset: Any, mode: str, workers: int = 2) -> list[reports.Change]:
    return graph_inspection.examine(dataset).semantics.changes(mode, workers)


def kinds(dataset: Any, mode: str) -> set[str]:
    return {change.kind for change in changes(dataset, mode)}


def numbers(count: int = 9) -> Any:
    return D.range(count)


def draw(seed: int | None = None) -> Any:
    return tf.random.uniform((), seed=seed) > 0.5


def shuffled() -> Any:
    """Return numbers in one random order."""
    return numbers().shuffle(3, seed=1, reshuffle_each_iteration=False)


def generated() -> Any:
    def generate() -> Any:
        yield from range(9)

    return D.from_generator(generate, output_signature=tf.TensorSpec((), tf.int64))


def summed() -> tf.data.experimental.Reducer:
    zero = tf.constant(0, tf.int64)
    return tf.data.experimental.Reducer(lambda _: zero, lambda total, x: total + x, lambda x: x)


def sliding(dataset: Any) -> Any:
    """Return windows that no function of the public API creates."""
    variant = tf.raw_ops.ExperimentalSlidingWindowDataset(
        input_dataset=dataset._variant_tensor,
        window_size=2,
        window_shift=1,
        window_stride=1,
        output_types=[tf.int64],
        output_shapes=[[None]],
    )
    return dataset_ops._VariantDataset(variant, tf.TensorSpec([None], tf.int64))


def grouped(reduce: Callable[[Any], Any], dataset: Any = None) -> Any:
    elements = numbers() if dataset is None else dataset
    return elements.group_by_window(lambda x: x % 2, lambda _, group: reduce(group), 2)


def from_state(dataset: Any) -> Any:
    generator = tf.random.Generator.from_seed(1)
    return dataset.map(lambda x: x + generator.uniform((), maxval=9, dtype=tf.int64))


def from_variable(dataset: Any, changed: bool = False) -> Any:
    variable = tf.Variable(3, dtype=tf.int64)
    return dataset.map(lambda x: x + (variable.assign_add(1) if changed else variable))


def from_table(dataset: Any, mutable: bool) -> Any:
    if mutable:
        return dataset.map(tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0).lookup)
    keys = tf.constant([1], tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, keys), 0)
    return dataset.map(table.lookup)


SOUND: dict[str, Callable[[], Any]] = {
    "map": lambda: numbers().map(lambda x: x + 1),
    "parallel map": lambda: numbers().map(lambda x: x + 1, num_parallel_calls=tf.data.AUTOTUNE),
    "filter": lambda: numbers().filter(lambda x: x > 3),
    "interleave": lambda: numbers().interleave(lambda x: D.range(x).take(2).batch(2)),
    "zip in a function": lambda: numbers().flat_map(lambda x: D.zip((D.range(x), D.range(x)))),
    "slices of pairs": lambda: D.from_tensor_slices(([1, 2], [3, 4])).map(lambda a, b: a + b),
    "concatenate": lambda: numbers().concatenate(numbers()),
    "repeat": lambda: numbers().repeat(2),
    "cache": lambda: numbers().cache().prefetch(2),
    "unbatch": lambda: D.from_tensor_slices([[1, 2], [3, 4]]).unbatch(),
    "random numbers": lambda: numbers().map(lambda x: (x, draw())),
    "stateless": lambda: numbers().map(lambda x: tf.random.stateless_uniform((), seed=(1, x))),
    "index shuffle": lambda: (
        numbers()
        .map(lambda x: tf.random.experimental.index_shuffle(x, [1, 2], tf.constant(8, tf.int64)))
        .filter(lambda x: x < 6)
    ),
    "zip with a constant": lambda: D.zip((numbers(), D.from_tensors(7).repeat())),
    "zip with random numbers": lambda: D.zip((numbers(), D.random())),
    "zip with batches of random numbers": lambda: D.zip(
        (numbers(), D.random().map(lambda n: n % 9).batch(2).prefetch(1))
    ),
    "constant table": lambda: from_table(numbers(), mutable=False),
    "one-element windows": lambda: numbers().window(1).flat_map(lambda w: w),
    "endless shuffled windows": lambda: shuffled().repeat().window(3, shift=1),
    "all of it": lambda: numbers().take(-1).skip(0),
    "none of it": lambda: numbers().skip(-1),
    "batches of one": lambda: (
        numbers().padded_batch(1).rebatch(1, drop_remainder=True).batch(1, drop_remainder=True)
    ),
    "endless batches": lambda: numbers().repeat().batch(2, drop_remainder=True),
    "generator": lambda: generated().take(3).batch(2),
}


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("mode", ["OFF", "DYNAMIC", "FILE", "DATA"])
def test_sound_pipelines_have_no_findings(name: str, mode: str) -> None:
    assert changes(SOUND[name](), mode) == []


JOINED_BATCHES: tuple[set[str], set[str], set[str]] = {"neighbors", "grouping"}, set(), set()

#: Pipelines with what changes by source, by result, and in each mode.
CHANGED: dict[str, tuple[Callable[[], Any], set[str], set[str], set[str]]] = {
    "zip": (lambda: D.zip((numbers(), numbers())), {"pairing"}, set(), set()),
    "zip of parts": (
        lambda: D.zip((numbers().skip(1), numbers())),
        {"pairing", "counting"},
        set(),
        set(),
    ),
    "choose": (
        lambda: D.choose_from_datasets([numbers(), numbers()], D.range(2).repeat()),
        {"pairing"},
        set(),
        set(),
    ),
    "sample": (lambda: D.sample_from_datasets([numbers(), numbers()]), set(), {"order"}, set()),
    "sample to the first end": (
        lambda: D.sample_from_datasets([numbers(), numbers()], stop_on_empty_dataset=True),
        {"counting"},
        {"order"},
        set(),
    ),
    "resample": (
        lambda: numbers().rejection_resample(lambda x: tf.cast(x % 2, tf.int32), [0.5, 0.5]),
        {"pairing", "counting", "grouping"},
        {"order"},
        set(),
    ),
    "take": (lambda: numbers().take(3), {"counting"}, set(), set()),
    "skip": (lambda: numbers().skip(3), {"counting"}, set(), set()),
    "enumerate": (lambda: numbers().enumerate(), {"counting"}, set(), set()),
    "zip with the sums of a generator": (
        lambda: D.zip(
            (generated().scan(tf.constant(0, tf.int64), lambda s, x: (s + x, s)), numbers())
        ),
        {"pairing"},
        set(),
        set(),
    ),
    "counter": (lambda: D.zip((D.counter(), numbers())), {"counting"}, set(), set()),
    "counters": (
        lambda: D.zip((numbers(), (D.counter(), D.counter()))),
        {"counting"},
        set(),
        set(),
    ),
    "shard": (lambda: numbers().shard(2, 0), {"counting"}, set(), set()),
    "take_while": (lambda: numbers().take_while(lambda x: x < 3), {"counting"}, set(), set()),
    "scan": (
        lambda: numbers().scan(tf.constant(0, tf.int64), lambda s, x: (s + x, s)),
        {"counting"},
        set(),
        set(),
    ),
    "unique": (lambda: numbers().unique(), {"counting"}, set(), set()),
    "batch of one": (lambda: numbers().batch(1), set(), set(), set()),
    "batch": (lambda: numbers().batch(2), {"grouping"}, set(), set()),
    "parallel batch": (
        lambda: numbers().batch(2, num_parallel_calls=2),
        {"grouping"},
        set(),
        set(),
    ),
    "full batches": (lambda: numbers().batch(2, drop_remainder=True), {"counting"}, set(), set()),
    "padded batch": (lambda: numbers().padded_batch(2), {"grouping"}, set(), set()),
    "padding with true": (
        lambda: numbers().map(lambda x: x > 3).padded_batch(2, padding_values=True),
        {"grouping"},
        set(),
        set(),
    ),
    "full windows": (
        lambda: numbers().window(2, drop_remainder=True).flat_map(lambda w: w),
        {"neighbors"},
        set(),
        set(),
    ),
    "ragged batch": (lambda: numbers().ragged_batch(2), {"grouping"}, set(), set()),
    "rebatch": (lambda: numbers().batch(2).rebatch(3), {"grouping"}, set(), set()),
    "window": (
        lambda: numbers().window(3).flat_map(lambda w: w.batch(3)),
        {"neighbors"},
        set(),
        set(),
    ),
    "endless window": (lambda: numbers().repeat().window(3, shift=1), {"neighbors"}, set(), set()),
    "every second": (lambda: numbers().window(1, shift=2), {"neighbors"}, set(), set()),
    "sliding window": (lambda: sliding(numbers()), {"neighbors"}, set(), set()),
    "shuffled window": (lambda: shuffled().window(3), {"grouping"}, set(), set()),
    "shuffled full window": (
        lambda: shuffled().window(3, drop_remainder=True),
        {"counting"},
        set(),
        set(),
    ),
    "shuffled overlapping window": (
        lambda: shuffled().batch(2).window(3, shift=1),
        {"grouping", "counting"},
        set(),
        set(),
    ),
    "window of shuffled files": (
        lambda: shuffled().flat_map(D.range).window(3),
        {"neighbors"},
        set(),
        set(),
    ),
    "batches of batches": (
        lambda: numbers().batch(3).map(lambda x: (x[:-1], x[1:])).shuffle(3, seed=1).batch(2),
        {"neighbors", "grouping"},
        set(),
        {"random"},
    ),
    "endless batches of batches": (
        lambda: numbers().repeat().batch(3).batch(2),
        {"neighbors"},
        set(),
        set(),
    ),
    "groups of batches": (
        lambda: grouped(lambda group: group.batch(2), numbers().batch(3).map(lambda x: x[0])),
        {"neighbors", "grouping"},
        set(),
        set(),
    ),
    "rebatched batches": (lambda: numbers().batch(2).rebatch(3).batch(2), *JOINED_BATCHES),
    "numbered groups": (
        lambda: grouped(lambda group: group.enumerate()),
        {"counting"},
        set(),
        set(),
    ),
    "batches of shuffled batches": (
        lambda: shuffled().batch(3).batch(2),
        {"grouping"},
        set(),
        set(),
    ),
    "batches of elements of batches": (
        lambda: numbers().batch(3).map(lambda x: x + 1).unbatch().batch(2).rebatch(4),
        {"grouping"},
        set(),
        set(),
    ),
    "groups": (lambda: grouped(lambda group: group.batch(2)), {"grouping"}, set(), set()),
    "full groups": (
        lambda: grouped(lambda group: group.batch(2, drop_remainder=True)),
        {"counting"},
        set(),
        set(),
    ),
    "first of groups": (lambda: grouped(lambda group: group.take(1)), {"counting"}, set(), set()),
    "reduced groups": (
        lambda: grouped(
            lambda group: D.from_tensors(group.reduce(tf.constant(0, tf.int64), tf.add)),
            numbers().repeat(),
        ),
        {"counting"},
        set(),
        set(),
    ),
    "reducer": (
        lambda: numbers().apply(
            tf.data.experimental.group_by_reducer(lambda x: x % 2, summed()),
        ),
        {"undivided"},
        set(),
        set(),
    ),
    "endless reducer": (
        lambda: (
            numbers()
            .repeat()
            .apply(tf.data.experimental.group_by_reducer(lambda x: x % 2, summed()))
        ),
        {"undivided"},
        set(),
        set(),
    ),
    "repeated generator": (lambda: generated().repeat(2).take(3), {"counting"}, set(), set()),
    "shuffle": (lambda: numbers().shuffle(3), set(), {"order"}, set()),
    "shuffle in a function": (
        lambda: numbers().flat_map(lambda x: D.range(x).shuffle(3)),
        set(),
        {"order"},
        set(),
    ),
    "files": (lambda: D.list_files(FILES), set(), {"order"}, set()),
    "seeded shuffle": (lambda: numbers().shuffle(3, seed=1), set(), set(), {"random"}),
    "one seeded order": (
        lambda: numbers().shuffle(3, seed=1, reshuffle_each_iteration=False),
        set(),
        set(),
        set(),
    ),
    "any order": (
        lambda: numbers().map(lambda x: x, num_parallel_calls=2, deterministic=False),
        set(),
        {"order"},
        set(),
    ),
    "random filter": (lambda: numbers().filter(lambda x: draw()), set(), {"order"}, set()),
    "seeded numbers": (lambda: numbers().map(lambda x: draw(seed=1)), set(), set(), {"random"}),
    "random source": (lambda: D.random(seed=1), set(), set(), {"random"}),
    "generator state": (lambda: from_state(numbers()), set(), set(), {"random"}),
    "variable": (lambda: from_variable(numbers()), set(), set(), {"captured"}),
    "own variable": (lambda: from_variable(numbers(), True), set(), set(), {"captured"}),
    "table": (lambda: from_table(numbers(), mutable=True), set(), set(), {"captured"}),
    "file cache": (lambda: numbers().cache("somewhere"), set(), set(), {"external"}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_changes_are_found_by_mode(name: str) -> None:
    create, by_source, by_result, always = CHANGED[name]
    pipeline = graph_inspection.examine(create()).semantics
    expected = {
        "OFF": always,
        "DYNAMIC": by_source | always,
        "FILE": by_source | always,
        "DATA": by_result | (set() if name in ("seeded numbers", "random source") else always),
    }
    for mode, kinds_expected in expected.items():
        found = pipeline.changes(mode, 2)
        assert {change.kind for change in found} == kinds_expected
        refused = {change.kind for change in found if change.refused}
        assert refused == {"pairing", "order"} & kinds_expected
        assert found == sorted(found, key=lambda change: not change.refused)
        assert not any(change.refused for change in pipeline.changes(mode, 1))


class Seeded(random.Random):
    """A generator with the state of another class."""


RENEW, CREATE = "distribute the dataset again after it", "create it inside the function"


def test_container_that_a_function_only_fills_has_no_warning_in_this_process() -> None:
    seen, count = [], [0]

    def fill(value: int) -> int:
        seen.append(value)
        return value

    def add(value: int) -> int:
        count[0] += 1
        return value + count[0]

    for function, expected in ((fill, []), (add, ["python"])):
        dataset = numbers().map(lambda x, f=function: tf.numpy_function(f, [x], tf.int64))
        pipeline = graph_inspection.examine(dataset).semantics
        found = pipeline.changes("DYNAMIC", 2, in_process=True)
        assert [change.kind for change in found] == expected
        assert [change.kind for change in pipeline.changes("DYNAMIC", 2)] == ["python"]


@pytest.mark.parametrize(
    ("state", "name", "fix"),
    [
        (np.random.default_rng(1), "Generator", CREATE),
        (np.random.RandomState(1), "RandomState", CREATE),
        (np.random.PCG64(1), "PCG64", CREATE),
        (random.Random(1), "Random", CREATE),
        (Seeded(1), "Seeded", CREATE),
        (tf.Variable(1), "ResourceVariable", RENEW),
        (tf.random.Generator.from_seed(1), "Generator", CREATE),
        (
            types.SimpleNamespace(random=np.random.default_rng(1)),
            "state.random (Generator)",
            CREATE,
        ),
        (types.SimpleNamespace(Random=tf.Variable(1)), "state.Random (ResourceVariable)", RENEW),
        (itertools.count(), "state (count)", "call the function after distribute"),
    ],
)
def test_state_of_a_python_function_is_found(state: Any, name: str, fix: str) -> None:
    def used(value: int) -> int:
        return value + (state is None)

    dataset = numbers().map(lambda x: tf.numpy_function(lambda v: used(v), [x], tf.int64))
    pipeline = graph_inspection.examine(dataset).semantics
    (change,) = pipeline.changes("OFF", 2)
    assert change.kind == "python"
    assert name in change.what
    assert change.fix.startswith(fix)
    for mode in ("OFF", "DATA"):
        shared = pipeline.changes(mode, 2, in_process=True)
        expected = [] if change.fix.startswith(RENEW) else [True]
        assert ["the data workers share" in each.what for each in shared] == expected
        assert pipeline.changes(mode, 1, in_process=True) == []
    by_order = pipeline.changes("DYNAMIC", 2, in_process=True)
    counts = change.fix.startswith("call the function")
    assert ["for elements in any order" in each.what for each in by_order] == [True] * counts
    assert pipeline.keeps_elements("DATA")


def test_iterator_that_data_workers_share_gives_other_elements() -> None:
    elements = iter(range(9))
    count = itertools.count()
    for dataset in (from_python(lambda: elements), python_filter(lambda x: next(count) % 2 == 0)):
        pipeline = graph_inspection.examine(dataset).semantics
        (change,) = pipeline.changes("DATA", 2, in_process=True)
        assert change.kind == "python"
        assert "the data workers share" in change.what
        ordered = pipeline.changes("DYNAMIC", 2, in_process=True)
        is_filter = change.operation.startswith("filter")  # one data worker has the generator
        assert ["in any order" in each.what for each in ordered] == [True] * is_filter
        assert not pipeline.keeps_elements("DATA")
        assert not pipeline.keeps_elements("OFF")


def test_generator_and_variable_have_a_step_each() -> None:
    state = [tf.Variable(1), np.random.default_rng(1)]
    dataset = numbers().map(lambda x: tf.numpy_function(lambda v: v + len(state), [x], tf.int64))
    (change,) = changes(dataset, "OFF")
    assert change.fix.startswith(f"for the generator, {CREATE}")
    assert f"For the variable or table, {RENEW}" in change.fix


def test_python_function_without_state_is_sound() -> None:
    table, lock = {1: 2}, [3]

    def used(value: int) -> int:
        return table.get(value, lock[0]) + np.random.randint(3) + random.randrange(3)

    dataset = numbers().map(lambda x: tf.numpy_function(used, [x], tf.int64))
    assert changes(dataset, "OFF") == []


def select_at_random(x: Any) -> Any:
    return random.random() > x


class Loader:
    def __init__(self, order: np.random.Generator) -> None:
        self._order = order

    def elements(self) -> Any:
        yield from self._order.permutation(9)


def shuffled_elements() -> Any:
    order = list(range(9))
    random.shuffle(order)
    yield from order


def python_filter(function: Callable[[Any], Any], dataset: Any = None) -> Any:
    elements = numbers() if dataset is None else dataset
    return elements.filter(lambda x: tf.numpy_function(function, [x], tf.bool))


def from_python(generator: Callable[[], Any]) -> Any:
    return D.from_generator(generator, output_signature=tf.TensorSpec((), tf.int64))


@pytest.mark.parametrize(
    "create",
    [
        lambda: python_filter(lambda x: np.random.rand() > x),
        lambda: python_filter(lambda x: select_at_random(x)),
        lambda: python_filter(select_at_random, numbers().batch(2)),
        lambda: numbers().filter(lambda x: tf.py_function(select_at_random, [x], tf.bool)),
        lambda: python_filter(lambda x, draw=random.random: draw() > x),
        lambda: numbers().take_while(
            lambda x: tf.numpy_function(select_at_random, [x], tf.bool),
        ),
        lambda: from_python(shuffled_elements),
        lambda: from_python(lambda: shuffled_elements()),
        lambda: from_python(Loader(np.random.default_rng(1)).elements),
        lambda: numbers().flat_map(lambda _: from_python(shuffled_elements)),
        lambda: (
            numbers()
            .map(lambda x: tf.numpy_function(lambda v: v + random.randrange(3), [x], tf.int64))
            .filter(lambda x: x > 3)
        ),
    ],
)
def test_python_function_that_names_random_numbers_may_select_or_order(
    create: Callable[[], Any],
) -> None:
    pipeline = graph_inspection.examine(create()).semantics
    (change,) = (each for each in pipeline.changes("DATA", 2) if each.kind == "order")
    assert "random numbers" in change.what
    assert "elements are missing" in change.what
    assert not change.refused
    assert "order" not in {each.kind for each in pipeline.changes("DYNAMIC", 2)}
    assert "order" not in {each.kind for each in pipeline.changes("OFF", 2)}


def test_random_order_of_a_method_is_found_with_its_state() -> None:
    pipeline = graph_inspection.examine(from_python(Loader(np.random.default_rng(1)).elements))
    found = pipeline.semantics.changes("DATA", 2)
    assert {change.kind for change in found} == {"order", "python"}


@pytest.mark.parametrize(
    "create",
    [
        lambda: python_filter(lambda x: x > 3),
        lambda: from_python(lambda: iter(range(9))),
        lambda: from_python(lambda: (len(re.findall("a", "aa")) for _ in range(9))),
        lambda: numbers().map(lambda x: tf.numpy_function(select_at_random, [x], tf.bool)),
    ],
)
def test_python_function_that_selects_in_one_order_is_sound(create: Callable[[], Any]) -> None:
    assert changes(create(), "DATA") == []


def drawn(dataset: Any = None, seed: int | None = None, **options: Any) -> Any:
    """Return pairs of a number and a random number."""
    elements = numbers() if dataset is None else dataset
    return elements.map(lambda x: (x, tf.random.uniform((), seed=seed)), **options)


def generated_drawn() -> Any:
    generator = tf.random.Generator.from_seed(1)
    return numbers().map(lambda x: (x, generator.uniform(())))


def above(x: Any, number: Any) -> Any:
    return number > 0.5


@tf.function
def swapped(x: Any, number: Any) -> Any:
    return number, x


def grouped_by(key: Callable[..., Any], dataset: Any) -> Any:
    return dataset.group_by_window(
        lambda *parts: tf.cast(key(*parts), tf.int64), lambda _, group: group.batch(2), 2
    )


#: Pipelines whose elements are selected or ordered by random numbers.
SELECTED_AT_RANDOM: dict[str, Callable[[], Any]] = {
    "filter": lambda: drawn().filter(above),
    "generator state": lambda: generated_drawn().filter(above),
    "changed order of parts": lambda: drawn().map(swapped).filter(lambda number, x: number > 0.5),
    "dict": lambda: (
        drawn().map(lambda x, n: {"a": x, "b": n}).filter(lambda parts: parts["b"] > 0.5)
    ),
    "later": lambda: drawn().shuffle(3, seed=1).repeat(2).take(9).prefetch(2).filter(above),
    "batches": lambda: drawn().batch(3).filter(lambda x, n: tf.reduce_any(n > 0.5)),
    "elements of batches": lambda: drawn().padded_batch(3).unbatch().filter(above),
    "parallel": lambda: drawn(num_parallel_calls=2).filter(above),
    "derived": lambda: drawn().map(lambda x, n: tf.cast(n, tf.int64) + x).filter(lambda x: x > 3),
    "zip": lambda: D.zip((numbers(), drawn())).filter(lambda x, pair: pair[1] > 0.5),
    "random source": lambda: D.zip((D.random(), numbers())).filter(lambda n, x: n > 3),
    "concatenate": lambda: drawn().concatenate(drawn(seed=1)).filter(above),
    "take_while": lambda: drawn().take_while(above),
    "unique": lambda: drawn().map(lambda x, n: tf.cast(n * 3, tf.int64)).unique(),
    "groups": lambda: grouped_by(above, drawn()),
    "random groups": lambda: grouped_by(lambda x: draw(), numbers()),
    "choice": lambda: D.choose_from_datasets(
        [numbers(), numbers()], drawn().map(lambda x, n: tf.cast(n > 0.5, tf.int64))
    ),
    "size of a dataset": lambda: drawn().flat_map(lambda x, n: D.range(tf.cast(n * 3, tf.int64))),
    "inside": lambda: numbers().flat_map(lambda x: D.range(x).filter(lambda y: draw())),
    "captured": lambda: drawn().flat_map(
        lambda x, n: D.range(x).filter(lambda y: tf.cast(y, tf.float32) > n)
    ),
    "clock": lambda: numbers().filter(lambda x: tf.timestamp() % 1 > 0.5),
    "random source inside": lambda: numbers().filter(
        lambda x: D.random().take(1).get_single_element() % 2 == 0
    ),
    "branch": lambda: numbers().filter(lambda x: tf.cond(x > 3, draw, lambda: True)),
    "loop": lambda: numbers().filter(
        lambda x: tf.reduce_any(tf.map_fn(lambda _: draw(), tf.range(3), tf.bool))
    ),
}


def loaded(path: Path) -> Any:
    numbers().save(str(path))
    return D.load(str(path), reader_func=lambda parts: parts.shuffle(9).flat_map(lambda x: x))


def read_in_any_order() -> Any:
    interleave = tf.data.experimental.parallel_interleave(D.range, cycle_length=2, sloppy=True)
    return numbers().apply(interleave)


def test_step_for_an_order_can_be_taken(tmp_path: Path) -> None:
    for dataset, fix in (
        (loaded(tmp_path), "shuffle after distribute, not in its function"),
        (read_in_any_order(), "use sloppy=False"),
    ):
        (change,) = graph_inspection.examine(dataset).semantics.changes("DATA", 2)
        assert (change.kind, change.fix) == ("order", fix)


@pytest.mark.parametrize("name", SELECTED_AT_RANDOM)
def test_random_selection_is_refused_if_results_are_divided(name: str) -> None:
    pipeline = graph_inspection.examine(SELECTED_AT_RANDOM[name]()).semantics
    found = [change for change in pipeline.changes("DATA", 2) if change.kind == "order"]
    assert [change.refused for change in found] == [True]
    assert "the random selection differs on each data worker" in found[0].what
    assert "order" not in {change.kind for change in pipeline.changes("OFF", 2)}
    assert not pipeline.keeps_elements("OFF")


#: Pipelines with random numbers that do not select or order elements.
RANDOM_AND_SOUND: dict[str, Callable[[], Any]] = {
    "label": lambda: drawn().filter(lambda x, n: x > 3),
    "label of a function": lambda: drawn().map(swapped).filter(lambda n, x: x > 3),
    "label of a dict": lambda: (
        drawn().map(lambda x, n: {"a": x, "b": n}).filter(lambda parts: parts["a"] > 3)
    ),
    "label later": lambda: drawn().repeat(2).prefetch(2).filter(lambda x, n: x > 3),
    "labels": lambda: grouped_by(lambda x, n: x % 2, drawn()),
    "zip": lambda: D.zip((drawn(), numbers())).filter(lambda pair, x: x > 3),
    "random source": lambda: D.zip((D.random(), numbers())).filter(lambda n, x: x > 3),
    "in the function": lambda: numbers().interleave(
        lambda x: drawn(D.range(x).filter(lambda y: y != 2))
    ),
    "element of a function": lambda: numbers().flat_map(
        lambda x: D.from_tensors((x, tf.random.uniform(())))
    ),
    "replaced": lambda: drawn().map(lambda x, n: x).filter(lambda x: x > 3),
}


@pytest.mark.parametrize("name", RANDOM_AND_SOUND)
def test_random_numbers_that_do_not_select_are_sound(name: str) -> None:
    pipeline = graph_inspection.examine(RANDOM_AND_SOUND[name]()).semantics
    assert [change for change in pipeline.changes("DATA", 2) if change.kind != "grouping"] == []


@pytest.mark.parametrize(
    "create",
    [
        lambda: drawn(seed=1).filter(above),
        lambda: D.sample_from_datasets([numbers(), numbers()], seed=1),
        lambda: D.zip((D.random(seed=1), numbers())).filter(lambda n, x: n > 3),
        lambda: numbers().flat_map(lambda x: drawn(D.range(x), seed=1).filter(above)),
    ],
)
def test_selection_with_a_seed_is_the_same_on_each_data_worker(create: Callable[[], Any]) -> None:
    assert kinds(create(), "DATA") == set()
    assert kinds(create(), "DYNAMIC") & {"random", "pairing"}
    assert graph_inspection.examine(create()).semantics.keeps_elements("OFF")


@pytest.mark.parametrize(
    ("create", "source"),
    [
        (lambda: drawn(seed=1, num_parallel_calls=2).filter(above), "an operation before it"),
        (
            lambda: numbers().interleave(
                lambda x: D.range(tf.random.uniform((), 0, 4, tf.int64, seed=1)),
                num_parallel_calls=2,
            ),
            "an operation in it",
        ),
        (
            lambda: drawn().window(2).flat_map(lambda x, n: D.zip((x, n))),
            "an operation before it",
        ),
        (
            lambda: numbers().flat_map(lambda x: drawn(D.range(x)).filter(above)),
            "an operation in it",
        ),
        (
            lambda: drawn().filter(lambda x, n: tf.size(tf.range(n)) > 0),
            "an operation before it",
        ),
        (
            lambda: numbers().batch(3).map(tf.random.shuffle).unbatch(),
            "an operation before it",
        ),
        (
            lambda: numbers().batch(3).map(tf.random.shuffle).rebatch(2),
            "an operation before it",
        ),
    ],
)
def test_possible_random_selection_is_a_warning(create: Callable[[], Any], source: str) -> None:
    found = [change for change in changes(create(), "DATA") if change.kind == "order"]
    assert [change.refused for change in found] == [False]
    assert f"by random numbers of {source}" in found[0].what


def test_functions_are_followed_only_if_they_draw() -> None:
    dataset = numbers().map(lambda x: x + 1).filter(lambda x: x > 3).flat_map(D.range)
    definition = graph_inspection.definition_of(dataset)
    pipeline = semantics.Semantics(definition)
    pipeline.changes("DATA", 2)
    nodes = sum(len(function.node_def) for function in definition.library.function)
    assert pipeline.visited == len(pipeline.ops) + nodes


@pytest.mark.parametrize("in_process", [False, True])
def test_cache_after_a_function_with_state_changes_in_each_epoch(in_process: bool) -> None:
    variable = tf.Variable(1)
    added = numbers().map(lambda x: tf.numpy_function(lambda v: v + variable.numpy(), [x], x.dtype))
    pipeline = graph_inspection.examine(added.prefetch(2).cache()).semantics
    found = [each for each in pipeline.changes("OFF", 2, in_process) if each.kind == "captured"]
    assert ["each epoch fills it again" in each.what for each in found] == [True]


@pytest.mark.parametrize(
    "create", [lambda: numbers().shuffle(9).take(3).cache(), lambda: drawn().filter(above).cache()]
)
def test_random_selection_in_a_cache_changes_in_each_epoch(create: Callable[[], Any]) -> None:
    (change,) = (each for each in changes(create(), "OFF") if each.kind == "random")
    assert "each epoch fills it again" in change.what


def test_method_with_a_global_generator_has_a_copy() -> None:
    class Selector:
        def above(self, x: Any) -> Any:
            return GENERATOR.random() > x

    (change,) = changes(python_filter(Selector().above), "OFF")
    assert "GENERATOR (Generator)" in change.what


@pytest.mark.parametrize("seed", [None, 1])
def test_part_of_one_random_order_differs_on_each_data_worker(seed: int | None) -> None:
    one_order = numbers().shuffle(9, seed=seed, reshuffle_each_iteration=False)
    for selected in (one_order.take(3), one_order.map(lambda x: x + 1).skip(3)):
        found = changes(selected, "OFF")
        assert [change.kind for change in found] == ["random"] * (seed is None)
        assert all("another order" in change.what for change in found)
    assert changes(one_order.batch(3).take(-1), "OFF") == []
    mixed = numbers().shuffle(9, seed=seed)
    assert changes(mixed.unique(), "OFF") == changes(mixed, "OFF")


def test_seed_of_the_program_counts() -> None:
    tf.random.set_seed(1)
    try:
        assert kinds(numbers().shuffle(3), "OFF") == {"random"}
    finally:
        tf.random.set_seed(None)


def test_options_of_the_dataset_count() -> None:
    options = tf.data.Options()
    options.deterministic = False
    dataset = numbers().map(lambda x: x, num_parallel_calls=2).with_options(options)
    assert kinds(dataset, "DATA") == {"order"}


def unordered(dataset: Any) -> Any:
    return dataset.map(lambda x: x + 1, num_parallel_calls=2, deterministic=False)


@pytest.mark.parametrize(
    "create",
    [
        lambda: numbers().flat_map(lambda x: unordered(D.range(x))),
        lambda: numbers().interleave(lambda x: unordered(D.range(x))),
        lambda: numbers().flat_map(lambda x: D.range(x).flat_map(lambda y: unordered(D.range(y)))),
        lambda: grouped(lambda group: unordered(group).batch(2)),
    ],
)
def test_any_order_in_a_function_is_refused_if_results_are_divided(
    create: Callable[[], Any],
) -> None:
    (change,) = (each for each in changes(create(), "DATA") if each.kind == "order")
    assert change.refused
    assert "order" not in kinds(create(), "DYNAMIC")


def test_part_of_any_order_in_a_function_differs_on_each_data_worker() -> None:
    dataset = numbers().flat_map(lambda x: unordered(D.range(x)).take(1))
    assert not graph_inspection.examine(dataset).semantics.keeps_elements("OFF")


def test_choice_of_random_elements_differs_in_each_epoch() -> None:
    choice = D.range(2).repeat(3)
    random = D.choose_from_datasets([numbers(), D.random().take(6)], choice)
    assert not graph_inspection.examine(random).semantics.keeps_elements("OFF")
    sure = D.choose_from_datasets([numbers(), D.random(seed=1).take(6)], choice)
    assert graph_inspection.examine(sure).semantics.keeps_elements("OFF")


def test_options_of_the_dataset_count_in_functions() -> None:
    options = tf.data.Options()
    options.deterministic = False
    dataset = numbers().flat_map(lambda x: D.range(x).map(lambda y: y, num_parallel_calls=2))
    assert kinds(dataset, "DATA") == set()
    assert kinds(dataset.with_options(options), "DATA") == {"order"}


def test_hint_divides_at_the_shard() -> None:
    assert kinds(numbers().shard(SHARE, SHARE).take(3), "HINT") == {"counting"}
    assert kinds(numbers().take(3).shard(SHARE, SHARE), "HINT") == set()
    assert kinds(numbers().shuffle(3).shard(SHARE, SHARE), "HINT") == {"order"}
    assert kinds(numbers().shard(SHARE, SHARE).shuffle(3), "HINT") == set()


def hinted(dataset: Any = None) -> Any:
    elements = numbers() if dataset is None else dataset
    return elements.shard(SHARE, SHARE)


@pytest.mark.parametrize(
    "create",
    [
        lambda: hinted().concatenate(numbers()),
        lambda: numbers().concatenate(hinted()),
        lambda: D.sample_from_datasets([hinted(), numbers()]),
        lambda: hinted(generated()).take(3),  # its source is one unit
    ],
)
def test_part_without_the_hint_is_delivered_by_each_data_worker(create: Callable[[], Any]) -> None:
    (change,) = (each for each in changes(create(), "HINT", 3) if each.kind == "counting")
    assert "occur up to 3 times" in change.what or "9 may arrive" in change.what
    assert not graph_inspection.examine(create()).semantics.keeps_elements("HINT")


def test_hint_after_several_datasets_divides_all_of_them() -> None:
    assert kinds(hinted(numbers().concatenate(numbers())), "HINT") == set()
    assert kinds(hinted().concatenate(hinted()), "HINT") == set()


@pytest.mark.parametrize(
    "create",
    [
        lambda: numbers().cache().repeat(),
        lambda: numbers().cache().map(lambda x: x + 1).repeat(2),
        lambda: numbers().cache().shuffle(3).repeat().batch(2),
        lambda: generated().cache().repeat(2),
    ],
)
def test_cache_before_repeat_keeps_the_share_of_a_data_worker(create: Callable[[], Any]) -> None:
    pipeline = graph_inspection.examine(create()).semantics
    (change,) = (each for each in pipeline.changes("DYNAMIC", 2) if each.kind == "cached")
    assert "do not arrive again" in change.what
    assert not change.refused
    assert not pipeline.keeps_elements("DYNAMIC")
    for mode in ("OFF", "FILE", "DATA"):  # with a fixed number of data workers, or all elements
        assert "cached" not in {each.kind for each in pipeline.changes(mode, 2)}


def test_cache_without_repeat_has_no_finding() -> None:
    for create in (
        lambda: numbers().cache().repeat(1),
        lambda: numbers().repeat().cache(),
        lambda: numbers().flat_map(lambda x: D.range(x).cache().repeat(2)),
    ):
        assert changes(create(), "DYNAMIC") == []


def test_data_worker_repeats_the_single_source_that_it_has_cached() -> None:
    def found(dataset: Any) -> set[str]:
        return kinds(dataset.repeat(2).batch(2, drop_remainder=True), "DYNAMIC")

    assert found(generated()) == {"counting"}
    assert found(generated().cache()) == {"cached"}
    assert found(numbers().cache()) == {"cached", "counting"}


def test_file_of_a_cache_replaces_the_share_of_a_data_worker() -> None:
    pipeline = graph_inspection.examine(numbers().cache("somewhere")).semantics
    for mode in ("DYNAMIC", "FILE"):
        (change,) = pipeline.changes(mode, 3)
        assert "fails while another one writes there" in change.what
        assert "elements may be missing, or occur up to 3 times" in change.what
        assert not pipeline.keeps_elements(mode)
    for mode in ("OFF", "DATA"):
        (change,) = pipeline.changes(mode, 3)
        assert "fails while another one writes there" in change.what
        assert "missing" not in change.what
        assert pipeline.keeps_elements(mode)
    (change,) = pipeline.changes("DYNAMIC", 1)
    assert change.what.startswith("with a second data worker, each data worker writes")


def test_snapshot_that_is_read_while_it_is_written_loses_elements() -> None:
    pipeline = graph_inspection.examine(numbers().snapshot("somewhere")).semantics
    (change,) = pipeline.changes("DATA", 2)
    assert "up to 50% of the elements are missing" in change.what
    assert not pipeline.keeps_elements("DATA")
    assert pipeline.keeps_elements("OFF")


def dependent(x: Any) -> Any:
    return D.range(x).cache("somewhere")


def own_file(x: Any) -> Any:
    return D.range(x).cache(tf.strings.as_string(x))


def captured_path() -> Any:
    path = tf.constant("somewhere")
    return numbers().flat_map(lambda x: D.range(x).cache(path))


#: Functions that write a file which all of their calls use.
ONE_FILE: dict[str, Callable[[], Any]] = {
    "flat_map": lambda: numbers().flat_map(dependent),
    "interleave": lambda: numbers().interleave(dependent, num_parallel_calls=2),
    "called": lambda: numbers().flat_map(tf.function(dependent)),
    "inside": lambda: numbers().flat_map(lambda x: D.range(3).flat_map(lambda _: dependent(x))),
    "of an inner element": lambda: numbers().flat_map(lambda x: D.range(x).flat_map(own_file)),
    "captured": captured_path,
    "drawn": lambda: numbers().flat_map(lambda x: D.range(x).cache(tf.strings.as_string(draw()))),
    "group": lambda: grouped(lambda group: group.batch(2).cache("somewhere")),
}


@pytest.mark.parametrize("name", ONE_FILE)
def test_file_of_all_calls_has_the_elements_of_any_call(name: str) -> None:
    pipeline = graph_inspection.examine(ONE_FILE[name]()).semantics
    for mode in ("DYNAMIC", "FILE"):
        (change,) = (each for each in pipeline.changes(mode, 2) if each.kind == "external")
        assert "each data worker writes to" in change.what
        assert "up to all may differ" in change.what
        assert change.fix.startswith("use another path for each element")
        assert not pipeline.keeps_elements(mode)
        # Any call can be the first one, also in the consumer.
        assert "pairing" in {each.effect for each in pipeline.operations(mode, 2)}
        (change,) = (each for each in pipeline.changes(mode, 1) if each.kind == "external")
        assert change.what.startswith("with a second data worker, ")
    for mode in ("OFF", "DATA", "HINT"):
        (change,) = (each for each in pipeline.changes(mode, 2) if each.kind == "external")
        assert "differ" not in change.what


def test_dataset_that_a_function_saves_can_be_incomplete(tmp_path: pathlib.Path) -> None:
    def save(x: Any) -> Any:
        D.range(x).save(str(tmp_path))
        return x

    (change,) = changes(numbers().map(save), "DATA")
    assert change.what == (
        f"each data worker writes to {tmp_path} in its function, so up to all elements may be "
        "missing when it is read"
    )


def test_file_with_the_same_elements_in_each_call_can_be_written_twice() -> None:
    dataset = numbers().flat_map(lambda _: D.range(3).cache("somewhere"))
    pipeline = graph_inspection.examine(dataset).semantics
    for mode in MODES:
        (change,) = pipeline.changes(mode, 2)
        assert change.what == (
            "each data worker writes to somewhere in its function, and fails while another one "
            "writes there"
        )
    assert "pairing" not in {each.effect for each in pipeline.operations("DYNAMIC", 2)}


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.flat_map(own_file),
        lambda x: x.interleave(tf.function(own_file), num_parallel_calls=2),
    ],
)
def test_file_of_each_element_is_written_by_one_data_worker(read: Callable[[Any], Any]) -> None:
    pipeline = graph_inspection.examine(read(numbers())).semantics
    for mode in ("DYNAMIC", "FILE"):
        assert pipeline.changes(mode, 2) == []
        assert pipeline.keeps_elements(mode)
    for mode in ("OFF", "DATA", "FILE_OR_DATA", "HINT"):
        (change,) = pipeline.changes(mode, 2)
        assert change.kind == "external"
        assert "at the same time" in change.what
    (change,) = (
        each for each in changes(read(numbers().repeat(2)), "DYNAMIC") if each.kind == "external"
    )
    assert "at the same time" in change.what
    assert kinds(read(hinted()), "HINT") == set()


@pytest.mark.parametrize(
    "create",
    [
        lambda: numbers().flat_map(lambda x: D.range(x).cache()),
        lambda: numbers().flat_map(lambda x: D.range(x).snapshot("somewhere")),
        lambda: generated().flat_map(dependent),  # one data worker receives all elements
    ],
)
def test_function_without_a_file_of_several_data_workers_has_no_finding(
    create: Callable[[], Any],
) -> None:
    assert changes(create(), "DYNAMIC") == []


@pytest.mark.parametrize(
    "create",
    [
        lambda: numbers().shuffle(3).batch(2),
        lambda: numbers().shuffle(3).take(-1).skip(0).unique(),
        lambda: numbers().shuffle(3, seed=1).take(3),
        lambda: numbers().take(3).shuffle(3),
        lambda: numbers().batch(2, drop_remainder=True).window(2),
        lambda: numbers().map(lambda x: (x, draw())),
        lambda: D.zip((numbers(), numbers())),
        lambda: D.sample_from_datasets([numbers(), numbers()]),
        lambda: D.random(seed=1).take(3),
    ],
)
def test_each_data_worker_delivers_the_same_elements(create: Callable[[], Any]) -> None:
    assert graph_inspection.examine(create()).semantics.keeps_elements("OFF")


@pytest.mark.parametrize(
    "create",
    [
        lambda: numbers().shuffle(3).take(3),
        lambda: numbers().shuffle(3).map(lambda x: x + 1).repeat(2).shard(2, 0).batch(2),
        lambda: numbers().shuffle(3).batch(2, drop_remainder=True),
        lambda: numbers().shuffle(3).window(2, shift=1),
        lambda: numbers().shuffle(3).enumerate(),
        lambda: D.zip((numbers(), numbers().shuffle(3))),
        lambda: D.list_files(FILES).take(1),
        lambda: numbers().flat_map(lambda x: D.range(x).shuffle(3).take(1)),
        lambda: numbers().flat_map(lambda x: D.range(x).shuffle(3)).take(1),
        lambda: numbers().map(lambda x: x, num_parallel_calls=2, deterministic=False).take(1),
        lambda: numbers().filter(lambda x: draw()),
        lambda: numbers().map(lambda x: x + tf.cast(draw(), tf.int64)).filter(lambda x: x > 3),
        lambda: from_python(shuffled_elements),
        lambda: python_filter(select_at_random),
        lambda: D.sample_from_datasets([numbers(), numbers()]).take(3),
        lambda: D.random().take(3),
        lambda: D.sample_from_datasets([numbers(), numbers()], stop_on_empty_dataset=True),
        lambda: numbers().rejection_resample(lambda x: tf.cast(x % 2, tf.int32), [0.5, 0.5]),
    ],
)
def test_each_data_worker_may_deliver_other_elements(create: Callable[[], Any]) -> None:
    assert not graph_inspection.examine(create()).semantics.keeps_elements("OFF")


def test_elements_of_an_unknown_operation_are_not_promised() -> None:
    definition = tf.compat.v1.GraphDef()
    definition.node.add(name="source", op="RangeDataset")
    definition.node.add(name="new", op="TelepathyDatasetV7", input=["source"])
    assert not any(semantics.Semantics(definition).keeps_elements(mode) for mode in MODES)


def test_weights_of_a_dataset_select_at_random() -> None:
    weights = D.from_tensors([0.5, 0.5]).repeat()
    sampled = D.sample_from_datasets([numbers(), numbers()], weights=weights)
    assert changes(sampled, "DYNAMIC") == []
    (change,) = changes(sampled, "DATA")
    assert change.operation.startswith("sample_from_datasets(")
    assert change.refused


def test_table_that_the_function_changes_is_a_copy() -> None:
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def count(x: Any) -> Any:
        number = table.lookup(x) + 1
        table.insert(x, number)
        return number

    (change,) = changes(numbers().map(count), "DYNAMIC")
    assert change.what.startswith("each data worker changes its own copy of a table")


def test_zip_with_a_counter_has_its_own_name() -> None:
    (change,) = changes(D.zip((numbers(), D.counter(5))), "DYNAMIC")
    assert (change.kind, change.operation.partition("(")[0]) == ("counting", "zip")
    assert change.fix.startswith("call zip() after distribute")


def spread(dataset: Any, **options: Any) -> Any:
    return dataset.interleave(lambda *_: D.range(3), cycle_length=2, **options)


#: Pipelines of which each data worker reads the whole source in mode "dynamic".
READ_AS_A_WHOLE: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: spread(shuffled()),
    "shuffle with a seed": lambda: spread(numbers().shuffle(3, seed=1)),
    "names of files": lambda: D.list_files(FILES).interleave(tf.data.TextLineDataset),
    "repeat": lambda: spread(numbers().repeat(2)),
    "endless": lambda: spread(numbers().repeat()),
    "later": lambda: spread(shuffled().map(lambda x: x + 1).batch(2).prefetch(2)),
    "cache": lambda: spread(shuffled().cache()),
    "parallel": lambda: spread(spread(shuffled(), num_parallel_calls=2)),
    "groups": lambda: grouped(lambda group: group.batch(2), shuffled()),
    "single source": lambda: spread(D.from_tensors(3).shuffle(3)),
}


@pytest.mark.parametrize("name", READ_AS_A_WHOLE)
def test_source_that_each_data_worker_reads_is_refused(name: str) -> None:
    pipeline = graph_inspection.examine(READ_AS_A_WHOLE[name]()).semantics
    found = [each for each in pipeline.changes("DYNAMIC", 2) if each.refused]
    assert [each.kind for each in found] == ["counting"]
    assert "each data worker reads the whole source" in found[0].what
    step = "call group_by_window() after distribute"
    if name != "groups":
        step = "use num_parallel_calls=tf.data.AUTOTUNE in interleave()"
    assert found[0].fix == step
    assert not pipeline.keeps_elements("DYNAMIC")
    for mode in ("DATA", "OFF", "FILE", "HINT"):
        assert "whole source" not in str(pipeline.changes(mode, 2))


@pytest.mark.parametrize(
    "create",
    [
        lambda: spread(shuffled(), num_parallel_calls=tf.data.AUTOTUNE),
        lambda: spread(numbers().repeat(1)),
        lambda: spread(numbers().cache().repeat(2)),
        lambda: spread(shuffled().concatenate(numbers())),
        lambda: spread(shuffled().enumerate()),
        lambda: spread(numbers().flat_map(lambda x: D.range(x).shuffle(3))),
        lambda: numbers().flat_map(lambda x: spread(D.range(x).shuffle(3))),
        lambda: shuffled().flat_map(D.range),
    ],
)
def test_source_that_the_data_workers_share_is_not_refused(create: Callable[[], Any]) -> None:
    assert "whole source" not in str(changes(create(), "DYNAMIC"))


def test_drawn_numbers_that_are_dropped_are_missing() -> None:
    drawn = D.random(1).take(11).shard(SHARE, SHARE)
    assert kinds(drawn.batch(3, drop_remainder=True), "HINT") == {"counting"}
    assert kinds(drawn.batch(3), "HINT") == {"grouping"}
    assert kinds(D.random().batch(3, drop_remainder=True), "DYNAMIC") == set()


def test_numbers_of_a_single_source_are_not_divided() -> None:
    numbered = generated().enumerate()
    assert kinds(numbered.take(3).map(lambda number, x: number), "DYNAMIC") == set()
    assert kinds(numbered.window(2).flat_map(lambda i, x: D.zip((i, x))), "DYNAMIC") == set()


def test_mode_hint_without_a_hint_divides_nothing() -> None:
    assert changes(numbers().shuffle(3).take(2), "HINT") == []


def test_file_or_data_depends_on_the_source() -> None:
    files = tf.data.TextLineDataset(["a", "b"]).shuffle(3).take(1)
    assert kinds(files, "FILE_OR_DATA") == {"counting"}
    assert kinds(numbers().shuffle(3).take(1), "FILE_OR_DATA") == {"order"}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Any]:
    """Return a function that returns a dataset of four files with three numbers each."""
    directory = tmp_path_factory.mktemp("records")
    for number in range(4):
        np.arange(3 * number, 3 * number + 3).tofile(directory / f"{number}.bin")
    names = [str(path) for path in sorted(directory.iterdir())]

    def read() -> Any:
        return tf.data.FixedLengthRecordDataset(names, 8).map(
            lambda record: tf.io.decode_raw(record, tf.int64)[0]
        )

    return read


def divided(dataset: Any, policy: tf.data.experimental.AutoShardPolicy) -> Any:
    """Return the elements of each of two data workers. None if TensorFlow cannot divide them."""
    elements = []
    for worker in range(2):
        try:
            variant = tf.raw_ops.AutoShardDataset(
                input_dataset=dataset._variant_tensor,
                num_workers=2,
                index=worker,
                auto_shard_policy=policy.value,
                num_replicas=1,
                output_types=dataset._flat_types,
                output_shapes=dataset._flat_shapes,
            )
        except tf.errors.NotFoundError:
            return None
        shard = dataset_ops._VariantDataset(variant, dataset.element_spec)
        elements.append(str([tf.nest.map_structure(np.array, each) for each in shard]))
    return elements


def test_generator_after_files_is_named(tmp_path: Any) -> None:
    (tmp_path / "lines").write_text("1\n2\n")
    lines = tf.data.TextLineDataset(str(tmp_path / "lines"))
    joined = lines.concatenate(generated().map(tf.as_string))
    (change,) = changes(joined, "FILE_OR_DATA")
    assert change.refused
    assert change.operation.startswith("from_generator(")


#: Operations on a dataset that reads files.
AFTER_FILES: dict[str, Callable[[Any], Any]] = {
    "sound": lambda files: (
        files.map(lambda x: x + 1, num_parallel_calls=2).filter(lambda x: x > 3).prefetch(2)
    ),
    "batches": lambda files: files.batch(2).unbatch().padded_batch(2),
    "parallel batches": lambda files: files.batch(2, num_parallel_calls=2),
    "rebatch": lambda files: files.batch(2).rebatch(3),
    "window": lambda files: files.window(2).flat_map(lambda w: w.batch(2)),
    "parts": lambda files: files.take(9).skip(1).shard(2, 0).repeat(2).cache(),
    "interleave": lambda files: files.interleave(D.range, num_parallel_calls=2),
    "groups": lambda files: grouped(lambda group: group.batch(2), files),
    "reducer": lambda files: files.apply(
        tf.data.experimental.group_by_reducer(lambda x: x % 2, summed())
    ),
    "enumerate": lambda files: files.enumerate(),
    "scan": lambda files: files.scan(tf.constant(0, tf.int64), lambda s, x: (s + x, s)),
    "take_while": lambda files: files.take_while(lambda x: x < 9),
    "unique": lambda files: files.unique(),
    "errors": lambda files: files.ignore_errors(),
    "files": lambda files: D.zip((files, files.concatenate(files))),
    "choice": lambda files: D.choose_from_datasets([files, files], D.range(2).repeat(6)),
    "number first": lambda files: numbers().concatenate(files),
    "number last": lambda files: files.concatenate(numbers()),
    "slices last": lambda files: files.concatenate(D.from_tensor_slices(np.arange(3))),
    "pair": lambda files: D.zip((files, numbers())),
    "random": lambda files: D.zip((files, D.random(seed=1))),
    "scan last": lambda files: files.concatenate(AFTER_FILES["scan"](files)),
}


@pytest.mark.parametrize("name", AFTER_FILES)
def test_mode_file_or_data_divides_as_tensorflow(name: str, records: Callable[[], Any]) -> None:
    policies = tf.data.experimental.AutoShardPolicy
    dataset = AFTER_FILES[name](records())
    by_file, by_data, automatic = (
        divided(dataset, policy) for policy in (policies.FILE, policies.DATA, policies.AUTO)
    )
    pipeline = graph_inspection.examine(dataset).semantics
    found = pipeline.changes("FILE_OR_DATA", 2)
    twice = [each for each in found if "after it has divided the files" in each.what]
    assert pipeline.changes("FILE" if by_file else "DATA", 2) == [
        each for each in found if each not in twice
    ]
    assert automatic in (by_file, by_data) or twice
    assert all(each.refused for each in twice)


def csv(path: Any) -> Any:
    return tf.data.experimental.CsvDataset(path, [tf.int64]).map(lambda x: x)


#: Sources that TensorFlow does not divide by file.
NOT_BY_FILE: dict[str, Callable[[Path], Any]] = {
    "csv": lambda path: csv(str(path / "csv")),
    "csv inside": lambda path: D.from_tensors(str(path / "csv")).interleave(csv),
    "csv after files": lambda path: (
        tf.data.TextLineDataset([str(path / "csv")] * 2)
        .map(lambda line: tf.strings.to_number(line, tf.int64))
        .concatenate(csv(str(path / "csv")))
    ),
    "load": lambda path: D.load(str(path / "saved")),
    "list": lambda path: D.from_tensor_slices([3, 1, 2]),
    "python list": lambda path: tf.data.experimental.from_list([3, 1, 2]),
    "sparse": lambda path: D.from_tensor_slices(tf.sparse.eye(4)).map(tf.sparse.to_dense),
    "snapshot": lambda path: numbers().snapshot(str(path / "snapshot")),
    "counter": lambda path: D.counter().take(4),
}


@pytest.mark.parametrize("name", NOT_BY_FILE)
def test_mode_file_or_data_divides_other_sources_by_data(name: str, tmp_path: Path) -> None:
    (tmp_path / "csv").write_text("1\n2\n3\n")
    numbers().save(str(tmp_path / "saved"))
    dataset = NOT_BY_FILE[name](tmp_path)
    policies = tf.data.experimental.AutoShardPolicy
    files = name.endswith("after files")  # of which TensorFlow divides the first ones
    assert divided(dataset, policies.FILE) is None
    assert (divided(dataset, policies.AUTO) == divided(dataset, policies.DATA)) is not files
    for create in (lambda: dataset, lambda: dataset.shuffle(9), lambda: dataset.batch(2, True)):
        pipeline = graph_inspection.examine(create()).semantics
        found = pipeline.changes("FILE_OR_DATA", 2)
        twice = [each for each in found if "after it has divided the files" in each.what]
        assert pipeline.changes("DATA", 2) == [each for each in found if each not in twice]
        assert bool(twice) is files


def names_of_files(directory: Any) -> Any:
    for number in range(4):
        np.arange(3 * number, 3 * number + 3).tofile(directory / f"{number}.bin")
    return D.from_tensor_slices([str(path) for path in sorted(directory.iterdir())])


def read_numbers(name: Any, *_: Any) -> Any:
    return tf.data.FixedLengthRecordDataset(name, 8).map(lambda x: tf.io.decode_raw(x, tf.int64)[0])


#: Operations on the names of files, with the changes in mode "file".
ON_NAMES: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "none": (lambda names: names, set()),
    "take": (lambda names: names.take(3), set()),
    "enumerate": (lambda names: names.enumerate().map(lambda _, name: name), set()),
    "zip": (lambda names: D.zip((names, numbers())), set()),
    "shuffle": (lambda names: names.shuffle(9), set()),
    "take of a shuffle": (lambda names: names.shuffle(9).take(3), {"order"}),
    "later": (lambda names: names.shuffle(9).map(lambda x: x).skip(1).prefetch(1), {"order"}),
    "shard": (lambda names: names.shuffle(9).shard(2, 0), {"order"}),
    "numbers": (lambda names: names.shuffle(9).enumerate().map(lambda _, name: name), {"order"}),
    "pairs": (lambda names: D.zip((names.shuffle(9), numbers())), {"order"}),
    "windows": (lambda names: names.shuffle(9).window(2).flat_map(lambda w: w), {"order"}),
    "shuffle of a take": (lambda names: names.take(3).shuffle(9), set()),
    "any order": (
        lambda names: names.map(lambda x: x, num_parallel_calls=2, deterministic=False),
        {"order"},
    ),
    "random filter": (lambda names: names.filter(lambda _: draw()), {"order"}),
    "shuffle in a function": (
        lambda names: names.batch(2).flat_map(lambda x: D.from_tensor_slices(x).shuffle(2)),
        {"order"},
    ),
}


@pytest.mark.parametrize("name", ON_NAMES)
def test_mode_file_divides_the_names_of_files_as_results(name: str, tmp_path: Any) -> None:
    operation, expected = ON_NAMES[name]
    dataset = operation(names_of_files(tmp_path)).flat_map(read_numbers)
    pipeline = graph_inspection.examine(dataset).semantics
    for mode in ("FILE", "FILE_OR_DATA"):
        found = pipeline.changes(mode, 2)
        assert {change.kind for change in found} == expected
        assert all(change.refused for change in found)
    assert pipeline.keeps_elements("FILE") == (not expected)
    if not expected:
        shares = divided(dataset, tf.data.experimental.AutoShardPolicy.FILE)
        together = ",".join(shares).replace("array(", "").replace(")", "")
        assert sorted(re.findall(r"\d+", together)) == sorted(
            str(x) for x in dataset.as_numpy_iterator()
        )


def test_order_of_elements_of_files_is_sound(tmp_path: Any) -> None:
    dataset = names_of_files(tmp_path).flat_map(read_numbers)
    unordered = dataset.map(lambda x: x, num_parallel_calls=2, deterministic=False)
    assert changes(unordered, "FILE") == []
    assert kinds(dataset.take(3), "FILE") == {"counting"}


def test_change_names_operation_line_and_amount() -> None:
    import tfd_notebook

    tfd_notebook.explain  # noqa: B018 - the first use records lines
    (change,) = changes(numbers().take(4), "DYNAMIC", workers=3)
    assert re.fullmatch(r"take\(4\) \(test_semantics\.py:\d+\)", change.operation)
    assert "takes 4, so 12 may arrive" in str(change)
    assert "after distribute" in change.fix


@pytest.mark.parametrize(
    ("create", "amount"),
    [
        (lambda: D.zip((numbers(), numbers())), "up to all of them"),
        (lambda: numbers().enumerate(start=2), "and a number may occur up to 3 times"),
        (lambda: numbers().unique(), "may occur up to 3 times"),
        (lambda: numbers().take_while(lambda x: x < 3), "up to all of them"),
        (CHANGED["scan"][0], "up to all results"),
        (lambda: numbers().shard(4, 1), "up to 2 more or fewer"),
        (lambda: numbers().skip(2), "6 may be missing"),
        (lambda: numbers().take(tf.Variable(2, dtype=tf.int64)), "2, so 6 may arrive"),
        (lambda: numbers().batch(2, drop_remainder=True), "at most a batch for each data worker"),
        (lambda: numbers().batch(2), "the last group of each data worker"),
        (lambda: shuffled().window(3, shift=1), "may differ by up to 6"),
    ],
)
def test_change_has_an_amount(create: Callable[[], Any], amount: str) -> None:
    (change,) = changes(create(), "DYNAMIC", workers=3)
    assert amount in change.what
    (fixed,) = changes(create(), "FILE", workers=3)  # the number of data workers is fixed
    assert amount in fixed.what
    joining = ", and more if data workers join later"
    assert change.what.removesuffix(joining) == fixed.what
    assert change.what.endswith(joining) != ("up to all" in amount)


@pytest.mark.parametrize(
    ("create", "mode", "amount"),
    [
        (lambda: records_and_numbers(), "FILE_OR_DATA", "so up to 67% of the elements are missing"),
        (lambda: numbers().map(save_all), "DYNAMIC", "up to all elements may be missing"),
        (lambda: numbers().cache().repeat(), "DYNAMIC", "up to all of them, do not arrive again"),
        (lambda: drawn().cache(), "OFF", "so up to all elements differ in each epoch"),
        (lambda: python_state().cache(), "OFF", "so up to all elements differ in each epoch"),
    ],
)
def test_change_of_files_and_caches_has_an_amount(
    create: Callable[[], Any],
    mode: str,
    amount: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # `save` writes the types of its elements
    assert any(amount in change.what for change in changes(create(), mode, workers=3))


def records_and_numbers() -> Any:
    lengths = tf.data.TextLineDataset(["a", "b"]).map(tf.strings.length)
    return lengths.concatenate(D.range(3).map(as_int32))


def as_int32(x: Any) -> Any:
    return tf.cast(x, tf.int32)


def save_all(x: Any) -> Any:
    D.range(x).save("somewhere")
    return x


def python_state() -> Any:
    return numbers().map(
        lambda x: tf.numpy_function(lambda v: v + GENERATOR.integers(3), [x], tf.int64)
    )


def test_numbers_are_reported_once(tmp_path: Any) -> None:
    counter = D.counter()
    (change,) = changes(D.zip((numbers(), counter)), "DYNAMIC")
    assert "a number may occur" in change.what
    read = D.zip((numbers(), counter)).map(lambda x, n: x + n).concatenate(counter.take(5))
    assert "scan" in " ".join(each.operation for each in changes(read, "DYNAMIC"))


def test_numbers_inside_snapshot_are_not_reported(tmp_path: Any) -> None:
    import tfd_notebook

    tfd_notebook.explain  # noqa: B018 - the first use records the methods
    assert kinds(numbers().snapshot(str(tmp_path)), "DYNAMIC") == {"undivided"}
    numbered = numbers().enumerate().snapshot(str(tmp_path))
    assert kinds(numbered, "DYNAMIC") == {"undivided", "counting"}


@pytest.mark.parametrize("create", [lambda: numbers().shuffle(3), lambda: unordered(numbers())])
def test_amount_of_a_lost_order_is_in_the_refusal(create: Callable[[], Any]) -> None:
    (change,) = changes(create(), "DATA", workers=4)
    assert change.refused
    assert change.what.endswith(
        "so up to 75% of the elements are missing, and others occur up to 4 times"
    )


def test_amount_of_windows_is_their_largest_difference() -> None:
    def count(elements: int, size: int, shift: int, drop: bool) -> int:
        starts = range(0, elements, shift)
        return sum(1 for start in starts if not drop or start + size <= elements)

    differences = {
        abs(sum(count(each, 3, 1, drop) for each in sizes) - count(sum(sizes), 3, 1, drop))
        for sizes in itertools.product(range(9), repeat=3)  # of the shares of three data workers
        for drop in (False, True)
    }
    assert max(differences) <= 6


def test_amount_of_a_shard_is_its_largest_difference() -> None:
    differences = {
        sum(len(range(size)[index::count]) for size in sizes) - len(range(sum(sizes))[index::count])
        for sizes in itertools.product(range(5), repeat=3)  # of the shares of three data workers
        for count in range(1, 5)
        for index in range(count)
    }
    assert (min(differences), max(differences)) == (-2, 2)


@pytest.mark.parametrize("op", ["DatasetFromGraph", "ExperimentalTelepathyDatasetV2"])
@pytest.mark.parametrize("inside", [False, True])
def test_operation_outside_of_the_table_is_reported_as_not_examined(op: str, inside: bool) -> None:
    definition = tf.compat.v1.GraphDef()
    body = definition.library.function.add()
    body.signature.name = "body"
    outer = definition.node.add(name="outer", op="FlatMapDataset" if inside else op)
    if inside:
        outer.attr["f"].func.name = "body"
        body.node_def.add(name="inner", op=op)
    pipeline = semantics.Semantics(definition)
    for mode in MODES:
        (change,) = pipeline.changes(mode, 2)
        assert change.kind == "unknown"
        assert f"{op} is not covered by the check" in change.what
        assert not pipeline.keeps_elements(mode)


def current_operations() -> set[str]:
    buffer = pywrap_tf_session.TF_GetAllOpList()
    listed = op_def_pb2.OpList.FromString(pywrap_tf_session.TF_GetBuffer(buffer))
    variant = tf.variant.as_datatype_enum
    return {
        op.name
        for op in listed.op
        if "Dataset" in op.name and any(each.type == variant for each in op.output_arg)
    }


def oldest_operations() -> set[str]:
    """Return the same names of TensorFlow 2.15.0, from ``TF_GetAllOpList`` of its library."""
    return set(pathlib.Path(__file__).with_name("dataset_ops_2_15.txt").read_text().split())


@pytest.mark.parametrize("operations", [current_operations, oldest_operations])
def test_each_operation_of_tensorflow_is_in_the_table(operations: Callable[[], set[str]]) -> None:
    known = set(map(kind_of, operations()))
    assert len(known) > 60
    assert known <= set(semantics.OPERATIONS)


def test_table_has_no_operation_that_tensorflow_lacks() -> None:
    known = set(map(kind_of, current_operations() | oldest_operations()))
    # `Parallel` and versions are a part of the name of some operations only.
    assert set(semantics.OPERATIONS) - known <= {"Interleave", "Batch"}


def test_change_of_windows_names_the_choices() -> None:
    (change,) = changes(numbers().window(3), "DYNAMIC")
    assert "not neighbors" in change.what
    assert "use batch()" in change.fix


def test_unknown_operation_is_reported_as_not_examined() -> None:
    definition = tf.compat.v1.GraphDef()
    definition.node.add(name="source", op="RangeDataset")
    node = definition.node.add(name="new", op="TelepathyDatasetV7", input=["source"])
    node.attr["f"].func.name = "body"
    definition.node.add(name="after", op="MapDataset", input=["new"])
    body = definition.library.function.add()
    body.signature.name = "body"
    body.node_def.add(name="inner", op="DreamDataset")
    (change,) = semantics.Semantics(definition).changes("OFF", 2)
    assert change.kind == "unknown"
    assert "DreamDataset, TelepathyDatasetV7" in change.what
    assert not change.refused


def test_unknown_op_of_a_function_is_reported_as_not_examined() -> None:
    dataset = numbers().filter(lambda x: tf.random.uniform(()) < tf.cast(x, tf.float32))
    definition = graph_inspection.definition_of(dataset)
    for function in definition.library.function:
        for node in function.node_def:
            node.op = {"RandomUniform": "TelepathicUniform"}.get(node.op, node.op)
    pipeline = semantics.Semantics(definition)
    for mode in MODES:
        (change,) = pipeline.changes(mode, 2)
        assert change.kind == "unknown"
        assert "TelepathicUniform is not covered by the check" in change.what
        assert not pipeline.keeps_elements(mode)


def test_function_of_debug_mode_is_reported_as_not_examined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A data worker in this process can run it."""
    monkeypatch.setattr(debug_mode, "DEBUG_MODE", False)
    tf.data.experimental.enable_debug_mode()
    (change,) = changes(numbers().filter(lambda x: tf.random.uniform(()) < 0.5), "DATA")
    assert change.kind == "unknown"
    assert "the debug mode of tf.data is not covered by the check" in change.what


def test_each_node_is_visited_once() -> None:
    dataset = numbers().map(lambda x: x + 1)
    for _ in range(28):
        dataset = dataset.prefetch(2)
    pipeline = graph_inspection.examine(dataset).semantics
    pipeline.changes("DYNAMIC", 2)
    assert pipeline.visited < 50
    before = pipeline.visited
    pipeline.changes("DATA", 2)
    assert pipeline.visited == before + 31  # the datasets; functions are visited once


def test_functions_and_constants_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(number: Any) -> Any:
        return tf.cond(number > 1, lambda: number, lambda: number + 1)

    dataset = numbers().shuffle(4).map(draw).take(3).repeat(2).batch(2).enumerate()
    pipeline = graph_inspection.examine(dataset).semantics
    assert pipeline.changes("DYNAMIC", 2)
    read: list[Any] = []
    monkeypatch.setattr(tf, "make_ndarray", read.append)
    monkeypatch.setattr(function_facts, "_called", lambda node: read.append(node) or ())
    assert pipeline.changes("DYNAMIC", 3)
    assert read == []
    visited = pipeline.visited
    assert pipeline.changes("DYNAMIC", 2)
    assert pipeline.visited == visited  # the same question is answered once


def test_data_in_the_graph_is_not_kept() -> None:
    table = tf.zeros([50_000])
    dataset = D.from_tensor_slices(table).map(lambda x: x + tf.constant(np.ones(50_000, "f"))[0])
    inspected = graph_inspection.examine(dataset)
    assert inspected.size > 400_000
    kept = inspected.semantics
    assert len(pickle.dumps(kept)) < 60_000
    assert kept.changes("DYNAMIC", 2) == []


@pytest.mark.slow
def test_large_graph_needs_no_recursion() -> None:
    definition = tf.compat.v1.GraphDef()
    definition.node.add(name="n0", op="RangeDataset")
    for number in range(1, 100_000):
        definition.node.add(name=f"n{number}", op="PrefetchDataset", input=[f"n{number - 1}"])
    pipeline = semantics.Semantics(definition)
    assert pipeline.changes("DYNAMIC", 2) == []
    assert pipeline.visited == 100_000


def test_next_steps_are_one_paragraph_with_each_step_once() -> None:
    dataset = numbers().take(3).take(2).batch(2).skip(1)
    found = reports.reported(changes(dataset, "DYNAMIC"))
    assert {each.kind for each in found} == {"counting"}  # not the short batches
    text = reports.steps(found, 'semantics="same"')
    assert text.startswith(
        'use semantics="same". Otherwise call take() and skip() after distribute'
    )
    assert text.count("after distribute") == text.count("separate data for validation") == 1
    assert "\n" not in text


def test_summary_names_three_operations_and_counts_the_others() -> None:
    assert tfd.Cluster  # from its first use, lines are recorded
    dataset = numbers().take(9).skip(1).shard(2, 0).enumerate().take(8).skip(2).shard(3, 0).skip(3)
    found = changes(dataset, "DYNAMIC", workers=3)
    text, fix = reports.summary(found)
    assert text.startswith("take(9) (")
    assert "takes 9, so 27 may arrive" in text
    assert text.count("each data worker") == 3
    others = f"{len(found) - 3} other changes are not named here"
    assert text.endswith(f"and more if data workers join later. {others}")
    assert text.count("if data workers join later") == 1
    text, _ = reports.summary(changes(numbers().take(9).shuffle(3, seed=1), "DYNAMIC"))
    assert "18 may arrive, and more if data workers join later. shuffle" in text
    steps = (
        "call take(), skip() and shard() after distribute, where elements arrive in any order. It "
    )
    assert fix.startswith(steps)
    assert fix.endswith(". tfd.doctor(dataset) lists all changes")
    assert fix.count("It cannot separate data for validation") == 1
    assert reports.summary(found[:1])[1] == found[0].fix  # one change has no list


def test_summary_of_any_ten_changes_has_at_most_110_words() -> None:
    keeping = 'semantics="same" or processing_mode="data"'
    found = {
        change.what: change
        for create, *_ in CHANGED.values()
        for pipeline in [graph_inspection.examine(create()).semantics]
        for mode in MODES
        for change in pipeline.changes(mode, 3)
    }
    each = list(found.values())
    assert len(each) > 30
    for number in range(len(each)):
        ten = [
            dataclasses.replace(change, operation=f"{i}_{change.operation} (In[{i}], line {i})")
            for i, change in enumerate((each[number:] + each)[:10])
        ]
        text, fix = reports.summary(ten, keeping)
        warning = (
            f"an epoch through the service may differ from one without it. {text}. Next: {fix}"
        )
        assert len(warning.split()) <= 110, warning
        assert text.startswith("0_")


def test_operations_are_named_by_the_methods_that_users_call() -> None:
    assert tfd.Cluster  # from its first use, the methods are recorded
    sampled = changes(D.sample_from_datasets([numbers(), numbers()], seed=1), "DYNAMIC")
    chosen = changes(D.choose_from_datasets([numbers(), numbers()], D.range(2)), "DYNAMIC")
    listed = changes(D.list_files([__file__], seed=1), "DYNAMIC")
    counted = changes(D.counter().batch(2).scan(0, lambda a, x: (a, x)), "DYNAMIC")
    names = [found[0].operation.partition(" (")[0] for found in (sampled, chosen, listed, counted)]
    assert names == [
        "random() of sample_from_datasets()",
        "choose_from_datasets()",
        "shuffle(1) of list_files()",
        "scan(lambda) of counter()",
    ]


def test_one_data_worker_has_no_change_by_division() -> None:
    for create in (lambda: numbers().take(4), lambda: numbers().enumerate()):
        (change,) = changes(create(), "DYNAMIC", workers=1)
        assert change.what.startswith("with a second data worker, each data worker ")


def test_order_that_a_shuffle_keeps_needs_a_seed() -> None:
    split = numbers().shuffle(8, reshuffle_each_iteration=False).take(3)
    (fix,) = {each.fix for each in changes(split, "DYNAMIC")}
    assert fix == 'call shuffle() with a seed, and use processing_mode="data"'
    (refused,) = changes(split, "DATA")
    assert refused.fix == "call shuffle() with a seed"
    seeded = numbers().shuffle(8, seed=1, reshuffle_each_iteration=False).take(3)
    assert changes(seeded, "DATA") == []


@pytest.mark.parametrize(
    ("create", "kept"),
    [
        (lambda: numbers().map(lambda x: draw(seed=1)), True),
        (lambda: numbers().map(lambda x: draw(seed=1), num_parallel_calls=2), False),
        (lambda: D.range(8).interleave(lambda x: drawn(D.range(x), seed=1)), True),
        (
            lambda: D.range(8).flat_map(lambda x: drawn(D.range(x), seed=1, num_parallel_calls=2)),
            False,
        ),
        (lambda: D.random(seed=1, rerandomize_each_iteration=True).take(8), False),
    ],
)
def test_numbers_of_a_seed_are_those_without_a_service(
    create: Callable[[], Any], kept: bool
) -> None:
    assert (changes(create(), "DATA") == []) is kept
    assert changes(create(), "OFF")


def test_refusal_names_mode_and_step() -> None:
    with pytest.raises(errors.DataChanged, match=r'zip\(.*\(mode "dynamic"\)') as caught:
        reports.refuse(changes(D.zip((numbers(), numbers())), "DYNAMIC"), "DYNAMIC")
    assert 'semantics="tensorflow"' in str(caught.value.fix)


def test_refusal_names_the_refused_operation_first_and_few_others() -> None:
    assert tfd.Cluster  # from its first use, lines are recorded
    dataset = D.zip((numbers(), numbers())).take(8).skip(1).take(7).skip(2).shard(2, 0).batch(2)
    refused = reports.reported(changes(dataset, "DYNAMIC"))
    with pytest.raises(errors.DataChanged, match=r"^\S* ?zip\(") as caught:
        reports.refuse(refused, "DYNAMIC", 'semantics="same"')
    text = str(caught.value)
    assert "takes 8, so 16 may arrive" in text
    assert f"{len(refused) - 2} other changes" in text
    assert text.count("It cannot separate data for validation") == 1
    assert "tfd.doctor(dataset) lists all changes" in text
    assert len(text.split()) <= 110
    refused = changes(drawn(numbers().shuffle(3)).filter(above).shuffle(3), "DATA")
    more = [*refused, *refused]
    with pytest.raises(errors.DataChanged) as caught:
        reports.refuse(more, "DATA")
    assert "doctor" not in str(caught.value)  # which examines the mode "dynamic"


@pytest.mark.parametrize(
    "value",
    ["Checked", "", None, 1, "exact", np.array([1, 2]), np.array("same"), tf.constant("same"), {}],
)
def test_invalid_semantics_are_refused(value: object) -> None:
    with pytest.raises(errors.UnknownName, match="semantics"):
        reports.check_semantics(value)


def test_shuffle_of_one_element_keeps_the_order() -> None:
    for mode in MODES:
        assert kinds(numbers().shuffle(1), mode) == set()
    assert kinds(numbers().shuffle(1).window(2).flat_map(lambda w: w.batch(2)), "DYNAMIC") == {
        "neighbors"
    }


def test_groups_whose_elements_are_delivered_one_by_one_have_no_last_group() -> None:
    grouped = numbers().group_by_window(lambda x: x % 2, lambda _, group: group, 3)
    assert kinds(grouped, "DYNAMIC") == set()
    batches = numbers().group_by_window(lambda x: x % 2, lambda _, group: group.batch(3), 3)
    assert kinds(batches, "DYNAMIC") == {"grouping"}


def test_counter_in_a_function_ends_the_promise_of_every_element() -> None:
    count = 0

    def add(x: Any) -> Any:
        nonlocal count
        count += 1
        return x + count

    counted = numbers().map(lambda x: tf.numpy_function(add, [x], tf.int64))
    semantics = graph_inspection.examine(counted).semantics
    assert not semantics.keeps_elements("DYNAMIC")
    assert semantics.keeps_elements("DATA")
    (change,) = semantics.changes("DYNAMIC", 2)
    assert "so up to all results differ" in change.what
    (change,) = semantics.changes("DATA", 2)
    assert "differ" not in change.what
