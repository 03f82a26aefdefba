"""Random pipelines: an epoch through a service has the elements of an epoch without it.

A difference must have a finding, and a finding a difference. A random pipeline can have none, for
example because its ``take`` takes all elements. Then the same pipeline with larger sources must
have the difference. ``make test-semantics`` tries many more pipelines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import keras
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
#: Number of tries to find the difference that a finding names.
TRIES = 8
#: Kinds of changes after which an epoch may have other elements.
CHANGING = {
    "pairing",
    "order",
    "counting",
    "neighbors",
    "grouping",
    "external",
    "undivided",
    "unknown",
}
#: Kinds of changes after which an epoch may use an earlier state.
KEEPING = {"captured", "python"}
#: Ways to draw numbers that repeat on the data workers, or in each epoch.
REPEATING = ("seeded", "generator", "augmentation")
#: Ways to draw numbers that change a Python object.
COUNTED = ("numpy", "counter")
SHARE = tf.data.experimental.SHARD_HINT

#: Operations whose result depends on the order of their elements, on their values, or on both.
BY_ORDER = {
    "take",
    "skip",
    "take_while",
    "shard",
    "scan",
    "enumerate",
    "zip",
    "choose",
    "sample",
    "endless",
}
BY_VALUE = {
    "filter",
    "noisy_filter",
    "take_while",
    "interleave",
    "flat_map",
    "inner_zip",
    "inner_shuffle",
    "captured",
    "unique",
    "group",
}
REORDERING = {"shuffle", "inner_shuffle", "sample", "unordered"}
GROUPING = {"batch", "padded_batch", "ragged_batch", "rebatch", "window", "overlap", "group"}
#: The methods of steps and sources with other names. All pipelines have a ``map``.
METHODS = {
    "noisy_filter": {"filter"},
    "overlap": {"window", "flat_map"},
    "window": {"window", "flat_map"},
    "group": {"group_by_window"},
    "inner_zip": {"flat_map"},
    "inner_shuffle": {"flat_map", "shuffle"},
    "cache_file": {"cache"},
    "captured": {"take", "flat_map"},
    "endless": {"range", "concatenate", "repeat", "take"},
    "sample": {"sample_from_datasets"},
    "choose": {"range", "choose_from_datasets"},
    "hint": {"shard"},
    "random": {"random", "take"},
    "generator": {"from_generator"},
    "csv": {"CsvDataset"},
    "slices": {"from_tensor_slices"},
    "files": {"FixedLengthRecordDataset"},
    "list_files": {"list_files", "flat_map", "FixedLengthRecordDataset"},
}
#: Operations that keep the sum of all elements, if they drop none.
SUMMING = {
    "batch",
    "padded_batch",
    "ragged_batch",
    "rebatch",
    "unbatch",
    "group",
    "prefetch",
    "shuffle",
    "cache",
}
#: Operations that keep elements of the first epoch.
KEPT = ("cache", "cache_file", "snapshot")
FALSE = "false finding"

D = tf.data.Dataset
Step = tuple[Any, ...]
#: The values of an element or a batch, and the numbers that were drawn for them.
Element = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Pipeline:
    """A source of integers, the operations on it, how numbers are drawn, and the batches."""

    source: Step
    steps: tuple[Step, ...]
    draw: str
    batches: tuple[Step, ...] = ()

    @property
    def operations(self) -> tuple[Step, ...]:
        return self.steps + self.batches


def sources() -> st.SearchStrategy[Step]:
    size, seed = st.integers(0, 12), st.sampled_from([None, 1])
    return st.one_of(
        st.tuples(st.just("range"), size),
        st.tuples(st.just("slices"), size),
        st.tuples(st.just("generator"), size),
        st.tuples(st.just("random"), size, seed),
        st.tuples(st.sampled_from(["files", "csv", "load"])),
        st.tuples(st.just("list_files"), st.booleans(), seed),
    )


def _is_examined(source: Step) -> bool:
    """Return True if the check covers a source that a function captures."""
    kind, *arguments = source
    seed = arguments[-1] if kind in ("random", "list_files") else None
    return seed is None if kind == "list_files" else kind != "random" or seed is not None


def steps() -> st.SearchStrategy[Step]:
    small, seed = st.integers(1, 4), st.sampled_from([None, 1])

    def step(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
        return st.tuples(st.just(name), *arguments)

    return st.one_of(
        step("map", st.booleans()),
        step("unordered"),
        step("filter", small),
        step("noisy_filter", small),
        step("normalization"),
        step("lookup"),
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
        step("captured", sources().filter(_is_examined)),
        step("cache"),
        step("cache_file"),
        step("snapshot"),
        step("prefetch"),
        step("repeat", st.integers(1, 2)),
        step("endless", st.integers(0, 30)),
        step("concatenate", sources()),
        step("zip", sources()),
        step("sample", sources(), seed, st.booleans()),
        step("choose", sources()),
        step("unique"),
        step("shard"),
        step("variable"),
        step("table"),
        step("python"),
        step("python_variable"),
    )


#: One step of each kind, for all pairs of them.
EXAMPLES: tuple[Step, ...] = (
    ("map", True),
    ("unordered",),
    ("filter", 2),
    ("noisy_filter", 2),
    ("normalization",),
    ("lookup",),
    ("take", 5),
    ("skip", 3),
    ("shuffle", 3, None, True),
    ("batch", 3, False),
    ("padded_batch", 3),
    ("window", 3),
    ("overlap", 3),
    ("group", 3, False),
    ("enumerate",),
    ("scan",),
    ("take_while", 9),
    ("interleave", 2),
    ("flat_map",),
    ("inner_zip",),
    ("inner_shuffle",),
    ("captured", ("range", 5)),
    ("cache",),
    ("snapshot",),
    ("prefetch",),
    ("repeat", 2),
    ("endless", 20),
    ("concatenate", ("slices", 5)),
    ("zip", ("range", 12)),
    ("sample", ("range", 9), None, False),
    ("choose", ("range", 9)),
    ("unique",),
    ("shard",),
    ("variable",),
    ("table",),
    ("python",),
)


#: Those whose pairs are in the gate.
PAIRED = {"shuffle", "repeat", "interleave", "group"}


def batches(name: str) -> st.SearchStrategy[Step]:
    return st.tuples(st.just(name), st.integers(1, 4), st.booleans())


PIPELINES = st.builds(
    Pipeline,
    sources(),
    st.lists(steps(), max_size=5).map(tuple),
    st.sampled_from(
        [
            "none",
            "unseeded",
            "seeded",
            "generator",
            "augmentation",
            "stateless",
            "numpy",
            "counter",
        ]
    ),
    st.one_of(
        st.just(()),
        st.tuples(batches("batch")),
        st.tuples(batches("batch"), batches("rebatch")),
        st.tuples(batches("batch"), st.just(("unbatch",))),
        st.tuples(st.tuples(st.sampled_from(["padded_batch", "ragged_batch"]), st.integers(1, 4))),
    ),
)
#: The place of ``shard(SHARD_HINT, SHARD_HINT)`` among the steps. None without it.
HINTS = st.one_of(st.none(), st.integers(0, 5))
#: Numbers for the names of files.
_numbers = itertools.count()


class Build:
    """Creates the datasets of a `Pipeline`, and changes the state that they capture."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mixes = directory.name == "large"  # else a part in the order of values can be equal
        self._files = [str(path) for path in sorted(directory.glob("*.bin"))]
        self._tables = [str(path) for path in sorted(directory.glob("*.csv"))]
        self._sent = False
        self.variable = tf.Variable(0, dtype=tf.int64)
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def change_state(self) -> None:
        self.variable.assign_add(1009)
        self.table.insert(tf.range(200, dtype=tf.int64), tf.range(200, dtype=tf.int64) * 7)

    def __call__(self, pipeline: Pipeline, sent: bool = False) -> Any:
        """Return a dataset. One that is `sent` to a service has the hint and separate files."""
        self._sent = sent
        dataset = self._source(*pipeline.source)
        for name, *arguments in pipeline.steps:
            dataset = getattr(self, f"_{name}")(dataset, *arguments)
        # The thread that tunes an iterator may sleep for a minute before the iterator ends.
        options = tf.data.Options()
        options.autotune.enabled = False
        dataset = dataset.map(_draw(pipeline.draw)).with_options(options)
        for name, *arguments in pipeline.batches:
            dataset = getattr(dataset, name)(*arguments)
        return dataset

    def _source(self, kind: str, size: int = 0, seed: int | None = None) -> Any:
        dataset = self._ordered(kind, size, seed)
        # With repeated values, for unique(). A prime, because each worker may get every fourth x.
        return dataset.map(lambda x: x * 27 % 41) if self._mixes else dataset

    def _ordered(self, kind: str, size: int, seed: int | None) -> Any:
        if kind == "random":
            return D.random(seed).take(size).map(lambda x: x % 12)
        if kind == "range":
            return D.range(size)
        if kind == "slices":
            return D.from_tensor_slices(np.arange(size, dtype=np.int64))
        if kind == "generator":
            signature = tf.TensorSpec((), tf.int64)
            return D.from_generator(lambda: iter(range(size)), output_signature=signature)
        if kind == "csv":
            return tf.data.experimental.CsvDataset(self._tables, [tf.int64]).map(lambda x: x)
        if kind == "load":
            return D.load(str(self._directory / "saved"))
        if kind == "list_files":
            names = D.list_files(str(self._directory / "*.bin"), shuffle=bool(size), seed=seed)
            records = names.flat_map(lambda name: tf.data.FixedLengthRecordDataset(name, 8))
        else:
            records = tf.data.FixedLengthRecordDataset(self._files, 8)
        return records.map(lambda record: tf.io.decode_raw(record, tf.int64)[0])

    def _hint(self, dataset: Any) -> Any:
        return dataset.shard(SHARE, SHARE) if self._sent else dataset

    def _map(self, dataset: Any, parallel: bool) -> Any:
        return dataset.map(lambda x: x * 2 + 1, num_parallel_calls=2 if parallel else None)

    def _unordered(self, dataset: Any) -> Any:
        return dataset.map(lambda x: x + 3, num_parallel_calls=2, deterministic=False)

    def _filter(self, dataset: Any, divisor: int) -> Any:
        return dataset.filter(lambda x: x % (divisor + 1) != 0)

    def _noisy_filter(self, dataset: Any, divisor: int) -> Any:
        noisy = dataset.map(lambda x: (x, tf.random.uniform(())))
        filtered = noisy.filter(lambda x, number: x % (divisor + 1) != 0)
        return filtered.map(lambda x, number: x)

    def _normalization(self, dataset: Any) -> Any:
        layer = keras.layers.Normalization(axis=None, mean=4.0, variance=4.0)

        def normalize(x: Any) -> Any:
            values = tf.reshape(tf.cast(x, tf.float32), (1,))  # the layer needs a static shape
            return tf.cast(layer(values)[0] * 2, tf.int64)

        return dataset.map(normalize)

    def _lookup(self, dataset: Any) -> Any:
        layer = keras.layers.StringLookup(vocabulary=[str(number) for number in range(9)])
        return dataset.map(lambda x: layer(tf.as_string(tf.ensure_shape(x, ()))))

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
        return dataset.enumerate().map(lambda number, x: number * 97 + x)

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

    def _captured(self, dataset: Any, other: Step) -> Any:
        inner = self._source(*other)  # of another number of elements for each x, for batch()
        return dataset.flat_map(lambda x: inner.take(x % 3 + 1).map(lambda y: x * 31 + y))

    def _cache(self, dataset: Any) -> Any:
        return dataset.cache()

    def _cache_file(self, dataset: Any) -> Any:
        return dataset.cache(str(self._directory / f"cache{next(_numbers)}"))

    def _snapshot(self, dataset: Any) -> Any:
        return dataset.snapshot(str(self._directory / f"snapshot{next(_numbers)}"))

    def _prefetch(self, dataset: Any) -> Any:
        return dataset.prefetch(2)

    def _repeat(self, dataset: Any, count: int) -> Any:
        return dataset.repeat(count)

    def _endless(self, dataset: Any, count: int) -> Any:
        # Through a service, TensorFlow repeats an empty dataset without an end.
        return dataset.concatenate(D.range(1)).repeat().take(count)

    def _concatenate(self, dataset: Any, other: Step) -> Any:
        return dataset.concatenate(self._source(*other))

    def _zip(self, dataset: Any, other: Step) -> Any:
        return D.zip((dataset, self._source(*other))).map(lambda a, b: a * 997 + b)

    def _sample(self, dataset: Any, other: Step, seed: int | None, stop: bool) -> Any:
        # Without a seed, the number of elements before the first end is random.
        stop = stop and seed is not None
        others = self._source(*other)
        if self._mixes:
            others = others.map(lambda x: x + 41)  # with the same values, unique() keeps all
        return D.sample_from_datasets([dataset, others], seed=seed, stop_on_empty_dataset=stop)

    def _choose(self, dataset: Any, other: Step) -> Any:
        choice = D.range(2).repeat(60 if self._mixes else 6)
        return D.choose_from_datasets([dataset, self._source(*other)], choice)

    def _unique(self, dataset: Any) -> Any:
        return dataset.unique()

    def _shard(self, dataset: Any) -> Any:
        return dataset.shard(2, 0)

    def _variable(self, dataset: Any) -> Any:
        return dataset.map(lambda x: x + self.variable)

    def _table(self, dataset: Any) -> Any:
        return dataset.map(lambda x: x + self.table.lookup(x % 200))

    def _python(self, dataset: Any) -> Any:
        return dataset.map(lambda x: _python_call(lambda v: v + np.int64(1), x))

    def _python_variable(self, dataset: Any) -> Any:
        variable = self.variable
        return dataset.map(lambda x: _python_call(lambda v: v + variable.numpy(), x))


