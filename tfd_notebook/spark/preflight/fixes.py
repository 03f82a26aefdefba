"""With which settings, variables and commands a Spark runs nodes: what mends each finding."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import sys
from collections.abc import Collection

from tfd_notebook._version import VERSION
from tfd_notebook.net.host import address_towards
from tfd_notebook.spark.preflight.facts import SparkFacts

#: Findings that an environment like this process's mends: Python, this package, TensorFlow.
_ENVIRONMENT = ("TFD873", "TFD874", "TFD875")
ARCHIVE = {"spark.archives": "environment.tar.gz#environment"}
_ARCHIVED_PYTHON = "./environment/bin/python"
_COMMANDS = (
    "python -m venv environment",
    f'environment/bin/pip install "tfd-notebook[spark,tensorflow]=={VERSION}" venv-pack',
    "environment/bin/venv-pack -o environment.tar.gz",
)
_GPU, _TASK_GPU = "spark.executor.resource.gpu.amount", "spark.task.resource.gpu.amount"


def settings(seen: SparkFacts, codes: Collection[str]) -> dict[str, str]:
    """Return the settings that a Spark lacks where these findings were made."""
    if seen.connect:
        return {}
    lines: dict[str, str] = {}
    if "TFD871" in codes:
        lines["spark.dynamicAllocation.enabled"] = "false"
    if "TFD870" in codes or ("TFD871" in codes and seen.needed is not None):
        lines.update(more(seen))
    if _ships(seen, codes):
        lines.update(ARCHIVE)
    if "TFD876" in codes:
        lines["spark.driver.host"] = reachable(seen)
    if "TFD878" in codes:
        lines["spark.authenticate"] = "true"
        lines["spark.network.crypto.enabled"] = "true"
    if "TFD881" in codes:
        lines["spark.speculation"] = "false"
    if "TFD882" in codes:
        lines.update(gpus(seen))
    return {name: value for name, value in lines.items() if seen.setting(name) != value}


def variables(seen: SparkFacts, codes: Collection[str]) -> dict[str, str]:
    """Return the variables that this process lacks when it starts Spark."""
    if not set(codes) & set(_ENVIRONMENT):
        return {}
    return {"PYSPARK_PYTHON": sys.executable if stays_here(seen) else _ARCHIVED_PYTHON}


def commands(seen: SparkFacts, codes: Collection[str]) -> tuple[str, ...]:
    """Return what makes an environment that executors on other hosts can be sent."""
    return _COMMANDS if _ships(seen, codes) else ()


def environment(seen: SparkFacts) -> str:
    """Return in a sentence how executors get this process's Python, and what is in it."""
    if stays_here(seen):
        return f"have PYSPARK_PYTHON={sys.executable} in the environment of this process"
    return (
        f"make an environment like this one and send it along: {'; '.join(_COMMANDS)}; and start "
        f"Spark with {_listed(ARCHIVE)}, and with PYSPARK_PYTHON={_ARCHIVED_PYTHON} in the "
        "environment of this process"
    )


def more(seen: SparkFacts) -> dict[str, str]:
    """Return the settings with which as many nodes as are needed could run."""
    needed = (seen.needed or 1) + sum(seen.held.values())
    if seen.manager == "local":
        return {"spark.master": f"local[{needed}]"}
    instances = -(-needed // slots_of_one(seen))
    if seen.manager == "local-cluster":
        memory = seen.master.rstrip("]").split(",")[-1]
        return {"spark.master": f"local-cluster[{instances},{seen.cores},{memory}]"}
    lines = {"spark.executor.instances": str(instances), "spark.executor.cores": str(seen.cores)}
    if seen.manager == "standalone":
        lines["spark.cores.max"] = str(instances * seen.cores)
    return lines


def more_listed(seen: SparkFacts) -> str:
    """Return them in a sentence."""
    return _listed(more(seen))


def slots_of_one(seen: SparkFacts) -> int:
    """Return how many tasks an executor runs at once: its cores and its GPUs have to do."""
    slots = seen.cores // int(seen.setting("spark.task.cpus") or 1)
    have, take = amount(seen, _GPU), amount(seen, _TASK_GPU)
    if have and take:
        # Of a fraction, a GPU is shared by as many tasks as it goes into one.
        slots = min(slots, int(have * math.floor(1 / take) if take < 1 else have // take))
    return max(slots, 1)


def gpus(seen: SparkFacts) -> dict[str, str]:
    """Return the settings with which each task is given its share of an executor's GPUs."""
    have = int(amount(seen, _GPU)) or max((one.gpus for one in seen.executors), default=0) or 1
    slots = max(seen.cores // int(seen.setting("spark.task.cpus") or 1), 1)
    share = str(have // slots)
    if have < slots:
        share = f"{math.floor(100 / math.ceil(slots / have)) / 100:g}"
    return {_GPU: str(have), _TASK_GPU: share}


def gpus_listed(seen: SparkFacts) -> str:
    """Return them in a sentence."""
    return _listed(gpus(seen))


def amount(seen: SparkFacts, name: str) -> float:
    """Return a setting that is a number; 0 where it is not set."""
    return float(seen.setting(name) or 0)


def reachable(seen: SparkFacts) -> str:
    """Return the address of this process's host that executors are most likely to reach."""
    for one in seen.executors:
        if one.unreachable:
            with contextlib.suppress(OSError):
                return address_towards(one.host)
    return "ADDRESS"


def stays_here(seen: SparkFacts) -> bool:
    """Whether all of a Spark is on this host."""
    if seen.manager in ("local", "local-cluster"):
        return True
    host = seen.setting("spark.driver.host")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _ships(seen: SparkFacts, codes: Collection[str]) -> bool:
    return bool(set(codes) & set(_ENVIRONMENT)) and not stays_here(seen)


def _listed(lines: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in lines.items())
