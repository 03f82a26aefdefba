"""The doctor in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

DOCTOR = "import tfd_notebook as tfd; print(*tfd.doctor().codes)"


def in_child(code: str = DOCTOR, *arguments: str, **environment: str) -> set[str]:
    """Return what a process prints that runs `code`: the codes of what the doctor finds in it."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "TFD_PRELOAD": "off", **environment},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())
