"""The tests that `tfd_notebook.testing.plugin` runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tfd_notebook.testing.conformance import Conformance
from tfd_notebook.testing.pytest_checks import LauncherConformance


class TestInstalledLauncher(LauncherConformance):
    """The tests of each launcher of the option ``--launcher``."""

    @pytest.fixture(scope="class")
    @classmethod
    def conformance(cls, launcher_name: str) -> Iterator[Conformance]:
        checks = Conformance(launcher_name)
        checks.open()
        yield checks
        checks.close()
