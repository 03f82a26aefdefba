"""One JupyterLab for all tests, one browser per module, and a page for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser._lab import Lab
from tests.browser._server import launched, serving

# Clicks may take this time on a busy machine.
expect.set_options(timeout=60_000)

#: Directory of the screenshots, for visual review.
PICTURES = Path(__file__).parents[2] / "build" / "screenshots"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Return the address of a JupyterLab, and the directory of its notebooks."""
    with serving(tmp_path_factory.mktemp("lab")) as (address, notebooks):
        yield address, notebooks


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Return the browser of the module; it may start service processes at any time."""
    with launched() as browser:
        yield browser


@pytest.fixture
def open_lab(server: tuple[str, Path], chromium: Browser) -> Iterator[Any]:
    """Return a function that opens a browser tab with a separate workspace."""
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
        assert lab.errors == []
    if labs:
        labs[0].shut_down_kernels()
    for context in contexts:
        context.close()


@pytest.fixture
def lab(open_lab: Any) -> Lab:
    opened: Lab = open_lab()
    return opened
