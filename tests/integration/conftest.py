"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration._tasks import Tasks


@pytest.fixture(scope="module")
def tasks() -> Iterator[Tasks]:
    """Return the process that forks TensorFlow servers."""
    with Tasks() as tasks:
        yield tasks
