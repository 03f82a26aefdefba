"""The bottleneck of a running consumer, from recorded samples and a fake clock."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tfd_notebook._compat.tf_data.meter import MetricTotals
from tfd_notebook._compat.tf_data.pipeline_model import Model, Node
from tfd_notebook.data.bottleneck import live_limit
from tfd_notebook.data.bottleneck.live_limit import NOTHING, LiveLimit
from tfd_notebook.data.bottleneck.usage import Delivery, ServiceReadOptions, WorkerUtilization
from tfd_notebook.model.limit import Limit

CORES = 4


class Iterator:
    """Stand-in for the iterator of a dataset that reads through a service."""

    def __init__(self, delivery: Delivery | None = None) -> None:
        self.opened = object()
        self.dataset = tf.data.Dataset.range(5)
        delivery = delivery or Delivery(lambda: None, -1, "OFF", None)  # type: ignore[arg-type]
        self.dataset._tfd_service = ServiceReadOptions(delivery)


class Run:
    """A consumer that waits for its data workers, sampled once a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.now, self.elements, self.waited = 100.0, 0, 0.0
        self.batch_seconds = self.waiting = 0.0
        self.waits = True
        clock = SimpleNamespace(perf_counter=lambda: self.now, time=time.time)
        monkeypatch.setattr(live_limit, "time", clock)
        monkeypatch.setattr(live_limit, "model_of", lambda resource: self.model)
        monkeypatch.setattr(live_limit, "processors", lambda: CORES)
        self.live, self.iterator = LiveLimit(), Iterator(**options)
        self.sampler: Any = SimpleNamespace(cpu=0.1, locked=0.0, machine=1.0)
        self.cpu = 0.5

    @property
    def model(self) -> Model:
        """TensorFlow's model of a batch after the service."""
        batch = Node(1, "Batch", False, (2,), self.elements, self.batch_seconds, 1.0, 0)
        return Model({1: batch, 2: Node(2, "DataService", True, (), 0, 0.0, 1.0, 0)}, 1)

    def read(self, *rates: int) -> Limit:
        """Return the bottleneck after seconds with these numbers of elements."""
        workers = [
            WorkerUtilization(f"data_worker:{i}", "ready", self.cpu, 1e3, (1e3,) * 3)
            for i in range(2)
        ]
        for rate in rates:
            self.now += 1.0
            self.waiting = 0.01 if rate else self.waiting + self.waits
            self.elements += rate
            self.waited += 0.95
            self.batch_seconds += 0.25
            totals = MetricTotals(self.elements, 8 * self.elements, self.waited)
            self.live.update(self.iterator, totals, self.sampler, workers, True, self.waiting)
        return self.live.limit


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


SCALE = "cluster.scale(data_workers=3)"


class TestAdviceOfNow:
    def test_advice_ends_when_no_element_arrives(self, run: Run) -> None:
        limit = run.read(*[100] * 7)
        assert (limit.kind, limit.advice) == ("workers", SCALE)
        limit = run.read(*[0] * 5)  # the last window began with elements
        assert (limit.kind, limit.advice, limit.figures["elements_per_s"]) == ("workers", "", 0)
        assert run.read(100, 100).advice == SCALE

    @pytest.mark.parametrize("seconds", [7, 9, 11])  # at the start, middle and end of a window
    def test_advice_ends_in_the_second_in_which_the_workers_block(
        self, run: Run, seconds: int
    ) -> None:
        assert run.read(*[100] * seconds).advice == SCALE
        for _ in range(8):
            limit = run.read(0)
            assert (limit.kind, limit.advice) == ("workers", "")
            assert limit.figures["elements_per_s"] == 0
        assert run.read(100, 100).advice == SCALE

    def test_a_stall_does_not_hide_the_next_one(self, run: Run) -> None:
        run.read(*[100] * 7, *[0] * 30, *[100] * 3)
        assert run.read(0).advice == ""

    @pytest.mark.parametrize(
        "rates",
        [
            [0, 1],  # an element every 2 s
            [1, 0, 1],  # one every 1.5 s
            [0, 0, 0, 1],
            [0, 0, 50],  # a prefetched burst
            [100, 100, 100, 0, 0],  # a pause for each file
        ],
    )
    def test_advice_for_regular_waits_stays(self, run: Run, rates: list[int]) -> None:
        run.read(*rates * 5)
        assert {run.read(rate).advice for rate in rates * 5} == {SCALE}

    def test_consumer_that_does_not_wait_has_no_stall(self, run: Run) -> None:
        run.read(*[100] * 7)
        run.waits = False  # its step takes longer
        assert run.read(0).advice == SCALE

    def test_missing_consumer_is_named_before_the_first_element(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cluster: Any = SimpleNamespace(readers=lambda job_name: ([0], 0), service_on_this_host=True)
        delivery = Delivery(lambda: cluster, -1, "OFF", "rounds", consumer=(0, 2))  # type: ignore[arg-type]
        limit = Run(monkeypatch, delivery=delivery).read(0, 0, 0)
        assert limit.kind == "workers"
        assert limit.advice.startswith("start the missing consumers of job 'rounds'")
        assert limit.advice.endswith("with consumer_index=0, but not with consumer_index=1")

    def test_slow_elements_are_not_a_stall(self, run: Run) -> None:
        advice = set()
        run.read(*[0, 0, 1] * 3)
        for rate in [0, 0, 1] * 5:
            advice.add(run.read(rate).advice)
        assert advice == {SCALE}

    def test_busy_cores_count_only_for_workers_that_compute(self, run: Run) -> None:
        run.sampler.machine = float(CORES)  # by other processes
        assert run.read(*[100] * 7).advice.endswith("all cores are busy")
        run.cpu = 0.03  # they sleep
        assert run.read(*[100] * 6).advice == SCALE

    def test_advice_for_another_dataset_ends(self, run: Run) -> None:
        run.read(*[100] * 7)
        run.iterator = Iterator()
        assert run.read(100) == NOTHING


class TestCostOfTheStagesAfterTheService:
    @pytest.mark.parametrize("seconds", [4, 7])  # in the first window, and in the second one
    def test_it_is_in_the_sentence_of_the_table(self, run: Run, seconds: int) -> None:
        run.iterator.dataset = run.iterator.dataset.batch(4).prefetch(2)
        limit = run.read(*[100] * seconds)
        assert limit.service == "this process runs batch(4) after it, busy 25 % of the time"
        assert limit.sentence().endswith(f"Service: {limit.service}.")

    def test_without_them_there_is_none(self, run: Run) -> None:
        run.iterator.dataset = run.iterator.dataset.prefetch(2)
        assert run.read(*[100] * 7).service == ""

    def test_without_a_model_it_has_no_figure(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(live_limit, "model_of", lambda resource: None)
        run.iterator.dataset = run.iterator.dataset.batch(4)
        assert run.read(*[100] * 7).service == "this process runs batch(4) after it"
