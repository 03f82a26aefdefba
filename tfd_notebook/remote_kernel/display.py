"""Display of the output of another kernel in this kernel."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Mapping
from typing import Any, cast

from tfd_notebook.errors import RemoteError
from tfd_notebook.net import validation

#: Messages with data of several MIME types.
_RICH = ("display_data", "execute_result", "update_display_data")
#: MIME types that a page does not execute.
_PLAIN_TYPES = ("text/plain", "image/png", "image/jpeg")


def failure(label: str, content: Mapping[str, Any]) -> RemoteError:
    """Return the error for an exception that code in the kernel at `label` raised."""
    trace = "\n".join(content.get("traceback") or ())
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
    elif kind in _RICH:
        data = dict(content["data"])
        if not isinstance(data.get("text/plain", ""), str):
            del data["text/plain"]
        if not data:
            return
        if hasattr(builtins, "__IPYTHON__"):
            from IPython.display import display

            cast("Any", display)(data, raw=True, metadata=content.get("metadata") or {})
        else:
            sys.stdout.write(data.get("text/plain", "") + "\n")
    elif kind == "clear_output" and hasattr(builtins, "__IPYTHON__"):
        from IPython.display import clear_output

        cast("Any", clear_output)(wait=content.get("wait", False))


def show_plain(kind: str, content: Mapping[str, Any]) -> None:
    """Show text and images; discard content that a page could execute, such as HTML."""
    if kind in _RICH:
        data = {name: value for name, value in content["data"].items() if name in _PLAIN_TYPES}
        if isinstance(text := data.get("text/plain"), str):
            data["text/plain"] = validation.text(text, "text/plain")
        content = {"data": data}
    elif kind == "stream":
        content = {**content, "text": validation.terminal_output(content["text"])}
    show(kind, content)
