"""Internals of ipykernel and IPython: their sockets, comms and the names they define."""

from __future__ import annotations

from typing import Any


def handle_messages_during_execution(comm: Any) -> bool:
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


def handles_messages_during_execution() -> bool:
    """Whether this ipykernel can take messages from a browser while a cell runs."""
    try:
        from importlib.metadata import version

        return int(version("ipykernel").partition(".")[0]) >= 7
    except (ImportError, ValueError):
        return False


def comm_manager_of(shell: Any) -> Any:
    """Return the comm manager of a shell's kernel; None if it has none that can be used."""
    kernel = getattr(shell, "kernel", None)
    manager = getattr(kernel, "comm_manager", None)
    usable = hasattr(manager, "register_comm") and hasattr(manager, "unregister_comm")
    reached = getattr(kernel, "iopub_socket", None) is not None and hasattr(kernel, "session")
    return manager if usable and reached else None


def send_comm_message(kernel: Any, comm_id: str, data: Any, buffers: list[bytes]) -> None:
    """Send a message of a comm to all front ends, without a parent header."""
    kernel.session.send(
        kernel.iopub_socket,
        "comm_msg",
        {"comm_id": comm_id, "data": data},
        ident=f"comm-{comm_id}".encode(),
        buffers=buffers,
    )


def hidden_names(shell: Any) -> Any:
    """Return the names that IPython itself has put into the user's namespace, with their values."""
    return getattr(shell, "user_ns_hidden", {})
