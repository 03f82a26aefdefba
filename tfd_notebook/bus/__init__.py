"""The bus: what panel and widgets see of the clusters, and what they may ask of them.

`SnapshotFeed` makes messages of snapshots, `ColumnFeed` of closures. A `Session` sends them to one
place, which is all panels (`comm`) or one widget; one `Hub` ticks for all sessions.
"""

from __future__ import annotations

import os
from typing import Any

from tfd_notebook._version import VERSION

#: Grows whenever kernel and browser of different versions would misunderstand each other.
PROTOCOL = 1


def greeting() -> dict[str, Any]:
    """Return the message that says who this is, and in which protocol it speaks."""
    return {"kind": "hello", "protocol": PROTOCOL, "version": VERSION, "pid": os.getpid()}
