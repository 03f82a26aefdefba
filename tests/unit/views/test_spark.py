"""A cluster on Spark in text, HTML, tables and on the bus, built from its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests._patch import merged
from tests.unit.views.test_views import ESCAPE, Balance
from tfd_notebook import views
from tfd_notebook.bus.snapshot_feed import SnapshotFeed
from tfd_notebook.model.snapshot import NODE_COLUMNS, NodeRow, Snapshot, SparkRow, as_dict
from tfd_notebook.net import messages

NOW = 2000.0
TRACE = """worker:1: the function raised ValueError: no such column
Traceback (most recent call last):
  File "train.py", line 3, in train
    batch["lable"]
ValueError: no such column"""


def worker(index: int = 0, **fields: Any) -> NodeRow:
    given: dict[str, Any] = {
        "executor": str(index),
        "host": "node-a",
        "pid": 4000 + index,
        "state": "running",
        "rows": 12_000,
        "rows_per_s": 1500.0,
        "queue_depth": 3,
        "queue_capacity": 8,
        "batch_age_s": 0.25,
        **fields,
    }
    return NodeRow("worker", index, **given)


def snapshot_of(*nodes: NodeRow, phase: str = "feeding", **fields: Any) -> Snapshot:
    given: dict[str, Any] = {"reserved": len(nodes), "needed": len(nodes), **fields}
    row = SparkRow(phase, NOW - 12, nodes=nodes, **given)
    return Snapshot(1, NOW, "spark", "spark", row.state, spark=row)


FEEDING = snapshot_of(
    NodeRow("chief", 0, executor="1", host="node-b", pid=17, state="running", gpu="0,1"),
    worker(0),
    worker(1, queue_depth=8, log=("epoch 1", "epoch 2")),
    application="app-17",
    tensorboard="http://node-b:6006",
)
FAILED = snapshot_of(
    worker(0, state="stopped"),
    worker(1, state="failed", error=TRACE, log=("step 1", "step 2")),
    phase="failed",
    error=TRACE,
    reason="worker:1 failed, and the others were stopped",
)


def test_text_shows_phase_nodes_and_feeds() -> None:
    text = views.text(FEEDING, 250)
    assert "► feeding for 12 s (phase 4 of 5)" in text
    assert "3 of 3 nodes have reported" in text
    assert "3,000 rows/s" in text
    assert "24,000 rows fed" in text
    assert "TensorBoard at http://node-b:6006" in text
    (line,) = [line for line in text.splitlines() if line.startswith("worker:0")]
    for word in ("► running", "node-a", "4000", "12,000", "1,500", "3 of 8", "250 ms ago"):
        assert word in line
    assert "0,1" in text
    assert "epoch 2" not in text  # it has no problem


def test_text_shows_the_error_with_traceback_and_log() -> None:
    text = views.text(FAILED, 110)
    assert '    batch["lable"]' in text
    assert "worker:1 failed, and the others were stopped" in text
    assert "the last lines of worker:1:" in text
    assert "  step 2" in text
    assert "✗ failed since 12 s" in text


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_text_stays_within_its_width(width: int) -> None:
    long = worker(7, host="a-very-long-name-of-a-host.example.internal" * 3, log=("x" * 500,))
    for item in (
        FEEDING,
        FAILED,
        snapshot_of(long),
        snapshot_of(replace(long, state="lost", error="y" * 300)),
    ):
        wide = [line for line in views.text(item, width).splitlines() if len(line) > width]
        assert not wide or width < 80, wide


def test_reservations_are_shown_before_nodes() -> None:
    early = snapshot_of(
        phase="reserving", reserved=1, needed=4, reason="3 executors are still to report"
    )
    text = views.text(early)
    assert "◌ reserving for 12 s (phase 1 of 5) · 1 of 4 nodes have reported" in text
    assert "3 executors are still to report" in text
    assert early.state == "starting"
    assert views.brief(early) | {"name": ""} == {
        **{"name": "", "state": "starting", "launcher": "spark", "planned": 4},
        **{"observed": 0, "reading": 0, "lease": None},
    }


def test_failed_nodes_come_first_among_many_nodes() -> None:
    many = snapshot_of(*(worker(i) for i in range(60)), worker(60, state="failed", error="gone"))
    text = views.text(many, 110)
    assert "… and 11 more (11 running)" in text
    assert text.index("worker:60") < text.index("worker:0 ")
    assert many.state == "degraded"
    Balance(views.html(many))


def test_html_is_escaped_and_complete() -> None:
    hostile = snapshot_of(
        worker(0, host=ESCAPE, state="failed", error=ESCAPE, log=(ESCAPE,), gpu=ESCAPE),
        phase="failed",
        error=ESCAPE,
        reason=ESCAPE,
        application=ESCAPE,
        tensorboard=ESCAPE,
    )
    page = views.html(hostile)
    assert "<script>" not in page
    Balance(page)
    assert "\x1b" not in views.text(hostile)
    shown = Balance(views.html(FAILED)).text
    assert 'batch["lable"]' in shown
    assert "log of worker:1" in shown


def test_nodes_become_a_dataframe() -> None:
    frame = views.View(FEEDING).to_frame()
    assert tuple(frame.columns) == NODE_COLUMNS
    assert list(frame.node) == ["chief:0", "worker:0", "worker:1"]
    assert frame.rows_per_s.sum() == 3000
    assert list(snapshot_of(phase="reserving").nodes_frame().columns) == list(NODE_COLUMNS)
    spark: Any = as_dict(FEEDING)["spark"]
    assert spark["nodes"][1]["executor"] == "0"


def test_bus_sends_changes_from_which_readers_build_rows() -> None:
    feed = SnapshotFeed()
    tree: Any = feed.full([FEEDING])
    assert messages.snapshot(tree["clusters"]["spark"], 1).spark == FEEDING.spark
    assert FEEDING.spark is not None
    chief, first, second = FEEDING.spark.nodes
    fed = replace(FEEDING.spark, nodes=(chief, first, replace(second, rows=12_500)))
    patch = feed.patch([replace(FEEDING, spark=fed)])
    assert patch == {"clusters": {"spark": {"spark": {"nodes": {"worker:1": {"rows": 12_500}}}}}}
    feed.patch([FAILED])
    again = SnapshotFeed()
    answer = merged(again.full([FEEDING]), again.patch([FAILED]))
    assert messages.snapshot(answer["clusters"]["spark"], 2).spark == FAILED.spark


def test_cluster_without_feeds_sends_no_patches() -> None:
    feed = SnapshotFeed()
    idle = [snapshot_of(worker(0, rows_per_s=0.0, batch_age_s=700.0 + i / 10)) for i in range(600)]
    feed.full(idle[:1])
    assert not any(feed.patch([item]) for item in idle)
    # The age of a recent batch is published at most once per second.
    young = [snapshot_of(worker(0, batch_age_s=i / 10)) for i in range(100)]
    received = [patch for item in young if (patch := feed.patch([item]))]
    assert 5 <= len(received) <= 11
