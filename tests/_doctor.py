"""The doctor in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys

DOCTOR = "import tfd_notebook as tfd; print(*tfd.doctor().codes)"


def in_child(code: str = DOCTOR, *arguments: str, **environment: str) -> set[str]:
    """Run `code` in a separate process; return the words of its output, the codes of findings."""
    completed = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "TFD_PRELOAD": "off", **environment},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert completed.returncode == 0, completed.stderr
    return set(completed.stdout.split())
