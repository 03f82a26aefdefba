"""Checks of JSON values from other hosts: types, ranges, names, addresses and sizes.

A check takes a value and its path in the message. It returns the value to use, or raises
`InvalidMessage`. Fields that a message's definition does not contain are rejected.
"""

from __future__ import annotations

import functools
import ipaddress
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any, TypeVar

from tfd_notebook.errors import CONTROL, InvalidMessage, UsageError
from tfd_notebook.model.spec import CLUSTER_NAME, MAX_TASKS_PER_ROLE, Role

#: Takes a value and its path; returns the value to use, or raises InvalidMessage.
Check = Callable[[Any, str], Any]
T = TypeVar("T")

#: Limit of a message, in bytes. Its reader holds all of it in memory.
MAX_MESSAGE_BYTES = 1 << 28
#: Maximum bytes of a journal in one reply.
MAX_JOURNAL_BYTES = 4_000_000
#: Limit of the values in a message, of which each can need 100 bytes of memory.
MAX_VALUES = 5_000_000
#: Characters that are kept of a free text, and the maximum number of entries in a list or mapping.
_MAX_TEXT = 20_000
_MAX_SHORT_TEXT = 500
_MAX_LONG_TEXT = 200_000
_MAX_ENTRIES = 10_000
_MAX_DEPTH = 50
_MAX_INTEGER = 2**63 - 1
_MAX_PID = 2**31 - 1
_MAX_TIMESTAMP = 2**40

_TASK = re.compile(r"(\w+):(0|[1-9]\d{0,3})", re.ASCII)
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?", re.ASCII)
_SCOPE = re.compile(r"[A-Za-z0-9_.-]{1,32}", re.ASCII)
_TUNNEL_NAME = re.compile(r"[0-9a-f]{12}\.tfd", re.ASCII)
_JOURNAL_FILE = re.compile(r"tf_data_dispatcher_journal/journal_\d{1,18}", re.ASCII)
#: Control characters that could change a terminal, except colors, \r, \t and \n.
_TERMINAL_CONTROL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]|\x1b(?!\\[[0-9;]*m)"
)


def invalid(path: str, value: Any, expected: str) -> InvalidMessage:
    """Return the error of an invalid value, which is quoted up to 60 characters."""
    shown = ascii(value if not isinstance(value, (str, bytes)) else value[:60])
    return InvalidMessage(f"invalid {path} {shown[:60]}: expected {expected}")


# Single values


def text(value: Any, path: str) -> str:
    """Return a text for users: cut to 20,000 characters, without control characters."""
    return _printable(value, path, _MAX_TEXT)


def short_text(value: Any, path: str) -> str:
    """Return a name or a sentence: cut to 500 characters, without control characters."""
    return _printable(value, path, _MAX_SHORT_TEXT)


def long_text(value: Any, path: str) -> str:
    """Return a text with a traceback: cut to 200,000 characters, without control characters."""
    return _printable(value, path, _MAX_LONG_TEXT)


def _printable(value: Any, path: str, most: int) -> str:
    if not isinstance(value, str):
        raise invalid(path, value, "a string")
    cut = value if len(value) <= most else value[: most - 1] + "…"
    return CONTROL.sub("\ufffd", cut.encode("utf-8", "replace").decode())


def output(value: Any, path: str) -> str:
    """Return the output of a process, whose length is limited only by that of a message."""
    if not isinstance(value, str):
        raise invalid(path, value, "a string")
    return value.encode("utf-8", "replace").decode()


def terminal_output(text: str) -> str:
    """Return output without control characters, except colors and carriage returns."""
    return _TERMINAL_CONTROL.sub("\ufffd", text)


def boolean(value: Any, path: str) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise invalid(path, value, "true or false")
    return value


