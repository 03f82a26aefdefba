"""``%tfd_spark``: clusters on the executors of Apache Spark."""

from __future__ import annotations

import argparse
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tfd_notebook import views
from tfd_notebook.errors import StateError, UnknownName, UsageError
from tfd_notebook.ui.argparsing import Command, CommandLine, Parser, nearest
from tfd_notebook.ui.magics import lookup, start_form
from tfd_notebook.ui.magics.cluster import say

#: Seconds for a cluster to be seen that starts in the background.
_APPEAR_SECONDS = 10.0
_SESSION = "spark = tfd.spark.session()"


def command_line(shell: Any) -> CommandLine:
    """Return the subcommands of ``%tfd_spark`` for `shell`."""
    commands = (
        Command("run", "start a cluster: a function in each node", _Run(shell), _run_args),
        Command("train", "feed the rows of an RDD or DataFrame", _Train(shell), _train_args),
        Command(
            "inference",
            "the nodes' results for those rows",
            _Inference(shell),
            _inference_args,
        ),
        Command("shutdown", "let the nodes come to their end", _shutdown, _shutdown_args),
        Command("status", "phase, nodes, feeding, errors", _status, _status_args),
        Command("logs", "what nodes wrote", _logs, _logs_args),
        Command("check", "whether this Spark can run a cluster", _Check(shell), _check_args),
    )
    return CommandLine("%tfd_spark", "TensorFlow clusters on Spark's executors.", commands)


def on_spark() -> Mapping[str, Any]:
    """Return the clusters on Spark that live here, by name."""
    from tfd_notebook.spark.driver import registry as known

    return known.running()


def _pick(name: str | None, ended: bool = False) -> Any:
    """Return the cluster of that name, or the only one; the newest where `ended` ones count."""
    from tfd_notebook.spark.driver import registry as known

    found, last = known.running(), known.last()
    if name is not None:
        if name in found:
            return found[name]
        if last is not None and last.name == name and ended:
            return last
        raise UnknownName(
            f"there is no cluster {name!r} on Spark",
            fix=nearest(name, found) + f"clusters: {', '.join(found) or 'none'}",
        )
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} clusters live on Spark, and none is named",
            fix=f"add one of these names: {', '.join(found)}",
        )
    if found:
        return next(iter(found.values()))
    if ended and last is not None:
        return last
    raise StateError("no cluster lives on Spark", fix="%tfd_spark run FUNCTION --executors 2")


def _session(shell: Any, named: str | None) -> Any:
    if named is not None:
        return lookup.evaluate(shell, named, "a SparkSession")
    from tfd_notebook._compat import pyspark as private

    session = private.active_session()
    if session is None:
        raise StateError("no Spark lives in this process", fix=_SESSION)
    return session


def _spark_option(parser: Parser) -> None:
    parser.add_argument(
        "--spark",
        metavar="S",
        help="variable of the SparkSession (default: the one that lives here)",
    )


def _wait_option(parser: Parser) -> None:
    parser.add_argument(
        "--background", action="store_true", help="do not wait: the result is a future"
    )


def _expression(shell: Any, words: list[str] | None, kind: str) -> Any:
    return None if words is None else lookup.evaluate(shell, " ".join(words), kind)


def _run_args(parser: Parser) -> None:
    parser.add_argument("function", metavar="FUNCTION", help="called as FUNCTION(args, ctx)")
    parser.add_argument("--args", nargs="+", metavar="EXPR", help="what it gets (default: None)")
    parser.add_argument(
        "--executors", type=int, metavar="N", help="nodes (default: as many as fit)"
    )
    parser.add_argument("--ps", type=int, default=0, metavar="N", help="parameter servers of these")
    parser.add_argument(
        "--input-mode",
        choices=("spark", "tensorflow"),
        default="spark",
        metavar="MODE",
        help="who reads the data: spark, which feeds it (default), or tensorflow, the function",
    )
    parser.add_argument("--master-node", metavar="NAME", help="chief or master: the first worker")
    parser.add_argument("--evaluator", action="store_true", help="one node of these evaluates")
    parser.add_argument(
        "--driver-ps", action="store_true", help="parameter servers run beside this kernel"
    )
    parser.add_argument("--tensorboard", action="store_true", help="beside the first worker")
    parser.add_argument("--log-dir", metavar="D", help="what TensorBoard shows")
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="S", help="for all to report (default: 600)"
    )
    parser.add_argument("--name", dest="label", metavar="N", help="of the cluster (default: spark)")
    _spark_option(parser)
    _wait_option(parser)
    start_form.add_output_option(parser)


