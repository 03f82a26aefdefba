"""Views of a resolved cluster, as pure functions of its snapshot."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tfd_notebook import views
from tfd_notebook.errors import UsageError
from tfd_notebook.model import resolution
from tfd_notebook.model.resolution import (
    Change,
    ResolutionSnapshot,
    RuleResult,
    TaskStatus,
    changes,
)
from tfd_notebook.resolvers.forms import read_options

ESCAPE = "\x1b[2J<script>alert('&')</script>"
RULES = (
    RuleResult("argument", "no", "no resolver was named"),
    RuleResult("tf_config", "partial", f"TF_CONFIG has no cluster {ESCAPE}"),
    RuleResult("sagemaker", "fired", "SM_HOSTS is set"),
)
TASKS = (
    TaskStatus("worker", 0, "w0:1", "alive", "worker:0", "GPU:2", 3.0),
    TaskStatus("worker", 1, "w1:1", "mismatch", "worker:0", "", 4.0, "worker:0 answers there"),
    TaskStatus("ps", 0, "p:1", "hung", reason=f"no answer {ESCAPE}"),
)
LOOK = ResolutionSnapshot("sagemaker", "SM_HOSTS", 1000.0, TASKS, RULES, f"use('{ESCAPE}')", 0.5)


def many(count: int) -> ResolutionSnapshot:
    tasks = [TaskStatus("worker", i, f"w{i}:1", "alive", f"worker:{i}") for i in range(count)]
    if count:
        tasks[-1] = replace(tasks[-1], state="refused", reason="nothing listens")
    return replace(LOOK, tasks=tuple(tasks))


def test_text_and_html_agree_and_escape_their_content() -> None:
    bundle = views.resolution_bundle(replace(LOOK, trouble=f"no answer {ESCAPE}"))
    assert bundle == views.resolution_bundle(replace(LOOK, trouble=f"no answer {ESCAPE}"))
    for shown in bundle.values():
        for words in ("SM_HOSTS", "1 alive, 1 hung, 1 mismatch", "worker:0 answers there", "GPU:2"):
            assert words in shown
        assert "TF_CONFIG has no cluster" in shown
    assert "<script" not in bundle["text/html"]
    assert "\x1b" not in bundle["text/plain"]


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_tables_have_limited_length(count: int) -> None:
    look = many(count)
    table = views.task_status_table(look, 100)
    assert len(table) == min(count, 100)
    assert list(table.to_frame().columns) == list(resolution.COLUMNS)
    assert len(table.to_frame()) == count
    shown = views.resolution_text(look, 80)
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert ("and 900 more tasks" in shown) == (count == 1000)
    if count:
        assert f"worker:{count - 1}" in shown
        assert f"worker:{count - 1}" in views.resolution_html(look)
    else:
        assert "no tasks" in shown
        assert "no tasks" in views.resolution_html(look)


def test_narrow_text_keeps_task_state_and_reason() -> None:
    shown = views.resolution_text(LOOK, 40)
    assert all(len(line) <= 40 for line in shown.partition("the next cell")[0].splitlines())
    assert "≠ mismatch" in shown
    assert "answers there" in shown


def test_suggestion_has_a_cell_and_no_table() -> None:
    look = ResolutionSnapshot(
        "local", "", 1.0, (), (RuleResult("local", "fired", "nothing else"),), "tfd.Cluster()"
    )
    shown = views.resolution_text(look)
    assert shown.startswith("no cluster yet (rule local: nothing else)")
    assert shown.endswith("    tfd.Cluster()")
    assert "no tasks" not in shown


def test_changes_are_described() -> None:
    first, second, hung = TASKS
    back = replace(hung, state="alive")
    moved = replace(first, address="w9:1")
    new = TaskStatus("worker", 2, "w2:1", "alive")
    result = changes((first, second, hung), (moved, back, new), 5.0)
    assert [(change.task, change.before, change.after) for change in result] == [
        ("worker:0", "alive", "alive"),
        ("worker:1", "mismatch", ""),
        ("ps:0", "hung", "alive"),
        ("worker:2", "", "alive"),
    ]
    assert result[0].reason == "moved from w0:1 to w9:1"
    assert changes(TASKS, TASKS, 5.0) == ()
    look = replace(LOOK, changes=result)
    for shown in views.resolution_bundle(look).values():
        assert "moved from w0:1" in shown
    frame = views.changes_table(look).to_frame()
    assert list(frame.columns) == ["time", "task", "before", "after", "reason"]
    assert list(views.changes_table(LOOK).to_frame().columns) == list(frame.columns)


def test_snapshot_is_json() -> None:
    look = replace(LOOK, changes=(Change(1.0, "ps:0", "alive", "hung"),))
    data = json.loads(json.dumps(resolution.as_json(look)))
    assert data["counts"] == {"alive": 1, "hung": 1, "mismatch": 1}
    assert list(data["tasks"][0]) == list(resolution.COLUMNS)
    assert data["changes"][0]["after"] == "hung"


def test_every_state_has_a_symbol() -> None:
    from tfd_notebook.views import formatting as figures

    for state in resolution.STATES:
        assert figures.sign(state) != figures.sign("no such state")
        assert figures.tone(state) != "quiet"


def test_options_of_a_line_are_parsed() -> None:
    options = ["port=8470", 'jobs={"ps": 1}', "path=a=b", "name=x"]
    assert read_options(options) == {"port": 8470, "jobs": {"ps": 1}, "path": "a=b", "name": "x"}
    for wrong in ("port", "=1", "a-b=1", "class=1", "resolver=slurm"):
        with pytest.raises(UsageError, match="invalid option"):
            read_options([wrong])
