"""Feeding: rows travel from Spark tasks to the nodes, and results travel back.

::

    Spark task (on the executor)                        node (a separate process)
    rows ─► packing ─► chunks ── Unix socket ─────► Inbox ─► queue ─► DataFeed ─► user's function
                                  ◄── acknowledgements, results, errors ──

A chunk is about 1 MiB of rows in columns. The node grants each task a window of chunks. It
acknowledges a chunk when the user's function has consumed it.
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
