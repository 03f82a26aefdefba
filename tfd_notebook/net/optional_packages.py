"""Import of packages that an extra of this package installs."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from tfd_notebook.errors import Unsupported

#: A requirement in the metadata of this package, such as ``ray>=2.40; extra == 'ray'``.
_REQUIREMENT = re.compile(r"([\w.-]+)>=([\d.]+) *;.*extra == ['\"]([\w-]+)['\"]")


def load(name: str, user: str, extra: str) -> Any:
    """Import an optional package for `user`, which the extra `extra` installs.

    Raises
    ------
    Unsupported
        It is not installed, or a package of the extra is too old.
    """
    for requirement in _requirements():
        if (match := _REQUIREMENT.match(requirement)) is not None and match[3] == extra:
            _check_version(match[1], match[2], user, extra)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unsupported(
            f"{user} needs the package {error.name}", fix=f'pip install "tfd-notebook[{extra}]"'
        ) from error


@functools.cache
def _requirements() -> Sequence[str]:
    try:
        return metadata.requires("tfd-notebook") or ()
    except metadata.PackageNotFoundError:  # a copy of the files
        return ()


def _check_version(package: str, minimum: str, user: str, extra: str) -> None:
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:  # the import shows if it is missing
        return
    if _numbers(installed) < _numbers(minimum):
        raise Unsupported(
            f"{user} needs {package} {minimum} or later, but {installed} is installed",
            fix=f'pip install --upgrade "tfd-notebook[{extra}]", and restart the kernel',
        )


def _numbers(version: str) -> list[int]:
    """Return the numbers of a release without trailing zeros, and without suffixes as ``rc1``."""
    release = re.match(r"[\d.]*", version)
    numbers = [int(number) for number in release[0].split(".") if number] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers
