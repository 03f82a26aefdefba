"""Tests of the display of a remote kernel's output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from tests._jupyter_kernel import kernel_message
from tfd_notebook import errors
from tfd_notebook.cluster import runs
from tfd_notebook.net import messages
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


#: Sequences that write to the clipboard, clear the screen, set the title and hide text.
ATTACK = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b2J\x1b]0;title\x1b\\\r\x08\u202e"


def is_harmless(text: str) -> bool:
    return not set(text) & set("\x1b\x07\x9b\r\x08\u202e")


def test_error_of_a_remote_kernel_has_no_control_codes() -> None:
    content = {"ename": f"E{ATTACK}", "evalue": ATTACK, "traceback": ["\x1b[31mred\x1b[0m", ATTACK]}
    error = display.failure(f"host{ATTACK}", content)
    assert is_harmless(str(error))
    assert "\nred\n" in str(error)
    assert is_harmless(str(display.failure("host", {**content, "ename": "SystemExit"})))


@pytest.mark.parametrize("kind", ["display_data", "execute_result", "update_display_data"])
@pytest.mark.parametrize("value", [None, 1, ["lines\n"], {"a": 1}])
def test_text_of_another_type_is_not_shown(
    kind: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for show in (display.show_plain, display.show):
        show(kind, {"data": {"text/plain": value}})
        assert not capsys.readouterr().out.strip()


@pytest.mark.parametrize("kind", ["display_data", "execute_result", "update_display_data"])
def test_output_can_be_printed_and_sent(kind: str) -> None:
    text = {"text/plain": "a\ud800", "text/html": "<b>\ud800</b>", "a": {"\ud800": ["\udfff", 1.5]}}
    content = {"data": text, "metadata": {"\ud800": "ü"}}
    received = messages.kernel_message(kernel_message(kind, **content))["content"]
    assert received["data"]["text/plain"] == "a?"
    assert received == json.loads(json.dumps(received, ensure_ascii=False).encode())
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(errors.InvalidMessage, match="fewer levels"):
        messages.kernel_message(kernel_message(kind, data={"a": deep}))


@pytest.mark.parametrize("show", [display.show, display.show_plain])
def test_unknown_message_is_not_shown(show: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for data in ([], {"text/plain": "a"}):
        show("unknown", {"data": data})
    assert capsys.readouterr().out == ""


def test_closures_of_a_remote_kernel_have_no_control_codes() -> None:
    message = {"kind": "values", "seq": 1, "full": True, "cluster": "images", "columns": []}
    message |= {"functions": [ATTACK], "errors": {"1": ATTACK}, "lost": [], "paused": False}
    received = messages.bus_message(message)
    assert is_harmless(received["functions"][0])
    assert is_harmless(received["errors"]["1"])


def test_error_has_no_control_codes() -> None:
    error = errors.LaunchError(f"failed: {ATTACK}", task=ATTACK, fix=f"read {ATTACK}\n\tagain")
    assert is_harmless(str(error))
    assert str(error).endswith("\n\tagain")


def test_output_of_a_rank_has_no_control_codes(capsys: pytest.CaptureFixture[str]) -> None:
    runs.print_lines(0, f"\x1b[31mred\x1b[0m\n{ATTACK}")
    red, attack, _ = capsys.readouterr().out.split("\n")
    assert red == "[0] \x1b[31mred\x1b[0m"
    assert is_harmless(attack.replace("\r", ""))


def test_cell_magic_has_the_plain_option() -> None:
    parser = CommandLine("%%tfd_kernel").parser("kernel")
    assert parser.read(["kernel", "--plain"]).plain is True
