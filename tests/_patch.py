"""State of a kernel, assembled from messages as a browser does it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Tree = dict[str, Any]


def merged(target: Any, patch: Any) -> Any:
    """Apply a merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def tree_of(messages: Iterable[Tree]) -> Tree:
    """Return the state after all these messages of kind ``state``."""
    tree: Tree = {}
    for message in messages:
        tree = message["state"] if message["full"] else merged(tree, message["state"])
    return tree
