"""State of TensorFlow's runtime in this process."""

from __future__ import annotations

import sys


def runs_alone() -> bool:
    """Return True if TensorFlow initialized its devices without any other task.

    The result stays true until a strategy connects. TensorFlow can reject that connection.
    """
    module = sys.modules.get("tensorflow.python.eager.context")
    # Other versions may lack this name. The result is False then, so that no warning appears.
    current = getattr(module, "context_safe", lambda: None)()
    return (
        current is not None
        and bool(getattr(current, "_initialized", False))
        and current.get_server_def() is None
        and getattr(current, "_collective_ops_server_def", None) is None
    )
