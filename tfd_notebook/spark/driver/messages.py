"""Messages from nodes on Spark and from Spark tasks, with one check per field."""

from __future__ import annotations

from typing import Any

from tfd_notebook.net.messages import error
from tfd_notebook.net.validation import (
    Check,
    address,
    boolean,
    either,
    file_path,
    integer,
    invalid,
    long_text,
    mapping,
    number,
    one_of,
    optional,
    output,
    pid,
    record,
    record_with,
    text,
)

#: The final states of a node.
NODE_ENDS = ("finished", "failed", "lost", "stopped")


def _board(value: Any, path: str) -> str:
    """Return the address of a TensorBoard, ``"http://host:port"``."""
    if not isinstance(value, str) or not value.startswith("http://"):
        raise invalid(path, value, "http://host:port")
    address(value.removeprefix("http://"), path)
    return value


_known = record(
    {
        "state": one_of("starting", "running", *NODE_ENDS),
        "path": text,
        "board": either(one_of(""), _board),
        "board_pid": either(integer(0, 0), pid),
        "no_board": long_text,
        "open_to": text,
        "error": long_text,
    }
)
_count = integer()
#: Counters of a node's inbox; empty until its function begins.
_numbers = record(
    {},
    rows=_count,
    results=_count,
    queue_depth=_count,
    queue_capacity=_count,
    batch_age_s=optional(number),
    feeders=_count,
    state=text,
    queues=mapping(text, record({"depth": _count, "rows": _count, "ended": boolean})),
)
_node = integer(0, 10**6)
_update = {"word": _count, "log": output, "known": _known, "numbers": _numbers}
#: Messages of nodes and of Spark tasks that feed, by the value of ``say``.
_SPARK: dict[str, Check] = {
    "reserved": record(
        {
            "say": text,
            "node": _node,
            "address": address,
            "executor": text,
            "host": text,
            "jvm": pid,
            "gpu": text,
            "attempt": _count,
        }
    ),
    "hello": record({"say": text, "node": _node, "pid": pid, "supervisor": pid, "known": _known}),
    "unable": record({"say": text, "node": _node, "error": error}),
    **dict.fromkeys(
        ("beat", "state", "inbox", "error", "port", "tensorboard"), record({"say": text, **_update})
    ),
    "ended": record({"say": text, **_update, "state": one_of(*NODE_ENDS), "reason": text}),
    "fed again": record({"say": text, "partition": _count, "attempt": _count}),
    "gave up": record({"say": text, "stage": integer(-1)}, error=error),
    "producing": record({"say": text, "host": text, "pid": pid, "path": file_path}),
    "where": record({"say": text, "host": text}),
}
#: Messages that a node sends first on a channel, and after its hello.
NODE_GREETINGS = ("reserved", "hello", "unable")
NODE_WORDS = ("beat", "state", "inbox", "error", "port", "tensorboard", "ended")


def spark_message(message: Any, *kinds: str) -> dict[str, Any]:
    """Return a valid message of one of these kinds, or raise InvalidMessage."""
    kind = one_of(*kinds)(record_with({})(message, "message").get("say"), "say")
    valid: dict[str, Any] = _SPARK[kind](message, kind)
    return valid


#: The error of a function that `TFParallel.run` runs.
function_error = record({"number": _node, "host": text, "what": long_text, "traceback": long_text})
