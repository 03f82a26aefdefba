"""Start of the pods of a job, with a stand-in for Kubernetes' API."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests._waiting import until
from tfd_notebook import launchers
from tfd_notebook.errors import LaunchError
from tfd_notebook.launchers import engine, kubernetes
from tfd_notebook.model.events import Event, Notice, TaskChanged
from tfd_notebook.model.spec import ClusterConfig, Policy, Role

CONFIG = ClusterConfig("My_1", launcher="kubernetes", counts={Role.DATA_WORKER: 2})
INDEX = "batch.kubernetes.io/job-completion-index"
RUNNING = {"phase": "Running", "podIP": "10.0.0.1"}


class Api:
    """Pods by index, warnings, and the requests."""

    def __init__(self, *arguments: Any) -> None:
        self.pods: dict[int, dict[str, Any]] = {}
        self.warnings: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str, Any]] = []
        self.error: OSError | None = None

    def request(
        self,
        method: str,
        resource: str,
        name: str = "",
        *,
        subresource: str = "",
        body: Any = None,
        query: Any = None,
    ) -> Any:
        if self.error is not None:
            raise self.error
        self.requests.append((method, resource, body))
        if method == "POST":
            return {"metadata": {"uid": resource}}
        if subresource == "log":
            return "first\nthe disk is broken\n"
        if resource == "events":
            return {"items": self.warnings}
        items = [self._pod(index, status) for index, status in self.pods.items()]
        if name:
            return next((item for item in items if item["metadata"]["name"] == name), None)
        return {"items": items}

    def _pod(self, index: int, status: Mapping[str, Any]) -> dict[str, Any]:
        state = {"running": {}} if status is RUNNING else {"waiting": {}}
        metadata = {
            "name": f"pod-{index}-abcde",
            "ownerReferences": [{"uid": "jobs"}],
            "annotations": {INDEX: str(index)},
        }
        containers = [{"name": "agent", "state": state}]
        return {"metadata": metadata, "status": {"containerStatuses": containers, **status}}


class Starting:
    """The start of a cluster in a thread."""

    def __init__(self, pods: int = 2, **options: Any) -> None:
        self.events: list[Event] = []
        self.hosts: list[Any] = []
        self.error: LaunchError | None = None
        launcher = launchers.Kubernetes("tfd:1", pods, **options)
        self.start = launcher.new_start(CONFIG, self.events.append)
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.hosts = self.start.start()
        except LaunchError as error:
            self.error = error

    def reasons(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, TaskChanged)]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    api = Api()
    monkeypatch.setattr(kubernetes, "KubernetesApi", lambda *arguments: api)
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.01)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return api


@pytest.fixture
def begin() -> Iterator[Callable[..., Starting]]:
    started: list[Starting] = []

    def begin(**options: Any) -> Starting:
        started.append(Starting(**options))
        started[-1].thread.start()
        return started[-1]

    yield begin
    for starting in started:
        starting.start.stop()
        starting.thread.join(60)
        assert not starting.thread.is_alive()


def test_pods_run_after_their_reasons_were_shown(api: Api, begin: Any) -> None:
    api.warnings = [{"type": "Warning", "reason": "FailedCreate", "message": "exceeded quota"}]
    starting = begin()
    until(lambda: starting.reasons(), 60)
    assert starting.reasons()[0].endswith("has not created pod 0: exceeded quota")
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    api.pods = {0: {"conditions": [{**unschedulable, "message": "no cpu"}]}, 1: RUNNING}
    until(lambda: "pod pod-0-abcde has no node: no cpu" in starting.reasons(), 60)
    api.error = OSError("the API does not answer")
    until(lambda: "the API does not answer" in starting.reasons(), 60)
    api.error = None
    api.pods[0] = RUNNING
    starting.thread.join(60)
    assert [host.peer_address for host in starting.hosts] == ["10.0.0.1"] * 2
    method, resource, body = api.requests[-1]
    assert (method, resource) == ("PATCH", "jobs")
    assert body["spec"] == {"activeDeadlineSeconds": None, "completions": 2, "parallelism": 2}
    for host in starting.hosts:
        assert not starting.start.stopped
        host.close()
    assert api.requests[-1][:2] == ("DELETE", "jobs")


def test_job_is_reduced_to_the_minimum(
    api: Api, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.pods = {0: RUNNING}
    starting = Starting(minimum=1)
    monkeypatch.setattr(type(starting.start), "settle_seconds", 0.0)
    starting = begin(minimum=1)
    starting.thread.join(60)
    (notice,) = [event for event in starting.events if isinstance(event, Notice)]
    assert "has 1 of 2 pods: job tfd-my-1-" in notice.what
    assert api.requests[-1][2]["spec"]["completions"] == 1
    starting = begin(minimum=1, place={"data_worker": "pod-1"})  # which must run
    until(lambda: starting.reasons(), 60)
    assert starting.thread.is_alive()


def started_with_one(api: Api, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Starting:
    """Return the start of a cluster of which only pod 0 runs."""
    monkeypatch.setattr(engine, "LATE_POLL_SECONDS", 0.01)
    monkeypatch.setattr(kubernetes._Kubernetes, "settle_seconds", 0.0)
    monkeypatch.setattr(kubernetes, "_DEADLINE_SECONDS", 0.1)
    api.pods = {0: RUNNING}
    starting = Starting(**options)
    starting.start.may_join = True
    starting.thread.start()
    starting.thread.join(60)
    return starting


def test_job_with_missing_pods_has_a_deadline_that_is_extended(
    api: Api, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the job of a killed kernel, whose missing pods have no process."""
    starting = started_with_one(api, monkeypatch, minimum=1, grace=30.0)
    starting.thread = threading.Thread(
        target=starting.start.await_late, args=(lambda host: True, lambda reasons: None)
    )
    starting.thread.start()

    def specs() -> list[Any]:
        return [body["spec"] for method, _, body in api.requests if method == "PATCH"]

    until(lambda: len(specs()) > 2, 60)
    assert all(spec.keys() == {"activeDeadlineSeconds"} for spec in specs())
    assert 31 <= specs()[0]["activeDeadlineSeconds"] < 90
    api.pods[1] = RUNNING
    starting.thread.join(60)
    assert specs()[-1] == {"activeDeadlineSeconds": None}
    starting.start.stop()