def _python_call(function: Callable[..., Any], *arguments: Any) -> Any:
    return tf.ensure_shape(tf.numpy_function(function, arguments, tf.int64), ())


def _draw(kind: str) -> Callable[[Any], Any]:
    generator = tf.random.Generator.from_seed(1)
    noise = keras.layers.GaussianNoise(1.0, seed=1) if kind == "augmentation" else None
    numpy_generator = np.random.default_rng(1)
    counter = itertools.count()

    def draw(x: Any) -> Any:
        x, limit = tf.ensure_shape(x, ()), tf.int64.max
        if noise is not None:
            return x, tf.bitcast(noise(tf.zeros([2]), training=True), tf.int64)
        if kind == "numpy":
            return x, _python_call(lambda: numpy_generator.integers(limit))
        if kind == "counter":
            return x, _python_call(lambda: np.int64(next(counter)))
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
        places += [("inprocess", 2), ("inprocess", 4), ("local", 1), ("local", 3), ("local", 4)]
    with contextlib.ExitStack() as stack:
        clusters = [
            stack.enter_context(
                tfd.Cluster(launcher=launcher, data_workers=workers, name=f"{launcher}-{workers}")
            )
            for launcher, workers in places
        ]
        for cluster in clusters:
            # The first use of this mode restarts the dispatcher, and a read then loses elements.
            assert len(elements(D.zip((D.range(8), D.range(8))).apply(cluster.distribute("data"))))
        yield clusters


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records")
    for number in range(FILES):
        np.arange(3 * number, 3 * number + 3).tofile(path / f"{number}.bin")
        (path / f"{number}.csv").write_text("".join(f"{3 * number + i}\n" for i in range(3)))
    (path / "large").mkdir()
    # Most shares end in a short batch, also those of 186 elements.
    for number, size in enumerate((*range(19, 26), 32)):
        np.arange(20 * number, 20 * number + size).tofile(path / "large" / f"{number}.bin")
    (path / "large" / "all.csv").write_text("".join(f"{number}\n" for number in range(186)))
    D.range(7).save(str(path / "saved"))
    D.range(53).save(str(path / "large" / "saved"))
    return path


