"""A ``work_dir`` on one of TensorFlow's file systems."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.data.experimental import service

import tfd_notebook as tfd
from tests._reading import Reader, read
from tests._waiting import until
from tfd_notebook.cluster import data_service
from tfd_notebook.data.service.journal import JOURNAL_DIR, Journal
from tfd_notebook.errors import WorkDirError

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, in which a misread URL would create a directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_in_process_cluster_keeps_its_journal_in_memory(directory: Path) -> None:
    settings = tfd.Service(work_dir="ram://journals")
    with tfd.Cluster(data_workers=1, launcher="inprocess", service=settings) as cluster:
        numbers = tf.data.Dataset.range(10).batch(1)
        dataset = numbers.apply(cluster.distribute("dynamic", job_name="first"))
        assert sorted(read(dataset)) == [[number] for number in range(10)]
        assert [row["job"] for row in cluster.jobs().records()] == ["first"]
        until(lambda: cluster.snapshot().journal_bytes)
        cluster.restart("dispatcher:0")
        assert data_service.of(cluster).journal is not None
        assert [job.name for job in data_service.of(cluster).journal.read().jobs] == ["first"]
        with Reader(numbers.repeat().apply(cluster.distribute("dynamic"))) as reader:
            reader.first(30)
        assert tf.io.gfile.glob(f"ram://journals/*/{JOURNAL_DIR}/journal_*")
    assert not list(directory.iterdir())


def test_memory_file_system_needs_an_in_process_cluster(directory: Path) -> None:
    with pytest.raises(WorkDirError, match=r"ram://journals.* its own process") as caught:
        tfd.Cluster(data_workers=1, name="ram", service=tfd.Service(work_dir="ram://journals"))
    assert 'launcher="inprocess"' in str(caught.value.fix)
    assert not list(directory.iterdir())


@pytest.mark.parametrize("launcher", ["local", "inprocess"])
def test_unknown_file_system_is_named(directory: Path, launcher: str) -> None:
    settings = tfd.Service(work_dir="nope://bucket/journals")
    with pytest.raises(WorkDirError, match=r"nope://bucket/journals.*nope"):
        tfd.Cluster(data_workers=1, launcher=launcher, name="nope", service=settings)
    assert not list(directory.iterdir())


def test_file_url_is_a_local_directory(directory: Path) -> None:
    settings = tfd.Service(work_dir=directory.as_uri())
    with tfd.Cluster(data_workers=1, name="url", service=settings) as cluster:
        dataset = tf.data.Dataset.range(3).apply(cluster.distribute("off", job_name="first"))
        assert read(dataset) == [0, 1, 2]
        assert [row["job"] for row in cluster.jobs().records()] == ["first"]
    assert list(directory.glob(f"url-*/{JOURNAL_DIR}/journal_0"))


def test_dispatcher_keeps_its_journal_in_memory(directory: Path) -> None:
    config = service.DispatcherConfig(work_dir="ram://dispatcher", fault_tolerant_mode=True)
    dispatcher = tfd.Dispatcher(config)
    worker = tfd.DataWorker(service.WorkerConfig(dispatcher.address))
    assert Journal("ram://dispatcher").read().size_bytes  # it has the record of the worker
    worker.stop()
    dispatcher.stop()
    with pytest.raises(WorkDirError, match="nope"):
        tfd.Dispatcher(config._replace(work_dir="nope://bucket"))
    assert not list(directory.iterdir())
