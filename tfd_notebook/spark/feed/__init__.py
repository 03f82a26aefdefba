"""Feeding: rows go from Spark's tasks to the nodes, and results come back.

::

    Spark's task (on the executor)                      the node (a process of its own)
    rows ─► packing ─► chunks ── a unix socket ──► Inbox ─► queue ─► DataFeed ─► the user's function
                                  ◄── consumed, results, errors ──

A chunk is about a mebibyte of rows as columns. A task may have as many chunks on the way as the
node grants it, and is told when the user's function has taken one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfd_notebook._lazy import exports

if TYPE_CHECKING:
    from tfd_notebook.spark.feed.datafeed import DataFeed as DataFeed
    from tfd_notebook.spark.feed.inbox import Inbox as Inbox
    from tfd_notebook.spark.feed.sender import FeedResult as FeedResult
    from tfd_notebook.spark.feed.sender import InboxAddress as InboxAddress
    from tfd_notebook.spark.feed.sender import choose as choose
    from tfd_notebook.spark.feed.sender import feed_partition as feed_partition
    from tfd_notebook.spark.feed.sender import infer_partition as infer_partition


__all__ = [
    "DataFeed",
    "FeedResult",
    "Inbox",
    "InboxAddress",
    "choose",
    "feed_partition",
    "infer_partition",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "DataFeed": "datafeed",
        "FeedResult": "sender",
        "Inbox": "inbox",
        "InboxAddress": "sender",
        "choose": "sender",
        "feed_partition": "sender",
        "infer_partition": "sender",
    },
)
