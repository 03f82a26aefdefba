"""A tf.data service that the tests of a module share."""

from __future__ import annotations

import pytest

from tests.integration._service import Service


@pytest.fixture(scope="module")
def service(tasks):
    with Service(tasks) as service:
        yield service
