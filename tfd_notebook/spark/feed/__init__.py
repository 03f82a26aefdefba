"""Feeding: rows go from Spark's tasks to the nodes, and results come back.

::

    Spark's task (on the executor)                      the node (a process of its own)
    rows ─► packing ─► chunks ── a unix socket ──► Inbox ─► queue ─► DataFeed ─► the user's function
                                  ◄── consumed, results, errors ──

A chunk is about a mebibyte of rows as columns. A task may have as many chunks on the way as the
node grants it, and is told when the user's function has taken one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfd_notebook.spark.feed.datafeed import DataFeed as DataFeed
    from tfd_notebook.spark.feed.inbox import Inbox as Inbox
    from tfd_notebook.spark.feed.place import Place as Place
    from tfd_notebook.spark.feed.place import choose as choose
    from tfd_notebook.spark.feed.sending import Fed as Fed
    from tfd_notebook.spark.feed.sending import feed_partition as feed_partition
    from tfd_notebook.spark.feed.sending import infer_partition as infer_partition

_HOMES = {
    "DataFeed": "datafeed",
    "Fed": "sending",
    "Inbox": "inbox",
    "Place": "place",
    "choose": "place",
    "feed_partition": "sending",
    "infer_partition": "sending",
}

__all__ = [
    "DataFeed",
    "Fed",
    "Inbox",
    "Place",
    "choose",
    "feed_partition",
    "infer_partition",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
