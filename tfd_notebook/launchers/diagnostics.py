"""Checks of this process and its host, before or while tasks run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from tfd_notebook._compat import ipykernel
from tfd_notebook.agent import gpu_discovery, memory
from tfd_notebook.agent.bridges import kernel
from tfd_notebook.launchers.client.handshake import incompatible
from tfd_notebook.launchers.client.orphans import sweep
from tfd_notebook.model.diagnostics import Finding, check, kind
from tfd_notebook.net import proxies
from tfd_notebook.net.host import tensorflow_version

#: A memory limit is near from this share of use on.
NEAR = 0.85
#: Bytes of address space that a process with TensorFlow and its threads maps.
_TENSORFLOW_MAPS = 16_000_000_000

VERSIONS = kind(
    "TFD813",
    "error",
    "versions differ",
    "dispatcher, workers and client of different versions reject or misread each other's messages",
)
PROXY = kind(
    "TFD841",
    "warning",
    "proxy variables",
    "TensorFlow connects even to this host through the proxy, which cannot reach it, and waits",
)
HIDDEN = kind("TFD842", "warning", "GPU hidden", "tasks compute on CPUs although the host has GPUs")
MEMORY = kind(
    "TFD844",
    "warning",
    "memory limit is near",
    "a task that allocates more is killed and restarts with empty caches and buffers",
)
ORPHANS = kind(
    "TFD845",
    "warning",
    "orphans of ended kernels",
    "they hold memory, ports and files that no kernel uses",
)
CULLED = kind(
    "TFD861",
    "warning",
    "kernel that will be culled",
    "tasks end with their kernel, and its server treats a kernel without a running cell as idle",
)
CLICKS = kind(
    "TFD862",
    "info",
    "clicks wait for the cell",
    "with this ipykernel, widgets and the panel respond only between cells",
)


@check("process")
def versions(_: None) -> Iterator[Finding]:
    """Report a TensorFlow that was replaced on disk while this process uses it."""
    used = getattr(sys.modules.get("tensorflow"), "__version__", None)
    installed = tensorflow_version()
    if used is not None and installed is not None and incompatible(used, installed):
        yield VERSIONS.finding(
            f"this process uses TensorFlow {used}, and its tasks would import {installed}",
            "restart the kernel",
        )


@check("process")
def proxy(_: None) -> Iterator[Finding]:
    """Report a proxy that connections within this host would use."""
    if (message := proxies.bypass(environment=dict(os.environ))) is not None:
        name = message.partition(" ")[0]
        yield PROXY.finding(
            f"{name} is set, without an exception for this host",
            'set no_grpc_proxy="localhost,127.0.0.1,::1" and add the cluster\'s hosts; starting a '
            "cluster does this",
        )


@check("process")
def hidden_gpus(_: None) -> Iterator[Finding]:
    """Report GPUs of this host that a task cannot use."""
    gpus = gpu_discovery.find(os.environ)
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus["hidden"]:
        yield HIDDEN.finding(
            f"this host seems to have GPUs, but {gpus['reason']}",
            'pip install "tfd-notebook[gpu]", and check that nvidia-smi works',
        )
    elif not gpus["gpus"] and shown is not None and gpu_discovery.find({})["gpus"]:
        yield HIDDEN.finding(
            gpus["reason"],
            "unset CUDA_VISIBLE_DEVICES, or list the GPUs for the tasks in it",
        )


@check("process")
def memory_limits(_: None) -> Iterator[Finding]:
    """Report a memory limit that TensorFlow's processes are going to reach."""
    most = memory.of_process()
    if most is not None and most < _TENSORFLOW_MAPS:
        yield MEMORY.finding(
            f"a process may map at most {most / 1e9:.1f} GB (ulimit -v)",
            "raise the limit: TensorFlow maps more memory than it uses",
        )
    if (group := memory.of_group()) is not None and group[1] > NEAR * group[0]:
        yield MEMORY.finding(
            f"{group[1] / 1e9:.1f} of the {group[0] / 1e9:.1f} GB of this container are used",
            "use fewer tasks or smaller buffers (prefetch, shuffle, cache), or add memory",
        )


@check("process")
def leftovers(_: None) -> Iterator[Finding]:
    """Report orphans that ``tfd sweep`` would end."""
    orphans = sweep(dry_run=True)
    if orphans:
        processes = sum(orphan.pid is not None for orphan in orphans)
        yield ORPHANS.finding(
            f"{processes} processes and {len(orphans) - processes} directories or sockets belong "
            "to kernels that have ended",
            "run tfd sweep to end and remove them",
        )


@check("process")
def culled(_: None) -> Iterator[Finding]:
    """Report a server that ends idle kernels."""
    if "ipykernel" in sys.modules and (seconds := kernel.cull_seconds()) is not None:
        yield CULLED.finding(
            f"this kernel's server ends kernels after {seconds:g} s without activity",
            "call cluster.detach(hours=8), so that the tasks outlive the kernel",
        )


@check("process")
def clicks(_: None) -> Iterator[Finding]:
    """Report an ipykernel that does not handle clicks while a cell runs."""
    if "ipykernel" in sys.modules and not ipykernel.handles_messages_during_execution():
        yield CLICKS.finding(
            f"ipykernel {getattr(sys.modules['ipykernel'], '__version__', '')} queues clicks while "
            "a cell runs",
            'pip install "ipykernel>=7", or use a terminal: tfd pause, tfd stop',
        )
