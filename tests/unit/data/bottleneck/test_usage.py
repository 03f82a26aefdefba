"""The resource use of data workers."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

from tfd_notebook.data.bottleneck.usage import Workers
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import Role, TaskState


def test_rate_of_worker_that_was_not_measured_before_is_its_latest() -> None:
    new = TaskRow(task="data_worker:0", role=Role.DATA_WORKER, index=0, state=TaskState.READY)
    rows = [new]
    cluster: Any = types.SimpleNamespace(
        service_in_process=False, service_on_this_host=False, data_workers=lambda: tuple(rows)
    )
    workers = Workers(cluster)
    assert workers.read()[0].bytes_per_s is None
    rows[0] = replace(new, bytes_sent=900, bytes_per_s=300.0, rates=(300.0,))
    assert workers.read()[0].bytes_per_s == 300
    workers = Workers(cluster)
    rows[0] = replace(rows[0], bytes_per_s=200.0)
    assert workers.read()[0].bytes_per_s == 0
