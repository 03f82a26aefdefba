"""A JupyterLab server and a Chromium, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests._jupyter import serving as jupyter


@contextlib.contextmanager
def serving(home: Path) -> Iterator[tuple[str, Path]]:
    """Yield the address of a JupyterLab that lives in `home`, and where its notebooks are.

    Besides the usual kernel there is ``ipykernel6``, whose clicks wait for the running cell.
    """
    notebooks = home / "notebooks"
    notebooks.mkdir()
    settings = home / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(
        '{"fetchNews": "false", "checkForUpdates": false}'
    )
    old = home / "data" / "kernels" / "ipykernel6"
    old.mkdir(parents=True)
    kernel = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "ipykernel 6",
        "language": "python",
        "env": {"PYTHONPATH": str(Path(sys.prefix) / "ipykernel6")},
    }
    (old / "kernel.json").write_text(json.dumps(kernel))
    with jupyter(
        *("jupyterlab", home, "", "--ServerApp.disable_check_xsrf=True"),
        *(f"--ServerApp.root_dir={notebooks}", "--LabApp.expose_app_in_browser=True"),
        *(f"--LabApp.user_settings_dir={home / 'settings'}",),
        f"--LabApp.workspaces_dir={home / 'workspaces'}",
    ) as port:
        yield f"http://127.0.0.1:{port}", notebooks


@contextlib.contextmanager
def launched() -> Iterator[Browser]:
    """Yield a Chromium, the one that is installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    assert found, "no Chromium is installed (Debian's package is chromium)"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--force-color-profile=srgb"]
        )
        yield browser
        browser.close()
