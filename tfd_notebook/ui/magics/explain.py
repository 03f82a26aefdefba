"""``%tfd_explain``: the bottleneck of a pipeline."""

from __future__ import annotations

import argparse
from typing import Any

from tfd_notebook.data.explain.explain import explain
from tfd_notebook.model.limit import Limit
from tfd_notebook.ui.argparsing import Command, CommandLine, Parser, SingleCommand
from tfd_notebook.ui.magics import lookup
from tfd_notebook.ui.magics.stream import dataset_argument


def command_line(shell: Any) -> CommandLine:
    """Return ``%tfd_explain`` for `shell`."""

    def run(options: argparse.Namespace) -> Limit:
        step = None if options.step is None else lookup.evaluate(shell, options.step)
        return explain(
            lookup.evaluate(shell, options.dataset),
            options.seconds,
            step=step,
            step_time=options.step_time,
        )

    summary = "Run a pipeline for a few seconds and report its bottleneck."
    example = "batches --seconds 5"
    return SingleCommand(Command("%tfd_explain", summary, run, _arguments, example=example))


def _arguments(parser: Parser) -> None:
    dataset_argument(parser)
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="duration of the run (default: 10)"
    )
    parser.add_argument(
        "--step",
        metavar="FUNCTION",
        help="function that consumes an element, such as a training step",
    )
    parser.add_argument(
        "--step-time", type=float, metavar="S", help="seconds that the consumer takes per element"
    )
