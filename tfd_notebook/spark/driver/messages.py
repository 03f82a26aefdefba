"""Messages from nodes on Spark and from Spark tasks, with one check per field."""

from __future__ import annotations

from typing import Any

from tfd_notebook.errors import TfdError
from tfd_notebook.net import agent_protocol
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
FINAL_STATES = ("finished", "failed", "lost", "stopped")


def _board(value: Any, path: str) -> str:
    """Return the address of a TensorBoard, ``"http://host:port"``."""
    if not isinstance(value, str) or not value.startswith("http://"):
        raise invalid(path, value, "http://host:port")
    address(value.removeprefix("http://"), path)
    return value


_count = integer()
_status = record(
    {
        "state": one_of("starting", "running", *FINAL_STATES),
        "reason": text,
        "ended": boolean,
        "path": text,
        "board": either(one_of(""), _board),
        "board_pid": either(integer(0, 0), pid),
        "board_error": long_text,
        "open_to": text,
        "error": long_text,
        #: Counters of a node's inbox; empty until its function begins.
        "numbers": record(
            {},
            rows=_count,
            results=_count,
            queue_depth=_count,
            queue_capacity=_count,
            batch_age_s=optional(number),
            feeders=_count,
            state=text,
            queues=mapping(text, record({"depth": _count, "rows": _count, "ended": boolean})),
        ),
    }
)
_node = integer(0, 10**6)
#: An error with a traceback.
_long_error = record({"code": text, "what": long_text}, task=optional(text), fix=optional(text))
#: Messages of nodes and of Spark tasks that feed, by the value of ``type``.
_SPARK: dict[str, Check] = {
    "reserved": record(
        {
            "type": text,
            "node": _node,
            "address": address,
            "executor": text,
            "host": text,
            "jvm": pid,
            "gpu": text,
            "attempt": _count,
        }
    ),
    "start_failed": record({"type": text, "node": _node, "error": _long_error}),
    "update": record(
        {"type": text, "node": _node, "pid": pid, "seq": _count, "log": output, "status": _status}
    ),
    "feed_repeated": record({"type": text, "partition": _count, "attempt": _count}),
    "feed_failed": record({"type": text, "stage": integer(-1)}, error=error),
    "register_worker": record({"type": text, "host": text, "pid": pid, "path": file_path}),
    "list_workers": record({"type": text, "host": text}),
}


def spark_message(message: Any, *kinds: str) -> dict[str, Any]:
    """Return a valid message of one of these kinds, or raise InvalidMessage."""
    kind = one_of(*kinds)(record_with({})(message, "message").get("type"), "type")
    valid: dict[str, Any] = _SPARK[kind](message, kind)
    return valid


def start_error(message: Any, name: str) -> TfdError:
    """Return the error of a node that did not start.

    Raises
    ------
    InvalidMessage
        The message is invalid, or its error names another task than `name`.
    """
    packed = spark_message(message, "start_failed")["error"]
    if packed.get("task") not in (None, name):
        raise invalid("error.task", packed["task"], name)
    return agent_protocol.unpack_error(packed)
