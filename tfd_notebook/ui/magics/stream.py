"""``%tfd_stream``: iterate datasets in the background."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from tfd_notebook import views
from tfd_notebook.cluster import registry
from tfd_notebook.ui.argparsing import Command, CommandLine, Parser
from tfd_notebook.ui.magics import lookup
from tfd_notebook.ui.magics.cluster import report


def command_line(shell: Any) -> CommandLine:
    """Return the subcommands of ``%tfd_stream`` for `shell`."""
    commands = (
        Command(
            "start",
            "iterate a dataset in the background",
            _Start(shell),
            _start_args,
            example="batches --name train",
        ),
        Command("pause", "pause a stream", _control_command("pause"), _name_args, example="train"),
        Command(
            "resume", "resume a stream", _control_command("resume"), _name_args, example="train"
        ),
        Command("stop", "stop a stream", _control_command("stop"), _name_args, example="train"),
        Command("status", "show the streams and datasets of all clusters", _status),
    )
    return CommandLine("%tfd_stream", "Iterate datasets in the background.", commands)


def dataset_argument(parser: Parser) -> None:
    """Add the argument ``DATASET``."""
    parser.add_argument(
        "dataset",
        metavar="DATASET",
        help="variable that holds the dataset, or an expression in the notebook's namespace (in "
        "quotation marks if it contains spaces)",
    )


def _start_args(parser: Parser) -> None:
    dataset_argument(parser)
    parser.add_argument(
        "--name",
        dest="label",
        metavar="N",
        help="name of the stream (default: the variable's name)",
    )
    parser.add_argument("--cluster", metavar="C", help="name of the cluster, if several run")


def _name_args(parser: Parser) -> None:
    parser.add_argument(
        "stream", nargs="?", metavar="NAME", help="name of the stream, if several run"
    )


class _Start:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        cluster = lookup.pick_own(options.cluster)
        source = options.dataset
        dataset = lookup.evaluate(self._shell, source)
        name = options.label or (source if source.isidentifier() else None)
        previous = cluster.streams.get(name or "")
        replaces = previous is not None and previous.state in ("running", "paused")
        stream = cluster.stream(dataset, name).start()
        state = "is running; the previous one was stopped" if replaces else "is running"
        report(f"stream {stream.name!r} {state}. Stop it with %tfd_stream stop {stream.name}")
        return stream


def _control_command(method: str) -> Callable[[argparse.Namespace], None]:
    def run(options: argparse.Namespace) -> None:
        stream = lookup.pick_stream(options.stream)
        getattr(stream, method)()
        report(f"stream {stream.name!r} is {stream.state}")

    return run


def _status(options: argparse.Namespace) -> views.Table:
    return views.streams_table(
        [cluster.snapshot() for cluster in registry.running_clusters().values()]
    )
