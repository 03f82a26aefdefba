"""The registry of consumers: names, rates, histories and end."""

import threading
import time

import pytest

from tests._calls import count_calls
from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook._compat.tf_data.meter import IteratorMetrics, MetricTotals
from tfd_notebook.data.consume import sampler
from tfd_notebook.data.consume.consumers import Consumers, DatasetConsumer, Series
from tfd_notebook.model.events import ConsumerMeasured
from tfd_notebook.model.limit import Limit


def started(name, consumers):
    source, meter = DatasetConsumer(), IteratorMetrics()
    source.add(meter)
    return source, meter, consumers.add(source, name)


def finish(meter, source, consumers):
    """End the iteration as an observed iterator does."""
    meter.finish()
    consumers.measure(source)


@pytest.fixture
def no_sampler(monkeypatch):
    monkeypatch.setattr(sampler, "watch", lambda registry: None)


def test_running_consumers_have_unique_names():
    consumers = Consumers()
    source, first, name = started("train", consumers)
    assert name == "train"
    assert started("train", consumers)[2] == "train-2"
    finish(first, source, consumers)
    assert started("train", consumers)[2] == "train"
    assert [row.name for row in consumers.rows()] == ["train-2", "train"]
    consumers.cancel_all(errors.Interrupted("stopped"))


def test_paused_consumer_has_no_bottleneck():
    class Paused(DatasetConsumer):
        state = "paused"

    consumers, paused = Consumers(), Paused()
    paused.live.limit = Limit("workers", advice="cluster.scale(data_workers=3)")
    consumers.measure(paused)
    assert paused.live.limit.advice == ""


def test_epochs_share_one_row():
    consumers = Consumers()
    source, meter, _ = started("train", consumers)
    meter.elements, meter.bytes = 10, 80
    finish(meter, source, consumers)
    assert consumers.rows()[0].state == "finished"
    again = IteratorMetrics()
    source.add(again)
    assert consumers.add(source, "train") == "train"
    again.elements = 5
    consumers.measure(source)
    (row,) = consumers.rows()
    assert (row.state, row.elements, row.bytes) == ("running", 15, 80)
    again.end()


def test_last_20_ended_consumers_are_kept():
    consumers = Consumers()
    for number in range(30):
        started(f"n{number}", consumers)[1].finish()
    _, running, _ = started("running", consumers)
    names = [row.name for row in consumers.rows()]
    assert names == [*(f"n{number}" for number in range(10, 30)), "running"]
    running.end()


def test_cancelled_consumer_reports_how_it_ended():
    consumers = Consumers()
    ended = []
    _, meter, _ = started("train", consumers)
    meter.blocked[1] = (time.perf_counter() - 2, lambda: ended.append(1), False)
    assert consumers.stuck(1.0) == ("train",)
    assert consumers.stuck(10.0) == ()
    consumers.cancel_all(errors.DataLoss("half of it is gone"))
    assert ended == [1]
    (row,) = consumers.rows()
    assert row.state == "failed"
    assert "half of it is gone" in row.error
    _, second, _ = started("other", consumers)
    consumers.cancel_all(errors.Interrupted("stopped"))
    assert second.error is not None
    assert consumers.rows()[1].state == "stopped"
    assert "half" in meter.error.what


def test_function_waits_only_for_an_empty_buffer():
    class Clock:
        buffered = True

        totals = MetricTotals()

        def sample(self):
            self.totals = MetricTotals(3, 24, 0.5)

        def starved(self):
            return not self.buffered

        def close(self):
            closed.append(True)

    closed = []
    meter = IteratorMetrics()
    meter.clock = clock = Clock()
    meter.blocked[1] = (time.perf_counter(), lambda: None, True)
    assert meter.read() == MetricTotals()
    assert meter.sample() == meter.read() == MetricTotals(3, 24, 0.5)
    assert meter.waiting_since() is None
    clock.buffered = False
    assert meter.waiting_since() is not None
    assert meter.read().waited > 0.5
    meter.blocked.clear()
    meter.end()
    assert meter.sample() == meter.sample() == meter.read() == MetricTotals(3, 24, 0.5)
    assert closed == [True]


class Clock:
    """A clock whose `sleep` advances it, and finishes an iteration at a given time."""

    def __init__(self, meter, end):
        self.now, self.meter, self.end = 0.0, meter, end

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        if self.now >= self.end:
            self.meter.finish()


