"""Print the suites of ``make test-full`` for the files that differ from a branch."""

from __future__ import annotations

import subprocess
import sys

ALL = "conformance coordinator engines browser spark integration notebooks slow hosts"
#: Suites by the start of a path. All rows that match count. `slow` has tests of all packages.
SUITES = {
    "tfd_notebook/": "integration slow",
    "tfd_notebook/_compat": "conformance coordinator spark",
    "tfd_notebook/agent": "coordinator spark engines hosts",
    "tfd_notebook/bus": "coordinator browser",
    "tfd_notebook/cluster": "coordinator hosts notebooks",
    "tfd_notebook/coordinator": "coordinator notebooks",
    "tfd_notebook/data": "conformance notebooks",
    "tfd_notebook/diagnosis": "spark",
    "tfd_notebook/launchers": "engines hosts",
    "tfd_notebook/model": "coordinator",
    "tfd_notebook/net": "spark hosts",
    "tfd_notebook/remote_kernel": "hosts",
    "tfd_notebook/resolvers": "browser hosts spark notebooks",
    "tfd_notebook/spark": "spark notebooks",
    "tfd_notebook/ui": "browser notebooks",
    "tfd_notebook/views": "browser",
    "README.md": "coordinator",
    "docs/index.md": "coordinator",
    "labextension": "browser",
    "notebooks": "notebooks",
    "tests/unit": "slow",
    **{f"tests/{name}/": name for name in ALL.split() if name != "slow"},
    **dict.fromkeys(("pyproject.toml", "constraints.txt", "tests/conftest.py", "tests/_"), ALL),
}


def suites(paths: list[str]) -> list[str]:
    """Return the suites for these paths."""
    names = {
        name
        for path in paths
        for start, row in SUITES.items()
        if path.startswith(start)
        for name in row.split()
    }
    return sorted(names, key=ALL.index)


def changed(branch: str) -> list[str]:
    """Return the files that differ from the last common commit with `branch`."""
    base = git("merge-base", branch, "HEAD")
    return [
        *git("diff", "--no-renames", "--name-only", *base),
        *git("ls-files", "--others", "--exclude-standard"),
    ]


def git(*arguments: str) -> list[str]:
    """Return the lines of output of a git command."""
    return subprocess.check_output(("git", *arguments), text=True).splitlines()


if __name__ == "__main__":
    print(*suites(changed(sys.argv[1])))
