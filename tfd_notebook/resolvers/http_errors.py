"""Conversion of HTTP statuses to errors of the package."""

from __future__ import annotations

from tfd_notebook.errors import AccessDenied, NoAnswer, NotThere, ResolveError


def of_status(status: int, reason: str, place: str, renew: str, allow: str) -> ResolveError:
    """Return the error for an HTTP status.

    Parameters
    ----------
    status : int
        HTTP status.
    reason : str
        Text of the answer.
    place : str
        The requested resource, as the first words of the error.
    renew, allow : str
        The next step for invalid credentials, and for insufficient permissions.
    """
    reason = " ".join(reason.split())[:300]
    if status == 401:
        return AccessDenied(
            f"{place}: the credentials are missing, invalid or expired (HTTP 401): {reason}",
            fix=renew,
        )
    if status == 403:
        return AccessDenied(
            f"{place}: the permissions do not suffice (HTTP 403): {reason}", fix=allow
        )
    if status == 404:
        return NotThere(
            f"{place} does not exist (HTTP 404): {reason}", fix="correct the name, or create it"
        )
    fix = "try again later" if status == 429 or status >= 500 else "correct the request"
    return NoAnswer(f"{place} answers with HTTP {status}: {reason}", fix=fix)
