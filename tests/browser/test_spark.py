"""A cluster on a real Spark in JupyterLab, in the widget and in the panel."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser._lab import Lab

#: Spark and TensorFlow start slowly on a busy machine.
pytestmark = pytest.mark.timeout(300)
LONG = 180
SETUP = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tfd_notebook as tfd
%load_ext tfd_notebook
spark = tfd.spark.session(executors=2)
rows = spark.sparkContext.parallelize(range(100_000), 4)
"""
FUNCTION = """
def slowly(args, ctx):
    import time
    print("the function of", ctx.job_name, ctx.task_index, flush=True)
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        for row in feed.next_batch(100):
            if row == args:
                raise ValueError(f"row {row} is not valid")
        time.sleep(0.01)
"""


END = "from tfd_notebook.spark.local_session import session as sessions; sessions.end()"


def test_phases_and_nodes_are_shown_live(lab: Lab) -> None:
    notebook = lab.notebook(
        "on-spark",
        SETUP,
        FUNCTION,
        "started = %tfd_spark run slowly --args -1 --executors 2 --background",
        "%tfd_spark status --live",
        "cluster = started.result(); fed = cluster.train(rows, 1, wait=False)",
    )
    for cell in range(4):
        notebook.run(cell, LONG)
    view = notebook.output(3).locator(".tfd-cluster")
    spark = view.locator(".tfd-onspark")
    expect(spark).to_contain_text("2 of 2 nodes reported", timeout=LONG * 1000)
    expect(view.locator(".tfd-head")).to_contain_text("2 of 2 nodes running", timeout=LONG * 1000)
    notebook.run(4, LONG)
    phase = spark.locator("[aria-current=step]")
    expect(phase).to_contain_text("feeding", timeout=LONG * 1000)
    first = spark.locator("tbody", has_text="worker:0")
    cells = first.locator("tr").first.locator("td")
    expect(cells.nth(2)).to_have_text(re.compile(r"^[\d,.]+$"), timeout=LONG * 1000)
    expect(cells.nth(3)).to_have_text(re.compile(r"^\d of \d+$"))
    expect(cells.nth(4)).to_have_text(re.compile(r"^[\d.]+ (ms|s) ago$"))
    first.locator(".tfd-toggle").click()
    expect(first.locator(".tfd-log")).to_contain_text("the function of worker 0")
    lab.picture("spark-feeding", notebook.output(3))
    lab.theme("JupyterLab Dark")
    lab.picture("spark-feeding-dark", notebook.output(3))
    lab.theme("JupyterLab Light")
    # The panel shows it, too, and can stop it.
    panel = lab.panel()
    expect(panel.locator(".tfd-onspark")).to_contain_text("worker:1")
    lab.picture("spark-panel", panel)
    panel.get_by_role("button", name="Stop", exact=True).click()
    lab.page.locator(".jp-Dialog").get_by_role("button", name="Stop", exact=True).click()
    expect(spark).to_contain_text(re.compile("draining|stopped"), timeout=LONG * 1000)
    expect(phase).to_contain_text("stopped", timeout=LONG * 1000)
    notebook.execute(END)


def test_an_error_is_shown_with_its_traceback(lab: Lab) -> None:
    notebook = lab.notebook(
        "fails-on-spark",
        SETUP,
        FUNCTION,
        "cluster = %tfd_spark run slowly --args 7 --executors 2",
        "%tfd_spark status --live",
        "%tfd_spark train rows",
    )
    for cell in range(5):
        notebook.run(cell, LONG)
    assert "row 7 is not valid" in notebook.output_text(4)
    spark = notebook.output(3).locator(".tfd-onspark")
    expect(spark.locator("> .tfd-error")).to_contain_text("row 7 is not valid", timeout=60_000)
    expect(spark.locator("> .tfd-error")).to_contain_text("in slowly")
    expect(spark.locator("[aria-current=step]")).to_contain_text("failed")
    lab.picture("spark-failed", notebook.output(3))
    notebook.execute(END)
