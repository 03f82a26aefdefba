"""What the tests share that make this process the coordinator of clusters."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def _ports_stay(leftovers: Any) -> None:
    """TensorFlow keeps a port for each connection until the process ends."""
    leftovers.own_ports = False
