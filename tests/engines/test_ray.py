"""``launcher="ray"`` on a Ray cluster of this host."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import tfd_notebook as tfd
from tests._bridges import bridges
from tests._waiting import until
from tests.engines._engine_checks import EngineChecks, check_end_of_a_worker
from tfd_notebook import errors
from tfd_notebook.launchers import Ray

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ENGINE = "ray"


@pytest.fixture(scope="class")
def launcher() -> Ray:
    return Ray(2)


class TestRay(EngineChecks):
    @classmethod
    def make_launcher(cls) -> Ray:
        return Ray(1)


def free_cpus(ray: Any) -> float:
    return float(ray.available_resources().get("CPU", 0.0))


def test_actors_hold_resources_until_the_cluster_stops(ray: Any) -> None:
    until(lambda: free_cpus(ray) == 8)
    with tfd.Cluster(data_workers=1, name="held", launcher=Ray(1, resources={"CPU": 7})):
        assert len(bridges()) == 1
        until(lambda: free_cpus(ray) == 1)
    until(lambda: free_cpus(ray) == 8)
    until(lambda: not bridges())


def test_start_waits_for_free_resources_and_reports_the_reason(ray: Any) -> None:
    until(lambda: free_cpus(ray) == 8)
    first = tfd.Cluster(data_workers=1, name="first", launcher=Ray(1, resources={"CPU": 7}))
    second = tfd.Cluster(
        data_workers=1, name="second", launcher=Ray(1, resources={"CPU": 2}), start=False
    )
    starting = threading.Thread(target=second.start)
    starting.start()
    reason = "Ray lacks resources for actors=1 with CPU 2 each (SPREAD); free: CPU 1 of 8"
    until(lambda: reason in {row.reason for row in second.snapshot().tasks})
    first.stop()
    starting.join(120)
    assert second.state == "ready"
    second.stop()


def test_resources_that_do_not_exist_end_the_start(ray: Any) -> None:
    launcher = Ray(1, resources={"CPU": 1, "TPU": 1})
    policy = tfd.Policy(start_timeout=3.0)
    with pytest.raises(errors.StartTimeout, match=r"TPU 0 of 0") as caught:
        tfd.Cluster(data_workers=1, name="none", launcher=launcher, policy=policy)
    assert "request less" in str(caught.value)
    assert "none" not in tfd.clusters()
    until(lambda: free_cpus(ray) == 8)


def test_pending_cluster_can_be_stopped(ray: Any) -> None:
    launcher = Ray(1, resources={"CPU": 99})
    cluster = tfd.Cluster(data_workers=1, name="pending", launcher=launcher, start=False)
    caught: list[BaseException] = []

    def start() -> None:
        try:
            cluster.start()
        except errors.TfdError as error:
            caught.append(error)

    starting = threading.Thread(target=start)
    starting.start()
    until(lambda: any("lacks resources" in row.reason for row in cluster.snapshot().tasks))
    cluster.stop()
    starting.join(60)
    assert not starting.is_alive()
    assert caught


def test_uninitialized_ray_is_explained(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(errors.StateError, match="Ray is not initialized"):
        tfd.Cluster(data_workers=1, name="none", launcher="ray")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"actors": 0}, "actors"),
        ({"resources": {"CPU": -1}}, "invalid resources 'CPU': -1"),
        ({"resources": {"CPU": float("nan")}}, "invalid resources 'CPU': nan"),
        ({"resources": {"CPU": True}}, "invalid resources 'CPU': True"),
        ({"resources": {}}, "at least one above 0"),
        ({"resources": {"GPU": 1.5}}, "invalid resources 'GPU': 1.5"),
        ({"resources": 3}, "invalid resources 3"),
        ({"resources": {"CPU": 1, "object_store_memory": 1}}, "without object_store_memory"),
        ({"strategy": "spread"}, "invalid strategy 'spread'"),
        ({"grace": 0}, "invalid grace"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.UsageError, match=message):
        Ray(**options)


def test_end_of_an_actor_is_named(ray: Any) -> None:
    check_end_of_a_worker(Ray(2), "its Ray actor has ended")


def test_shutdown_of_ray_ends_the_cluster(ray: Any) -> None:
    """The last test of the module: stopping the cluster must not initialize Ray again."""
    cluster = tfd.Cluster(data_workers=1, name="shut", launcher="ray")
    ray.shutdown()
    until(lambda: cluster.ended, 90)
    cluster.stop()
    until(lambda: not bridges(), 60)
    assert not ray.is_initialized()
