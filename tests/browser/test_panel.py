"""The panel and the dashboard in JupyterLab, with real kernels and real clusters."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Locator, expect

from tests._waiting import until
from tests.browser._lab import Lab
from tests.browser.test_widgets import SETUP, TRAINING, button

START = "cluster = tfd.Cluster(data_workers=1, name='NAME')"


def kernel_of(lab: Lab, notebook: str) -> Locator:
    """Return the part of the panel that is about a notebook's kernel."""
    return lab.panel().locator(f".tfd-lab-kernel[aria-label='kernel of {notebook}.ipynb']")


def yes(lab: Lab) -> None:
    """Confirm what the panel asks."""
    button(lab.page.locator(".jp-Dialog"), "Yes").click()


def test_a_cluster_that_a_cell_starts_appears_by_itself_and_is_steered(lab: Lab) -> None:
    notebook = lab.notebook("appears", SETUP, START.replace("NAME", "appears"))
    part = kernel_of(lab, "appears")
    expect(button(part, "Load")).to_be_visible()
    notebook.run(0)
    expect(button(part, "Start cluster")).to_be_visible()
    expect(lab.panel()).to_contain_text("No cluster is running.")
    notebook.run(1)
    view = part.locator(".tfd-cluster")
    expect(view).to_contain_text("2 of 2 tasks ready")
    view.get_by_label("data workers").fill("2")
    button(view, "Scale").click()
    expect(view).to_contain_text("3 of 3 tasks ready")
    pid = notebook.ask("print(cluster.tasks[1].pid)")
    view.locator(".tfd-toggle", has_text="data_worker:0").click()
    button(view, "Kill").click()
    yes(lab)
    until(lambda: notebook.ask("print(cluster.tasks[1].pid)") not in (pid, "None"), 60)
    expect(view).to_contain_text("3 of 3 tasks ready")
    button(view, "Insert code").click()
    until(lambda: "clusters()" in notebook.source(2))
    lab.picture("panel")
    notebook.restart()
    expect(button(part, "Load")).to_be_visible()
    expect(part.locator(".tfd-cluster")).to_have_count(0)
    button(part, "Load").click()
    expect(button(part, "Start cluster")).to_be_visible(timeout=30_000)


def test_a_cluster_is_started_from_the_panel_in_the_kernel_of_its_notebook(lab: Lab) -> None:
    notebook = lab.notebook("started", SETUP)
    notebook.run(0)
    part = kernel_of(lab, "started")
    button(part, "Start cluster").click()
    form = part.locator(".tfd-start")
    form.get_by_label("data workers").fill("1")
    form.get_by_label("name", exact=True).fill("started")
    form.get_by_label("variable").fill("mine")
    lab.picture("panel-form", lab.panel())
    button(form, "Start").click()
    expect(part.locator(".tfd-cluster")).to_contain_text("2 of 2 tasks ready", timeout=60_000)
    expect(part).to_contain_text("Cluster started was started. Variable: mine.")
    assert notebook.ask("print(mine.name)") == "started"
    button(part.locator(".tfd-cluster"), "Stop").click()
    yes(lab)
    until(lambda: notebook.ask("print(mine.state)") == "stopped")
    expect(part).to_contain_text("stopped")


def test_two_tabs_see_the_same_and_a_dashboard_comes_back(open_lab: Any) -> None:
    lab = open_lab(width=1600, height=1000)
    notebook = lab.notebook("tabs", TRAINING.replace("NAME", "tabs"))
    notebook.run(0)
    button(kernel_of(lab, "tabs").locator(".tfd-cluster"), "Open").click()
    steps = lab.page.locator(".tfd-lab-dashboard .tfd-stepper")
    expect(button(steps, "Pause")).to_be_enabled()
    other = open_lab()
    other.open("tabs")
    theirs = kernel_of(other, "tabs")
    expect(theirs).to_contain_text("idle")
    button(steps, "Pause").click()
    expect(steps).to_contain_text("paused (from the panel)")
    expect(theirs).to_contain_text("paused")
    notebook.ask("values = [coordinator.schedule(step) for _ in range(5)]")
    expect(steps).to_contain_text("5 paused")
    button(steps, "Resume").click()
    expect(steps).to_contain_text("5 ready")
    expect(theirs).to_contain_text("5 ready")
    lab.picture("dashboard")
    lab.theme("JupyterLab Dark")
    lab.picture("dashboard-dark")
    lab.theme("JupyterLab Light")
    until(lambda: lab.workspace_has("tfd-notebook:"))
    lab.load()
    again = lab.page.locator(".tfd-lab-dashboard")
    expect(again.locator(".tfd-stepper")).to_contain_text("5 ready", timeout=30_000)
    notebook.wait_ready()
    notebook.ask("cluster.stop()")
    expect(again.locator(".tfd-cluster")).to_contain_text("stopped")