def test_job_with_a_pod_that_cannot_run_keeps_its_deadline(
    api: Api, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = started_with_one(api, monkeypatch, pods=3, minimum=1)
    joined: list[str] = []
    shown: list[list[str]] = []

    def join(host: Any) -> bool:
        joined.append(host.label)
        return True

    thread = threading.Thread(target=starting.start.await_late, args=(join, shown.append))
    thread.start()
    state = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    broken = {"containerStatuses": [{"name": "agent", "state": state}]}
    api.pods = {0: RUNNING, 1: broken, 2: RUNNING}
    until(lambda: joined == ["pod-2"], 60)
    until(lambda: shown and "ImagePullBackOff" in str(shown[-1]), 60)
    count = len(api.requests)
    until(lambda: sum(method == "PATCH" for method, _, _ in api.requests[count:]) > 1, 60)
    patches = [body["spec"] for method, _, body in api.requests if method == "PATCH"]
    assert all(spec.keys() == {"activeDeadlineSeconds"} and all(spec.values()) for spec in patches)
    starting.start.close_late()
    thread.join(60)
    assert not thread.is_alive()
    starting.start.stop()


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "OOMKilled"])
def test_pod_that_cannot_run_is_an_error(api: Api, begin: Any, reason: str) -> None:
    state: dict[str, Any] = {"waiting": {"reason": reason, "message": "not found"}}
    if reason == "OOMKilled":
        state = {"terminated": {"reason": reason}}
    api.pods = {0: {"containerStatuses": [{"name": "agent", "state": state}]}}
    starting = begin()
    starting.thread.join(60)
    assert starting.error is not None
    assert reason in starting.error.what
    assert "the disk is broken" in starting.error.what
    assert {"ImagePullBackOff": "image=", "OOMKilled": "memory"}[reason] in str(starting.error.fix)


def test_api_that_does_not_answer_is_an_error(api: Api, begin: Any) -> None:
    api.error = OSError("the API does not answer")
    starting = begin()
    starting.thread.join(60)
    assert "kubectl cluster-info" in str(starting.error.fix)


def test_deleted_pod_has_ended(api: Api, begin: Any) -> None:
    api.pods = dict.fromkeys((0, 1), RUNNING)
    starting = begin()
    starting.thread.join(60)
    host = starting.hosts[1]
    assert starting.start.state(host).phase == "running"
    del api.pods[1]
    assert starting.start.await_end(host, 60).reason == "pod pod-1-abcde was deleted"


def test_timeout_is_that_of_the_policy(api: Api) -> None:
    config = ClusterConfig("x", launcher="kubernetes", policy=Policy(start_timeout=30.0))
    launcher = launchers.Kubernetes("tfd:1", environment={"A_KEY": "hunter2"}, python="py")
    script = launcher.job_script(config)
    assert "activeDeadlineSeconds: 90" in script
    assert "hunter2" not in script
    assert launcher.options["environment"] == {"A_KEY": "hunter2"}
