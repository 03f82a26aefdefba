"""Words, signs and figures that all views share."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

#: One sign per state, so that colour is never the only difference. None has an emoji form.
_SIGNS = {
    "new": "○",
    "planned": "○",
    "starting": "◌",
    "ready": "●",
    "running": "►",
    "paused": "‖",
    "idle": "○",
    "queued": "○",
    "dispatched": "◌",
    "fetching": "►",
    "retrying": "↻",
    "cancelled": "■",
    "degraded": "▲",
    "hung": "▲",
    "restarting": "↻",
    "stopping": "◌",
    "stopped": "■",
    "finished": "✓",
    "failed": "✗",
    "lost": "∅",
    "alive": "●",
    "refused": "✗",
    "unreachable": "∅",
    "foreign": "✗",
    "mismatch": "≠",
    "reserving": "◌",
    "reserved": "○",
    "feeding": "►",
    "draining": "◌",
    "info": "·",
    "warning": "▲",
    "error": "✗",
}

_TONES = {
    "good": ("ready", "running", "fetching", "finished", "alive", "feeding"),
    "warn": ("hung", "degraded", "restarting", "retrying", "warning"),
    "bad": ("failed", "lost", "error", "refused", "unreachable", "foreign", "mismatch"),
}
_TONE_OF = {state: tone for tone, states in _TONES.items() for state in states}

#: What lines of TensorFlow's errors begin with that say where and not what.
_STACK = (
    "Graph execution error",
    "Detected at node",
    "File ",
    "Additional GRPC error information",
    ":UNKNOWN:",
    "[[{{node",
    "Function call stack",
)
_MOST_ERROR = 400

_BLOCKS = "▁▂▃▄▅▆▇█"


def signed(state: str) -> str:
    """Return `state` with its sign before it."""
    return f"{_SIGNS.get(state, '·')} {state}"


def sign(state: str) -> str:
    """Return the sign of `state`."""
    return _SIGNS.get(state, "·")


def tone(state: str) -> str:
    """Return ``"good"``, ``"warn"``, ``"bad"`` or ``"quiet"``."""
    return _TONE_OF.get(state, "quiet")


def count(number: float) -> str:
    """Return a number of things, short: ``950``, ``12,345``, ``1.2 M``."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"


def size(number: float | None) -> str:
    """Return a number of bytes in decimal units: ``12 kB``; empty for None."""
    if number is None:
        return ""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= limit * 0.9995:
            scaled = number / limit
            return f"{scaled:.1f} {unit}" if scaled < 99.95 else f"{scaled:.0f} {unit}"
    return f"{number:.0f} B"


def rate(number: float | None) -> str:
    """Return bytes per second; empty for None."""
    return "" if number is None else f"{size(number)}/s"


def percent(number: float | None) -> str:
    """Return a percentage without decimals; empty for None."""
    return "" if number is None else f"{number:.0f} %"


def duration(seconds: float) -> str:
    """Return a span of time in its largest sensible unit: ``40 s``, ``58 min``, ``3.5 h``."""
    if seconds < 0:
        return "0 s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def brief(seconds: float) -> str:
    """Return a span of time of any length: ``0.2 ms``, ``35 ms``, ``4.2 s``, ``58 min``."""
    if seconds < 0.9995:
        number = seconds * 1e3
        return f"{number:.1f} ms" if number < 9.95 else f"{number:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 9.95 else duration(seconds)


def gist(error: str) -> str:
    """Return what an error of TensorFlow says, without the stacks that it repeats it with."""
    lines = [line.strip() for line in error[:20_000].splitlines()]
    told = [line for line in lines if line and not line.startswith(_STACK)]
    words = clean(" ".join(told[:3])) or clean(error[:_MOST_ERROR])
    return words if len(words) <= _MOST_ERROR else words[: _MOST_ERROR - 1] + "…"


def sparkline(values: Sequence[float], length: int = 20) -> str:
    """Draw the last `length` values with blocks, the highest as a full one."""
    shown = values[-length:]
    top = max(shown, default=0.0)
    if top <= 0:
        return _BLOCKS[0] * len(shown)
    return "".join(_BLOCKS[round(max(value, 0.0) / top * 7)] for value in shown)


def block(percent: float | None) -> str:
    """Return a block as high as a share in percent; a dot for None."""
    return "·" if percent is None else _BLOCKS[round(min(max(percent, 0.0), 100.0) / 100 * 7)]


def clean_lines(text: str) -> str:
    """Return `text` without control characters, which could steer a terminal, line by line."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(
        char if char in "\n\t" or unicodedata.category(char)[0] != "C" else "\ufffd"
        for char in lines
    )


def clean(text: str) -> str:
    """Return `text` in one line and without control characters, which could steer a terminal."""
    return " ".join(
        "".join(
            char if unicodedata.category(char)[0] != "C" or char.isspace() else "\ufffd"
            for char in text
        ).split()
    )


def columns_of(text: str) -> int:
    """Return how many terminal columns `text` takes."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def fit(text: str, width: int) -> str:
    """Return `text`, cut with an ellipsis where it takes more than `width` columns."""
    if columns_of(text) <= width:
        return text
    while text and columns_of(text) > width - 1:
        text = text[:-1]
    return text + "…"


def pad(text: str, width: int, right: bool = False) -> str:
    """Return `text` filled with spaces to `width` columns."""
    space = " " * (width - columns_of(text))
    return space + text if right else text + space
