"""A JupyterLab server and a Chromium, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

_START_SECONDS = 90


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = home / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
                *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"),
                *("--ServerApp.port_retries=0", "--ServerApp.disable_check_xsrf=True"),
                *("--IdentityProvider.token=", f"--ServerApp.root_dir={notebooks}"),
                "--LabApp.expose_app_in_browser=True",
                f"--LabApp.user_settings_dir={home / 'settings'}",
                f"--LabApp.workspaces_dir={home / 'workspaces'}",
            ],
            env=dict(
                os.environ,
                PATH=os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"])),
                JUPYTER_CONFIG_DIR=str(home / "config"),
                JUPYTER_DATA_DIR=str(home / "data"),
            ),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + _START_SECONDS
    try:
        while not _answers(address):
            assert process.poll() is None, log.read_text()[-4_000:]
            assert time.monotonic() < deadline, log.read_text()[-4_000:]
            time.sleep(0.1)
        yield address, notebooks
    finally:
        process.send_signal(signal.SIGTERM)  # it ends its kernels, too
        process.wait(30)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/api/status", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


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
