"""Steps of the wall clock in the processes that a test starts."""

from __future__ import annotations

import os
from pathlib import Path

#: Python runs this when it starts. `psutil` adds the boot time to the start time of a process. The
#: system derives the boot time from the wall clock.
_SITE = """
import os, time

_time = time.time

def _step():
    with open(os.environ["TFD_TEST_CLOCK"]) as file:
        return float(file.read())

time.time = lambda: _time() + _step()
import psutil._pslinux as _linux
_boot_time = _linux.boot_time
_linux.boot_time = lambda: _boot_time() + _step()
"""


class WallClock:
    """The wall clock of all processes started with `environment`, and their descendants.

    Parameters
    ----------
    directory : Path
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / "step"
        site = directory / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(_SITE)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(site),
            "TFD_TEST_CLOCK": str(self._file),
        }
        self.step(0.0)

    def step(self, seconds: float) -> None:
        """Set the difference between this clock and the system clock."""
        new = self._file.with_suffix(".new")
        new.write_text(str(seconds))
        new.replace(self._file)
