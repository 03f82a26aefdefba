"""Rates of totals over a window of time."""

from __future__ import annotations

import pytest

from tfd_notebook.model.rate_window import RateWindow


def window(*entries: tuple[float, float], **options: float) -> RateWindow:
    result = RateWindow(**options)  # type: ignore[arg-type]
    for at, total in entries:
        result.add(at, total)
    return result


def test_rate_needs_two_measurements() -> None:
    empty = RateWindow()
    assert (empty.rate, empty.rates, empty.by_second()) == (None, (), [])
    single = window((1, 10))
    assert (single.rate, single.rates, single.by_second()) == (None, (), [])
    single.add(3, 30)
    assert single.rate == 10


def test_rate_covers_the_window_only() -> None:
    measured = window((0, 0), (1, 1000), (2, 1010), (4, 1050), seconds=3)
    assert measured.rates == (10, 20)
    assert measured.rate == pytest.approx(50 / 3)
    measured.add(5, 1080)
    assert measured.rate == pytest.approx(70 / 3)
    # A measurement before the window is used if there is no later one.
    measured.add(55, 1130)
    assert measured.rate == 1


def test_close_measurements_are_merged() -> None:
    measured = window(*((n / 4, n) for n in range(13)))  # of 3 s
    assert measured.rate == 4
    assert measured.rates == (4, 4, 4, 4)


def test_smaller_total_restarts_the_window() -> None:
    measured = window((0, 100), (1, 200))
    assert measured.add(2, 200)
    assert not measured.add(3, 5)
    assert measured.rate is None
    assert measured.add(4, 25)
    assert measured.rate == 20


def test_number_of_measurements_is_limited() -> None:
    assert len(window(*((n, n) for n in range(9)), seconds=100, keep=4).rates) == 3


def test_totals_are_interpolated_at_whole_seconds() -> None:
    measured = window((0.5, 0), (2.5, 20), (4, 50))
    assert measured.by_second() == [(1, 5), (2, 15), (3, 30)]
    assert measured.by_second(2) == [(2, 15), (3, 30)]