@pytest.mark.filterwarnings("ignore:the dataset has no shard")
@pytest.mark.timeout(60 + 5 * COUNT)  # ten pipelines take some seconds, most of it waiting
def test_every_difference_has_a_finding(clusters: list[tfd.Cluster], directory: Path) -> None:
    results = Results(directory, clusters)
    modes = ["dynamic"] * 4 + ["data"] * 2 + ["off", "file", "file_or_data", "hint"]
    mode = st.sampled_from(modes)
    semantics = st.sampled_from(["tensorflow", "same"])
    case = (
        st.tuples(PIPELINES, mode, st.sampled_from(clusters), semantics, HINTS)
        .filter(lambda case: case[1] != "file" or _uses_only_files(case[0]))
        .map(lambda case: (_hinted(case[0], case[4]) if case[1] == "hint" else case[0], *case[1:4]))
    )

    @hypothesis.settings(
        max_examples=COUNT // TOGETHER,
        deadline=None,
        derandomize=COUNT <= GATE,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.lists(case, min_size=TOGETHER, max_size=TOGETHER, unique_by=repr))
    def check(cases: list[tuple[Pipeline, str, tfd.Cluster, str]]) -> None:
        results.add(cases)

    check()
    results.report()


@pytest.mark.timeout(60 + 3600 * (COUNT > GATE))  # about 1,300 pipelines, as above
@pytest.mark.parametrize("mode", ["dynamic", "data"])
def test_every_pair_of_operations(clusters: list[tfd.Cluster], directory: Path, mode: str) -> None:
    results = Results(directory, clusters)
    names = PAIRED if COUNT <= GATE else {name for name, *_ in EXAMPLES}
    examples = [example for example in EXAMPLES if example[0] in names]
    results.add(
        (Pipeline(("range", 12), pair, "none"), mode, clusters[0], "tensorflow")
        for pair in itertools.product(examples, examples)
    )
    results.report()


