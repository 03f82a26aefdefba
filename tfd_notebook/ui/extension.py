"""IPython extension that ``%load_ext tfd_notebook`` loads."""

from __future__ import annotations

from typing import Any

from tfd_notebook._compat import import_hooks, sigint
from tfd_notebook._compat.tf_data import py_functions, source_locations
from tfd_notebook.bus import comm
from tfd_notebook.cluster.registry import clusters
from tfd_notebook.launchers import local
from tfd_notebook.ui import cleanup, magics

#: Seconds to wait for the end of the bus's threads.
_HUB_SECONDS = 2.0


def load(shell: Any) -> None:
    """Add the magics and the panel's comm to `shell`, and start the fork server."""
    py_functions.make_tokens_unique()
    source_locations.record()
    magics.load_ipython_extension(shell)
    attach_panels(shell)
    local.preload()


def unload(shell: Any) -> None:
    """Stop all clusters, and undo `load`."""
    # Import time: the hub is for panels and widgets, and %load_ext must be quick.
    from tfd_notebook.bus import hub

    comm.detach()
    cleanup.run()
    hub.await_end(_HUB_SECONDS)
    magics.unload_ipython_extension(shell)
    for cluster in clusters().values():
        cluster.leave()
    local.shutdown()
    # IPython's last traceback may keep an iterator alive, for which the handler stays armed.
    sigint.undo()
    py_functions.restore_tokens()
    source_locations.undo()
    import_hooks.remove_all()


def attach_panels(shell: Any) -> None:
    """Register the panel's comm. A front end then shows the clusters of the kernel of `shell`."""

    def commands() -> Any:
        # Import time: panels attach at the first use of a public name, and commands run later.
        from tfd_notebook.ui.magics import resolve, start_form

        return {**start_form.commands(shell), **resolve.commands(shell)}

    comm.attach(shell, commands)
