"""`%load_ext tfd_notebook` against `import ipywidgets`, each in a new IPython process.

The time is that of the statement alone, in a process in which IPython already runs. The process
ends before the preload of TensorFlow begins in a background thread.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

OURS = "shell.run_line_magic('load_ext', 'tfd_notebook')"
THEIRS = "import ipywidgets"
ROUND = """
import sys, time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
began = time.perf_counter()
{statement}
took = time.perf_counter() - began
heavy = sorted({{"tensorflow", "pandas", "grpc", "ipywidgets"}} & set(sys.modules))
print(took, *heavy)
"""


def seconds(statement: str) -> tuple[float, list[str]]:
    completed = subprocess.run(
        [sys.executable, "-c", ROUND.format(statement=statement)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    took, *heavy = completed.stdout.split()
    return float(took), heavy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    rounds = 5 if parser.parse_args().quick else 15
    seconds(OURS), seconds(THEIRS)  # fill the file cache
    pairs = []
    for _ in range(rounds):
        ours, heavy = seconds(OURS)
        assert not heavy, f"%load_ext imported {heavy}"
        pairs.append((ours, seconds(THEIRS)[0]))
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"{rounds} rounds, ratio {ratios[0]:.2f} to {ratios[-1]:.2f}; load_ext under 0.3 s: "
        f"{'yes' if max(pair[0] for pair in pairs) < 0.3 else 'no'}"
    )
    print(
        f"load_ext: ratio {statistics.median(ratios):.2f} (A {ours:.3f}, B {theirs:.3f}, seconds)"
    )


if __name__ == "__main__":
    main()
