"""Internals of ipykernel and IPython: sockets, comms and hidden names."""

from __future__ import annotations

from typing import Any


def handle_messages_during_execution(comm: Any) -> bool:
    """Handle messages from the browser to `comm` while a cell runs.

    ipykernel 7.4 routes them to the shell that last sent on the comm. For a widget, this is the
    shell that runs the cell. No-op in versions without this hook.

    Parameters
    ----------
    comm : Comm
        The comm of a widget. None without a front end.

    Returns
    -------
    bool
        Whether the comm has the hook.
    """
    if not hasattr(comm, "_reply_subshell_for"):
        return False
    comm._reply_subshell_for = lambda data, default: default
    return True


def handles_messages_during_execution() -> bool:
    """Return True if this ipykernel can handle messages from a browser while a cell runs."""
    try:
        from importlib.metadata import version

        return int(version("ipykernel").partition(".")[0]) >= 7
    except (ImportError, ValueError):
        return False


def comm_manager_of(shell: Any) -> Any:
    """Return the comm manager of a shell's kernel, or None if it has no usable one."""
    kernel = getattr(shell, "kernel", None)
    manager = getattr(kernel, "comm_manager", None)
    usable = hasattr(manager, "register_comm") and hasattr(manager, "unregister_comm")
    connected = getattr(kernel, "iopub_socket", None) is not None and hasattr(kernel, "session")
    return manager if usable and connected else None


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
    """Return the names and values that IPython has added to the user's namespace."""
    return getattr(shell, "user_ns_hidden", {})
