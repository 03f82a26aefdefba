"""Refusals and warnings for pipelines that a running service would change."""

from __future__ import annotations

import contextlib
import linecache
import os
import random
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.data.bottleneck.usage import use_in
from tfd_notebook.data.service import graph_inspection, validation
from tfd_notebook.model.spec import Role

pytestmark = pytest.mark.integration

D = tf.data.Dataset
PAIRS = D.zip((D.range(6), D.range(6)))


@pytest.fixture(scope="module")
def cluster() -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=2, launcher="inprocess", name="checked") as cluster:
        yield cluster


def codes(dataset: tf.data.Dataset) -> set[str]:
    return set(tfd.doctor(dataset).codes)


def severities(dataset: tf.data.Dataset) -> set[tuple[str, str]]:
    return {(finding.code, finding.severity) for finding in tfd.doctor(dataset)}


@pytest.mark.parametrize(
    ("dataset", "mode"),
    [
        (PAIRS, "dynamic"),
        (PAIRS.batch(2), "file"),
        (D.range(6).shuffle(6), "data"),
        (D.range(6).filter(lambda x: tf.random.uniform(()) > 0.5), "data"),
    ],
)
def test_wrong_elements_are_refused_before_anything_is_sent(
    cluster: tfd.Cluster, dataset: tf.data.Dataset, mode: str
) -> None:
    with pytest.raises(errors.DataChanged, match=f'mode "{mode}"') as caught:
        dataset.apply(cluster.distribute(mode))
    assert 'semantics="tensorflow"' in str(caught.value.fix)
    assert caught.value.code == "TFD308"


def test_check_can_be_turned_off(cluster: tfd.Cluster) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = PAIRS.take(4).apply(cluster.distribute("dynamic", semantics="tensorflow"))
    assert 4 <= len(list(read)) <= 6


def test_pairs_are_right_if_the_results_are_divided(cluster: tfd.Cluster) -> None:
    read = PAIRS.apply(cluster.distribute("data"))
    assert sorted(read.as_numpy_iterator()) == [(number, number) for number in range(6)]


@pytest.mark.parametrize("mode", ["data", "file_or_data", "dynamic"])
def test_rebatch_at_the_end_is_applied(cluster: tfd.Cluster, mode: str) -> None:
    """To divide the results, TensorFlow replaces it by an operation that does nothing."""
    rebatched = D.range(48).batch(16).rebatch(4)
    registered = cluster.register(rebatched)

    @tf.function
    def count() -> tf.Tensor:
        return traced().apply(cluster.distribute(mode)).reduce(0, lambda number, _: number + 1)

    def traced() -> Any:
        return D.range(48).batch(16).rebatch(4)

    for read in (
        rebatched.apply(cluster.distribute(mode)),
        rebatched.prefetch(2).apply(cluster.distribute(mode, semantics="same")),
        cluster.from_dataset_id(mode, registered),
    ):
        sizes = [len(batch) for batch in read.as_numpy_iterator()]
        assert sum(sizes) == 48
        assert max(sizes) == 4
        assert mode == "dynamic" or len(sizes) == 12
    assert 12 <= count() <= 14


def csv(directory: Path) -> Any:
    (directory / "numbers.csv").write_text("0\n1\n2\n3\n")
    return tf.data.experimental.CsvDataset(str(directory / "numbers.csv"), [tf.int64])


def loaded(directory: Path) -> Any:
    D.range(4).map(lambda x: (x,)).save(str(directory / "saved"))
    return D.load(str(directory / "saved"))


def sql(directory: Path) -> Any:
    with contextlib.closing(sqlite3.connect(directory / "numbers.db")) as base:
        base.execute("create table numbers (number integer)")
        base.executemany("insert into numbers values (?)", [(number,) for number in range(4)])
        base.commit()
    query = "select number from numbers"
    types = (tf.int64,)
    return tf.data.experimental.SqlDataset("sqlite", str(directory / "numbers.db"), query, types)


@pytest.mark.parametrize("create", [csv, loaded, sql])
def test_source_that_cannot_be_divided_is_named(
    cluster: tfd.Cluster, create: Callable[[Path], Any], tmp_path: Path
) -> None:
    source = create(tmp_path)
    with pytest.warns(UserWarning, match='reading fails.*use processing_mode="data"'):
        read = source.apply(cluster.distribute("dynamic"))
    with pytest.raises(errors.DataError, match="cannot split a source of type"):
        list(read)
    for divided in (
        source.apply(cluster.distribute("data")),
        source.apply(cluster.distribute("dynamic", semantics="same")),  # in this process
    ):
        assert sorted(divided.as_numpy_iterator()) == [(number,) for number in range(4)]


