"""The resolver of a cluster, and the GPUs that its kernel leaves to its local workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tfd_notebook.launchers import Fake
from tfd_notebook.model.spec import TaskState


@pytest.fixture
def device_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Record calls that configure the devices of this process, as this host may have no GPU."""
    calls: list[Any] = []

    def set_visible(devices: list[Any], kind: str) -> None:
        calls.append((devices, kind))

    monkeypatch.setattr(tf.config, "set_visible_devices", set_visible)
    yield calls
    for cluster in tfd.clusters().values():
        cluster.stop()


def test_resolver_has_the_workers_that_have_not_ended() -> None:
    fake = Fake()
    with tfd.Cluster(workers=2, ps=1, launcher=fake) as cluster:
        resolver = cluster.resolver
        before = resolver.cluster_spec().as_dict()
        assert before["worker"] == [cluster.snapshot().task(f"worker:{n}").address for n in (0, 1)]
        cluster.scale(workers=1)
        assert resolver.cluster_spec().as_dict() == {**before, "worker": before["worker"][:1]}
        fake.task_hosts[0].set_state("worker:0", TaskState.FAILED, "it died", pid=None)
        assert resolver.cluster_spec().as_dict() == {"ps": before["ps"]}


def test_gpus_are_hidden_before_tensorflow_starts(device_calls: list[Any]) -> None:
    cluster = tfd.Cluster(workers=2, ps=1, launcher=Fake(gpus=(0, 1)))
    assert device_calls == [([], "GPU")]
    assert not cluster.snapshot().notices


@pytest.mark.parametrize(
    ("gpus", "options"), [((), {}), ((0, 1), {"gpus": 0}), ((0, 1), {"launcher": "remote"})]
)
def test_gpus_are_kept_without_local_workers_with_gpus(
    device_calls: list[Any],
    gpus: tuple[int, ...],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher = Fake(gpus=gpus)
    if options.pop("launcher", None):
        monkeypatch.setattr("tfd_notebook.launchers.fake.FakeTaskHost.is_local", False)
    tfd.Cluster(workers=2, ps=1, launcher=launcher, **options)
    assert device_calls == []


def test_kernel_that_already_uses_gpus_is_warned(
    device_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(devices: list[Any], kind: str) -> None:
        raise RuntimeError("Visible devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config, "set_visible_devices", refuse)
    cluster = tfd.Cluster(workers=2, ps=1, launcher=Fake(gpus=(0, 1)))
    (notice,) = cluster.snapshot().notices
    assert "TensorFlow in this kernel already uses the GPUs" in notice.what
    assert "restart the kernel" in notice.fix
    assert device_calls == []
