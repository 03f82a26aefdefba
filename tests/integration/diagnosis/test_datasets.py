"""Findings in datasets of a real service, and datasets without findings."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.data.experimental import service

import tfd_notebook as tfd
from tests._reading import read
from tests.integration import _oplibrary
from tfd_notebook import errors
from tfd_notebook._compat.tf_data import graph
from tfd_notebook.cluster import data_service
from tfd_notebook.data.service import graph_inspection

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

Range = tf.data.Dataset.range


@pytest.fixture(scope="module")
def cluster() -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=1, name="doctor") as cluster:
        yield cluster


def codes(dataset: Any) -> set[str]:
    return set(tfd.doctor(dataset).codes)


def large(dataset: Any) -> Any:
    """Return a dataset whose elements are large enough to be sent."""
    return dataset.map(lambda x: tf.zeros([10_000], tf.int64) + x)


def test_dynamic_sharding_of_single_elements_is_found(cluster: tfd.Cluster) -> None:
    fine = large(Range(2_000))
    assert codes(fine.apply(cluster.distribute("dynamic"))) == {"TFD821"}
    assert codes(fine.apply(cluster.distribute("off"))) == set()
    coarse = large(Range(2).flat_map(lambda i: Range(1_000)))
    assert codes(coarse.apply(cluster.distribute("dynamic"))) == set()
    files = tf.data.TFRecordDataset([f"/there/{i}" for i in range(2_000)])
    assert codes(files.apply(cluster.distribute("dynamic"))) == set()


def test_data_in_the_graph_is_found(cluster: tfd.Cluster) -> None:
    rows = np.zeros((60, 125_001), np.int64)
    with pytest.warns(UserWarning, match="60 MB"):
        held = tf.data.Dataset.from_tensor_slices(rows).apply(cluster.distribute("off"))
    assert codes(held) == {"TFD822"}
    computed = Range(60).map(lambda i: tf.zeros([125_001], tf.int64))
    assert codes(computed.apply(cluster.distribute("off"))) == set()


def test_dataset_whose_table_was_deleted_is_found(cluster: tfd.Cluster) -> None:
    keys = tf.constant([1, 2])
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, keys), 0)
    handle = table.resource_handle
    dataset = Range(3).map(lambda x: table.lookup(tf.cast(x, tf.int32)))
    tf.raw_ops.DestroyResourceOp(resource=handle)
    (finding,) = tfd.doctor(dataset)
    assert finding.code == "TFD830"
    assert "was deleted" in finding.what
    assert finding.fix == "create the resource and the dataset again"
    for iterate in (cluster.observe, cluster.stream):
        with pytest.raises(errors.PipelineError, match=r"deleted[^\n]*\nNext: create the resource"):
            list(iterate(dataset))


def test_memory_transfer_from_another_process_is_found(cluster: tfd.Cluster) -> None:
    def by_tensorflow(target: str, protocol: str | None) -> Any:
        return large(Range(3)).apply(
            service.distribute("parallel_epochs", target, data_transfer_protocol=protocol)
        )

    remote = by_tensorflow(data_service.of(cluster).service_target, "local").prefetch(1)
    assert codes(remote) == {"TFD816"}
    for method in (cluster.observe, cluster.stream):
        with pytest.raises(tfd.errors.NoWorkers, match='data_transfer_protocol="local"'):
            method(remote)
    repaired = by_tensorflow(data_service.of(cluster).service_target, None)
    assert codes(repaired) == set()
    assert len(read(cluster.observe(repaired))) == 3
    with tfd.Cluster(data_workers=1, name="inside", launcher="inprocess") as inside:
        in_memory = by_tensorflow(data_service.of(inside).service_target, "local")
        assert codes(in_memory) == set()
        assert len(read(inside.observe(in_memory))) == 3


def test_proxy_set_after_the_start_is_found(
    cluster: tfd.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_grpc_proxy", "")
    monkeypatch.setenv("http_proxy", "http://localhost:1")
    (finding,) = (item for item in tfd.doctor(cluster) if item.code == "TFD841")
    assert "http_proxy was set after the start" in finding.what
    with pytest.warns(UserWarning, match="http_proxy is set"):
        dataset = Range(3).apply(cluster.distribute("off"))
    assert "TFD841" not in tfd.doctor(cluster).codes
    assert read(dataset) == [0, 1, 2]
    monkeypatch.setenv("no_grpc_proxy", "")
    monkeypatch.delenv("http_proxy")
    assert "TFD841" not in tfd.doctor(cluster).codes
    assert read(Range(3).apply(cluster.distribute("off"))) == [0, 1, 2]


def test_too_large_data_is_found_without_serializing_it(
    cluster: tfd.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes of the tensors are added, as TensorFlow serializes gigabytes for minutes."""
    serialized: list[Any] = []
    serialize = graph.serialized

    def count(dataset: Any) -> bytes:
        serialized.append(dataset)
        return serialize(dataset)

    monkeypatch.setattr(graph, "serialized", count)
    monkeypatch.setattr(graph_inspection, "LARGEST", 5_000_000)
    rows = np.zeros((10, 100_000), np.int64)
    captured = tf.constant(rows)
    for dataset in (
        tf.data.Dataset.from_tensor_slices(rows).batch(2),
        Range(10).map(lambda i: captured[i]),
        Range(10).map(lambda i: tf.constant(rows)[i]).prefetch(1),
    ):
        assert codes(dataset) == {"TFD822"}
        with pytest.raises(tfd.errors.NotSerializable, match="contains the data"):
            dataset.apply(cluster.distribute("off"))
    assert not serialized
    computed = Range(10).map(lambda i: tf.zeros([100_000], tf.int64))
    assert codes(computed) == set()
    assert codes(computed.apply(cluster.distribute("off"))) == set()
    assert serialized