def test_wait_returns_when_consumers_are_idle(monkeypatch):
    consumers = Consumers()
    assert consumers.idle()
    _, meter, _ = started("train", consumers)
    assert not consumers.idle()
    clock = Clock(meter, end=70.0)
    monkeypatch.setattr("tfd_notebook.data.consume.consumers.time", clock)
    with pytest.raises(errors.TimeLimit, match="train"):
        consumers.wait_idle(timeout=60)
    assert clock.now == pytest.approx(60, abs=1)
    consumers.wait_idle(timeout=60)
    assert clock.now == pytest.approx(70, abs=1)
    consumers.wait_idle(timeout=0)


def sample(series, seconds, elements, waited=0.0):
    series.add(ConsumerMeasured("train", "running", seconds, elements, elements * 8, waited))


def test_rates_cover_the_last_seconds():
    series = Series()
    for step in range(1, 11):
        elements = 100 * min(step, 5) + 10 * max(0, step - 5)
        sample(series, step, elements, 0.5 * step)
    elements, size, waiting = series.rates
    assert elements == pytest.approx(10)
    assert size == pytest.approx(80)
    assert waiting == pytest.approx(0.5)
    assert [round(rate) for rate in series.recent] == [100] * 5 + [10] * 4
    history = series.history()
    assert [second.second for second in history] == list(range(1, 10))
    assert [round(second.elements_per_s) for second in history] == [100] * 5 + [10] * 4
    assert history[-1].elements == 540


def test_first_rate_needs_no_second_sample():
    series = Series()
    assert series.rates == (0.0, 0.0, 0.0)
    sample(series, 0.5, 50, 0.1)
    assert series.rates == (100.0, 800.0, 0.2)


def test_a_gap_between_samples_is_spread_over_its_seconds():
    series = Series()
    sample(series, 100.5, 1005)
    assert len(series.recent) == 60
    assert {round(rate) for rate in series.recent} == {10}
    assert series.history()[-1].second == 100


def test_many_short_epochs_do_not_shorten_the_history():
    series = Series()
    for step in range(1, 1000):
        sample(series, step / 20, step)
    assert len(series.recent) == pytest.approx(50, abs=5)
    assert {round(rate) for rate in series.recent} == {20}


@pytest.mark.slow
def test_consumer_is_sampled_once_a_second_and_at_its_end():
    consumers, events = Consumers(), []
    consumers.connect(lambda event: (events.append(event), consumers.apply(event)), lambda: ())
    source, meter, _ = started("train", consumers)
    meter.elements = 10
    until(lambda: len(events) >= 3)
    meter.elements = 20
    meter.finish()
    until(lambda: events[-1].elements == 20)
    assert [event.consumer for event in events] == ["train"] * len(events)
    assert events[-1].state == consumers.rows()[0].state == "finished"
    assert events[-1].seconds == pytest.approx(meter.ended - source.series.start)
    until(lambda: all(thread.name != "tfd-sampler" for thread in threading.enumerate()))


@pytest.mark.usefixtures("no_sampler")
def test_rows_change_only_with_an_event():
    consumers = Consumers()
    source, meter, _ = started("train", consumers)
    before = consumers.rows()
    assert [(row.state, row.elements) for row in before] == [("running", 0)]
    meter.elements = 10
    meter.finish()
    assert consumers.rows() == before
    seconds = time.perf_counter() - source.series.start
    consumers.apply(ConsumerMeasured("train", "finished", seconds, 10, 80, 0.0))
    rows = consumers.rows()
    assert [(row.state, row.elements, row.bytes) for row in rows] == [("finished", 10, 80)]
    assert rows[0].elements_per_s == pytest.approx(10 / seconds)
    assert consumers.rows() == rows


@pytest.mark.usefixtures("no_sampler")
def test_queries_change_nothing():
    class Clock:
        totals = MetricTotals()

    consumers = Consumers()
    source, meter, _ = started("train", consumers)
    meter.clock = Clock()  # it cannot be sampled
    before = dict(vars(source.series))
    meter.elements = 10
    for _ in range(2):
        assert consumers.rows()[0].elements == 0
        assert consumers.latest() is source
        assert consumers.stuck(0.0) == ()
        assert not consumers.idle()
    assert vars(source.series) == before


def test_reading_rows_is_cheap():
    consumers = Consumers()
    for number in range(10):
        started(f"n{number}", consumers)
    consumers.rows()
    assert count_calls(consumers.rows) < 1_000  # 0.1 ms
    consumers.cancel_all(errors.Interrupted("stopped"))
