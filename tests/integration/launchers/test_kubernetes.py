"""``launcher="kubernetes"`` on a fake API whose pods are real processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes
import pytest
import yaml

import tfd_notebook as tfd
from tests._waiting import until
from tests.integration._kubernetes_jobs import KubernetesJobs
from tfd_notebook import errors
from tfd_notebook.model.events import TaskChanged
from tfd_notebook.model.spec import TaskState
from tfd_notebook.testing.pytest_checks import LauncherConformance

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

JOB = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "it"},
    "spec": {
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "containers": [{"name": "agent", "image": "other:1", "resources": {}}],
            }
        }
    },
}
NO_OWNER = {"apiVersion": "v1", "kind": "Pod", "name": "notebook", "uid": ""}
KERNEL = """
import sys, time
import tfd_notebook as tfd
launcher = tfd.launchers.Kubernetes("tfd:1", 2, python=sys.executable, grace=2)
cluster = tfd.Cluster(data_workers=2, name="killed", launcher=launcher)
print("ready", flush=True)
if "exit" not in sys.argv:
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesJobs]:
    with (
        KubernetesJobs(tmp_path_factory.mktemp("k8s")) as api,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("KUBECONFIG", str(api.kubeconfig()))
        patch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        yield api


@pytest.fixture
def empty(api: KubernetesJobs) -> Iterator[KubernetesJobs]:
    """Return the API, restore its settings, and check that nothing is left there."""
    yield api
    api.capacity = api.quota = None
    api.forbidden.clear()
    api.warnings.clear()
    api.holds_exec.clear()
    until(api.is_empty, 60)


def launcher(**options: object) -> tfd.launchers.Kubernetes:
    defaults = {"image": "tfd:1", "pods": 2, "python": sys.executable}
    return tfd.launchers.Kubernetes(**{**defaults, **options})


def start(name: str, start_timeout: float = 120.0, **options: object) -> tfd.Cluster:
    policy = tfd.Policy(start_timeout=start_timeout)
    return tfd.Cluster(data_workers=2, name=name, policy=policy, launcher=launcher(**options))


def client_of(api: KubernetesJobs) -> Any:
    """Return the official client."""
    return kubernetes.config.new_client_from_config(str(api.kubeconfig()))


def reasons(cluster: tfd.Cluster) -> str:
    return " ".join(task.reason for task in cluster.snapshot().tasks)


def notices(cluster: tfd.Cluster) -> str:
    return " ".join(notice.what for notice in cluster.snapshot().notices)


def tf_function_of(cluster: tfd.Cluster) -> Any:
    """Return a dataset that each data worker reads completely, through a Python function."""
    import tensorflow as tf

    def square(x: Any) -> Any:
        return x * x

    dataset = tf.data.Dataset.range(4).map(lambda x: tf.numpy_function(square, [x], tf.int64))
    return dataset.apply(cluster.distribute("off"))


def numbers(cluster: tfd.Cluster) -> list[int]:
    import tensorflow as tf

    dataset = tf.data.Dataset.range(100).apply(cluster.distribute("dynamic"))
    return sorted(int(number) for number in dataset)


class TestConformance(LauncherConformance):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _empty(cls, api: KubernetesJobs) -> Iterator[None]:
        """Wait until the job of the killed owner was removed."""
        yield
        until(api.has_finished_jobs, 60)
        api.pass_time(301)
        until(api.is_empty, 60)

    @classmethod
    def make_launcher(cls) -> tfd.launchers.Kubernetes:
        return launcher()


def check_with_official_client(api: KubernetesJobs) -> None:
    """Check that the official client reads the objects, and runs a command in a pod."""
    with client_of(api) as client:
        (job,) = [name for kind, name in api.objects if kind == "jobs"]
        read = kubernetes.client.BatchV1Api(client).read_namespaced_job(job, "mine")
        assert read.spec.completion_mode == "Indexed"
        assert read.spec.active_deadline_seconds is None
        pods = kubernetes.client.CoreV1Api(client).list_namespaced_pod("mine").items
        assert {pod.spec.subdomain for pod in pods} == {job}
        stream = kubernetes.stream.stream(
            kubernetes.client.CoreV1Api(client).connect_get_namespaced_pod_exec,
            pods[0].metadata.name,
            "mine",
            container="agent",
            command=["echo", "hello"],
            stdout=True,
            stderr=True,
            stdin=False,
            tty=False,
            _preload_content=False,
        )
        stream.run_forever(timeout=60)
        assert stream.read_stdout() == "hello\n"
        stream.sock.shutdown()  # `close` leaves the socket open


def test_two_pods_serve_and_a_broken_connection_is_replaced(empty: KubernetesJobs) -> None:
    with start("broken") as cluster:
        assert set(cluster.to_frame()["host"]) == {"pod-0", "pod-1"}
        assert numbers(cluster) == list(range(100))
        row = cluster.snapshot().task("data_worker:1")
        assert row is not None
        assert row.pid is not None
        os.kill(row.pid, signal.SIGKILL)
        empty.break_execs()
        # The next connection delivers the events of the interruption.
        until(lambda: cluster.snapshot().task("data_worker:1").restarts == 1, 60)  # type: ignore[union-attr]
        until(lambda: cluster.state == "ready" and len(empty.exec_connections) == 2, 60)
        assert numbers(cluster) == list(range(100))
        assert len(empty.pod_names()) == 2
        check_with_official_client(empty)


def test_unschedulable_pods_show_the_reason_until_the_timeout(empty: KubernetesJobs) -> None:
    empty.capacity = 0
    caught: list[errors.StartTimeout] = []
    policy = tfd.Policy(start_timeout=4.0)
    cluster = tfd.Cluster(
        data_workers=2, name="full", policy=policy, launcher=launcher(), start=False
    )

    def attempt() -> None:
        try:
            cluster.start()
        except errors.StartTimeout as error:
            caught.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    until(lambda: "Insufficient cpu" in reasons(cluster), 60)
    thread.join(60)
    assert "has no node: 0/3 nodes are available" in str(caught[0])
    assert "node_selector=" in str(caught[0].fix)


@pytest.mark.parametrize(
    ("options", "message", "fix"),
    [
        ({"image": "missing:2"}, r"ImagePullBackOff.*missing:2.*not found", "check image="),
        ({"python": "/no/python"}, r"StartError.*/no/python", "python="),
    ],
)
def test_missing_image_and_program_are_explained(
    empty: KubernetesJobs, options: dict[str, object], message: str, fix: str
) -> None:
    cluster = tfd.Cluster(data_workers=2, name="bad", launcher=launcher(**options), start=False)
    with pytest.raises(errors.LaunchError, match=message) as caught:
        cluster.start()
    assert fix in str(caught.value.fix)
    changes = [event for event in cluster.snapshot().events if isinstance(event, TaskChanged)]
    shown = [event.reason for event in changes if event.state is TaskState.PLANNED]
    assert re.search(message, " ".join(shown))
    assert re.search(message, reasons(cluster))


def test_missing_package_is_named(empty: KubernetesJobs, tmp_path: Path) -> None:
    base = tmp_path / "python"
    base.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    base.chmod(0o755)
    with pytest.raises(errors.LaunchError, match="has no tfd-notebook"):
        start("bare", python=str(base))


def test_log_of_an_ended_pod_is_in_the_error(empty: KubernetesJobs, tmp_path: Path) -> None:
    noisy = tmp_path / "python"
    noisy.write_text(f'#!/bin/sh\necho the disk is broken\nexec {sys.executable} "$@"\n')
    noisy.chmod(0o755)
    empty.holds_exec.set()

    def end() -> None:
        until(lambda: len(empty.held_execs) == 2, 60)
        pod = empty.pod_names()[0]
        until(lambda: "broken" in empty.log_of(pod), 60)
        empty.end_pod(pod)
        empty.holds_exec.clear()

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(errors.LaunchError, match="the disk is broken"):
        start("early", python=str(noisy))
    thread.join()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda api, pod: api.kill_for_memory(pod), "used more memory than its limit (OOMKilled)"),
        (lambda api, pod: api.delete_pod(pod, "EvictionByEvictionAPI"), "the node is drained"),
    ],
    ids=["memory", "drained"],
)
def test_lost_pod_is_explained_in_the_rows_of_its_tasks(
    empty: KubernetesJobs, end: Callable[[KubernetesJobs, str], None], reason: str
) -> None:
    with start("lost") as cluster:
        end(empty, next(name for name in empty.pod_names() if "-1-" in name))
        until(lambda: cluster.snapshot().task("data_worker:1").state == "lost", 90)  # type: ignore[union-attr]
        assert reason in reasons(cluster)


