"""Command line, environment and import path of every Python process that this package starts.

Python puts the working directory at the front of the import path for ``-c`` and ``-m``, and a file
such as ``json.py`` there then runs in place of Python's own module. ``-P`` prevents that from
Python 3.11 on only, and ``-I`` also ignores variables that users rely on, such as
``PYTHONUNBUFFERED``. So the code given to ``-c`` sets the import path before it imports anything.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Carries the import path of the process that is started.
PATH_VARIABLE = "TFD_SYS_PATH"

#: Removes from the import path what every user can write to, and searches the working directory
#: last: the interpreter has already made an empty entry of ``PYTHONPATH`` absolute. Only built-in
#: modules are imported before that, because the import of every other module searches the path.
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
        For ``sys.argv``.
    function : str
        Takes no argument; what it returns is the exit status. Default ``"main"``.
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
    made = dict(os.environ if variables is None else variables)
    made[PATH_VARIABLE] = json.dumps(import_path(path))
    if "PYTHONPATH" in made:
        # The interpreter searches these before any code runs.
        entries = [one for one in made["PYTHONPATH"].split(os.pathsep) if _is_trusted(one)]
        made["PYTHONPATH"] = os.pathsep.join(entries)
        if not entries:
            del made["PYTHONPATH"]
    return made


def import_path(path: Sequence[str] | None = None) -> list[str]:
    """Return the import path of a helper process, without directories that others can write to.

    The working directory is left out unless it belongs to this user or to root, and if a group can
    write to it that is not this user's primary group. The owner and the group of entries that the
    user named do not matter: software on clusters belongs to an account of its own.

    Parameters
    ----------
    path : sequence of str, optional
        Import path to start from. Default: `task_path`.
    """
    entries = [one for one in (task_path() if path is None else path) if _is_trusted(one)]
    return entries if _PACKAGE_ROOT in entries else [*entries, _PACKAGE_ROOT]


def task_path(add_working_directory: bool = False) -> list[str]:
    """Return this process's import path for its tasks, which can import what it can import.

    All entries are absolute. The working directory comes after the standard library, as in
    IPython, so that no file in it replaces one of Python's own modules. It comes last if other
    users can write to it, as by `import_path`.

    Parameters
    ----------
    add_working_directory : bool
        Add the working directory where it is missing. Default false.
    """
    try:
        working = os.getcwd()
    except OSError:  # it was removed
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
    if entry == _PACKAGE_ROOT or any(f"{entry}{os.sep}".startswith(one + os.sep) for one in own):
        return True  # code from there runs in this process, whatever its mode is
    try:
        status = os.stat(entry)
        is_working_directory = os.path.samestat(status, os.stat(os.curdir))
    except OSError:
        return False
    if status.st_mode & stat.S_IWOTH:
        return False
    if not is_working_directory:
        return True
    # Many systems give each user a group with no other members, and make it writable.
    group = not status.st_mode & stat.S_IWGRP or status.st_gid == os.getegid()
    return group and status.st_uid in (0, os.geteuid())
