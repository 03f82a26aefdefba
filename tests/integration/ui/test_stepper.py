"""Control of a coordinator in a real kernel by magics, widgets and a terminal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration._kernel import Notebook

pytestmark = [pytest.mark.integration, pytest.mark.timeout(170)]

SET_UP = """
%load_ext tfd_notebook
%tfd_cluster start --workers 2 --ps 1 --name train
import tensorflow as tf
coordinator = cluster.coordinator()
with coordinator.strategy.scope():
    total = tf.Variable(0.0)
@tf.function
def add(amount):
    total.assign_add(amount)
    return total.read_value()
@tf.function
def endless():
    number = tf.constant(0.0)
    while number < 1.0:
        number *= 1.0
    return number
unit = tf.constant(1.0)
"""
#: A cell that joins in the main thread, without another control.
JOIN = "print('joining', flush=True)\ncoordinator.join()\nprint('joined')"


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with Notebook() as notebook:
        output = notebook.run(SET_UP, timeout=150)
        assert "Error" not in output, output
        assert "it is in the variable 'cluster'" in output, output
        yield notebook


@pytest.fixture(autouse=True)
def _initial_state(notebook: Notebook) -> None:
    notebook.run("coordinator.resume(); coordinator.break_on(False)\n%tfd_join --timeout 30")


def tfd(*arguments: str) -> str:
    command = [sys.executable, "-m", "tfd_notebook", *arguments]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def coordinator_row() -> dict[str, Any]:
    """Return the row of the coordinator from ``tfd watch``."""
    row: dict[str, Any] = json.loads(tfd("watch", "train", "--once", "--json"))["coordinator"]
    return row


def test_functions_are_scheduled(notebook: Notebook) -> None:
    output = notebook.run(
        "total.assign(0.0)\n"
        "first = %tfd_schedule add --args (tf.constant(2.0),)\n"
        "several = %tfd_schedule add --times 3 --args unit\n"
        "%tfd_join\n"
        "print(len(several), max(float(v.fetch()) for v in [first, *several]))"
    )
    assert "all closures ended" in output, output
    assert output.endswith("3 5.0\n"), output
    output = notebook.run("%tfd_values --rows 3 --state ready")
    assert len(re.findall(r"\badd +✓? ?● ready", output)) == 3, output
    assert "3 shown of" in output


def test_cell_is_scheduled(notebook: Notebook) -> None:
    notebook.run(
        "factor = 3.0\n"
        "get_ipython().run_cell_magic('tfd_schedule', '--times 2', "
        "'amount = tf.constant(2.0)\\nfor _ in tf.range(3):\\n    amount *= factor\\namount')"
    )
    output = notebook.run("print([float(value.fetch()) for value in _])")
    assert output == "[54.0, 54.0]\n", output
    output = notebook.run("%%tfd_schedule\ntotal.read_value() +")
    assert "SyntaxError" in output
    assert "usage: %%tfd_schedule" in notebook.run("%%tfd_schedule --help\n1")
    assert "usage: %tfd_schedule" in notebook.run("%tfd_schedule")
    assert re.search(r"cell_\d+ +● ready", notebook.run("%tfd_values"))


def test_closures_pause_step_and_resume(notebook: Notebook) -> None:
    assert "paused" in notebook.run("%tfd_pause")
    notebook.run("values = %tfd_schedule add --times 4 --args unit")
    assert "4 paused" in notebook.run("%tfd_values --state paused")
    output = notebook.run("%tfd_join")
    assert "PausedError: [TFD601]" in output
    assert "Traceback" not in output
    assert notebook.run("%tfd_step").startswith("1 closure ended: 3 paused")
    assert notebook.run("%tfd_step 2 train").startswith("2 closures ended: 1 paused")
    assert "‖ paused (by request)" in notebook.run("%tfd_cluster status")
    assert "resumed" in notebook.run("%tfd_resume")
    assert "all closures ended" in notebook.run("%tfd_join --timeout 30 train")


def test_closure_is_cancelled(notebook: Notebook) -> None:
    output = notebook.run(
        "coordinator.pause(); value = coordinator.schedule(add, args=(unit,))\n"
        "key = len(coordinator.values) - 1\n"
        "%tfd_cancel $key\n"
        "%tfd_cancel $key\n"
        "%tfd_cancel 1000000"
    )
    assert "is cancelled" in output
    assert "had already ended" in output
    assert "UnknownName" in output


def test_join_runs_in_the_background(notebook: Notebook) -> None:
    output = notebook.run(
        "coordinator.pause(); value = coordinator.schedule(add, args=(unit,))\n"
        "joining = %tfd_join --background\n"
        "print(joining.state, joining.error)\n"
        "%tfd_resume\n"
        "joining.wait(60); print(joining)"
    )
    assert output.startswith("waiting None\n"), output
    assert output.endswith("<BackgroundJoin done>\n"), output
    assert "the background join is done" in notebook.run("%tfd_cluster status")


def test_terminal_controls_a_blocked_join(notebook: Notebook) -> None:
    notebook.run(
        "first = len(coordinator.values)\n"
        "endless_ones = %tfd_schedule endless --times 2\n"
        "values = %tfd_schedule add --times 3 --args unit"
    )
    first = int(notebook.run("print(first)"))
    cell = notebook.begin(JOIN, until="joining")
    assert "cluster 'train' is paused" in tfd("pause", "train")
    for key in (first, first + 1):
        assert tfd("cancel", "train", str(key)) == f"closure {key} is cancelled\n"
    assert tfd("step", "train", "2").startswith("2 closures ended: 1 paused")
    # No closure runs, and the join waits for a resume.
    assert (coordinator_row()["state"], coordinator_row()["reason"]) == (
        "paused",
        "from a terminal",
    )
    assert "coordinator: ‖ paused (from a terminal)" in tfd("watch", "--once")
    assert "is resumed" in tfd("resume")
    assert notebook.finish(cell).endswith("joined\n")


def test_watching_terminal_keeps_join_waiting(notebook: Notebook) -> None:
    command = [sys.executable, "-m", "tfd_notebook", "watch", "train", "--interval", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        try:
            assert watcher.stdout
            assert any("coordinator: " in line for line in watcher.stdout)
            notebook.run("coordinator.pause(); value = coordinator.schedule(add, args=(unit,))")
            cell = notebook.begin(JOIN, until="joining")
            assert any("‖ paused (by request)" in line for line in watcher.stdout)
            tfd("resume", "train")
            assert notebook.finish(cell).endswith("joined\n")
        finally:
            watcher.terminate()


def test_widget_controls_a_blocked_join(notebook: Notebook) -> None:
    notebook.run("view = get_ipython().run_line_magic('tfd_cluster', 'status --live')")
    widget = notebook.widget("cluster")

    def request(command: str, **arguments: Any) -> Any:
        return widget.request(command, name="train", **arguments)["value"]

    def coordinator() -> Any:
        return widget.cluster["coordinator"]

    notebook.run("coordinator.pause(); values = %tfd_schedule add --times 4 --args unit")
    cell = notebook.begin(JOIN, until="joining")
    request("step")
    widget.await_that(lambda: coordinator()["counts"].get("paused") == 3)
    request("break_on", failure=True)
    widget.await_that(lambda: coordinator()["break_on_failure"])
    request("resume")
    assert notebook.finish(cell).endswith("joined\n")

    cell = notebook.begin(f"value = coordinator.schedule(endless)\n{JOIN}", until="joining")
    running = widget.await_that(
        lambda: [w for w in coordinator()["workers"].values() if w.get("function") == "endless"]
    )
    request("pause", source="the notebook")
    widget.await_that(lambda: coordinator().get("reason") == "from the notebook")
    assert request("cancel", id=running[0]["id"]) is True
    assert notebook.finish(cell).endswith("joined\n")


def test_join_waits_while_a_widget_is_open(notebook: Notebook) -> None:
    notebook.run(
        "view = get_ipython().run_line_magic('tfd_cluster', 'status --live')\n"
        "coordinator.pause(); values = %tfd_schedule add --times 2 --args unit"
    )
    widget = notebook.widget("cluster")
    cell = notebook.begin(
        "print('joining', flush=True)\n"
        "try: coordinator.join()\n"
        "except Exception as error: print(type(error).__name__, 'closed:', view.closed)",
        until="joining",
    )
    widget.request("step", name="train")
    widget.await_that(lambda: widget.cluster["coordinator"]["counts"].get("paused") == 1)
    notebook.begin_on_subshell("view.close()")
    assert notebook.finish(cell).endswith("PausedError closed: True\n")


def test_stop_ends_every_wait(notebook: Notebook) -> None:
    """This is the last test, because a stopped coordinator schedules no closure."""
    notebook.run("coordinator.resume(); values = %tfd_schedule endless --times 5")
    output = notebook.run("joining = %tfd_join --background\ncoordinator.stop()\njoining.wait(60)")
    assert "StateError: [TFD105] this coordinator was stopped before its closures ended" in output
    assert "no matching closure" in notebook.run("%tfd_values --state retrying")
    assert "coordinator: ■ stopped" in notebook.run("%tfd_cluster status")
    assert "is stopped" in notebook.run("%tfd_pause")
