"""Validation of cluster descriptions."""

import json
import math
import re
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest

import tfd_notebook as tfd
from tfd_notebook import errors
from tfd_notebook.model import spec
from tfd_notebook.model.spec import ClusterConfig, Endpoint, Policy, Role, Service, TaskSpec
from tfd_notebook.resolvers.static import TFConfigResolver
from tfd_notebook.spark import TFCluster
from tfd_notebook.spark.driver import startup
from tfd_notebook.spark.driver.shutdown import GracefulShutdown
from tfd_notebook.spark.local_session.session import session
from tfd_notebook.spark.preflight.check import check

#: Values that no argument with a number of seconds accepts.
NO_SECONDS = (math.nan, math.inf, -math.inf, -2, True, "1", 10**400, 1e10)
#: Each operation with a number of seconds that needs no running cluster, by the argument.
SECONDS: dict[str, Callable[[Any], object]] = {
    **{
        f"Policy.{name}": lambda value, name=name: Policy(**{name: value})
        for name in ("hang_seconds", "start_timeout", "time_limit", "time_limit_notice")
    },
    "Spark.grace": lambda value: tfd.launchers.Spark(grace=value),
    "Slurm.grace": lambda value: tfd.launchers.Slurm(grace=value),
    "RemoteKernel.grace": lambda value: tfd.RemoteKernel(
        "http://127.0.0.1:1/?token=t", grace=value
    ),
    "heartbeat_limit": startup.heartbeat_limit,
    "session.timeout": lambda value: session(timeout=value),
    "check.timeout": lambda value: check(None, timeout=value),
    "run.reservation_timeout": lambda value: TFCluster.run(
        None, print, None, 1, reservation_timeout=value
    ),
    "shutdown.timeout": lambda value: GracefulShutdown(None, None, 0, value, False),
    "shutdown.grace_secs": lambda value: GracefulShutdown(None, None, value, 1, False),
    "Resolver.timeout": lambda value: TFConfigResolver().check(value),
    "Resolver.seconds": lambda value: next(TFConfigResolver().watch(value)),
    "Resolver.every": lambda value: next(TFConfigResolver().watch(1, value)),
}


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("localhost:80", "localhost", 80),
        ("grpc://10.0.0.1:5050", "10.0.0.1", 5050),
        ("[::1]:1", "::1", 1),
    ],
)
def test_endpoint_parses(text, host, port):
    assert Endpoint.parse(text) == Endpoint(host, port)


@pytest.mark.parametrize("text", ["", "localhost", "localhost:0", "localhost:65536", "a b:1:2"])
def test_endpoint_refuses(text):
    with pytest.raises(errors.UsageError, match="invalid address"):
        Endpoint.parse(text)


def test_endpoint_writes_ipv6_in_brackets():
    assert str(Endpoint("::1", 80)) == "[::1]:80"


def test_task_name():
    assert TaskSpec(Role.DATA_WORKER, 3).name == "data_worker:3"


@pytest.mark.parametrize(
    "options",
    [
        {"on_hang": "panic"},
        {"on_loss": "ignore"},
        {"hang_seconds": 0},
        {"start_timeout": -1},
        {"time_limit": 0},
        {"restarts": -1},
        {"minimum": 1.5},
    ],
)
def test_policy_refuses(options):
    with pytest.raises(errors.UsageError, match=next(iter(options))):
        Policy(**options)


@pytest.mark.parametrize("value", NO_SECONDS, ids=str)
@pytest.mark.parametrize("name", SECONDS)
def test_numbers_of_seconds_are_finite(name: str, value: Any) -> None:
    argument = name.rpartition(".")[2]
    with pytest.raises(errors.UsageError, match=rf"invalid {argument}=.*: expected .* seconds"):
        SECONDS[name](value)


def test_seconds_have_a_range():
    assert [spec.check_seconds("s", value) for value in (0.1, 1, 10**9)] == [0.1, 1, 10**9]
    assert spec.check_seconds("s", 0, 0) == 0
    assert spec.check_timeout(None) is None
    for value, minimum, expected in ((0, None, "more than 0"), (0.9, 1, "1 or more")):
        with pytest.raises(errors.UsageError, match=f"invalid s={value}: expected {expected}"):
            spec.check_seconds("s", value, minimum)


@pytest.mark.parametrize("count", [10**5000, -(10**5000)], ids=["large", "small"])
def test_huge_counts_are_refused(count):
    with pytest.raises(errors.UsageError, match=r"invalid n=-?inf: expected 0 to 5"):
        spec.check_count("n", count, 5)


@pytest.mark.parametrize("port", [-1, 65536, "80"])
def test_service_refuses_ports(port):
    with pytest.raises(errors.UsageError, match="port"):
        Service(port=port)


@pytest.mark.parametrize("kind", ["Dispatcher", "Worker"])
def test_service_refuses_protocols_that_tensorflow_does_not_have(kind):
    config_type = namedtuple(f"{kind}Config", "protocol")
    for name in ("grpc", "unknown"):
        config = {f"{kind.lower()}_config": config_type(name)}
        if name == "grpc":
            Service(**config)
        else:
            with pytest.raises(errors.UnknownName, match=r"(?s)'unknown'.*'grpc'"):
                Service(**config)


