"""Feeding: rows travel from Spark tasks to the nodes, and results travel back.

::

    Spark task (on the executor)                        node (a separate process)
    rows ─► packing ─► chunks ── Unix socket ─────► Inbox ─► queue ─► DataFeed ─► user's function
                                  ◄── acknowledgements, results, errors ──

A chunk is about 1 MiB of rows in columns. The node grants each task a window of chunks. It
acknowledges a chunk when the user's function has consumed it.
"""
