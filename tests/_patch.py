"""What a browser makes of the messages about a kernel's state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Tree = dict[str, Any]


def merged(target: Any, patch: Any) -> Any:
    """Apply a merge patch as RFC 7396 says."""
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
    """Return what all these messages of kind ``state`` come to."""
    tree: Tree = {}
    for message in messages:
        tree = message["state"] if message["full"] else merged(tree, message["state"])
    return tree