@pytest.mark.parametrize(
    "options",
    [
        {"name": ""},
        {"name": "a/b"},
        {"name": "x" * 65},
        {"name": "c", "counts": {Role.DATA_WORKER: -1}},
        {"name": "c", "counts": {Role.DATA_WORKER: 5000}},
        {"name": "c", "counts": {Role.DATA_WORKER: True}},
        {"name": "c", "counts": {Role.DATA_WORKER: 1.0}},
        {"name": "c", "allow": ("nowhere",)},
        {"name": "c", "env": {"A": 1}},
    ],
)
def test_cluster_config_refuses(options):
    with pytest.raises(errors.UsageError):
        ClusterConfig(**options)


def test_errors_have_cause_and_fix():
    error = errors.NoWorkers("no worker is left", task="data_worker:0", fix="cluster.scale(...)")
    assert str(error) == ("[TFD301] data_worker:0: no worker is left\nNext: cluster.scale(...)")
    assert isinstance(errors.TimeLimit("x"), TimeoutError)
    assert isinstance(errors.UsageError("x"), ValueError)


class TestWrongTypes:
    @pytest.mark.parametrize(
        ("options", "what"),
        [
            ({"policy": {"restarts": 1}}, "expected a tfd.Policy"),
            ({"service": "x"}, "expected a tfd.Service"),
            ({"env": ["A=1"]}, "expected a mapping of names"),
            ({"preload": 5}, "expected names"),
            ({"preload": [5]}, "expected the name of a module"),
            ({"ps": -1}, "invalid ps=-1"),
            ({"workers": 1.5}, "invalid workers=1.5: expected an integer"),
            ({"workers": True}, "invalid workers=True: expected an integer"),
            ({"evaluator": 1}, "invalid evaluator 1: expected True or False"),
            ({"gpus": 2}, "invalid gpus 2"),
        ],
    )
    def test_refused_cluster_leaves_its_name_free(
        self, options: dict[str, object], what: str
    ) -> None:
        with pytest.raises(errors.TfdError, match=what):
            tfd.Cluster(name="wrong", **options)  # type: ignore[arg-type]
        assert "wrong" not in tfd.clusters()

    @pytest.mark.parametrize("name", ["", "-n", "a b", "modèle", "x" * 65])
    def test_invalid_cluster_name_is_refused(self, name: str) -> None:
        with pytest.raises(errors.UsageError, match="invalid cluster name"):
            ClusterConfig(name)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: tfd.Policy(hang_seconds="5"),  # type: ignore[arg-type]
            lambda: tfd.Policy(time_limit=True),
            lambda: tfd.Service(port=True),
            lambda: tfd.Service(work_dir=3),  # type: ignore[arg-type]
            lambda: tfd.Service(worker_config="x"),
        ],
    )
    def test_server_settings_follow_the_specification(self, make: Callable[[], object]) -> None:
        with pytest.raises(errors.UsageError):
            make()

    @pytest.mark.parametrize(
        ("options", "what"),
        [
            ({"worker_tags": "COLOCATED"}, "worker_tags='COLOCATED': expected a list of strings"),
            ({"worker_tags": 1}, "worker_tags=1: expected a list"),
            ({"worker_tags": [""]}, "worker_tags entry '': expected a non-empty string"),
            ({"worker_tags": [1]}, "worker_tags entry 1: expected a non-empty string"),
            ({"worker_tags": ["a\n"]}, "invalid worker_tags entry 'a"),
            ({"worker_tags": ["a", "a"]}, "expected different tags"),
            *(
                ({name: value}, f"invalid {name}={value}: expected")
                for name in ("cross_trainer_cache_size_bytes", "snapshot_max_chunk_size_bytes")
                for value in (0, -1, 1.5, True, 2**63)
            ),
        ],
    )
    def test_invalid_settings_of_data_workers_are_refused(
        self, options: dict[str, Any], what: str
    ) -> None:
        with pytest.raises(errors.UsageError, match=re.escape(what)):
            tfd.Service(**options)

    def test_tags_may_be_a_list(self) -> None:
        service = tfd.Service(worker_tags=["b", "a"])  # type: ignore[arg-type]
        assert service.worker_tags == ("b", "a")
        assert service == tfd.Service(worker_tags=("b", "a"))
        config = ClusterConfig("c", service=service)
        assert spec.unpack(json.loads(json.dumps(spec.pack(config)))) == config

    def test_different_host_is_a_different_specification(self) -> None:
        first = tfd.Cluster(name="hosts", start=False)
        try:
            with pytest.raises(errors.NameTaken):
                tfd.Cluster(
                    name="hosts", launcher=tfd.launchers.Local(host="127.0.0.2"), start=False
                )
        finally:
            first.stop()


def test_external_tasks_are_not_restarted_by_code() -> None:
    own, external = (ClusterConfig(name="a", launcher=name) for name in ("local", "external"))
    assert own.restart_step("ps:0") == "cluster.restart('ps:0')"
    assert own.restart_step("ps:0", logs=True).startswith("see cluster.logs('ps:0'), then cluster")
    assert "cluster." not in external.restart_step("ps:0", logs=True)
    through = "connection refused: nothing listens there through the proxy. Add host to no_proxy"
    assert external.restart_step("ps:0", through) == "add its host to no_proxy"
