"""Clusters on executors with two cores and two GPUs, first with RDDs, then by Spark Connect.

The server of Spark Connect is in the Java process of this program. Each line of standard input
names a step, and standard output has its result as JSON. This is a separate process: if a session
of Spark Connect exists, pyspark treats each session as one. So `on_cores` is the first step.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import sys
import uuid
from pathlib import Path
from typing import Any

import tfd_notebook as tfd
from tests._squares import squares_function
from tfd_notebook.spark import TFCluster, TFParallel
from tfd_notebook.spark.local_session import session
from tfd_notebook.spark.TFCluster import InputMode

#: Timeout in seconds of steps that take 1 s on an idle machine.
LONG = 120.0

#: Reports two GPUs.
GPUS = """\
#!/bin/sh
echo '{"name": "gpu", "addresses": ["5", "7"]}'
"""


def server(directory: Path) -> tuple[Any, str]:
    """Return a session on ``local-cluster[2,2,1024]``, and its address for Spark Connect."""
    script = directory / "gpus"
    script.write_text(GPUS)
    script.chmod(0o755)
    token = uuid.uuid4().hex
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    spark = session.session(
        name="server",
        cores=2,
        memory="1024m",
        config={
            "spark.worker.resource.gpu.amount": 2,
            "spark.worker.resource.gpu.discoveryScript": script,
            "spark.executor.resource.gpu.amount": 2,
            "spark.task.resource.gpu.amount": 1,
            "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": port,
            "spark.connect.authenticate.token": token,
        },
    )
    # The client sends a token without TLS to this host name only.
    return spark, f"sc://localhost:{port}/;token={token}"


def report_rows(directory: Any, ctx: Any) -> None:
    report: dict[str, Any] = {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "rows": 0}
    if ctx.job_name == "ps":
        import threading

        threading.Event().wait()
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        report["rows"] += sum(feed.next_batch(16))
    Path(directory, f"{ctx.job_name}-{ctx.task_index}").write_text(json.dumps(report))


def on_cores(spark: Any, directory: Path) -> dict[str, Any]:
    """Return the report of clusters that are fed from RDDs."""
    sc = spark.sparkContext
    rows = sc.parallelize(range(1000), 8)
    report: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        report["codes"] = tfd.spark.check(spark, 4).codes
        tfd.spark.check(spark, 5)
    report["printed"] = printed.getvalue()
    for nodes in (4, 2):
        results = directory / f"results {nodes}"
        results.mkdir()
        cluster = TFCluster.run(sc, report_rows, str(results), nodes, 1, input_mode=InputMode.SPARK)
        report[f"held {nodes}"] = cluster.slots_held
        cluster.train(rows, 2)
        cluster.shutdown(timeout=LONG)
        report[f"info {nodes}"] = cluster.cluster_info
        report[f"table {nodes}"] = [[row.node, row.gpu] for row in cluster.snapshot().spark.nodes]
        report[f"rows {nodes}"] = {
            path.name: json.loads(path.read_text()) for path in results.iterdir()
        }
    cluster = TFCluster.run(sc, squares_function(), None, 2, 1, input_mode=InputMode.SPARK)
    report["squares"] = cluster.inference(rows).collect()
    report["squared"] = cluster.cluster_info
    cluster.shutdown(timeout=LONG)
    return report


def add_rows(args: Any, ctx: Any) -> None:
    feed = ctx.get_data_feed()
    count = total = 0
    while not feed.should_stop():
        for row in feed.next_batch(16):
            count, total = count + 1, total + row.id
    Path(args["directory"], f"{ctx.job_name}-{ctx.task_index}").write_text(f"{count} {total}")


def double_rows(args: Any, ctx: Any) -> None:
    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        feed.batch_results([2 * row.id for row in feed.next_batch(16)])


def raise_error(args: Any, ctx: Any) -> None:
    ctx.get_data_feed().next_batch(1)
    raise ArithmeticError("NaN in the loss")


def error_text(action: Any) -> str:
    """Return the type and the text of the exception that an action raises."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def feed_rows(start: Any, spark: Any, directory: Path) -> dict[str, Any]:
    cluster = start(add_rows)
    cluster.train(spark.range(0, 100, 1, 3), num_epochs=2)
    cluster.shutdown(timeout=LONG)
    sums = [path.read_text().split() for path in directory.glob("worker-*")]
    return {"sums": sums, "phase": str(cluster.phase)}


def infer(start: Any, spark: Any, directory: Path) -> dict[str, Any]:
    cluster = start(double_rows)
    frame = spark.range(0, 100, 1, 3)
    twice = [row.twice for row in cluster.inference(frame, schema="twice long").collect()]
    mismatch = error_text(cluster.inference(frame, schema="twice array<string>").collect)
    rdd = error_text(lambda: cluster.inference(frame))
    cluster.shutdown(timeout=LONG)
    return {"twice": twice, "mismatch": mismatch, "rdd": rdd}


def fail(start: Any, spark: Any, directory: Path) -> dict[str, Any]:
    cluster = start(raise_error)
    error = error_text(lambda: cluster.train(spark.range(0, 1000, 1, 2), num_epochs=1))
    cluster.wait(LONG)
    return {"error": error, "phase": str(cluster.phase), "count": spark.range(5).count()}


def refuse(start: Any, spark: Any, directory: Path) -> dict[str, Any]:
    return {
        "slots": error_text(lambda: start(add_rows, 5)),
        "parallel": error_text(lambda: TFParallel.run(spark, print, None, 2)),
    }


STEPS = {step.__name__: step for step in (feed_rows, infer, fail, refuse)}


def main(directory: str) -> None:
    from pyspark.sql import SparkSession

    classic, address = server(Path(directory))
    print("ready", flush=True)
    assert sys.stdin.readline() == "on_cores\n"
    print(json.dumps(on_cores(classic, Path(directory)), default=bytes.decode), flush=True)
    spark = SparkSession.builder.remote(address).create()

    def start(function: Any, nodes: int = 2) -> Any:
        args = {"directory": directory}
        return TFCluster.run(spark, function, args, nodes, input_mode=InputMode.SPARK)

    for line in sys.stdin:
        print(json.dumps(STEPS[line.strip()](start, spark, Path(directory))), flush=True)
    spark.stop()
    session.end()


if __name__ == "__main__":
    main(sys.argv[1])  # functions of a script travel by value
