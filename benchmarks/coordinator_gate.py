"""Closures through a coordinator with an armed and resumed gate, against TensorFlow's own."""

from __future__ import annotations

import _pairs
from coordinator_overhead import compare, report


def main() -> None:
    quick = _pairs.arguments(__doc__).quick
    report("coordinator_gate", compare("coordinator_gate", "ours+gate", quick))


if __name__ == "__main__":
    main()
