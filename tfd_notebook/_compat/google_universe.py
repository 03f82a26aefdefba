"""The universe of Compute Engine's credentials, which they request without limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def with_universe(credentials: Any, request: Callable[..., Any]) -> Any:
    """Return credentials that know their universe; `request` reads it if they do not."""
    if getattr(credentials, "_universe_domain_cached", True):  # only those of Compute Engine
        return credentials
    from google.auth.compute_engine import _metadata

    read: Callable[..., Any] = _metadata.get_universe_domain
    return credentials.with_universe_domain(read(request))
