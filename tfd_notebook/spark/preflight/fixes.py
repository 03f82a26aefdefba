"""Settings, variables and commands that fix the findings about a Spark application."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import sys
from collections.abc import Collection

from tfd_notebook._version import VERSION
from tfd_notebook.net.host import address_towards
from tfd_notebook.spark.preflight.facts import SparkFacts

#: Findings that a copy of this process's environment fixes: Python, this package, TensorFlow.
_ENVIRONMENT = ("TFD873", "TFD874", "TFD875")
ARCHIVE = {"spark.archives": "environment.tar.gz#environment"}
_ARCHIVED_PYTHON = "./environment/bin/python"
_COMMANDS = (
    "python -m venv environment",
    f'environment/bin/pip install "tfd-notebook[spark,tensorflow]=={VERSION}" venv-pack',
    "environment/bin/venv-pack -o environment.tar.gz",
)
_GPU, _TASK_GPU = "spark.executor.resource.gpu.amount", "spark.task.resource.gpu.amount"


def settings(spark: SparkFacts, codes: Collection[str]) -> dict[str, str]:
    """Return the missing settings of a Spark application with these findings."""
    if spark.connect:
        return {}
    lines: dict[str, str] = {}
    if "TFD871" in codes:
        lines["spark.dynamicAllocation.enabled"] = "false"
    if "TFD870" in codes or ("TFD871" in codes and spark.needed is not None):
        lines.update(slot_settings(spark))
    if _ships(spark, codes):
        lines.update(ARCHIVE)
    if "TFD876" in codes:
        lines["spark.driver.host"] = reachable(spark)
    if "TFD878" in codes:
        lines["spark.authenticate"] = "true"
        lines["spark.network.crypto.enabled"] = "true"
    if "TFD881" in codes:
        lines["spark.speculation"] = "false"
    if "TFD882" in codes:
        lines.update(gpus(spark))
    return {name: value for name, value in lines.items() if spark.setting(name) != value}


def variables(spark: SparkFacts, codes: Collection[str]) -> dict[str, str]:
    """Return the environment variables that this process needs to start Spark."""
    if not set(codes) & set(_ENVIRONMENT):
        return {}
    return {"PYSPARK_PYTHON": sys.executable if is_local(spark) else _ARCHIVED_PYTHON}


def commands(spark: SparkFacts, codes: Collection[str]) -> tuple[str, ...]:
    """Return the commands that create an environment to send to executors on other hosts."""
    return _COMMANDS if _ships(spark, codes) else ()


def environment(spark: SparkFacts) -> str:
    """Return text that explains how executors get this process's Python environment."""
    if is_local(spark):
        return f"set PYSPARK_PYTHON={sys.executable} in the environment of this process"
    return (
        f"create an environment like this one and send it to the executors: "
        f"{'; '.join(_COMMANDS)}; start Spark with {as_text(ARCHIVE)}, and with "
        f"PYSPARK_PYTHON={_ARCHIVED_PYTHON} in the environment of this process"
    )


def slot_settings(spark: SparkFacts) -> dict[str, str]:
    """Return settings that provide slots for all requested nodes."""
    needed = (spark.needed or 1) + sum(spark.held.values())
    if spark.manager == "local":
        return {"spark.master": f"local[{needed}]"}
    instances = -(-needed // slots_per_executor(spark))
    if spark.manager == "local-cluster":
        memory = spark.master.rstrip("]").split(",")[-1]
        return {"spark.master": f"local-cluster[{instances},{spark.cores},{memory}]"}
    lines = {"spark.executor.instances": str(instances), "spark.executor.cores": str(spark.cores)}
    if spark.manager == "standalone":
        lines["spark.cores.max"] = str(instances * spark.cores)
    return lines


def slots_per_executor(spark: SparkFacts) -> int:
    """Return the number of slots of an executor, which its cores and its GPUs limit."""
    slots = spark.cores // int(spark.setting("spark.task.cpus") or 1)
    gpus_per_executor, gpus_per_task = amount(spark, _GPU), amount(spark, _TASK_GPU)
    if gpus_per_executor and gpus_per_task:
        if gpus_per_task < 1:  # floor(1 / gpus_per_task) tasks share a GPU
            by_gpus = gpus_per_executor * math.floor(1 / gpus_per_task)
        else:
            by_gpus = gpus_per_executor // gpus_per_task
        slots = min(slots, int(by_gpus))
    return max(slots, 1)


def gpus(spark: SparkFacts) -> dict[str, str]:
    """Return settings that assign each task its share of an executor's GPUs."""
    reported = max((executor.gpus for executor in spark.executors), default=0)
    gpus_per_executor = int(amount(spark, _GPU)) or reported or 1
    slots = max(spark.cores // int(spark.setting("spark.task.cpus") or 1), 1)
    gpus_per_task = str(gpus_per_executor // slots)
    if gpus_per_executor < slots:
        gpus_per_task = f"{math.floor(100 / math.ceil(slots / gpus_per_executor)) / 100:g}"
    return {_GPU: str(gpus_per_executor), _TASK_GPU: gpus_per_task}


def amount(spark: SparkFacts, name: str) -> float:
    """Return a setting as a number; 0 if it is not set."""
    return float(spark.setting(name) or 0)


def reachable(spark: SparkFacts) -> str:
    """Return the address of this host that executors can most likely reach."""
    for executor in spark.executors:
        if executor.unreachable:
            with contextlib.suppress(OSError):
                return address_towards(executor.host)
    return "ADDRESS"


def is_local(spark: SparkFacts) -> bool:
    """Return True if all processes of a Spark application run on this host."""
    if spark.manager in ("local", "local-cluster"):
        return True
    host = spark.setting("spark.driver.host")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _ships(spark: SparkFacts, codes: Collection[str]) -> bool:
    return bool(set(codes) & set(_ENVIRONMENT)) and not is_local(spark)


def as_text(lines: dict[str, str]) -> str:
    """Return settings as one line of text."""
    return ", ".join(f"{name}={value}" for name, value in lines.items())
