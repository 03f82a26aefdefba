"""Datasets with fewer files or elements than data workers, in modes that divide them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

import tfd_notebook as tfd
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
