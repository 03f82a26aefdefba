"""Rows of Python stacks, and the functions of datasets that do not return."""

from __future__ import annotations

from typing import Any

from tfd_notebook import views
from tfd_notebook.model.stacks import FIELDS, TaskStacks, blocked_functions, stack_records


def frame(function: str, users: bool = True, seconds: float | None = None, **more: Any) -> Any:
    shared = {"function": function, "file": f"/data/{function}.py", "line": 7}
    return {**shared, "users": users, "seconds": seconds, **more}


def thread(*frames: Any, pipeline: bool = True) -> Any:
    return {
        "name": "tf.data" if pipeline else "MainThread",
        "pipeline": pipeline,
        "frames": [*frames],
    }


def task(*threads: Any, note: str = "") -> TaskStacks:
    return {"note": note, "threads": [*threads]}


WRAPPER, WAIT = frame("wrapper", False, 9.04), frame("wait", False, 9.04)
DECODE = frame("decode", seconds=9.04, file="/tmp/ipykernel_5/77.py", line=3)


def cell_of(file: str) -> str:
    return "In[4]" if file.startswith("/tmp/ipykernel") else ""


def test_row_names_the_innermost_frame_of_the_users_code() -> None:
    helper = frame("helper", seconds=2.5)
    (row,) = stack_records({"data_worker:0": task(thread(WRAPPER, DECODE, helper, WAIT))}, cell_of)
    assert set(row) == set(FIELDS)
    assert {name: row[name] for name in FIELDS[:-1]} == {
        "task": "data_worker:0",
        "thread": "tf.data",
        "function": "helper",
        "file": "/data/helper.py",
        "line": 7,
        "seconds": 2.5,
        "note": "",
    }
    assert [entry["function"] for entry in row["stack"]] == ["wrapper", "decode", "helper", "wait"]
    assert row["stack"][1] == {"function": "decode", "file": "In[4]", "line": 3, "seconds": 9.0}


def test_thread_without_code_of_the_user_has_its_innermost_frame() -> None:
    (row,) = stack_records({"worker:0": task(thread(WRAPPER, WAIT, pipeline=False))}, cell_of)
    assert (row["thread"], row["function"]) == ("MainThread", "wait")


def test_task_without_threads_has_one_row_with_the_reason() -> None:
    stacks = {"worker:0": task(note="no reply within 2 s"), "ps:0": task(), "ps:1": task(thread())}
    rows = stack_records(stacks, cell_of)
    assert [(row["task"], row["note"]) for row in rows] == [
        ("worker:0", "no reply within 2 s"),
        ("ps:0", "no Python code runs"),
    ]
    assert all(set(row) == set(FIELDS) for row in rows)


def test_table_shows_file_names_and_keeps_whole_paths() -> None:
    stacks = {
        "data_worker:0": task(thread(frame("decode", seconds=9.04))),
        "data_worker:1": task(note="a thread <holds> the GIL"),
    }
    table = views.stacks_table(stack_records(stacks, cell_of))
    lines = table.text().splitlines()
    assert lines[0].split() == ["task", "thread", "function", "file", "line", "seconds", "note"]
    assert lines[1].split() == ["data_worker:0", "tf.data", "decode", "decode.py", "7", "9"]
    assert lines[2].split()[1:] == ["a", "thread", "<holds>", "the", "GIL"]
    assert "&lt;holds&gt;" in table.html()
    assert table.records()[0]["file"] == "/data/decode.py"
    assert list(table.to_frame().columns) == list(FIELDS)
    assert views.stacks_table([]).text() == "no tasks"


def test_blocked_function_is_the_one_that_tensorflow_called() -> None:
    helper = frame("helper", seconds=0.0)  # called again and again
    waits = thread(WRAPPER, DECODE, helper, WAIT)
    stacks = {"data_worker:0": task(waits, waits), "data_worker:1": task(waits)}
    (blocked,) = blocked_functions(stacks, lambda site: f"{cell_of(site[0])}, line {site[1]}", 3.0)
    assert (blocked.function, blocked.line, blocked.seconds) == ("decode", 3, 9.04)
    assert str(blocked) == "decode (In[4], line 3) in data_worker:0, data_worker:1"


def test_only_functions_of_datasets_with_a_known_time_are_blocked() -> None:
    stacks = {
        "data_worker:0": task(
            thread(frame("quick", seconds=0.5)),
            thread(frame("unknown")),
            thread(frame("main", seconds=50.0), pipeline=False),
            thread(frame("wait", False, 50.0)),
        )
    }
    assert blocked_functions(stacks, str, 3.0) == []


def test_longest_call_is_first_and_many_tasks_are_counted() -> None:
    stacks = {
        f"data_worker:{i}": task(
            thread(frame("fast", seconds=4.0)), thread(frame("slow", seconds=9.0))
        )
        for i in range(5)
    }
    blocked = blocked_functions(stacks, lambda site: "x.py:7", 3.0)
    assert list(map(str, blocked)) == [
        f"{name} (x.py:7) in data_worker:0, data_worker:1, data_worker:2 and 2 others"
        for name in ("slow", "fast")
    ]