def test_snapshot_that_cannot_be_divided_is_named(cluster: tfd.Cluster, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="snapshot.*reading fails.*after distribute"):
        read = D.range(4).snapshot(str(tmp_path)).apply(cluster.distribute("dynamic"))
    with pytest.raises(errors.TfdError, match="snapshot"):
        list(read)


def test_random_order_of_rows_is_named(cluster: tfd.Cluster) -> None:
    rows = D.range(48).batch(8).map(tf.random.shuffle).unbatch()
    with pytest.warns(UserWarning, match=r"unbatch\(\).*random numbers of an operation before it"):
        read = rows.apply(cluster.distribute("data"))
    assert len(list(read)) == 48
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        labelled = D.range(48).batch(8).map(lambda x: (tf.random.uniform([8]), x)).unbatch()
        read = labelled.apply(cluster.distribute("data"))
    assert sorted(int(x) for _, x in read) == [*range(48)]


def test_other_changes_are_one_warning(cluster: tfd.Cluster) -> None:
    with pytest.warns(UserWarning, match=r"take\(4\).*8 may arrive.*after distribute") as caught:
        read = D.range(6).take(4).skip(1).apply(cluster.distribute("dynamic"))
    assert len(caught) == 1
    assert 3 <= len(list(read)) <= 6


def test_warning_of_ten_changes_names_three_and_where_the_others_are(cluster: tfd.Cluster) -> None:
    dataset = D.range(50)
    for number in range(5):
        dataset = dataset.take(40 - number).skip(number + 1)
    with pytest.warns(UserWarning, match="may differ") as caught:
        dataset.apply(cluster.distribute("dynamic"))
    text = str(caught[0].message)
    assert len(text.split()) <= 110
    assert text.count("each data worker") == 3
    assert "7 other changes" in text
    assert text.count("It cannot separate data for validation") == 1
    assert "tfd.doctor(dataset) lists all changes" in text
    assert [each.code for each in tfd.doctor(dataset)] == ["TFD828"] * 10


def shuffled_elements() -> Iterator[int]:
    order = list(range(40))
    random.shuffle(order)
    yield from order


def test_random_order_of_a_generator_is_a_warning(cluster: tfd.Cluster) -> None:
    generated = D.from_generator(shuffled_elements, output_signature=tf.TensorSpec((), tf.int64))
    with pytest.warns(UserWarning, match=r"shuffled_elements.*random numbers.*missing"):
        read = generated.apply(cluster.distribute("data"))
    arrived = numbers(read)
    assert len(arrived) == 40
    assert len(set(arrived)) < 40
    assert numbers(generated.apply(cluster.distribute("dynamic"))) == list(range(40))


@pytest.fixture
def lines(tmp_path: Path) -> tf.data.Dataset:
    """Return the numbers from 0 to 7, from two files."""
    files = [os.fspath(tmp_path / name) for name in ("a", "b")]
    for number, file in enumerate(files):
        Path(file).write_text("".join(f"{4 * number + line}\n" for line in range(4)))
    return tf.data.TextLineDataset(files).map(lambda line: tf.strings.to_number(line, tf.int64))


