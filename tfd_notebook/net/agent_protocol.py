"""The protocol between the kernel and an agent: one JSON message per line.

A frame is one line::

    TFD1 <sequence number> <length> <JSON of this length>

Lines without this prefix (a banner, a stray print) are not frames and are ignored. Bodies are
requests ``{"id", "method", "arguments"}``, replies ``{"reply_to", "ok", "value" | "error"}`` and
events ``{"event", "cluster", ...}``.
"""

from __future__ import annotations

import base64
import json
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfd_notebook import errors
from tfd_notebook.net import validation

#: Protocol version. Increment it when message bodies change. The frame format is fixed, so that
#: mismatched versions can detect each other.
VERSION = 6
#: Limit of a frame, in bytes.
LARGEST = validation.MAX_MESSAGE_BYTES
_MAGIC = b"TFD1 "


class Frame(NamedTuple):
    """A message, and its number among those of its sender. 0 is not counted."""

    seq: int
    body: dict[str, Any]


def encode(body: dict[str, Any], seq: int = 0) -> bytes:
    """Return a frame as one line, with bytes in base64.

    Raises
    ------
    UsageError
        The line is larger than `LARGEST`.
    """
    text = json.dumps(body, separators=(",", ":"), default=encode_bytes).encode()
    line = b"%s%d %d %s\n" % (_MAGIC, seq, len(text), text)
    if len(line) > LARGEST:
        raise too_large(len(line))
    return line


def encode_bytes(value: bytes) -> str:
    """Return bytes in base64, for `json.dumps`."""
    return base64.b64encode(value).decode()


def too_large(size: int) -> errors.UsageError:
    """Return the error of a frame that exceeds `LARGEST`."""
    return errors.UsageError(
        f"invalid message of {size / 1e6:.1f} MB: an agent and its clients exchange at most "
        f"{LARGEST / 1e6:.0f} MB at a time",
        fix="send less data, such as the name of a file",
    )


def decode(line: bytes) -> Frame | None:
    """Return the frame in `line`, or None if it is not a complete frame."""
    if not line.startswith(_MAGIC):
        return None
    try:
        _, seq, length, body = line.rstrip(b"\n").split(b" ", 3)
        if len(body) != int(length):
            return None
        validation.check_values(body)
        decoded = json.loads(body)
        if not isinstance(decoded, dict):
            return None
        return Frame(int(seq), decoded)
    except (ValueError, RecursionError):
        return None


def decode_head(line: bytes) -> tuple[int, int] | None:
    """Return sequence number and length from the start of a frame, or None if it is not one."""
    if not line.startswith(_MAGIC):
        return None
    try:
        _, seq, length, _ = line.split(b" ", 3)
        return int(seq), int(length)
    except ValueError:
        return None


def pack_error(error: BaseException) -> dict[str, Any]:
    """Return `error` as JSON values."""
    if not isinstance(error, errors.TfdError):
        error = errors.TfdError(f"{type(error).__name__}: {error}")
    return {"code": error.code, "what": error.what, "task": error.task, "fix": error.fix}


def failure(request: int, error: BaseException) -> dict[str, Any]:
    """Return the reply to a request that failed; print the traceback of an unexpected error."""
    if not isinstance(error, errors.TfdError):
        traceback.print_exception(error)
    return {"reply_to": request, "ok": False, "error": pack_error(error)}


def unpack_error(packed: Mapping[str, Any]) -> errors.TfdError:
    """Return the error that `pack_error` described."""
    kind = errors.BY_CODE.get(str(packed.get("code")), errors.TfdError)
    return kind(str(packed.get("what")), task=packed.get("task"), fix=packed.get("fix"))
