"""Contract of the resolvers, and static descriptions, in comparison with TensorFlow's resolvers.

A test of a defect first asserts it for TensorFlow's class. It therefore fails when TensorFlow fixes
the defect.
"""

from __future__ import annotations

import importlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubernetes
import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tfd_notebook import errors
from tfd_notebook.resolvers import (
    ClusterFileResolver,
    GCEResolver,
    KubernetesResolver,
    Resolver,
    SageMakerResolver,
    TFConfigResolver,
    UnionResolver,
    base,
)

tf_resolvers = tf.distribute.cluster_resolver
SPEC = {"ps": ["p:1"], "worker": ["w0:1", "w1:1"]}

pytestmark = pytest.mark.usefixtures("plain_environment")


def config(monkeypatch: pytest.MonkeyPatch, value: Any) -> TFConfigResolver:
    text = value if isinstance(value, str) else json.dumps(value)
    monkeypatch.setenv("TF_CONFIG", text)
    return TFConfigResolver()


def union(**options: Any) -> UnionResolver:
    return UnionResolver(tf_resolvers.SimpleClusterResolver(tf.train.ClusterSpec(SPEC)), **options)


class TestContract:
    def test_public_names(self) -> None:
        names = importlib.import_module("tfd_notebook.resolvers").__all__
        assert tfd.resolvers.__all__ == names
        assert names == sorted(names)
        for name in names:
            assert issubclass(getattr(tfd.resolvers, name), tf_resolvers.ClusterResolver)

    @pytest.mark.slow
    def test_resolvers_import_libraries_lazily(self) -> None:
        code = (
            "import sys, tfd_notebook as tfd\n"
            "print('tensorflow' in sys.modules)\n"
            "tfd.resolvers.KubernetesResolver({'worker': 'a=b'})\n"
            "print('kubernetes' in sys.modules)"
        )
        completed = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
        )
        assert completed.stdout.split("\n")[:2] == ["False", "False"]

    def test_resolver_implements_the_whole_contract(self, monkeypatch: pytest.MonkeyPatch) -> None:
        value = {"cluster": SPEC, "task": {"type": "worker", "index": 1}}
        resolver = config(monkeypatch, value)
        assert isinstance(resolver, Resolver)
        assert resolver.cluster_spec().as_dict() == SPEC
        assert (resolver.task_type, resolver.task_id) == ("worker", 1)
        assert (resolver.rpc_layer, resolver.environment) == ("grpc", "")
        assert resolver.master() == "grpc://w1:1"
        assert resolver.master("ps", 0) == "grpc://p:1"
        assert resolver.master("ps", 0, rpc_layer="grpc+x") == "grpc+x://p:1"
        assert resolver.master("ps", 0, rpc_layer="") == "p:1"
        with pytest.raises(errors.UnknownName, match="no task worker:2") as caught:
            resolver.master("worker", 2)
        assert "ps:0, worker:0, worker:1" in str(caught.value)
        resolver.task_type, resolver.task_id, resolver.rpc_layer = "ps", 0, "other"
        assert resolver.master() == "other://p:1"

    def test_tasks_are_looked_up_at_each_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        resolver = config(monkeypatch, {"cluster": SPEC})
        assert resolver.cluster_spec().num_tasks("worker") == 2
        config(monkeypatch, {"cluster": {"worker": ["w0:1"], "ps": ["p:1"]}})
        assert resolver.cluster_spec().num_tasks("worker") == 1

    def test_watch_yields_changes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, now = tmp_path / "cluster.json", [0.0]

        class Polls:
            """The event whose `wait` is the pause between polls. It advances the clock."""

            def wait(self, seconds: float) -> None:
                now[0] += seconds
                if now[0] in (5.0, 7.0):
                    path.write_text(json.dumps({"worker": [f"w{now[0]:.0f}:1"]}))

        path.write_text(json.dumps({"worker": ["w0:1"]}))
        monkeypatch.setattr(base, "time", SimpleNamespace(monotonic=lambda: now[0]))
        monkeypatch.setattr(base, "threading", SimpleNamespace(Event=Polls))
        changes = [
            (now[0], spec.as_dict()["worker"])
            for spec in ClusterFileResolver(path).watch(seconds=60)
        ]
        assert changes == [(0.0, ["w0:1"]), (5.0, ["w5:1"]), (7.0, ["w7:1"])]
        assert now == [60.0]
        with pytest.raises(errors.UsageError, match="every=0"):
            next(ClusterFileResolver(path).watch(every=0))

    @pytest.mark.slow
    def test_watch_can_be_interrupted(self, tmp_path: Path) -> None:
        path = tmp_path / "cluster.json"
        path.write_text(json.dumps({"worker": ["w0:1"]}))
        watching = ClusterFileResolver(path).watch(every=100)
        next(watching)
        main = threading.main_thread().ident
        assert main
        timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            next(watching)
        timer.join()

    def test_own_accelerators_are_the_visible_devices(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        devices = [
            tf.config.PhysicalDevice(f"/physical_device:{kind}:{i}", kind)
            for i, kind in enumerate(("CPU", "GPU", "GPU"))
        ]
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda: devices)
        resolver = config(monkeypatch, {"cluster": SPEC, "task": {"type": "worker", "index": 1}})
        assert resolver.num_accelerators() == {"GPU": 2}
        assert resolver.num_accelerators("worker", 1) == {"GPU": 2}
        # An empty cluster stands for training in this process.
        assert config(monkeypatch, "{}").num_accelerators() == {"GPU": 2}

    def test_unresolvable_hosts_are_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        resolver = config(monkeypatch, {"cluster": {"worker": ["missing.invalid:2222"]}})
        for ask in (resolver.check, resolver.num_accelerators):
            with pytest.raises(
                errors.TasksMissing, match=r"worker:0 at missing\.invalid:2222"
            ) as caught:
                ask()
            assert caught.value.task == "worker:0"
            assert "TF_CONFIG" in str(caught.value)

    def test_refusing_task_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{held.getsockname()[1]}"
            resolver = config(monkeypatch, {"cluster": {"worker": [address]}})
            with pytest.raises(errors.TasksMissing, match="refused"):
                resolver.check(timeout=60)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ('{"cluster":', errors.Malformed, "TF_CONFIG: invalid JSON: .*line 1 column 12"),
        ("[]", errors.Malformed, "expected an object, got list"),
        ('{"cluster": []}', None, ""),
        ('{"cluster": ["w:1"]}', errors.Malformed, "expected tasks by job"),
        ('{"cluster": {"": ["w:1"]}}', errors.Malformed, "invalid name of a job ''"),
        ('{"cluster": {"worker": []}}', errors.NoTasks, "'worker' has no tasks"),
        ('{"cluster": {"worker": {}}}', errors.NoTasks, "'worker' has no tasks"),
        (
            '{"cluster": {"worker": "w:1"}}',
            errors.Malformed,
            "invalid job 'worker': expected a list",
        ),
        (
            '{"cluster": {"worker": ["w"]}}',
            errors.Malformed,
            "invalid address 'w' of worker:0",
        ),
        ('{"cluster": {"worker": [17]}}', errors.Malformed, "invalid address 17 of worker:0"),
        ('{"cluster": {"worker": ["w w:1"]}}', errors.Malformed, "invalid address 'w w:1'"),
        ('{"cluster": {"worker": ["w:1", "v:0"]}}', errors.Malformed, "'v:0' of worker:1"),
        ('{"cluster": {"worker": ["w:65536"]}}', errors.Malformed, "w:65536"),
        ('{"cluster": {"worker": ["::1:8470"]}}', errors.Malformed, "::1:8470"),
        (
            '{"cluster": {"worker": {"x": "w:1"}}}',
            errors.Malformed,
            "invalid indexes of the job 'worker'",
        ),
        (
            '{"cluster": {"worker": {"-1": "w:1"}}}',
            errors.Malformed,
            "invalid indexes of the job 'worker'",
        ),
        (
            '{"cluster": {"ps": ["10.0.0.1:1"], "worker": ["w:1", "[::1]:1"]}}',
            errors.Malformed,
            r"ps:0 at 10.0.0.1:1 has an IPv4 address, and worker:1 at \[::1\]:1 an IPv6",
        ),
    ],
)
def test_invalid_descriptions_are_refused(
    monkeypatch: pytest.MonkeyPatch, text: str, kind: type[errors.TfdError] | None, message: str
) -> None:
    resolver = config(monkeypatch, text)
    if kind is None:
        assert resolver.cluster_spec().as_dict() == {}
        return
    with pytest.raises(kind, match=message) as caught:
        resolver.cluster_spec()
    assert str(caught.value).startswith(f"[{kind.code}] TF_CONFIG")
    assert "\nNext: " in str(caught.value)
    if "invalid JSON" in message or "object" in message:
        assert 'Next: write {"cluster": {"worker": ' in str(caught.value)


