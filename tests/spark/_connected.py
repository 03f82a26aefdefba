"""Clusters by Spark Connect, with the server in the Java process of this program.

Each line of standard input names a step, and standard output has its result as JSON. This is a
separate process: if a session of Spark Connect exists, pyspark treats each session as one.
"""

from __future__ import annotations

import json
import socket
import sys
import uuid
from pathlib import Path
from typing import Any

from tfd_notebook.spark import TFCluster, TFParallel
from tfd_notebook.spark.local_session import session
from tfd_notebook.spark.TFCluster import InputMode

#: Timeout in seconds of steps that take 1 s on an idle machine.
LONG = 120.0


def connected() -> Any:
    """Return a session of Spark Connect."""
    from pyspark.sql import SparkSession

    token = uuid.uuid4().hex
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    session.session(
        name="server",
        memory="1024m",
        config={
            "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": port,
            "spark.connect.authenticate.token": token,
        },
    )
    # The client sends a token without TLS to this host name only.
    return SparkSession.builder.remote(f"sc://localhost:{port}/;token={token}").create()


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
    sums = [path.read_text().split() for path in directory.iterdir()]
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
        "slots": error_text(lambda: start(add_rows, 3)),
        "parallel": error_text(lambda: TFParallel.run(spark, print, None, 2)),
    }


STEPS = {step.__name__: step for step in (feed_rows, infer, fail, refuse)}


def main(directory: str) -> None:
    spark = connected()

    def start(function: Any, nodes: int = 2) -> Any:
        args = {"directory": directory}
        return TFCluster.run(spark, function, args, nodes, input_mode=InputMode.SPARK)

    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(STEPS[line.strip()](start, spark, Path(directory))), flush=True)
    spark.stop()
    session.end()


if __name__ == "__main__":
    main(sys.argv[1])  # functions of a script travel by value
