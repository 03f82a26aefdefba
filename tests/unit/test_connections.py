"""How often a process may connect: TensorFlow keeps something of each connection."""

from __future__ import annotations

import warnings

import pytest

from tfd_notebook.coordinator import connection
from tfd_notebook.errors import StateError


def connect_once_after(count: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is said at the connection after so many."""
    monkeypatch.setattr(connection, "_count", count)
    monkeypatch.setattr(connection, "_counted", False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        connection.record_connection()
    return [f"{warning.category.__name__}: {warning.message}" for warning in said]


def test_five_connections_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [connect_once_after(count, monkeypatch) for count in range(5)] == [[]] * 5


@pytest.mark.parametrize("count", [5, 14])
def test_from_the_sixth_on_each_warns(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = connect_once_after(count, monkeypatch)
    assert said.startswith(f"ResourceWarning: this is connection {count + 1} of this process")
    assert "The maximum is 15: restart the kernel soon" in said


def test_the_sixteenth_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StateError, match="connected to clusters 15 times") as caught:
        connect_once_after(15, monkeypatch)
    assert "Next: restart the kernel" in str(caught.value)
