"""What ipykernel does with messages from the browser, and the one private name of it."""

from __future__ import annotations

from typing import Any


def answer_beside_cells(comm: Any) -> bool:
    """Have messages from the browser to `comm` handled while a cell runs.

    ipykernel 7.4 routes them to the shell that last sent on the comm, which for a widget is the
    one that is busy with the cell. Without its hook (other versions) nothing is changed.

    Parameters
    ----------
    comm : Comm
        Of a widget; None where there is no front end.

    Returns
    -------
    bool
        Whether there was something to change.
    """
    if not hasattr(comm, "_reply_subshell_for"):
        return False
    comm._reply_subshell_for = lambda data, default: default
    return True


def takes_clicks_beside_cells() -> bool:
    """Whether this ipykernel can take messages from a browser while a cell runs."""
    try:
        from importlib.metadata import version

        return int(version("ipykernel").partition(".")[0]) >= 7
    except (ImportError, ValueError):
        return False
