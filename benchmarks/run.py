"""Run every benchmark and write the results to ``results.md`` in this directory."""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
#: Benchmarks that create network namespaces.
ONLY_ROOT = ("slurm_start", "tunnel_cost")
RESULT = re.compile(r"(?P<name>[^:]+): ratio (?P<ratio>\S+) \((?P<figures>.+)\)")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds; results.md stays")
    options = parser.parse_args(arguments)
    scripts = {p.stem: p for p in sorted(HERE.glob("[a-z]*.py")) if p != Path(__file__)}
    unknown = set(options.names) - set(scripts)
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}: use {', '.join(scripts)}")

    rows, failed = [], []
    allowed = [name for name in scripts if name not in ONLY_ROOT or not os.geteuid()]
    for name in options.names or allowed:
        print(f"\n=== {name}", flush=True)
        lines = run(scripts[name], ["--quick"] if options.quick else [])
        matches = [match for line in lines if (match := RESULT.fullmatch(line))]
        rows += [f"| {m['name']} | {m['ratio']} | {m['figures']} |" for m in matches]
        if not matches:
            failed.append(name)
    if not (options.quick or options.names or failed):
        (HERE / "results.md").write_text(report(rows))
    if failed:
        print(f"\nwithout a result: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


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


def report(rows: list[str]) -> str:
    head = (
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} cores, TensorFlow {tensorflow_version()}"
    )
    return "\n".join(
        [
            "# Results",
            "",
            f"Written by `make bench`. {head}.",
            "",
            "| claim | ratio | figures |",
            "|---|---|---|",
            *rows,
            "",
        ]
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
