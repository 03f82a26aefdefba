"""Unauthenticated clients at every socket of a running cluster do not affect its training."""

from __future__ import annotations

import threading
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests._waiting import until
from tests.spark._unauthenticated import junk, knock, listening, members, unix_sockets
from tfd_notebook.spark import TFCluster, TFParallel
from tfd_notebook.spark.TFCluster import InputMode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LONG = 60.0


def fork_servers() -> set[psutil.Process]:
    """Return the fork servers. Nodes have the same command, but another process name."""
    return {
        process
        for process in members()
        if not process.name().startswith("tfd ")
        and "tfd_notebook.spark.executor.fork_server" in " ".join(process.cmdline())
    }


def own_ports() -> dict[int, str]:
    """Return the ports at which this process listens, with their addresses."""
    return {
        connection.laddr.port: connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def test_unauthenticated_clients_at_every_socket_change_nothing(sc: Any, tmp_path: Path) -> None:
    def train(args: Any, ctx: Any) -> None:
        import json
        import os

        import tensorflow as tf

        task = json.loads(os.environ["TF_CONFIG"])["task"]
        server = tf.distribute.Server(ctx.cluster_spec, task["type"], task["index"])
        (tmp_path / f"serves{ctx.task_index}").touch()
        feed, total = ctx.get_data_feed(), 0
        while not feed.should_stop():
            total += sum(feed.next_batch(10))
        (tmp_path / f"total{ctx.task_index}").write_text(str(total))
        del server

    def wait(args: Any, ctx: Any) -> None:
        import time

        (tmp_path / "parallel").touch()
        while not (tmp_path / "gate").exists():
            time.sleep(0.05)

    before = own_ports()
    options = {"input_mode": InputMode.SPARK, "tensorboard": True, "log_dir": str(tmp_path)}
    cluster = TFCluster.run(sc, train, None, 2, 0, **options)
    parallel = threading.Thread(target=TFParallel.run, args=(sc, wait, None, 1, False))
    parallel.start()
    try:
        url = cluster.tensorboard_url()
        assert url
        until(lambda: len(list(tmp_path.glob("serves*"))) == 2, LONG)
        until((tmp_path / "parallel").exists, LONG)
        nodes = {int(node.address.rpartition(":")[2]) for node in cluster.nodes}
        until(lambda: all(row.open_to for row in cluster.nodes), LONG)
        # One port for the nodes, and one for the function of `TFParallel.run`.
        opened = own_ports().keys() - before.keys()
        assert len(opened) == 2
        assert {own_ports()[port] for port in opened} == {"127.0.0.1"}
        # TensorBoard has no authentication, so it listens on loopback, the executors' address.
        assert url.startswith("http://127.0.0.1:")
        ports = {*listening(), *opened}
        assert ports >= {*nodes, int(url.rpartition(":")[2])}
        # An inbox is bound under one name and then renamed.
        names = {*unix_sockets(), *(node.path for node in cluster.nodes)}
        assert len([name for name in names if "tfd-fork-server" in name]) == 2
        before_servers = fork_servers()
        assert len(before_servers) == 2
        for address in (*ports, *names):
            for message in junk(tmp_path / "bomb"):
                knock(address, message)
        assert fork_servers() == before_servers
        cluster.train(sc.parallelize(range(1000), 4), 1)
        with urllib.request.urlopen(url, timeout=LONG) as answer:
            assert answer.status == 200
    finally:
        (tmp_path / "gate").touch()
        parallel.join(LONG)
        cluster.shutdown(timeout=LONG)
    assert not parallel.is_alive()
    assert not (tmp_path / "bomb").exists()
    totals = [int(path.read_text()) for path in tmp_path.glob("total*")]
    assert sum(totals) == sum(range(1000))
    assert fork_servers() == before_servers
