"""Random pipelines: an epoch through a service has the elements of an epoch without it.

A difference must have a finding. ``make test-semantics`` tries many more pipelines.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import tfd_notebook as tfd
from tfd_notebook.data.service import graph_inspection
from tfd_notebook.data.service.division import divide
from tfd_notebook.data.service.options import mode_of

pytestmark = [pytest.mark.integration, pytest.mark.long]

#: Number of pipelines. More than in the gate are random.
COUNT = int(os.environ.get("TFD_TEST_PIPELINES", "100"))
GATE = 100
#: Number of pipelines that run at a time, because TensorFlow reports the end of an epoch late.
TOGETHER = 10
FILES = 4
#: Kinds of changes after which an epoch may have other elements.
CHANGING = {"pairing", "order", "counting", "neighbors", "grouping", "external", "unknown"}

#: Operations whose result depends on the order of their elements, on their values, or on both.
BY_ORDER = {"take", "skip", "take_while", "shard", "scan", "enumerate", "zip", "choose", "sample"}
BY_VALUE = {
    "filter",
    "take_while",
    "interleave",
    "flat_map",
    "inner_zip",
    "inner_shuffle",
    "unique",
    "group",
}
GROUPING = {"batch", "padded_batch", "window", "overlap", "group"}

D = tf.data.Dataset
Step = tuple[Any, ...]


@dataclass(frozen=True)
class Pipeline:
    """A source of integers, the operations on it, and how the last one draws numbers."""

    source: Step
    steps: tuple[Step, ...]
    draw: str


def sources() -> st.SearchStrategy[Step]:
    size = st.integers(0, 12)
    return st.one_of(
        st.tuples(st.just("range"), size),
        st.tuples(st.just("slices"), size),
        st.tuples(st.just("generator"), size),
        st.tuples(st.just("files")),
    )


def steps() -> st.SearchStrategy[Step]:
    small, seed = st.integers(1, 4), st.sampled_from([None, 1])

    def step(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
        return st.tuples(st.just(name), *arguments)

    return st.one_of(
        step("map", st.booleans()),
        step("filter", small),
        step("take", st.integers(-1, 8)),
        step("skip", st.integers(0, 8)),
        step("shuffle", small, seed, st.booleans()),
        step("batch", small, st.booleans()),
        step("padded_batch", small),
        step("window", small),
        step("overlap", small),
        step("group", small, st.booleans()),
        step("enumerate"),
        step("scan"),
        step("take_while", st.integers(0, 12)),
        step("interleave", small),
        step("flat_map"),
        step("inner_zip"),
        step("inner_shuffle"),
        step("cache"),
        step("prefetch"),
        step("repeat", st.integers(1, 2)),
        step("concatenate", sources()),
        step("zip", sources()),
        step("sample", sources(), seed, st.booleans()),
        step("choose", sources()),
        step("unique"),
        step("shard"),
        step("variable"),
        step("table"),
        step("python"),
    )


PIPELINES = st.builds(
    Pipeline,
    sources(),
    st.lists(steps(), max_size=5).map(tuple),
    st.sampled_from(["none", "unseeded", "seeded", "generator", "stateless"]),
)


class Build:
    """Creates the dataset of a `Pipeline`, and changes the state that it captures."""

    def __init__(self, directory: Path) -> None:
        self._files = [str(path) for path in sorted(directory.glob("*.bin"))]
        self.variable = tf.Variable(0, dtype=tf.int64)
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def change_state(self) -> None:
        self.variable.assign_add(1000)
        self.table.insert(tf.range(200, dtype=tf.int64), tf.range(200, dtype=tf.int64) * 7)

    def __call__(self, pipeline: Pipeline) -> Any:
        dataset = self._source(*pipeline.source)
        for name, *arguments in pipeline.steps:
            dataset = getattr(self, f"_{name}")(dataset, *arguments)
        # The thread that tunes an iterator may sleep for a minute before the iterator ends.
        options = tf.data.Options()
        options.autotune.enabled = False
        return dataset.map(_draw(pipeline.draw)).with_options(options)

    def _source(self, kind: str, size: int = 0) -> Any:
        if kind == "range":
            return D.range(size)
        if kind == "slices":
            return D.from_tensor_slices(np.arange(size, dtype=np.int64))
        if kind == "generator":
            signature = tf.TensorSpec((), tf.int64)
            return D.from_generator(lambda: iter(range(size)), output_signature=signature)
        records = tf.data.FixedLengthRecordDataset(self._files, 8)
        return records.map(lambda record: tf.io.decode_raw(record, tf.int64)[0])

    def _map(self, dataset: Any, parallel: bool) -> Any:
        return dataset.map(lambda x: x * 2 + 1, num_parallel_calls=2 if parallel else None)

    def _filter(self, dataset: Any, divisor: int) -> Any:
        return dataset.filter(lambda x: x % (divisor + 1) != 0)

    def _take(self, dataset: Any, count: int) -> Any:
        return dataset.take(count)

    def _skip(self, dataset: Any, count: int) -> Any:
        return dataset.skip(count)

    def _shuffle(self, dataset: Any, size: int, seed: int | None, again: bool) -> Any:
        return dataset.shuffle(size, seed=seed, reshuffle_each_iteration=again)

    def _batch(self, dataset: Any, size: int, drop: bool) -> Any:
        return dataset.batch(size, drop_remainder=drop).map(tf.reduce_sum)

    def _padded_batch(self, dataset: Any, size: int) -> Any:
        return dataset.padded_batch(size, padded_shapes=()).map(tf.reduce_sum)

    def _window(self, dataset: Any, size: int) -> Any:
        return dataset.window(size).flat_map(lambda w: w.batch(size)).map(tf.reduce_sum)

    def _overlap(self, dataset: Any, size: int) -> Any:
        windows = dataset.window(size, shift=1, drop_remainder=True)
        return windows.flat_map(lambda w: w.batch(size)).map(tf.reduce_sum)

    def _group(self, dataset: Any, size: int, drop: bool) -> Any:
        def batches(_: Any, group: Any) -> Any:
            return group.batch(size, drop_remainder=drop)

        return dataset.group_by_window(lambda x: x % 2, batches, size).map(tf.reduce_sum)

    def _enumerate(self, dataset: Any) -> Any:
        return dataset.enumerate().map(lambda number, x: number * 100 + x)

    def _scan(self, dataset: Any) -> Any:
        return dataset.scan(tf.constant(0, tf.int64), lambda total, x: (total + x, total + x))

    def _take_while(self, dataset: Any, limit: int) -> Any:
        return dataset.take_while(lambda x: x < limit)

    def _interleave(self, dataset: Any, cycle: int) -> Any:
        return dataset.interleave(lambda x: D.range(x % 3), cycle_length=cycle)

    def _flat_map(self, dataset: Any) -> Any:
        return dataset.flat_map(lambda x: D.range(x % 4).skip(1).batch(2).map(tf.reduce_sum))

    def _inner_zip(self, dataset: Any) -> Any:
        return dataset.flat_map(
            lambda x: D.zip((D.range(x % 4), D.range(x % 4))).map(lambda a, b: a * 10 + b)
        )

    def _inner_shuffle(self, dataset: Any) -> Any:
        return dataset.flat_map(lambda x: D.range(x % 4).shuffle(4))

    def _cache(self, dataset: Any) -> Any:
        return dataset.cache()

    def _prefetch(self, dataset: Any) -> Any:
        return dataset.prefetch(2)

    def _repeat(self, dataset: Any, count: int) -> Any:
        return dataset.repeat(count)

    def _concatenate(self, dataset: Any, other: Step) -> Any:
        return dataset.concatenate(self._source(*other))

    def _zip(self, dataset: Any, other: Step) -> Any:
        return D.zip((dataset, self._source(*other))).map(lambda a, b: a * 1000 + b)

    def _sample(self, dataset: Any, other: Step, seed: int | None, stop: bool) -> Any:
        # Without a seed, the number of elements before the first end is random.
        stop = stop and seed is not None
        return D.sample_from_datasets(
            [dataset, self._source(*other)], seed=seed, stop_on_empty_dataset=stop
        )

    def _choose(self, dataset: Any, other: Step) -> Any:
        choice = D.range(2).repeat(6)
        return D.choose_from_datasets([dataset, self._source(*other)], choice)

    def _unique(self, dataset: Any) -> Any:
        return dataset.unique()

    def _shard(self, dataset: Any) -> Any:
        return dataset.shard(2, 0)

    def _variable(self, dataset: Any) -> Any:
        return dataset.map(lambda x: x + self.variable)

    def _table(self, dataset: Any) -> Any:
        return dataset.map(lambda x: x + self.table.lookup(x))

    def _python(self, dataset: Any) -> Any:
        return dataset.map(
            lambda x: tf.ensure_shape(
                tf.numpy_function(lambda v: v + np.int64(1), [x], tf.int64), ()
            )
        )


def _draw(kind: str) -> Callable[[Any], Any]:
    generator = tf.random.Generator.from_seed(1)

    def draw(x: Any) -> Any:
        limit = tf.int64.max
        if kind == "unseeded":
            return x, tf.random.uniform((), maxval=limit, dtype=tf.int64)
        if kind == "seeded":
            return x, tf.random.uniform((), maxval=limit, dtype=tf.int64, seed=1)
        if kind == "generator":
            return x, generator.uniform((), maxval=limit, dtype=tf.int64)
        if kind == "stateless":
            state = tf.stack([x, 1])
            return x, tf.random.stateless_uniform((), state, maxval=limit, dtype=tf.int64)
        return x, tf.constant(0, tf.int64)

    return draw


@pytest.fixture(scope="module")
def clusters() -> Iterator[list[tfd.Cluster]]:
    places = [("inprocess", 3), ("inprocess", 1), ("local", 2)]
    if COUNT > GATE:
        places += [("inprocess", 2), ("inprocess", 4), ("local", 4)]
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                tfd.Cluster(launcher=launcher, data_workers=workers, name=f"{launcher}-{workers}")
            )
            for launcher, workers in places
        ]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records")
    for number in range(FILES):
        np.arange(3 * number, 3 * number + 3).tofile(path / f"{number}.bin")
    return path


@pytest.mark.timeout(60 + 5 * COUNT)  # ten pipelines take some seconds, most of it waiting
def test_every_difference_has_a_finding(clusters: list[tfd.Cluster], directory: Path) -> None:
    seen: Counter[str] = Counter()
    mode = st.sampled_from(["dynamic", "data", "off", "file"])
    semantics = st.sampled_from(["tensorflow", "same"])
    case = st.tuples(PIPELINES, mode, st.sampled_from(clusters), semantics).filter(
        lambda case: case[1] != "file" or _uses_only_files(case[0])
    )

    @hypothesis.settings(
        max_examples=COUNT // TOGETHER,
        deadline=None,
        derandomize=COUNT <= GATE,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.lists(case, min_size=TOGETHER, max_size=TOGETHER))
    def check(cases: list[tuple[Pipeline, str, tfd.Cluster, str]]) -> None:
        with ThreadPoolExecutor(TOGETHER) as pool:
            seen.update(pool.map(lambda case: compare(directory, *case), cases))

    check()
    print(f"\n{COUNT} pipelines: {dict(seen)}")


def _uses_only_files(pipeline: Pipeline) -> bool:
    others = [each for step in pipeline.steps for each in step if isinstance(each, tuple)]
    return all(source == ("files",) for source in (pipeline.source, *others))


def compare(
    directory: Path, pipeline: Pipeline, mode: str, cluster: tfd.Cluster, semantics: str
) -> str:
    """Return the result for a pipeline. Fail if a difference has no finding."""
    build = Build(directory)
    dataset = build(pipeline)
    workers = sum(task.role == "data_worker" for task in cluster.tasks)
    in_process = cluster.name.startswith("inprocess")
    examined = graph_inspection.examine(dataset).semantics
    found = examined.changes(mode_of(mode), workers, in_process)
    kinds = {change.kind for change in found}
    repeatable = examined.keeps_elements("OFF")  # else each epoch differs, also without a service
    if semantics == "same":
        return compare_same(build, dataset, pipeline, mode, cluster, repeatable)
    read = dataset.apply(cluster.distribute(mode, semantics="tensorflow"))
    epochs = []
    for _ in range(2):
        try:
            epochs.append((elements(dataset), elements(read)))
        except tfd.errors.DataError as error:
            if error.code != tfd.errors.DataError.code:
                raise
            return "cannot be divided"  # fewer files or elements than data workers
        build.change_state()
    times = workers if mode == "off" else 1
    same = True
    for number, (alone, through) in enumerate(epochs):
        expected = Counter({x: times * n for x, n in Counter(x for x, _ in alone).items()})
        equal = Counter(x for x, _ in through) == expected
        same = same and equal
        if repeatable and not kinds & CHANGING and not (number and "captured" in kinds):
            assert equal, f"{kinds}: {sorted(expected.elements())}, {sorted(through)}"
    if pipeline.draw == "unseeded":
        drawn = [number for _, through in epochs for _, number in through]
        repeats = any(name in ("cache", "repeat") for name, *_ in pipeline.steps)
        assert repeats or len(set(drawn)) == len(drawn)
    elif pipeline.draw in ("seeded", "generator"):
        assert "random" in kinds
    elif pipeline.draw == "stateless" and repeatable and not kinds & CHANGING:
        assert dict(epochs[0][0]) == dict(epochs[0][1])
    return f"{'same' if same else 'different'}{', with a finding' if found else ''}"


def compare_same(
    build: Build,
    dataset: Any,
    pipeline: Pipeline,
    mode: str,
    cluster: tfd.Cluster,
    repeatable: bool,
) -> str:
    """Return the result for a pipeline with ``semantics="same"``. Fail if elements differ."""
    try:
        read = dataset.apply(cluster.distribute(mode, semantics="same"))
    except tfd.errors.DataChanged:
        return "refused"
    times = sum(task.role == "data_worker" for task in cluster.tasks) if mode == "off" else 1
    parts = divide(dataset, mode_of(mode), cluster.name.startswith("inprocess"))
    elements_certain = number_certain = repeatable
    if repeatable and parts is not None and parts.local:
        elements_certain, number_certain = _certain(pipeline)
    drawn, expected_draws = [], []
    for _ in range(2):
        try:
            alone, through = elements(dataset), elements(read)
        except tfd.errors.DataError as error:
            if error.code != tfd.errors.DataError.code:
                raise
            return "cannot be divided"  # fewer files or elements than data workers
        if elements_certain:
            expected = Counter({x: times * n for x, n in Counter(x for x, _ in alone).items()})
            assert Counter(x for x, _ in through) == expected
        if number_certain:
            assert len(through) == times * len(alone)
        drawn += [number for _, number in through]
        expected_draws += [number for _, number in alone]
        build.change_state()
    repeats = any(name in ("cache", "repeat") for name, *_ in pipeline.steps)
    if pipeline.draw in ("unseeded", "generator"):
        assert repeats or len(set(drawn)) == len(drawn)
    elif pipeline.draw == "seeded" and len(drawn) == len(expected_draws):
        assert Counter(drawn) == Counter(expected_draws)
    return "same elements" if elements_certain else "same number" if number_certain else "read"


def _certain(pipeline: Pipeline) -> tuple[bool, bool]:
    """Return whether the elements, and their number, are the same in any order of arrival."""
    order = elements = number = True
    for name, *_ in pipeline.steps:
        number = number and not (name == "take_while" and not order)
        number = number and not (name in BY_VALUE and not elements)
        elements = elements and not (name in BY_ORDER and not order) and name not in GROUPING
        # In each epoch in another order, also without a service.
        order = order and name not in ("shuffle", "inner_shuffle", "sample")
    return elements, number


def elements(dataset: Any) -> list[tuple[int, int]]:
    return [(int(x), int(number)) for x, number in dataset]
