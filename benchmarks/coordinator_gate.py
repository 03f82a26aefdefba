"""Closures through a coordinator with an armed and resumed gate, against TensorFlow's own."""

from __future__ import annotations

import _pairs
from coordinator_overhead import compare


def main() -> None:
    result = compare("coordinator_gate", "ours+gate", _pairs.arguments(__doc__).quick)
    _pairs.report("coordinator_gate", result, "seconds")


if __name__ == "__main__":
    main()
