"""The bus: publishes the state of clusters to panel and widgets, and executes their commands.

`SnapshotFeed` encodes snapshots and `ColumnFeed` encodes closures. A `Session` sends the messages
to all panels (`comm`) or to one widget. One `Hub` drives all sessions.
"""

from __future__ import annotations

import os
from typing import Any

from tfd_notebook._version import VERSION

#: Increased with each incompatible change of the messages between kernel and browser.
PROTOCOL = 4


def greeting() -> dict[str, Any]:
    """Return the greeting with the protocol, the version and the pid of this process."""
    return {"kind": "hello", "protocol": PROTOCOL, "version": VERSION, "pid": os.getpid()}
