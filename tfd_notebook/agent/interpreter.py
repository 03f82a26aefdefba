"""Command line, environment and import path of every Python process that this package starts.

Python puts the working directory at the front of the import path for ``-c`` and ``-m``. A file such
as ``json.py`` there then replaces Python's own module. ``-P`` prevents that only from Python 3.11
on. ``-I`` also ignores variables that users rely on, such as ``PYTHONUNBUFFERED``. The code given
to ``-c`` therefore sets the import path before it imports anything.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Contains the import path of the started process.
PATH_VARIABLE = "TFD_SYS_PATH"

#: Removes directories that every user can write to from the import path, and moves the working
#: directory to its end. The interpreter has already made an empty entry of ``PYTHONPATH`` absolute.
#: Before that only built-in modules are imported: other imports would search the path.
FIRST = """\
import posix, sys
def _safe_path():
    try:
        working = posix.getcwd()
    except OSError:
        working = ""
    roots = sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix
    own = tuple(root + "/" for root in roots)
    kept = []
    for entry in sys.path:
        try:
            writable = posix.stat(entry).st_mode & 0o002
        except OSError:
            continue
        if entry.startswith("/") and (entry.startswith(own) or not writable):
            kept.append(entry)
    return sorted(kept, key=working.__eq__)
sys.path[:] = _safe_path()
"""

_CODE = (
    FIRST + f"import json, os; sys.path[:] = json.loads(os.environ['{PATH_VARIABLE}'])\n"
    "from {module} import {function} as main; sys.exit(main())"
)
_PACKAGE_ROOT = str(Path(__file__).parents[2])


def command(module: str, *arguments: str, function: str = "main") -> list[str]:
    """Return the command line that calls a function of a module; needs `environment`.

    Parameters
    ----------
    module : str
        Absolute name.
    *arguments : str
        Elements of ``sys.argv``.
    function : str
        Takes no argument and returns the exit status. Default ``"main"``.
    """
    return [sys.executable, "-c", _CODE.format(module=module, function=function), *arguments]


def environment(
    variables: Mapping[str, str] | None = None, path: Sequence[str] | None = None
) -> dict[str, str]:
    """Return the environment for `command`.

    Parameters
    ----------
    variables : mapping of str to str, optional
        Default: those of this process.
    path : sequence of str, optional
        Import path to start from. Default: `task_path`.
    """
    result = dict(os.environ if variables is None else variables)
    result[PATH_VARIABLE] = json.dumps(import_path(path))
    if "PYTHONPATH" in result:
        # The interpreter searches these entries before any code runs.
        entries = [entry for entry in result["PYTHONPATH"].split(os.pathsep) if _is_trusted(entry)]
        result["PYTHONPATH"] = os.pathsep.join(entries)
        if not entries:
            del result["PYTHONPATH"]
    return result


def import_path(path: Sequence[str] | None = None) -> list[str]:
    """Return the import path of a helper process, without directories that others can write to.

    The working directory is omitted unless it belongs to this user or to root. It is also omitted
    if it is writable by a group other than this user's primary group. Owner and group of other
    entries are not checked: on many clusters software belongs to a separate account.

    Parameters
    ----------
    path : sequence of str, optional
        Import path to start from. Default: `task_path`.
    """
    entries = [e for e in (task_path() if path is None else path) if _is_trusted(e)]
    return entries if _PACKAGE_ROOT in entries else [*entries, _PACKAGE_ROOT]


def task_path(add_working_directory: bool = False) -> list[str]:
    """Return the import path for this process's tasks, from which they import what it imports.

    All entries are absolute. The working directory comes after the standard library, as in IPython.
    No file in it then replaces one of Python's own modules. It comes last if other users can write
    to it, by the rules of `import_path`.

    Parameters
    ----------
    add_working_directory : bool
        Add the working directory if it is missing. Default false.
    """
    try:
        working = os.getcwd()
    except OSError:  # the working directory was removed
        return [entry for entry in sys.path if os.path.isabs(entry)]
    entries = [os.path.abspath(entry) for entry in sys.path]
    if add_working_directory and working not in entries:
        entries.insert(0, working)
    if working in entries and not _is_trusted(working):
        return [*(entry for entry in entries if entry != working), working]
    own = standard_library()
    end = 1 + max((place for place, entry in enumerate(entries) if entry in own), default=-1)
    before, after = entries[:end], entries[end:]
    moved = [working] if working in before and working not in after else []
    return [*(entry for entry in before if entry != working), *moved, *after]


def standard_library() -> tuple[str, ...]:
    """Return the directories of Python's own modules."""
    directory = os.path.dirname(os.path.abspath(os.__file__))
    return directory, os.path.join(directory, "lib-dynload")


def _is_trusted(entry: str) -> bool:
    """Return True if an entry of the import path exists and other users cannot add to it."""
    if not os.path.isabs(entry):
        return False
    own = (sys.prefix, sys.base_prefix, sys.exec_prefix, *standard_library())
    if entry == _PACKAGE_ROOT or any(f"{entry}{os.sep}".startswith(d + os.sep) for d in own):
        return True  # this process already runs code from there
    try:
        status = os.stat(entry)
        is_working_directory = os.path.samestat(status, os.stat(os.curdir))
    except OSError:
        return False
    if status.st_mode & stat.S_IWOTH:
        return False
    if not is_working_directory:
        return True
    # Many systems give each user a private group, and make directories writable for it.
    group = not status.st_mode & stat.S_IWGRP or status.st_gid == os.getegid()
    return group and status.st_uid in (0, os.geteuid())