def test_windows_of_other_elements_are_a_warning(
    cluster: tfd.Cluster, lines: tf.data.Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    windows = lines.window(3).flat_map(lambda window: window.batch(3))
    with pytest.warns(UserWarning, match=r"window\(3\).*not neighbors.*use batch\(\)"):
        read = windows.apply(cluster.distribute("file"))
    assert "every element once" not in capsys.readouterr().err
    assert sorted(x.tolist() for x in read.as_numpy_iterator()) == [[0, 1, 2], [3], [4, 5, 6], [7]]
    read = windows.apply(cluster.distribute("data"))
    assert sorted(map(str, read)) == sorted(map(str, windows))


def test_sequences_of_other_elements_are_a_warning(
    cluster: tfd.Cluster, lines: tf.data.Dataset
) -> None:
    sequences = lines.batch(3).padded_batch(4)
    with pytest.warns(UserWarning, match=r"batch\(3\).*examples of a later batch.*not neighbors"):
        read = sequences.apply(cluster.distribute("file"))
    arrived = [row.tolist() for batch in read.as_numpy_iterator() for row in batch]
    assert sorted(arrived) == [[0, 1, 2], [3, 0, 0], [4, 5, 6], [7, 0, 0]]
    with pytest.raises(errors.DataChanged, match=r"batch\(3\).*no fixed order"):
        sequences.apply(cluster.distribute("file", semantics="same"))


def test_reduction_of_divided_sources_is_a_warning(
    cluster: tfd.Cluster, lines: tf.data.Dataset
) -> None:
    zero = tf.constant(0, tf.int64)
    reducer = tf.data.experimental.Reducer(lambda _: zero, tf.add, lambda total: total)
    sums = lines.apply(tf.data.experimental.group_by_reducer(lambda x: x % 2, reducer))
    assert numbers(sums) == [12, 16]
    with pytest.warns(UserWarning, match="group_by_reducer.*reading fails.*after distribute"):
        read = sums.apply(cluster.distribute("dynamic"))
    with pytest.raises(errors.DataError, match="split"):
        list(read)
    assert numbers(sums.apply(cluster.distribute("dynamic", semantics="same"))) == [12, 16]


def test_incomplete_batch_of_each_key_is_a_warning(
    cluster: tfd.Cluster, lines: tf.data.Dataset
) -> None:
    def batches(_: tf.Tensor, group: tf.data.Dataset) -> tf.data.Dataset:
        return group.batch(3, drop_remainder=True)

    grouped = lines.group_by_window(lambda x: x % 2, batches, 3)
    with pytest.warns(UserWarning, match="a batch for each key and each data worker"):
        read = grouped.apply(cluster.distribute("dynamic"))
    assert len(list(grouped)) == 2
    assert len(list(read)) in (2, 0)  # of one data worker, or of two


def received(stream: tfd.Stream) -> list[Any]:
    return [str(element) for element in stream]


def pairs(elements: Iterable[Any]) -> list[tuple[int, int]]:
    """Return the pairs of numbers, also those of batches, which have members in any order."""
    parts = ([np.ravel(part).tolist() for part in element] for element in elements)
    return sorted(pair for first, second in parts for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("later", [lambda read: read, lambda read: read.map(lambda *x: x).batch(2)])
def test_stream_has_the_elements_that_its_semantics_select(
    cluster: tfd.Cluster, later: Callable[[Any], Any]
) -> None:
    read = later(PAIRS.apply(cluster.distribute("dynamic", semantics="tensorflow")))
    with pytest.raises(errors.DataChanged, match=r"zip\("):
        cluster.stream(read, "refused", semantics="checked")
    assert "refused" not in cluster.streams
    same = cluster.stream(read, "right", semantics="same")
    assert pairs(same) == pairs(later(PAIRS))
    assert received(cluster.stream(read, "any", semantics="tensorflow"))
    local = later(PAIRS)
    for semantics in ("checked", "same", "tensorflow"):
        assert received(cluster.stream(local, semantics=semantics)) == list(map(str, local))


def test_stream_warns_once_of_changes_that_distribute_did_not_report(cluster: tfd.Cluster) -> None:
    taken = D.range(6).take(4)
    read = taken.apply(cluster.distribute("dynamic", semantics="tensorflow")).prefetch(1)
    with pytest.warns(UserWarning, match=r"take\(4\).*8 may arrive") as caught:
        cluster.stream(read, "first", semantics="checked")
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=r"take\(4\)"):
        known = taken.apply(cluster.distribute("dynamic"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cluster.stream(read, "second", semantics="checked")
        cluster.stream(known, "third", semantics="checked")
        cluster.stream(read, "fourth")
        same = cluster.stream(known, "fifth", semantics="same")
    assert sorted(received(same)) == sorted(map(str, taken))


def test_stream_of_a_job_or_of_a_registered_dataset_cannot_be_distributed_again(
    cluster: tfd.Cluster,
) -> None:
    shared = PAIRS.apply(cluster.distribute("dynamic", job_name="pairs", semantics="tensorflow"))
    with pytest.raises(errors.UsageError, match="shared job"):
        cluster.stream(shared, semantics="same")
    dataset_id = cluster.register(PAIRS, semantics="tensorflow")
    read = cluster.from_dataset_id("dynamic", dataset_id)
    for semantics in ("checked", "same"):
        with pytest.raises(errors.DataChanged, match=r"zip\("):
            cluster.stream(read, semantics=semantics)


def counting(pairs: Any) -> Callable[[], Any]:
    """Return a function that counts wrong pairs, in a loop that runs in TensorFlow."""

    @tf.function
    def wrong() -> tf.Tensor:
        count = tf.constant(0)
        for first, second in pairs:
            count += tf.cast(first != second, tf.int32)
        return count

    return wrong


def refuses_two(cluster: tfd.Cluster, name: str = "a dataset") -> errors.StateError:
    """Check that no data worker joins, because of a dataset that exists."""
    with pytest.raises(errors.StateError, match=rf"{name} exists.*zip\(") as caught:
        cluster.scale(data_workers=2)
    assert "delete the dataset" in str(caught.value.fix)
    assert len([each for each in cluster.tasks if each.role is Role.DATA_WORKER]) == 1
    return caught.value


def test_no_worker_joins_while_a_dataset_exists_that_it_would_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tfd.Cluster(data_workers=1, launcher="inprocess", name="single") as single:
        with pytest.warns(UserWarning, match="second data worker"):
            read = PAIRS.apply(single.distribute("dynamic"))
        wrong = counting(read)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["__main__"], "train", read, raising=False)
            error = refuses_two(single, "train")
        single.scale(data_workers=1)
        derived = read.prefetch(1)
        single.adapt(2, 2)
        until(lambda: any("a dataset exists" in each.what for each in single.snapshot().notices))
        single.adapt(None)
        assert wrong() == 0
        assert len(list(derived)) == 6
        del read, wrong
        refuses_two(single)
        del derived
        assert error.__traceback__ is not None  # which holds no dataset
        single.scale(data_workers=2)


def test_no_worker_joins_while_a_function_has_a_dataset_that_it_would_change() -> None:
    with tfd.Cluster(data_workers=1, launcher="inprocess", name="single") as single:

        @tf.function
        def count() -> tf.Tensor:
            pairs = PAIRS.apply(single.distribute("dynamic"))
            return pairs.reduce(0, lambda number, _: number + 1)

        with pytest.warns(UserWarning, match="second data worker"):
            assert count() == 6
        refuses_two(single)
        del count
        single.scale(data_workers=2)


def test_no_worker_joins_while_a_registered_dataset_is_read_that_it_would_change() -> None:
    with tfd.Cluster(data_workers=1, launcher="inprocess", name="single") as single:
        dataset_id = single.register(PAIRS)
        with pytest.warns(UserWarning, match="second data worker"):
            first, second = (single.from_dataset_id("dynamic", dataset_id) for _ in range(2))
        assert single.register(PAIRS, dataset_id) == dataset_id
        del second
        refuses_two(single)
        del first
        unchecked = PAIRS.apply(single.distribute("dynamic", semantics="tensorflow"))
        same = PAIRS.apply(single.distribute("dynamic", semantics="same"))
        divided = PAIRS.apply(single.distribute("data"))
        single.scale(data_workers=2)
        assert 5 <= len(list(unchecked)) <= 6
        assert len(list(same)) == len(list(divided)) == 6


def test_dataset_is_refused_after_another_process_has_added_a_worker(cluster: tfd.Cluster) -> None:
    pipeline = graph_inspection.examine(PAIRS).semantics
    refused = validation.refused_later(pipeline, "DYNAMIC", "checked")
    use = use_in(D.range(2).apply(cluster.distribute("off")))
    assert use is not None
    service: Any = use.delivery.cluster()
    before = validation.BeforeReading(service, None, (), refused, "DYNAMIC")
    with pytest.raises(
        errors.DataChanged, match=r"zip\(.*had one data worker.* now has 2"
    ) as caught:
        before()
    assert "scale(data_workers=1)" in str(caught.value.fix)


def test_no_worker_joins_an_epoch_that_it_would_change() -> None:
    with tfd.Cluster(data_workers=1, launcher="inprocess", name="single") as single:
        with pytest.warns(UserWarning, match="second data worker"):
            read = PAIRS.apply(single.distribute("dynamic"))
        iterator = read.as_numpy_iterator()
        pairs = [next(iterator)]
        with pytest.raises(errors.StateError, match="is being read, and a second data worker"):
            single.scale(data_workers=2)
        single.adapt(2, 3)
        until(lambda: any("is being read" in each.what for each in single.snapshot().notices))
        single.adapt(None)
        assert len([each for each in single.tasks if each.role is Role.DATA_WORKER]) == 1
        assert sorted([*pairs, *iterator]) == [(number, number) for number in range(6)]
        del read, iterator
        single.scale(data_workers=2)


def test_no_worker_leaves_with_its_share_of_a_repeated_cache() -> None:
    with tfd.Cluster(data_workers=2, launcher="inprocess", name="caches") as caches:
        with pytest.warns(UserWarning, match=r"repeat\(\).*cached.*do not arrive again"):
            read = D.range(20).cache().repeat().apply(caches.distribute("dynamic"))
        iterator = read.as_numpy_iterator()
        next(iterator)
        with pytest.raises(errors.StateError, match="repeats the elements that it has cached"):
            caches.scale(data_workers=1)
        caches.scale(data_workers=2)
        del iterator
        read = D.range(20).cache().apply(caches.distribute("dynamic", semantics="same"))
        assert sorted(read.repeat(2).as_numpy_iterator()) == sorted([*range(20)] * 2)


def test_registered_dataset_is_checked_when_its_mode_is_known(cluster: tfd.Cluster) -> None:
    dataset_id = cluster.register(PAIRS)
    with pytest.raises(errors.DataChanged, match="zip"):
        cluster.from_dataset_id("dynamic", dataset_id)
    assert len(list(cluster.from_dataset_id("data", dataset_id))) == 6
    unchecked = cluster.register(PAIRS.prefetch(1), semantics="tensorflow")
    assert len(list(cluster.from_dataset_id("dynamic", unchecked))) <= 6


REGISTERING = """
import sys, tensorflow as tf, tfd_notebook as tfd
cluster = tfd.Cluster(data_workers=2, name="registering")
numbers = tf.data.Dataset.range(6)
pairs = tf.data.Dataset.zip((numbers, numbers)).batch(2)
compressions = None, "snappy"
print(*(cluster.register(pairs.prefetch(i + 1), compression=c) for i, c in enumerate(compressions)))
cluster.detach(hours=0.1)
"""


def test_dataset_that_another_process_registered_is_checked() -> None:
    command = [sys.executable, "-c", REGISTERING]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    cluster = tfd.attach("registering")
    try:
        for dataset_id in output.stdout.split()[-2:]:
            with pytest.raises(errors.DataChanged, match=r"(?s)zip\(\): .*Next: .*data"):
                cluster.from_dataset_id("dynamic", dataset_id)
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                read = cluster.from_dataset_id("data", dataset_id)
                unchecked = cluster.from_dataset_id("dynamic", dataset_id, semantics="tensorflow")
            assert sorted(x for pair in read for x in pair[0].numpy()) == [*range(6)]
            assert len(list(unchecked)) <= 6
        with pytest.raises(errors.TfdError, match="nowhere"):
            cluster.from_dataset_id("dynamic", "nowhere")
    finally:
        cluster.stop()


def test_registration_warns_of_state(cluster: tfd.Cluster) -> None:
    variable = tf.Variable(1, dtype=tf.int64)
    with pytest.warns(UserWarning, match="variables keep the value"):
        cluster.register(D.range(3).map(lambda x: x + variable))


SEEDED = D.range(6).shuffle(6, seed=1)


def create_in_function(cluster: tfd.Cluster) -> None:
    function = tf.function(
        lambda: D.range(6).take(4).apply(cluster.distribute("dynamic")).reduce(0, lambda n, _: n)
    )
    function()  # warns


def register_and_read(cluster: tfd.Cluster) -> None:
    dataset_id = cluster.register(D.range(6).take(4))
    cluster.from_dataset_id("dynamic", dataset_id)  # warns


def save_to(cluster: tfd.Cluster) -> None:
    with pytest.raises(errors.UsageError):
        cluster.save(SEEDED, os.fspath(Path(__file__).parent))  # warns


@pytest.mark.parametrize(
    "call",
    [
        lambda cluster: SEEDED.apply(cluster.distribute("off")),  # warns
        lambda cluster: cluster.register(SEEDED),  # warns
        register_and_read,
        create_in_function,
        save_to,
    ],
    ids=["distribute", "register", "from_dataset_id", "function", "save"],
)
def test_warning_points_to_the_line_of_the_user(
    cluster: tfd.Cluster, call: Callable[[tfd.Cluster], object]
) -> None:
    with pytest.warns(UserWarning, match="may differ") as caught:
        call(cluster)
    (warning,) = (each for each in caught if "may differ" in str(each.message))
    assert warning.filename == __file__
    assert "# warns" in linecache.getline(__file__, warning.lineno)


def test_change_is_warned_of_once_for_registered_dataset(cluster: tfd.Cluster) -> None:
    with pytest.warns(UserWarning, match="the seed gives the same order"):
        dataset_id = cluster.register(SEEDED.take(4))
    cluster.from_dataset_id("off", dataset_id)
    with pytest.warns(UserWarning, match=r"take\(4\)") as caught:
        cluster.from_dataset_id("dynamic", dataset_id)
    assert "seed" not in str(caught[0].message)


def test_dataset_in_a_function_is_checked(cluster: tfd.Cluster) -> None:
    @tf.function
    def count() -> tf.Tensor:
        pairs = D.zip((D.range(6), D.range(6))).apply(cluster.distribute("dynamic"))
        return pairs.reduce(0, lambda total, _: total + 1)

    with pytest.raises(Exception, match=r"TFD308.*zip"):  # AutoGraph replaces the error
        count()


def test_options_of_a_dataset_in_a_function_count(cluster: tfd.Cluster) -> None:
    options = tf.data.Options()
    options.deterministic = False

    @tf.function
    def count() -> tf.Tensor:
        mapped = D.range(6).map(lambda x: x, num_parallel_calls=2).with_options(options)
        return mapped.apply(cluster.distribute("data")).reduce(0, lambda total, _: total + 1)

    with pytest.raises(Exception, match=r"TFD308.*map"):  # AutoGraph replaces the error
        count()


def test_saved_dataset_is_checked(tmp_path: Path) -> None:
    with (
        tfd.Cluster(data_workers=1, launcher="inprocess", name="saving") as saving,
        pytest.warns(UserWarning, match="second data worker"),
    ):
        saving.save(PAIRS, str(tmp_path / "pairs"), timeout=60)
    assert len(list(D.load(str(tmp_path / "pairs")))) == 6


def test_invalid_value_is_refused_at_once(cluster: tfd.Cluster) -> None:
    with pytest.raises(errors.UnknownName, match="'strict'"):
        cluster.distribute("dynamic", semantics="strict")


def test_doctor_reports_the_changes(cluster: tfd.Cluster) -> None:
    assert "TFD827" in codes(PAIRS)
    assert severities(D.range(6)) == set()
    assert severities(D.range(6).batch(2)) == {("TFD828", "info")}
    assert severities(D.range(6).flat_map(lambda x: D.range(x).batch(2))) == set()
    assert severities(D.range(6).take(4)) == {("TFD828", "info")}
    assert severities(PAIRS.take(4)) == {("TFD827", "error"), ("TFD828", "info")}
    (finding,) = tfd.doctor(D.range(6).take(4))
    assert 'with "dynamic", take(4)' in finding.what
    batches = D.range(6).batch(2).apply(cluster.distribute("dynamic"))
    assert ("TFD828", "info") in severities(batches)
    unchecked = PAIRS.take(4).apply(cluster.distribute("dynamic", semantics="tensorflow"))
    assert {("TFD827", "error"), ("TFD828", "warning")} <= severities(unchecked)
    assert not {"TFD827", "TFD828"} & codes(D.range(6).apply(cluster.distribute("dynamic")))


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a variable that a notebook has under the name `scale`."""
    variable = tf.Variable(1, dtype=tf.int64)
    monkeypatch.setattr(sys.modules["__main__"], "scale", variable, raising=False)
    return variable


def numbers(dataset: Any) -> list[int]:
    return sorted(map(int, dataset.as_numpy_iterator()))


def test_variable_that_has_changed_is_named(cluster: tfd.Cluster, scale: Any) -> None:
    pipeline = D.range(3).map(lambda x: x * scale).filter(lambda x: x < 100 * scale)
    with pytest.warns(UserWarning, match="variables keep the value"):
        read = pipeline.apply(cluster.distribute("dynamic"))
    assert numbers(read) == [0, 1, 2]
    findings = [each.what for each in tfd.doctor(read) if each.code == "TFD828"]
    assert ["(the variable scale)" in what for what in findings] == [True, True]
    assert "TFD829" not in codes(read)
    scale.assign(10)
    (finding,) = (each for each in tfd.doctor(read) if each.code == "TFD829")
    assert "the variable scale has changed since the dataset was sent" in finding.what
    assert "distribute or register the dataset again" in finding.fix
    with pytest.warns(UserWarning, match="the variable scale has changed since") as caught:
        assert numbers(read) == [0, 1, 2]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert numbers(read) == [0, 1, 2], "the second epoch has no warning"
    with pytest.warns(UserWarning, match="variables keep the value"):
        renewed = pipeline.apply(cluster.distribute("dynamic"))
    assert "TFD829" not in codes(renewed)
    assert numbers(renewed) == [0, 10, 20]


def test_current_value_is_read_with_same_semantics(cluster: tfd.Cluster, scale: Any) -> None:
    read = (
        D.range(3).map(lambda x: x * scale).apply(cluster.distribute("dynamic", semantics="same"))
    )
    for value in (1, 10):
        scale.assign(value)
        assert numbers(read) == [0, value, 2 * value]
        assert "TFD829" not in codes(read)


def test_table_of_a_registered_dataset_that_has_changed_is_named(cluster: tfd.Cluster) -> None:
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
    with pytest.warns(UserWarning, match="tables keep the entries"):
        dataset_id = cluster.register(D.range(3).map(table.lookup))
    read = cluster.from_dataset_id("dynamic", dataset_id)
    assert "TFD829" not in codes(read)
    table.insert(tf.constant([0], tf.int64), tf.constant([7], tf.int64))
    assert "TFD829" in codes(read)
    with pytest.warns(UserWarning, match="the table has changed since"):
        assert numbers(read) == [-1, -1, -1]


def test_change_is_not_warned_of_without_the_check(cluster: tfd.Cluster, scale: Any) -> None:
    pipeline = D.range(3).map(lambda x: x * scale)
    read = pipeline.apply(cluster.distribute("dynamic", semantics="tensorflow"))
    scale.assign(10)
    assert numbers(read) == [0, 1, 2]
    assert "TFD829" in codes(read)


def files(directory: Path, count: int) -> tf.data.Dataset:
    """Return a dataset that reads `count` files with a line each."""
    paths = [directory / f"{number}.txt" for number in range(count)]
    for path in paths:
        path.write_text(f"{path.stem}\n")
    return tf.data.TextLineDataset([str(path) for path in paths])


@pytest.mark.parametrize(
    ("mode", "create", "text"),
    [
        ("data", lambda _: D.range(1), r"few files or elements \(1 element\).*the 2 data workers"),
        ("file", lambda _: D.range(6), "reads files.*Range"),
        ("file", lambda path: files(path, 1), r"few files .*\(1 file\).*2 data workers"),
        (
            "file_or_data",
            lambda path: files(path, 1),
            r"few files .*\(1 file\).*2 data workers",
        ),
    ],
    ids=["element", "no file", "file", "file or data"],
)
def test_mode_that_cannot_divide_the_dataset_is_explained(
    cluster: tfd.Cluster, tmp_path: Path, mode: str, create: Callable[[Path], Any], text: str
) -> None:
    with pytest.raises(errors.DataError, match=text) as caught:
        list(create(tmp_path).apply(cluster.distribute(mode)))
    assert '"dynamic"' in str(caught.value.fix)


@pytest.mark.parametrize("mode", ["file", "file_or_data"])
def test_files_are_divided(cluster: tfd.Cluster, tmp_path: Path, mode: str) -> None:
    read = files(tmp_path, 3).apply(cluster.distribute(mode))
    assert sorted(read.as_numpy_iterator()) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("name", ["kept_0.lockfile", "kept_0.index"])
def test_file_cache_of_another_iterator_is_explained(
    cluster: tfd.Cluster, tmp_path: Path, name: str
) -> None:
    # TensorFlow creates the first file before the first element, and the second one after the last.
    (tmp_path / name).touch()
    with pytest.warns(UserWarning, match="writes all of its elements"):
        read = D.range(9).cache(str(tmp_path / "kept")).apply(cluster.distribute("dynamic"))
    with pytest.raises(errors.DataError, match=rf"{name}.*its own iterator") as caught:
        next(iter(read))
    assert isinstance(caught.value, tf.errors.AlreadyExistsError)
    assert "cache(file) after distribute" in str(caught.value.fix)


def test_directory_that_a_cache_does_not_have_is_named(
    cluster: tfd.Cluster, tmp_path: Path
) -> None:
    numbers = D.range(5).cache(str(tmp_path / "absent" / "cache"))
    with pytest.raises(errors.DataError, match=r"has no directory \S+absent\nNext: create it"):
        list(numbers.apply(cluster.distribute("dynamic", semantics="tensorflow")))


def test_complete_file_of_a_cache_is_delivered_by_each_data_worker(
    cluster: tfd.Cluster, tmp_path: Path
) -> None:
    kept = D.range(6).cache(str(tmp_path / "kept"))
    expected = numbers(kept)
    with pytest.warns(UserWarning, match=r"delivers the whole file.*occur up to 2 times"):
        read = kept.apply(cluster.distribute("dynamic"))
    assert numbers(read) == sorted(2 * expected)
    with pytest.warns(UserWarning, match="fails while another one writes there"):
        divided = kept.apply(cluster.distribute("data"))
    assert numbers(divided) == expected
    assert numbers(kept.apply(cluster.distribute("dynamic", semantics="same"))) == expected


def test_file_cache_of_a_loop_that_was_left_is_explained(tmp_path: Path) -> None:
    with tfd.Cluster(data_workers=1, launcher="inprocess", name="left") as left:
        with pytest.warns(UserWarning, match="writes all of its elements"):
            read = D.range(1 << 40).cache(str(tmp_path / "kept")).apply(left.distribute("dynamic"))
        iterator = iter(read)
        next(iterator)
        with pytest.raises(errors.DataError, match="a loop that is left early leaves one"):
            next(iter(read))
        local = left.observe(D.range(1 << 40).cache(str(tmp_path / "local")))
        iterators = [iter(local), iter(local)]
        next(iterators[0])
        with pytest.raises(errors.DataError, match=r"local_0\.lockfile"):
            next(iterators[1])


def test_note_promises_only_what_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    with tfd.Cluster(data_workers=2, launcher="inprocess", name="noted") as noted:
        noted.register(D.range(6))
        D.range(6).take(5).apply(noted.distribute("dynamic", semantics="tensorflow"))
        assert "share the sources" in (text := capsys.readouterr().err)
        assert "every element once" not in text


Note = Callable[..., str]


@pytest.fixture
def noted(capsys: pytest.CaptureFixture[str]) -> Note:
    """Return a function that returns the note about the first read of a cluster."""

    def read(dataset: tf.data.Dataset, mode: str = "off", workers: int = 2) -> str:
        with tfd.Cluster(data_workers=workers, launcher="inprocess", name="noted") as cluster:
            dataset.apply(cluster.distribute(mode))
        return capsys.readouterr().err

    return read


def test_note_counts_elements_only_if_each_data_worker_delivers_the_same(noted: Note) -> None:
    assert "an epoch contains every element twice. Use" in noted(D.range(6).shuffle(6))
    assert "every element once." in noted(D.range(6), workers=1)
    first = noted(D.range(6).take(3))
    assert "every element twice" in first
    assert "every element once" not in first
    random_part = noted(D.range(6).shuffle(6).take(3))
    assert "each of the 2 data workers reads the whole dataset" in random_part
    assert 'mode "dynamic" to divide the sources' in random_part
    assert "element" not in random_part
    assert "element" not in noted(D.range(6).filter(lambda x: tf.random.uniform(()) > 0.5))


def test_note_names_the_batches_that_are_incomplete(
    noted: Note, lines: tf.data.Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = D.range(100).batch(32)
    clause = "Each data worker makes its own batches, so up to 2 more are incomplete."
    assert clause in noted(batches, "dynamic")
    assert "incomplete in each repetition." in noted(batches.repeat(2), "dynamic")
    keys = batches.unbatch().group_by_window(lambda x: x % 2, lambda _, group: group.batch(3), 3)
    assert "own groups, so up to 4 more are incomplete for each key." in noted(keys, "dynamic")
    for dataset, mode, workers in (
        (batches, "off", 2),
        (batches, "data", 2),
        (batches, "dynamic", 1),
        (D.range(100).batch(32, drop_remainder=True).take(-1), "off", 2),
        (D.range(9).flat_map(lambda x: D.range(x).batch(2)), "dynamic", 2),
    ):
        assert "incomplete" not in noted(dataset, mode, workers)
    with tfd.Cluster(data_workers=2, launcher="inprocess", name="files") as cluster:
        lines.apply(cluster.distribute("file"))
        assert "incomplete" not in capsys.readouterr().err
        read = lines.batch(3).apply(cluster.distribute("file"))
        assert clause in capsys.readouterr().err
        assert sorted(len(batch) for batch in read) == [1, 1, 3, 3]
        lines.batch(2).apply(cluster.distribute("file"))
        assert "incomplete" not in capsys.readouterr().err  # once


def test_note_about_a_missing_hint_is_that_of_whole_datasets(noted: Note) -> None:
    with pytest.warns(UserWarning, match="works like"):
        text = noted(D.range(6), mode="hint")
    assert "reads the whole dataset, so an epoch contains every element twice" in text


def test_error_of_random_numbers_that_are_drawn_here_has_a_step(cluster: tfd.Cluster) -> None:
    noise = tf.random.Generator.from_seed(1)
    drawn = D.random(1).take(1).map(lambda x: (x, noise.uniform(())))
    read = drawn.apply(cluster.distribute("data", semantics="same"))
    with pytest.raises(errors.DataError, match="too few files or elements") as caught:
        list(read)
    assert "fewer data workers" in str(caught.value)
