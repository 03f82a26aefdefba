"""Sentences for TensorFlow's opaquest errors around clusters: what they mean, what to do."""

from __future__ import annotations

import re

from tfd_notebook._compat import errors

_STALE = (
    "this variable, function or iterator was made for a cluster, or a parameter server's process, "
    "that is gone: make it again under the present strategy (run the cell that builds the model)"
)
_PS_LOST = (
    "a parameter server was lost, and its variables with it: cluster.recover(checkpoint) brings it "
    "back; then build the model again, or use tfd.training_loop, which does it all"
)
_FROM_PS = "GRPC error information from remote target /job:ps"

#: Words of TensorFlow's, and what they mean; the first that is found counts.
_SENTENCES = (
    ("remote_handle", _STALE),
    ("invalid device", _STALE),
    ("unknown device", _STALE),
    ("Unable to find the relevant tensor remote_handle", _STALE),
    ("Could not find resource", _STALE),
    ("does not exist. This could mean that the variable has been deleted", _STALE),
)


def is_loss(error: BaseException) -> bool:
    """Whether an error tells that a parameter server was lost."""
    return type(error).__name__ in (
        "UnavailableError",
        "PSUnavailableError",
        "AbortedError",
    ) and _FROM_PS in str(error)


def lost_tasks(error: BaseException) -> str:
    """Return the names of the parameter servers that an error speaks of."""
    found = sorted(set(re.findall(r"remote target /job:ps/replica:\d+/task:(\d+)", str(error))))
    return ", ".join(f"ps:{index}" for index in found)


def is_stale(error: BaseException) -> bool:
    """Whether an error tells that something was made for a server's process that is gone."""
    return any(words in str(error) for words, said in _SENTENCES if said is _STALE)


def explain(error: BaseException) -> str:
    """Add to an error what it means, where that is known; return the sentence, or nothing."""
    text = str(error)
    sentence = next((said for words, said in _SENTENCES if words in text), "")
    if not sentence and is_loss(error):
        sentence = _PS_LOST
    if sentence:
        errors.add(error, f"tfd_notebook: {sentence}.")
    return sentence