class Results:
    """The results of pipelines that are compared, some at a time."""

    def __init__(self, directory: Path, clusters: list[tfd.Cluster]) -> None:
        self._directory, self._clusters = directory, clusters
        self._seen: Counter[str] = Counter()
        self._failures: dict[str, list[str]] = {
            "silent differences": [],
            "false findings": [],
            "errors": [],
        }

    def add(self, cases: Iterable[tuple[Pipeline, str, tfd.Cluster, str]]) -> None:
        with ThreadPoolExecutor(TOGETHER) as pool:
            for results in pool.map(self._result, cases):
                self._seen.update(results)

    def _result(self, case: tuple[Pipeline, str, tfd.Cluster, str]) -> list[str]:
        try:
            return compare(self._directory, self._clusters, *case)
        except (AssertionError, tf.errors.OpError, tfd.errors.TfdError, ValueError) as error:
            kind = "errors"
            if isinstance(error, AssertionError):
                kind = "false findings" if FALSE in str(error) else "silent differences"
            text = f"{case}: {''.join(traceback.format_exception(error))}"
            print(f"{kind}: {text}")  # in time, because many pipelines take hours
            self._failures[kind].append(text)
            return ["failed"]

    def report(self) -> None:
        """Print the numbers of results. Fail if a pipeline has failed."""
        totals = ", ".join(f"{len(texts)} {kind}" for kind, texts in self._failures.items())
        print(f"\n{self._seen.total()} pipelines: {totals}")
        for name, count in sorted(self._seen.items()):
            print(f"{count:7,} {name}")
        assert not any(self._failures.values()), "\n\n".join(
            itertools.chain(*self._failures.values())
        )


