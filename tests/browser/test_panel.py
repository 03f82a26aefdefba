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
    """Return the section of the panel for a notebook's kernel."""
    return lab.panel().locator(f".tfd-lab-kernel[aria-label='kernel of {notebook}.ipynb']")


def confirm(lab: Lab, verb: str) -> None:
    """Confirm the dialog of the panel."""
    button(lab.page.locator(".jp-Dialog"), verb).click()


def test_a_cluster_of_a_cell_appears_and_is_controlled(lab: Lab) -> None:
    notebook = lab.notebook("appears", SETUP, START.replace("NAME", "appears"))
    part = kernel_of(lab, "appears")
    expect(button(part, "Load")).to_be_visible()
    notebook.run(0)
    expect(button(part, "Start cluster")).to_be_visible()
    expect(lab.panel()).to_contain_text("No cluster is running.")
    notebook.run(1)
    view = part.locator(".tfd-cluster")
    expect(view).to_contain_text("2 of 2 tasks ready")
    view.get_by_label("data workers", exact=True).fill("2")
    button(view, "Scale").click()
    expect(view).to_contain_text("3 of 3 tasks ready")
    pid = notebook.execute("print(cluster.tasks[1].pid)")
    view.locator(".tfd-toggle", has_text="data_worker:0").click()
    button(view, "Kill").click()
    confirm(lab, "Kill")
    until(lambda: notebook.execute("print(cluster.tasks[1].pid)") not in (pid, "None"), 60)
    expect(view).to_contain_text("3 of 3 tasks ready")
    button(view, "Insert code").click()
    until(lambda: "clusters()" in notebook.source(2))
    lab.picture("panel")
    notebook.restart()
    expect(button(part, "Load")).to_be_visible()
    expect(part.locator(".tfd-cluster")).to_have_count(0)
    button(part, "Load").click()
    expect(button(part, "Start cluster")).to_be_visible(timeout=30_000)


def test_panel_starts_a_cluster_in_the_kernel_of_a_notebook(lab: Lab) -> None:
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
    assert notebook.execute("print(mine.name)") == "started"
    button(part.locator(".tfd-cluster"), "Stop").click()
    confirm(lab, "Stop")
    until(lambda: notebook.execute("print(mine.state)") == "stopped")
    expect(part).to_contain_text("stopped")


def test_tabs_show_the_same_state_and_restore_a_dashboard(open_lab: Any) -> None:
    lab = open_lab(width=1600, height=1000)
    notebook = lab.notebook("tabs", TRAINING.replace("NAME", "tabs"))
    notebook.run(0)
    button(kernel_of(lab, "tabs").locator(".tfd-cluster"), "Open").click()
    steps = lab.page.locator(".tfd-lab-dashboard .tfd-stepper")
    expect(button(steps, "Pause")).to_be_enabled()
    second_lab = open_lab()
    second_lab.open("tabs")
    second_tab = kernel_of(second_lab, "tabs")
    expect(second_tab).to_contain_text("idle")
    button(steps, "Pause").click()
    expect(steps).to_contain_text("paused (from the dashboard)")
    expect(second_tab).to_contain_text("paused")
    notebook.execute("values = [coordinator.schedule(step) for _ in range(5)]")
    expect(steps).to_contain_text("5 paused")
    button(steps, "Resume").click()
    expect(steps).to_contain_text("5 ready")
    expect(second_tab).to_contain_text("5 ready")
    lab.picture("dashboard")
    lab.theme("JupyterLab Dark")
    lab.picture("dashboard-dark")
    lab.theme("JupyterLab Light")
    until(lambda: lab.workspace_contains("tfd-notebook:"))
    lab.load()
    reloaded = lab.page.locator(".tfd-lab-dashboard")
    expect(reloaded.locator(".tfd-stepper")).to_contain_text("5 ready", timeout=30_000)
    notebook.wait_ready()
    notebook.execute("cluster.stop()")
    expect(reloaded.locator(".tfd-cluster")).to_contain_text("stopped")


