"""Datasets with fewer files or elements than data workers, in modes that divide them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook import errors

pytestmark = pytest.mark.integration

D = tf.data.Dataset
Files = list[str]


@pytest.fixture(scope="module")
def cluster() -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=3, launcher="inprocess", name="three") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    directory = tmp_path_factory.mktemp("files")
    names = [str(directory / name) for name in "abcd"]
    for name in names:
        with tf.io.TFRecordWriter(name) as writer:
            for _ in range(5):
                writer.write(b"12345678")
    return names


def interleaved(files: Files) -> Any:
    return D.from_tensor_slices(files).interleave(tf.data.TFRecordDataset)


def records(files: Files) -> Any:
    return tf.data.TFRecordDataset(files)


#: A dataset, the modes that divide it among too few files or elements, and their number.
TOO_FEW: dict[str, tuple[Callable[[Files], Any], tuple[str, ...], str]] = {
    "interleave": (lambda f: interleaved(f[:2]), ("file", "file_or_data"), "2 files"),
    "records": (
        lambda f: records(f[:2]).map(tf.strings.length),
        ("file", "file_or_data"),
        "2 files",
    ),
    "one": (lambda f: records(f[:1]), ("file", "file_or_data"), "1 file"),
    "taken": (
        lambda f: D.from_tensor_slices(f).take(2).flat_map(tf.data.TFRecordDataset),
        ("file", "file_or_data"),
        "2 files",
    ),
    "lines": (lambda f: tf.data.TextLineDataset(f[:2]), ("file", "file_or_data"), "2 files"),
    "fixed": (
        lambda f: tf.data.FixedLengthRecordDataset(f[:2], 8),
        ("file", "file_or_data"),
        "2 files",
    ),
    "two sources": (
        lambda f: records(f[:2]).concatenate(interleaved(f[2:])),
        ("file", "file_or_data"),
        "4 files, of which one source has 2 files",
    ),
    "unknown source": (
        lambda f: records(f[:2]).concatenate(
            records(D.from_tensor_slices(f).filter(lambda name: True))
        ),
        ("file",),
        "2 files in one of its sources",
    ),
    "elements": (lambda f: D.range(2), ("data", "file_or_data"), "2 elements"),
    "batches": (lambda f: D.range(100).batch(50), ("data", "file_or_data"), "2 elements"),
}
CASES = [(name, mode) for name, (_, modes, _) in TOO_FEW.items() for mode in modes]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_error_counts_the_whole_dataset(
    cluster: tfd.Cluster, files: Files, name: str, mode: str
) -> None:
    create, _, count = TOO_FEW[name]
    read = create(files).apply(cluster.distribute(mode, semantics="tensorflow"))
    with pytest.raises(errors.DataError, match="too few files or elements") as caught:
        list(read)
    assert f"elements ({count}): this mode needs at least one" in str(caught.value)
    assert "each of the 3 data workers" in str(caught.value)


@pytest.mark.parametrize(
    ("create", "mode"),
    [
        (lambda f: records(f).batch(20), "data"),
        (lambda f: D.zip((records(f[:2]), D.range(50))), "file_or_data"),
    ],
)
def test_error_has_no_count_that_is_unknown(
    cluster: tfd.Cluster, files: Files, create: Callable[[Files], Any], mode: str
) -> None:
    read = create(files).apply(cluster.distribute(mode, semantics="tensorflow"))
    with pytest.raises(errors.DataError, match="too few files or elements: this mode"):
        list(read)


def test_line_of_distribute_names_the_failure(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    with tfd.Cluster(data_workers=2, launcher="inprocess", name="line") as cluster:
        records(files[:1]).apply(cluster.distribute("file"))
        printed = capsys.readouterr().err
        assert "But with 2 data workers an epoch fails, because the dataset has 1 file" in printed
        assert "every element" not in printed


def test_error_of_a_registered_dataset_has_the_count(cluster: tfd.Cluster, files: Files) -> None:
    registered = cluster.register(records(files[:2]), semantics="tensorflow")
    with pytest.raises(errors.DataError, match=r"too few files or elements \(2 files\)"):
        list(cluster.from_dataset_id("file", registered, tf.TensorSpec([], tf.string)))


@pytest.mark.parametrize(
    ("create", "mode"),
    [
        (lambda f: D.from_tensor_slices(f[:2]).repeat(2).flat_map(records), "file"),
        (lambda f: D.range(0), "data"),
        (lambda f: records(f), "file_or_data"),
    ],
)
def test_enough_or_no_files_can_be_divided(
    cluster: tfd.Cluster, files: Files, create: Callable[[Files], Any], mode: str
) -> None:
    dataset = create(files)
    read = dataset.apply(cluster.distribute(mode, semantics="tensorflow"))
    assert len(list(read)) == len(list(dataset))


@pytest.mark.parametrize(("name", "mode"), [("records", "file"), ("batches", "data")])
def test_doctor_finds_too_few(cluster: tfd.Cluster, files: Files, name: str, mode: str) -> None:
    create, _, count = TOO_FEW[name]
    read = create(files).apply(cluster.distribute(mode, semantics="tensorflow"))
    (finding,) = (each for each in tfd.doctor(read) if each.code == "TFD820")
    assert finding.severity == "error"
    assert finding.what.startswith("with 3 data workers an epoch fails")
    assert f'the dataset has {count}, and mode "{mode}" needs' in finding.what
    with pytest.raises(errors.DataError):
        list(read)
    assert "TFD820" in tfd.doctor(read).codes
    enough = create(files).apply(cluster.distribute("dynamic", semantics="tensorflow"))
    assert "TFD820" not in tfd.doctor(enough).codes


def test_forecast_and_scale_name_the_failure(files: Files) -> None:
    """With two files and two data workers, one more data worker fails the next epoch."""
    failure = 'with 3 data workers an epoch fails, because the dataset has 2 files, and mode "file"'

    def slow(record: Any) -> Any:
        time.sleep(0.02)
        return record

    with tfd.Cluster(data_workers=2, launcher="inprocess", name="two") as cluster:
        dataset = records(files[:2]).repeat(1_000)
        dataset = dataset.map(lambda x: tf.numpy_function(slow, [x], tf.string))
        train = dataset.apply(cluster.distribute("file"))
        with cluster.stream(train, name="train").start() as stream:
            until(lambda: stream.elements > 0)
            table = cluster.what_if(3)
            until(lambda: stream.limit.kind == "workers")
            assert failure in stream.limit.advice
        now, more = table.records()
        assert (now["data_workers"], now["because"]) == (2, "workers")
        assert (more["data_workers"], more["because"], more["elements_per_s"]) == (3, "failure", 0)
        assert failure in " ".join(str(table).split())
        # It measures for 40 % of the time, and the first element takes seconds on a busy host.
        assert failure in tfd.explain(train, seconds=12).advice

        cluster.scale(data_workers=2)
        assert failure not in str(cluster.snapshot().notices)
        cluster.scale(data_workers=3)
        (notice,) = (each for each in cluster.snapshot().notices if failure in each.what)
        assert notice.severity == "warning"
        assert "fewer data workers" in notice.fix
        with pytest.raises(errors.DataError, match=r"too few files or elements \(2 files\)"):
            next(iter(train))
