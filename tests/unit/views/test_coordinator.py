"""Views of a coordinator and of its values."""

from __future__ import annotations

from typing import Any

import pytest

from tfd_notebook import views
from tfd_notebook.coordinator.values import VALUE_STATES
from tfd_notebook.model.snapshot import CoordinatedRow, CoordinatorRow, Snapshot, as_dict
from tfd_notebook.views import formatting

SCRIPT = "\x1b[2J<script>alert('&')</script>"
ROW = CoordinatorRow(
    "paused",
    "by request",
    {"queued": 0, "paused": 12, "ready": 1_000},
    120.0,
    (1.0, 2.0, 30.0),
    (0.2, 4.0, 5_000.0),
    (40.0, 30.0, 7_000.0),
    (
        CoordinatedRow(0, "running", 17, "step", 0.25, 500, 0, 0, 2),
        CoordinatedRow(1, "lost", done=499, failed=1, lost=3, built=1, unbuilt=4),
    ),
    {"step": 3},
    {"ps:0": 4_000_000},
    "There are too few closures.",
    break_on_failure=True,
)


def snapshot(row: CoordinatorRow | None) -> Snapshot:
    return Snapshot(1, 0.0, "train", "local", "ready", coordinator=row)


@pytest.mark.parametrize("shown", [views.text(snapshot(ROW), 400), views.html(snapshot(ROW))])
def test_both_views_are_complete(shown: str) -> None:
    for words in (
        "‖ paused (by request)",
        "12 paused, 1,000 ready",
        "120 closures/s",
        "about 40 s left (30 s to 1.9 h)",
        "waited p50 1.0 ms, p90 2.0 ms, p99 30 ms",
        "ran p50 0.2 ms, p90 4.0 ms, p99 5.0 s",
        "ps:0 4.0 MB",
        "step 3",
        "breaks on failure",
        "worker:0",
        "► running",
        "250 ms",
        "∅ lost",
        "1, 4 failed",
        "There are too few closures.",
    ):
        assert words in shown


@pytest.mark.parametrize("width", [40, 80, 110])
def test_text_stays_within_its_width(width: int) -> None:
    lines = views.text(snapshot(ROW), width).splitlines()
    assert max(map(formatting.columns_of, lines)) <= width


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_views_support_any_number_of_workers(count: int) -> None:
    rows = tuple(CoordinatedRow(i, "idle") for i in range(count))
    row = CoordinatorRow("idle", workers=rows)
    for shown in views.coordinator_bundle(row).values():
        assert ("… and 950 more (950 idle)" in shown) == (count == 1000)
        assert shown.count("worker:") == min(count, 50)
        assert "no closure yet" in shown


def test_external_text_is_escaped_in_both_views() -> None:
    row = CoordinatorRow(
        "paused",
        SCRIPT,
        workers=(CoordinatedRow(0, "running", 1, SCRIPT),),
        traces={SCRIPT: 1},
        limit=SCRIPT,
    )
    bundle = views.coordinator_bundle(row)
    assert "<script" not in bundle["text/html"]
    assert "\x1b" not in bundle["text/plain"]
    table = views.values_table([{**RECORD, "function": SCRIPT, "error": SCRIPT}], {"failed": 1})
    assert "<script" not in table.html()
    assert "\x1b" not in table.text()


def test_snapshot_without_a_coordinator_shows_none() -> None:
    assert "coordinator" not in views.text(snapshot(None))
    assert "coordinator" not in views.html(snapshot(None))
    assert as_dict(snapshot(None))["coordinator"] is None
    assert as_dict(snapshot(ROW))["coordinator"]["workers"][1]["lost"] == 3  # type: ignore[index]


RECORD: dict[str, Any] = {
    "id": 7,
    "function": "step",
    "state": "failed",
    "worker": 1,
    "attempts": 2,
    "queue_ms": 3.0,
    "run_ms": None,
    "fetch_ms": None,
    "error": "Graph execution error:\n\nDetected at node x\n  File 'y', line 1\n\nbad input [Op:z]",
}


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_views_support_any_number_of_values(count: int) -> None:
    table = views.values_table([dict(RECORD, id=i) for i in range(count)], {"failed": count + 1})
    assert len(table) == count
    shown = table.text(100)
    assert shown.count("bad input [Op:z]") == count
    assert "Detected at" not in shown
    assert f"{count:,} shown of {count + 1:,}: {count + 1:,} failed" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_states_have_symbols() -> None:
    for state in VALUE_STATES:
        assert formatting.sign(state) != "·"
