"""Run the benchmarks, and write each result with its commit and day to ``results.md``."""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
#: Benchmarks that create network namespaces.
ONLY_ROOT = ("slurm_start", "tunnel_cost")
HEAD = "| claim | ratio | figures | commit | day |\n|---|---|---|---|---|\n"
IMPORTED = re.compile(r"^\s*(?:import|from) (\w+)", re.MULTILINE)


class Row(NamedTuple):
    """A result, with the commit and the UTC day of its run."""

    claim: str
    ratio: str
    figures: str
    commit: str
    day: str

    @property
    def benchmark(self) -> str:
        return re.split(r"\W", self.claim)[0]

    def __str__(self) -> str:
        return f"| {' | '.join(self)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds; results.md stays")
    parser.add_argument("--old", action="store_true", help="list those with changed files instead")
    parser.add_argument("--run", action="store_true", help="with --old: list and run them")
    options = parser.parse_args(arguments)
    scripts = benchmarks()
    unknown = set(options.names) - set(scripts)
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}: use {', '.join(scripts)}")

    results = ROOT / "benchmarks" / "results.md"
    rows = parse(results.read_text())
    names = options.names or list(scripts)
    if options.old:
        reasons = old(rows, names)
        for name, reason in reasons.items():
            print(f"{name}: {reason}")
        names = list(reasons) if options.run else []
    if os.geteuid() and not options.names:
        names = [name for name in names if name not in ONLY_ROOT]
    failed = []
    for name in names:
        print(f"\n=== {name}", flush=True)
        commit, day = head(), datetime.now(timezone.utc).date().isoformat()
        lines = run(scripts[name], ["--quick"] if options.quick else [])
        result = re.compile(rf"({name}\b.*?): ratio (\S+) \((.+)\)")
        new = [Row(*m.groups(), commit, day) for line in lines if (m := result.fullmatch(line))]
        if not new:
            failed.append(name)
        elif not options.quick:
            # After each benchmark, because a later one may fail or be interrupted.
            rows = replace(rows, new)
            results.write_text(report(rows))
    if failed:
        print(f"\nwithout a result: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def benchmarks() -> dict[str, Path]:
    """Return the files of the benchmarks by name."""
    files = (ROOT / "benchmarks").glob("[a-z]*.py")
    return {file.stem: file for file in sorted(files) if file.name != "run.py"}


def run(script: Path, options: list[str]) -> list[str]:
    """Run `script`, show its output, and return the lines; an empty list if it fails."""
    lines = []
    with subprocess.Popen(
        [sys.executable, str(script), *options],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL="2"),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    return lines if process.returncode == 0 else []


def old(rows: Sequence[Row], names: Iterable[str]) -> dict[str, str]:
    """Return the benchmarks whose files changed after their rows, each with the reason."""
    paths, reasons = measured(), {}
    for name in names:
        commits = sorted({row.commit for row in rows if row.benchmark == name})
        files = [f for each in commits for f in changed(each, [*own_files(name), *paths[name]])]
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        if not commits:
            reasons[name] = "no row"
        elif files:
            reasons[name] = f"since {', '.join(commits)}: {', '.join(files[:3])}{more}"
    return reasons


def measured() -> dict[str, list[str]]:
    """Return the paths that each benchmark measures, from the table of ``docs/measuring.md``."""
    page = (ROOT / "docs" / "measuring.md").read_text()
    table = page.partition("| file | measures |")[2].partition("\n\n")[0]
    return {
        name: [f"tfd_notebook/{path}" for path in re.findall(r"`(.+?)`", paths)]
        for names, _, paths in (line.partition(" | ") for line in table.splitlines())
        for name in re.findall(r"`(\w+)\.py`", names)
    }


def own_files(name: str) -> list[str]:
    """Return the files in ``benchmarks/`` that a benchmark consists of, by its imports."""
    files = [ROOT / "benchmarks" / f"{name}.py"]
    for file in files:  # grows
        imported = {file.with_name(f"{module}.py") for module in IMPORTED.findall(file.read_text())}
        files += sorted(path for path in imported - set(files) if path.exists())
    return [str(file.relative_to(ROOT)) for file in files]


def changed(commit: str, paths: Sequence[str]) -> list[str]:
    """Return the files of `paths` that differ between `commit` and the working tree."""
    compared = git("diff", "--name-only", commit.rstrip("+"), "--", *paths)
    return compared.stdout.splitlines() if compared.returncode == 0 else ["unknown commit"]


def head() -> str:
    """Return the short hash of HEAD, with a ``+`` if tracked files differ from it."""
    commit = git("rev-parse", "--short", "HEAD").stdout.strip() or "unknown"
    # Each benchmark of a run changes the results.
    same = git("diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results.md").returncode == 0
    return commit if same else f"{commit}+"


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)


def parse(text: str) -> list[Row]:
    """Return the rows of ``results.md``."""
    _, table = text.split(HEAD)
    return [Row(*line[2:-2].split(" | ")) for line in table.splitlines()]


def replace(rows: Iterable[Row], new: Sequence[Row]) -> list[Row]:
    """Return `rows` with `new` instead of the former rows of the same benchmarks."""
    names = {row.benchmark for row in new}
    kept = [row for row in rows if row.benchmark not in names]
    return sorted([*kept, *new], key=lambda row: row.benchmark)


def report(rows: Iterable[Row]) -> str:
    return (
        "# Results\n\n"
        f"Latest run: Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}, {os.cpu_count()} cores, TensorFlow {tensorflow_version()}. "
        "Rows of other runs may come from another machine.\n\n"
        + HEAD
        + "".join(f"{row}\n" for row in rows)
    )


def tensorflow_version() -> str:
    for name in ("tensorflow", "tensorflow-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of another distribution"


if __name__ == "__main__":
    sys.exit(main())