def test_clicks_are_queued_without_subshells(lab: Lab) -> None:
    cells = (START.replace("NAME", "old"), "print('now'); time.sleep(6)")
    notebook = lab.notebook("old", SETUP, *cells, kernel="ipykernel6")
    notebook.run(0)
    notebook.run(1)
    view = kernel_of(lab, "old").locator(".tfd-cluster")
    expect(view).to_contain_text("2 of 2 tasks ready")
    notebook.start(2)
    until(lambda: "now" in notebook.output_text(2))
    view.get_by_label("data workers", exact=True).fill("2")
    button(view, "Scale").click()
    expect(view).to_contain_text(re.compile("queued until the (running )?cell ends"))
    lab.picture("panel-queued", lab.panel())
    # Messages of the kernel still arrive.
    notebook.execute("cluster.join(timeout=60)")
    expect(view).to_contain_text("3 of 3 tasks ready", timeout=30_000)


def test_detached_cluster_is_attached_or_stopped_later(lab: Lab) -> None:
    start = START.replace("NAME", "detached") + "; print(cluster.detach(hours=2))"
    notebook = lab.notebook("detaches", SETUP, start)
    notebook.run(0)
    notebook.run(1)
    part = kernel_of(lab, "detaches")
    expect(part.locator(".tfd-cluster")).to_contain_text("detached, lease ends in 2.0 h")
    section = lab.panel().get_by_role("region", name="detached clusters")
    expect(section).to_be_hidden()
    notebook.restart()
    expect(section).to_contain_text(
        "2 of 2 tasks ready, local, lease ends in 2.0 h", timeout=60_000
    )
    lab.picture("panel-detached")
    button(section, "Renew").click()
    expect(section).to_contain_text("lease ends in 8.0 h")
    button(section, "Attach").click()
    # The panel shows it at once, because the cell also loads the package.
    expect(part.locator(".tfd-cluster")).to_contain_text("2 of 2 tasks ready", timeout=60_000)
    expect(section).to_be_hidden()
    assert notebook.execute("print(cluster.name, cluster.state)") == "detached ready"
    notebook.restart()
    expect(section).to_contain_text("2 of 2 tasks ready", timeout=60_000)
    button(section, "Stop").click()
    confirm(lab, "Stop")
    expect(section).to_be_hidden(timeout=60_000)
    output = notebook.execute("!tfd list --json")
    assert output == "[]"


GPUS = """
hosts = {
    "ada@one": range(2),
    "a-user-with-a-long-name@a-host-with-a-long-name.department.example.org": range(4),
}
launcher = tfd.launchers.Fake(gpus=hosts)
cluster = tfd.Cluster(workers=2, launcher=launcher, name="gpus")
task_host = launcher.task_hosts[0]
task_host.use_gpus("ada@one", use_percent=[97, 35], used=[70e9, 3e9])
task_host.use_gpus(list(hosts)[1], use_percent=[100, 8, 0, None], used=[80e9, 5e9, 0, None])
cluster
"""


def test_gpus_of_several_hosts_are_in_one_strip(lab: Lab) -> None:
    notebook = lab.notebook("gpus", SETUP, GPUS, "%tfd_cluster status --live")
    notebook.run(0)
    notebook.run(1)
    notebook.run(2)
    part = kernel_of(lab, "gpus")
    for strip in (part.locator(".tfd-gpus"), *map(notebook.output, (1, 2))):
        strip.scroll_into_view_if_needed()  # a live view is drawn only while it is visible
        expect(strip).to_contain_text("6 on 2 hosts, 2 not assigned, 48 % busy, 158.0 of 400 GB")
        for label in (
            "GPU 1 of ada@one (Imaginary 80GB), seen by worker:0: 35 % busy, 3.0 of 80 GB used",
            "department.example.org (Imaginary 80GB), seen by no task: utilization unknown",
        ):
            expect(strip.get_by_role("img", name=label)).to_have_count(1)
    lab.page.evaluate("window.jupyterapp.shell._hsplitPanel.setRelativeSizes([250, 1150])")
    strip = part.locator(".tfd-gpus")
    until(lambda: strip.evaluate("e => e.getBoundingClientRect().width") < 250)
    strip.scroll_into_view_if_needed()
    assert strip.evaluate("e => e.scrollWidth <= e.clientWidth")
    lab.picture("gpus-panel", lab.panel())
    lab.picture("gpus", notebook.output(2))
    lab.picture("gpus-html", notebook.output(1))
    try:
        lab.theme("JupyterLab Dark")
        lab.picture("gpus-panel-dark", lab.panel())
        lab.picture("gpus-dark", notebook.output(2))
        lab.picture("gpus-html-dark", notebook.output(1))
    finally:
        lab.theme("JupyterLab Light")
