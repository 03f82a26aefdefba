"""TFCluster on Apache Spark: TensorFlow's tasks on executors, fed from RDDs and DataFrames.

Programs written for TensorFlowOnSpark import ``tfd_notebook.spark`` in place of
``tensorflowonspark``; docs/spark.md lists other changes that may be needed. Requires the extra
``spark``; Spark is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfd_notebook._lazy import exports

if TYPE_CHECKING:
    from tfd_notebook.spark.driver.service_feed import ServiceFeed as ServiceFeed
    from tfd_notebook.spark.local_session.session import session as session
    from tfd_notebook.spark.preflight.check import check as check

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "ServiceFeed": "driver.service_feed",
        "TFCluster": "",
        "TFNode": "",
        "TFParallel": "",
        "check": "preflight.check",
        "compat": "",
        "dfutil": "",
        "pipeline": "",
        "session": "local_session.session",
    },
)
