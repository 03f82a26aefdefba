"""Time of the page's main thread for an update of the grid: 2,000 of 100,000 rows changed.

A is an update with the changed rows. B is an update with all rows, as without patches. In both, the
grid is sorted by a column that changes. The time includes drawing, in the shipped widget.
"""

from __future__ import annotations

import sys
from pathlib import Path

import _pairs

ROOT = Path(__file__).parents[1]
WIDGET = ROOT / "tfd_notebook" / "ui" / "widgets" / "static" / "widget.js"
PAGE = """
<!doctype html><body data-jp-theme-light="true"><div id="here" style="width: 1000px"></div></body>
"""
#: A model of anywidget, with a simulated kernel that publishes closures.
KERNEL = """
async ([rows, changed]) => {
    const { default: widget } = await import('/widget.js');
    const KINDS = {f8: Float64Array, i4: Int32Array, u1: Uint8Array, i2: Int16Array,
        u2: Uint16Array};
    const COLUMNS = [['id', 'f8'], ['function', 'i4'], ['state', 'u1'], ['worker', 'i2'],
        ['attempts', 'u2'], ['queued', 'f8'], ['dispatched', 'f8'], ['started', 'f8'],
        ['fetching', 'f8'], ['finished', 'f8']];
    const handlers = new Map();
    let seq = 0;
    const deliver = (message, buffers = []) => handlers.get('msg:custom')(message, buffers);
    const model = {
        get: name => ({view: 'values', cluster: 'c', concurrent: true, version: '0'})[name],
        on: (name, handler) => handlers.set(name, handler),
        off: () => {},
        send: message => {
            if (message.kind === 'hello') {
                deliver({kind: 'hello', protocol: message.protocol, version: '0', pid: 1,
                      known: message.client});
                deliver({kind: 'state', seq: ++seq, full: true, state: {clusters: {c: {
                    name: 'c', launcher: 'local', state: 'ready', planned: {}, requested: {},
                    observed: {}, tasks: {}, order: [], streams: {}, notices: [],
                    coordinator: {state: 'running', counts: {}, closures_per_s: 0, workers: {},
                        traces: {}, ps_bytes: {}, held: [], break_on_failure: false,
                        reduced: false},
                }}}});
            }
        },
    };
    const now = Date.now() / 1000;
    const make = (ids, full) => {
        const buffers = COLUMNS.map(([name, kind]) => Float64Array.from(ids, id =>
            name === 'id' ? id
            : name === 'function' ? id % 5
            : name === 'state' ? (full ? 4 : Math.floor(Math.random() * 7))
            : name === 'worker' ? id % 4
            : name === 'attempts' ? 1
            : now - 100 + id / 1000 + Math.random()));
        return [
            {kind: 'values', seq: ++seq, cluster: 'c', full, count: ids.length, columns: COLUMNS,
             functions: ['a', 'b', 'c', 'd', 'e'], errors: {}, lost: [], paused: false, now,
             max_rows: 100000},
            buffers.map((column, i) => KINDS[COLUMNS[i][1]].from(column).buffer),
        ];
    };
    widget.render({model, el: document.getElementById('here')});
    const all = Array.from({length: rows}, (_, i) => i);
    window.prepare = full => {
        const some = () => Math.floor(Math.random() * rows);
        const ids = full ? all : Array.from({length: changed}, some);
        window.message = make(ids, full);
    };
    window.post = () => new Promise(resolve => {
        deliver(...window.message);
        requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(resolve, 30)));
    });
    window.prepare(true);
    await window.post();
}
"""


def main() -> None:
    rounds = 5 if _pairs.arguments(__doc__).quick else 40
    sys.path.insert(0, str(ROOT))
    from tests.browser._server import launched

    with launched() as browser:
        page = browser.new_page(viewport={"width": 1100, "height": 800})
        page.route("**/widget.js", lambda route: route.fulfill(path=WIDGET))
        page.route("**/page", lambda route: route.fulfill(body=PAGE, content_type="text/html"))
        page.goto("http://localhost/page")
        page.evaluate(KERNEL, [100_000, 2_000])
        page.locator(".tfd-gridhost").wait_for()
        # The values of this column change with each update.
        page.get_by_label("Sort by").select_option("waited")
        page.wait_for_timeout(500)
        metrics = page.context.new_cdp_session(page)
        metrics.send("Performance.enable")

        def busy() -> float:
            values = metrics.send("Performance.getMetrics")["metrics"]
            return float(next(each["value"] for each in values if each["name"] == "TaskDuration"))

        def update(full: bool) -> float:
            page.evaluate("full => window.prepare(full)", full)
            before = busy()
            page.evaluate("window.post()")
            return 1e3 * (busy() - before)

        figures = _pairs.interleave(
            {"ours": lambda: update(False), "theirs": lambda: update(True)}, rounds
        )
        result = _pairs.compare(figures["ours"], figures["theirs"])
        worst = sorted(figures["ours"])[round(0.95 * rounds) - 1]
        print(f"main thread per update: {result}, 95 % within {worst:.1f} ms")
        _pairs.report("grid_update", result, "ms of the main thread")
        browser.close()


if __name__ == "__main__":
    main()
