"""``launcher="ipyparallel"`` on the engines of an ipyparallel cluster of this host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import ipyparallel
import pytest

import tfd_notebook as tfd
from tests._waiting import until
from tests.engines._engine_checks import EngineChecks, check_end_of_a_worker
from tfd_notebook import errors
from tfd_notebook.launchers import IPyParallel
from tfd_notebook.launchers import ipyparallel as launch_ipyparallel

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ENGINE = "ipyparallel"


@pytest.fixture(scope="module")
def client(ipyparallel: str) -> Iterator[Any]:
    from ipyparallel import Client

    client = Client(cluster_id=ipyparallel)
    yield client
    client.close()


@pytest.fixture(scope="class")
def launcher(client: ipyparallel.Client) -> IPyParallel:
    # `test_end_of_a_worker_is_named` ends one of three engines.
    return IPyParallel(client, engines=2)


def test_busy_engine_is_named(client: ipyparallel.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_ipyparallel, "START_SECONDS", 2.0)
    busy = client[client.ids[0]].apply_async(time.sleep, 6.0)
    with pytest.raises(errors.LaunchError, match="engine 0 is busy or cannot be reached"):
        tfd.Cluster(data_workers=1, name="busy", launcher=IPyParallel(client))
    busy.get(60)
    # The call of the failed start was removed from the engine's queue.
    call = client.history[-len(client.ids)]

    # The hub, because the client discards results that nothing refers to.
    def content() -> Any:
        (record,) = client.db_query({"msg_id": call}, keys=["result_content"])
        return record["result_content"]

    assert until(content)["status"] == "aborted"
    assert "busy" not in tfd.clusters()


def test_missing_cluster_and_engines_are_explained(
    client: ipyparallel.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(errors.LaunchError, match="engines, but engines=9") as caught:
        tfd.Cluster(data_workers=1, name="few", launcher=IPyParallel(client, engines=9))
    assert "client.wait_for_engines" in str(caught.value)
    monkeypatch.setattr(launch_ipyparallel, "_CONNECT_SECONDS", 1)
    with pytest.raises(errors.LaunchError, match="'default' failed") as caught:
        tfd.Cluster(data_workers=1, name="none", launcher=IPyParallel(cluster_id="no-such"))
    assert "ipcluster start" in str(caught.value)
    assert not {"few", "none"} & tfd.clusters().keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"client": 3}, "invalid client 3"), ({"engines": 0}, "engines"), ({"grace": 0}, "grace")],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.UsageError, match=message):
        IPyParallel(**options)


class TestIPyParallel(EngineChecks):
    @classmethod
    def make_launcher(cls) -> IPyParallel:
        return IPyParallel(cluster_id="tests", engines=1)

    def test_engines_are_free_while_the_cluster_runs(
        self, pair: tfd.Cluster, client: ipyparallel.Client
    ) -> None:
        assert pair.state == "ready"
        assert client[:].apply_async(int, "7").get(60) == [7] * len(client.ids)


def test_end_of_an_engine_is_named(client: ipyparallel.Client) -> None:
    check_end_of_a_worker(IPyParallel(client), "its engine has ended")
