"""Writing to pipes with asyncio."""

from __future__ import annotations

import asyncio


def flow_control() -> asyncio.BaseProtocol:
    """Return a protocol with which a ``StreamWriter`` of a pipe can wait until it is drained."""
    mixin = getattr(asyncio.streams, "FlowControlMixin", None)
    # The protocol of streams has the same, next to a reader that is not used.
    return mixin() if mixin is not None else asyncio.StreamReaderProtocol(asyncio.StreamReader())
