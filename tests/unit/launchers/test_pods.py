"""States of pods, which the API of Kubernetes reports and which are not trusted."""

from __future__ import annotations

from typing import Any

import pytest

from tfd_notebook.errors import InvalidMessage
from tfd_notebook.launchers.client import pods

INDEX = "batch.kubernetes.io/job-completion-index"


def pod(status: Any, container: Any = None, **metadata: Any) -> dict[str, Any]:
    if container is not None:
        status = {**status, "containerStatuses": [{"name": "agent", "state": container}]}
    known = {"name": "it-0-abcde", "ownerReferences": [{"uid": "job"}], "annotations": {INDEX: "0"}}
    return {"metadata": {**known, **metadata}, "status": status}


@pytest.mark.parametrize(
    ("item", "ended"),
    [
        (
            pod({"phase": "Failed"}, {"terminated": {"reason": "OOMKilled", "exitCode": 137}}),
            "pod it-0-abcde used more memory than its limit (OOMKilled)",
        ),
        (
            pod({"phase": "Failed", "reason": "Evicted", "message": "low on\ndisk"}),
            "pod it-0-abcde failed (Evicted): low on disk",
        ),
        (
            pod({"phase": "Failed"}, {"terminated": {"reason": "Error", "exitCode": 3}}),
            "pod it-0-abcde ended with status 3 (Error)",
        ),
        (pod({"phase": "Running"}, deletionTimestamp="now"), "pod it-0-abcde was deleted"),
        (
            pod(
                {
                    "phase": "Failed",
                    "conditions": [
                        {
                            "type": "DisruptionTarget",
                            "status": "True",
                            "reason": "PreemptionByScheduler",
                        }
                    ],
                },
                {"terminated": {"reason": "OOMKilled"}},
            ),
            "pod it-0-abcde was evicted (PreemptionByScheduler)",
        ),
        (pod({"phase": "Running", "podIP": "10.0.0.1"}, {"running": {}}), ""),
        (pod({"phase": "Pending"}), ""),
    ],
)
def test_end_is_explained(item: Any, ended: str) -> None:
    parsed = pods.parse(item, "job")
    assert parsed is not None
    assert parsed.ends == bool(ended)
    assert parsed.reason == ended or not ended


def test_pending_pod_has_a_reason_and_a_next_step() -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "not found"}
    image = pods.parse(pod({"phase": "Pending"}, {"waiting": waiting}), "job")
    assert image is not None
    assert image.ends  # without the user, it does not change
    assert "image=" in image.fix
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    full = pods.parse(pod({"phase": "Pending", "conditions": [scheduled]}), "job")
    assert full is not None
    assert full.phase == "queued"
    assert "tolerations=" in full.fix


def test_pod_of_another_owner_is_ignored() -> None:
    assert pods.parse(pod({"phase": "Running"}), "other") is None


@pytest.mark.parametrize(
    "item",
    [
        pod({}, name="../../etc"),
        pod({}, name="a\nb"),
        pod({}, annotations={INDEX: "-1"}),
        pod({}, annotations={}),
        pod({}, annotations=[1]),
        pod({}, ownerReferences="job") | {"metadata": "x"},
        pod({"phase": "Running", "podIP": "0.0.0.0"}),
        pod({"phase": "Running", "podIP": "nowhere"}),
        pod({"phase": 1}),
        pod({"phase": "Pending"}, {"waiting": {"reason": "a b\n"}}),
        pod({"phase": "Pending", "conditions": 1}),
        pod([]),
    ],
)
def test_invalid_pod_is_refused(item: Any) -> None:
    try:
        parsed = pods.parse(item, "job")
    except InvalidMessage:
        return
    assert parsed is None
