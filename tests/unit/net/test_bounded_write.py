"""Writes to an end that does not read."""

from __future__ import annotations

import selectors
from types import SimpleNamespace

import pytest

from tfd_notebook.net import bounded_write


def test_write_to_a_full_socket_waits_in_short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that arrives just before a wait does not end it."""
    waits: list[float] = []

    class Full(selectors.SelectSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            assert timeout is not None
            waits.append(timeout)
            return []

    def write(rest: memoryview) -> int:
        raise BlockingIOError

    monkeypatch.setattr(selectors, "PollSelector", Full)
    monkeypatch.setattr(bounded_write, "time", SimpleNamespace(monotonic=lambda: sum(waits)))
    with pytest.raises(TimeoutError, match="read nothing for 30 s"):
        bounded_write.write_all(0, write, b"x")
    assert sum(waits) == pytest.approx(30)
    assert max(waits) < 1
