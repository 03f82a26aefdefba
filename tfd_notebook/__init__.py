"""TensorFlow's distributed runtime from a notebook.

``import tfd_notebook as tfd``, or ``%load_ext tfd_notebook`` for the magics. Neither imports
TensorFlow; that happens when something needs it.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from tfd_notebook._compat import importing, pyfunc, sites
from tfd_notebook.version import VERSION

if TYPE_CHECKING:
    from tfd_notebook import errors as errors
    from tfd_notebook import launchers as launchers
    from tfd_notebook import resolvers as resolvers
    from tfd_notebook import spark as spark
    from tfd_notebook.attaching import attach as attach
    from tfd_notebook.attaching import clusters as clusters
    from tfd_notebook.checkup import doctor as doctor
    from tfd_notebook.cluster import Cluster as Cluster
    from tfd_notebook.coordinate.coordinator import Coordinator as Coordinator
    from tfd_notebook.coordinate.loop import Work as Work
    from tfd_notebook.coordinate.loop import training_loop as training_loop
    from tfd_notebook.data.explain import explain as explain
    from tfd_notebook.data.servers import DataWorker as DataWorker
    from tfd_notebook.data.servers import Dispatcher as Dispatcher
    from tfd_notebook.data.stream import Stream as Stream
    from tfd_notebook.detection import Resolution as Resolution
    from tfd_notebook.detection import resolve as resolve
    from tfd_notebook.elsewhere import RemoteKernel as RemoteKernel
    from tfd_notebook.limit import Limit as Limit
    from tfd_notebook.limit import compare as compare
    from tfd_notebook.spec import Policy as Policy
    from tfd_notebook.spec import Service as Service

__version__ = VERSION

_HOMES = {
    "Cluster": "cluster",
    "Coordinator": "coordinate.coordinator",
    "DataWorker": "data.servers",
    "Dispatcher": "data.servers",
    "Limit": "limit",
    "Policy": "spec",
    "RemoteKernel": "elsewhere",
    "Resolution": "detection",
    "Service": "spec",
    "Stream": "data.stream",
    "Work": "coordinate.loop",
    "attach": "attaching",
    "clusters": "attaching",
    "compare": "limit",
    "doctor": "checkup",
    "errors": "",
    "explain": "data.explain",
    "launchers": "",
    "resolve": "detection",
    "resolvers": "",
    "spark": "",
    "training_loop": "coordinate.loop",
}

__all__ = [
    "Cluster",
    "Coordinator",
    "DataWorker",
    "Dispatcher",
    "Limit",
    "Policy",
    "RemoteKernel",
    "Resolution",
    "Service",
    "Stream",
    "Work",
    "__version__",
    "attach",
    "clusters",
    "compare",
    "doctor",
    "errors",
    "explain",
    "launchers",
    "resolve",
    "resolvers",
    "spark",
    "training_loop",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    if not home:
        return importlib.import_module(f"{__name__}.{name}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(ipython: Any) -> None:
    """Called by ``%load_ext tfd_notebook``."""
    from tfd_notebook import magics
    from tfd_notebook.launch import local

    pyfunc.make_tokens_unique()
    sites.record()
    magics.load_ipython_extension(ipython)
    _show_to_panels(ipython)
    local.preload()


def unload_ipython_extension(ipython: Any) -> None:
    """Called by ``%unload_ext tfd_notebook``: stops everything and undoes what loading did."""
    from tfd_notebook import magics
    from tfd_notebook._compat import interrupt
    from tfd_notebook.bus import comm
    from tfd_notebook.cluster import clusters
    from tfd_notebook.launch import local

    comm.detach()
    if "tfd_notebook.widgets" in sys.modules:
        sys.modules["tfd_notebook.widgets"].close_all()
    if "tfd_notebook.bus.hub" in sys.modules:
        sys.modules["tfd_notebook.bus.hub"].await_end(2.0)
    magics.unload_ipython_extension(ipython)
    if "tfd_notebook.magics.resolve" in sys.modules:
        sys.modules["tfd_notebook.magics.resolve"].close()
    for living in clusters().values():
        living.leave()
    local.shutdown()
    # A traceback that IPython keeps may keep an iterator, too.
    interrupt.undo()
    pyfunc.restore_tokens()
    sites.undo()
    importing.forget_all()


def _show_to_panels(shell: Any) -> None:
    """Let the panels of a front end see the clusters of `shell`'s kernel."""
    from tfd_notebook.bus import comm

    def commands() -> Any:
        from tfd_notebook.magics import resolve, starting

        return {**starting.commands(shell), **resolve.commands(shell)}

    comm.attach(shell, commands)


# A notebook that imports this package without loading the extension is seen by panels, too.
if "ipykernel" in sys.modules and "IPython" in sys.modules:
    _show_to_panels(sys.modules["IPython"].get_ipython())

# Before the user's first pipeline is traced: a Python function in it must not share its name
# with another kernel's on a worker that both use, and its stages are known by their place.
pyfunc.make_tokens_unique()
sites.record()
