"""IPython extension that ``%load_ext tfd_notebook`` loads."""

from __future__ import annotations

import os
import threading
from typing import Any

from tfd_notebook._compat import import_hooks
from tfd_notebook._compat.tf_data import autograph, py_functions, source_locations
from tfd_notebook.bus import comm
from tfd_notebook.cluster.registry import clusters
from tfd_notebook.ui import magics

#: Seconds to wait for the end of the bus's threads.
_HUB_SECONDS = 2.0
#: Seconds until the preload begins, so that its import does not slow the cell of %load_ext.
_PRELOAD_DELAY_SECONDS = 0.1
#: Seconds to wait for its end.
_PRELOAD_SECONDS = 10.0

_preload_timer: threading.Timer | None = None


def load(shell: Any) -> None:
    """Add the magics and the panel's comm to `shell`, and start the fork server soon.

    With ``TFD_PRELOAD=off``, the first cluster starts the fork server.
    """
    global _preload_timer
    autograph.exclude_package()
    py_functions.make_tokens_unique()
    source_locations.record()
    magics.load_ipython_extension(shell)
    attach_panels(shell)
    if os.environ.get("TFD_PRELOAD") != "off":
        _preload_timer = threading.Timer(_PRELOAD_DELAY_SECONDS, _preload)
        _preload_timer.daemon = True
        _preload_timer.start()


def unload(shell: Any) -> None:
    """Stop all clusters, and undo `load`."""
    global _preload_timer
    if _preload_timer is not None:
        _preload_timer.cancel()
        _preload_timer.join(_PRELOAD_SECONDS)  # it may have begun
        _preload_timer = None
    # Import time: %load_ext must be quick, and needs none of these.
    from tfd_notebook._compat import sigint
    from tfd_notebook.bus import hub
    from tfd_notebook.launchers import local
    from tfd_notebook.ui import cleanup

    comm.detach()
    cleanup.run()
    hub.await_end(_HUB_SECONDS)
    magics.unload_ipython_extension(shell)
    for cluster in clusters().values():
        cluster.leave()
    local.shutdown()
    # IPython's last traceback may keep an iterator alive, for which the handler stays armed.
    sigint.undo()
    autograph.undo()
    py_functions.restore_tokens()
    source_locations.undo()
    import_hooks.remove_all()


def _preload() -> None:
    # Import time, as in `unload`.
    from tfd_notebook.launchers import local

    local.preload()


def attach_panels(shell: Any) -> None:
    """Register the panel's comm. A front end then shows the clusters of the kernel of `shell`."""

    def requests() -> Any:
        # Import time: panels attach at the first use of a public name, and requests arrive later.
        from tfd_notebook.cluster import commands

        return commands.panel_requests(shell)

    comm.attach(shell, requests)
