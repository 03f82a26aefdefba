"""Import paths of started processes: what is kept, in which order, and what is left out."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tfd_notebook.launch import interpreter


@pytest.fixture
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return a working directory and one that every user may write to; both are imported from."""
    working, shared = tmp_path / "working", tmp_path / "shared"
    working.mkdir()
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.chdir(working)
    monkeypatch.setattr(sys, "path", ["", str(shared), *sys.path, str(tmp_path / "missing")])
    return working, shared


def test_tasks_import_what_the_kernel_imports(directories: tuple[Path, Path]) -> None:
    working, shared = directories
    path = interpreter.task_path()
    assert set(path) == {os.path.abspath(entry) for entry in sys.path}
    assert path[0] == str(shared)  # named by the user, and in that place
    assert path.index(str(working)) > path.index(interpreter.standard_library()[0])


def test_a_working_directory_after_the_standard_library_stays_where_it_is(
    directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [entry for entry in sys.path if entry]
    monkeypatch.setattr(sys, "path", [*entries, ""])
    assert interpreter.task_path() == [*entries, str(directories[0])]


def test_a_working_directory_is_added_after_the_standard_library(
    directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert str(directories[0]) not in interpreter.task_path()
    path = interpreter.task_path(add_working_directory=True)
    assert path.index(str(directories[0])) > path.index(interpreter.standard_library()[0])


def test_helpers_leave_out_what_other_users_may_write_to(directories: tuple[Path, Path]) -> None:
    working, shared = directories
    path = interpreter.import_path()
    assert str(working) in path
    assert str(shared) not in path
    assert str(working.parent / "missing") not in path
    working.chmod(0o777)
    assert str(working) not in interpreter.import_path()


def test_variables_of_the_interpreter_are_kept_but_for_such_entries(
    directories: tuple[Path, Path],
) -> None:
    working, shared = directories
    entries = os.pathsep.join(["", "relative", str(shared), str(working)])
    made = interpreter.environment({"PYTHONPATH": entries, "PYTHONUNBUFFERED": "1"})
    assert made["PYTHONPATH"] == str(working)
    assert made["PYTHONUNBUFFERED"] == "1"
    assert "PYTHONPATH" not in interpreter.environment({"PYTHONPATH": os.pathsep})


def test_a_removed_working_directory_is_left_out(
    directories: tuple[Path, Path], tmp_path: Path
) -> None:
    directories[0].rmdir()
    assert all(map(os.path.isabs, interpreter.task_path()))


def test_a_notebooks_directory_replaces_none_of_pythons_modules_in_executors(
    directories: tuple[Path, Path],
) -> None:
    from tfd_notebook.spark import sessions

    working, shared = directories
    (working / "users_module.py").touch()
    assert str(working) in sessions._path()
    assert str(shared) not in sessions._path()
    (working / "random.py").touch()
    path = sessions._path()
    assert path.index(interpreter.standard_library()[0]) < path.index(str(working))
