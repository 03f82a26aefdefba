"""Adds notes to exceptions of any class."""

from __future__ import annotations

from typing import Any


def add(error: Any, sentence: str) -> None:
    """Append `sentence` to the text of `error`. No-op if the text contains it."""
    if sentence in str(error) or sentence in getattr(error, "__notes__", ()):
        return
    if getattr(error, "add_note", None) is not None:  # Python 3.11
        error.add_note(sentence)
    elif hasattr(error, "_message"):  # errors of TensorFlow do not print their arguments
        error._message = f"{error._message}\n{sentence}"
    else:
        error.args = ("\n".join((*map(str, error.args[:1]), sentence)), *error.args[1:])
