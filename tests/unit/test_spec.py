"""Descriptions of clusters refuse what cannot be meant."""

import pytest

from tfd_notebook import errors
from tfd_notebook.spec import ClusterConfig, Endpoint, Policy, Role, Service, TaskSpec


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
    with pytest.raises(errors.UsageError, match="no address"):
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


@pytest.mark.parametrize("port", [-1, 65536, "80"])
def test_service_refuses_ports(port):
    with pytest.raises(errors.UsageError, match="port"):
        Service(port=port)


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


def test_errors_tell_what_and_next():
    error = errors.NoWorkers("no worker is left", task="data_worker:0", fix="cluster.scale(...)")
    assert str(error) == ("[TFD301] data_worker:0: no worker is left\nNext: cluster.scale(...)")
    assert isinstance(errors.TimeLimit("x"), TimeoutError)
    assert isinstance(errors.UsageError("x"), ValueError)
