"""Resolvers in strategies that run in the processes of the tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests._ports import free_port

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("plain_environment")]

#: The program of each worker. The workers add up their values.
WORKER = """
import tensorflow as tf
from tfd_notebook.resolvers import TFConfigResolver

resolver = TFConfigResolver()
strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)

@tf.function
def add():
    here = lambda: tf.distribute.get_replica_context().replica_id_in_sync_group + 1
    return strategy.reduce("SUM", strategy.run(here), axis=None)

total = int(add())
resolver.check()
add()  # keeps each worker running until both have probed
print(strategy.num_replicas_in_sync, total, dict(resolver.num_accelerators()))
"""


@pytest.mark.slow
def test_two_workers_train_with_a_mirrored_strategy() -> None:
    addresses = [f"localhost:{free_port()}" for _ in range(2)]
    processes = []
    for index in (0, 1):
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": addresses}, "task": task})
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", WORKER],
                env={**os.environ, "TF_CONFIG": config},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=120) for process in processes]
    for process, (out, error) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, error[-4_000:]
        assert out.splitlines()[-1] == "2 3 {}"