def test_an_old_kernel_says_that_clicks_wait_for_the_cell(lab: Lab) -> None:
    cells = (START.replace("NAME", "old"), "print('now'); time.sleep(6)")
    notebook = lab.notebook("old", SETUP, *cells, kernel="ipykernel6")
    notebook.run(0)
    notebook.run(1)
    view = kernel_of(lab, "old").locator(".tfd-cluster")
    expect(view).to_contain_text("2 of 2 tasks ready")
    notebook.begin(2)
    until(lambda: "now" in notebook.said(2))
    view.get_by_label("data workers").fill("2")
    button(view, "Scale").click()
    expect(view).to_contain_text(re.compile("queued until the (running )?cell ends"))
    lab.picture("panel-queued", lab.panel())
    # What the kernel says arrives all the same.
    notebook.ask("cluster.join(timeout=30)")
    expect(view).to_contain_text("3 of 3 tasks ready", timeout=30_000)


def test_a_detached_cluster_is_taken_up_or_stopped_when_its_kernel_is_gone(lab: Lab) -> None:
    start = START.replace("NAME", "detached") + "; print(cluster.detach(hours=2))"
    notebook = lab.notebook("detaches", SETUP, start)
    notebook.run(0)
    notebook.run(1)
    part = kernel_of(lab, "detaches")
    expect(part.locator(".tfd-cluster")).to_contain_text("detached, kept for 2.0 h")
    section = lab.panel().get_by_role("region", name="detached clusters")
    expect(section).to_be_hidden()
    notebook.restart()
    expect(section).to_contain_text("2 of 2 tasks ready, local, kept for 2.0 h", timeout=60_000)
    lab.picture("panel-detached")
    button(section, "Renew").click()
    expect(section).to_contain_text("kept for 8.0 h")
    button(section, "Attach").click()
    # The panel sees it at once, since the cell loads the package, too.
    expect(part.locator(".tfd-cluster")).to_contain_text("2 of 2 tasks ready", timeout=60_000)
    expect(section).to_be_hidden()
    assert notebook.ask("print(cluster.name, cluster.state)") == "detached ready"
    notebook.restart()
    expect(section).to_contain_text("2 of 2 tasks ready", timeout=60_000)
    button(section, "Stop").click()
    yes(lab)
    expect(section).to_be_hidden(timeout=60_000)
    said = notebook.ask("!tfd list --json")
    assert said == "[]"


GPUS = """
hosts = {
    "ada@one": range(2),
    "a-user-with-a-long-name@a-host-with-a-long-name.department.example.org": range(4),
}
launcher = tfd.launchers.Fake(gpus=hosts)
cluster = tfd.Cluster(workers=2, launcher=launcher, name="gpus")
launcher.nodes[0].use_gpus("ada@one", use_percent=[97, 35], used=[70e9, 3e9])
launcher.nodes[0].use_gpus(list(hosts)[1], use_percent=[100, 8, 0, None], used=[80e9, 5e9, 0, None])
cluster
"""


def test_gpus_of_several_hosts_are_in_one_strip(lab: Lab) -> None:
    notebook = lab.notebook("gpus", SETUP, GPUS, "%tfd_cluster status --live")
    notebook.run(0)
    notebook.run(1)
    notebook.run(2)
    part = kernel_of(lab, "gpus")
    for strip in (part.locator(".tfd-gpus"), *map(notebook.output, (1, 2))):
        strip.scroll_into_view_if_needed()  # a live view is drawn where it is seen
        expect(strip).to_contain_text("6 on 2 hosts, 2 free, 48 % busy, 158.0 of 400 GB used")
        for words in (
            "GPU 1 of ada@one (Imaginary 80GB), seen by worker:0: 35 % busy, 3.0 of 80 GB used",
            "department.example.org (Imaginary 80GB), seen by no task: use unknown",
        ):
            expect(strip.get_by_role("img", name=words)).to_have_count(1)
    lab.page.evaluate("window.jupyterapp.shell._hsplitPanel.setRelativeSizes([250, 1150])")
    strip = part.locator(".tfd-gpus")
    until(lambda: strip.evaluate("e => e.getBoundingClientRect().width") < 250)
    strip.scroll_into_view_if_needed()
    assert strip.evaluate("e => e.scrollWidth <= e.clientWidth")
    lab.picture("gpus-panel", lab.panel())
    lab.picture("gpus", notebook.output(2))
    lab.picture("gpus-twin", notebook.output(1))
    try:
        lab.theme("JupyterLab Dark")
        lab.picture("gpus-panel-dark", lab.panel())
        lab.picture("gpus-dark", notebook.output(2))
        lab.picture("gpus-twin-dark", notebook.output(1))
    finally:
        lab.theme("JupyterLab Light")
