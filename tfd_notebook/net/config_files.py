"""Configuration files in TOML, of the user and of the host's administrator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tfd_notebook.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Directory of an administrator's files.
SYSTEM = Path("/etc/tfd_notebook")
#: The file in it that limits clusters. It is not a profile.
POLICY = "policy.toml"


def read_toml(path: Path, what: str, fix: str) -> dict[str, Any]:
    """Return the values of a TOML file; raise UsageError with its path if it is invalid."""
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"the {what} {path} cannot be read: {error}", fix=fix) from None
    return values
