"""The panels' way into a kernel: one comm of a known id, opened by nobody.

Messages go out without a parent header, so that no answer of the kernel's is bound to a shell that
is busy; those that come in are only put on a queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfd_notebook.bus import hub
from tfd_notebook.bus.session import Extra, Session

TARGET = "tfd_notebook"
COMM_ID = "tfd_notebook-bus"

_attached: tuple[Any, _Comm] | None = None


class _Comm:
    """What a comm manager needs to know of a comm."""

    comm_id = COMM_ID
    target_name = TARGET
    primary = False

    def __init__(self, kernel: Any, extra: Extra) -> None:
        self._kernel = kernel
        self._served = False
        self.session = Session(self._send, everything=True, extra=extra)

    def _send(self, data: dict[str, Any], buffers: list[bytes]) -> None:
        kernel = self._kernel
        kernel.session.send(
            kernel.iopub_socket,
            "comm_msg",
            {"comm_id": COMM_ID, "data": data},
            ident=f"comm-{COMM_ID}".encode(),
            buffers=buffers,
        )

    def serve(self) -> None:
        """Have the session served from now on."""
        if not self._served:
            self._served = True
            hub.join(self.session)

    def handle_msg(self, message: Mapping[str, Any]) -> None:
        self.serve()
        hub.receive(self.session, message["content"].get("data"))

    def handle_close(self, message: Mapping[str, Any]) -> None:
        """A panel that goes says so itself; the comm is for all."""


def attach(shell: Any, extra: Extra, serve: bool) -> bool:
    """Let panels reach the kernel of `shell`, and tell those that are open.

    Parameters
    ----------
    shell : InteractiveShell
    extra : callable
        Returns the commands that only exist in a kernel, such as ``start``.
    serve : bool
        Whether to serve at once, which takes a thread, or when the first panel asks.

    Returns
    -------
    bool
        Whether it is reached now; not where `shell` belongs to no kernel.
    """
    global _attached
    kernel = getattr(shell, "kernel", None)
    manager = getattr(kernel, "comm_manager", None)
    if manager is None or getattr(kernel, "iopub_socket", None) is None:
        return False
    if _attached is None:
        comm = _Comm(kernel, extra)
        manager.register_comm(comm)
        _attached = manager, comm
        if not serve:
            comm.session.greet()
    if serve:
        _attached[1].serve()
    return True


def detach() -> None:
    """Let no panel reach this kernel any more, and tell those that are open."""
    global _attached
    if _attached is not None:
        manager, comm = _attached
        _attached = None
        manager.unregister_comm(comm)
        hub.leave(comm.session)
