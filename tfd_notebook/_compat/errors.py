"""Adding a sentence to an error, whoever made it."""

from __future__ import annotations

from typing import Any


def add(error: Any, sentence: str) -> None:
    """Have `error` say `sentence`, too; saying it again changes nothing."""
    if sentence in str(error) or sentence in getattr(error, "__notes__", ()):
        return
    if getattr(error, "add_note", None) is not None:  # Python 3.11
        error.add_note(sentence)
    elif hasattr(error, "_message"):  # TensorFlow's, which do not show their arguments
        error._message = f"{error._message}\n{sentence}"
    else:
        error.args = ("\n".join((*map(str, error.args[:1]), sentence)), *error.args[1:])
