"""Run pytest with the arguments of this program; what failed is run once more, and named.

The tests wait for real processes, servers and browsers, some for hundreds of them in turn. Where a
machine is busy with other work, one of two thousand may meet a limit that it never meets alone. So
up to three that failed get a second run in a process of their own, of notebooks all cells. The
first failure stays in the output, and the last line names what needed the second run: a defect of
the test or of the code, to be mended like any other. What fails twice has failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

#: More than these are no accident.
MOST = 3


def main(arguments: list[str]) -> int:
    """Run pytest; return its exit status, or that of the second run."""
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
        verdict = "failed twice" if status else "PASSED ONLY IN A SECOND RUN, to be mended"
        print(f"\n{verdict}: {', '.join(failed)}", flush=True)
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