def test_unreachable_api_is_an_error(
    monkeypatch: pytest.MonkeyPatch, api: KubernetesJobs, tmp_path: Path
) -> None:
    config = yaml.safe_load(api.kubeconfig().read_text())
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        config["clusters"][0]["cluster"]["server"] = (
            f"https://127.0.0.1:{reserved.getsockname()[1]}"
        )
        path = tmp_path / "config"
        path.write_text(yaml.safe_dump(config))
        with pytest.raises(errors.LaunchError, match="does not answer") as caught:
            start("nowhere", kubeconfig=str(path))
    assert "kubectl cluster-info" in str(caught.value.fix)


@pytest.mark.parametrize(
    ("verb", "resource", "checked"),
    [
        ("create", "jobs", "create jobs.batch"),
        ("list", "pods", "list pods"),
        ("get", "pods/exec", "get pods/exec"),
    ],
)
def test_missing_permission_is_named(
    empty: KubernetesJobs, verb: str, resource: str, checked: str
) -> None:
    empty.forbidden.add((verb, resource))
    with pytest.raises(errors.LaunchError, match="may not") as caught:
        start("forbidden")
    assert f"kubectl auth can-i {checked} --namespace mine" in str(caught.value.fix)


def test_refusals_of_the_api_are_explained(empty: KubernetesJobs) -> None:
    with pytest.raises(errors.LaunchError, match="expired"):
        start("unknown", kubeconfig=str(empty.kubeconfig("unknown-token")))
    empty.roles["all"] = "*"
    with pytest.raises(errors.LaunchError, match='namespaces "other" not found'):
        start("namespace", kubeconfig=str(empty.kubeconfig("all")), namespace="other")
    empty.quota = 1
    with pytest.raises(errors.StartTimeout, match="exceeded quota") as caught:
        start("quota", start_timeout=3.0)
    assert "pods=" in str(caught.value.fix)


