"""The coordinator of a cluster on Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tfd_notebook.errors import UsageError
from tfd_notebook.spark.driver.coordinator import CoordinatedSparkCluster


@pytest.mark.parametrize("stopped", [None, True, False])
def test_other_strategy_is_refused(monkeypatch: pytest.MonkeyPatch, stopped: bool | None) -> None:
    cluster: Any = object.__new__(CoordinatedSparkCluster)
    monkeypatch.setattr(CoordinatedSparkCluster, "strategy", lambda self: pytest.fail("created"))
    if stopped is not None:
        cluster._strategy, cluster._coordinator = object(), SimpleNamespace(stopped=stopped)
    with pytest.raises(UsageError, match="expected this cluster's current strategy"):
        cluster.coordinator(object())
    if stopped:
        with pytest.raises(UsageError, match="current strategy"):
            cluster.coordinator(cluster._strategy)
    elif stopped is False:
        assert cluster.coordinator(cluster._strategy) is cluster._coordinator
