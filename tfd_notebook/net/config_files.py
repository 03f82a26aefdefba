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

#: Where an administrator's files are.
SYSTEM = Path("/etc/tfd_notebook")
#: The file there that limits what may be started; it is no profile.
POLICY = "policy.toml"


def read_toml(path: Path, what: str, fix: str) -> dict[str, Any]:
    """Return what a file in TOML says, or raise UsageError, which names the file."""
    try:
        said: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"the {what} {path} cannot be read: {error}", fix=fix) from None
    return said
