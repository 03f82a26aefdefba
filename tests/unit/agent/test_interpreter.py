"""Import paths of started processes: kept entries, their order, and removed entries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfd_notebook.agent import interpreter
from tfd_notebook.resolvers import suggestions


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
    assert path[0] == str(shared)  # in the position that the user specified
    assert path.index(str(working)) > path.index(interpreter.standard_library()[0])


def test_later_working_directory_keeps_its_position(
    directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [entry for entry in sys.path if entry]
    monkeypatch.setattr(sys, "path", [*entries, ""])
    assert interpreter.task_path() == [*entries, str(directories[0])]


def test_working_directory_is_added_after_stdlib(
    directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert str(directories[0]) not in interpreter.task_path()
    path = interpreter.task_path(add_working_directory=True)
    assert path.index(str(directories[0])) > path.index(interpreter.standard_library()[0])


def test_helpers_omit_directories_writable_by_others(directories: tuple[Path, Path]) -> None:
    working, shared = directories
    path = interpreter.import_path()
    assert str(working) in path
    assert str(shared) not in path
    assert str(working.parent / "missing") not in path
    working.chmod(0o777)
    assert str(working) not in interpreter.import_path()


@pytest.mark.parametrize(
    ("owner", "mode", "trusted"),
    [
        pytest.param((0, 0), 0o775, True, id="group-of-this-user"),
        pytest.param((0, 100), 0o755, True, id="group-cannot-write"),
        pytest.param((0, 100), 0o775, False, id="another-group"),
        pytest.param((65534, 65534), 0o755, False, id="another-user"),
        pytest.param((0, 0), 0o777, False, id="every-user"),
    ],
)
@pytest.mark.root
def test_untrusted_working_directory_comes_last_or_is_omitted(
    directories: tuple[Path, Path], owner: tuple[int, int], mode: int, trusted: bool
) -> None:
    working, _ = directories
    os.chown(working, *owner)
    working.chmod(mode)
    assert (str(working) in interpreter.import_path()) == trusted
    variables = interpreter.environment({"PYTHONPATH": str(working)})
    assert ("PYTHONPATH" in variables) == trusted
    for add in (False, True):
        path = interpreter.task_path(add_working_directory=add)
        assert path.count(str(working)) == 1
        assert (path[-1] == str(working)) == (not trusted)


@pytest.mark.slow
def test_python_code_searches_the_working_directory_last(
    directories: tuple[Path, Path],
) -> None:
    working, shared = directories
    code = interpreter.FIRST + "\nimport json; print(json.dumps(sys.path))"
    for entry in ("", ".", str(working)):
        completed = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([entry, str(shared), "missing"])},
            stdout=subprocess.PIPE,
            check=True,
        )
        path = json.loads(completed.stdout)
        assert path[-1] == str(working)
        assert not {"", ".", "missing", str(shared), str(working / "missing")} & set(path)


def test_interpreter_variables_keep_trusted_entries(
    directories: tuple[Path, Path],
) -> None:
    working, shared = directories
    entries = os.pathsep.join(["", "relative", str(shared), str(working)])
    variables = interpreter.environment({"PYTHONPATH": entries, "PYTHONUNBUFFERED": "1"})
    assert variables["PYTHONPATH"] == str(working)
    assert variables["PYTHONUNBUFFERED"] == "1"
    assert "PYTHONPATH" not in interpreter.environment({"PYTHONPATH": os.pathsep})


def test_removed_working_directory_is_omitted(
    directories: tuple[Path, Path], tmp_path: Path
) -> None:
    directories[0].rmdir()
    assert all(map(os.path.isabs, interpreter.task_path()))


def test_notebook_directory_does_not_shadow_stdlib_in_executors(
    directories: tuple[Path, Path],
) -> None:
    from tfd_notebook.spark.local_session import session

    working, shared = directories
    (working / "users_module.py").touch()
    assert str(working) in session.executor_path()
    assert str(shared) not in session.executor_path()
    (working / "random.py").touch()
    path = session.executor_path()
    assert path.index(interpreter.standard_library()[0]) < path.index(str(working))


@pytest.mark.slow
def test_slurm_tasks_do_not_import_from_the_working_directory(
    directories: tuple[Path, Path],
) -> None:
    (directories[0] / "tensorflow.py").write_text("open('ran', 'w')\n")
    code = suggestions.srun().partition("TASK = '''\n")[2].partition("'''")[0]
    # Without site-packages, the import of TensorFlow fails or loads the file here.
    completed = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert "No module named 'tensorflow'" in completed.stderr
    assert not (directories[0] / "ran").exists()
