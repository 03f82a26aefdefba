"""Rules that detect the environment of a notebook, and their reasons."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfd_notebook as tfd
from tfd_notebook.cluster.registry import clusters
from tfd_notebook.errors import UnknownName
from tfd_notebook.resolvers import detection

pytestmark = pytest.mark.usefixtures("plain_environment", "here")

CONFIG = json.dumps({"cluster": {"worker": ["w0:1", "w1:1"]}})
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}
SAGEMAKER = {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the commands of Slurm, profiles and detached clusters."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def fired(**options: Any) -> tuple[str, detection.RuleOutcome]:
    considered, verdict = detection.detect(options)
    assert [item.outcome for item in considered].count("fired") == 1
    assert considered[-1].outcome == "fired"
    return considered[-1].rule, verdict


def close(**options: Any) -> dict[str, str]:
    considered, _ = detection.detect(options)
    return {item.rule: item.why for item in considered if item.outcome == "partial"}


def command(directory: Path, name: str, body: str) -> None:
    """Create a program in a directory of PATH."""
    path = directory / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


ONE_TASK = {**STEP, "SLURM_STEP_NUM_TASKS": "1"}


@pytest.mark.parametrize(
    ("variables", "rule", "resolver"),
    [
        ({"TF_CONFIG": CONFIG}, "tf_config", "tf_config"),
        ({"TF_CONFIG": "{"}, "tf_config", "tf_config"),
        (SAGEMAKER, "sagemaker", "sagemaker"),
        (STEP, "slurm", "slurm"),
        ({"SLURM_JOB_ID": "7"}, "slurm_allocation", "slurm"),
        ({**ONE_TASK, "SLURM_JOB_NUM_NODES": "3"}, "slurm_allocation", ""),
        ({"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://t:8470"}, "tpu", "tpu"),
        ({"TPU_NAME": "local"}, "tpu", "tpu"),
        ({"TPU_NAME": "mine"}, "tpu", ""),
        ({"TPU_CONFIG": '{"tpu_node_name": "mine"}'}, "tpu", ""),
        ({"RAY_ADDRESS": "auto"}, "ray", ""),
        ({}, "local", ""),
    ],
)
def test_matching_rule_is_selected(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], rule: str, resolver: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    matched, verdict = fired()
    assert (matched, verdict.resolver) == (rule, resolver)
    assert verdict.resolver or verdict.cell


def test_suggested_srun_reaches_the_whole_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for component in range(2):
        monkeypatch.setenv(f"SLURM_JOB_NODELIST_HET_GROUP_{component}", f"n{component}")
    assert '"srun", "--overlap", "--het-group=0,1", sys' in fired()[1].cell
    for name, value in ONE_TASK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    assert fired()[0] == "local"  # the number of each component's nodes is unknown
    for component in range(2):
        monkeypatch.delenv(f"SLURM_JOB_NODELIST_HET_GROUP_{component}")
    cell = fired()[1].cell
    assert '"srun", "--overlap", "--nodes=3", "--ntasks=3", sys' in cell
    assert cell.endswith('# then: tfd.resolve("slurm", job="7", tasks_per_node=1)')


def test_step_with_one_task_can_start_others_in_all_components(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slurm's variables in ``salloc -N1 -n2 : -N2 -n3 srun --overlap -n1``."""
    step = {
        **ONE_TASK,
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    }
    for component, (nodes, hosts) in enumerate([("1", "n1"), ("2", "n[2,10]")]):
        step[f"SLURM_JOB_NODELIST_HET_GROUP_{component}"] = hosts
        step[f"SLURM_JOB_NUM_NODES_HET_GROUP_{component}"] = nodes
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    rule, outcome = fired()
    assert rule == "slurm_allocation"
    assert "on the 3 nodes of Slurm job 7" in outcome.why
    program = 'sys.executable, "-c", TASK'
    assert (
        f'["srun", "--overlap", "--het-group=0", "--nodes=1", "--ntasks=1", {program}, ":", '
        f'"--het-group=1", "--nodes=2", "--ntasks=2", {program}]'
    ) in outcome.cell
    assert outcome.cell.endswith('# then: tfd.resolve("slurm", job="7", tasks_per_node=1)')
    compile(outcome.cell, "cell", "exec")


