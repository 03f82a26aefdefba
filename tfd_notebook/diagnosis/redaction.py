"""Redaction of secrets in texts and JSON values."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

REMOVED = "[removed]"
#: Names of secrets.
_SECRET = re.compile(
    r"token|secret|passw|passphrase|pwd|api_?key|access_?key|private|credential|auth|cookie"
    r"|signature|\bkey\b|_key$|^key$",
    re.IGNORECASE,
)
#: Names that match `_SECRET`, but hold no secret.
_HARMLESS = frozenset(("SSH_AUTH_SOCK", "XAUTHORITY", "PWD", "OLDPWD"))
#: Minimum length of a secret. A shorter value also occurs in ordinary text.
_MIN_LENGTH = 4
_PATTERNS = (
    # User, password or token in an address.
    (r"(://)[^/\s@?#]+@", rf"\1{REMOVED}@"),
    # Tokens of GitHub, JSON Web Tokens, and identifiers of AWS access keys.
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
    """Return True if a variable or field with this name holds a secret."""
    return name not in _HARMLESS and _SECRET.search(name) is not None


class Redactor:
    """A filter that replaces known secrets, and text in the form of a secret.

    Parameters
    ----------
    *environments : mapping of str to str
        The values of variables with secret names are known secrets. Default: ``os.environ``.
    """

    def __init__(self, *environments: Mapping[str, str]) -> None:
        values = {
            value
            for environment in environments or (os.environ,)
            for name, value in environment.items()
            if is_secret(name) and len(value) >= _MIN_LENGTH
        }
        self._secrets = sorted(values, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return `text` without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, REMOVED)
        for pattern, replacement in _PATTERNS:
            text = re.sub(pattern, replacement, text, flags=re.IGNORECASE | re.DOTALL)
        return text

    def value(self, value: Any) -> Any:
        """Return a copy of JSON values, or of dataclasses with such fields, without secrets.

        Call it before the values are formatted, because a line break can split a secret.
        """
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changes = {
                member.name: self.value(getattr(value, member.name)) for member in fields(value)
            }
            return dataclasses.replace(value, **changes)
        if isinstance(value, Mapping):
            return {
                key: REMOVED if is_secret(str(key)) and inner else self.value(inner)
                for key, inner in value.items()
            }
        if type(value) is str:  # Members of a str enumeration stay as they are.
            return self.text(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.value(inner) for inner in value)
        return value
