"""The checks of `tfd_notebook.testing.conformance` as tests of pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tfd_notebook.errors import UsageError
from tfd_notebook.launchers import base
from tfd_notebook.testing.conformance import CHECKS, Conformance


class LauncherConformance:
    """Base class of the tests of a launcher: one test for each check.

    ::

        class TestMine(LauncherConformance):
            @classmethod
            def make_launcher(cls):
                return Mine(hosts=["a"])
    """

    @classmethod
    def make_launcher(cls) -> str | base.Launcher | type[base.Launcher]:
        """Return the launcher, its class, or its name."""
        raise UsageError(
            f"{cls.__name__} has no launcher", fix="define its classmethod make_launcher"
        )

    @pytest.fixture(scope="class")
    @classmethod
    def conformance(cls) -> Iterator[Conformance]:
        """Return the checks of the launcher, which share one cluster."""
        checks = Conformance(cls.make_launcher())
        checks.open()
        yield checks
        checks.close()

    @pytest.mark.parametrize("check", CHECKS)
    def test_conformance(self, conformance: Conformance, check: str) -> None:
        outcome = conformance.run(check)
        assert outcome.state != "failed", outcome.detail