@pytest.mark.timeout(60 + 5 * COUNT)  # as above
def test_difference_by_a_data_worker_that_joins_has_a_finding(directory: Path) -> None:
    with tfd.Cluster(launcher="inprocess", data_workers=1, name="inprocess-growing") as cluster:

        @hypothesis.settings(
            max_examples=COUNT // 10,
            deadline=None,
            derandomize=COUNT <= GATE,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(PIPELINES)
        def check(pipeline: Pipeline) -> None:
            cluster.scale(data_workers=1)
            seen = observe(directory / "large", _larger(pipeline), "dynamic", cluster, workers=2)
            if seen.error is not None:
                _failure(seen.error, pipeline, seen.kinds)
            elif seen.repeatable and not seen.kinds & CHANGING:
                assert seen.same[0]
                assert seen.same[1] or seen.later

        check()


def _hinted(pipeline: Pipeline, place: int | None) -> Pipeline:
    if place is None:
        return pipeline
    steps = pipeline.steps
    return dataclasses.replace(pipeline, steps=(*steps[:place], ("hint",), *steps[place:]))


def _is_repeatable(pipeline: Pipeline, dataset: Any) -> bool:
    """Return True if each epoch without a service has the same elements.

    The product does not count other sums of the same rows as other elements.
    """
    in_order = _is_ordered(pipeline)
    for name, *_ in pipeline.operations:
        if name in GROUPING and not in_order:
            return False
        in_order = in_order and name not in REORDERING
    return bool(_semantics(dataset).keeps_elements("OFF"))


def _sums(pipeline: Pipeline) -> bool:
    """Return True if other groups of the same elements have the same sum."""
    names = [name for name, *_ in pipeline.operations]
    first = min(names.index(name) for name in GROUPING if name in names)
    return SUMMING.issuperset(names[first:])


def _sources_of(pipeline: Pipeline) -> list[Step]:
    others = [each for step in pipeline.steps for each in step if isinstance(each, tuple)]
    return [pipeline.source, *others]


def _is_ordered(pipeline: Pipeline) -> bool:
    """Return True if the sources have the same order in each epoch without a service."""
    return not any(kind == "list_files" and args[0] for kind, *args in _sources_of(pipeline))


def _methods_of(pipeline: Pipeline) -> set[str]:
    """Return the methods that a pipeline calls."""
    names = [name for name, *_ in (*pipeline.operations, *_sources_of(pipeline))]
    return set().union({"map"}, *(METHODS.get(name, {name}) for name in names))


def _method(change: Any) -> str:
    """Return the method that a finding names, such as the last one of ``shuffle() of range()``."""
    return str(re.findall(r"(\w+)\(", change.operation.partition(" (")[0])[-1])


def _drops(pipeline: Pipeline) -> bool:
    """Return True if a last batch that is not full is dropped."""
    return any(arguments[1:] == [True] for _, *arguments in pipeline.batches)


def _has(pipeline: Pipeline, *names: str) -> bool:
    return any(name in names for name, *_ in pipeline.steps)


def _uses_only_files(pipeline: Pipeline) -> bool:
    return all(kind in ("files", "list_files") for kind, *_ in _sources_of(pipeline))


@dataclass
class Observation:
    """Two epochs without a service and through it.

    Parameters
    ----------
    kinds : set of str
        The kinds of the findings.
    epochs : list of (list, list)
        The elements without a service, and those through it. An element has its values and the
        numbers that were drawn for them.
    same : list of bool
        For each epoch, whether they are equal.
    repeatable : bool
        Whether each epoch without a service has the same elements.
    promised : bool
        Whether ``distribute`` prints that an epoch contains every element.
    error : tf.errors.OpError or None
        The reason for which there are fewer epochs.
    """

    kinds: set[str]
    epochs: list[tuple[Any, Any]]
    same: list[bool]
    repeatable: bool
    promised: bool
    later: bool
    error: tf.errors.OpError | None = None

    @property
    def drawn(self) -> list[int]:
        return [number for _, through in self.epochs for number in _drawn(through)]

    def without_difference(self, pipeline: Pipeline) -> Iterator[str]:
        """Yield the kinds of findings that name another difference than those of the epochs."""
        if self.error is not None or not self.repeatable or not all(self.same):
            return
        changing = (self.kinds & CHANGING) - {"grouping"}
        if _has(pipeline, "snapshot") and not _has(pipeline, "cache_file"):
            changing -= {"external"}  # the files of each data worker have the same elements
        drawn = self.drawn
        if changing:
            yield f"{' and '.join(sorted(changing))}"
        elif (
            self.kinds & KEEPING
            and self.epochs[1][0]
            and pipeline.draw not in COUNTED
            and not _has(pipeline, *KEPT)
        ):
            yield f"{' and '.join(sorted(self.kinds & KEEPING))}"
        once = len(drawn) > 1 and len(set(drawn)) == len(drawn)
        if "random" in self.kinds and pipeline.draw in REPEATING and once:
            yield "random"


def observe(
    directory: Path,
    pipeline: Pipeline,
    mode: str,
    cluster: tfd.Cluster,
    workers: int | None = None,
) -> Observation:
    """Read two epochs. In the first one, `cluster` gets the number of data workers."""
    build = Build(directory)
    dataset = sent = build(pipeline)
    if _has(pipeline, "hint", *KEPT):
        sent = build(pipeline, sent=True)
    count = workers or _workers(cluster)
    semantics = _semantics(sent)
    found = semantics.changes(mode_of(mode), count, _in_process(cluster))
    assert _methods_of(pipeline).issuperset(map(_method, found)), found
    kinds = {change.kind for change in found}
    later = bool(kinds & KEEPING) or any("same order in each epoch" in each.what for each in found)
    times = _times(pipeline, mode, cluster)
    promised = semantics.keeps_elements(mode_of(mode) if times == 1 else "OFF")
    seen = Observation(kinds, [], [], _is_repeatable(pipeline, dataset), promised, later)
    read = cluster.distribute(mode, semantics="tensorflow")(sent)
    for _ in range(2):
        try:
            alone, iterator = elements(dataset), iter(read)
            through = elements(itertools.islice(iterator, 1))
            if workers is not None:
                cluster.scale(data_workers=workers)
            through += elements(iterator)
        except tf.errors.OpError as error:
            seen.error = error
            break
        seen.epochs.append((alone, through))
        seen.same.append(Counter(x for x, _ in through) == _repeated((x for x, _ in alone), times))
        build.change_state()
    return seen


def compare(
    directory: Path,
    clusters: list[tfd.Cluster],
    pipeline: Pipeline,
    mode: str,
    cluster: tfd.Cluster,
    semantics: str,
) -> list[str]:
    """Return the results for a pipeline. Fail if a difference has no finding, or the reverse."""
    if semantics == "same":
        return compare_same(directory, pipeline, mode, cluster)
    seen = observe(directory, pipeline, mode, cluster)
    if seen.error is not None:
        return [_failure(seen.error, pipeline, seen.kinds)]
    sure = seen.repeatable and not seen.kinds & CHANGING
    assert seen.same[0] or not (seen.promised and seen.repeatable), f"{seen}"
    for number, same in enumerate(seen.same):
        assert same or not sure or (number and seen.later), f"{seen}"
        grouped = seen.kinds & CHANGING == {"grouping"} and _sums(pipeline)
        grouped = grouped and _semantics(Build(directory)(pipeline)).keeps_elements("OFF")
        if grouped and not (number and seen.later):
            total, received = (sum(_values(each)) for each in seen.epochs[number])
            assert received == _times(pipeline, mode, cluster) * total, f"{seen}"
    drawn = seen.drawn
    cached = _has(pipeline, *KEPT, "repeat", "endless")
    once = cached or len(set(drawn)) == len(drawn)
    if pipeline.draw == "unseeded":
        assert once
    elif pipeline.draw in REPEATING and "random" not in seen.kinds:
        assert pipeline.draw == "seeded"
        assert not sure or Counter(seen.epochs[0][0]) == Counter(seen.epochs[0][1])
    elif pipeline.draw in COUNTED:
        assert _in_process(cluster) or "python" in seen.kinds
        assert not _in_process(cluster) or _times(pipeline, mode, cluster) > 1 or once
    elif pipeline.draw == "stateless" and sure:
        assert {*seen.epochs[0][0]} == {*seen.epochs[0][1]}
    result = "same" if all(seen.same) else "different"
    if not seen.kinds:
        return [result]
    for kinds in seen.without_difference(pipeline):
        if "order" in kinds and _has(pipeline, "unordered"):
            return ["parallel calls, which may end in order"]
        if "pairing" in kinds and pipeline.source[0] == "generator":
            # The others end before they read the other source. TensorFlow does not promise that.
            return ["one data worker gets all pairs"]
        larger = _larger(pipeline)
        places = itertools.cycle([cluster, *(each for each in clusters if _workers(each) > 1)])
        for place in itertools.islice(places, TRIES):
            again = observe(directory / "large", larger, mode, place)
            if again.epochs and len({*_values(again.epochs[0][0])}) < 2:
                return ["too few elements for a finding"]
            if kinds not in again.without_difference(larger):
                break
            if again.epochs and _accepts_all(larger, again.epochs[0][0], directory / "large"):
                return ["a take_while that accepts all"]
        else:
            raise AssertionError(f"{FALSE}: {kinds} in {pipeline}, mode {mode}")
    return [f"{result}, with a finding"]


def _accepts_all(pipeline: Pipeline, epoch: list[Element], directory: Path) -> bool:
    steps = tuple(step for step in pipeline.steps if step[0] != "take_while")
    without = dataclasses.replace(pipeline, steps=steps)
    return steps != pipeline.steps and Counter(_values(elements(Build(directory)(without)))) == (
        Counter(_values(epoch))
    )


def _semantics(dataset: Any) -> Any:
    return graph_inspection.examine(dataset).semantics


def _workers(cluster: tfd.Cluster) -> int:
    return sum(task.role == "data_worker" for task in cluster.tasks)


def _in_process(cluster: tfd.Cluster) -> bool:
    return cluster.name.startswith("inprocess")


def _times(pipeline: Pipeline, mode: str, cluster: tfd.Cluster) -> int:
    """Return how many times the data workers together deliver the dataset."""
    whole = mode == "off" or (mode == "hint" and not _has(pipeline, "hint"))
    return _workers(cluster) if whole else 1


def _larger(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with larger sources and limits."""

    def source(step: Step) -> Step:
        kind, *arguments = step
        if kind in ("range", "slices", "generator", "random"):
            return (kind, 8 * arguments[0] + 53, *arguments[1:])
        return step

    def larger(step: Step) -> Step:
        name, *arguments = step
        if name == "take_while":  # the sources have the values 0 to 40, in another order
            return (name, arguments[0] // 2 + 30)
        if step == ("take", 0) or step[:2] == ("group", 1):
            return (name, 3, *arguments[1:])
        return tuple(source(each) if isinstance(each, tuple) else each for each in step)

    steps = tuple(map(larger, pipeline.steps))
    return dataclasses.replace(pipeline, source=source(pipeline.source), steps=steps)


def _failure(error: Exception, pipeline: Pipeline, kinds: set[str]) -> str:
    """Return the result for an epoch that TensorFlow has refused. Raise an unexpected error."""
    if "undivided" in kinds and "split" in str(error).lower():
        return "cannot be divided, with a finding"
    if not isinstance(error, tfd.errors.DataError):
        assert _has(pipeline, "cache_file")  # of which an operation after it reads a part
        return "fails without a service"
    if error.code != tfd.errors.DataError.code:
        raise error
    if "cache" in str(error):
        assert "external" in kinds
        return "cannot write the cache, with a finding"
    return "cannot be divided"  # fewer files or elements than data workers


def compare_same(directory: Path, pipeline: Pipeline, mode: str, cluster: tfd.Cluster) -> list[str]:
    """Return the result for a pipeline with ``semantics="same"``. Fail if elements differ."""
    build = Build(directory)
    dataset = sent = build(pipeline)
    if _has(pipeline, "hint", *KEPT):
        sent = build(pipeline, sent=True)
    times = _times(pipeline, mode, cluster)
    try:
        read = cluster.distribute(mode, semantics="same")(sent)
    except tfd.errors.DataChanged:
        return ["refused by same"]
    parts = divide(sent, mode_of(mode), _in_process(cluster))
    if parts is not None and parts.local and not parts.boundary:
        times = 1  # all of it runs here
    # A pipeline that is not repeatable differs in each epoch, also without a service.
    elements_certain = values_certain = number_certain = _is_repeatable(pipeline, dataset)
    if elements_certain and parts is not None and parts.local:
        elements_certain, number_certain = _certain(pipeline)
        values_certain, _ = _certain(dataclasses.replace(pipeline, batches=()))
        values_certain = values_certain and not _drops(pipeline)
    drawn, expected_draws = [], []
    for _ in range(2):
        try:
            alone, through = elements(dataset), elements(read)
        except tf.errors.OpError as error:
            return [_failure(error, pipeline, {"external"})]
        if elements_certain:
            assert Counter(x for x, _ in through) == _repeated((x for x, _ in alone), times)
        if values_certain:
            assert Counter(_values(through)) == _repeated(_values(alone), times)
        if number_certain:
            sizes = (len(values) for values, _ in through)
            assert Counter(sizes) == _repeated((len(values) for values, _ in alone), times)
        drawn += _drawn(through)
        expected_draws += _drawn(alone)
        build.change_state()
    repeats = _has(pipeline, *KEPT, "repeat", "endless")
    if pipeline.draw in ("unseeded", "generator", "augmentation", "numpy", "counter"):
        assert repeats or len(set(drawn)) == len(drawn)
    elif pipeline.draw == "seeded" and len(drawn) == len(expected_draws):
        assert Counter(drawn) == Counter(expected_draws)
    result = "same elements" if elements_certain else "same number" if number_certain else "read"
    return [f"{result} by same"]


def _certain(pipeline: Pipeline) -> tuple[bool, bool]:
    """Return whether the elements, and their number, are the same in any order of arrival."""
    elements = number = True
    order = _is_ordered(pipeline)
    for name, *_ in pipeline.operations:
        number = number and not (name == "take_while" and not order)
        number = number and not (name in BY_VALUE and not elements)
        elements = elements and not (name in BY_ORDER and not order) and name not in GROUPING
        order = order and name not in REORDERING
    return elements, number


def elements(dataset: Iterable[Any]) -> list[Element]:
    return [
        (tuple(np.ravel(x).tolist()), tuple(np.ravel(number).tolist())) for x, number in dataset
    ]


def _values(epoch: list[Element]) -> list[int]:
    return [x for values, _ in epoch for x in values]


def _drawn(epoch: list[Element]) -> list[int]:
    return [number for _, numbers in epoch for number in numbers]


def _repeated(items: Iterable[Hashable], times: int) -> Counter[Hashable]:
    return Counter({item: times * number for item, number in Counter(items).items()})
