"""Plugin of pytest that checks an installed launcher.

``pytest -p tfd_notebook.testing.plugin --launcher NAME`` runs one test for each check. The option
can be repeated.
"""

from __future__ import annotations

from pathlib import Path

import pytest

_TESTS = Path(__file__).with_name("installed_launchers.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--launcher``."""
    group = parser.getgroup("tfd_notebook")
    group.addoption(
        "--launcher", action="append", default=[], help="check the installed launcher of this name"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collect the tests of the option's launchers."""
    if config.getoption("--launcher"):
        config.args.append(str(_TESTS))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat the tests for each launcher."""
    if "launcher_name" in metafunc.fixturenames:
        names = metafunc.config.getoption("--launcher")
        metafunc.parametrize("launcher_name", names, scope="class")
