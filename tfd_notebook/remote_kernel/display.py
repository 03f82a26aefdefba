"""Display of the output of another kernel in this kernel."""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Mapping
from typing import Any, cast

from tfd_notebook.errors import RemoteError
from tfd_notebook.net import validation

#: Control sequences for colors.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
#: MIME types that a page does not execute.
_PLAIN_TYPES = ("text/plain", "image/png", "image/jpeg")
#: Control sequences that could change a terminal, except colors, \r, \t and \n.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[[0-9;]*m)")


def failure(label: str, content: Mapping[str, Any]) -> RemoteError:
    """Return the error for an exception that code in the kernel at `label` raised."""
    trace = _COLOURS.sub("", "\n".join(content.get("traceback", ())))
    message = f"{content.get('ename')}: {content.get('evalue')}"
    if content.get("ename") == "SystemExit":
        return RemoteError(str(content.get("evalue")))
    return RemoteError(f"{message}\nat {label}:\n{trace}")


def silent(kind: str, content: Mapping[str, Any]) -> None:
    """Discard the output."""


def show(kind: str, content: Mapping[str, Any]) -> None:
    """Show an output of the other kernel."""
    if kind == "stream":
        stream = sys.stderr if content["name"] == "stderr" else sys.stdout
        stream.write(content["text"])
        stream.flush()
    elif kind in ("display_data", "execute_result", "update_display_data"):
        data = content["data"]
        if hasattr(builtins, "__IPYTHON__"):
            from IPython.display import display

            cast("Any", display)(data, raw=True, metadata=content.get("metadata"))
        else:
            sys.stdout.write(data.get("text/plain", "") + "\n")
    elif kind == "clear_output" and hasattr(builtins, "__IPYTHON__"):
        from IPython.display import clear_output

        cast("Any", clear_output)(wait=content.get("wait", False))


def show_plain(kind: str, content: Mapping[str, Any]) -> None:
    """Show text and images; discard content that a page could execute, such as HTML."""
    if "data" in content:
        data = {name: value for name, value in content["data"].items() if name in _PLAIN_TYPES}
        text = data.get("text/plain")
        if text is not None:
            data["text/plain"] = validation.text(text, "text/plain")
        content = {"data": data}
    elif kind == "stream":
        content = {**content, "text": _CONTROL.sub("\ufffd", content["text"])}
    show(kind, content)
