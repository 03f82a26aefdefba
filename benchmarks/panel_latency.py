"""From a click in the panel's dashboard to its effect in the kernel, while the kernel is busy.

A is while a cell computes in Python, B while a cell sleeps; each in a kernel of its own, the first
click included. What counts is the time from the browser's event to the moment at which the
coordinator is paused or goes on, by the clock that both have.
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
    """Return the milliseconds of so many clicks while a cell is busy in that way."""
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
    # Not to the front: the dashboard stays there.
    notebook.evaluate("w.content.activeCellIndex = 1; return null;")
    notebook.evaluate(
        "w.sessionContext.session.kernel.requestExecute({code: args[0]}); return null;",
        BUSY[name].replace("SECONDS", str(seconds)),
    )
    lab.page.wait_for_timeout(500)
    for number in range(clicks):
        words = ("Pause", "Resume")[number % 2]
        stepper.get_by_role("button", name=words, exact=True).click()
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
        found = {name: measure(lab, name, clicks) for name in BUSY}
        lab.shut_down_kernels()
    for name, times in found.items():
        last = sorted(times)[max(0, round(0.95 * len(times)) - 1)]
        print(
            f"while a cell {name}: median {statistics.median(times):.0f} ms, 95 % within "
            f"{last:.0f} ms, first {times[0]:.0f} ms"
        )
    result = _pairs.compare(found["computes"], found["sleeps"])
    _pairs.report("panel_latency", result, "ms, while a cell computes and while one sleeps")


if __name__ == "__main__":
    main()
