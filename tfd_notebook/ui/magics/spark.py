"""``%tfd_spark``: TensorFlow clusters on Spark executors."""

from __future__ import annotations

import argparse
import functools
import threading
from collections.abc import Callable
from typing import Any

from tfd_notebook import views
from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook.cluster import registry as cluster_registry
from tfd_notebook.errors import StateError
from tfd_notebook.spark.driver import registry
from tfd_notebook.spark.preflight import facts
from tfd_notebook.spark.preflight.check import check
from tfd_notebook.ui.magics import lookup
from tfd_notebook.ui.magics.lookup import report
from tfd_notebook.ui.widgets import live

#: Seconds to wait until a cluster that starts in the background is registered.
_APPEAR_SECONDS = 10.0
_SESSION = "spark = tfd.spark.session()"


def _pick(name: str | None, ended: bool = False) -> Any:
    """Return the cluster with this name, or the only running one.

    With `ended`, the most recent cluster is also accepted after its end.
    """
    running, last = registry.running(), registry.last()
    if ended and last is not None and (last.name == name or (name is None and not running)):
        return running.get(last.name, last)
    if name is not None:
        return lookup.named(name, running, "cluster", " on Spark")
    start = "%tfd_spark run FUNCTION --executors 2"
    none = "no cluster is running on Spark"
    return lookup.only(running, "clusters are running on Spark", none, start)


def _session(shell: Any, variable: str | None) -> Any:
    if variable is not None:
        return lookup.evaluate(shell, variable, "a SparkSession")

    session = compat_pyspark.active_session()
    if session is None:
        raise StateError("this process has no active SparkSession", fix=_SESSION)
    return session


class SparkMagic(lookup.ShellCommands):
    """Subcommands of ``%tfd_spark`` in a shell."""

    def run(self, options: argparse.Namespace) -> Any:
        # Import time: it imports NumPy.
        from tfd_notebook.spark import TFCluster

        variable = lookup.check_variable(options.output)
        session = _session(self._shell, options.spark)
        function = lookup.evaluate(self._shell, options.function, "the function of the nodes")
        args = None
        if options.args is not None:
            args = lookup.evaluate(self._shell, " ".join(options.args), "the arguments")
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
            name=options.name,
        )
        if options.background:
            started = _begin(run)
            report("starting; %tfd_spark status --live shows the progress; the result is a future")
            return started
        started = run()
        bound = lookup.bind(self._shell.user_ns, variable, started)
        report(f"cluster {started.name!r} runs on Spark; it is in the variable {bound!r}")
        return started

    def train(self, options: argparse.Namespace) -> Any:
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

    def inference(self, options: argparse.Namespace) -> Any:
        rows = lookup.evaluate(self._shell, options.rows, "an RDD or DataFrame")
        cluster = _pick(options.cluster)
        return cluster.inference(rows, options.feed_timeout, schema=options.schema)

    def shutdown(self, options: argparse.Namespace) -> Any:
        cluster = _pick(options.name, ended=True)
        future = cluster.shutdown(
            grace_secs=options.grace, timeout=options.timeout, wait=not options.background
        )
        if options.background:
            report(f"cluster {cluster.name!r} is shutting down; the result is a future")
            return future
        report(f"cluster {cluster.name!r} has stopped; the SparkContext keeps running")
        return None

    def status(self, options: argparse.Namespace) -> Any:
        cluster = _pick(options.name, ended=True)
        if options.live:
            followed: Any = cluster.adapter
            return live(followed)
        snapshot = cluster.snapshot()
        return snapshot.nodes_frame() if options.frame else views.View(snapshot)

    def logs(self, options: argparse.Namespace) -> None:
        report(str(_pick(options.cluster, ended=True).logs(options.node, options.lines)))

    def check(self, options: argparse.Namespace) -> Any:
        session = _session(self._shell, options.spark)
        if options.background:
            return check(session, options.executors, wait=False)
        return check(session, options.executors)


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
