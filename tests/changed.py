"""Print the suites of ``make test-full`` for the files that differ from a commit."""

from __future__ import annotations

import subprocess
import sys

#: Suites by the start of a path. All rows that match count.
SUITES = {
    "tfd_notebook/_compat": "integration conformance coordinator spark slow",
    "tfd_notebook/agent": "integration coordinator spark engines hosts slow",
    "tfd_notebook/net": "integration spark hosts slow",
    "tfd_notebook/launchers": "integration engines hosts slow",
    "tfd_notebook/cluster": "integration coordinator hosts notebooks",
    "tfd_notebook/coordinator": "coordinator notebooks",
    "tfd_notebook/data": "integration conformance notebooks slow",
    "tfd_notebook/spark": "spark notebooks",
    "tfd_notebook/remote_kernel": "hosts",
    "tfd_notebook/": "integration",
    "tfd_notebook/ui": "browser notebooks",
    "tfd_notebook/bus": "browser",
    "labextension": "browser",
    **{f"tests/{name}": name for name in ("integration", "conformance", "coordinator", "spark")},
    **{f"tests/{name}": name for name in ("engines", "hosts", "browser")},
    "notebooks": "notebooks",
}
#: The quick suites first.
ORDER = [
    "conformance",
    "coordinator",
    "engines",
    "browser",
    "spark",
    "integration",
    "notebooks",
    "slow",
    "hosts",
]


def suites(paths: list[str]) -> list[str]:
    """Return the suites for these paths."""
    names = {
        name
        for path in paths
        for start, row in SUITES.items()
        if path.startswith(start)
        for name in row.split()
    }
    return sorted(names, key=ORDER.index)


def changed(commit: str) -> list[str]:
    """Return the tracked and untracked files that differ from `commit`."""
    commands = (("diff", "--name-only", commit), ("ls-files", "--others", "--exclude-standard"))
    return [
        path
        for command in commands
        for path in subprocess.check_output(("git", *command), text=True).splitlines()
    ]


if __name__ == "__main__":
    print(*suites(changed(sys.argv[1])))
