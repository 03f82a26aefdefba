"""The bus: what panel and widgets see of the clusters, and what they may ask of them.

`Feed` makes messages out of snapshots, `ColumnFeed` out of closures; a `Session` sends them to one
place, which is all panels (`comm`) or one widget; one `Hub` ticks for all sessions.
"""

from __future__ import annotations

#: Grows whenever kernel and browser of different versions would misunderstand each other.
PROTOCOL = 1