def interrupt_when(holds: Callable[[], Any]) -> threading.Thread:
    """Start a thread that sends this process SIGINT once the condition holds."""

    def run() -> None:
        until(holds, 60)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_ctrl_c_while_pods_are_pending_deletes_the_job(empty: KubernetesJobs) -> None:
    empty.capacity = 0
    thread = interrupt_when(empty.pod_names)
    with pytest.raises(KeyboardInterrupt):
        start("pending")
    thread.join()
    until(empty.is_empty, 60)


def test_ctrl_c_while_a_connection_opens_closes_it(empty: KubernetesJobs) -> None:
    empty.holds_exec.set()
    thread = interrupt_when(lambda: len(empty.held_execs) == 2)
    with pytest.raises(KeyboardInterrupt):
        start("opening")
    thread.join()
    # The API still waits, so this process has closed the connections.
    until(lambda: not empty.held_execs, 60)
    until(empty.is_empty, 60)


def test_ctrl_c_while_the_api_does_not_answer(empty: KubernetesJobs) -> None:
    empty.fail("silence")
    thread = interrupt_when(lambda: not empty._faults)
    with pytest.raises(KeyboardInterrupt):
        start("silent")
    thread.join()
    empty.hang_up()


def test_stop_deletes_a_pending_job(empty: KubernetesJobs) -> None:
    empty.capacity = 0
    cluster = tfd.Cluster(data_workers=1, name="stopped", launcher=launcher(), start=False)
    caught: list[BaseException] = []

    def attempt() -> None:
        try:
            cluster.start()
        except errors.LaunchError as error:
            caught.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    until(empty.pod_names, 60)
    cluster.stop()
    thread.join(60)
    assert caught


