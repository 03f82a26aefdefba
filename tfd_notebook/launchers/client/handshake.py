"""The handshake of a host: the first data on a channel, with the versions of its packages."""

from __future__ import annotations

import json
import platform
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tfd_notebook._version import VERSION
from tfd_notebook.agent.bridges import stdio
from tfd_notebook.errors import InvalidMessage, LaunchError, TensorFlowMissing
from tfd_notebook.net import agent_protocol, messages, validation
from tfd_notebook.net.host import tensorflow_version

#: Characters that an error quotes of each line before the handshake.
_MAX_SHOWN = 500


@dataclass(frozen=True)
class HostHandshake:
    """The handshake of a host; see `tfd_notebook.agent.bridges.stdio`."""

    package: str
    python: str
    executable: str
    tensorflow: str | None
    #: Claimed by the host; see `tfd_notebook.launchers.client.shared_hosts`.
    identity: str
    connection: str
    #: The key of the connections of a bridge to this process; see `client.rendezvous`.
    token: str = field(default="", repr=False)
    #: Idle seconds after which the Jupyter server ends the kernel; None if unknown.
    cull_seconds: float | None = None


def read_handshake(
    label: str, lines: Iterator[bytes], reconnect: bool = False, fix: str = ""
) -> HostHandshake:
    """Return the handshake of a host; lines before it, such as a banner, are skipped.

    Parameters
    ----------
    label : str
    lines : iterator of bytes
    reconnect : bool
        True if the host sent a handshake before. Default false.
    fix : str, optional
        The next step if Python on the host lacks a package. Default: for ``python=``.

    Raises
    ------
    LaunchError
        The host cannot run an agent, or sent no handshake.
    InvalidMessage
        The handshake is invalid.
    OSError
        The connection broke before the handshake, and `reconnect` is true.
    """
    output: deque[str] = deque(maxlen=3)
    for line in lines:
        text = line.decode(errors="replace").rstrip()
        if text.startswith(stdio.HANDSHAKE):
            return _checked(label, _parsed(label, text.removeprefix(stdio.HANDSHAKE)), fix)
        output.append(validation.text(text, "line")[:_MAX_SHOWN])
    shown = "; ".join(text for text in output if text)
    if reconnect:
        raise OSError(f"the connection broke at once{shown and ': '}{shown}")
    raise LaunchError(
        f"starting an agent on {label} failed" + (f": its output is {shown!r}" if shown else ""),
        fix=fix or "set python= to a Python on the host that has tfd-notebook and TensorFlow",
    )


def _parsed(label: str, text: str) -> dict[str, Any]:
    """Return the fields of a handshake after validation."""
    try:
        validation.check_values(text)
        return messages.handshake(json.loads(text))
    except (ValueError, RecursionError):
        raise InvalidMessage(f"{label} sent an invalid handshake: expected JSON") from None
    except InvalidMessage as error:
        error.what = f"{label}: {error.what}"
        raise


def _checked(label: str, handshake: Mapping[str, Any], fix: str) -> HostHandshake:
    python = f"its Python {handshake['python']} ({handshake['executable']})"
    if "import_error" in handshake:
        installed = handshake["package"]
        if installed in (None, VERSION):
            lacks = "cannot import" if installed else "has no"
            what = f"{lacks} tfd-notebook: {handshake['import_error']}"
        else:
            what = f"has tfd-notebook {installed} and this kernel {VERSION}"
        raise LaunchError(
            f"{label}: {python} {what}",
            fix=fix or f'pip install "tfd-notebook[tensorflow]=={VERSION}" on it, or set python=',
        )
    if "error" in handshake:
        error = agent_protocol.unpack_error(handshake["error"])
        error.what = f"{label}: {error.what}"
        raise error
    if handshake["package"] != VERSION:
        raise LaunchError(
            f"{label}: {python} has tfd-notebook {handshake['package']} and this kernel {VERSION}",
            fix=f"pip install tfd-notebook=={VERSION} on that host",
        )
    version = platform.python_version()
    if incompatible(version, handshake["python"]):
        raise LaunchError(
            f"{label}: {python} cannot run functions of this kernel, which has Python {version}",
            fix=f"use Python {'.'.join(series(version))} there, with python= or kernel=, or in the "
            "image or the workers",
        )
    if handshake["tensorflow"] is None:
        raise TensorFlowMissing(
            f"{label}: {python} has no TensorFlow",
            fix=fix or 'pip install "tfd-notebook[tensorflow]" on it, or set python=',
        )
    local = tensorflow_version()
    if local is not None and incompatible(local, handshake["tensorflow"]):
        raise LaunchError(
            f"{label}: {python} has TensorFlow {handshake['tensorflow']} and this kernel {local}, "
            "which may not be compatible",
            fix="install the same version on both",
        )
    return HostHandshake(
        **{
            name: handshake[name]
            for name in HostHandshake.__dataclass_fields__
            if name in handshake
        }
    )


def series(version: str) -> list[str]:
    """Return the parts of a version that must be equal for compatibility."""
    return version.split(".")[:2]


def incompatible(one: str, other: str) -> bool:
    """Return True if two versions of Python, or of TensorFlow, are incompatible.

    Processes of different TensorFlow cannot communicate. Functions are sent as bytecode of Python.
    """
    return "unknown" not in (one, other) and series(one) != series(other)
