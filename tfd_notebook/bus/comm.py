"""Comm endpoint of the JupyterLab panel.

It is registered under a fixed comm id, so no `comm_open` is needed. Messages are sent without a
parent header, so they do not depend on the execution state of the shell. Received messages are only
put on a queue. The hub is imported, and its threads start, with the first message from a panel or
the first cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tfd_notebook._compat import ipykernel
from tfd_notebook.bus import greeting, running_cell
from tfd_notebook.cluster import registry

if TYPE_CHECKING:
    from tfd_notebook.bus.session import Session

TARGET = "tfd_notebook"
COMM_ID = "tfd_notebook-bus"

_attached: tuple[Any, _Comm] | None = None


class _Comm:
    """The interface that a comm manager expects of a comm."""

    comm_id = COMM_ID
    target_name = TARGET
    primary = False

    def __init__(self, kernel: Any, extra: Callable[[], Mapping[str, Any]]) -> None:
        self._kernel = kernel
        self._extra = extra
        self._session: Session | None = None

    def send(self, data: dict[str, Any], buffers: list[bytes]) -> None:
        ipykernel.send_comm_message(self._kernel, COMM_ID, data, buffers)

    def serve(self) -> Session:
        """Start serving the panels."""
        # Import time: a kernel without panels does not need the hub.
        from tfd_notebook.bus import hub
        from tfd_notebook.bus.session import Session

        if self._session is None:
            self._session = Session(self.send, everything=True, extra=self._extra)
            hub.join(self._session)
        return self._session

    def close(self) -> None:
        if self._session is not None:
            # Import time, as in `serve`.
            from tfd_notebook.bus import hub

            hub.leave(self._session)
        else:
            self.send({"kind": "bye"}, [])

    def handle_msg(self, message: Mapping[str, Any]) -> None:
        # Import time, as in `serve`.
        from tfd_notebook.bus import hub

        hub.receive(self.serve(), message["content"].get("data"))

    def handle_close(self, message: Mapping[str, Any]) -> None:
        """Ignore the close message: the comm serves all panels, and each sends its own ``bye``."""


def attach(shell: Any, extra: Callable[[], Mapping[str, Any]]) -> bool:
    """Register the comm in the kernel of `shell`, and greet the open panels.

    Parameters
    ----------
    shell : InteractiveShell
    extra : callable
        Returns the commands that only exist in a kernel, such as ``start``.

    Returns
    -------
    bool
        True if panels can connect. False if `shell` does not belong to a kernel.
    """
    global _attached
    manager = ipykernel.comm_manager_of(shell)
    if manager is None:
        return False
    if _attached is None:
        comm = _Comm(shell.kernel, extra)
        manager.register_comm(comm)
        running_cell.follow(shell)
        _attached = manager, comm
        registry.on_cluster_start(comm.serve)
        comm.send(greeting(), [])
    return True


def detach() -> None:
    """Unregister the comm and send ``bye`` to the open panels."""
    global _attached
    if _attached is not None:
        manager, comm = _attached
        _attached = None
        running_cell.unfollow()
        registry.remove_on_cluster_start(comm.serve)
        manager.unregister_comm(comm)
        comm.close()
