"""Formatting of states, numbers and text for all views."""

from __future__ import annotations

import re
import time
import unicodedata
from collections.abc import Sequence

#: One sign per state, so that color is never the only difference. None has an emoji form.
_STATES = {
    "○": ("new", "planned", "idle", "queued", "reserved", "own"),
    "◌": ("starting", "dispatched", "stopping", "reserving", "draining"),
    "●": ("ready", "alive"),
    "►": ("running", "fetching", "feeding"),
    "‖": ("paused",),
    "↻": ("retrying", "restarting"),
    "■": ("cancelled", "stopped"),
    "▲": ("degraded", "hung", "warning"),
    "✓": ("finished",),
    "✗": ("failed", "refused", "foreign", "error"),
    "∅": ("lost", "unreachable"),
    "≠": ("mismatch",),
    "·": ("info",),
}
_SIGNS = {state: sign for sign, states in _STATES.items() for state in states}

_TONES = {
    "good": ("ready", "running", "fetching", "finished", "alive", "own", "feeding"),
    "warn": ("hung", "degraded", "restarting", "retrying", "warning"),
    "bad": ("failed", "lost", "error", "refused", "unreachable", "foreign", "mismatch"),
}
_TONE_OF = {state: tone for tone, states in _TONES.items() for state in states}

#: Starts of lines in TensorFlow's errors that contain a location instead of a message.
_STACK = (
    "Graph execution error",
    "Detected at node",
    "File ",
    "Additional GRPC error information",
    ":UNKNOWN:",
    "[[{{node",
    "Function call stack",
)
_MAX_ERROR = 400

_BLOCKS = "▁▂▃▄▅▆▇█"


def signed(state: str) -> str:
    """Return `state` prefixed with its sign."""
    return f"{_SIGNS.get(state, '·')} {state}"


def sign(state: str) -> str:
    """Return the sign of `state`."""
    return _SIGNS.get(state, "·")


def tone(state: str) -> str:
    """Return ``"good"``, ``"warn"``, ``"bad"`` or ``"quiet"``."""
    return _TONE_OF.get(state, "quiet")


def count(number: float) -> str:
    """Return a short form of a count, such as ``950``, ``12,345`` or ``1.2 M``."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"


def plural(number: int, thing: str) -> str:
    """Return a number of things, such as ``1 worker`` or ``2 workers``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def size(number: float | None) -> str:
    """Return a number of bytes in decimal units, such as ``12 kB``, or "" for None."""
    if number is None:
        return ""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= limit * 0.9995:
            scaled = number / limit
            return f"{scaled:.1f} {unit}" if scaled < 99.95 else f"{scaled:.0f} {unit}"
    return f"{number:.0f} B"


def rate(number: float | None) -> str:
    """Return a rate in bytes per second, or "" for None."""
    return "" if number is None else f"{size(number)}/s"


def percent(number: float | None) -> str:
    """Return a percentage without decimals, or "" for None."""
    return "" if number is None else f"{number:.0f} %"


def duration(seconds: float) -> str:
    """Return a duration of seconds or more, such as ``40 s``, ``58 min`` or ``3.5 h``."""
    if seconds < 0:
        return "0 s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def brief(seconds: float) -> str:
    """Return a duration of any length, such as ``0.2 ms``, ``35 ms``, ``4.2 s`` or ``58 min``."""
    if seconds < 0.9995:
        number = seconds * 1e3
        return f"{number:.1f} ms" if number < 9.95 else f"{number:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 9.95 else duration(seconds)


def clock(seconds: float) -> str:
    """Return a time in seconds since the Unix epoch as the local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def short_error(error: str) -> str:
    """Return the message of a TensorFlow error without its stack traces."""
    error = re.sub(r"\{\{function_node [^{}]*\}\} ?", "", error[:20_000])
    lines = [line.strip() for line in error.splitlines()]
    messages = [line for line in lines if line and not line.startswith(_STACK)]
    text = re.sub(r"([^.])\nNext: ", r"\1. Next: ", "\n".join(messages[:3]))
    words = clean(text) or clean(error[:_MAX_ERROR])
    return words if len(words) <= _MAX_ERROR else words[: _MAX_ERROR - 1] + "…"


def sparkline(values: Sequence[float], length: int = 20) -> str:
    """Return block characters for the last `length` values. The maximum is a full block."""
    shown = values[-length:]
    top = max(shown, default=0.0)
    if top <= 0:
        return _BLOCKS[0] * len(shown)
    return "".join(_BLOCKS[round(max(value, 0.0) / top * 7)] for value in shown)


def block(percent: float | None) -> str:
    """Return a block character for a percentage, or a dot for None."""
    return "·" if percent is None else _BLOCKS[round(min(max(percent, 0.0), 100.0) / 100 * 7)]


def clean_lines(text: str) -> str:
    """Return `text` with its lines, without control characters such as terminal escapes."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(
        char if char in "\n\t" or unicodedata.category(char)[0] != "C" else "\ufffd"
        for char in lines
    )


def clean(text: str) -> str:
    """Return `text` in one line, without control characters such as terminal escapes."""
    return " ".join(
        "".join(
            char if unicodedata.category(char)[0] != "C" or char.isspace() else "\ufffd"
            for char in text
        ).split()
    )


def columns_of(text: str) -> int:
    """Return the number of terminal columns that `text` occupies."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def fit(text: str, width: int) -> str:
    """Return `text`, truncated with an ellipsis to at most `width` columns."""
    if columns_of(text) <= width:
        return text
    while text and columns_of(text) > width - 1:
        text = text[:-1]
    return text + "…"


def pad(text: str, width: int, right: bool = False) -> str:
    """Return `text` padded with spaces to `width` columns."""
    space = " " * (width - columns_of(text))
    return space + text if right else text + space
