"""Deadlines and rates, while the wall clock makes steps."""

from __future__ import annotations

import time

import pytest

from tfd_notebook.net import clock


class Wall:
    """Stand-in for the wall clock. No time passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step = 0.0
        monkeypatch.setattr(time, "time", lambda: 1000.0 + self.step)
        monkeypatch.setattr(clock, "now", lambda: 50.0)


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    return Wall(monkeypatch)


def test_deadline_is_stable_and_shown_by_the_current_clock(wall: Wall) -> None:
    deadline = clock.Deadline(100)
    assert deadline.wall == 1100
    for step in (3600.0, -3600.0):
        wall.step = step
        assert deadline.left == 100
        assert not deadline.expired
        assert deadline.wall == 1100 + step


def test_displayed_times_do_not_jitter(wall: Wall) -> None:
    deadline = clock.Deadline(100)
    shown = deadline.wall
    for step in (0.001, 0.5, -0.5):
        wall.step = step
        assert deadline.wall == shown


def test_clock_counts_from_boot_and_deadlines_pass() -> None:
    before = clock.now()
    assert 0 < before <= clock.now()
    assert clock.Deadline(-0.001).expired
