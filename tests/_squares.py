"""A function for the nodes of a TFCluster. Spark sends it by value."""

from __future__ import annotations

from typing import Any


def squares_function() -> Any:
    """Return a function that returns the square of each row. On a parameter server, it waits."""

    def squares(args: Any, ctx: Any) -> None:
        import threading

        if ctx.job_name == "ps":
            threading.Event().wait()
        feed = ctx.get_data_feed(train_mode=False)
        while not feed.should_stop():
            if rows := feed.next_batch(16):
                feed.batch_results([row * row for row in rows])

    return squares
