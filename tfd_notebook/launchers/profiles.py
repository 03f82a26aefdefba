"""Profiles: named launchers with options, from files of the user or the host's administrator.

``~/.config/tfd_notebook/NAME.toml`` or ``/etc/tfd_notebook/NAME.toml`` defines what
``launcher="NAME"`` starts::

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
        Name of the launcher.
    options : mapping
        Options to create it with.
    path : Path
        The file that defines the profile.
    """

    name: str
    launcher: str
    options: dict[str, Any] = field(default_factory=dict, repr=False)  # may contain a token
    path: Path = Path()


def user_directory() -> Path:
    """Return the directory of the user's profiles: ``tfd_notebook`` in ``XDG_CONFIG_HOME``."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "tfd_notebook"


def profiles() -> dict[str, Profile | UsageError]:
    """Return all profiles by name, or the error of a profile that cannot be read.

    A user's profile takes precedence over the administrator's profile of the same name.
    """
    profiles_by_name: dict[str, Profile | UsageError] = {}
    for path in _files():
        try:
            profiles_by_name[path.stem] = read(path)
        except UsageError as error:
            profiles_by_name[path.stem] = error
    return profiles_by_name


def find(name: str) -> Profile | None:
    """Return the profile of that name, or None. Other profiles are not read."""
    for directory in (user_directory(), SYSTEM):
        path = directory / f"{name}.toml"
        if os.sep not in name and path.name != POLICY and path.is_file():
            return read(path)
    return None


def read(path: Path) -> Profile:
    """Return the profile in a file.

    Raises
    ------
    UsageError
    """
    fix = f'write launcher = "ssh" and its options into {path}'
    values = read_toml(path, "profile", fix)
    launcher = values.pop("launcher", None)
    if not isinstance(launcher, str):
        raise UsageError(f"invalid profile {path}: it has no launcher", fix=fix)
    return Profile(path.stem, launcher, values, path)


def _files() -> Iterator[Path]:
    # The user's files come last, so that they replace the administrator's.
    for directory in (SYSTEM, user_directory()):
        for path in sorted(directory.glob("*.toml")):
            if path.name != POLICY:
                yield path
