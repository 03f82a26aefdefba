"""The addresses of tasks by job: what a system says, looked at before anybody uses it."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfd_notebook.errors import Malformed, NoTasks, UsageError
from tfd_notebook.model.spec import Endpoint

#: Addresses by job: in the order of the tasks, or by index where some are not known.
Found = Mapping[str, Sequence[str] | Mapping[int, str]]
#: The same, checked: by job and index.
Tasks = dict[str, dict[int, str]]

_FIX = 'write "host:port" with a port of 1 to 65535, and IPv6 in brackets: "[::1]:8470"'
_FORM = 'write {"worker": ["host:port", ...], "ps": [...]}'
#: How TF_CONFIG names them.
TF_CONFIG_FORM = 'write {"cluster": {"worker": ["host:port", ...], "ps": [...]}}'


def checked(found: Any, place: str) -> Tasks:
    """Return what `found` says, if it can be meant.

    Parameters
    ----------
    found : mapping of str to sequence of str, or to mapping of int to str
        Addresses by job.
    place : str
        Where it was found: the beginning of each error.

    Raises
    ------
    Malformed
        It has another form, holds something that is no address, or IPv4 and IPv6 addresses.
    NoTasks
        A job is empty.
    """
    if not isinstance(found, Mapping):
        raise Malformed(f"{place}: {_short(found)} does not say which tasks there are", fix=_FORM)
    tasks: Tasks = {}
    for job, addresses in found.items():
        if not isinstance(job, str) or not re.fullmatch(r"[A-Za-z_]\w*", job):
            raise Malformed(
                f"{place}: {job!r} is no name of a job",
                fix='use letters, digits and "_", as in "worker", "ps", "chief"',
            )
        tasks[job] = {
            index: _address(address, f"{job}:{index}", place)
            for index, address in _indexed(addresses, job, place)
        }
        if not tasks[job]:
            raise NoTasks(
                f"{place}: the job {job!r} has no tasks",
                fix="leave the job out, or start its tasks first",
            )
    _one_family(tasks, place)
    return tasks


def tasks_of(spec: Any) -> Tasks:
    """Return the addresses in a ``tf.train.ClusterSpec``, or in None."""
    return {
        job: {index: spec.task_address(job, index) for index in spec.task_indices(job)}
        for job in (spec.jobs if spec else ())
    }


def parsed(text: str, place: str, form: str = _FORM) -> Any:
    """Return what JSON says; `form` is the next step where it is none.

    Raises
    ------
    Malformed
        With the place where it cannot be read any further.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise Malformed(f"{place} is no JSON: {error}: {_short(text)}", fix=form) from error


def natural(name: str) -> tuple[Any, ...]:
    """Return what names are sorted by so that ``n2`` comes before ``n10``."""
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), part) if part.isdecimal() else (0, part) for part in parts)


def check_port(name: str, port: Any) -> int:
    """Return `port` if it is the number of a TCP port.

    Raises
    ------
    UsageError
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise UsageError(f"{name}={port!r} is out of range", fix="use 1 to 65535")
    return port


def _indexed(addresses: Any, job: str, place: str) -> Iterable[tuple[int, Any]]:
    if isinstance(addresses, Mapping):
        try:
            # JSON has no numbers for keys.
            found = sorted((int(index), address) for index, address in addresses.items())
        except (TypeError, ValueError):
            found = [(-1, "")]
        if any(index < 0 for index, _ in found) or len(dict(found)) < len(addresses):
            raise Malformed(
                f"{place}: the tasks of {job!r} are not numbered: {_short(addresses)}", fix=_FORM
            )
        return found
    if isinstance(addresses, Sequence) and not isinstance(addresses, (str, bytes)):
        return enumerate(addresses)
    raise Malformed(f"{place}: {_short(addresses)} is no list of the job {job!r}", fix=_FORM)


def _address(address: Any, task: str, place: str) -> str:
    try:
        endpoint = Endpoint.parse(address)
        if not re.fullmatch(r"[\w.-]+", endpoint.host):
            ipaddress.ip_address(endpoint.host)
        return str(endpoint)
    except (ValueError, AttributeError):  # a UsageError is a ValueError
        raise Malformed(
            f"{place}: {task} is said to be at {_short(address)}, which is no address",
            task=task,
            fix=_FIX,
        ) from None


def _one_family(tasks: Tasks, place: str) -> None:
    seen: dict[int, str] = {}
    for job, addresses in tasks.items():
        for index, address in addresses.items():
            try:
                version = ipaddress.ip_address(Endpoint.parse(address).host).version
            except ValueError:
                continue
            seen.setdefault(version, f"{job}:{index} at {address}")
    if len(seen) > 1:
        raise Malformed(
            f"{place}: {seen[4]} has an IPv4 address, {seen[6]} one of IPv6: "
            "they may not reach each other",
            fix="give all tasks addresses of one kind, or names",
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
