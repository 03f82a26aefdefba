"""Limits of the number of connections, because TensorFlow leaks memory at each connection."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest

from tfd_notebook.coordinator import connection
from tfd_notebook.errors import StateError


@pytest.fixture
def module() -> Any:
    """Return the module as a new process imports it."""
    spec = importlib.util.find_spec(connection.__name__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def test_sixth_and_later_connections_warn_and_the_sixteenth_is_refused(module: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            module.record_connection()
    for number in range(6, 16):
        with pytest.warns(ResourceWarning, match=f"connection {number} of this process") as caught:
            module.record_connection()
        assert "The maximum is 15: restart the kernel soon" in str(caught[0].message)
    with pytest.raises(StateError, match="connected to clusters 15 times") as refused:
        module.record_connection()
    assert "Next: restart the kernel" in str(refused.value)
