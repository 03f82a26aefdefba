"""Launchers with their options, under a name: files of the user and of the host's administrator.

``~/.config/tfd_notebook/NAME.toml``, or ``/etc/tfd_notebook/NAME.toml``, makes ``launcher="NAME"``
mean a launcher with options::

    launcher = "ssh"
    hosts = ["ada@one", "ada@two"]
    python = "venv/bin/python"
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfd_notebook.errors import UsageError
from tfd_notebook.net.config_files import POLICY, SYSTEM, read_toml


@dataclass(frozen=True)
class Profile:
    """A launcher with options.

    Parameters
    ----------
    name : str
    launcher : str
        The launcher's own name.
    options : mapping
        What it is made with.
    path : Path
        The file that says so.
    """

    name: str
    launcher: str
    options: dict[str, Any] = field(default_factory=dict, repr=False)  # it may hold a token
    path: Path = Path()


def user_directory() -> Path:
    """Return where the user's profiles are: ``tfd_notebook`` in ``XDG_CONFIG_HOME``."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "tfd_notebook"


def profiles() -> dict[str, Profile | UsageError]:
    """Return all profiles by name, and in the place of one that cannot be read its error.

    The user's come before the administrator's.
    """
    found: dict[str, Profile | UsageError] = {}
    for path in _files():
        try:
            found[path.stem] = read(path)
        except UsageError as error:
            found[path.stem] = error
    return found


def find(name: str) -> Profile | None:
    """Return the profile of that name, None where there is none; other files are not read."""
    for directory in (user_directory(), SYSTEM):
        path = directory / f"{name}.toml"
        if os.sep not in name and path.name != POLICY and path.is_file():
            return read(path)
    return None


def read(path: Path) -> Profile:
    """Return what a file says.

    Raises
    ------
    UsageError
    """
    fix = f'write launcher = "ssh" and its options into {path}'
    said = read_toml(path, "profile", fix)
    launcher = said.pop("launcher", None)
    if not isinstance(launcher, str):
        raise UsageError(f"the profile {path} names no launcher", fix=fix)
    return Profile(path.stem, launcher, said, path)


def _files() -> Iterator[Path]:
    # The later ones take the names of the earlier.
    for directory in (SYSTEM, user_directory()):
        for path in sorted(directory.glob("*.toml")):
            if path.name != POLICY:
                yield path
