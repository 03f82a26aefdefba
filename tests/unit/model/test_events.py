"""Events and their JSON form."""

from __future__ import annotations

import dataclasses
import inspect
import json

import pytest

from tfd_notebook.model.events import (
    ClusterEnded,
    Event,
    GpusMeasured,
    LeaseChanged,
    Notice,
    TaskChanged,
    TaskMeasured,
    from_json,
)
from tfd_notebook.model.spec import TaskState
from tfd_notebook.net import messages

GPU = {"index": 0, "name": "H100", "memory": 80, "task": "worker:0", "used": 8, "use_percent": 0.5}
#: An event of each kind that agents send, with a value in each field. Only kernels set the host.
EVENTS = [
    TaskChanged(
        "worker:0", TaskState.FAILED, "exited", "localhost:7", 5, 2, "this host", ("last line",)
    ),
    TaskMeasured("worker:0", 50.0, 3.0, 2.0, 10, 0.5),
    GpusMeasured((GPU,)),
    Notice("error", "it failed", "worker:0", "restart it"),
    LeaseChanged(60.0),
    ClusterEnded("stopped"),
]
#: Messages about the connection, which become no event.
CONNECTION = {"hello", "failed", "agent_detached"}


def test_each_kind_of_event_has_a_schema() -> None:
    assert messages.EVENTS.keys() == {event.name for event in EVENTS} | CONNECTION


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_schema_has_the_fields_of_the_event(event: Event) -> None:
    schema = inspect.getclosurevars(messages.EVENTS[event.name]).nonlocals
    fields = {field.name for field in dataclasses.fields(event)} - {"time"}
    assert {*schema["checks"], *schema["optional_"]} == fields | {"event", "cluster"}


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_event_is_unchanged_by_its_json_form(event: Event) -> None:
    body = json.loads(json.dumps({"cluster": "c", **event.to_json()}))
    assert from_json(messages.event(body)) == event
