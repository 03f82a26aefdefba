"""A JupyterLab and a browser, shared by all tests; a page and notebooks for each."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests._waiting import until
from tests.browser._lab import Lab

#: Pictures of what was seen, for a person to look at.
PICTURES = Path(__file__).parents[2] / "build" / "screenshots"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Return the address of a JupyterLab, and the directory of its notebooks."""
    home = tmp_path_factory.mktemp("lab")
    notebooks = home / "notebooks"
    notebooks.mkdir()
    settings = home / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(
        '{"fetchNews": "false", "checkForUpdates": false}'
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    old = home / "data" / "kernels" / "ipykernel6"
    old.mkdir(parents=True)
    (old / "kernel.json").write_text(
        json.dumps(
            {
                "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
                "display_name": "ipykernel 6",
                "language": "python",
                "env": {"PYTHONPATH": str(Path(sys.prefix) / "ipykernel6")},
            }
        )
    )
    log = (home / "log").open("wb")
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
            *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"),
            *(
                "--IdentityProvider.token=",
                "--ServerApp.password=",
                "--ServerApp.disable_check_xsrf=True",
            ),
            f"--ServerApp.root_dir={notebooks}",
            "--LabApp.expose_app_in_browser=True",
            f"--LabApp.user_settings_dir={home / 'settings'}",
            f"--LabApp.workspaces_dir={home / 'workspaces'}",
        ],
        env=dict(
            os.environ,
            PATH=path,
            JUPYTER_CONFIG_DIR=str(home / "config"),
            JUPYTER_DATA_DIR=str(home / "data"),
        ),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, (home / "log").read_text()[-4_000:]
        try:
            with urllib.request.urlopen(f"{address}/api/status", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    until(answers, 90)
    yield address, notebooks
    process.send_signal(signal.SIGTERM)  # it ends its kernels, too
    process.wait(30)
    log.close()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    assert found, "no Chromium is installed (Debian's package is chromium)"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--force-color-profile=srgb"]
        )
        yield browser
        browser.close()


@pytest.fixture
def open_lab(server: tuple[str, Path], chromium: Browser) -> Iterator[Any]:
    """Return what opens a tab of the browser with a workspace of its own."""
    address, notebooks = server
    contexts = []
    labs: list[Lab] = []

    def open_(workspace: str = "", width: int = 1400, height: int = 900) -> Lab:
        context = chromium.new_context(viewport={"width": width, "height": height})
        contexts.append(context)
        page: Page = context.new_page()
        page.set_default_timeout(30_000)
        lab = Lab(page, address, notebooks, workspace or uuid.uuid4().hex[:8], PICTURES)
        lab.load()
        labs.append(lab)
        return lab

    yield open_
    for lab in labs:
        assert lab.complaints == []
    if labs:
        labs[0].shut_down_kernels()
    for context in contexts:
        context.close()


@pytest.fixture
def lab(open_lab: Any) -> Lab:
    made: Lab = open_lab()
    return made
