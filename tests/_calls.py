"""Counts calls, because a number of calls does not depend on the load of the machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any


def count_calls(function: Callable[[], Any]) -> int:
    """Return the number of calls in `function`, of functions in Python and in C."""
    counts: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: counts.update([event]))
    try:
        function()
    finally:
        sys.setprofile(None)
    return counts["call"] + counts["c_call"]
