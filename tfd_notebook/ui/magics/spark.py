"""``%tfd_spark``: TensorFlow clusters on Spark executors."""

from __future__ import annotations

import argparse
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tfd_notebook import views
from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook.cluster import registry as cluster_registry
from tfd_notebook.errors import StateError, UnknownName, UsageError
from tfd_notebook.spark.driver import registry
from tfd_notebook.spark.preflight import facts
from tfd_notebook.spark.preflight.check import check
from tfd_notebook.ui.argparsing import Command, CommandLine, Parser, nearest
from tfd_notebook.ui.magics import lookup, start_form
from tfd_notebook.ui.magics.cluster import report
from tfd_notebook.ui.widgets import live

#: Seconds to wait until a cluster that starts in the background is registered.
_APPEAR_SECONDS = 10.0
_SESSION = "spark = tfd.spark.session()"


def command_line(shell: Any) -> CommandLine:
    """Return the subcommands of ``%tfd_spark`` for `shell`."""
    commands = (
        Command(
            "run",
            "start a cluster that runs a function in each node",
            _Run(shell),
            _run_args,
            example="main_fun --args args --executors 3 --ps 1",
        ),
        Command(
            "train",
            "feed the rows of an RDD or DataFrame",
            _Train(shell),
            _train_args,
            example="rows --epochs 3",
        ),
        Command(
            "inference",
            "compute a result for each row of an RDD or DataFrame",
            _Inference(shell),
            _inference_args,
            example="rows --schema 'guess long'",
        ),
        Command(
            "shutdown",
            "finish and shut down the cluster",
            _shutdown,
            _shutdown_args,
            example="--timeout 60",
        ),
        Command(
            "status",
            "show phase, nodes, feeding and errors",
            _status,
            _status_args,
            example="--live",
        ),
        Command("logs", "show the output of the nodes", _logs, _logs_args, example="worker:1"),
        Command(
            "check",
            "check that this session can run a cluster",
            _Check(shell),
            _check_args,
            example="--executors 3",
        ),
    )
    return CommandLine("%tfd_spark", "Run TensorFlow clusters on Spark executors.", commands)


def on_spark() -> Mapping[str, Any]:
    """Return the running clusters on Spark of this process, by name."""
    return registry.running()


def _pick(name: str | None, ended: bool = False) -> Any:
    """Return the cluster with this name, or the only running one.

    With `ended`, the most recent cluster is also accepted after its end.
    """
    running, last = registry.running(), registry.last()
    if name is not None:
        if name in running:
            return running[name]
        if last is not None and last.name == name and ended:
            return last
        raise UnknownName(
            f"no cluster {name!r} on Spark",
            fix=nearest(name, running) + f"clusters: {', '.join(running) or 'none'}",
        )
    if len(running) > 1:
        raise UsageError(
            f"{len(running)} clusters are running on Spark; name one of them",
            fix=f"add one of these names: {', '.join(running)}",
        )
    if running:
        return next(iter(running.values()))
    if ended and last is not None:
        return last
    raise StateError("no cluster is running on Spark", fix="%tfd_spark run FUNCTION --executors 2")


def _session(shell: Any, variable: str | None) -> Any:
    if variable is not None:
        return lookup.evaluate(shell, variable, "a SparkSession")

    session = compat_pyspark.active_session()
    if session is None:
        raise StateError("this process has no active SparkSession", fix=_SESSION)
    return session


def _spark_option(parser: Parser) -> None:
    parser.add_argument(
        "--spark",
        metavar="S",
        help="variable of the SparkSession (default: the active session)",
    )


def _wait_option(parser: Parser) -> None:
    parser.add_argument("--background", action="store_true", help="do not wait; return a future")


def _expression(shell: Any, words: list[str] | None, kind: str) -> Any:
    return None if words is None else lookup.evaluate(shell, " ".join(words), kind)


def _run_args(parser: Parser) -> None:
    parser.add_argument("function", metavar="FUNCTION", help="called as FUNCTION(args, ctx)")
    parser.add_argument(
        "--args", nargs="+", metavar="EXPR", help="first argument of FUNCTION (default: None)"
    )
    parser.add_argument(
        "--executors", type=int, metavar="N", help="number of nodes (default: all free slots)"
    )
    parser.add_argument(
        "--ps", type=int, default=0, metavar="N", help="use N of the nodes as parameter servers"
    )
    parser.add_argument(
        "--input-mode",
        choices=("spark", "tensorflow"),
        default="spark",
        metavar="MODE",
        help="source of the data: spark feeds the rows (default); with tensorflow, FUNCTION "
        "reads its own data",
    )
    parser.add_argument(
        "--master-node", metavar="NAME", help="role of the first worker: chief or master"
    )
    parser.add_argument(
        "--evaluator", action="store_true", help="use one of the nodes as evaluator"
    )
    parser.add_argument(
        "--driver-ps", action="store_true", help="run parameter servers on the host of this kernel"
    )
    parser.add_argument(
        "--tensorboard", action="store_true", help="run TensorBoard next to the first worker"
    )
    parser.add_argument("--log-dir", metavar="D", help="directory that TensorBoard reads")
    parser.add_argument(
        "--timeout",
        type=float,
        default=600,
        metavar="S",
        help="seconds until all nodes must have registered (default: 600)",
    )
    parser.add_argument(
        "--name", dest="label", metavar="N", help="name of the cluster (default: spark)"
    )
    _spark_option(parser)
    _wait_option(parser)
    start_form.add_output_option(parser)


