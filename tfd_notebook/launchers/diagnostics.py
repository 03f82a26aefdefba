"""What can be wrong with this process and its host, before or while tasks run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from tfd_notebook._compat import ipykernel
from tfd_notebook.agent import gpu_discovery, memory
from tfd_notebook.agent.bridges import kernel
from tfd_notebook.launchers.client.handshake import series
from tfd_notebook.launchers.client.orphans import sweep
from tfd_notebook.model.diagnostics import Finding, check, kind
from tfd_notebook.net import proxies
from tfd_notebook.net.host import tensorflow_version

#: Share of a memory limit from which on it is near.
NEAR = 0.85
#: Bytes of address space that a process with TensorFlow and its threads maps.
_TENSORFLOW_MAPS = 16_000_000_000

VERSIONS = kind(
    "TFD813",
    "error",
    "versions differ",
    "dispatcher, workers and client of different versions refuse each other, or misunderstand",
)
PROXY = kind(
    "TFD841",
    "warning",
    "proxy variables",
    "TensorFlow goes through the proxy even to this host, which the proxy cannot reach, and waits",
)
HIDDEN = kind(
    "TFD842", "warning", "GPU hidden", "tasks compute on processors although there are GPUs"
)
MEMORY = kind(
    "TFD844",
    "warning",
    "memory limit is near",
    "a task that asks for more is killed, and comes back without what it held",
)
LEFTOVERS = kind(
    "TFD845",
    "warning",
    "leftovers of dead kernels",
    "they hold memory, ports and files, and nobody uses them",
)
CULLED = kind(
    "TFD861",
    "warning",
    "kernel that will be culled",
    "tasks end with their kernel, whose server takes it for idle while no cell runs",
)
CLICKS = kind(
    "TFD862",
    "info",
    "clicks wait for the cell",
    "widgets and the panel answer only between cells with this ipykernel",
)


@check("process")
def versions(_: None) -> Iterator[Finding]:
    """Find a TensorFlow that was replaced while this process had it in use."""
    used = getattr(sys.modules.get("tensorflow"), "__version__", None)
    installed = tensorflow_version()
    if used is None or installed in (None, "unknown"):
        return
    if series(used) != series(str(installed)):
        yield VERSIONS.found(
            f"this process uses TensorFlow {used}, and its tasks would import {installed}",
            "restart the kernel",
        )


@check("process")
def proxy(_: None) -> Iterator[Finding]:
    """Find a proxy that connections within this host would go through."""
    if (said := proxies.bypass(environment=dict(os.environ))) is not None:
        name = said.partition(" ")[0]
        yield PROXY.found(
            f"{name} is set, and no exception is made for this host",
            'set no_grpc_proxy="localhost,127.0.0.1,::1" and the cluster\'s hosts; a cluster that '
            "starts does so",
        )


@check("process")
def hidden_gpus(_: None) -> Iterator[Finding]:
    """Find GPUs of this host that a task would not see."""
    found = gpu_discovery.find(os.environ)
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if found["hidden"]:
        yield HIDDEN.found(
            f"there seem to be GPUs, but {found['why']}",
            'pip install "tfd-notebook[gpu]", and see whether nvidia-smi works',
        )
    elif not found["gpus"] and shown is not None and gpu_discovery.find({})["gpus"]:
        yield HIDDEN.found(
            found["why"],
            "unset CUDA_VISIBLE_DEVICES, or name the GPUs that tasks shall see",
        )


@check("process")
def memory_limits(_: None) -> Iterator[Finding]:
    """Find a limit that TensorFlow's processes will meet."""
    most = memory.of_process()
    if most is not None and most < _TENSORFLOW_MAPS:
        yield MEMORY.found(
            f"a process may map {most / 1e9:.1f} GB (ulimit -v)",
            "raise it: TensorFlow maps more than it uses",
        )
    if (found := memory.of_group()) is not None and found[1] > NEAR * found[0]:
        yield MEMORY.found(
            f"{found[1] / 1e9:.1f} of the {found[0] / 1e9:.1f} GB of this container are used",
            "have fewer tasks or smaller buffers (prefetch, shuffle, cache), or more memory",
        )


@check("process")
def leftovers(_: None) -> Iterator[Finding]:
    """Find what ``tfd sweep`` would end."""
    left = sweep(dry_run=True)
    if left:
        processes = sum(one.pid is not None for one in left)
        yield LEFTOVERS.found(
            f"{processes} processes and {len(left) - processes} directories or sockets belong to "
            "kernels that have ended",
            "tfd sweep ends and removes them",
        )


@check("process")
def culled(_: None) -> Iterator[Finding]:
    """Find a server that ends idle kernels."""
    if "ipykernel" in sys.modules and (seconds := kernel.cull_seconds()) is not None:
        yield CULLED.found(
            f"this kernel's server ends kernels that were idle for {seconds:g} s",
            "cluster.detach(hours=8), so that the tasks outlive the kernel",
        )


@check("process")
def clicks(_: None) -> Iterator[Finding]:
    """Find an ipykernel that does not answer while a cell runs."""
    if "ipykernel" in sys.modules and not ipykernel.handles_messages_during_execution():
        yield CLICKS.found(
            f"ipykernel {getattr(sys.modules['ipykernel'], '__version__', '')} queues clicks while "
            "a cell runs",
            'pip install "ipykernel>=7", or steer from a terminal: tfd pause, tfd stop',
        )