def test_strings_and_nested_functions_count_as_data(
    cluster: tfd.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes of encoded images and of tensors in inner functions are added without the graph."""
    monkeypatch.setattr(graph_inspection, "LARGEST", 5_000_000)
    images = [bytes(1_000_000)] * 6
    captured = tf.constant(images)
    rows = np.zeros((10, 100_000), np.int64)
    inner = tf.function(lambda i: tf.constant(rows)[i])
    for dataset in (
        tf.data.Dataset.from_tensor_slices(images).batch(2),
        Range(6).map(lambda i: captured[i]),
        Range(6).map(lambda i: tf.constant(images)[i]),
        Range(10).map(lambda i: inner(i)),
        Range(2).flat_map(lambda i: Range(10).map(lambda j: tf.constant(rows)[j])),
        Range(10).map(lambda i: tf.cond(i > 4, lambda: tf.constant(rows)[i], lambda: inner(i))),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(graph, "serialized", None)  # is not called
            assert codes(dataset) == {"TFD822"}
            with pytest.raises(tfd.errors.NotSerializable, match="contains the data"):
                dataset.apply(cluster.distribute("off"))
    few = tf.constant(images[:4])
    for small in (
        tf.data.Dataset.from_tensor_slices(few),
        Range(4).map(lambda i: few[i]),
        Range(2).flat_map(lambda i: Range(5).map(lambda j: tf.constant(rows[:5])[j])),
    ):
        assert codes(small) == set()


def test_infinite_datasets_are_found(cluster: tfd.Cluster) -> None:
    assert codes(Range(3).repeat()) == {"TFD823"}
    assert codes(Range(3).repeat(2)) == set()
    read = large(Range(3)).repeat().apply(cluster.distribute("off"))
    assert codes(read) == {"TFD823"}
    assert codes(read.take(10)) == set()
    coordinated = cluster.distribute("off", job_name="turns", consumer_index=0, num_consumers=1)
    assert codes(large(Range(3)).repeat().apply(coordinated)) == set()


def test_suggested_code_has_the_name_of_the_variable(
    cluster: tfd.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fixes(dataset: Any) -> list[str]:
        return [finding.fix for finding in tfd.doctor(dataset)]

    main = sys.modules["__main__"]
    numbers = Range(3)
    read, endless = numbers.apply(cluster.distribute("off")), Range(3).repeat()
    assert fixes(read) == ["call batch() before distribute"]
    assert fixes(endless)[0].startswith("use take(n), ")
    monkeypatch.setattr(main, "numbers", numbers, raising=False)
    monkeypatch.setattr(main, "endless", endless, raising=False)
    assert fixes(read) == ["call batch() before distribute: numbers.batch(64)"]
    assert fixes(endless)[0].startswith("use endless.take(n), ")


def test_compression_within_one_host_is_found(cluster: tfd.Cluster) -> None:
    numbers = large(Range(3))
    assert codes(numbers.apply(cluster.distribute("off", compression="snappy"))) == {"TFD824"}
    assert codes(numbers.apply(cluster.distribute("off", compression=None))) == set()


def test_small_elements_are_found(cluster: tfd.Cluster) -> None:
    assert codes(Range(3).apply(cluster.distribute("off"))) == {"TFD825"}
    assert codes(Range(3).batch(3, drop_remainder=True).apply(cluster.distribute("off"))) == {
        "TFD825"
    }
    assert codes(large(Range(3)).apply(cluster.distribute("off"))) == set()
    assert codes(Range(3)) == set()


def test_epoch_that_repeats_elements_is_found() -> None:
    with tfd.Cluster(data_workers=2, name="twice") as cluster:

        def read(mode: str, dataset: Any = None) -> Any:
            return (large(Range(3)) if dataset is None else dataset).apply(cluster.distribute(mode))

        (finding,) = tfd.doctor(read("off"))
        assert (finding.code, finding.severity) == ("TFD826", "warning")
        assert "each element 2 times" in finding.what
        assert 'distribute("dynamic")' in finding.fix
        with pytest.warns(UserWarning, match="works like"):
            assert codes(read("hint")) == {"TFD826"}
        assert codes(read("dynamic")) == codes(read("data")) == set()
        assert codes(read("off", large(Range(3)).repeat())) == {"TFD823"}
        cluster.scale(data_workers=1)
        assert codes(read("off")) == set()


def test_static_mode_without_worker_addresses_is_found(cluster: tfd.Cluster) -> None:
    def read(policy: Any) -> Any:
        return Range(3).apply(service.distribute(policy, cluster.dispatcher.target))

    assert codes(read(service.ShardingPolicy.FILE)) == {"TFD815"}
    assert codes(read(service.ShardingPolicy.DYNAMIC)) == set()
    assert codes(large(Range(3)).apply(cluster.distribute("data"))) == set()


def test_names_of_finished_jobs_are_found(cluster: tfd.Cluster) -> None:
    first, second = (
        large(Range(3)).apply(cluster.distribute("dynamic", job_name="once")) for _ in range(2)
    )
    assert codes(first) == codes(second) == set()
    assert len(list(first)) == 3
    (finding,) = tfd.doctor(second)
    assert finding.code == "TFD814"
    assert "once-2" in finding.fix
    with pytest.warns(UserWarning, match="has delivered this epoch to other readers"):
        assert list(second) == []
    assert codes(second) == {"TFD814"}
    key = cluster.register(large(Range(3)))
    first, second = (cluster.from_dataset_id("dynamic", key, job_name="twice") for _ in range(2))
    assert codes(second) == set()
    assert len(list(first)) == 3
    assert codes(second) == {"TFD814"}


def test_job_finished_by_its_only_reader_is_healthy(cluster: tfd.Cluster) -> None:
    numbers = large(Range(3)).apply(cluster.distribute("dynamic", job_name="epochs"))
    for _ in range(2):  # a second loop starts another pass of the job
        assert len(list(numbers)) == 3
        assert codes(numbers) == set()


def test_relative_paths_are_found(
    cluster: tfd.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tf.io.TFRecordWriter(str(tmp_path / "images.tfrecord")) as file:
        file.write(b"one")
    monkeypatch.chdir(tmp_path)
    by_name = tf.data.TFRecordDataset(["images.tfrecord"]).apply(cluster.distribute("off"))
    (finding,) = tfd.doctor(by_name)
    assert (finding.code, finding.severity) == ("TFD831", "error")
    with pytest.raises(tfd.errors.PipelineError, match=r"images\.tfrecord"):
        list(by_name)
    whole = tf.data.TFRecordDataset([str(tmp_path / "images.tfrecord")])
    whole = whole.apply(cluster.distribute("off"))
    assert codes(whole) == set()
    assert [x.numpy() for x in whole] == [b"one"]


@pytest.mark.slow  # needs gcc
def test_missing_op_libraries_are_found(cluster: tfd.Cluster, tmp_path: Path) -> None:
    path = os.fspath(_oplibrary.build(tmp_path))
    library = tf.load_op_library(path)
    zeros = Range(2).map(lambda i: library.tfd_test_zeros())
    with tfd.Cluster(data_workers=1, name="other-module", preload=["colorsys"]) as unprepared:
        assert codes(zeros.apply(unprepared.distribute("off"))) == {"TFD834"}
    lacking = zeros.apply(cluster.distribute("off"))
    (finding,) = tfd.doctor(lacking)
    assert (finding.code, finding.severity) == ("TFD834", "error")
    assert "TfdTestZeros" in finding.what
    with pytest.raises(tfd.errors.TfdError, match="TfdTestZeros"):
        list(lacking)
    with tfd.Cluster(data_workers=1, name="with-library", preload=[path]) as prepared:
        known = zeros.apply(prepared.distribute("off"))
        assert codes(known) == set()
        assert len(list(known)) == 2


def test_findings_of_a_cluster_include_its_datasets(cluster: tfd.Cluster) -> None:
    small = Range(3).apply(cluster.distribute("off"))
    assert "TFD825" in tfd.doctor(cluster).codes
    assert tfd.doctor("doctor").codes == tfd.doctor(cluster).codes
    del small
    assert "TFD825" not in tfd.doctor(cluster).codes
