"""The conformance kit, on launchers of this package and on one that violates the contract."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tfd_notebook.errors import UsageError
from tfd_notebook.launchers import base
from tfd_notebook.launchers.fake import Fake
from tfd_notebook.model.events import TaskChanged
from tfd_notebook.model.spec import Role, TaskState
from tfd_notebook.testing import CHECKS, check_launcher
from tfd_notebook.testing.pytest_checks import LauncherConformance

pytestmark = pytest.mark.integration


class TestLocal(LauncherConformance):
    @classmethod
    def make_launcher(cls) -> str:
        return "local"


class TestFake(LauncherConformance):
    @classmethod
    def make_launcher(cls) -> type[base.Launcher]:
        return Fake


class Broken(Fake):
    """A launcher that loses an option, and whose restarted tasks are not counted."""

    name: ClassVar[str] = "broken"
    summary: ClassVar[str] = "two\nlines"
    roles: ClassVar[frozenset[Role]] = frozenset((Role.DISPATCHER, Role.DATA_WORKER))

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "allow": ("10.0.0.0/8",)}

    def connect(self, config: Any, on_event: base.OnEvent) -> tuple[base.TaskHost, ...]:
        def reverse(event: Any) -> None:
            if isinstance(event, TaskChanged) and event.state is TaskState.READY:
                on_event(TaskChanged(event.task, TaskState.PLANNED))
            on_event(event)

        return super().connect(config, reverse)


def test_violations_are_named() -> None:
    with pytest.raises(AssertionError, match="launcher 'broken'") as caught:
        check_launcher(Broken)
    lines = str(caught.value).splitlines()
    assert "  failed   attributes: summary has several lines" in lines
    assert any(line.startswith("  failed   options: options has values") for line in lines)
    assert any("failed   events: events of dispatcher:0 out of order" in line for line in lines)
    assert any("refused  training: it runs no training workers" in line for line in lines)
    assert "  passed   unknown_task" in lines


def test_report_has_an_outcome_for_each_check() -> None:
    report = check_launcher("fake")
    assert [outcome.check for outcome in report.outcomes] == list(CHECKS)
    assert {outcome.state for outcome in report.outcomes} <= {"passed", "refused"}


def test_class_without_a_launcher_is_an_error() -> None:
    class TestNothing(LauncherConformance):
        pass

    with pytest.raises(UsageError, match="TestNothing has no launcher"):
        TestNothing.make_launcher()


def test_plugin_checks_an_installed_launcher(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "tfd_notebook.testing.plugin"]
    completed = subprocess.run(
        [*command, "--launcher", "fake", "-q", "-p", "no:cacheprovider", "-k", "options or attrib"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "2 passed" in completed.stdout
    assert "installed_launchers.py::" in completed.stdout or completed.stdout.startswith("..")


def test_import_of_the_kit_does_not_import_pytest() -> None:
    code = "import sys, tfd_notebook.testing; print('pytest' in sys.modules)"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert completed.stdout == "False\n"
