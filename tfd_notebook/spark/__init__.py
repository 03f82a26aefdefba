"""TFCluster on Apache Spark: TensorFlow's tasks on executors, fed from RDDs and DataFrames.

A program written for TensorFlowOnSpark imports ``tfd_notebook.spark`` in place of
``tensorflowonspark``; docs/spark.md lists what else may have to change. Needs the extra ``spark``;
nothing of Spark is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfd_notebook.spark.checks import check as check
    from tfd_notebook.spark.service import ServiceFeed as ServiceFeed
    from tfd_notebook.spark.sessions import session as session

#: Where a name is defined; a module where nothing is said.
_HOMES = {
    "ServiceFeed": "service",
    "TFCluster": "",
    "TFNode": "",
    "TFParallel": "",
    "check": "checks",
    "compat": "",
    "dfutil": "",
    "pipeline": "",
    "session": "sessions",
}

__all__ = [
    "ServiceFeed",
    "TFCluster",
    "TFNode",
    "TFParallel",
    "check",
    "compat",
    "dfutil",
    "pipeline",
    "session",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    module = importlib.import_module(f"{__name__}.{home or name}")
    if not home:
        return module
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