class _Run:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        from tfd_notebook.spark import TFCluster
        from tfd_notebook.spark.preflight import facts

        variable = lookup.check_variable(options.output)
        session = _session(self._shell, options.spark)
        function = lookup.evaluate(self._shell, options.function, "the function of the nodes")
        args = _expression(self._shell, options.args, "the arguments")
        count = options.executors
        if count is None:
            # At least one, so that what there is too little of is said.
            count = max(facts.of(session).free, 1) + (options.ps if options.driver_ps else 0)
        run = functools.partial(
            TFCluster.run,
            session,
            function,
            args,
            count,
            options.ps,
            options.tensorboard,
            TFCluster.InputMode[options.input_mode.upper()],
            log_dir=options.log_dir,
            driver_ps_nodes=options.driver_ps,
            master_node=options.master_node,
            reservation_timeout=options.timeout,
            eval_node=options.evaluator,
            name=options.label,
        )
        if options.background:
            begun = _begin(run)
            say("it starts; %tfd_spark status --live shows how, and the result is a future of it")
            return begun
        begun = run()
        bound = lookup.bind(self._shell.user_ns, variable, begun)
        say(f"cluster {begun.name!r} runs on Spark; it is in the variable {bound!r}")
        return begun


def _begin(run: Callable[..., Any]) -> Any:
    """Return the future of a cluster; when it can be seen, so that the next cell may look at it."""
    from tfd_notebook.spark.driver import registry as known

    appeared = threading.Event()
    known.on_change(appeared.set)
    try:
        begun = run(wait=False)
        begun.add_done_callback(lambda _: appeared.set())
        appeared.wait(_APPEAR_SECONDS)
        return begun
    finally:
        known.forget(appeared.set)


def _train_args(parser: Parser) -> None:
    parser.add_argument("rows", metavar="ROWS", help="variable that holds an RDD or DataFrame")
    parser.add_argument(
        "--epochs", type=int, default=1, metavar="N", help="how often they are fed (default: 1)"
    )
    _feed_options(parser)
    _wait_option(parser)


def _feed_options(parser: Parser) -> None:
    parser.add_argument(
        "--feed-timeout",
        type=float,
        default=600,
        metavar="S",
        help="without progress (default: 600)",
    )
    parser.add_argument("--cluster", metavar="C", help="which one, where several live")


class _Train:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        cluster = _pick(options.cluster)
        rows = lookup.evaluate(self._shell, options.rows, "an RDD or DataFrame")
        begun = cluster.train(
            rows, options.epochs, options.feed_timeout, wait=not options.background
        )
        if options.background:
            say(f"cluster {cluster.name!r} is fed; the result is a future of it")
            return begun
        say(f"cluster {cluster.name!r} has taken all rows")
        return None


def _inference_args(parser: Parser) -> None:
    parser.add_argument("rows", metavar="ROWS", help="variable that holds an RDD or DataFrame")
    parser.add_argument(
        "--schema", metavar="'NAME TYPE, ...'", help="of a DataFrame's results, which are then one"
    )
    _feed_options(parser)


class _Inference:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        rows = lookup.evaluate(self._shell, options.rows, "an RDD or DataFrame")
        cluster = _pick(options.cluster)
        return cluster.inference(rows, options.feed_timeout, schema=options.schema)


def _name_args(parser: Parser) -> None:
    parser.add_argument(
        "onspark", nargs="?", metavar="NAME", help="which cluster, where several live"
    )


def _shutdown_args(parser: Parser) -> None:
    _name_args(parser)
    parser.add_argument(
        "--grace", type=float, default=0, metavar="S", help="that the nodes have (default: 0)"
    )
    parser.add_argument(
        "--timeout", type=float, default=259200, metavar="S", help="-1: none (default: 3 days)"
    )
    _wait_option(parser)


def _shutdown(options: argparse.Namespace) -> Any:
    cluster = _pick(options.onspark, ended=True)
    begun = cluster.shutdown(
        grace_secs=options.grace, timeout=options.timeout, wait=not options.background
    )
    if options.background:
        say(f"cluster {cluster.name!r} comes to its end; the result is a future of it")
        return begun
    say(f"cluster {cluster.name!r} has stopped; the SparkContext lives on")
    return None


def _status_args(parser: Parser) -> None:
    _name_args(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--live", action="store_true", help="a widget that follows it")
    how.add_argument("--frame", action="store_true", help="the nodes as a DataFrame")


def _status(options: argparse.Namespace) -> Any:
    cluster = _pick(options.onspark, ended=True)
    if options.live:
        from tfd_notebook.spark.driver import registry
        from tfd_notebook.ui.widgets import live

        followed: Any = registry.adapter_of(cluster)
        return live(followed)
    seen = cluster.snapshot()
    return seen.nodes_frame() if options.frame else views.View(seen)


def _logs_args(parser: Parser) -> None:
    parser.add_argument("node", nargs="?", metavar="NODE", help="such as worker:0 (default: all)")
    parser.add_argument("--cluster", metavar="C", help="which one, where several live")
    parser.add_argument(
        "-n", "--lines", type=int, default=100, metavar="N", help="of each (default: 100)"
    )


def _logs(options: argparse.Namespace) -> None:
    say(str(_pick(options.cluster, ended=True).logs(options.node, options.lines)))


def _check_args(parser: Parser) -> None:
    parser.add_argument(
        "--executors", type=int, metavar="N", help="nodes that shall run (default: what fits)"
    )
    _spark_option(parser)
    _wait_option(parser)


class _Check:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        from tfd_notebook.spark.preflight.check import check

        session = _session(self._shell, options.spark)
        if options.background:
            return check(session, options.executors, wait=False)
        return check(session, options.executors)
