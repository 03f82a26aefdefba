"""TensorFlow's consumers and the error server of a failed task."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tfd_notebook.agent.error_server import ErrorServer
from tfd_notebook.net.ports import reserve_port
from tfd_notebook.net.probe import dispatcher_workers

pytestmark = pytest.mark.integration
TEXT = "[TFD302] data_worker:0 is gone\nNext: restart it"
#: The longest pause of TensorFlow's client between two attempts shortly after a task died.
SOON = 5.0


class Service:
    """A dispatcher and workers that can be killed."""

    def __init__(self, tasks: Any, work_dir: Path, workers: int) -> None:
        self._held = [reserve_port() for _ in range(workers + 1)]
        self.dispatcher, *self.workers = (sock.getsockname()[1] for sock in self._held)
        self._pids = {self.dispatcher: tasks.dispatcher(self.dispatcher, str(work_dir))}
        for port in self.workers:
            self._pids[port] = tasks.worker(port, self.dispatcher)
        self.target = f"localhost:{self.dispatcher}"
        assert len(dispatcher_workers(self.target)) == workers

    def dataset(self, mode: str, elements: int) -> Any:
        import tensorflow as tf

        # The end of a bare iterator may wait a minute for the autotuning thread.
        options = tf.data.Options()
        options.autotune.enabled = False
        dataset = tf.data.Dataset.range(elements).batch(10)
        distribute = tf.data.experimental.service.distribute(mode, f"grpc://{self.target}")
        return dataset.apply(distribute).with_options(options)

    def kill(self, port: int) -> None:
        os.kill(self._pids.pop(port), signal.SIGKILL)

    def close(self) -> None:
        for port in list(self._pids):
            self.kill(port)
        for sock in self._held:
            sock.close()


@pytest.fixture
def service(tasks: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Service]:
    service = Service(tasks, tmp_path, getattr(request, "param", 2))
    yield service
    service.close()


class Consumer(threading.Thread):
    """A plain loop over a dataset, with its elements and its error."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(daemon=True)
        self.dataset = dataset
        self.elements: list[int] = []
        self.error: Exception | None = None
        self.some = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            for batch in self.dataset:
                self.elements.extend(batch.numpy())
                if len(self.elements) >= 200:
                    self.some.set()
        except Exception as error:
            self.error = error

    def ended(self, limit: float) -> bool:
        self.join(limit)
        return not self.is_alive()


@pytest.mark.parametrize("mode", ["parallel_epochs", "distributed_epoch"])
@pytest.mark.parametrize(
    ("service", "victim"),
    [(2, "worker"), (1, "worker"), (2, "dispatcher")],
    ids=["one of two workers", "the only worker", "the dispatcher"],
    indirect=["service"],
)
def test_blocked_consumer_gets_the_error_text(service: Service, victim: str, mode: str) -> None:
    import tensorflow as tf

    consumer = Consumer(service.dataset(mode, 10_000_000))
    assert consumer.some.wait(60)
    port = service.dispatcher if victim == "dispatcher" else service.workers[0]
    service.kill(port)
    assert not consumer.ended(0.5)  # without an error server, the wait has no end
    with ErrorServer(port, TEXT):
        assert consumer.ended(SOON)
    assert isinstance(consumer.error, tf.errors.DataLossError)
    assert TEXT in str(consumer.error)


@pytest.mark.parametrize("mode", ["parallel_epochs", "distributed_epoch"])
def test_later_epochs_are_complete(service: Service, mode: str) -> None:
    service.kill(service.workers[0])
    with ErrorServer(service.workers[0], TEXT, dispatcher=service.target):
        for _ in range(2):
            consumer = Consumer(service.dataset(mode, 300))
            assert consumer.ended(SOON)
            assert consumer.error is None
            assert sorted(consumer.elements) == list(range(300))


def test_later_epochs_wait_without_the_heartbeat_replies(service: Service) -> None:
    """The reason for the error server: a dispatcher assigns work to lost workers."""
    service.kill(service.workers[0])
    consumer = Consumer(service.dataset("parallel_epochs", 300))
    assert consumer.some.wait(60)
    assert not consumer.ended(3)
    assert sorted(consumer.elements) == list(range(300))
    with ErrorServer(service.workers[0], TEXT):  # ends the thread
        assert consumer.ended(SOON)


@pytest.mark.parametrize("mode", ["parallel_epochs", "distributed_epoch"])
def test_on_loss_warn_ends_with_the_remaining_elements(service: Service, mode: str) -> None:
    consumer = Consumer(service.dataset(mode, 10_000))
    assert consumer.some.wait(60)
    service.kill(service.workers[0])
    server = ErrorServer(service.workers[0], TEXT, dispatcher=service.target, on_loss="warn")
    with server:
        assert consumer.ended(30)
    assert consumer.error is None
    if mode == "parallel_epochs":
        assert set(consumer.elements) == set(range(10_000))
