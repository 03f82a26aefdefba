"""The registry of consumers: names, rates, histories and end."""

import time

import pytest

from tfd_notebook import errors
from tfd_notebook._compat.tf_data.meter import IteratorMetrics, MetricTotals
from tfd_notebook.data.consume.consumers import Consumers, DatasetConsumer, Series


def started(name, consumers):
    source, meter = DatasetConsumer(), IteratorMetrics()
    source.add(meter)
    return source, meter, consumers.add(source, name)


def test_running_consumers_have_unique_names():
    consumers = Consumers()
    _, first, name = started("train", consumers)
    assert name == "train"
    assert started("train", consumers)[2] == "train-2"
    first.finish()
    assert started("train", consumers)[2] == "train"
    assert [row.name for row in consumers.rows()] == ["train-2", "train"]


def test_epochs_share_one_row():
    consumers = Consumers()
    source, meter, _ = started("train", consumers)
    meter.elements, meter.bytes = 10, 80
    meter.finish()
    assert consumers.rows()[0].state == "finished"
    again = IteratorMetrics()
    source.add(again)
    assert consumers.add(source, "train") == "train"
    again.elements = 5
    (row,) = consumers.rows()
    assert (row.state, row.elements, row.bytes) == ("running", 15, 80)


def test_last_20_ended_consumers_are_kept():
    consumers = Consumers()
    for number in range(30):
        started(f"n{number}", consumers)[1].finish()
    _, running, _ = started("living", consumers)
    names = [row.name for row in consumers.rows()]
    assert names == [*(f"n{number}" for number in range(10, 30)), "living"]
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

        def read(self):
            return MetricTotals(3, 24, 0.5)

        def starved(self):
            return not self.buffered

        def close(self):
            closed.append(True)

    closed = []
    meter = IteratorMetrics()
    meter.clock = clock = Clock()
    meter.blocked[1] = (time.perf_counter(), lambda: None, True)
    assert meter.read() == MetricTotals(3, 24, 0.5)
    assert meter.waiting_since() is None
    clock.buffered = False
    assert meter.waiting_since() is not None
    assert meter.read().waited > 0.5
    meter.blocked.clear()
    meter.end()
    assert meter.read() == meter.read() == MetricTotals(3, 24, 0.5)
    assert closed == [True]


def test_wait_returns_when_consumers_are_idle():
    consumers = Consumers()
    assert consumers.idle()
    _, meter, _ = started("train", consumers)
    assert not consumers.idle()
    with pytest.raises(errors.TimeLimit, match="train"):
        consumers.wait_idle(timeout=0.2)
    meter.finish()
    consumers.wait_idle(timeout=1)


def test_rates_cover_the_last_seconds():
    series = Series()
    start = time.perf_counter()
    for step in range(1, 101):
        elements = 10 * min(step, 50) + max(0, step - 50)
        series.add(MetricTotals(elements, elements * 8, 0.05 * step), start + step / 10)
    elements, size, waiting = series.rates()
    assert elements == pytest.approx(
        10, rel=0.2
    )  # one or two readings are at the edge of the window
    assert size == pytest.approx(80, rel=0.2)
    assert waiting == pytest.approx(0.5, rel=0.05)
    history = series.history()
    assert [second.second for second in history] == list(range(1, 11))
    assert [round(second.elements_per_s) for second in history] == [100] * 5 + [10] * 5
    assert history[-1].elements == pytest.approx(550, abs=2)


def test_a_gap_between_readings_is_spread_over_its_seconds():
    series = Series(keep=60)
    now = time.perf_counter()
    series.add(MetricTotals(1000, 0, 0.0), now + 100)
    history = series.history()
    assert len(history) == 60
    assert {round(second.elements_per_s) for second in history} == {10}
    assert history[-1].second == 100


def test_reading_rows_is_cheap():
    consumers = Consumers()
    for number in range(10):
        started(f"n{number}", consumers)
    start = time.perf_counter()
    for _ in range(100):
        consumers.rows()
    assert (time.perf_counter() - start) / 100 < 0.005