class TestTFConfig:
    def test_invalid_json_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        resolver = config(monkeypatch, '{"cluster": {')
        with pytest.raises(json.JSONDecodeError):
            tf_resolvers.TFConfigClusterResolver().cluster_spec()
        for ask in (
            resolver.cluster_spec,
            resolver.master,
            lambda: resolver.task_id,
            lambda: resolver.rpc_layer,
        ):
            with pytest.raises(errors.Malformed, match="TF_CONFIG: invalid JSON"):
                ask()

    def test_tf_config_is_read_as_in_tensorflow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        values: list[Any] = [
            {},
            {"cluster": {"worker": ["w:1"]}},
            {"cluster": SPEC, "task": {"type": "worker", "index": 1}, "rpc_layer": "grpc"},
            {"cluster": SPEC, "task": {"type": "evaluator", "index": "0"}, "session_master": "m"},
        ]
        for value in values:
            resolver = config(monkeypatch, value)
            expected = tf_resolvers.TFConfigClusterResolver(rpc_layer="grpc")
            assert resolver.cluster_spec() == expected.cluster_spec()
            assert (resolver.task_type, resolver.task_id) == (expected.task_type, expected.task_id)
            if "task" not in value or value["task"]["type"] == "worker":
                assert resolver.master() == expected.master()
        assert resolver.master() == "m"
        monkeypatch.delenv("TF_CONFIG")
        assert TFConfigResolver().cluster_spec().as_dict() == {}

    @pytest.mark.parametrize(
        "task", [{"type": "worker"}, {"index": 0}, "worker", {"type": "ps", "index": -1}]
    )
    def test_invalid_tasks_are_refused(self, monkeypatch: pytest.MonkeyPatch, task: Any) -> None:
        resolver = config(monkeypatch, {"cluster": SPEC, "task": task})
        with pytest.raises(errors.Malformed, match="TF_CONFIG: the task"):
            resolver.task_id  # noqa: B018

    def test_arguments_take_precedence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config(monkeypatch, {"cluster": SPEC, "task": {"type": "worker", "index": 1}})
        resolver = TFConfigResolver(task_type="ps", task_id=0, rpc_layer="x", environment="google")
        assert (resolver.task_type, resolver.task_id) == ("ps", 0)
        assert resolver.master() == "x://p:1"
        assert resolver.environment == "google"


