"""A JupyterLab server and a Chromium, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
from playwright.sync_api import Browser, sync_playwright

from tests._jupyter import serving as jupyter

#: Seconds that Chromium's service processes get to exit after the browser is closed.
EXIT_SECONDS = 60.0


@contextlib.contextmanager
def serving(home: Path) -> Iterator[tuple[str, Path]]:
    """Yield the address of a JupyterLab with its data in `home`, and its notebook directory.

    It has the default kernel and ``ipykernel6``, in which clicks wait for the running cell.
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
    """Yield the installed Chromium; return when each of its processes has exited."""
    names = ("chromium", "chromium-browser", "google-chrome")
    executable = next(filter(None, map(shutil.which, names)), None)
    assert executable, "no Chromium is installed (Debian's package is chromium)"
    this = psutil.Process()
    before = set(this.children())
    with sync_playwright() as playwright:
        (driver,) = set(this.children()) - before
        browser = playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox", "--force-color-profile=srgb"]
        )
        yield browser
        processes = driver.children(recursive=True)
        browser.close()
        # `close` waits for the browser process only, not for its storage, network and GPU services.
        _, running = psutil.wait_procs(processes, timeout=EXIT_SECONDS)
        assert not running, f"still running {EXIT_SECONDS:.0f} s after the browser: {running}"
