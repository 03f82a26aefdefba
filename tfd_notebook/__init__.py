"""TensorFlow's distributed runtime in a notebook.

Use ``import tfd_notebook as tfd``, or ``%load_ext tfd_notebook`` for the magics. Neither imports
TensorFlow. The first use that needs it does. ``import tfd_notebook`` sends, patches and starts
nothing.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tfd_notebook._lazy import exports, on_first_use
from tfd_notebook._version import VERSION

if TYPE_CHECKING:
    from tfd_notebook import errors as errors
    from tfd_notebook import launchers as launchers
    from tfd_notebook import resolvers as resolvers
    from tfd_notebook import spark as spark
    from tfd_notebook.cluster.attach import attach as attach
    from tfd_notebook.cluster.attach import clusters as clusters
    from tfd_notebook.cluster.cluster import Cluster as Cluster
    from tfd_notebook.coordinator.coordinator import Coordinator as Coordinator
    from tfd_notebook.coordinator.training_loop import Work as Work
    from tfd_notebook.coordinator.training_loop import training_loop as training_loop
    from tfd_notebook.data.consume.stream import Stream as Stream
    from tfd_notebook.data.explain.explain import explain as explain
    from tfd_notebook.data.service.servers import DataWorker as DataWorker
    from tfd_notebook.data.service.servers import Dispatcher as Dispatcher
    from tfd_notebook.diagnosis import doctor as doctor
    from tfd_notebook.model.limit import Limit as Limit
    from tfd_notebook.model.limit import compare as compare
    from tfd_notebook.model.spec import Policy as Policy
    from tfd_notebook.model.spec import Service as Service
    from tfd_notebook.remote_kernel import RemoteKernel as RemoteKernel
    from tfd_notebook.resolvers.resolution import Resolution as Resolution
    from tfd_notebook.resolvers.resolution import resolve as resolve

__version__ = VERSION


def _attach(resolver: Any, name: str, connect: bool) -> Any:
    # Import time: it imports all launchers.
    from tfd_notebook.cluster.attach import attach

    return attach(resolver, name, connect=connect)


def _prepare() -> None:
    """Prepare TensorFlow and the notebook at the first use of a public name."""
    # Imported here because `import tfd_notebook` imports and changes nothing.
    from tfd_notebook._compat.tf_data import autograph, py_functions, source_locations
    from tfd_notebook.cluster import registry
    from tfd_notebook.resolvers import providers

    providers.clusters, providers.attach = registry.clusters, _attach
    autograph.exclude_package()
    py_functions.make_tokens_unique()
    source_locations.record()
    if "ipykernel" in sys.modules and "IPython" in sys.modules:
        # Import time: it imports the magics, which only a kernel needs.
        from tfd_notebook.ui import extension

        extension.attach_panels(sys.modules["IPython"].get_ipython())


__getattr__, __dir__, _names = exports(
    __name__,
    {
        "Cluster": "cluster.cluster",
        "Coordinator": "coordinator.coordinator",
        "DataWorker": "data.service.servers",
        "Dispatcher": "data.service.servers",
        "Limit": "model.limit",
        "Policy": "model.spec",
        "RemoteKernel": "remote_kernel",
        "Resolution": "resolvers.resolution",
        "Service": "model.spec",
        "Stream": "data.consume.stream",
        "Work": "coordinator.training_loop",
        "attach": "cluster.attach",
        "clusters": "cluster.attach",
        "compare": "model.limit",
        "doctor": "diagnosis",
        "errors": "",
        "explain": "data.explain.explain",
        "launchers": "",
        "resolve": "resolvers.resolution",
        "resolvers": "",
        "spark": "",
        "training_loop": "coordinator.training_loop",
    },
)
__all__ = sorted((*_names, "__version__"))
on_first_use(_prepare)


def load_ipython_extension(ipython: Any) -> None:
    """Load the extension for ``%load_ext tfd_notebook``."""
    # Imported here to save import time in programs without IPython.
    from tfd_notebook.ui import extension

    extension.load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Stop all clusters and undo the loading, for ``%unload_ext tfd_notebook``."""
    # Import time, as in `load_ipython_extension`.
    from tfd_notebook.ui import extension

    extension.unload(ipython)
