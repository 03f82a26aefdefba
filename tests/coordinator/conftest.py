"""Fixtures of the tests that make this process the coordinator of clusters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.coordinator._programs import Programs, serve
from tfd_notebook.coordinator import connection


@pytest.fixture(scope="session", autouse=True)
def _ports_stay(leftovers: Any) -> None:
    """TensorFlow keeps a port for each connection until the process ends."""
    leftovers.own_ports = False


@pytest.fixture(scope="session", autouse=True)
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Run programs that import TensorFlow. Their parent starts before the search for leftovers."""
    with serve(tmp_path_factory.mktemp("programs")) as programs:
        yield programs


@pytest.fixture(scope="module", autouse=True)
def _separate_connections() -> Iterator[None]:
    """All modules together exceed the limit of connections of a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "_count", 0)
        yield