class TestClusterFile:
    def test_json_and_toml_files_are_read(self, tmp_path: Path) -> None:
        plain, whole, toml = (tmp_path / name for name in ("a.json", "b.json", "c.toml"))
        plain.write_text(json.dumps(SPEC))
        whole.write_text(json.dumps({"cluster": SPEC, "task": {"type": "ps", "index": 0}}))
        toml.write_text('ps = ["p:1"]\nworker = ["w0:1", "w1:1"]\n')
        for path in (plain, str(whole), toml):
            assert ClusterFileResolver(path).cluster_spec().as_dict() == SPEC
        assert ClusterFileResolver(plain).task_type is None
        assert ClusterFileResolver(whole).master() == "grpc://p:1"

    def test_missing_index_stays_missing(self, tmp_path: Path) -> None:
        path = tmp_path / "cluster.json"
        path.write_text('{"worker": {"0": "w0:1", "2": "w2:1"}}')
        spec = ClusterFileResolver(path).cluster_spec()
        assert spec.task_indices("worker") == [0, 2]
        with pytest.raises(errors.UnknownName):
            ClusterFileResolver(path).master("worker", 1)

    def test_errors_of_a_file_have_its_path(self, tmp_path: Path) -> None:
        with pytest.raises(errors.NotThere, match=r"file .*nowhere\.json not found"):
            ClusterFileResolver(tmp_path / "nowhere.json").cluster_spec()
        half, toml, binary = (tmp_path / name for name in ("half.json", "x.toml", "binary"))
        half.write_text(json.dumps(SPEC)[:20])
        toml.write_text("worker = [")
        binary.write_bytes(b"\xff\xfe\x00")
        for path, message in (
            (half, "invalid JSON"),
            (toml, "invalid TOML"),
            (binary, "cannot be read"),
            (tmp_path, "cannot be read"),
        ):
            with pytest.raises(errors.Malformed, match=message) as caught:
                ClusterFileResolver(path).cluster_spec()
            assert str(path) in str(caught.value)
        with pytest.raises(errors.UsageError, match="path=17"):
            ClusterFileResolver(17)  # type: ignore[arg-type]


