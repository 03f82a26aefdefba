"""Python stacks of a cluster with a fake launcher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import tfd_notebook as tfd
from tfd_notebook import errors
from tfd_notebook.cluster import commands, data_service, task_manager
from tfd_notebook.launchers import Fake

pytestmark = pytest.mark.usefixtures("no_coordinator")


class Tasks:
    """Stacks of the tasks at the times of a fake clock, which replaces `time`."""

    def __init__(self) -> None:
        self.now = 0.0
        #: The time at which each call began, by the task that runs it.
        self.calls: dict[str, float] = {}
        self.calls_return = False
        self.requests = 0
        self.error: errors.TfdError | None = None

    def stacks(self, tasks: Sequence[str], *, timeout: float = 30.0) -> dict[str, Any]:
        self.requests += 1
        if self.error is not None:
            raise self.error
        return {
            name: {
                "note": "",
                "threads": [
                    {
                        **{"name": "tf.data", "pipeline": True},
                        "frames": [
                            {
                                **{"function": "decode", "file": "/a/x.py", "line": 12},
                                **{"users": True, "seconds": self.now - self.calls[name]},
                            }
                        ],
                    }
                ],
            }
            for name in tasks
            if name in self.calls
        }

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.calls_return:
            self.calls = dict.fromkeys(self.calls, self.now)  # the next element


@pytest.fixture
def tasks() -> Tasks:
    return Tasks()


@pytest.fixture
def cluster(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> Iterator[tfd.Cluster]:
    launcher = Fake()
    with tfd.Cluster(data_workers=2, launcher=launcher) as cluster, monkeypatch.context() as patch:
        patch.setattr(launcher.task_hosts[0], "stacks", tasks.stacks, raising=False)
        patch.setattr(task_manager, "time", tasks)
        yield cluster


def blocked(cluster: tfd.Cluster) -> list[str]:
    return [str(each) for each in data_service.of(cluster).blocked_functions(3.0)]


def test_each_task_has_a_row(cluster: tfd.Cluster, tasks: Tasks) -> None:
    tasks.calls = {"data_worker:1": -8.0}
    rows = {row["task"]: row for row in cluster.stacks().records()}
    assert rows.keys() == {"dispatcher:0", "data_worker:0", "data_worker:1"}
    assert (rows["data_worker:1"]["function"], rows["data_worker:1"]["seconds"]) == ("decode", 8.0)
    assert rows["data_worker:0"]["note"] == "its agent does not have the task"
    assert [row["task"] for row in cluster.stacks("data_worker:1").records()] == ["data_worker:1"]
    with pytest.raises(errors.UnknownName, match="data_worker:7"):
        cluster.stacks("data_worker:7")


def test_launcher_without_stacks_has_rows_with_the_reason(
    cluster: tfd.Cluster, tasks: Tasks
) -> None:
    tasks.error = errors.Unsupported("the host does not support this")
    rows = cluster.stacks().records()
    assert [row["note"] for row in rows] == ["the host does not support this"] * 3
    assert blocked(cluster) == []


def test_request_returns_the_rows(cluster: tfd.Cluster, tasks: Tasks) -> None:
    tasks.calls = {"data_worker:1": -8.0}
    request = {"command": "stacks", "name": "cluster", "task": "data_worker:1"}
    assert commands.perform(request) == cluster.stacks("data_worker:1").records()


def test_call_that_was_observed_long_enough_is_reported_at_once(
    cluster: tfd.Cluster, tasks: Tasks
) -> None:
    tasks.calls = {"data_worker:0": -3.0}
    assert blocked(cluster) == ["decode (x.py:12) in data_worker:0"]
    assert tasks.requests == 1


def test_new_call_is_observed_until_it_is_blocked(cluster: tfd.Cluster, tasks: Tasks) -> None:
    tasks.calls = {"data_worker:0": -1.0, "data_worker:1": 0.0}
    assert blocked(cluster) == ["decode (x.py:12) in data_worker:0, data_worker:1"]
    assert tasks.now == 3.0


def test_calls_that_return_are_not_waited_for(cluster: tfd.Cluster, tasks: Tasks) -> None:
    tasks.calls, tasks.calls_return = {"data_worker:0": 0.0}, True
    assert blocked(cluster) == []
    assert tasks.requests == 2


def test_doctor_names_the_function_until_it_returns(cluster: tfd.Cluster, tasks: Tasks) -> None:
    tasks.calls = {"data_worker:1": -8.0}
    (finding,) = (each for each in tfd.doctor(cluster) if each.code == "TFD855")
    assert finding.what == "decode (x.py:12) in data_worker:1 has not returned for 8 s"
    assert "cluster.restart('data_worker:1')" in finding.fix
    tasks.calls = {}
    assert "TFD855" not in tfd.doctor(cluster).codes
