"""Limits of the number of connections, because TensorFlow leaks memory at each connection."""

from __future__ import annotations

import warnings

import pytest

from tfd_notebook.coordinator import connection
from tfd_notebook.errors import StateError


def connect_once_after(count: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the notice at the connection after `count` connections."""
    monkeypatch.setattr(connection, "_count", count)
    monkeypatch.setattr(connection, "_counted", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        connection.record_connection()
    return [f"{warning.category.__name__}: {warning.message}" for warning in caught]


def test_five_connections_do_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [connect_once_after(count, monkeypatch) for count in range(5)] == [[]] * 5


@pytest.mark.parametrize("count", [5, 14])
def test_sixth_and_later_connections_warn(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = connect_once_after(count, monkeypatch)
    assert warning.startswith(f"ResourceWarning: this is connection {count + 1} of this process")
    assert "The maximum is 15: restart the kernel soon" in warning


def test_sixteenth_connection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StateError, match="connected to clusters 15 times") as caught:
        connect_once_after(15, monkeypatch)
    assert "Next: restart the kernel" in str(caught.value)
