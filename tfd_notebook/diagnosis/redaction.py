"""Takes out of texts what nobody else may read."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

REMOVED = "[removed]"
#: Names of what is secret.
_SECRET = re.compile(
    r"token|secret|passw|passphrase|pwd|api_?key|access_?key|private|credential|auth|cookie"
    r"|signature|\bkey\b|_key$|^key$",
    re.IGNORECASE,
)
#: Names that say so and mean something else.
_HARMLESS = frozenset(("SSH_AUTH_SOCK", "XAUTHORITY", "PWD", "OLDPWD"))
#: A shorter value would take out words that mean something else.
_LEAST = 4
_PATTERNS = (
    # A user, password or token in an address.
    (r"(://)[^/\s@?#]+@", rf"\1{REMOVED}@"),
    # Tokens of GitHub, JSON Web Tokens, and identifiers of AWS's access keys.
    (r"\b(?:gh[pousr]_[a-z0-9]{20,}|github_pat_[a-z0-9_]{20,})", REMOVED),
    (r"\beyj[a-z0-9_-]{8,}\.[a-z0-9_-]{8,}\.[a-z0-9_-]*", REMOVED),
    (r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b", REMOVED),
    (r"(\b(?:bearer|basic|token)\s+)[a-z0-9._~+/=-]{8,}", rf"\1{REMOVED}"),
    (
        r"((?:token|secret|passw(?:or)?d|passphrase|(?:api|access|private)_?key|credentials?"
        r"""|signature)["']?\s*[=:]\s*["']?)[^\s"'&,;})\]]+""",
        rf"\1{REMOVED}",
    ),
    (r"-----begin [a-z ]*private key-----.*?(-----end [a-z ]*private key-----|\Z)", REMOVED),
)


def is_secret(name: str) -> bool:
    """Whether a variable or field of that name holds a secret."""
    return name not in _HARMLESS and _SECRET.search(name) is not None


class Redactor:
    """Takes out known secrets, and what looks like one.

    Parameters
    ----------
    *environments : mapping of str to str
        The values of their variables with secret names are known secrets. Default: this process's.
    """

    def __init__(self, *environments: Mapping[str, str]) -> None:
        values = {
            value
            for environment in environments or (os.environ,)
            for name, value in environment.items()
            if is_secret(name) and len(value) >= _LEAST
        }
        self._secrets = sorted(values, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return `text` without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, REMOVED)
        for pattern, instead in _PATTERNS:
            text = re.sub(pattern, instead, text, flags=re.IGNORECASE | re.DOTALL)
        return text

    def value(self, value: Any) -> Any:
        """Return JSON values, or frozen descriptions made of such, without secrets.

        That has to be done before they become text, in which a secret may be broken by a line.
        """
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {one.name: self.value(getattr(value, one.name)) for one in fields(value)}
            return dataclasses.replace(value, **parts)
        if isinstance(value, Mapping):
            return {
                key: REMOVED if is_secret(str(key)) and inner else self.value(inner)
                for key, inner in value.items()
            }
        if type(value) is str:  # not an enumeration's
            return self.text(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.value(inner) for inner in value)
        return value
