"""Tests of launchers next to workers of an engine. Each launcher's module has a subclass."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import pytest

import tfd_notebook as tfd
from tests._bridges import bridges
from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.launchers.client.rendezvous import Rendezvous
from tfd_notebook.model.events import WorkersAdapted
from tfd_notebook.model.spec import Role
from tfd_notebook.testing.pytest_checks import LauncherConformance


class Workers:
    """The engine's workers that clusters use, and the secrets of their connections."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.secrets: list[str] = []


@contextlib.contextmanager
def recorded(workers: Workers) -> Iterator[None]:
    """Record the workers of the clusters that start in a block."""
    expect = Rendezvous.expect

    def record(rendezvous: Rendezvous, hosts: Mapping[tuple[str, int], Any]) -> None:
        workers.pids += [pid for _, pid in hosts]
        workers.secrets.append(rendezvous.secret.hex())
        expect(rendezvous, hosts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rendezvous, "expect", record)
        yield


class EngineChecks(LauncherConformance):
    """Tests of one launcher. Its module defines the fixture `launcher` with two workers."""

    @pytest.fixture(scope="class")
    @classmethod
    def workers(cls) -> Workers:
        """Return the workers of the cluster `pair`."""
        return Workers()

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, launcher: Any, workers: Workers) -> Iterator[tfd.Cluster]:
        with recorded(workers):
            cluster = tfd.Cluster(workers=2, data_workers=2, name="pair", launcher=launcher)
        with cluster:
            yield cluster

    def test_tasks_run_next_to_both_workers(self, pair: tfd.Cluster, workers: Workers) -> None:
        frame = pair.to_frame()
        assert set(frame["state"]) == {"ready"}
        assert frame["host"].nunique() == 2
        assert len(set(workers.pids)) == 2
        assert len(bridges()) >= 2

    def test_agents_are_not_children_of_the_workers(
        self, pair: tfd.Cluster, workers: Workers
    ) -> None:
        """An engine may end the children of its workers with them."""
        children = {
            child.pid
            for pid in workers.pids
            for child in psutil.Process(pid).children(recursive=True)
        }
        assert not children & {bridge.pid for bridge in bridges()}
        assert not children & set(pair.to_frame()["pid"])

    def test_function_runs_next_to_both_workers(self, pair: tfd.Cluster) -> None:
        def rank(ctx: Any) -> int:
            return ctx.worker_num * 10  # type: ignore[no-any-return]

        assert pair.run(rank, timeout=120) == [0, 10]

    def test_number_of_data_workers_adapts(self, pair: tfd.Cluster) -> None:
        def hosts() -> list[str]:
            rows = pair.snapshot().tasks
            return [
                row.host for row in rows if row.role is Role.DATA_WORKER and row.state == "ready"
            ]

        pair.adapt(4, 4)
        until(lambda: len(hosts()) == 4, 120)
        assert len(set(hosts())) == 2
        pair.adapt(1, 2)
        until(lambda: len(hosts()) == 2, 120)
        pair.adapt(None)
        events = [event for event in pair.snapshot().events if isinstance(event, WorkersAdapted)]
        decisions = [(event.before, event.after, event.reason) for event in events]
        assert decisions == [(2, 4, "the minimum is 4"), (4, 2, "the maximum is 2")]

    def test_cluster_cannot_be_detached(self, pair: tfd.Cluster) -> None:
        with pytest.raises(errors.Unsupported, match="the cluster ends with its kernel or its"):
            pair.detach()

    def test_secret_is_not_on_a_command_line(self, pair: tfd.Cluster, workers: Workers) -> None:
        secret = workers.secrets[0][200:400]
        assert secret
        for process in psutil.process_iter(["cmdline"]):
            assert secret not in " ".join(process.info["cmdline"] or ())

    def test_start_can_be_stopped(self, launcher: Any) -> None:
        cluster = tfd.Cluster(data_workers=1, name="stopped", launcher=launcher, start=False)
        caught: list[BaseException] = []

        def start() -> None:
            try:
                cluster.start()
            except errors.TfdError as error:
                caught.append(error)

        before = cluster.state
        starting = threading.Thread(target=start)
        starting.start()
        until(lambda: cluster.state != before)
        cluster.stop()
        starting.join(60)
        assert not starting.is_alive()
        assert cluster.ended
        assert "stopped" not in tfd.clusters()


def check_end_of_a_worker(launcher: Any, reason: str) -> None:
    """Kill a worker of a cluster, and check that the cluster is lost for this reason."""
    before = {bridge.pid for bridge in bridges()}
    workers = Workers()
    with recorded(workers):
        cluster = tfd.Cluster(data_workers=2, name="doomed", launcher=launcher)
    pids = list(cluster.to_frame()["pid"])
    os.kill(workers.pids[-1], signal.SIGKILL)
    until(lambda: cluster.ended, 90)
    assert cluster.state == "lost"
    assert reason in " ".join(notice.what for notice in cluster.snapshot().notices)
    until(lambda: not any(map(psutil.pid_exists, pids)), 60)
    until(lambda: {bridge.pid for bridge in bridges()} <= before, 60)
