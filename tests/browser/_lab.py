"""JupyterLab in a browser, driven as a person would, and by its own commands where these do."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import ConsoleMessage, Error, Locator, Page

#: What pages say that is nobody's defect of ours.
_NOT_OURS = re.compile(
    r"favicon|404|ResizeObserver|Failed to load resource|WebSocket|GPU|webgl", re.I
)


class Lab:
    """A tab with JupyterLab.

    Parameters
    ----------
    page : Page
    address : str
    notebooks : Path
        The server's directory.
    workspace : str
    pictures : Path
        Where `picture` puts what it saw.
    """

    def __init__(
        self, page: Page, address: str, notebooks: Path, workspace: str, pictures: Path
    ) -> None:
        self.page = page
        self.address = address
        self._notebooks = notebooks
        self._workspace = workspace
        self._pictures = pictures
        #: What went wrong in the page without anybody seeing it.
        self.complaints: list[str] = []
        page.on("pageerror", self._complain)
        page.on("console", self._listen)

    def _complain(self, error: Error) -> None:
        if not _NOT_OURS.search(str(error)):
            self.complaints.append(str(error))

    def _listen(self, message: ConsoleMessage) -> None:
        text = message.text
        if message.type == "error" and "tfd" in text.lower() and not _NOT_OURS.search(text):
            self.complaints.append(text)

    def load(self) -> None:
        """Open the page, or open it again."""
        self.page.goto(f"{self.address}/lab/workspaces/{self._workspace}")
        self.page.wait_for_function("window.jupyterapp !== undefined", timeout=60_000)
        self.page.evaluate("window.jupyterapp.restored.then(() => true)")

    def execute(self, command: str, args: Any = None) -> Any:
        """Execute one of JupyterLab's commands; its result does not come back."""
        self.page.evaluate(
            "async ([id, args]) => { await window.jupyterapp.commands.execute(id, args ?? {}); }",
            [command, args],
        )

    def panel(self) -> Locator:
        """Show the panel and return it."""
        found = self.page.locator("#tfd-notebook-panel")
        if not found.is_visible():
            self.execute("tfd-notebook:show-panel")
        found.wait_for(state="visible")
        return found

    def theme(self, name: str) -> None:
        """Choose a theme, such as ``JupyterLab Dark``."""
        self.execute("apputils:change-theme", {"theme": name})
        light = "false" if "Dark" in name else "true"
        self.page.wait_for_function(
            "light => document.body.dataset.jpThemeLight === light", arg=light
        )
        # JupyterLab covers the page meanwhile.
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")

    def picture(self, name: str, of: Locator | None = None) -> Path:
        """Keep what is seen."""
        self._pictures.mkdir(parents=True, exist_ok=True)
        path = self._pictures / f"{name}.png"
        (of or self.page).screenshot(path=path)
        return path

    # Notebooks

    def notebook(self, name: str, *cells: str, kernel: str = "python3") -> Notebook:
        """Open a new notebook with these cells, and wait for its kernel."""
        path = self._notebooks / f"{name}.ipynb"
        made = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
            metadata={"kernelspec": {"name": kernel, "display_name": kernel}},
        )
        path.write_text(nbformat.writes(made))
        return self.open(name)

    def open(self, name: str) -> Notebook:
        """Open a notebook that exists."""
        self.execute("docmanager:open", {"path": f"{name}.ipynb", "factory": "Notebook"})
        notebook = Notebook(self, name)
        notebook.wait_ready()
        return notebook

    def workspace_has(self, words: str) -> bool:
        """Whether the layout that is restored after a reload has been saved with these words."""
        address = f"{self.address}/lab/api/workspaces/{self._workspace}"
        with urllib.request.urlopen(address, timeout=30) as reply:
            return words in reply.read().decode()

    def kernels(self) -> list[Any]:
        with urllib.request.urlopen(f"{self.address}/api/kernels", timeout=30) as reply:
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
        """Return what JavaScript says of the notebook's widget `w` and of `args`."""
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

    def begin(self, cell: int) -> None:
        """Run a cell, and do not wait for its end."""
        self.evaluate(
            "w.content.activeCellIndex = args[0];"
            "window.jupyterapp.shell.activateById(w.id);"
            "window.jupyterapp.commands.execute('notebook:run-cell');"
            "return null;",
            cell,
        )

    def run(self, cell: int, timeout: float = 90) -> str:
        """Run a cell to its end and return what it said."""
        before = self.count(cell)
        self.begin(cell)
        self.page.wait_for_function(
            f"""([name, cell, before]) => {{
                const w = ({self._FIND})(name);
                const count = w.content.widgets[cell].model.executionCount;
                return count !== null && count !== before;
            }}""",
            arg=[self.name, cell, before],
            timeout=timeout * 1_000,
        )
        return self.said(cell)

    def count(self, cell: int) -> int | None:
        found = self.evaluate("return w.content.widgets[args[0]].model.executionCount;", cell)
        return None if found is None else int(found)

    def source(self, cell: int) -> str:
        """Return what is written in a cell, nothing if there is none."""
        return str(
            self.evaluate(
                "return w.content.model.cells.get(args[0])?.sharedModel.source ?? '';", cell
            )
        )

    def said(self, cell: int) -> str:
        """Return the text of a cell's outputs."""
        return str(
            self.evaluate("return w.content.widgets[args[0]].outputArea.node.innerText;", cell)
        )

    def output(self, cell: int) -> Locator:
        """Return a cell's outputs."""
        return self.page.locator(
            f"[id='{self.evaluate('return w.id;')}'] .jp-Cell[data-windowed-list-index='{cell}']"
            " .jp-OutputArea"
        )

    def ask(self, code: str) -> str:
        """Run code in the kernel beside the notebook, and return what it said."""
        return str(
            self.evaluate(
                """
                const future = w.sessionContext.session.kernel.requestExecute(
                    {code: args[0], store_history: false});
                let said = '';
                future.onIOPub = message => {
                    if (message.header.msg_type === 'stream') { said += message.content.text; }
                    if (message.header.msg_type === 'error') { said += message.content.evalue; }
                };
                await future.done;
                return said.trim();""",
                code,
            )
        )

    def runs(self, cell: int) -> bool:
        """Whether a cell has not ended; the kernel's status is of its other shells, too."""
        return self.count(cell) is None

    def restart(self) -> None:
        self.evaluate("await w.sessionContext.session.kernel.restart(); return null;")
        self.wait_ready()

    def save(self) -> None:
        self.evaluate("await w.context.save(); return null;")

    def close(self) -> None:
        self.evaluate("w.dispose(); return null;")
