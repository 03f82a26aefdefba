"""Adaptive data workers of a real cluster: decisions, their display, and their end."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook import views
from tfd_notebook.cluster import commands
from tfd_notebook.model.events import WorkersAdapted
from tfd_notebook.model.spec import Role

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SECONDS = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=1, name="adaptive") as cluster:
        yield cluster


def slow(numbers: Any) -> Any:
    """Return a dataset whose elements take a data worker 50 ms, without computing."""

    def wait(number: Any) -> Any:
        import time

        time.sleep(0.05)
        return number

    return numbers.map(lambda n: tf.ensure_shape(tf.numpy_function(wait, [n], tf.int64), ()))


def data_workers(cluster: tfd.Cluster) -> int:
    return sum(task.role is Role.DATA_WORKER for task in cluster.tasks)


def decisions(cluster: tfd.Cluster) -> list[WorkersAdapted]:
    return [event for event in cluster.snapshot().events if isinstance(event, WorkersAdapted)]


def adaptation_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tfd-adapt-")]


def test_number_follows_the_demand_of_a_stream(cluster: tfd.Cluster) -> None:
    dataset = slow(tf.data.Dataset.range(1000).repeat()).apply(cluster.distribute("dynamic"))
    with cluster.stream(dataset, name="train") as stream:
        cluster.adapt(1, 3)
        until(lambda: cluster.snapshot().observed[Role.DATA_WORKER] == 3, SECONDS)
        first = decisions(cluster)[0]
        assert first.before == 1
        assert re.fullmatch(r"'train' waits \d+ % of the time", first.reason)
        shown = cluster.snapshot()
        assert shown.adaptation is not None
        assert (shown.adaptation.minimum, shown.adaptation.maximum) == (1, 3)
        for view in (views.text(shown), views.html(shown)):
            assert "adapts 1 to 3 data workers" in view
            assert re.search(r"adapted to 3 data workers .*ago: .*train.* waits", view)
        assert any(re.search(r"1 → \d data workers: ", n.what) for n in shown.notices)

        # A data worker that is lost is replaced by its agent. The number stays in its range.
        killed = cluster.kill("data_worker:1")
        until(
            lambda: (
                (row := cluster.snapshot().task("data_worker:1")) is not None
                and row.state == "ready"
                and row.pid not in (None, killed)
            ),
            SECONDS,
        )
        assert data_workers(cluster) == 3

        stream.pause()
        until(lambda: data_workers(cluster) == 1, SECONDS)
        assert "no consumer has read" in decisions(cluster)[-1].reason
        stream.resume()
        until(lambda: data_workers(cluster) > 1, SECONDS)

        cluster.scale(data_workers=2)
        assert cluster.snapshot().adaptation is None
        assert any("scale has set it" in notice.what for notice in cluster.snapshot().notices)
        until(lambda: not adaptation_threads())
        assert data_workers(cluster) == 2
        assert cluster.snapshot().observed[Role.DATA_WORKER] == 2


def test_epoch_is_complete_if_fewer_data_workers_are_enough(cluster: tfd.Cluster) -> None:
    cluster.scale(data_workers=3)
    before = len(decisions(cluster))
    dataset = slow(tf.data.Dataset.range(240)).apply(cluster.distribute("dynamic"))
    pause = threading.Event()

    def read() -> list[int]:
        cluster.adapt(1, 3)
        elements = []
        for element in dataset:
            elements.append(int(element))
            pause.wait(0.05)
        return elements

    assert sorted(read()) == list(range(240))
    assert len(decisions(cluster)) == before
    cluster.adapt(None)
    assert data_workers(cluster) == 3


def test_starting_data_workers_get_functions_of_new_datasets(cluster: tfd.Cluster) -> None:
    cluster.scale(data_workers=1)
    cluster.adapt(3, 3)
    until(lambda: data_workers(cluster) == 3, SECONDS)
    # The new data workers are starting while this dataset is distributed.
    for _ in range(3):
        dataset = slow(tf.data.Dataset.range(60)).apply(cluster.distribute("dynamic"))
    until(lambda: cluster.snapshot().observed[Role.DATA_WORKER] == 3, SECONDS)
    assert sorted(int(element) for element in dataset) == list(range(60))
    cluster.adapt(None)


def test_range_is_changed_and_ended_by_requests(cluster: tfd.Cluster) -> None:
    request: Callable[..., Any] = lambda **fields: commands.perform(  # noqa: E731
        {"command": "adapt", "name": "adaptive", **fields}
    )
    assert request(minimum=1, maximum=2) is True
    until(lambda: data_workers(cluster) == 2, SECONDS)
    assert "the maximum is 2" in decisions(cluster)[-1].reason
    assert request(minimum=3, maximum=3) is True
    until(lambda: cluster.snapshot().observed[Role.DATA_WORKER] == 3, SECONDS)
    assert request() is False
    until(lambda: not adaptation_threads())


def test_stop_ends_the_adaptation() -> None:
    with tfd.Cluster(data_workers=1, name="stopped") as stopped:
        stopped.adapt(2, 4)
        until(lambda: decisions(stopped), SECONDS)
    assert stopped.state == "stopped"
    assert stopped.snapshot().adaptation is None
    assert not adaptation_threads()
