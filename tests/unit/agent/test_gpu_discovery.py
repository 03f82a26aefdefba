"""Detection and sampling of GPUs, with a fake NVML."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from tfd_notebook.agent import gpu_discovery


class FakeNVML:
    """The functions of pynvml that `gpus` uses."""

    class NVMLError(Exception):
        pass

    def __init__(self, count: int = 4, broken: bool = False) -> None:
        self.count = count
        self.broken = broken
        self.users = 0
        self.busy: dict[int, int] = {}

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= self.count:
            raise self.NVMLError("Not Found")
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # older versions give bytes
        return b"NVIDIA Imaginary 80GB"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}{handle}-abc"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=2_100_000_000, total=80_000_000_000)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle not in self.busy:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=self.busy[handle])


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNVML:
    fake_nvml = FakeNVML()
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml)  # type: ignore[arg-type]
    return fake_nvml


def numbers(discovery: Mapping[str, Any]) -> list[int]:
    return [gpu["index"] for gpu in discovery["gpus"]]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        (" 1 , 3", [1, 3]),
        ("GPU-22, GPU-00-abc", [2, 0]),
        ("1,9,2", [1]),  # as in CUDA, an unknown device ends the list
        ("GPU-", []),
        ("-1", []),
        ("", []),
        ("MIG-1", []),
    ],
)
def test_environment_limits_the_usable_gpus(
    nvml: FakeNVML, setting: str | None, expected: list[int]
) -> None:
    environment = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    result = gpu_discovery.find(environment)
    assert numbers(result) == expected
    assert result["reason"] == ("" if expected else f"CUDA_VISIBLE_DEVICES={setting} hides 4 GPUs")
    assert nvml.users == 0


def test_gpu_is_described(nvml: FakeNVML) -> None:
    assert gpu_discovery.find({})["gpus"][1] == {
        "index": 1,
        "name": "NVIDIA Imaginary 80GB",
        "uuid": "GPU-11-abc",
        "memory": 80_000_000_000,
    }


def test_missing_nvml_gives_no_gpus_and_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    assert "nvidia-ml-py" in gpu_discovery.find({})["reason"]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML(broken=True))  # type: ignore[arg-type]
    assert "Driver Not Loaded" in gpu_discovery.find({})["reason"]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML(count=0))  # type: ignore[arg-type]
    assert gpu_discovery.find({}) == {"gpus": [], "reason": "this host has no GPU", "hidden": False}


def test_utilization_and_memory_are_sampled(nvml: FakeNVML) -> None:
    meter = gpu_discovery.GpuSampler()
    nvml.busy = {0: 35}
    used = {"used": 2_100_000_000}
    assert meter.read([0, 1, 9]) == {0: {"use_percent": 35, **used}, 1: used}
    assert nvml.users == 1


def test_sampler_without_nvml_tries_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML(broken=True))  # type: ignore[arg-type]
    meter = gpu_discovery.GpuSampler()
    assert meter.read([0]) == {}
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML())  # type: ignore[arg-type]
    assert meter.read([0]) == {}


def test_visible_gpus_of_a_process() -> None:
    assert gpu_discovery.environment([]) == {"CUDA_VISIBLE_DEVICES": "-1"}
    assert gpu_discovery.environment([2, 0]) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "2,0",
    }
