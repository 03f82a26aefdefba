"""Promises of docs/resolving.md, with a real server of TensorFlow next to an unused port."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfd_notebook as tfd
from tests._ports import free_port
from tests.integration._tasks import Tasks
from tfd_notebook import errors

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("plain_environment")]

Spec = dict[str, list[str]]


@pytest.fixture(scope="module")
def spec() -> Iterator[Spec]:
    """Return a cluster of two workers, of which the first one runs."""
    spec = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(2)]}
    with Tasks() as tasks:
        tasks.start("worker", spec=spec, index=0)
        yield spec


def test_resolve_reports_the_state_of_each_task_of_tf_config(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": spec}))
    resolution = tfd.resolve()
    assert resolution.rule == "tf_config"
    frame = resolution.to_frame()
    assert list(frame["address"]) == spec["worker"]
    assert list(frame["state"]) == ["alive", "refused"]
    assert list(frame["identity"]) == ["worker:0", ""]


def test_check_names_the_task_that_does_not_answer(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": spec}))
    with pytest.raises(errors.TasksMissing, match="worker:1") as caught:
        tfd.resolvers.TFConfigResolver().check()
    assert "worker:0" not in str(caught.value)


def test_attached_cluster_shows_the_tasks(spec: Spec) -> None:
    cluster = tfd.resolve({"worker": spec["worker"][:1]}).attach(connect=False)
    try:
        assert [(task.name, task.address) for task in cluster.tasks] == [
            ("worker:0", spec["worker"][0])
        ]
    finally:
        cluster.stop()


def test_slurm_variables_give_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "JOB_ID": "1234",
        "STEP_ID": "0",
        "STEP_NODELIST": "n[1-2,10]",
        "STEP_TASKS_PER_NODE": "3(x2),1",
        "STEP_NUM_TASKS": "7",
        "PROCID": "4",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    resolver = tfd.resolvers.SlurmResolver({"ps": 1, "worker": 6}, port_base=8888)
    assert resolver.cluster_spec().as_dict() == {
        "ps": ["n1:8888"],
        "worker": ["n1:8889", "n1:8890", "n2:8888", "n2:8889", "n2:8890", "n10:8888"],
    }
    assert (resolver.task_type, resolver.task_id) == ("worker", 3)


@pytest.mark.parametrize("name", ["cluster.json", "cluster.toml"])
def test_cluster_file_gives_the_cluster(name: str, spec: Spec, tmp_path: Path) -> None:
    path = tmp_path / name
    text = json.dumps(spec)
    path.write_text(text if name.endswith("json") else f"worker = {json.dumps(spec['worker'])}")
    assert tfd.resolvers.ClusterFileResolver(path).cluster_spec().as_dict() == spec
    assert tfd.resolve(str(path)).last.counts == {"alive": 1, "refused": 1}
