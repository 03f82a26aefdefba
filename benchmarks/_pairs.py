"""Rounds in which ours and theirs are measured one after the other, and what they come to."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One comparison: the median of the rounds' ratios, their spread, and the medians of both."""

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
    """Return the command line that all benchmarks have: ``--quick`` for a few short rounds."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--quick", action="store_true", help="few rounds, for CI")
    return made


def arguments(description: str | None) -> argparse.Namespace:
    """Read that command line."""
    return parser(description).parse_args()


def interleave(
    ways: dict[str, Callable[[], float]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Measure every way once a round, in an order that turns, `rounds` times."""
    names = list(ways)
    figures: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            figure = ways[name]()
            if number >= 0:
                figures[name].append(figure)
    return figures


def compare(ours: list[float], theirs: list[float]) -> Result:
    """Return what the rounds of two ways, measured together, come to."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return Result(
        statistics.median(ratios), low, high, statistics.median(ours), statistics.median(theirs)
    )


def measure(ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> Result:
    """Compare two ways over `rounds` interleaved rounds, after one that does not count."""
    figures = interleave({"ours": ours, "theirs": theirs}, rounds)
    return compare(figures["ours"], figures["theirs"])


def report(name: str, result: Result, unit: str) -> None:
    """Print the last line of a benchmark."""
    print(
        f"{name}: ratio {result.ratio:.3f} (A {result.ours:.4g}, B {result.theirs:.4g}, {unit})",
        flush=True,
    )
