"""A fake module pynvml for processes that a test starts."""

from __future__ import annotations

import json
from pathlib import Path

#: The environment variable with the path of the file that lists the GPUs.
VARIABLE = "TFD_TEST_GPUS"
_SOURCE = """
import json, os
from types import SimpleNamespace
class NVMLError(Exception):
    pass
def nvmlInit():
    pass
nvmlShutdown = nvmlInit
def gpus():
    with open(os.environ["TFD_TEST_GPUS"]) as file:
        return json.load(file)
def nvmlDeviceGetCount():
    return len(gpus())
def nvmlDeviceGetHandleByIndex(index):
    return index
def nvmlDeviceGetName(handle):
    return "Imaginary"
def nvmlDeviceGetUUID(handle):
    return f"GPU-{os.stat('/proc/self/ns/net').st_ino}-{handle}"  # one id per host
def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(used=gpus()[handle][1], total=80_000_000_000)
def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=gpus()[handle][0])
"""


def write_module(directory: Path) -> None:
    """Write the module to a directory of the import path."""
    (directory / "pynvml.py").write_text(_SOURCE)


def write_gpus(path: Path, *gpus: tuple[int, int]) -> None:
    """Replace the GPUs of a host by these: (use in percent, used bytes)."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(gpus))
    new.replace(path)
