"""Rates by second."""

from __future__ import annotations

from tfd_notebook.model.rate_history import RateHistory

NOW = 1_000_000


def test_seconds_without_a_measurement_have_no_rate() -> None:
    history = RateHistory()
    history.add("a", NOW + 0.2, 1)
    history.add("a", NOW + 5.9, 6)
    assert history.since(NOW - 1, NOW + 7) == {"a": [None, 1, None, None, None, None, 6, None]}


def test_irregular_measurements_leave_no_gap() -> None:
    history = RateHistory()
    for at, rate in ((0.95, 1), (2.02, 2), (2.98, 3), (4.0, 4)):
        history.add("a", NOW + at, rate)
    assert history.since(NOW, NOW + 5) == {"a": [1, 2, 3, 4, 4]}


def test_old_rates_are_discarded() -> None:
    history = RateHistory(seconds=10)
    for second in range(30):
        history.add("a", NOW + second, second)
    history.add("b", NOW + 30, 5)
    assert history.since(0, NOW + 30)["a"] == [*range(20, 30)]
    assert history.since(NOW + 28, NOW + 30) == {"a": [28, 29], "b": [None, None]}
    assert [*history.since(0, NOW + 41)] == ["b"]


def test_clock_that_is_set_back_keeps_earlier_rates() -> None:
    history = RateHistory()
    for second in (0, 1, 2, 3, 1):
        history.add("a", NOW + second, second + 10)
    assert history.since(NOW, NOW + 4) == {"a": [10, 11, None, None]}
    history.add("a", NOW - 100, 5)
    history.add("a", NOW - 99, 6)
    assert history.since(NOW - 100, NOW - 98) == {"a": [5, 6]}


def test_reply_about_many_series_is_short() -> None:
    history = RateHistory()
    for task in range(1_000):
        history.add(str(task), NOW, 1)
        history.add(str(task), NOW + 300, 1)
    assert {len(rates) for rates in history.since(0, NOW + 301).values()} == {60}
