"""Widgets in JupyterLab, even while the kernel is busy."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, expect

from tests._waiting import until
from tests.browser._lab import Lab, Notebook

SETUP = """
import os, threading, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
import tfd_notebook as tfd
%load_ext tfd_notebook
"""
TRAINING = (
    SETUP
    + """
cluster = tfd.Cluster(workers=2, ps=1, name="NAME")
coordinator = cluster.coordinator()
step = tf.function(lambda: tf.constant(1))
"""
)
SHOW = "%tfd_cluster status --live"
#: Code that keeps a kernel busy for more than two seconds after its output.
BUSY = {
    "sleeps": "print('now'); time.sleep(4)",
    "computes": "print('now'); end = time.time() + 4\nwhile time.time() < end: sum(range(1000))",
}


def button(where: Locator, name: str) -> Locator:
    return where.get_by_role("button", name=name, exact=True)


def tab(where: Locator, name: str) -> Locator:
    return where.get_by_role("tab", name=name, exact=True)


def training(lab: Lab, name: str, *cells: str) -> Notebook:
    """Return a notebook with a training cluster, shown in cell 1."""
    notebook = lab.notebook(name, TRAINING.replace("NAME", name), SHOW, *cells)
    notebook.run(0)
    notebook.run(1)
    return notebook


def test_the_form_starts_a_cluster_and_then_shows_it(lab: Lab) -> None:
    notebook = lab.notebook("form", SETUP, "%tfd_cluster")
    notebook.run(0)
    notebook.run(1)
    output = notebook.output(1)
    form = output.locator(".tfd-start")
    form.get_by_label("data workers").fill("1")
    form.get_by_label("name", exact=True).fill("from form")
    button(form, "Start").click()
    expect(form).to_contain_text("invalid cluster name 'from form'. Next: use up to 64 ")
    form.get_by_label("name", exact=True).fill("from-form")
    button(form, "Start").click()
    expect(output.locator(".tfd-cluster")).to_contain_text("2 of 2 tasks ready", timeout=90_000)
    expect(output.locator(".tfd-head")).to_contain_text("from-form")
    expect(output).to_contain_text("Cluster from-form was started. Variable: cluster.")
    expect(output).to_contain_text("%tfd_cluster start --data-workers 1 --name from-form")
    assert notebook.execute("print(cluster.name, len(cluster.tasks))") == "from-form 2"
    lab.picture("form-started", output)
    notebook.execute("cluster.stop()")
    expect(output.locator(".tfd-cluster")).to_contain_text("stopped")


def test_a_cluster_is_scaled_and_a_killed_worker_restarts(lab: Lab) -> None:
    start = "cluster = tfd.Cluster(data_workers=1, name='scaled')"
    notebook = lab.notebook("scaled", SETUP + start, SHOW)
    notebook.run(0)
    notebook.run(1)
    output = notebook.output(1)
    view = output.locator(".tfd-cluster")
    view.get_by_label("data workers", exact=True).fill("2")
    button(view, "Scale").click()
    expect(view).to_contain_text("3 of 3 tasks ready")
    assert notebook.execute("print(len(cluster.tasks))") == "3"
    pid = notebook.execute("print(cluster.tasks[1].pid)")
    view.locator(".tfd-toggle", has_text="data_worker:0").click()
    button(view, "Kill").click()
    button(view.get_by_role("alertdialog"), "Kill").click()
    expect(view).to_contain_text("data_worker:0 killed")
    row = view.locator("tbody", has_text="data_worker:0").locator("tr").first
    until(lambda: notebook.execute("print(cluster.tasks[1].pid)") not in (pid, "None"))
    expect(row).to_contain_text("ready")
    expect(row.locator("td").nth(7)).to_have_text("1")
    button(view, "Logs").click()
    expect(view.locator(".tfd-log")).to_be_visible()
    lab.picture("cluster-scaled", output)
    button(view, "Stop").click()
    button(view.get_by_role("alertdialog"), "Stop").click()
    until(lambda: notebook.execute("print(cluster.state)") == "stopped")
    expect(view).to_contain_text("stopped")


@pytest.mark.parametrize("how", BUSY)
def test_the_first_click_is_effective_while_a_cell(lab: Lab, how: str) -> None:
    notebook = training(lab, how, BUSY[how])
    output = notebook.output(1)
    tab(output, "Steps").click()
    pause = button(output, "Pause")
    expect(pause).to_be_enabled()
    notebook.start(2)
    until(lambda: "now" in notebook.output_text(2))
    pause.click()
    expect(output.locator(".tfd-state")).to_contain_text("paused (from the widget)")
    assert notebook.is_running(2)
    assert notebook.execute("print(coordinator.paused)") == "from the widget"


def test_a_join_that_blocks_a_cell_is_controlled(lab: Lab) -> None:
    notebook = training(
        lab,
        "joined",
        "coordinator.pause(); values = [coordinator.schedule(step) for _ in range(20)]; "
        "coordinator.join(); print('joined')",
    )
    output = notebook.output(1)
    tab(output, "Steps").click()
    notebook.start(2)
    expect(output.locator(".tfd-stepper")).to_contain_text("20 paused")
    button(output, "Step").click()
    expect(output.locator(".tfd-stepper")).to_contain_text("1 ready")
    output.get_by_label("n", exact=True).fill("5")
    button(output, "Step n").click()
    expect(output.locator(".tfd-stepper")).to_contain_text("6 ready")
    button(output, "worker 0").click()
    expect(button(output, "‖ worker 0")).to_be_visible()
    lab.picture("stepper-paused", output)
    button(output, "Resume").click()
    until(lambda: "joined" in notebook.output_text(2))
    frame = "print(set(coordinator.values.to_frame().worker[6:]))"
    assert notebook.execute(frame) == "{1}"


def test_many_values_are_sorted_filtered_and_inspected(lab: Lab) -> None:
    notebook = training(
        lab,
        "values",
        # 100,000 real closures would take minutes, so most are only recorded.
        "bad = tf.function(lambda x: tf.debugging.check_numerics(x, 'not <b>a</b> number'))\n"
        "store = coordinator.store\n"
        "for number in range(99_900):\n"
        "    key = store.add(f'step {number % 3}', 'trace', None)\n"
        "    store.dispatched(key, number % 2); store.running(key)\n"
        "    store.fetch(key); store.end(key, 4, number % 2)\n"
        "for _ in range(99): coordinator.schedule(step)\n"
        "coordinator.join()\n"
        "value = coordinator.schedule(bad, args=(tf.constant(float('nan')),))\n"
        "try: coordinator.join()\n"
        "except Exception as error: print(type(error).__name__)",
    )
    output = notebook.output(1)
    tab(output, "Values").click()
    assert "InvalidArgument" in notebook.run(2, timeout=170)
    view = output.locator(".tfd-values")
    expect(view).to_contain_text("100,000")
    view.get_by_label(re.compile("^State")).select_option("failed")
    expect(view).to_contain_text("1 of 100,000")
    view.locator(".tfd-gridhost").click(position={"x": 60, "y": 36})
    expect(view.locator(".tfd-details")).to_contain_text("not <b>a</b> number")
    assert view.locator(".tfd-details b", has_text=re.compile("^a$")).count() == 0
    view.get_by_label(re.compile("^State")).select_option("")
    lab.picture("values-100000", output)
    tab(output, "Timeline").click()
    expect(output.locator(".tfd-timeline")).to_contain_text("2 workers")
    lab.picture("timeline-100000", output)


def test_ranks_are_shown_in_the_timeline(lab: Lab) -> None:
    notebook = lab.notebook(
        "ranks",
        SETUP + "cluster = tfd.Cluster(workers=2, name='ranks')",
        SHOW,
        "def train(ctx):\n    time.sleep(1 + ctx.worker_num)\n"
        "    if ctx.worker_num: raise ValueError('<b>bad</b> batch')\n"
        "cluster.run(train)",
    )
    notebook.run(0)
    notebook.run(1)
    output = notebook.output(1)
    expect(tab(output, "Throughput")).to_be_visible()
    expect(tab(output, "Timeline")).to_have_count(0)
    notebook.start(2)
    tab(output, "Timeline").click()
    view = output.locator(".tfd-timeline")
    expect(view).to_contain_text("train on 2 ranks")
    until(lambda: "ValueError" in notebook.output_text(2))
    view.locator("canvas").press("ArrowDown")
    expect(view.locator(".tfd-tip")).to_contain_text("rank 1 train: failed, worker:1")
    expect(view.locator(".tfd-tip")).to_contain_text("<b>bad</b> batch")
    lab.picture("timeline-ranks", output)


def test_a_reopened_notebook_shows_the_saved_html(lab: Lab) -> None:
    start = "cluster = tfd.Cluster(data_workers=1, name='saved')"
    notebook = lab.notebook("saved", SETUP + start, SHOW)
    notebook.run(0)
    notebook.run(1)
    expect(notebook.output(1).locator(".tfd-cluster")).to_contain_text("2 of 2 tasks ready")
    notebook.save()
    notebook.close()
    lab.shut_down_kernels()
    reopened = lab.open("saved")
    expect(reopened.output(1)).to_contain_text("data_worker:0")
    assert reopened.output(1).locator(".tfd-cluster").count() == 0
    # The style of the saved HTML must not affect live views with right-aligned numbers.
    reopened.evaluate(
        "w.content.model.sharedModel.insertCell(2, {cell_type: 'code', source: args[0]});",
        SETUP + start,
    )
    reopened.run(2)
    number = lab.panel().locator(".tfd-cluster th.tfd-number").first
    assert number.evaluate("e => getComputedStyle(e).textAlign") == "right"
    lab.picture("reopened", reopened.output(1))


def test_the_dark_theme_is_applied_and_markup_is_escaped(lab: Lab) -> None:
    name = "x" * 50
    start = f"cluster = tfd.Cluster(data_workers=1, name='{name}')\n"
    notice = "cluster._monitor.notice('error', '<img src=x onerror=alert(1)>', fix='<b>none</b>')"
    notebook = lab.notebook("dark", SETUP + start + notice, SHOW)
    notebook.run(0)
    notebook.run(1)
    view = notebook.output(1).locator(".tfd-cluster")
    expect(view).to_contain_text("<img src=x onerror=alert(1)>. Next: <b>none</b>")
    assert view.locator("img").count() == 0
    try:
        lab.theme("JupyterLab Dark")
        lab.picture("cluster-dark", notebook.output(1))
        shade = view.evaluate("e => getComputedStyle(e).color")
        assert sum(map(int, re.findall(r"\d+", shade)[:3])) > 3 * 150
    finally:
        lab.theme("JupyterLab Light")
