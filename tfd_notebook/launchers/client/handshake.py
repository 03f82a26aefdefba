"""What a host says of itself before anything else, and whether that will do."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tfd_notebook._version import VERSION
from tfd_notebook.agent.bridges import stdio
from tfd_notebook.errors import InvalidMessage, LaunchError, TensorFlowMissing
from tfd_notebook.net import agent_protocol, messages, validation
from tfd_notebook.net.host import identity, tensorflow_version

#: Characters of each line before the greeting that an error quotes.
_MAX_SHOWN = 500


@dataclass(frozen=True)
class HostHandshake:
    """What a host says of itself before anything else; see `tfd_notebook.agent.bridges.stdio`."""

    package: str
    python: str
    executable: str
    tensorflow: str | None
    identity: str
    way: str
    #: After how many idle seconds the server of its kernel ends one; None: not known to.
    culls: float | None = None

    @property
    def is_here(self) -> bool:
        """Whether it shares its ports with this process."""
        return self.identity == identity()


def read_handshake(label: str, lines: Iterator[bytes], again: bool = False) -> HostHandshake:
    """Return what a host says of itself; what comes before, such as a banner, is passed over.

    Parameters
    ----------
    label : str
    lines : iterator of bytes
    again : bool
        Whether it has greeted before. Default false.

    Raises
    ------
    LaunchError
        It cannot run an agent, or said nothing of the kind.
    InvalidMessage
        Its greeting is not valid.
    OSError
        The connection broke before it said anything, and it can do so.
    """
    seen: deque[str] = deque(maxlen=3)
    for line in lines:
        text = line.decode(errors="replace").rstrip()
        if text.startswith(stdio.GREETING):
            return _understood(label, _parsed(label, text.removeprefix(stdio.GREETING)))
        seen.append(validation.text(text, "line")[:_MAX_SHOWN])
    said = "; ".join(text for text in seen if text)
    if again:
        raise OSError(f"the connection broke at once{said and ': '}{said}")
    raise LaunchError(
        f"no agent could be started on {label}" + (f": it said {said!r}" if said else ""),
        fix="python= must name its Python that has tfd-notebook and TensorFlow",
    )


def _parsed(label: str, text: str) -> dict[str, Any]:
    """Return a greeting whose fields are valid."""
    try:
        return messages.greeting(json.loads(text))
    except (ValueError, RecursionError):
        raise InvalidMessage(f"{label} sent a greeting that is not JSON") from None
    except InvalidMessage as error:
        error.what = f"{label}: {error.what}"
        raise


def _understood(label: str, said: Mapping[str, Any]) -> HostHandshake:
    python = f"its Python {said['python']} ({said['executable']})"
    if "missing" in said:
        have = said["package"]
        raise LaunchError(
            f"{label}: {python} has tfd-notebook {have} and this kernel {VERSION}"
            if have
            else f"{label}: {python} has no tfd-notebook: {said['missing']}",
            fix=f'pip install "tfd-notebook[tensorflow]=={VERSION}" there, or name another Python',
        )
    if "error" in said:
        error = agent_protocol.unpack_error(said["error"])
        error.what = f"{label}: {error.what}"
        raise error
    if said["package"] != VERSION:
        raise LaunchError(
            f"{label}: {python} has tfd-notebook {said['package']} and this kernel {VERSION}",
            fix=f"pip install tfd-notebook=={VERSION} there",
        )
    if said["tensorflow"] is None:
        raise TensorFlowMissing(
            f"{label}: {python} has no TensorFlow",
            fix='pip install "tfd-notebook[tensorflow]" there, or name another Python',
        )
    mine = tensorflow_version()
    if mine is not None and series(mine) != series(said["tensorflow"]):
        raise LaunchError(
            f"{label}: {python} has TensorFlow {said['tensorflow']} and this kernel {mine}: "
            "they do not understand each other for certain",
            fix="install the same there and here",
        )
    return HostHandshake(
        **{name: said[name] for name in HostHandshake.__dataclass_fields__ if name in said}
    )


def series(version: str) -> list[str]:
    """Return the parts of a version of TensorFlow by which two understand each other."""
    return version.split(".")[:2]
