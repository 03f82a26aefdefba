"""Writing to pipes with asyncio."""

from __future__ import annotations

import asyncio


def flow_control() -> asyncio.BaseProtocol:
    """Return a protocol with which the ``StreamWriter`` of a pipe can wait in ``drain``."""
    mixin = getattr(asyncio.streams, "FlowControlMixin", None)
    # StreamReaderProtocol also implements it, with a reader that is not used.
    return mixin() if mixin is not None else asyncio.StreamReaderProtocol(asyncio.StreamReader())
