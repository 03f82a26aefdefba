"""A cluster on Spark in text, HTML, tables and on the bus: from its rows, and from nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests._patch import merged
from tests.unit.test_views import ESCAPE, Balance
from tfd_notebook import views
from tfd_notebook.bus.snapshot_feed import SnapshotFeed
from tfd_notebook.model.snapshot import NODE_COLUMNS, NodeRow, Snapshot, SparkRow, as_dict
from tfd_notebook.remote_kernel.bus_client import _snapshot

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


def seen(*nodes: NodeRow, phase: str = "feeding", **fields: Any) -> Snapshot:
    given: dict[str, Any] = {"reserved": len(nodes), "needed": len(nodes), **fields}
    row = SparkRow(phase, NOW - 12, nodes=nodes, **given)
    return Snapshot(1, NOW, "spark", "spark", row.state, spark=row)


FEEDING = seen(
    NodeRow("chief", 0, executor="1", host="node-b", pid=17, state="running", gpu="0,1"),
    worker(0),
    worker(1, queue_depth=8, log=("epoch 1", "epoch 2")),
    application="app-17",
    tensorboard="http://node-b:6006",
)
FAILED = seen(
    worker(0, state="stopped"),
    worker(1, state="failed", error=TRACE, log=("step 1", "step 2")),
    phase="failed",
    error=TRACE,
    reason="worker:1 failed, and the others were stopped",
)


def test_text_tells_phase_nodes_and_what_is_fed() -> None:
    said = views.text(FEEDING, 250)
    assert "► feeding for 12 s (phase 4 of 5)" in said
    assert "3 of 3 nodes have reported" in said
    assert "3,000 rows/s" in said
    assert "24,000 rows fed" in said
    assert "TensorBoard at http://node-b:6006" in said
    (line,) = [line for line in said.splitlines() if line.startswith("worker:0")]
    for word in ("► running", "node-a", "4000", "12,000", "1,500", "3 of 8", "250 ms ago"):
        assert word in line
    assert "0,1" in said
    assert "epoch 2" not in said  # nothing is wrong there


def test_text_shows_the_error_with_its_traceback_and_the_last_lines() -> None:
    said = views.text(FAILED, 110)
    assert '    batch["lable"]' in said
    assert "worker:1 failed, and the others were stopped" in said
    assert "the last lines of worker:1:" in said
    assert "  step 2" in said
    assert "✗ failed since 12 s" in said


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_text_stays_within_its_width(width: int) -> None:
    long = worker(7, host="a-very-long-name-of-a-host.example.internal" * 3, log=("x" * 500,))
    for one in (FEEDING, FAILED, seen(long), seen(replace(long, state="lost", error="y" * 300))):
        wide = [line for line in views.text(one, width).splitlines() if len(line) > width]
        assert not wide or width < 80, wide


def test_reservations_are_seen_before_any_node_is() -> None:
    early = seen(phase="reserving", reserved=1, needed=4, reason="3 executors are still to report")
    said = views.text(early)
    assert "◌ reserving for 12 s (phase 1 of 5) · 1 of 4 nodes have reported" in said
    assert "3 executors are still to report" in said
    assert early.state == "starting"
    assert views.brief(early) | {"name": ""} == {
        **{"name": "", "state": "starting", "launcher": "spark", "planned": 4},
        **{"observed": 0, "reading": 0, "lease": None},
    }


def test_many_nodes_are_cut_and_those_that_failed_come_first() -> None:
    many = seen(*(worker(i) for i in range(60)), worker(60, state="failed", error="gone"))
    said = views.text(many, 110)
    assert "… and 11 more (11 running)" in said
    assert said.index("worker:60") < said.index("worker:0 ")
    assert many.state == "degraded"
    Balance(views.html(many))


def test_html_is_escaped_and_whole() -> None:
    hostile = seen(
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


def test_nodes_are_a_dataframe() -> None:
    frame = views.View(FEEDING).to_frame()
    assert tuple(frame.columns) == NODE_COLUMNS
    assert list(frame.node) == ["chief:0", "worker:0", "worker:1"]
    assert frame.rows_per_s.sum() == 3000
    assert list(seen(phase="reserving").nodes_frame().columns) == list(NODE_COLUMNS)
    spark: Any = as_dict(FEEDING)["spark"]
    assert spark["nodes"][1]["executor"] == "0"


def test_the_bus_tells_what_changed_and_a_reader_makes_the_rows_of_it() -> None:
    feed = SnapshotFeed()
    tree: Any = feed.whole([FEEDING])
    assert _snapshot(tree["clusters"]["spark"], 1).spark == FEEDING.spark
    assert FEEDING.spark is not None
    chief, first, second = FEEDING.spark.nodes
    fed = replace(FEEDING.spark, nodes=(chief, first, replace(second, rows=12_500)))
    patch = feed.patch([replace(FEEDING, spark=fed)])
    assert patch == {"clusters": {"spark": {"spark": {"nodes": {"worker:1": {"rows": 12_500}}}}}}
    feed.patch([FAILED])
    again = SnapshotFeed()
    told = merged(again.whole([FEEDING]), again.patch([FAILED]))
    assert _snapshot(told["clusters"]["spark"], 2).spark == FAILED.spark


def test_a_cluster_that_is_fed_nothing_is_not_worth_a_message() -> None:
    feed = SnapshotFeed()
    idle = [seen(worker(0, rows_per_s=0.0, batch_age_s=700.0 + i / 10)) for i in range(600)]
    feed.whole(idle[:1])
    assert not any(feed.patch([one]) for one in idle)
    # While it is young, its age is told once a second at most.
    young = [seen(worker(0, batch_age_s=i / 10)) for i in range(100)]
    told = [patch for one in young if (patch := feed.patch([one]))]
    assert 5 <= len(told) <= 11
