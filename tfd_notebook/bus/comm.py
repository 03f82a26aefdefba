"""The panels' way into a kernel: one comm of a known id, opened by nobody.

Messages go out without a parent header, so that no answer of the kernel's is bound to a shell that
is busy; those that come in are only put on a queue. What serves them is imported, and given its
threads, when the first panel asks or the first cluster starts.
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
    """What a comm manager needs to know of a comm."""

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
        """Have panels served from now on."""
        from tfd_notebook.bus import hub
        from tfd_notebook.bus.session import Session

        if self._session is None:
            self._session = Session(self.send, everything=True, extra=self._extra)
            hub.join(self._session)
        return self._session

    def close(self) -> None:
        if self._session is not None:
            from tfd_notebook.bus import hub

            hub.leave(self._session)
        else:
            self.send({"kind": "bye"}, [])

    def handle_msg(self, message: Mapping[str, Any]) -> None:
        from tfd_notebook.bus import hub

        hub.receive(self.serve(), message["content"].get("data"))

    def handle_close(self, message: Mapping[str, Any]) -> None:
        """A panel that goes says so itself; the comm is for all."""


def attach(shell: Any, extra: Callable[[], Mapping[str, Any]]) -> bool:
    """Let panels reach the kernel of `shell`, and tell those that are open.

    Parameters
    ----------
    shell : InteractiveShell
    extra : callable
        Returns the commands that only exist in a kernel, such as ``start``.

    Returns
    -------
    bool
        Whether it is reached now; not where `shell` belongs to no kernel.
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
    """Let no panel reach this kernel any more, and tell those that are open."""
    global _attached
    if _attached is not None:
        manager, comm = _attached
        _attached = None
        running_cell.unfollow()
        registry.remove_on_cluster_start(comm.serve)
        manager.unregister_comm(comm)
        comm.close()
