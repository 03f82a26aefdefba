"""Validation of the addresses of tasks."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfd_notebook.errors import Malformed, NoTasks
from tfd_notebook.model.spec import Endpoint

#: Addresses by job: in the order of the tasks, or by index if some tasks are unknown.
AddressesByJob = Mapping[str, Sequence[str] | Mapping[int, str]]
#: Pages of a list of hosts that are requested, with 500 hosts each. A list may have no end.
MAX_PAGES = 20
PAGE_HOSTS = 500
#: Seconds for all requests of one resolution.
RESOLVE_SECONDS = 300.0
#: Validated addresses by job and index.
Tasks = dict[str, dict[int, str]]

_FIX = 'write "host:port" with a port of 1 to 65535, and IPv6 in brackets: "[::1]:8470"'
_FORM = 'write {"worker": ["host:port", ...], "ps": [...]}'
_TASK = 'write "task": {"type": "worker", "index": 0}'
#: Fix for an invalid TF_CONFIG.
_TF_CONFIG_FORM = 'write {"cluster": {"worker": ["host:port", ...], "ps": [...]}}'


def checked(description: Any, place: str) -> Tasks:
    """Return the validated tasks of a description.

    Parameters
    ----------
    description : mapping of str to sequence of str, or to mapping of int to str
        Addresses by job.
    place : str
        Source of the description, as the first words of errors.

    Raises
    ------
    Malformed
        The description has a different form, contains an invalid address, or mixes IPv4 and IPv6.
    NoTasks
        A job is empty.
    """
    if not isinstance(description, Mapping):
        raise Malformed(
            f"{place}: invalid description {_short(description)}: expected tasks by job", fix=_FORM
        )
    tasks: Tasks = {}
    for job, addresses in description.items():
        if not isinstance(job, str) or not re.fullmatch(r"[A-Za-z_]\w*", job):
            raise Malformed(
                f"{place}: invalid name of a job {job!r}",
                fix='use letters, digits and "_", as in "worker", "ps", "chief"',
            )
        tasks[job] = {
            index: _address(address, f"{job}:{index}", place)
            for index, address in _indexed(addresses, job, place)
        }
        if not tasks[job]:
            raise NoTasks(
                f"{place}: the job {job!r} has no tasks",
                fix="omit the job, or start its tasks first",
            )
    _one_family(tasks, place)
    return tasks


def tasks_of(spec: Any) -> Tasks:
    """Return the addresses in a ``tf.train.ClusterSpec``, or in None."""
    return {
        job: {index: spec.task_address(job, index) for index in spec.task_indices(job)}
        for job in (spec.jobs if spec else ())
    }


def own_task(resolver: Any) -> tuple[str, int] | None:
    """Return job and index of this process by a ClusterResolver; None if it is not a task."""
    if hasattr(resolver, "own_task"):
        task: tuple[str, int] | None = resolver.own_task()
        return task
    job, index = resolver.task_type, resolver.task_id
    return (job, index) if isinstance(job, str) and isinstance(index, int) else None


def unlisted(own: tuple[str, int] | None, tasks: Mapping[str, Mapping[int, str]]) -> str:
    """Return a sentence if this process is a task that its cluster does not have, or ""."""
    if not own or not own[0] or own[0] == "evaluator" or own[1] in tasks.get(own[0], {}):
        return ""
    return f"this process is {own[0]}:{own[1]}, which its cluster does not have"


def parsed(text: str, place: str, form: str = _FORM) -> Any:
    """Return the value of a JSON text; `form` is the fix in the error.

    Raises
    ------
    Malformed
        The text is invalid. The error has the position.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{place}: invalid JSON: {error}: {_short(text)}", fix=form) from error


def mapping(value: Any, place: str) -> Mapping[str, Any]:
    """Return `value` if it is a mapping, or raise Malformed."""
    if isinstance(value, Mapping):
        return value
    raise Malformed(
        f"{place}: invalid content: expected an object, got {type(value).__name__}",
        fix=_TF_CONFIG_FORM,
    )


def tf_config() -> Mapping[str, Any]:
    """Return the content of TF_CONFIG, which is empty if the variable is not set.

    Raises
    ------
    Malformed
        The text is not a JSON object.
    """
    text = os.environ.get("TF_CONFIG", "")
    config = parsed(text, "TF_CONFIG", _TF_CONFIG_FORM) if text.strip() else {}
    return mapping(config, "TF_CONFIG")


def task_of(task: Any, place: str) -> tuple[str, int] | None:
    """Return job and index of a ``"task"``, or None if it is empty.

    As in TensorFlow, the index may be a string.

    Raises
    ------
    Malformed
        It has no type or no index.
    """
    if not task:
        return None
    if not isinstance(task, Mapping) or not isinstance(task.get("type"), str):
        raise Malformed(f"{place}: the task {task!r} has no type", fix=_TASK)
    try:
        index = int(task["index"])
    except (KeyError, TypeError, ValueError, OverflowError):
        index = -1
    if index < 0:
        raise Malformed(f"{place}: the task {task!r} has no index", fix=_TASK)
    return task["type"], index


def natural(name: str) -> tuple[Any, ...]:
    """Return a sort key for names that orders ``n2`` before ``n10``."""
    parts = re.split(r"(\d+)", name)
    # Not as an int: Python does not convert thousands of digits.
    numbers = [part.lstrip("0") if part.isdecimal() else "" for part in parts]
    return tuple((len(n), n, part) for n, part in zip(numbers, parts, strict=True))


def _indexed(addresses: Any, job: str, place: str) -> Iterable[tuple[int, Any]]:
    if isinstance(addresses, Mapping):
        try:
            # Keys in JSON are strings.
            items = sorted((int(index), address) for index, address in addresses.items())
        except (TypeError, ValueError):
            items = [(-1, "")]
        if any(index < 0 for index, _ in items) or len(dict(items)) < len(addresses):
            raise Malformed(
                f"{place}: invalid indexes of the job {job!r}: {_short(addresses)}", fix=_FORM
            )
        return items
    if isinstance(addresses, Sequence) and not isinstance(addresses, (str, bytes)):
        return enumerate(addresses)
    raise Malformed(
        f"{place}: invalid job {job!r}: expected a list, got {_short(addresses)}", fix=_FORM
    )


def _address(address: Any, task: str, place: str) -> str:
    try:
        endpoint = Endpoint.parse(address)
        if not re.fullmatch(r"[\w.-]+", endpoint.host):
            ipaddress.ip_address(endpoint.host)
        return str(endpoint)
    except (ValueError, AttributeError):  # a UsageError is a ValueError
        raise Malformed(
            f"{place}: invalid address {_short(address)} of {task}",
            task=task,
            fix=_FIX,
        ) from None


def _one_family(tasks: Tasks, place: str) -> None:
    by_version: dict[int, str] = {}
    for job, addresses in tasks.items():
        for index, address in addresses.items():
            try:
                version = ipaddress.ip_address(Endpoint.parse(address).host).version
            except ValueError:
                continue
            by_version.setdefault(version, f"{job}:{index} at {address}")
    if len(by_version) > 1:
        raise Malformed(
            f"{place}: {by_version[4]} has an IPv4 address, and {by_version[6]} an IPv6 address: "
            "they may not reach each other",
            fix="use only IPv4 addresses, only IPv6 addresses, or names",
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
