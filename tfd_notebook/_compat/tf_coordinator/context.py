"""How far TensorFlow's runtime in this process has come."""

from __future__ import annotations

import sys


def runs_alone() -> bool:
    """Whether TensorFlow has set up its devices here without any other task.

    What is true once stays so until a strategy connects, which TensorFlow may refuse then.
    """
    module = sys.modules.get("tensorflow.python.eager.context")
    # Without that name (another version) it is not known, and nothing is said.
    found = getattr(module, "context_safe", lambda: None)()
    return (
        found is not None
        and bool(getattr(found, "_initialized", False))
        and found.get_server_def() is None
        and getattr(found, "_collective_ops_server_def", None) is None
    )
