"""Tests of the display of a remote kernel's output."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from tfd_notebook.remote_kernel import display
from tfd_notebook.ui.argparsing import CommandLine

RICH = {
    "text/plain": "a figure\x1b]0;title\x07",
    "text/html": "<script>alert(1)</script>",
    "application/javascript": "alert(1)",
    "image/svg+xml": "<svg onload='alert(1)'/>",
    "image/png": "iVBORw0KGgo=",
    "application/vnd.jupyter.widget-view+json": {"model_id": "x"},
}


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    instance = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    yield instance
    InteractiveShell.clear_instance()


@pytest.mark.usefixtures("shell")
@pytest.mark.parametrize("kind", ["display_data", "execute_result", "update_display_data"])
def test_plain_output_has_text_and_images_only(kind: str) -> None:
    content = {"data": RICH, "metadata": {"text/html": {"isolated": False}}}
    with capture_output() as captured:
        display.show_plain(kind, content)
    (shown,) = captured.outputs
    assert shown.data == {"text/plain": "a figure\ufffd]0;title\ufffd", "image/png": "iVBORw0KGgo="}
    with capture_output() as captured:
        display.show(kind, content)
    assert captured.outputs[0].data == RICH


def test_plain_text_keeps_colors_and_drops_control_codes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "\x1b[31mred\x1b[0m\r\n\x1b]0;title\x07\x1b[2J"
    display.show_plain("stream", {"name": "stdout", "text": text})
    assert capsys.readouterr().out == "\x1b[31mred\x1b[0m\r\n\ufffd]0;title\ufffd\ufffd[2J"


def test_cell_magic_has_the_plain_option() -> None:
    parser = CommandLine("%%tfd_kernel").parser("kernel")
    assert parser.read(["kernel", "--plain"]).plain is True