class TestSageMaker:
    @staticmethod
    def their_class() -> Any:
        module = "tensorflow.python.distribute.cluster_resolver.sagemaker_cluster_resolver"
        return importlib.import_module(module).SageMakerClusterResolver

    def test_missing_sagemaker_variables_are_an_error(self) -> None:
        with pytest.raises(AssertionError):
            self.their_class()().cluster_spec()
        for ask in (SageMakerResolver().cluster_spec, lambda: SageMakerResolver().task_id):
            with pytest.raises(errors.NotThere, match="not in a SageMaker training job"):
                ask()

    def test_tensorflow_does_not_export_its_class(self) -> None:
        assert not hasattr(tf_resolvers, "SageMakerClusterResolver")
        assert issubclass(tfd.resolvers.SageMakerResolver, tf_resolvers.ClusterResolver)

    def test_indexes_match_tensorflows_resolver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SM_HOSTS", '["algo-1", "algo-2", "algo-10"]')
        monkeypatch.setenv("SM_CURRENT_HOST", "algo-2")
        resolver, expected = SageMakerResolver(), self.their_class()(rpc_layer="grpc")
        assert resolver.cluster_spec() == expected.cluster_spec()
        assert resolver.task_id == expected.task_id == 2
        assert resolver.master() == expected.master() == "grpc://algo-2:2223"

    @pytest.mark.parametrize(
        ("hosts", "kind", "message"),
        [
            ("[", errors.Malformed, "invalid JSON"),
            ('{"algo-1": 1}', errors.Malformed, "expected a list of names"),
            ("[]", errors.NoTasks, "no tasks"),
            ('["algo-2"]', errors.Malformed, "SM_CURRENT_HOST='algo-1': expected one of algo-2"),
        ],
    )
    def test_invalid_variables_are_refused(
        self, monkeypatch: pytest.MonkeyPatch, hosts: str, kind: type[Exception], message: str
    ) -> None:
        monkeypatch.setenv("SM_HOSTS", hosts)
        monkeypatch.setenv("SM_CURRENT_HOST", "algo-1")
        with pytest.raises(kind, match=message):
            SageMakerResolver().cluster_spec()

    def test_ports_out_of_range_are_refused(self) -> None:
        for port in (0, 65536, "2223", True):
            with pytest.raises(errors.UsageError, match="port="):
                SageMakerResolver(port)  # type: ignore[arg-type]


def test_number_of_pages_of_pods_has_a_limit() -> None:
    calls: list[dict[str, Any]] = []

    def list_pods(namespace: str, **options: Any) -> Any:
        calls.append(options)
        return SimpleNamespace(items=[], metadata=SimpleNamespace(_continue="more"))

    api = kubernetes.client.ApiClient(kubernetes.client.Configuration(host="http://one"))
    client = SimpleNamespace(api_client=api, list_namespaced_pod=list_pods)
    with api, pytest.raises(errors.Malformed, match="more than 20 pages"):
        KubernetesResolver({"worker": "role=worker"}, client=client).cluster_spec()
    assert len(calls) == 20


