"""Clusters by Spark Connect, whose server runs in the Java of this process.

It answers a step's name on standard input with what came of it, as JSON. In a process of its own:
where there is a session of Spark Connect, pyspark takes all others for one.
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

#: Seconds for what takes one on an idle machine.
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
    # By that name the token goes without TLS, and nowhere else.
    return SparkSession.builder.remote(f"sc://localhost:{port}/;token={token}").create()


def adds(args: Any, ctx: Any) -> None:
    feed = ctx.get_data_feed()
    count = total = 0
    while not feed.should_stop():
        for row in feed.next_batch(16):
            count, total = count + 1, total + row.id
    Path(args["directory"], f"{ctx.job_name}-{ctx.task_index}").write_text(f"{count} {total}")


def doubles(args: Any, ctx: Any) -> None:
    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        feed.batch_results([2 * row.id for row in feed.next_batch(16)])


def raises(args: Any, ctx: Any) -> None:
    ctx.get_data_feed().next_batch(1)
    raise ArithmeticError("NaN in the loss")


def said(action: Any) -> str:
    """Return the kind of an error, and what it says."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def feeds(start: Any, spark: Any, directory: Path) -> dict[str, Any]:
    cluster = start(adds)
    cluster.train(spark.range(0, 100, 1, 3), num_epochs=2)
    cluster.shutdown(timeout=LONG)
    taken = [path.read_text().split() for path in directory.iterdir()]
    return {"taken": taken, "phase": str(cluster.phase)}


def infers(start: Any, spark: Any, directory: Path) -> dict[str, Any]:
    cluster = start(doubles)
    frame = spark.range(0, 100, 1, 3)
    twice = [row.twice for row in cluster.inference(frame, schema="twice long").collect()]
    misfit = said(cluster.inference(frame, schema="twice array<string>").collect)
    rdd = said(lambda: cluster.inference(frame))
    cluster.shutdown(timeout=LONG)
    return {"twice": twice, "misfit": misfit, "rdd": rdd}


def fails(start: Any, spark: Any, directory: Path) -> dict[str, Any]:
    cluster = start(raises)
    raised = said(lambda: cluster.train(spark.range(0, 1000, 1, 2), num_epochs=1))
    cluster.wait(LONG)
    return {"raised": raised, "phase": str(cluster.phase), "count": spark.range(5).count()}


def refuses(start: Any, spark: Any, directory: Path) -> dict[str, Any]:
    return {
        "slots": said(lambda: start(adds, 3)),
        "parallel": said(lambda: TFParallel.run(spark, print, None, 2)),
    }


STEPS = {step.__name__: step for step in (feeds, infers, fails, refuses)}


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
