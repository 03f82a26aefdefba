"""Run pytest with the arguments of this program; what failed is run once more, and named.

The tests wait for real processes, servers and browsers, some for hundreds of them in turn. Where a
machine is busy with other work, one of two thousand may meet a limit that it never meets alone. So
up to three that failed get a second run in a process of their own, of notebooks all cells. The
first failure stays in the output, and the last lines name the tests that passed only in the second
run, a defect of the test or of the code to fix like any other, and the tests that failed twice.

Shells ignore SIGINT for a program in the background, and every process that it starts inherits
that. The tests of Ctrl-C need the default, which this program sets.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

#: More than these are no accident.
MOST = 3


def main(arguments: list[str]) -> int:
    """Run pytest; return its exit status, or that of the second run."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="tfd-pytest-") as cache:
        command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}"]
        status = subprocess.run([*command, *arguments], check=False).returncode
        if status != 1:  # all passed, or something else than a test has failed
            return status
        failed = failures(Path(cache))
        if not 0 < len(failed) <= MOST:
            return status
        # Options only: the second run is told by name what to run.
        options = [one for one in arguments if one.startswith(("--nb", "-v", "-q"))]
        print(f"\nOnce more, in a process of their own: {', '.join(failed)}", flush=True)
        status = subprocess.run([*command, *options, *failed], check=False).returncode
        # A second run that did not finish proves nothing.
        twice = failures(Path(cache)) if status in (0, 1) else failed
        once = [one for one in failed if one not in twice]
        if once:
            print(f"\nPASSED ONLY IN A SECOND RUN, to fix: {', '.join(once)}", flush=True)
        if twice:
            print(f"\nfailed twice: {', '.join(twice)}", flush=True)
        return status


def failures(cache: Path) -> list[str]:
    """Return what pytest noted as failed: tests, and for cells their notebooks."""
    noted = cache / "v" / "cache" / "lastfailed"
    if not noted.exists():
        return []
    named = json.loads(noted.read_text())
    return list(
        dict.fromkeys(
            one.partition("::")[0] if one.partition("::")[0].endswith(".ipynb") else one
            for one in named
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
