"""The GPUs of this host: found by NVML, measured, and shown to a process or hidden from it.

NVML comes with NVIDIA's driver and is asked through the package ``nvidia-ml-py``, which is
optional. A GPU is called by its number in ``nvidia-smi``.
"""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tfd_notebook.errors import TfdError, Unsupported


def environment(gpus: Sequence[int]) -> dict[str, str]:
    """Return the variables by which a process sees exactly these GPUs."""
    if not gpus:
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    # CUDA counts the fastest GPU first unless it is told to count as nvidia-smi does.
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
    """Look which GPUs of this host a process with that environment may use.

    Returns
    -------
    dict
        JSON values: ``gpus``, a list of the fields of `Gpu` in the order in which
        ``CUDA_VISIBLE_DEVICES`` names them; ``why`` there are none; ``hidden``: whether there
        seem to be some all the same.
    """
    try:
        nvml = _nvml()
    except TfdError as error:
        return {"gpus": [], "why": error.what, "hidden": bool(glob.glob("/dev/nvidia[0-9]*"))}
    try:
        found = [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        return {"gpus": [], "why": f"NVML fails: {error}", "hidden": True}
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    visible = found if setting is None else _visible(found, setting)
    why = "" if visible else "there is no GPU"
    if found and not visible:
        why = (
            f"CUDA_VISIBLE_DEVICES={setting} hides {len(found)} GPU{'' if len(found) == 1 else 's'}"
        )
    return {"gpus": [asdict(gpu) for gpu in visible], "why": why, "hidden": False}


def _nvml() -> Any:
    """Return the module that asks NVML, ready for use."""
    try:
        import pynvml
    except ImportError:
        raise Unsupported(
            "the GPUs are not known without the package nvidia-ml-py "
            '(pip install "tfd-notebook[gpu]")'
        ) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise Unsupported(f"NVML, which knows the GPUs, cannot be asked: {error}") from None
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
    """Return what ``CUDA_VISIBLE_DEVICES`` lets through; as for CUDA, what it lacks ends it."""
    chosen: list[Gpu] = []
    for word in (word.strip() for word in setting.split(",")):
        meant = [
            gpu
            for gpu in gpus
            if word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))
        ]
        if len(meant) != 1 or meant[0] in chosen:
            break
        chosen += meant
    return chosen


class GpuSampler:
    """Reads what GPUs of this host do; safe where there is no NVML."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._gone = False

    def read(self, gpus: Sequence[int]) -> dict[int, dict[str, float]]:
        """Return the figures of some GPUs by number; without those that cannot be known.

        Returns
        -------
        dict of int to dict
            ``used`` bytes of memory, and ``use_percent``, the share of time in which the GPU
            computed, where it tells; both are of the whole GPU, whoever uses it.
        """
        if self._nvml is None and not self._gone:
            try:
                self._nvml = _nvml()
            except TfdError:
                self._gone = True
        found: dict[int, dict[str, float]] = {}
        if not self._gone:
            for gpu in gpus:
                with contextlib.suppress(self._nvml.NVMLError):
                    found[gpu] = self._figures(gpu)
        return found

    def _figures(self, gpu: int) -> dict[str, float]:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(gpu)
        figures: dict[str, float] = {"used": int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)}
        # Some virtual GPUs do not tell how busy they are.
        with contextlib.suppress(self._nvml.NVMLError):
            figures["use_percent"] = int(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return figures
