"""Whether TensorFlow's coordinator is one that `closure_queue` was written for."""

from __future__ import annotations

import hashlib
import inspect

from tensorflow.python.distribute.coordinator import cluster_coordinator

from tfd_notebook._compat.tf_coordinator import closures

#: What `fingerprint` says of the files that this was written for and tried with.
KNOWN = {
    "a0abdf1a959acd06d92fe1c6e517872e057bc7d453d21753a65226c34375823c": "2.15 to 2.21",
}


def fingerprint() -> str:
    """Return a hash of TensorFlow's ``cluster_coordinator`` without its comments."""
    source = inspect.getsource(cluster_coordinator)
    lines = [line.rstrip() for line in source.splitlines()]
    kept = [line for line in lines if line and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def recognised() -> bool:
    """Whether this TensorFlow's coordinator is a known one, and all that it needs is there."""
    return not closures.missing and fingerprint() in KNOWN
