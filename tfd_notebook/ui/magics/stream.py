"""``%tfd_stream``: iterate datasets in the background."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from tfd_notebook import views
from tfd_notebook.errors import Unsupported
from tfd_notebook.ui.argparsing import Command, CommandLine, Parser
from tfd_notebook.ui.magics import lookup
from tfd_notebook.ui.magics.cluster import say


def command_line(shell: Any) -> CommandLine:
    """Return the subcommands of ``%tfd_stream`` for `shell`."""
    commands = (
        Command("start", "iterate a dataset in the background", _Start(shell), _start_args),
        Command("pause", "let a stream wait", _does("pause"), _name_args),
        Command("resume", "let it go on", _does("resume"), _name_args),
        Command("stop", "end it", _does("stop"), _name_args),
        Command("status", "the streams and datasets of all clusters", _status),
    )
    return CommandLine("%tfd_stream", "Datasets iterated in the background.", commands)


def dataset_argument(parser: Parser) -> None:
    """Add the argument ``DATASET``."""
    parser.add_argument(
        "dataset",
        metavar="DATASET",
        help="variable that holds the dataset, or an expression (quote it where it has spaces); "
        "it is evaluated in the notebook's namespace",
    )


def _start_args(parser: Parser) -> None:
    dataset_argument(parser)
    parser.add_argument(
        "--name",
        dest="label",
        metavar="N",
        help="name of the stream (default: the variable's name)",
    )
    parser.add_argument("--cluster", metavar="C", help="which cluster, where several live")


def _name_args(parser: Parser) -> None:
    parser.add_argument("stream", nargs="?", metavar="NAME", help="which stream, where several run")


class _Start:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        cluster = lookup.pick(options.cluster)
        if not hasattr(cluster, "stream"):
            raise Unsupported(
                f"the cluster {cluster.name!r} does not read datasets of this kernel",
                fix="name another one with --cluster",
            )
        words = options.dataset
        dataset = lookup.evaluate(self._shell, words)
        name = options.label or (words if words.isidentifier() else None)
        before = cluster.streams.get(name or "")
        ran = before is not None and before.state in ("running", "paused")
        stream = cluster.stream(dataset, name).start()
        runs = "runs, the one before it was stopped" if ran else "runs"
        say(f"stream {stream.name!r} {runs}; %tfd_stream stop {stream.name} ends it")
        return stream


def _does(verb: str) -> Callable[[argparse.Namespace], None]:
    def run(options: argparse.Namespace) -> None:
        stream = lookup.pick_stream(options.stream)
        getattr(stream, verb)()
        say(f"stream {stream.name!r} is {stream.state}")

    return run


def _status(options: argparse.Namespace) -> views.Table:
    return views.streams_table(
        [cluster.snapshot() for cluster in lookup.running_clusters().values()]
    )
