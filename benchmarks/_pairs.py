"""Interleaved measurements of two alternatives, and the statistics of their ratios."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Figure = TypeVar("Figure")


@dataclass(frozen=True)
class Result:
    """A comparison: median and quartiles of the rounds' ratios, and the medians of both sides."""

    ratio: float
    low: float
    high: float
    ours: float
    theirs: float

    def __str__(self) -> str:
        return (
            f"ratio {self.ratio:.3f}, middle half {self.low:.3f} to {self.high:.3f} "
            f"(A {self.ours:.4g}, B {self.theirs:.4g})"
        )


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the command line of all benchmarks: ``--quick`` for a few short rounds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few rounds, for CI")
    return parser


def arguments(description: str | None) -> argparse.Namespace:
    """Parse the command line of all benchmarks."""
    return parser(description).parse_args()


def interleave(
    measurements: dict[str, Callable[[], Figure]], rounds: int, warm_up: int = 1
) -> dict[str, list[Figure]]:
    """Take every measurement once per round, in rotating order, after `warm_up` rounds."""
    names = list(measurements)
    figures: dict[str, list[Figure]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            figure = measurements[name]()
            if number >= 0:
                figures[name].append(figure)
    return figures


def compare(ours: list[float], theirs: list[float]) -> Result:
    """Return the statistics of two interleaved lists of figures."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return Result(
        statistics.median(ratios), low, high, statistics.median(ours), statistics.median(theirs)
    )


def measure(ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> Result:
    """Compare two measurements over `rounds` interleaved rounds, after a warm-up round."""
    figures = interleave({"ours": ours, "theirs": theirs}, rounds)
    return compare(figures["ours"], figures["theirs"])


def report(name: str, result: Result, unit: str) -> None:
    """Print the line of a result, which ``run.py`` parses."""
    print(
        f"{name}: ratio {result.ratio:.3f} (A {result.ours:.4g}, B {result.theirs:.4g}, {unit})",
        flush=True,
    )
