"""Resolving a cluster in JupyterLab, in the widget and in the panel."""

from __future__ import annotations

from playwright.sync_api import expect

from tests._waiting import until
from tests.browser._lab import Lab
from tests.browser.test_panel import kernel_of
from tests.browser.test_widgets import SETUP, button

SERVERS = (
    SETUP
    + """
import json, signal
os.environ.pop("TF_CONFIG", None)
external = tfd.Cluster(workers=2, ps=1, name="external")
pids = {task.name: task.pid for task in external.tasks}
with open("tasks.json", "w") as file:
    json.dump(external.resolver.cluster_spec().as_dict(), file)
"""
)
#: Most of these addresses have no listener.
MANY = """
with open("many.json", "w") as file:
    json.dump({"worker": [f"127.2.{n // 250}.{n % 250 + 1}:1" for n in range(1000)]}, file)
with open("none.json", "w") as file:
    file.write("{}")
"""


def test_a_cluster_is_resolved_watched_and_attached(lab: Lab) -> None:
    notebook = lab.notebook("resolve", SERVERS, "%tfd_resolve --live")
    notebook.run(0)
    notebook.run(1)
    output = notebook.output(1)
    view = output.locator(".tfd-resolve")
    expect(view).to_contain_text("3 tasks: 3 alive")
    expect(view).to_contain_text("rule local")
    view.get_by_label("watch").check()
    notebook.execute("os.kill(pids['worker:1'], signal.SIGSTOP)")
    expect(view).to_contain_text("2 alive, 1 hung")
    expect(view).to_contain_text("1 change, newest first")
    lab.picture("resolve", output)
    lab.theme("JupyterLab Dark")
    lab.picture("resolve-dark", output)
    lab.theme("JupyterLab Light")
    notebook.execute("os.kill(pids['worker:1'], signal.SIGCONT)")
    expect(view).to_contain_text("3 tasks: 3 alive")
    view.get_by_label("resolver", exact=True).select_option("file")
    view.get_by_label("arguments of the resolver").fill('{"path": "tasks.json"}')
    button(view, "Resolve").click()
    expect(view).to_contain_text("rule argument")
    expect(view).to_contain_text("3 tasks: 3 alive")
    button(view, "Use as cluster").click()
    expect(output.locator(".tfd-cluster")).to_contain_text("3 of 3 tasks ready")
    assert notebook.execute("print(cluster.name, cluster.state)") == "found ready"
    notebook.execute("cluster.stop(); external.stop()")


def test_the_panel_resolves_a_cluster_or_shows_the_error(lab: Lab) -> None:
    notebook = lab.notebook("finds", SERVERS, MANY)
    notebook.run(0)
    notebook.run(1)
    part = kernel_of(lab, "finds")
    button(part, "Find").click()
    view = part.locator(".tfd-resolve")
    expect(view).to_contain_text("3 tasks: 3 alive")
    lab.picture("panel-find", lab.panel())
    view.get_by_label("resolver", exact=True).select_option("file")
    arguments = view.get_by_label("arguments of the resolver")
    arguments.fill('{"path": ')
    button(view, "Resolve").click()
    expect(view).to_contain_text("Invalid arguments: expected a JSON object")
    arguments.fill('{"path": "missing.json"}')
    button(view, "Resolve").click()
    expect(view).to_contain_text("file missing.json not found")
    arguments.fill('{"path": "none.json"}')
    button(view, "Resolve").click()
    expect(view).to_contain_text("no tasks")
    lab.picture("panel-find-none", lab.panel())
    arguments.fill('{"path": "many.json"}')
    button(view, "Resolve").click()
    expect(view).to_contain_text("1,000 tasks: ")
    lab.picture("panel-find-many", lab.panel())
    button(view, "All 1,000 tasks").click()
    expect(view.locator("tbody tr")).to_have_count(1000)
    button(view, "Insert cell").click()
    until(lambda: "cluster_spec" in notebook.source(2) or "attach" in notebook.source(2))
    button(part, "Close").click()
    expect(part.locator(".tfd-resolve")).to_have_count(0)
    notebook.execute("os.environ['AWS_REGION'] = 'late'")
    button(part, "Doctor").click()
    findings = part.get_by_role("region", name="findings")
    expect(findings).to_contain_text("TFD832")
    expect(findings).to_contain_text("AWS_REGION changed after the cluster had started")
    lab.picture("panel-doctor", lab.panel())
    button(findings, "Close").click()
    expect(findings).to_be_hidden()
    notebook.execute("external.stop()")
