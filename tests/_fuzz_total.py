"""Plugin of pytest for ``make fuzz``: the number of inputs of all receivers, of all processes.

The run fails if it is lower than ``TFD_TEST_INPUTS``.
"""

from __future__ import annotations

import os

import pytest

#: Name of the property of a test with its number of inputs.
PROPERTY = "inputs"
_counts: list[int] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        _counts.extend(value for name, value in report.user_properties if name == PROPERTY)


def _is_low() -> bool:
    return sum(_counts) < int(os.environ.get("TFD_TEST_INPUTS", "0"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    # Processes of xdist have a part of the receivers.
    if not hasattr(session.config, "workerinput") and _is_low() and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    low = f", fewer than {os.environ['TFD_TEST_INPUTS']}" if _is_low() else ""
    terminalreporter.write_line(f"{len(_counts)} receivers: {sum(_counts)} inputs{low}")
