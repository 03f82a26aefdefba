"""JupyterLab in a browser, controlled by clicks and by its commands."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import ConsoleMessage, Error, Locator, Page

#: Console messages that are not caused by this package.
_EXTERNAL = re.compile(
    r"favicon|404|ResizeObserver|Failed to load resource|WebSocket|GPU|webgl", re.I
)


class Lab:
    """A tab with JupyterLab.

    Parameters
    ----------
    page : Page
    address : str
    notebooks : Path
        Root directory of the server.
    workspace : str
    pictures : Path
        Directory of the screenshots.
    """

    def __init__(
        self, page: Page, address: str, notebooks: Path, workspace: str, pictures: Path
    ) -> None:
        self.page = page
        self.address = address
        self._notebooks = notebooks
        self._workspace = workspace
        self._pictures = pictures
        #: Errors of the page and of its console.
        self.errors: list[str] = []
        page.on("pageerror", self._record_error)
        page.on("console", self._record_message)

    def _record_error(self, error: Error) -> None:
        if not _EXTERNAL.search(str(error)):
            self.errors.append(str(error))

    def _record_message(self, message: ConsoleMessage) -> None:
        text = message.text
        if message.type == "error" and "tfd" in text.lower() and not _EXTERNAL.search(text):
            self.errors.append(text)

    def load(self) -> None:
        """Open or reload the page."""
        self.page.goto(f"{self.address}/lab/workspaces/{self._workspace}")
        self.page.wait_for_function("window.jupyterapp !== undefined", timeout=60_000)
        self.page.evaluate("window.jupyterapp.restored.then(() => true)")

    def execute(self, command: str, args: Any = None) -> Any:
        """Execute a JupyterLab command; its result is not returned."""
        self.page.evaluate(
            "async ([id, args]) => { await window.jupyterapp.commands.execute(id, args ?? {}); }",
            [command, args],
        )

    def panel(self) -> Locator:
        """Show the panel and return it."""
        panel = self.page.locator("#tfd-notebook-panel")
        if not panel.is_visible():
            self.execute("tfd-notebook:show-panel")
        panel.wait_for(state="visible")
        return panel

    def theme(self, name: str) -> None:
        """Select a theme, such as ``JupyterLab Dark``."""
        self.execute("apputils:change-theme", {"theme": name})
        light = "false" if "Dark" in name else "true"
        self.page.wait_for_function(
            "light => document.body.dataset.jpThemeLight === light", arg=light
        )
        # JupyterLab covers the page while it loads the theme.
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")

    def picture(self, name: str, of: Locator | None = None) -> Path:
        """Save a screenshot of the page or of an element."""
        self._pictures.mkdir(parents=True, exist_ok=True)
        path = self._pictures / f"{name}.png"
        (of or self.page).screenshot(path=path)
        return path

    # Notebooks

    def notebook(self, name: str, *cells: str, kernel: str = "python3") -> Notebook:
        """Open a new notebook with these cells, and wait for its kernel."""
        path = self._notebooks / f"{name}.ipynb"
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
            metadata={"kernelspec": {"name": kernel, "display_name": kernel}},
        )
        path.write_text(nbformat.writes(notebook))
        return self.open(name)

    def open(self, name: str) -> Notebook:
        """Open an existing notebook."""
        self.execute("docmanager:open", {"path": f"{name}.ipynb", "factory": "Notebook"})
        notebook = Notebook(self, name)
        notebook.wait_ready()
        return notebook

    def workspace_contains(self, text: str) -> bool:
        """Return True if the saved layout of the workspace contains a text."""
        address = f"{self.address}/lab/api/workspaces/{self._workspace}"
        with urllib.request.urlopen(address, timeout=60) as reply:
            return text in reply.read().decode()

    def kernels(self) -> list[Any]:
        with urllib.request.urlopen(f"{self.address}/api/kernels", timeout=60) as reply:
            return list(json.load(reply))

    def shut_down_kernels(self) -> None:
        for kernel in self.kernels():
            request = urllib.request.Request(
                f"{self.address}/api/kernels/{kernel['id']}", method="DELETE"
            )
            urllib.request.urlopen(request, timeout=60).close()


class Notebook:
    """A notebook in a tab of JupyterLab."""

    _FIND = """name => {
        const all = [...window.jupyterapp.shell.widgets('main')];
        return all.find(w => w.context && w.context.path === name + '.ipynb');
    }"""

    def __init__(self, lab: Lab, name: str) -> None:
        self._lab = lab
        self.page = lab.page
        self.name = name

    def evaluate(self, body: str, *args: Any) -> Any:
        """Return the result of JavaScript with the notebook's widget `w` and `args`."""
        return self.page.evaluate(
            f"async ([name, args]) => {{ const w = ({self._FIND})(name); {body} }}",
            [self.name, list(args)],
        )

    def wait_ready(self) -> None:
        """Wait until its kernel is idle."""
        self.page.wait_for_function(
            f"""name => {{
                const w = ({self._FIND})(name);
                return w?.sessionContext?.session?.kernel?.status === 'idle';
            }}""",
            arg=self.name,
            timeout=60_000,
        )

    def start(self, cell: int) -> None:
        """Run a cell without waiting for its end."""
        self.evaluate(
            "w.content.activeCellIndex = args[0];"
            "window.jupyterapp.shell.activateById(w.id);"
            "window.jupyterapp.commands.execute('notebook:run-cell');"
            "return null;",
            cell,
        )

    def run(self, cell: int, timeout: float = 90) -> str:
        """Run a cell to its end and return the text of its outputs."""
        before = self.count(cell)
        self.start(cell)
        self.page.wait_for_function(
            f"""([name, cell, before]) => {{
                const w = ({self._FIND})(name);
                const count = w.content.widgets[cell].model.executionCount;
                return count !== null && count !== before;
            }}""",
            arg=[self.name, cell, before],
            timeout=timeout * 1_000,
        )
        return self.output_text(cell)

    def count(self, cell: int) -> int | None:
        count = self.evaluate("return w.content.widgets[args[0]].model.executionCount;", cell)
        return None if count is None else int(count)

    def source(self, cell: int) -> str:
        """Return the source of a cell, empty if it does not exist."""
        return str(
            self.evaluate(
                "return w.content.model.cells.get(args[0])?.sharedModel.source ?? '';", cell
            )
        )

    def output_text(self, cell: int) -> str:
        """Return the text of a cell's outputs."""
        return str(
            self.evaluate("return w.content.widgets[args[0]].outputArea.node.innerText;", cell)
        )

    def output(self, cell: int) -> Locator:
        """Return the output area of a cell."""
        return self.page.locator(
            f"[id='{self.evaluate('return w.id;')}'] .jp-Cell[data-windowed-list-index='{cell}']"
            " .jp-OutputArea"
        )

    def execute(self, code: str) -> str:
        """Run code in the kernel without a cell, and return its output."""
        return str(
            self.evaluate(
                """
                const future = w.sessionContext.session.kernel.requestExecute(
                    {code: args[0], store_history: false});
                let output = '';
                future.onIOPub = message => {
                    if (message.header.msg_type === 'stream') { output += message.content.text; }
                    if (message.header.msg_type === 'error') { output += message.content.evalue; }
                };
                await future.done;
                return output.trim();""",
                code,
            )
        )

    def is_running(self, cell: int) -> bool:
        """Return True if a cell has not ended.

        The status of the kernel is not used, because it includes the kernel's other shells.
        """
        return self.count(cell) is None

    def restart(self) -> None:
        self.evaluate("await w.sessionContext.session.kernel.restart(); return null;")
        self.wait_ready()

    def save(self) -> None:
        self.evaluate("await w.context.save(); return null;")

    def close(self) -> None:
        self.evaluate("w.dispose(); return null;")
