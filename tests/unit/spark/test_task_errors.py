"""Errors that the tasks of TFParallel send to the driver."""

from __future__ import annotations

from typing import Any

import pytest

from tfd_notebook.errors import NodeFailed
from tfd_notebook.net import agent_protocol, secure_channel
from tfd_notebook.spark.TFParallel import TaskErrorCollector


@pytest.mark.parametrize("claimed", ["worker:1", "kernel"])
def test_error_of_a_task_names_only_this_task(claimed: str) -> None:
    secret, collector = secure_channel.Secret.new(), TaskErrorCollector()

    def send(name: str) -> None:
        error: dict[str, Any] = agent_protocol.pack_error(NodeFailed("it raised", task=name))
        with secure_channel.connect(server.address, secret) as channel:
            channel.send({"type": "start_failed", "node": 0, "error": error})
            with pytest.raises((EOFError, OSError)):
                channel.receive(60)

    with secure_channel.serve(secret, collector.collect) as server:
        send(claimed)
        assert collector.first is None
        send("worker:0")
        assert collector.first is not None
        assert collector.first.task == "worker:0"
