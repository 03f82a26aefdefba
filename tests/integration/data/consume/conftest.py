"""A tf.data service that the tests of a module share."""

from __future__ import annotations

import pytest

from tests.integration._service import Service
from tests.integration._tasks import Tasks


@pytest.fixture(scope="module")
def tasks():
    with Tasks() as tasks:
        yield tasks


@pytest.fixture(scope="module")
def service(tasks):
    with Service(tasks) as service:
        yield service