class _Run:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        # Import time: it imports NumPy.
        from tfd_notebook.spark import TFCluster

        variable = lookup.check_variable(options.output)
        session = _session(self._shell, options.spark)
        function = lookup.evaluate(self._shell, options.function, "the function of the nodes")
        args = _expression(self._shell, options.args, "the arguments")
        count = options.executors
        if count is None:
            # Request at least one node, so that the error of a full Spark shows the shortage.
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
            started = _begin(run)
            report("starting; %tfd_spark status --live shows the progress; the result is a future")
            return started
        started = run()
        bound = lookup.bind(self._shell.user_ns, variable, started)
        report(f"cluster {started.name!r} runs on Spark; it is in the variable {bound!r}")
        return started


def _begin(run: Callable[..., Any]) -> Any:
    """Return the future of a cluster after it is registered, so that the next cell can show it."""
    appeared = threading.Event()
    cluster_registry.on_cluster_start(appeared.set)
    try:
        started = run(wait=False)
        started.add_done_callback(lambda _: appeared.set())
        appeared.wait(_APPEAR_SECONDS)
        return started
    finally:
        cluster_registry.remove_on_cluster_start(appeared.set)


def _train_args(parser: Parser) -> None:
    parser.add_argument("rows", metavar="ROWS", help="variable that holds an RDD or DataFrame")
    parser.add_argument(
        "--epochs", type=int, default=1, metavar="N", help="passes over the rows (default: 1)"
    )
    _feed_options(parser)
    _wait_option(parser)


def _feed_options(parser: Parser) -> None:
    parser.add_argument(
        "--feed-timeout",
        type=float,
        default=600,
        metavar="S",
        help="seconds without progress until the feed fails (default: 600)",
    )
    parser.add_argument("--cluster", metavar="C", help="name of the cluster, if several run")


class _Train:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        cluster = _pick(options.cluster)
        rows = lookup.evaluate(self._shell, options.rows, "an RDD or DataFrame")
        future = cluster.train(
            rows, options.epochs, options.feed_timeout, wait=not options.background
        )
        if options.background:
            report(f"feeding cluster {cluster.name!r}; the result is a future")
            return future
        report(f"cluster {cluster.name!r} has consumed all rows")
        return None


def _inference_args(parser: Parser) -> None:
    parser.add_argument("rows", metavar="ROWS", help="variable that holds an RDD or DataFrame")
    parser.add_argument(
        "--schema",
        metavar="'NAME TYPE, ...'",
        help="columns of the result DataFrame (default: an RDD)",
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
        "onspark", nargs="?", metavar="NAME", help="name of the cluster, if several run"
    )


def _shutdown_args(parser: Parser) -> None:
    _name_args(parser)
    parser.add_argument(
        "--grace",
        type=float,
        default=0,
        metavar="S",
        help="seconds that the evaluator may run on after the workers (default: 0)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=259200,
        metavar="S",
        help="seconds until the nodes are stopped; -1: no limit (default: 3 days)",
    )
    _wait_option(parser)


def _shutdown(options: argparse.Namespace) -> Any:
    cluster = _pick(options.onspark, ended=True)
    future = cluster.shutdown(
        grace_secs=options.grace, timeout=options.timeout, wait=not options.background
    )
    if options.background:
        report(f"cluster {cluster.name!r} is shutting down; the result is a future")
        return future
    report(f"cluster {cluster.name!r} has stopped; the SparkContext keeps running")
    return None


def _status_args(parser: Parser) -> None:
    _name_args(parser)
    view = parser.add_mutually_exclusive_group()
    view.add_argument("--live", action="store_true", help="show a widget that updates itself")
    view.add_argument("--frame", action="store_true", help="return the nodes as a DataFrame")


def _status(options: argparse.Namespace) -> Any:
    cluster = _pick(options.onspark, ended=True)
    if options.live:
        followed: Any = cluster.adapter
        return live(followed)
    snapshot = cluster.snapshot()
    return snapshot.nodes_frame() if options.frame else views.View(snapshot)


def _logs_args(parser: Parser) -> None:
    parser.add_argument("node", nargs="?", metavar="NODE", help="such as worker:0 (default: all)")
    parser.add_argument("--cluster", metavar="C", help="name of the cluster, if several run")
    parser.add_argument(
        "-n", "--lines", type=int, default=100, metavar="N", help="lines per node (default: 100)"
    )


def _logs(options: argparse.Namespace) -> None:
    report(str(_pick(options.cluster, ended=True).logs(options.node, options.lines)))


def _check_args(parser: Parser) -> None:
    parser.add_argument(
        "--executors",
        type=int,
        metavar="N",
        help="number of nodes to check for (default: all free slots)",
    )
    _spark_option(parser)
    _wait_option(parser)


class _Check:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, options: argparse.Namespace) -> Any:
        session = _session(self._shell, options.spark)
        if options.background:
            return check(session, options.executors, wait=False)
        return check(session, options.executors)
