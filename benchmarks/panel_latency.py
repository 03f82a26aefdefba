"""Latency from a click in the panel's dashboard to its effect in a busy kernel.

In A a cell computes in Python, in B a cell sleeps. Each has a separate kernel, and the first click
counts, too. The latency is the time from the browser's event until the coordinator is paused or
resumed. Both times are of the same clock.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import _pairs

SETUP = """
import time
import tfd_notebook as tfd
%load_ext tfd_notebook
cluster = tfd.Cluster(workers=1, ps=1, name="NAME")
coordinator = cluster.coordinator()
effects = []

def noted(do):
    def doing(*args):
        do(*args)
        effects.append(time.time())
    return doing

coordinator.pause, coordinator.resume = noted(coordinator.pause), noted(coordinator.resume)
"""
BUSY = {
    "sleeps": "time.sleep(SECONDS)",
    "computes": "end = time.time() + SECONDS\nwhile time.time() < end: sum(range(1000))",
}
CLICKS = """
window.clicks = [];
document.addEventListener('click', event => {
    if (event.target.closest('.tfd-stepper')) {
        window.clicks.push((performance.timeOrigin + event.timeStamp) / 1000);
    }
}, true);
"""


def measure(lab: Any, name: str, clicks: int) -> list[float]:
    """Return the latencies of `clicks` clicks while a cell runs ``BUSY[name]``, in ms."""
    seconds = 5 + clicks / 2
    notebook = lab.notebook(
        name, SETUP.replace("NAME", name), BUSY[name].replace("SECONDS", str(seconds))
    )
    notebook.run(0)
    lab.execute(
        "tfd-notebook:open-dashboard",
        {
            "kernel": notebook.evaluate("return w.sessionContext.session.kernel.id;"),
            "path": f"{name}.ipynb",
            "cluster": name,
        },
    )
    stepper = lab.page.locator(f".tfd-stepper[aria-label='steps of {name}']")
    stepper.wait_for()
    lab.page.evaluate("window.clicks.length = 0")
    # Do not activate the notebook, so that the dashboard stays in front.
    notebook.evaluate("w.content.activeCellIndex = 1; return null;")
    notebook.evaluate(
        "w.sessionContext.session.kernel.requestExecute({code: args[0]}); return null;",
        BUSY[name].replace("SECONDS", str(seconds)),
    )
    lab.page.wait_for_timeout(500)
    for number in range(clicks):
        label = ("Pause", "Resume")[number % 2]
        stepper.get_by_role("button", name=label, exact=True).click()
        lab.page.wait_for_timeout(300)
    began = lab.page.evaluate("window.clicks")
    ended = [float(each) for each in notebook.execute("print(*effects)").split()]
    assert len(began) == len(ended) == clicks, (began, ended)
    return [1e3 * (b - a) for a, b in zip(began, ended, strict=True)]


def main() -> None:
    clicks = 4 if _pairs.arguments(__doc__).quick else 40
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.browser._lab import Lab
    from tests.browser._server import launched, serving

    with (
        tempfile.TemporaryDirectory() as home,
        serving(Path(home)) as (address, notebooks),
        launched() as browser,
    ):
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        lab = Lab(page, address, notebooks, "latency", Path(home))
        lab.load()
        page.evaluate(CLICKS)
        latencies = {name: measure(lab, name, clicks) for name in BUSY}
        lab.shut_down_kernels()
    for name, times in latencies.items():
        last = sorted(times)[max(0, round(0.95 * len(times)) - 1)]
        print(
            f"while a cell {name}: p50 {statistics.median(times):.0f} ms, p95 {last:.0f} ms, "
            f"first {times[0]:.0f} ms"
        )
    result = _pairs.compare(latencies["computes"], latencies["sleeps"])
    _pairs.report("panel_latency", result, "ms, while a cell computes and while one sleeps")


if __name__ == "__main__":
    main()
