"""`KubernetesResolver` and the official client with a fake API as strict as Kubernetes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes
import pytest
import tensorflow as tf
from kubernetes.client import ApiException

import tfd_notebook as tfd
from tests._waiting import until
from tests.integration._kubernetes import Kubernetes
from tfd_notebook import errors
from tfd_notebook.resolvers import KubernetesResolver

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("plain_environment")]

TensorFlowResolver = tf.distribute.cluster_resolver.KubernetesClusterResolver
WORKERS = {"worker": "role=worker"}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kubernetes]:
    with Kubernetes(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig()))
        yield cluster


def workers(cluster: Kubernetes, count: int, **more: Any) -> None:
    for index in range(count):
        labels = {"role": "worker"}
        cluster.apply(name=f"w-{index}", labels=labels, ip=f"10.0.0.{index}", **more)


def core(cluster: Kubernetes, token: str = "token") -> Any:
    """Return the official client with a token."""
    path = str(cluster.kubeconfig(token))
    return kubernetes.client.CoreV1Api(kubernetes.config.new_client_from_config(path))


def addresses(resolver: KubernetesResolver) -> list[str]:
    result: list[str] = resolver.cluster_spec().as_dict()["worker"]
    return result


class TestDefects:
    """Defects of TensorFlow's class, which each test asserts first."""

    def test_service_account_of_a_pod_is_used(
        self, cluster: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        workers(cluster, 1)
        account = tmp_path / "account"
        account.mkdir()
        (account / "token").write_text("token")
        (account / "namespace").write_text("mine\n")
        monkeypatch.delenv("KUBECONFIG")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(cluster.port))
        incluster, config = kubernetes.config.incluster_config, kubernetes.config.kube_config
        monkeypatch.setattr(incluster, "SERVICE_TOKEN_FILENAME", str(account / "token"))
        monkeypatch.setattr(incluster, "SERVICE_CERT_FILENAME", str(cluster.authority))
        monkeypatch.setattr(config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
        with pytest.raises(kubernetes.config.ConfigException, match="No configuration found"):
            TensorFlowResolver({"worker": ["role=worker"]}).cluster_spec()
        resolver = KubernetesResolver(WORKERS)
        assert addresses(resolver) == ["10.0.0.0:8470"]
        # Kubernetes renews the token every hour.
        del cluster.roles["token"]
        with pytest.raises(errors.AccessDenied):
            resolver.cluster_spec()
        cluster.roles["fresh"] = "mine"
        (account / "token").write_text("fresh")
        assert addresses(resolver) == ["10.0.0.0:8470"]

    def test_addresses_are_those_of_the_pods(self, cluster: Kubernetes) -> None:
        cluster.roles["all"] = "*"
        workers(cluster, 2)
        reference = TensorFlowResolver(
            {"worker": ["role=worker"]}, override_client=core(cluster, "all")
        )
        assert reference.cluster_spec().as_dict() == {"worker": ["192.168.0.1:8470"] * 2}
        assert addresses(KubernetesResolver(WORKERS)) == ["10.0.0.0:8470", "10.0.0.1:8470"]

    def test_pods_that_are_not_ready_are_ignored(self, cluster: Kubernetes) -> None:
        cluster.roles["all"] = "*"
        workers(cluster, 1)
        cluster.apply(name="w-1", labels={"role": "worker"}, ip="10.0.0.9", ready=False)
        cluster.apply(name="w-2", labels={"role": "worker"}, ip="10.0.0.8", ending=True)
        reference = TensorFlowResolver(
            {"worker": ["role=worker"]}, override_client=core(cluster, "all")
        )
        assert reference.cluster_spec().num_tasks("worker") == 3
        assert addresses(KubernetesResolver(WORKERS)) == ["10.0.0.0:8470"]

    def test_finished_pods_are_ignored(self, cluster: Kubernetes) -> None:
        cluster.roles["all"] = "*"
        workers(cluster, 1)
        cluster.apply(name="old", labels={"role": "worker"}, phase="Succeeded", ready=False)
        reference = TensorFlowResolver(
            {"worker": ["role=worker"]}, override_client=core(cluster, "all")
        )
        with pytest.raises(RuntimeError, match='"old" is not running; phase: "Succeeded"'):
            reference.cluster_spec()
        assert addresses(KubernetesResolver(WORKERS)) == ["10.0.0.0:8470"]

    def test_role_in_one_namespace_is_sufficient(self, cluster: Kubernetes) -> None:
        workers(cluster, 1)
        cluster.apply(name="other", labels={"role": "worker"}, ip="10.9.9.9", namespace="other")
        with pytest.raises(ApiException) as caught:
            TensorFlowResolver(
                {"worker": ["role=worker"]}, override_client=core(cluster)
            ).cluster_spec()
        assert caught.value.status == 403
        assert addresses(KubernetesResolver(WORKERS)) == ["10.0.0.0:8470"]

    def test_all_pages_are_read(self, cluster: Kubernetes) -> None:
        cluster.roles["all"] = "*"
        cluster.most = 2
        workers(cluster, 5)
        reference = TensorFlowResolver(
            {"worker": ["role=worker"]}, override_client=core(cluster, "all")
        )
        reference.cluster_spec()
        assert "limit" not in cluster.requests[-1][1]
        cluster.requests.clear()
        assert len(addresses(KubernetesResolver(WORKERS))) == 5
        assert [query["limit"] for _, query in cluster.requests] == ["500"] * 3
        assert [bool(query.get("continue")) for _, query in cluster.requests] == [False, True, True]


class TestNumbers:
    def test_pods_are_in_natural_order_of_their_names(self, cluster: Kubernetes) -> None:
        for index in (10, 9, 1):
            cluster.apply(name=f"w-{index}", labels={"role": "worker"}, ip=f"10.0.0.{index}")
        assert addresses(KubernetesResolver(WORKERS, port=1)) == [
            "10.0.0.1:1",
            "10.0.0.9:1",
            "10.0.0.10:1",
        ]

    @pytest.mark.parametrize(
        ("owner", "label"),
        [
            ("Job", "batch.kubernetes.io/job-completion-index"),
            ("StatefulSet", "apps.kubernetes.io/pod-index"),
            ("PyTorchJob", "training.kubeflow.org/replica-index"),
            ("StatefulSet", ""),
        ],
    )
    def test_missing_pod_keeps_its_index(self, cluster: Kubernetes, owner: str, label: str) -> None:
        for index in (0, 1, 2):
            labels = {"role": "worker", **({label: str(index)} if label else {})}
            cluster.apply(
                name=f"w-{index}",
                labels=labels,
                ip=f"10.0.0.{index}",
                owner=owner,
                ready=index != 1,
            )
        spec = KubernetesResolver(WORKERS).cluster_spec()
        assert spec.as_dict() == {"worker": {0: "10.0.0.0:8470", 2: "10.0.0.2:8470"}}

    def test_youngest_pod_of_an_index_is_used(self, cluster: Kubernetes) -> None:
        label = "batch.kubernetes.io/job-completion-index"
        for name, age in (("a-0", 5), ("b-0", 50)):
            labels = {"role": "worker", label: "0"}
            cluster.apply(name=name, labels=labels, ip=f"10.0.0.{age}", owner="Job", age=age)
        assert addresses(KubernetesResolver(WORKERS)) == ["10.0.0.5:8470"]

    def test_several_selectors_and_jobs_are_combined(self, cluster: Kubernetes) -> None:
        for name, role in (("z", "a"), ("x", "b"), ("p", "ps")):
            cluster.apply(name=name, labels={"role": role}, ip=f"10.0.0.{ord(name)}")
        jobs = {"worker": ["role=a", "role in (a, b)"], "ps": "role,role notin (a,b),!other"}
        assert KubernetesResolver(jobs, port=1).cluster_spec().as_dict() == {
            "worker": ["10.0.0.122:1", "10.0.0.120:1"],
            "ps": ["10.0.0.112:1"],
        }

    def test_ports_can_be_selected_by_name(self, cluster: Kubernetes) -> None:
        for index, port in enumerate((7000, 7001)):
            labels = {"role": "worker"}
            cluster.apply(name=f"w{index}", labels=labels, ip="10.0.0.1", ports={"tf": port})
        assert addresses(KubernetesResolver(WORKERS, port="tf")) == [
            "10.0.0.1:7000",
            "10.0.0.1:7001",
        ]
        with pytest.raises(errors.Malformed, match="pod w0 has no port named 'other'"):
            KubernetesResolver(WORKERS, port="other").cluster_spec()

    def test_ipv6_is_supported_and_mixtures_are_refused(self, cluster: Kubernetes) -> None:
        cluster.apply(name="a", labels={"role": "worker"}, ip="fd00::1")
        assert addresses(KubernetesResolver(WORKERS)) == ["[fd00::1]:8470"]
        cluster.apply(name="b", labels={"role": "worker"}, ip="10.0.0.1")
        with pytest.raises(errors.Malformed, match="they may not reach each other"):
            KubernetesResolver(WORKERS).cluster_spec()

    def test_field_selector_and_namespace_are_used(self, cluster: Kubernetes) -> None:
        workers(cluster, 2)
        selected = KubernetesResolver(WORKERS, field_selector="status.podIP=10.0.0.1")
        assert addresses(selected) == ["10.0.0.1:8470"]
        with pytest.raises(errors.AccessDenied, match="namespace 'other'"):
            KubernetesResolver(WORKERS, namespace="other").cluster_spec()
        given = KubernetesResolver(WORKERS, namespace="mine", client=core(cluster))
        assert len(addresses(given)) == 2


def ready_pod(ip: str = "10.0.0.1", ports: Any = (), metadata: Any = None) -> dict[str, Any]:
    return {
        "metadata": metadata or {"name": "w"},
        "spec": {"containers": [{"name": "a", "ports": list(ports)}]},
        "status": {
            **{"phase": "Running", "podIP": ip},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


class TestBadAnswers:
    def refused(self, kind: type[errors.TfdError], message: str, **options: Any) -> str:
        with pytest.raises(kind, match=message) as caught:
            KubernetesResolver(WORKERS, **options).cluster_spec()
        assert "Kubernetes" in str(caught.value)
        assert "\nNext: " in str(caught.value)
        return str(caught.value)

    def test_missing_pods_are_an_error(self, cluster: Kubernetes) -> None:
        self.refused(errors.NoTasks, "no pod matches role=worker")
        workers(cluster, 6, phase="Pending", ready=False)
        text = self.refused(errors.NoTasks, "no pod of role=worker is ready: w-0 is Pending, ")
        assert ", ..." in text

    def test_invalid_credentials_are_an_error(self, cluster: Kubernetes, tmp_path: Path) -> None:
        expired = str(cluster.kubeconfig("expired"))
        text = self.refused(errors.AccessDenied, "missing, invalid or expired", kubeconfig=expired)
        assert f"https://127.0.0.1:{cluster.port}" in text
        cluster.roles["foreign"] = "other"
        foreign = str(cluster.kubeconfig("foreign"))
        text = self.refused(errors.AccessDenied, "do not suffice", kubeconfig=foreign)
        assert "cannot list resource" in text
        assert "allows list and watch of pods" in text

    def test_invalid_configurations_are_an_error(
        self, cluster: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        missing, broken, half = (tmp_path / name for name in ("missing", "broken", "half"))
        broken.write_text("clusters: [")
        half.write_text("current-context: it\ncontexts: []\nclusters: []\nusers: []\n")
        for path in (missing, broken, half):
            self.refused(errors.AccessDenied, "reading the credentials from", kubeconfig=str(path))
        self.refused(errors.AccessDenied, "reading the credentials from", context="another")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
        self.refused(errors.AccessDenied, "credentials from the service account failed")

    @pytest.mark.parametrize("status", [500, 503])
    def test_server_errors_are_reported(self, cluster: Kubernetes, status: int) -> None:
        cluster.fail(status)
        self.refused(errors.NoAnswer, f"answers with HTTP {status}: .*injected fault")

    def test_truncated_answer_is_an_error(self, cluster: Kubernetes) -> None:
        workers(cluster, 1)
        cluster.fail("half")
        self.refused(errors.Malformed, "answers what the client cannot read")
        assert addresses(KubernetesResolver(WORKERS)) == ["10.0.0.0:8470"]

    @pytest.mark.parametrize(
        "answer",
        [
            {},
            {"metadata": None, "items": []},
            {"metadata": {}, "items": None},
            {"metadata": {}, "items": 7},
            {"metadata": {}, "items": [7]},
            {"metadata": {"continue": 7}, "items": []},
            {"metadata": {}, "items": [{"metadata": None, "status": {}}]},
            {"metadata": {}, "items": [{"metadata": {}, "status": {}}]},
            {"metadata": {}, "items": [{"metadata": {"name": "w"}, "status": None}]},
            {"metadata": {}, "items": [ready_pod(metadata={"name": "w", "labels": {"a": None}})]},
            {"metadata": {}, "items": [ready_pod(ip="nowhere")]},
            {"metadata": {}, "items": [ready_pod(ports=[{"name": "tf", "containerPort": 70000}])]},
        ],
    )
    def test_answers_of_another_form_are_refused(
        self, cluster: Kubernetes, answer: dict[str, Any]
    ) -> None:
        cluster.fail(answer)
        self.refused(errors.Malformed, "answers what the client cannot read", port="tf")

    def test_another_form_of_an_answer_ends_a_watch(self, cluster: Kubernetes) -> None:
        cluster.fail({"metadata": None, "items": []})
        with pytest.raises(errors.Malformed, match="answers what the client cannot read"):
            next(KubernetesResolver(WORKERS).watch(0.1))

    def test_fault_of_a_program_is_not_an_invalid_answer(self, cluster: Kubernetes) -> None:
        other = kubernetes.client.BatchV1Api(core(cluster).api_client)
        with pytest.raises(AttributeError, match="list_namespaced_pod"):
            KubernetesResolver(WORKERS, client=other).cluster_spec()

    def test_missing_answer_is_an_error(
        self, cluster: Kubernetes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tfd_notebook.resolvers.kubernetes._REQUEST_SECONDS", 0.3)
        cluster.fail("silence")
        self.refused(errors.NoAnswer, "does not answer")

    def test_refused_connection_is_an_error(self, cluster: Kubernetes, tmp_path: Path) -> None:
        path = cluster.kubeconfig()
        path.write_text(path.read_text().replace(f":{cluster.port}", ":1"))
        self.refused(errors.NoAnswer, "does not answer", kubeconfig=str(path))

    def test_unknown_certificate_is_an_error(self, cluster: Kubernetes, tmp_path: Path) -> None:
        path = cluster.kubeconfig()
        kept = [line for line in path.read_text().splitlines() if "authority" not in line]
        path.write_text("\n".join(kept))
        self.refused(errors.NoAnswer, "certificate verify failed", kubeconfig=str(path))

    def test_expired_lists_are_requested_again(self, cluster: Kubernetes) -> None:
        cluster.most = 1
        workers(cluster, 3)
        cluster.fail(410, 410)
        assert len(addresses(KubernetesResolver(WORKERS))) == 3
        cluster.fail(410, 410, 410)
        self.refused(errors.NoAnswer, "HTTP 410")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"jobs": {"worker": "role = ?"}}, "unable to parse requirement"),
            ({"field_selector": "spec.nothing=1"}, "field label not supported"),
            ({"field_selector": "nonsense"}, "can't understand it"),
        ],
    )
    def test_selectors_refused_by_the_api_are_an_error(
        self, cluster: Kubernetes, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(errors.NoAnswer, match=f"HTTP 400: .*{message}"):
            KubernetesResolver(**{"jobs": WORKERS, **options}).cluster_spec()

    def test_invalid_arguments_are_refused(self) -> None:
        for options, message in (
            ({"jobs": {}}, "expected a selector for each job"),
            ({"jobs": {"worker": ""}}, "expected a label selector"),
            ({"jobs": {"worker": [1]}}, "expected a label selector"),
            ({"jobs": WORKERS, "port": 0}, "port=0"),
            ({"jobs": WORKERS, "port": ""}, "port=''"),
        ):
            with pytest.raises(errors.UsageError, match=message):
                KubernetesResolver(**options)  # type: ignore[arg-type]


class TestWatching:
    """Events of the API start each read, so a poll interval of 100 s does not delay them."""

    @pytest.fixture
    def watched(self, cluster: Kubernetes) -> Iterator[tuple[list[Any], Callable[[], None]]]:
        specs: list[Any] = []
        ending = threading.Event()

        def watch() -> None:
            for spec in KubernetesResolver(WORKERS).watch(seconds=60, every=100):
                specs.append(spec.as_dict()["worker"])
                if ending.is_set():
                    break

        workers(cluster, 1)
        thread = threading.Thread(target=watch)
        thread.start()
        until(lambda: cluster.watchers == 1 and specs)
        yield specs, lambda: None
        ending.set()
        cluster.apply(name="last", labels={"role": "worker"}, ip="10.0.0.99")
        thread.join(60)
        assert not thread.is_alive()
        until(lambda: not cluster.watchers)

    def test_changes_are_watched(self, cluster: Kubernetes, watched: tuple[list[Any], Any]) -> None:
        assert not hasattr(TensorFlowResolver, "watch")
        specs, _ = watched
        assert specs == [["10.0.0.0:8470"]]
        workers(cluster, 2)
        until(lambda: specs[-1] == ["10.0.0.0:8470", "10.0.0.1:8470"])
        cluster.delete("w-0")
        until(lambda: specs[-1] == ["10.0.0.1:8470"])
        cluster.apply(
            name="foreign", labels={"role": "other"}, ip="10.0.0.7"
        )  # causes a bookmark only
        lists = len(cluster.requests)
        workers(cluster, 3)
        until(lambda: len(specs[-1]) == 3)
        assert all("watch" not in query for _, query in cluster.requests[lists:])

    def test_watch_restarts_after_a_compaction(
        self, cluster: Kubernetes, watched: tuple[list[Any], Any]
    ) -> None:
        specs, _ = watched
        watches = sum("watch" in query for _, query in cluster.requests)
        cluster.compact()
        until(lambda: sum("watch" in query for _, query in cluster.requests) > watches)
        workers(cluster, 2)
        until(lambda: len(specs[-1]) == 2)

    def test_watch_raises_errors(self, cluster: Kubernetes) -> None:
        workers(cluster, 1)
        watching = KubernetesResolver(WORKERS).watch(seconds=60)
        next(watching)
        cluster.delete("w-0")
        with pytest.raises(errors.NoTasks, match="no pod matches role=worker"):
            next(watching)
        until(lambda: not cluster.watchers)

    def test_watch_ends_after_its_seconds(self, cluster: Kubernetes) -> None:
        workers(cluster, 1)
        assert len(list(KubernetesResolver(WORKERS).watch(seconds=0.5))) == 1
        until(lambda: not cluster.watchers)


#: Uses a strategy with each resolver, in a separate process because a connection is final.
TRAIN = """
import json, os, sys
import tensorflow as tf
from tfd_notebook.resolvers import *

path, = sys.argv[1:]
os.environ["TF_CONFIG"] = open(path).read()
resolvers = {
    "kubernetes": lambda: KubernetesResolver({"worker": "role=worker", "ps": "role=ps"}, port="tf"),
    "file": lambda: ClusterFileResolver(path),
    "union": lambda: UnionResolver(ClusterFileResolver(path), TFConfigResolver()),
}

def train(name):
    resolver = resolvers[name]()
    resolver.check()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variable = tf.Variable(20.0)
    value = coordinator.schedule(tf.function(lambda: variable + 1.0))
    print(json.dumps([
        name,
        coordinator.fetch(value).item(),
        variable.device,
        resolver.num_accelerators(),
        resolver.num_accelerators("ps", 0),
    ]), flush=True)

for name in resolvers:
    child = os.fork()
    if not child:
        train(name)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, (name, status)
"""


@pytest.fixture(scope="module")
def servers(no_coordinator: None) -> Iterator[dict[str, list[str]]]:
    with tfd.Cluster(workers=2, ps=1, name="resolved") as cluster:
        yield cluster.resolver.cluster_spec().as_dict()


class TestStrategy:
    def test_strategy_uses_each_resolver(
        self,
        cluster: Kubernetes,
        servers: dict[str, list[str]],
        tmp_path: Path,
    ) -> None:
        for job, listed in servers.items():
            for index, address in enumerate(listed):
                port = int(address.rpartition(":")[2])
                cluster.apply(
                    name=f"{job}-{index}", labels={"role": job}, ip="127.0.0.1", ports={"tf": port}
                )
        path = tmp_path / "cluster.json"
        path.write_text(json.dumps({"cluster": servers}))
        completed = subprocess.run(
            [sys.executable, "-c", TRAIN, str(path)], capture_output=True, text=True, timeout=150
        )
        assert completed.returncode == 0, completed.stderr[-4_000:]
        results = [json.loads(line) for line in completed.stdout.splitlines()]
        assert [name for name, *_ in results] == ["kubernetes", "file", "union"]
        for name, value, device, accelerators, of_the_ps in results:
            assert value == 21.0, name
            assert device.startswith("/job:ps/replica:0/task:0"), name
            assert (accelerators, of_the_ps) == ({}, {}), name
