"""What the answers of systems that are asked by HTTP mean, when they are no good."""

from __future__ import annotations

import importlib
from typing import Any

from tfd_notebook.errors import AccessDenied, NoAnswer, NotThere, ResolveError, Unsupported


def of_status(status: int, said: str, place: str, renew: str, allow: str) -> ResolveError:
    """Return the error for an HTTP status.

    Parameters
    ----------
    status : int
    said : str
        What came with it.
    place : str
        What was asked.
    renew, allow : str
        The next step for credentials that are not accepted, and for those that do not suffice.
    """
    said = " ".join(said.split())[:300]
    if status == 401:
        return AccessDenied(
            f"{place}: the credentials are missing, wrong or expired (HTTP 401): {said}", fix=renew
        )
    if status == 403:
        return AccessDenied(
            f"{place}: the credentials do not suffice (HTTP 403): {said}", fix=allow
        )
    if status == 404:
        return NotThere(
            f"{place} does not exist (HTTP 404): {said}", fix="correct the name, or create it"
        )
    later = "try again later" if status == 429 or status >= 500 else "correct what is asked for"
    return NoAnswer(f"{place} answers with HTTP {status}: {said}", fix=later)


def library(name: str, who: str, extra: str) -> Any:
    """Import an optional library.

    Raises
    ------
    Unsupported
        It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unsupported(
            f"{who} needs the package {error.name}", fix=f'pip install "tfd-notebook[{extra}]"'
        ) from error
