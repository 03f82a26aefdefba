"""Explanations of TensorFlow's obscure errors around clusters, with the next step."""

from __future__ import annotations

import re

from tfd_notebook._compat import errors

_STALE = (
    "this variable, function or iterator belongs to a cluster, or a parameter server's process, "
    "that no longer exists: create it again with the current strategy (run the cell that builds "
    "the model)"
)
_LOCAL = (
    "this process created the variable, generator or iterator before it connected to the cluster, "
    "so only this process can use it: create it, or load its model, again in the scope of the "
    "current strategy"
)
_PS_LOST = (
    "a parameter server was lost with its variables: call cluster.recover(checkpoint), then build "
    "the model again, or use tfd.training_loop, which does both"
)
_FROM_PS = "GRPC error information from remote target /job:ps"

#: A worker finds a resource of the coordinator only if it is newer than the connection.
_MISSING_HERE = re.compile(
    r"Anonymous.* does not exist.*remote target /job:(?!ps|worker)"
    r"|serialize the input pipeline graph: (Resource|Container) Anonymous",
    re.DOTALL,
)

#: Parts of TensorFlow's messages with an explanation. The first match is used.
_SENTENCES = (
    ("remote_handle", _STALE),
    ("invalid device", _STALE),
    ("unknown device", _STALE),
    ("Unable to find the relevant tensor remote_handle", _STALE),
    ("Could not find resource", _STALE),
    ("does not exist. This could mean that the variable has been deleted", _STALE),
)


def is_loss(error: BaseException) -> bool:
    """Return True if an error reports the loss of a parameter server."""
    return type(error).__name__ in (
        "UnavailableError",
        "PSUnavailableError",
        "AbortedError",
    ) and _FROM_PS in str(error)


def lost_tasks(error: BaseException) -> str:
    """Return the names of the parameter servers in an error's message."""
    indices = sorted(set(re.findall(r"remote target /job:ps/replica:\d+/task:(\d+)", str(error))))
    return ", ".join(f"ps:{index}" for index in indices)


def is_stale(error: BaseException) -> bool:
    """Return True if an error is about a resource of a server process that no longer exists."""
    return any(part in str(error) for part, sentence in _SENTENCES if sentence is _STALE)


def explain(error: BaseException) -> str:
    """Add an explanation to an error if one is known, and return it, or an empty string."""
    text = str(error)
    sentence = _LOCAL if _MISSING_HERE.search(text) else ""
    sentence = sentence or next((s for part, s in _SENTENCES if part in text), "")
    if not sentence and is_loss(error):
        sentence = _PS_LOST
    if sentence:
        errors.add(error, f"tfd_notebook: {sentence}.")
    return sentence