@pytest.mark.parametrize("proxy_url", [None, "http://ada:PASS[WORD@127.0.0.1:1"])
def test_error_does_not_quote_the_password_of_a_proxy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, proxy_url: str | None
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    if proxy_url is None:
        monkeypatch.setenv("https_proxy", "http://ada:PASS/WORD@127.0.0.1:1")
    server = {"server": "https://host.test", **({"proxy-url": proxy_url} if proxy_url else {})}
    config = {
        "current-context": "one",
        "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one"}}],
        "clusters": [{"name": "one", "cluster": server}],
        "users": [{"name": "one", "user": {"token": "x"}}],
    }
    path = tmp_path / "config"
    path.write_text(json.dumps(config))
    with pytest.raises(errors.AccessDenied, match="proxy") as caught:
        KubernetesResolver({"worker": ["a=b"]}, kubeconfig=str(path)).cluster_spec()
    assert not re.search("PASS|WORD", str(caught.value))


class TestUnion:
    def test_task_id_zero_takes_precedence(self) -> None:
        member = tf_resolvers.SimpleClusterResolver(
            tf.train.ClusterSpec(SPEC), task_type="worker", task_id=1, rpc_layer="grpc"
        )
        assert tf_resolvers.UnionResolver(member, task_id=0).task_id == 1
        assert UnionResolver(member, task_id=0).task_id == 0
        assert UnionResolver(member, task_id=0).master() == "grpc://w0:1"
        assert (UnionResolver(member).task_type, UnionResolver(member).task_id) == ("worker", 1)

    def test_shared_task_counts_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The example in TensorFlow's documentation doubles every worker."""
        resolver = config(monkeypatch, {"cluster": SPEC})
        override = tf_resolvers.SimpleClusterResolver(
            resolver.cluster_spec(), num_accelerators={"GPU": 1}
        )
        doubled = tf_resolvers.UnionResolver(override, tf_resolvers.TFConfigClusterResolver())
        assert doubled.cluster_spec().num_tasks("worker") == 4
        both = UnionResolver(override, resolver)
        assert both.cluster_spec().as_dict() == SPEC
        assert both.num_accelerators("worker", 1) == {"GPU": 1}

    def test_lists_are_concatenated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        more = tf_resolvers.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": ["v:1"], "chief": ["c:1"]})
        )
        both = UnionResolver(config(monkeypatch, {"cluster": SPEC}), more)
        assert both.cluster_spec().as_dict() == {
            "ps": ["p:1"],
            "worker": ["w0:1", "w1:1", "v:1"],
            "chief": ["c:1"],
        }
        assert both.rpc_layer == "grpc"

    def test_indexes_with_gaps_are_kept(self) -> None:
        first, second, overlapping = (
            tf_resolvers.SimpleClusterResolver(tf.train.ClusterSpec({"worker": tasks}))
            for tasks in ({0: "w0:1", 2: "w2:1"}, {1: "w1:1"}, ["v:1"])
        )
        assert UnionResolver(first, second).cluster_spec().as_dict() == {
            "worker": ["w0:1", "w1:1", "w2:1"]
        }
        with pytest.raises(errors.Malformed, match="worker:0 is at w0:1 and at v:1"):
            UnionResolver(first, overlapping).cluster_spec()

    def test_invalid_members_are_refused(self) -> None:
        with pytest.raises(errors.UsageError, match="invalid resolvers: expected at least 1"):
            UnionResolver()
        with pytest.raises(errors.UsageError, match="expected a ClusterResolver"):
            UnionResolver("worker")

    def test_error_of_a_member_is_unchanged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        both = UnionResolver(config(monkeypatch, "{"), union())
        with pytest.raises(errors.Malformed, match=r"^.TFD702. TF_CONFIG: invalid JSON"):
            both.cluster_spec()


@pytest.mark.parametrize("name", ["kubernetes", "googleapiclient"])
def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in list(sys.modules):
        if module.partition(".")[0] == name:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    resolver: Resolver = (
        KubernetesResolver({"worker": "a=b"})
        if name == "kubernetes"
        else GCEResolver("p", "z", "g")
    )
    with pytest.raises(errors.Unsupported, match=f"needs the package {name}") as caught:
        resolver.cluster_spec()
    assert "pip install" in str(caught.value)
