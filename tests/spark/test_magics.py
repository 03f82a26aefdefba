"""``%tfd_spark`` on a real Spark, and its clusters in lists, on the bus and in commands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests._waiting import until
from tfd_notebook import errors, views
from tfd_notebook.bus import hub
from tfd_notebook.bus.session import Session
from tfd_notebook.cluster import commands, registry
from tfd_notebook.spark.driver import jobs
from tfd_notebook.spark.driver.registry import running
from tfd_notebook.ui import magics

pytestmark = pytest.mark.integration

#: Timeout in seconds of steps that take a few seconds on an idle machine.
LONG = 120.0


@pytest.fixture
def shell(sc: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    # No test here runs a task of a `tfd.Cluster`.
    monkeypatch.setenv("TFD_PRELOAD", "off")
    shell = InteractiveShell()
    magics.load_ipython_extension(shell)
    shell.user_ns.update(read_rows=read_rows, square_rows=square_rows, raise_error=raise_error)
    shell.user_ns["rows"] = sc.parallelize(range(20), 4)
    yield shell
    for cluster in running().values():
        cluster.fail(errors.SparkError("the test is over"))
    until(lambda: not running(), LONG)
    magics.unload_ipython_extension(shell)
    shell.history_manager.end_session()


def read_rows(args: Any, ctx: Any) -> None:
    print("received", args, flush=True)
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        feed.next_batch(4)


def square_rows(args: Any, ctx: Any) -> None:
    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        batch = feed.next_batch(4)
        if batch:
            feed.batch_results([(row if isinstance(row, int) else row.id) ** 2 for row in batch])


def raise_error(args: Any, ctx: Any) -> None:
    raise ValueError("no such digit")


def spark(shell: InteractiveShell, line: str) -> Any:
    return shell.run_line_magic("tfd_spark", line)


def test_run_train_status_and_shutdown(shell: Any, capsys: Any) -> None:
    cluster = spark(shell, "run read_rows --args (1,2) --executors 2 -o c")
    assert shell.user_ns["c"] is cluster
    assert "runs on Spark; it is in the variable 'c'" in capsys.readouterr().out
    spark(shell, "train rows --epochs 2")
    assert "has consumed all rows" in capsys.readouterr().out
    view = spark(shell, "status")
    assert isinstance(view, views.View)
    assert "2 of 2 nodes have reported" in repr(view)
    frame = spark(shell, "status --frame")
    assert list(frame["node"]) == ["worker:0", "worker:1"]
    until(lambda: spark(shell, "status --frame")["rows"].sum() == 40, LONG)
    until(lambda: "received (1, 2)" in cluster.logs("worker:1"), LONG)
    spark(shell, "logs worker:1")
    assert "received (1, 2)" in capsys.readouterr().out
    future = spark(shell, f"shutdown {cluster.name} --timeout {LONG} --background")
    future.result(timeout=LONG)
    assert "stopped" in repr(spark(shell, "status"))
    assert not running()


def test_inference_returns_an_rdd_or_a_dataframe(shell: Any, capsys: Any) -> None:
    from pyspark.sql import SparkSession

    spark(shell, "run square_rows --executors 2")
    assert spark(shell, "inference rows").collect() == [n * n for n in range(20)]
    shell.user_ns["frame"] = SparkSession.active().range(0, 20, 1, 4)
    results = spark(shell, "inference frame --schema 'square long'")
    assert [row.square for row in results.collect()] == [n * n for n in range(20)]
    spark(shell, f"shutdown --timeout {LONG}")
    assert "the SparkContext keeps running" in capsys.readouterr().out


def test_errors_of_the_magic(shell: Any, capsys: Any) -> None:
    future = spark(shell, "run raise_error --executors 1 --background")
    assert "%tfd_spark status --live" in capsys.readouterr().out
    # The function can fail before or after all nodes run.
    with contextlib.suppress(errors.NodeFailed):
        future.result(timeout=LONG)
    until(lambda: not running(), LONG)
    with pytest.raises(errors.NodeFailed, match="no such digit"):
        spark(shell, "shutdown")
    assert "no such digit" in repr(spark(shell, "status"))
    with pytest.raises(errors.StateError, match="no cluster is running on Spark"):
        spark(shell, "train rows")
    with pytest.raises(errors.NotEnoughSlots, match="5"):
        spark(shell, "run read_rows --executors 5")
    with pytest.raises(errors.UnknownName, match="no variable 'nothing'"):
        spark(shell, "run nothing")
    with pytest.raises(errors.UnknownName, match="no cluster 'other'"):
        spark(shell, "shutdown other")


def test_check_prints_and_returns_findings(shell: Any, capsys: Any) -> None:
    findings = spark(shell, "check --executors 2")
    assert "2 slots, 2 nodes requested" in capsys.readouterr().out
    assert not [finding for finding in findings if finding.severity == "error"]


def test_any_thread_finds_the_session(shell: Any, capsys: Any) -> None:
    """Spark's active session is set only in the thread that created it."""
    findings = jobs.in_background(lambda: spark(shell, "check --executors 3"), "other").result(LONG)
    assert findings.codes == ("TFD870",)


def test_a_cluster_on_spark_is_listed_with_all_clusters(shell: Any, capsys: Any) -> None:
    messages: list[Any] = []
    session = Session(lambda message, buffers: messages.append(message), everything=True)
    hub.join(session)
    try:
        hub.receive(session, {"kind": "hello", "client": "me"})
        cluster = spark(shell, "run read_rows --executors 2")
        first = registry.running_clusters()[cluster.name]
        assert registry.running_clusters()[cluster.name] is first
        (row,) = commands.perform({"command": "list"})
        assert row | {"name": ""} == {
            **{"name": "", "state": "ready", "launcher": "spark", "planned": 2},
            **{"observed": 2, "reading": 0, "lease": None},
        }
        assert "worker:1" in commands.perform({"command": "snapshot", "name": cluster.name})["text"]
        text = repr(shell.run_line_magic("tfd_cluster", f"status {cluster.name}"))
        assert "nodes have reported" in text

        def phases() -> list[str]:
            return [
                cluster["spark"]["phase"]
                for message in list(messages)
                if message["kind"] == "state"
                for cluster in message["state"]["clusters"].values()
                if cluster and "phase" in cluster.get("spark", {})
            ]

        until(lambda: "running" in phases(), LONG)
        with pytest.raises(errors.Unsupported, match="runs on Spark"):
            commands.perform({"command": "scale", "name": cluster.name, "workers": 3})
        assert commands.perform({"command": "stop", "name": cluster.name}) == "stopped"
        until(lambda: "stopped" in phases(), LONG)
        assert "stopped" in phases()
        assert not registry.running_clusters()
    finally:
        hub.leave(session)
        hub.await_end(LONG)
