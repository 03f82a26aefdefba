"""Progress of `Cluster.save`, and reads of a dataset while it is written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.errors import DataChanged, TimeLimit, UsageError

pytestmark = pytest.mark.integration

COUNT, FREE = 20, 10


@pytest.fixture(scope="module")
def cluster() -> Iterator[tfd.Cluster]:
    """Yield a cluster that the tests share."""
    with tfd.Cluster(data_workers=2, name="saving") as cluster:
        yield cluster


def gated(gate: Path) -> Any:
    """Return a dataset whose last elements are available when the file `gate` exists."""
    path = str(gate)

    def wait(number: Any) -> Any:
        while number >= FREE and not os.path.exists(path):
            time.sleep(0.01)
        return number

    numbers = tf.data.Dataset.range(COUNT)
    return numbers.map(lambda n: tf.ensure_shape(tf.numpy_function(wait, [n], tf.int64), ()))


def test_dataset_is_read_while_it_is_saved(cluster: tfd.Cluster, tmp_path: Path) -> None:
    gate, path = tmp_path / "gate", str(tmp_path / "saved")
    dataset = gated(gate)
    saving = cluster.save(dataset, path, wait=False)
    with pytest.raises(TimeLimit, match="writing: "):
        saving.wait(timeout=0.0)
    until(lambda: saving.progress().splits)
    files = iter(tf.data.Dataset.load(path, wait=True))
    read = iter(dataset.apply(cluster.distribute("dynamic")))
    first = int(next(read))
    assert first < FREE
    progress = saving.progress()
    assert progress.state == "writing"
    assert not saving.done
    assert progress.streams_done < progress.streams
    assert progress.splits_total == COUNT
    gate.touch()
    assert sorted([first, *map(int, read)]) == list(range(COUNT))
    assert sorted(map(int, files)) == list(range(COUNT))
    assert saving.wait() is saving
    progress = saving.progress()
    assert (progress.state, progress.elements, progress.splits) == ("done", COUNT, COUNT)
    assert progress.streams_done == progress.streams >= 1
    assert progress.chunks >= 1
    assert progress.bytes > COUNT * 8
    assert "done: 20 of 20 splits" in repr(saving)


def test_save_waits_by_default(cluster: tfd.Cluster, tmp_path: Path) -> None:
    saving = cluster.save(tf.data.Dataset.range(3), str(tmp_path / "saved"))
    assert saving.done
    assert saving.progress().elements == 3


def test_dataset_without_end_is_refused(cluster: tfd.Cluster, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no end\nNext: omit repeat\(\), or call take"):
        cluster.save(tf.data.Dataset.range(3).repeat(), str(tmp_path / "saved"))


def test_step_of_same_saves_the_elements(cluster: tfd.Cluster, tmp_path: Path) -> None:
    numbers = tf.data.Dataset.range(9)
    pairs = tf.data.Dataset.zip((numbers, numbers))
    path = str(tmp_path / "saved")
    with pytest.raises(DataChanged, match=r"To save it, call save\(path\) of the result"):
        cluster.save(pairs, path, semantics="same")
    pairs.apply(cluster.distribute("dynamic", semantics="same")).save(path)
    loaded = tf.data.Dataset.load(path)
    assert sorted(loaded.as_numpy_iterator()) == [(number, number) for number in range(9)]


def test_dataset_from_outside_is_saved_in_a_tf_function(
    cluster: tfd.Cluster, tmp_path: Path
) -> None:
    dataset, path = tf.data.Dataset.range(3), str(tmp_path / "saved")

    @tf.function
    def save() -> None:
        cluster.save(dataset, path)

    save()
    assert sorted(map(int, tf.data.Dataset.load(path))) == [0, 1, 2]


def test_error_of_a_map_function_is_described(cluster: tfd.Cluster, tmp_path: Path) -> None:
    def refuse(number: Any) -> Any:
        raise ValueError("déjà vu")

    numbers = tf.data.Dataset.range(3).map(lambda n: tf.py_function(refuse, [n], tf.int64))
    with pytest.raises(errors.DataError, match="the pipeline failed in a data worker") as caught:
        cluster.save(numbers, str(tmp_path / "saved"))
    assert "stage map" in str(caught.value)
    assert "ValueError: déjà vu" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_path_that_cannot_be_created_is_refused(cluster: tfd.Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.TfdError) as caught:
        cluster.save(tf.data.Dataset.range(3), str(tmp_path / "file" / "saved"))
    assert "can write" in str(caught.value.fix)
    assert "function_node" not in str(caught.value)


def test_saving_that_the_end_of_the_cluster_interrupts_is_incomplete(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with tfd.Cluster(data_workers=1, name="short") as cluster:
        saving = cluster.save(gated(gate), str(tmp_path / "saved"), wait=False)
        until(lambda: saving.progress().splits)
        assert saving.progress().state == "writing"
    assert saving.progress().state == "incomplete"
