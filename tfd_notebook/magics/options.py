"""The options that describe a cluster, as magics and the shell take them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tfd_notebook.magics.parsing import Parser

if TYPE_CHECKING:
    from tfd_notebook.cluster import Cluster


def add_scale_options(parser: Parser) -> None:
    """Add the options that say how many tasks there shall be."""
    parser.add_argument(
        "--data-workers", type=int, metavar="N", help="tf.data service workers (default: 0)"
    )


def add_start_options(parser: Parser) -> None:
    """Add the options that describe a cluster."""
    add_scale_options(parser)
    parser.add_argument(
        "--launcher",
        default="local",
        metavar="L",
        help="where the tasks run, see the command kinds (default: local)",
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


def make_cluster(options: argparse.Namespace, port: int = 0) -> Cluster:
    """Return the cluster that `options` describe, started; one that lives already is used.

    Parameters
    ----------
    options : argparse.Namespace
        What `add_start_options` reads.
    port : int
        TCP port of the dispatcher, 0 for a free one.
    """
    from tfd_notebook.cluster import Cluster
    from tfd_notebook.launch import base
    from tfd_notebook.spec import Policy, Service

    launcher = base.launcher(options.launcher)
    wishes: dict[str, Any] = {}
    if options.host is not None:
        wishes["host"] = options.host
    if options.allow:
        wishes["allow"] = options.allow
    if wishes:
        launcher = type(launcher)(**wishes)
    return Cluster(
        data_workers=options.data_workers or 0,
        launcher=launcher,
        name=options.name,
        preload=options.preload,
        policy=Policy(time_limit=options.time_limit),
        service=Service(port=port, work_dir=options.work_dir),
    )