def integer(least: int = 0, most: int = _MAX_INTEGER) -> Check:
    """Return the check of an integer in a range."""

    def check(value: Any, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise invalid(path, value, f"an integer from {least} to {most}")
        return value

    return check


def number(value: Any, path: str) -> float:
    """Return a finite number; an integer stays an integer."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise invalid(path, value, "a number")
    if (isinstance(value, int) and abs(value) > _MAX_INTEGER) or not math.isfinite(value):
        raise invalid(path, value, "a finite number")
    return value


def timestamp(value: Any, path: str) -> float:
    """Return a number of seconds, of which a date can be computed."""
    if not abs(number(value, path)) <= _MAX_TIMESTAMP:
        raise invalid(path, value, "a point in time")
    return float(value)


def nothing(value: Any, path: str) -> None:
    """Return None, the value of a reply that only acknowledges a request."""
    if value is not None:
        raise invalid(path, value, "null")


port = integer(1, 65535)
pid = integer(1, _MAX_PID)


def matching(pattern: re.Pattern[str], expected: str) -> Check:
    """Return the check of a string that matches a pattern completely."""

    def check(value: Any, path: str) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise invalid(path, value, expected)
        return value

    return check


cluster_name = matching(CLUSTER_NAME, "the name of a cluster")
tunnel_name = matching(_TUNNEL_NAME, "12 hexadecimal digits and .tfd")
journal_file = matching(_JOURNAL_FILE, "a file of the dispatcher's journal")


def _pem(kind: str) -> Check:
    """Return the check of one object in PEM, such as a certificate, of at most 100 lines."""
    lines = r"([A-Za-z0-9+/=]{1,76}\n){1,100}"
    pattern = re.compile(f"-----BEGIN {kind}-----\n{lines}-----END {kind}-----\n", re.ASCII)
    return matching(pattern, f"one {kind.lower()} in PEM")


certificate = _pem("CERTIFICATE")
signing_request = _pem("CERTIFICATE REQUEST")


def is_journal_file(name: str) -> bool:
    """Return True if the files of a dispatcher's journal can have this name."""
    return _JOURNAL_FILE.fullmatch(name) is not None


def task_name(value: Any, path: str) -> str:
    """Return the name of a task, such as ``worker:0``."""
    match = _TASK.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[1] not in set(Role) or int(match[2]) >= MAX_TASKS_PER_ROLE:
        raise invalid(path, value, "the name of a task")
    return match[0]


def ip_address(value: Any, path: str) -> str:
    """Return the address of one host; neither unspecified nor multicast."""
    try:
        if not isinstance(value, str):
            raise ValueError
        parsed = ipaddress.ip_address(value)
    except ValueError:
        raise invalid(path, value, "an IP address") from None
    mapped = getattr(parsed, "ipv4_mapped", None) or parsed
    # The scope of an IPv6 address may contain any character, such as a line break.
    scope = getattr(parsed, "scope_id", None)
    if scope is not None and not _SCOPE.fullmatch(scope):
        raise invalid(path, value, "an IP address")
    if mapped.is_unspecified or mapped.is_multicast or str(mapped) == "255.255.255.255":
        raise invalid(path, value, "the address of one host")
    return str(parsed)


def host(value: Any, path: str) -> str:
    """Return the name or IP address of a host."""
    if isinstance(value, str) and ":" not in value and _HOST_NAME.fullmatch(value):
        return value if not re.fullmatch(r"[\d.]+", value) else ip_address(value, path)
    return ip_address(value, path)


def address(value: Any, path: str) -> str:
    """Return ``"host:port"``, with brackets around an IPv6 address."""
    if not isinstance(value, str):
        raise invalid(path, value, "host:port")
    name, _, port_number = value.rpartition(":")
    if not re.fullmatch(r"[1-9]\d{0,4}", port_number, re.ASCII) or int(port_number) > 65535:
        raise invalid(path, value, "host:port")
    bracketed = name.startswith("[") and name.endswith("]")
    host(name[1:-1] if bracketed else name, path)
    if (":" in name) is not bracketed:
        raise invalid(path, value, "host:port")
    return value


def file_path(value: Any, path: str) -> str:
    """Return an absolute path on the other host."""
    if not isinstance(value, str) or not value.startswith("/") or len(value) > 4096:
        raise invalid(path, value, "an absolute path")
    if CONTROL.search(value):
        raise invalid(path, value, "an absolute path")
    return value


def json_value(value: Any, path: str, depth: int = 0) -> Any:
    """Return any JSON value with finite numbers and limited nesting."""
    if depth > _MAX_DEPTH:
        raise invalid(path, "...", f"at most {_MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {output(k, path): json_value(v, f"{path}.{k}", depth + 1) for k, v in value.items()}
    if isinstance(value, list):
        return [json_value(item, f"{path}[]", depth + 1) for item in value]
    if isinstance(value, str):
        return output(value, path)
    return value if value is None or isinstance(value, bool) else number(value, path)


# Composite values


def optional(check: Check) -> Check:
    """Return the check of a value that may be null."""
    return lambda value, path: None if value is None else check(value, path)


def either(*checks: Check) -> Check:
    """Return the check of a value that passes one of several checks; the last error is raised."""

    def check(value: Any, path: str) -> Any:
        for alternative in checks[:-1]:
            try:
                return alternative(value, path)
            except InvalidMessage:
                continue
        return checks[-1](value, path)

    return check


def one_of(*values: Any) -> Check:
    """Return the check of a value that is one of several strings."""

    def check(value: Any, path: str) -> Any:
        if not isinstance(value, str) or value not in values:
            raise invalid(path, value, " or ".join(map(str, values)))
        return value

    return check


def listing(check: Check, most: int = _MAX_ENTRIES) -> Check:
    """Return the check of a list."""

    def check_list(value: Any, path: str) -> list[Any]:
        if not isinstance(value, list) or len(value) > most:
            raise invalid(path, value, f"a list of at most {most} entries")
        return [check(item, f"{path}[{position}]") for position, item in enumerate(value)]

    return check_list


def pair(first: Check, second: Check) -> Check:
    """Return the check of a list with two entries."""

    def check(value: Any, path: str) -> list[Any]:
        if not isinstance(value, list) or len(value) != 2:
            raise invalid(path, value, "a list of two")
        return [first(value[0], f"{path}[0]"), second(value[1], f"{path}[1]")]

    return check


def mapping(key: Check, check: Check, most: int = _MAX_ENTRIES) -> Check:
    """Return the check of an object with arbitrary keys."""

    def check_mapping(value: Any, path: str) -> dict[Any, Any]:
        if not isinstance(value, dict) or len(value) > most:
            raise invalid(path, value, f"an object of at most {most} entries")
        return {key(k, f"{path} key"): check(v, f"{path}[{k!r:.60}]") for k, v in value.items()}

    return check_mapping


def record(checks: Mapping[str, Check], **optional_: Check) -> Check:
    """Return the check of an object with these fields, and optional ones."""

    def check_record(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise invalid(path, value, "an object")
        for name in value:
            if name not in checks and name not in optional_:
                raise invalid(f"{path}.{name!r:.60}", value[name], "no such field")
        result = {}
        for name, check in checks.items():
            if name not in value:
                raise invalid(f"{path}.{name}", None, "a value")
            result[name] = check(value[name], f"{path}.{name}")
        for name, check in optional_.items():
            if name in value:
                result[name] = check(value[name], f"{path}.{name}")
        return result

    return check_record


def record_with(checks: Mapping[str, Check]) -> Check:
    """Return the check of an object that has these fields; others are returned unchecked."""

    def check_record(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise invalid(path, value, "an object")
        checked = {name: check(value.get(name), f"{path}.{name}") for name, check in checks.items()}
        # An optional field that is missing stays missing.
        return {**value, **{k: v for k, v in checked.items() if k in value or v is not None}}

    return check_record


# Dataclasses, by their annotations


def from_json(kind: type[T], values: Any, path: str) -> T:
    """Return an instance of a dataclass from JSON values; unknown fields are rejected.

    Missing fields have their default. Strings are texts for users, unless the dataclass checks
    them.
    """
    key: Any = kind
    checks, needed = checks_of(key)
    values_by_name = record({}, **checks)(values, path)
    for name in needed - values_by_name.keys():
        raise invalid(f"{path}.{name}", None, "a value")
    return kind(**values_by_name)


@functools.cache
def checks_of(kind: Any) -> tuple[dict[str, Check], frozenset[str]]:
    """Return the checks of a dataclass's fields by name, and the fields without a default."""
    hints = typing.get_type_hints(kind)
    checks = {field.name: _check_of(hints[field.name]) for field in fields(kind)}
    needed = frozenset(
        field.name
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    )
    return checks, needed


def _check_of(hint: Any) -> Check:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return optional(_check_of(inner))
    if origin is tuple:
        inner = _check_of(arguments[0])
        size = None if arguments[-1] is Ellipsis else len(arguments)
        return lambda value, path: _tuple_of(inner, size, value, path)
    if origin is not None and issubclass(origin, Mapping):
        return mapping(_check_of(arguments[0]), _check_of(arguments[1]))
    if isinstance(hint, type) and issubclass(hint, Enum):
        values = one_of(*(member.value for member in hint))
        return lambda value, path: hint(values(value, path))
    known: dict[Any, Check] = {str: text, bool: boolean, int: integer(-1), float: number}
    if hint in known:
        return known[hint]
    return lambda value, path: from_json(hint, value, path)


def _tuple_of(inner: Check, size: int | None, value: Any, path: str) -> tuple[Any, ...]:
    items = tuple(listing(inner)(value, path))
    if size is not None and len(items) != size:
        raise invalid(path, value, f"a list of {size}")
    return items


def header_value(value: str, name: str) -> str:
    """Return a secret for an HTTP header, without the spaces and line breaks around it.

    Raises
    ------
    UsageError
        A header cannot have it. The error does not quote it.
    """
    value = value.strip()
    if not (value.isascii() and value.isprintable()):
        raise UsageError(f"invalid {name}: it has characters that an HTTP header cannot have")
    return value


def check_size(size: int) -> None:
    """Raise InvalidMessage if a message exceeds `MAX_MESSAGE_BYTES`."""
    if size > MAX_MESSAGE_BYTES:
        raise InvalidMessage(f"invalid message: longer than {MAX_MESSAGE_BYTES} bytes")


def check_values(message: str | bytes) -> None:
    """Raise InvalidMessage if a JSON text has more than `MAX_VALUES` values, before it is parsed.

    Commas and brackets in strings count, too.
    """
    data = message.encode("utf-8", "replace") if isinstance(message, str) else message
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise InvalidMessage(f"invalid message: more than {MAX_VALUES} values")
