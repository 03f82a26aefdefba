"""Other people's packages, each in a directory of its own beside this environment's packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def installed(name: str, requirements: tuple[str, ...]) -> Path:
    """Return the directory that holds `requirements`, without what they require; made once."""
    directory = Path(sys.prefix) / name
    complete = directory / ".complete"
    if not complete.exists():
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"),
                *("--target", str(directory), *requirements),
            ],
            check=True,
            stdout=sys.stderr,
        )
        complete.touch()
    return directory