@pytest.mark.parametrize("state", ["ready", "pending"])
def test_killed_kernel_leaves_nothing(empty: KubernetesJobs, tmp_path: Path, state: str) -> None:
    empty.capacity = None if state == "ready" else 0
    command = [sys.executable, "-c", KERNEL]
    environment = dict(os.environ, TFD_RUNTIME_DIR=str(tmp_path / "run"))
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as kernel:
        assert kernel.stdout is not None
        if state == "ready":
            assert kernel.stdout.readline() == b"ready\n"
        else:
            until(lambda: len(empty.pod_names()) == 2, 60)
        kernel.kill()
    if state == "pending":
        empty.pass_time(180 + 61)  # the deadline of the job
    until(lambda: not empty.running_pods(), 60)  # the agents end after the grace time
    until(empty.has_finished_jobs, 60)
    empty.pass_time(301)
    until(empty.is_empty, 60)


def test_kernel_that_exits_deletes_its_job(empty: KubernetesJobs, tmp_path: Path) -> None:
    environment = dict(os.environ, TFD_RUNTIME_DIR=str(tmp_path / "run"))
    completed = subprocess.run(
        [sys.executable, "-c", KERNEL, "exit"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.stdout == "ready\n", completed.stderr
    assert "Traceback" not in completed.stderr
    assert completed.returncode == 0
    until(empty.is_empty, 60)


def test_pod_of_the_notebook_owns_the_job(
    empty: KubernetesJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("token")
    (tmp_path / "namespace").write_text("mine\n")
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(empty.port))
    incluster = kubernetes.config.incluster_config
    monkeypatch.setattr(incluster, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster, "SERVICE_CERT_FILENAME", str(empty.authority))
    monkeypatch.setattr(socket, "gethostname", lambda: "notebook-0")
    notebook = empty.apply(name="notebook-0")
    try:
        with start("owned"):
            job, service = (
                next(item for (kind, _), item in empty.objects.items() if kind == wanted)
                for wanted in ("jobs", "services")
            )
            (owner,) = job["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["uid"]) == ("Pod", notebook["metadata"]["uid"])
            (owner,) = service["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["uid"]) == ("Job", job["metadata"]["uid"])
            # The pods and the service follow the job, and the job follows the notebook.
            empty.delete("notebook-0")
            until(empty.is_empty, 60)
    finally:
        if "notebook-0" in empty.pod_names():
            empty.delete("notebook-0")


def test_job_script_shows_the_manifests_without_secrets(api: KubernetesJobs) -> None:
    options = {
        "resources": {"cpus": 2, "memory": "4Gi", "gpus": 1},
        "node_selector": {"zone": "a"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "volumes": {"/data": "claim"},
        "service_account": "runner",
        "environment": {"MODE": "fast", "API_TOKEN": "hunter2"},
        "labels": {"team": "vision"},
    }
    cluster = tfd.Cluster(
        data_workers=1, name="My_Cluster.1", launcher=launcher(**options), start=False
    )
    script = cluster.job_script()
    cluster.stop()
    assert "hunter2" not in script
    job, service = yaml.safe_load_all(script)
    assert job["metadata"]["name"].startswith("tfd-my-cluster-1-")
    assert job["spec"]["ttlSecondsAfterFinished"] > 0
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    amounts = {"cpu": "2", "memory": "4Gi", "nvidia.com/gpu": "1"}
    assert container["resources"] == {"requests": amounts, "limits": amounts}
    assert pod["nodeSelector"] == {"zone": "a"}
    assert pod["serviceAccountName"] == "runner"
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "claim"}
    assert job["metadata"]["labels"]["team"] == "vision"
    assert service["spec"]["clusterIP"] == "None"
    assert (
        service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    )


@pytest.mark.parametrize(
    "options",
    [
        {"image": ""},
        {"image": "a b"},
        {"pods": 0},
        {"namespace": "Mine"},
        {"namespace": "a/../b"},
        {"service_account": "A"},
        {"python": "python3 -c"},
        {"resources": {"cpu": 1}},
        {"resources": {"memory": "much"}},
        {"resources": {"requests": {"cpus": True}}},
        {"node_selector": {"zone": "a b"}},
        {"labels": {"-x": "y"}},
        {"environment": {"A=B": "x"}},
        {"environment": {"A": 1}},
        {"tolerations": [{"effects": "x"}]},
        {"volumes": {"data": "claim"}},
        {"volumes": {"/data": {}}},
    ],
)
def test_invalid_option_is_an_error(options: dict[str, object]) -> None:
    with pytest.raises(errors.UsageError, match=r"invalid|needs an image"):
        launcher(**options)


@pytest.mark.parametrize("lack", ["capacity", "quota"])
def test_pod_that_starts_later_joins_the_cluster(empty: KubernetesJobs, lack: str) -> None:
    setattr(empty, lack, 1)
    with start("fewer", minimum=1) as cluster:
        missing = {"capacity": "Insufficient cpu", "quota": "exceeded quota"}[lack]
        before = {task.task: task for task in cluster.snapshot().tasks}
        assert before["data_worker:0"].host == "pod-0"
        assert before["data_worker:1"].state is TaskState.PLANNED
        assert missing in before["data_worker:1"].reason
        assert cluster.state == "degraded"
        assert "has 1 of 2 pods, and 1 may join later" in notices(cluster)
        assert numbers(cluster) == list(range(100))
        with pytest.raises(errors.StateError, match=missing):
            cluster.restart("data_worker:1")
        assert cluster.logs("data_worker:1") == ""
        function = tf_function_of(cluster)
        setattr(empty, lack, None)
        until(lambda: cluster.state == "ready", 60)
        after = {task.task: task for task in cluster.snapshot().tasks}
        assert (after["data_worker:1"].host, after["data_worker:1"].reason) == ("pod-1", "")
        assert "pod-1 has joined the cluster" in notices(cluster)
        assert after["data_worker:0"].pid == before["data_worker:0"].pid
        assert numbers(cluster) == list(range(100))
        assert sorted(int(x) for x in function) == sorted([0, 1, 4, 9] * 2)  # also on the new one
        cluster.scale(data_workers=3)
        assert len({task.host for task in cluster.snapshot().tasks}) == 2
        empty.end_pod(empty.pod_names()[1])
        until(lambda: cluster.ended, 60)
        until(empty.has_finished_jobs, 60)


def test_pod_that_never_starts_ends_with_the_cluster(empty: KubernetesJobs) -> None:
    empty.capacity = 1
    with start("waits", minimum=1) as cluster:
        cluster.scale(data_workers=4)
        states = {task.task: task.state for task in cluster.snapshot().tasks}
        assert [states[f"data_worker:{index}"] for index in range(4)] == [
            *(TaskState.READY, TaskState.PLANNED) * 2
        ]
        cluster.scale(data_workers=1)
        assert cluster.state == "ready"
    until(lambda: not empty.pod_names(), 60)


def test_failed_pod_that_starts_later_leaves_the_cluster_running(empty: KubernetesJobs) -> None:
    empty.capacity = 1
    with start("fails", minimum=1) as cluster:
        empty.images.clear()
        empty.capacity = None
        until(lambda: "ImagePullBackOff" in reasons(cluster), 60)
        empty.images.add("tfd:1")
        assert "pod-1 does not join the cluster" in notices(cluster)
        assert numbers(cluster) == list(range(100))


def test_invalid_minimum_is_an_error() -> None:
    for minimum in (0, 3, True):
        with pytest.raises(errors.UsageError, match="minimum="):
            launcher(minimum=minimum)


@pytest.mark.slow  # it needs stunnel, which `make test` does not
def test_traffic_between_pods_can_be_encrypted(empty: KubernetesJobs) -> None:
    with start("secure", secure=True) as cluster:
        assert numbers(cluster) == list(range(100))
        # Other pods reach the tasks only through the tunnels.
        assert {task.open_to for task in cluster.snapshot().tasks} == {"loopback"}
        cluster.restart("data_worker:1")
        assert numbers(cluster) == list(range(100))
