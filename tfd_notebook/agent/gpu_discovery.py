"""The GPUs of this host: discovery and sampling by NVML, and the variables that assign them.

NVML is part of NVIDIA's driver. The optional package ``nvidia-ml-py`` is its client. A GPU is
identified by its number in ``nvidia-smi``.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tfd_notebook.errors import TfdError, Unsupported
from tfd_notebook.model.events import Event, GpusMeasured

if TYPE_CHECKING:
    from tfd_notebook.agent.cluster import AgentCluster

_SAMPLE_EVERY_TICKS = 5


def environment(gpus: Sequence[int]) -> dict[str, str]:
    """Return the variables that make exactly these GPUs visible to a process."""
    if not gpus:
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    # By default CUDA numbers the fastest GPU first, unlike nvidia-smi.
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
    }


@dataclass(frozen=True)
class Gpu:
    """A GPU of this host; memory in bytes."""

    index: int
    name: str
    uuid: str
    memory: int


def find(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the GPUs of this host that a process with that environment may use.

    Returns
    -------
    dict
        JSON values: ``gpus``, a list of the fields of `Gpu` in the order of
        ``CUDA_VISIBLE_DEVICES``. ``reason``, if the list is empty. ``hidden``, true if GPUs
        seem to exist nevertheless.
    """
    try:
        nvml = _nvml()
    except TfdError as error:
        return {"gpus": [], "reason": error.what, "hidden": bool(glob.glob("/dev/nvidia[0-9]*"))}
    try:
        gpus = [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        return {"gpus": [], "reason": f"NVML failed: {error}", "hidden": True}
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    visible = gpus if setting is None else _visible(gpus, setting)
    reason = "" if visible else "this host has no GPU"
    if gpus and not visible:
        reason = (
            f"CUDA_VISIBLE_DEVICES={setting} hides {len(gpus)} GPU{'' if len(gpus) == 1 else 's'}"
        )
    return {"gpus": [asdict(gpu) for gpu in visible], "reason": reason, "hidden": False}


def _nvml() -> Any:
    """Return the initialized NVML module."""
    try:
        import pynvml
    except ImportError:
        raise Unsupported(
            "GPUs cannot be detected without the package nvidia-ml-py "
            '(pip install "tfd-notebook[gpu]")'
        ) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise Unsupported(f"NVML could not be initialized: {error}") from None
    return pynvml


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return Gpu(
        index,
        _text(nvml.nvmlDeviceGetName(handle)),
        _text(nvml.nvmlDeviceGetUUID(handle)),
        int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _visible(gpus: Sequence[Gpu], setting: str) -> list[Gpu]:
    """Return the GPUs in ``CUDA_VISIBLE_DEVICES``; like CUDA, stop at the first invalid entry."""
    chosen: list[Gpu] = []
    for entry in (entry.strip() for entry in setting.split(",")):
        matches = [
            gpu
            for gpu in gpus
            if entry == str(gpu.index) or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))
        ]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen += matches
    return chosen


class GpuSampler:
    """Samples the use of this host's GPUs; returns nothing without NVML."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._unavailable = False

    def read(self, gpus: Sequence[int]) -> dict[int, dict[str, float]]:
        """Return the figures of some GPUs by number, without unknown figures.

        Returns
        -------
        dict of int to dict
            ``used`` bytes of memory, and ``use_percent``, the share of time in which the GPU
            computed, if the driver reports it. Both include the use by other processes.
        """
        if self._nvml is None and not self._unavailable:
            try:
                self._nvml = _nvml()
            except TfdError:
                self._unavailable = True
        figures_by_gpu: dict[int, dict[str, float]] = {}
        if not self._unavailable:
            for gpu in gpus:
                with contextlib.suppress(self._nvml.NVMLError):
                    figures_by_gpu[gpu] = self._figures(gpu)
        return figures_by_gpu

    def _figures(self, gpu: int) -> dict[str, float]:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(gpu)
        figures: dict[str, float] = {"used": int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)}
        # Some virtual GPUs do not report their utilization.
        with contextlib.suppress(self._nvml.NVMLError):
            figures["use_percent"] = int(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return figures


class GpuMonitor:
    """Samples the GPUs of this host, for the clusters that requested their list.

    A thread reads them, since a driver may block indefinitely.

    Parameters
    ----------
    publish : callable
        Takes the name of a cluster, and an event for its listeners.
    """

    def __init__(self, publish: Callable[[str, Event], None]) -> None:
        self._publish = publish
        self._sampler = GpuSampler()
        self._reading: asyncio.Future[None] | None = None

    def tick(self, clusters: Iterable[AgentCluster], tick: int) -> None:
        """Send the GPU use to clusters, every few ticks and when other tasks use the GPUs."""
        if self._reading is not None and not self._reading.done():
            return
        due = [
            cluster
            for cluster in clusters
            if cluster.gpus
            and (
                tick % _SAMPLE_EVERY_TICKS == 0 or cluster.gpu_holders() != cluster.reported_holders
            )
        ]
        if due:
            self._reading = asyncio.ensure_future(self._sample(due))

    async def _sample(self, clusters: list[AgentCluster]) -> None:
        numbers = sorted({gpu["index"] for cluster in clusters for gpu in cluster.gpus})
        figures = await asyncio.to_thread(self._sampler.read, numbers)
        for cluster in clusters:
            cluster.reported_holders = cluster.gpu_holders()
            gpus = [
                {
                    **{name: gpu[name] for name in ("index", "name", "memory")},
                    **figures.get(gpu["index"], {}),
                    "task": cluster.reported_holders.get(gpu["index"], ""),
                }
                for gpu in cluster.gpus
            ]
            self._publish(cluster.name, GpusMeasured(tuple(gpus)))