@pytest.mark.parametrize(("cpus", "tasks"), [("1000", 2), ("2", 2), ("1", 0), ("", 0)])
def test_step_with_one_task_can_start_others_on_its_host(
    monkeypatch: pytest.MonkeyPatch, cpus: str, tasks: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    for name, value in {**ONE_TASK, "SLURM_JOB_NUM_NODES": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", cpus)
    rule, outcome = fired()
    if not tasks:
        assert (rule, outcome.cell) == ("local", "cluster = tfd.Cluster(workers=2, ps=1)")
        assert "has this host of Slurm job 7" in close()["slurm_allocation"]
        return
    assert rule == "slurm_allocation"
    assert f'"srun", "--overlap", "--nodes=1", "--ntasks={tasks}", sys' in outcome.cell
    assert f'job="7", tasks_per_node={tasks})' in outcome.cell
    compile(outcome.cell, "cell", "exec")


def test_no_job_is_suggested_in_a_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("sinfo", "scontrol"):
        command(tmp_path, name, "echo UP")
    for name, value in {**ONE_TASK, "SLURM_JOB_NUM_NODES": "1"}.items():
        monkeypatch.setenv(name, value)
    assert fired()[0] == "local"
    assert "in Slurm job 7" in close()["slurm_controller"]


def test_rules_have_their_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch()
    monkeypatch.setattr(detection, "TOKEN", token)
    all_at_once = {
        "RAY_ADDRESS": ("auto", "ray"),
        "KUBERNETES_SERVICE_HOST": ("10.0.0.1", "kubernetes"),
        "TPU_NAME": ("mine", "tpu"),
        "SLURM_JOB_ID": ("7", "slurm_allocation"),
        "SLURM_STEP_NUM_TASKS": ("2", "slurm_allocation"),
        "SLURM_STEP_ID": ("0", "slurm"),
        "SM_HOSTS": ("[]", "slurm"),
        "SM_CURRENT_HOST": ("a", "sagemaker"),
        "TF_CONFIG": (CONFIG, "tf_config"),
    }
    for name, (value, rule) in all_at_once.items():
        monkeypatch.setenv(name, value)
        assert fired()[0] == rule
    considered, _ = detection.detect({})
    assert [item.rule for item in considered] == ["argument", "tf_config"]


@pytest.mark.parametrize(
    ("variables", "rule", "why"),
    [
        ({"TF_CONFIG": "{}"}, "tf_config", "has no cluster"),
        ({"TF_CONFIG": '{"cluster": {}}'}, "tf_config", "has no cluster"),
        ({"SM_HOSTS": '["a"]'}, "sagemaker", "SM_CURRENT_HOST is not"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, "slurm", "SLURM_STEP_NUM_TASKS=1"),
        (
            {**ONE_TASK, "SLURM_JOB_NUM_NODES": "1"},
            "slurm_allocation",
            "a step with one task",
        ),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "x"}, "slurm_allocation", "job 7"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes", "no token"),
    ],
)
def test_partial_matches_are_reported(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], rule: str, why: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert why in close()[rule]
    assert fired()[0] == "local"


def test_pod_needs_a_label_selector(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch()
    monkeypatch.setattr(detection, "TOKEN", token)
    assert str(token) in close()["kubernetes"]
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    rule, verdict = fired()
    assert (rule, verdict.resolver) == ("kubernetes", "")
    compile(verdict.cell, "cell", "exec")
    assert fired(jobs={"worker": "a=b"})[1].resolver == "kubernetes"


def test_jupyter_profile_matches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profiles = tmp_path / "config" / "tfd_notebook"
    profiles.mkdir(parents=True)
    (profiles / "box.toml").write_text('launcher = "ssh"\n')
    assert fired()[0] == "local"
    (profiles / "hub.toml").write_text('launcher = "jupyter"\n')
    rule, verdict = fired()
    assert rule == "jupyter"
    assert "launcher='hub'" in verdict.cell
    (profiles / "hub.toml").write_text("launcher = ")
    assert "hub.toml" in close()["jupyter"]


@pytest.mark.slow
def test_reachable_slurm_matches(tmp_path: Path) -> None:
    command(tmp_path, "sinfo", "exit 0")
    assert fired()[0] == "local"
    assert not close()
    command(tmp_path, "scontrol", "echo 'Slurmctld(primary) at login is UP'")
    rule, verdict = fired()
    assert rule == "slurm_controller"
    compile(verdict.cell, "cell", "exec")
    command(tmp_path, "scontrol", "echo 'Slurmctld(primary) at login is DOWN'")
    assert "is DOWN" in close()["slurm_controller"]
    command(tmp_path, "scontrol", "echo no controller >&2; exit 1")
    assert "no controller" in close()["slurm_controller"]


def test_own_clusters_match() -> None:
    try:
        tfd.Cluster(launcher="fake", workers=1, ps=1, name="one")
        assert fired()[1].resolver == "local"
        tfd.Cluster(launcher="fake", workers=1, ps=1, name="two")
        rule, verdict = fired()
        assert (rule, verdict.resolver) == ("local", "")
        assert "name='one'" in verdict.cell
        assert fired(name="two")[1].resolver == "local"
    finally:
        for cluster in clusters().values():
            cluster.stop()


#: Another process with clusters, until its input ends.
SIBLING = """
import sys
from tests._gpus import keep_gpus_visible
from tfd_notebook.cluster import control_socket as control
from tfd_notebook.cluster.cluster import Cluster

keep_gpus_visible()
for name in sys.argv[1:]:
    Cluster(launcher="fake", workers=1, ps=1, name=name)
control.ensure_started()
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def sibling_process(*names: str) -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-c", SIBLING, *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid


@pytest.mark.slow
def test_clusters_of_other_processes_match() -> None:
    with sibling_process("sibling") as pid:
        rule, verdict = fired()
        assert (rule, verdict.resolver) == ("local", "local")
        assert f"the cluster 'sibling' of the process {pid}" in verdict.why
        with contextlib.closing(tfd.resolve()) as resolution:
            assert set(resolution.cluster_spec().as_dict()) == {"ps", "worker"}
            assert "'sibling'" in repr(resolution)
        with contextlib.closing(tfd.resolve("local", name="sibling")) as resolution:
            # No server listens at the invented address.
            assert not set(resolution.to_frame()["state"]) & {"alive"}
            assert "attach()" in resolution.cell
    assert "sibling" not in fired()[1].why
    with sibling_process("one", "two"):
        verdict = fired()[1]
        assert verdict.resolver == ""
        assert "name='one'" in verdict.cell
        assert fired(name="two")[1].resolver == "local"
        with pytest.raises(UnknownName, match="several clusters on this host"):
            tfd.resolve("local")
