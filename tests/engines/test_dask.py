"""``launcher="dask"`` on the workers of a Dask cluster of this host."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributed
import psutil
import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._bridges import bridges
from tests._waiting import until
from tests.engines._engine_checks import EngineChecks, check_end_of_a_worker
from tfd_notebook import errors
from tfd_notebook.launchers import Dask
from tfd_notebook.launchers import dask as launch_dask

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ENGINE = "dask"

#: A Dask cluster whose worker cannot import this package.
WITHOUT_PACKAGE = """
import sys
from distributed import LocalCluster
with LocalCluster(n_workers=1, dashboard_address=":0") as cluster:
    print(cluster.scheduler_address, flush=True)
    sys.stdin.read()
"""
#: A Dask cluster with a worker that has resources, and one that has a name.
MIXED = """
import subprocess, sys
from distributed import LocalCluster
with LocalCluster(n_workers=1, dashboard_address=":0", resources={"GPU": 2}) as cluster:
    command = [sys.executable, "-m", "distributed.cli.dask_worker", cluster.scheduler_address]
    worker = subprocess.Popen([*command, "--name", "plain", "--no-dashboard"])
    print(cluster.scheduler_address, flush=True)
    sys.stdin.read()
    worker.terminate()
    worker.wait()
"""


@contextlib.contextmanager
def scheduler(code: str, **options: Any) -> Iterator[str]:
    """Run a program, and yield the address of its scheduler."""
    program = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )
    assert program.stdout
    try:
        yield program.stdout.readline().strip()
    finally:
        program.communicate()


@pytest.fixture(scope="module")
def client(dask: str) -> Iterator[distributed.Client]:
    with distributed.Client(dask) as client:
        yield client


@pytest.fixture(scope="class")
def launcher(client: distributed.Client) -> Dask:
    client.wait_for_workers(2)
    return Dask(client, workers=2)


class TestDask(EngineChecks):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _address(cls, dask: str) -> None:
        cls.address = dask

    address: str

    @classmethod
    def make_launcher(cls) -> Dask:
        return Dask(cls.address, workers=1)


def test_busy_workers_start_agents(client: distributed.Client) -> None:
    client.wait_for_workers(2)
    release = distributed.Event("release")

    def occupy(_: int) -> None:
        distributed.Event("release").wait(200)

    tasks = client.map(occupy, range(4), pure=False)
    until(lambda: sum(map(len, client.processing().values())) >= 2)
    launcher = Dask(workers=1)  # of the current client
    try:
        with tfd.Cluster(data_workers=1, name="busy", launcher=launcher) as cluster:
            assert cluster.state == "ready"
            assert not any(task.done() for task in tasks)
            assert len(bridges()) == 1
        until(lambda: not bridges())
    finally:
        release.set()
    client.gather(tasks)


def test_tunnels_connect_the_tasks(client: distributed.Client) -> None:
    client.wait_for_workers(2)
    launcher = Dask(client, workers=1, secure=True)
    with tfd.Cluster(data_workers=1, name="sealed", launcher=launcher) as cluster:
        numbers = tf.data.Dataset.range(100).apply(cluster.distribute("dynamic"))
        assert sorted(int(x) for x in numbers) == list(range(100))
        stunnel = [p for p in psutil.process_iter(["name"]) if p.info["name"].startswith("stunnel")]
        assert stunnel


def test_end_of_a_worker_is_named(client: distributed.Client) -> None:
    client.wait_for_workers(2)
    check_end_of_a_worker(Dask(client), "its Dask worker has ended")
    client.wait_for_workers(2)  # Dask restarts it


def test_threads_of_this_process_are_workers() -> None:
    with (
        distributed.Client(processes=False, n_workers=1, dashboard_address=":0") as client,
        tfd.Cluster(data_workers=1, name="inproc", launcher=Dask(client)) as cluster,
    ):
        assert cluster.state == "ready"


def test_missing_workers_client_and_scheduler_are_explained(
    client: distributed.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(errors.LaunchError, match="has 2 workers, but workers=9") as caught:
        tfd.Cluster(data_workers=1, name="few", launcher=Dask(client, workers=9))
    assert "client.wait_for_workers" in str(caught.value)
    monkeypatch.setattr(launch_dask, "_CONNECT_SECONDS", 1)
    with pytest.raises(errors.LaunchError, match="connecting to the Dask scheduler tcp://127"):
        tfd.Cluster(data_workers=1, name="none", launcher=Dask("tcp://127.0.0.1:9"))

    def default_client() -> Any:
        raise ValueError("No clients found")

    monkeypatch.setattr(distributed, "default_client", default_client)
    with pytest.raises(errors.StateError, match="no client of Dask in this process"):
        tfd.Cluster(data_workers=1, name="none", launcher="dask")
    assert not {"few", "none"} & tfd.clusters().keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client": 3}, "invalid client 3"),
        ({"workers": 0}, "workers"),
        ({"workers": True}, "workers"),
        ({"workers": []}, "invalid workers"),
        ({"workers": ["a", "a"]}, "expected different names"),
        ({"workers": [1]}, "invalid workers 1"),
        ({"resources": 3}, "invalid resources 3"),
        ({"resources": {"GPU": "1"}}, "invalid resources 'GPU': '1'"),
        ({"address": 5}, "invalid address 5"),
        ({"grace": 0}, "invalid grace"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.UsageError, match=message):
        Dask(**options)


def test_closed_client_and_workers_in_one_process_are_rejected(dask: str) -> None:
    client = distributed.Client(dask, set_as_default=False)
    client.close()
    with pytest.raises(errors.StateError, match="is closed"):
        tfd.Cluster(data_workers=1, name="closed", launcher=Dask(client))
    with (
        distributed.Client(processes=False, n_workers=2, dashboard_address=":0") as client,
        pytest.raises(errors.LaunchError, match="are one process"),
    ):
        tfd.Cluster(data_workers=1, name="threads", launcher=Dask(client))


def test_client_of_an_address_is_closed(dask: str) -> None:
    before = set(distributed.Client._instances)
    with pytest.raises(errors.LaunchError, match="workers=9"):
        tfd.Cluster(data_workers=1, name="few", launcher=Dask(dask, workers=9))
    opened = set(distributed.Client._instances) - before
    assert all(client.status == "closed" for client in opened)


def test_worker_without_this_package_is_named(tmp_path: Path) -> None:
    package = tmp_path / "tfd_notebook"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('no tfd_notebook here')\n")
    with (
        scheduler(WITHOUT_PACKAGE, cwd=tmp_path) as address,
        pytest.raises(errors.LaunchError, match="no tfd_notebook here") as caught,
    ):
        tfd.Cluster(data_workers=1, name="bare", launcher=Dask(address))
    assert "in the Python of the workers" in str(caught.value)


def test_workers_are_chosen_by_name_address_and_resources() -> None:
    def hosts(**options: Any) -> set[str]:
        launcher = Dask(client, **options)
        with tfd.Cluster(data_workers=2, name="chosen", launcher=launcher) as cluster:
            return set(cluster.to_frame()["host"])

    here = socket.gethostname()
    gpu, plain = f"{here}/0", f"{here}/plain"
    with scheduler(MIXED) as address, distributed.Client(address, set_as_default=False) as client:
        client.wait_for_workers(2)
        workers = client.scheduler_info()["workers"]
        addresses = {info["name"]: address for address, info in workers.items()}
        assert hosts() == {gpu, plain}
        assert hosts(workers="plain") == hosts(workers=[addresses["plain"]]) == {plain}
        assert hosts(workers=["plain", "0"], place={"data_worker": gpu}) == {plain, gpu}
        assert hosts(resources={"GPU": 2}) == hosts(resources={"GPU": 1}, workers="0") == {gpu}
        for options, message in (
            ({"workers": ["0", "other"]}, r"no worker 'other'(?s:.*)choose from (0, )?plain"),
            ({"workers": "plain", "resources": {"GPU": 1}}, "no worker 'plain' with resources="),
            ({"workers": 2, "resources": {"GPU": 1}}, "has 1 workers with resources=.*workers=2"),
            ({"resources": {"GPU": 3}}, r"has 0 workers with resources=\{'GPU': 3\}"),
        ):
            with pytest.raises(errors.LaunchError, match=message):
                hosts(**options)
