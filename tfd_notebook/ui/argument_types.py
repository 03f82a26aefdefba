"""The options that describe a cluster, as magics and the shell take them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tfd_notebook import views
from tfd_notebook.errors import UsageError
from tfd_notebook.ui.argparsing import Parser

if TYPE_CHECKING:
    from tfd_notebook.cluster.cluster import Cluster


def add_scale_options(parser: Parser) -> None:
    """Add the options with the new number of tasks of a running cluster."""
    _add_worker_options(parser, "unchanged")
    # Hidden from the help: it is parsed so that the error can name the alternative.
    parser.add_argument("--ps", type=int, help=argparse.SUPPRESS)


def _add_worker_options(parser: Parser, default: str) -> None:
    for option, kind in (("--data-workers", "tf.data service"), ("--workers", "training")):
        text = f"number of {kind} workers (default: {default})"
        parser.add_argument(option, type=int, metavar="N", help=text)


def add_start_options(parser: Parser) -> None:
    """Add the options that describe a cluster."""
    _add_worker_options(parser, "0")
    parser.add_argument(
        "--ps", type=int, metavar="N", help="number of parameter servers (default: 0)"
    )
    parser.add_argument(
        "--evaluator", action="store_true", help="an evaluator, a cluster of its own"
    )
    parser.add_argument(
        "--gpus",
        default="auto",
        metavar="X",
        help='what the workers see: auto, 0 (none), numbers as in "0,1", or "worker=1" (each)',
    )
    parser.add_argument(
        "--launcher",
        default="local",
        metavar="L",
        help="where the tasks run; the command launchers lists the choices (default: local)",
    )
    parser.add_argument("--name", help="name of the cluster (default: cluster)")
    parser.add_argument("--host", metavar="H", help="name or address that peers of the tasks use")
    parser.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="M",
        help="module or op library that each task loads first; may be repeated",
    )
    parser.add_argument("--work-dir", metavar="D", help="directory of the dispatcher's journal")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="CIDR",
        help="network that may connect besides this host; may be repeated",
    )
    parser.add_argument(
        "--time-limit", type=float, metavar="S", help="seconds after which the cluster stops"
    )


def add_hours_option(parser: Any) -> None:
    """Add how long a cluster shall outlive its kernel."""
    parser.add_argument(
        "--hours", type=float, default=8.0, metavar="H", help="for so long (default: 8 hours)"
    )


def add_detach_option(parser: Any) -> None:
    """Add that a cluster shall outlive its kernel from the start."""
    parser.add_argument(
        "--detach",
        nargs="?",
        type=float,
        const=8.0,
        metavar="HOURS",
        help="let it outlive this process, for so many hours (default: 8)",
    )


def scale_wishes(options: argparse.Namespace) -> dict[str, int]:
    """Return the numbers of tasks that `options` name, as `Cluster.scale` takes them."""
    named = {name: getattr(options, name) for name in ("data_workers", "workers", "ps")}
    return {name: count for name, count in named.items() if count is not None}


def read_gpus(words: str) -> Any:
    """Return what ``--gpus`` means, as `Cluster` takes it; what cannot be read stays as it is."""
    if words == "0":
        return 0
    items = [item.strip() for item in words.split(",") if item.strip()]
    if items and all(item.isdecimal() for item in items):
        return [int(item) for item in items]
    pairs = [item.partition("=") for item in items]
    if pairs and all(sign and count.isdecimal() for _, sign, count in pairs):
        return {role: int(count) for role, _, count in pairs}
    return words


def make_cluster(options: argparse.Namespace, port: int = 0) -> Cluster:
    """Return the cluster that `options` describe, started; one that lives already is used.

    With ``--detach`` that can be one that outlived the process that started it.

    Parameters
    ----------
    options : argparse.Namespace
        What `add_start_options` reads.
    port : int
        TCP port of the dispatcher, 0 for a free one.
    """
    from tfd_notebook.cluster import attach
    from tfd_notebook.launchers import base
    from tfd_notebook.model.spec import Policy, Service

    launcher = base.launcher(options.launcher)
    wishes: dict[str, Any] = {}
    if options.host is not None:
        wishes["host"] = options.host
    if options.allow:
        wishes["allow"] = options.allow
    if wishes:
        launcher = type(launcher)(**wishes)
    return attach.start(
        options.detach,
        data_workers=options.data_workers or 0,
        workers=options.workers or 0,
        ps=options.ps or 0,
        evaluator=options.evaluator,
        gpus=read_gpus(options.gpus),
        launcher=launcher,
        name=options.name,
        preload=options.preload,
        policy=Policy(time_limit=options.time_limit),
        service=Service(port=port, work_dir=options.work_dir),
    )


def launchers_table() -> views.Table:
    """Return the installed launchers and the profiles, and where each runs the tasks."""
    from tfd_notebook.launchers import base, profiles

    return views.Table(
        (views.Column("launcher"), views.Column("where the tasks run", note=True)),
        [
            *((views.Cell(name), views.Cell(kind.summary)) for name, kind in base.kinds().items()),
            *(
                (views.Cell(name), _profile_cell(profile))
                for name, profile in profiles.profiles().items()
            ),
        ],
        label="launchers",
        empty="no launcher is installed",
    )


def _profile_cell(profile: Any) -> views.Cell:
    """Return a profile's launcher and file, or why the file cannot be read."""
    if isinstance(profile, UsageError):
        return views.Cell(profile.what)
    return views.Cell(f"{profile.launcher}, from {profile.path}")
