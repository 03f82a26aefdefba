"""Promise of docs/panel.md: clicks in JupyterLab start and stop a cluster of a notebook."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests._waiting import until
from tests.browser._lab import Lab
from tests.browser._server import launched, serving

pytestmark = [
    pytest.mark.integration,
    pytest.mark.browser,
    pytest.mark.skipif(
        not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
        reason="no Chromium is installed (Debian's package is chromium)",
    ),
]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with serving(tmp_path) as (address, notebooks), launched() as browser:
        page = browser.new_page()
        page.set_default_timeout(90_000)
        lab = Lab(page, address, notebooks, "contract", tmp_path)
        lab.load()
        yield lab
        lab.shut_down_kernels()
        page.close()


def test_clicks_start_and_stop_a_cluster(lab: Lab) -> None:
    notebook = lab.notebook("started", "%load_ext tfd_notebook")
    notebook.run(0)
    kernel = lab.panel().locator("[aria-label='kernel of started.ipynb']")

    def click(name: str) -> None:
        kernel.get_by_role("button", name=name, exact=True).click()

    click("Start cluster")
    form = kernel.locator(".tfd-start")
    form.get_by_label("data workers").fill("1")
    form.get_by_label("variable").fill("mine")
    form.get_by_role("button", name="Start", exact=True).click()
    cluster = kernel.locator(".tfd-cluster")
    expect(cluster).to_contain_text("2 of 2 tasks ready", timeout=90_000)
    assert notebook.execute("print(mine.state)") == "ready"
    click("Stop")
    lab.page.locator(".jp-Dialog").get_by_role("button", name="Stop", exact=True).click()
    until(lambda: notebook.execute("print(mine.state)") == "stopped", 90)
    assert lab.errors == []
