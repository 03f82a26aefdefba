"""A restarted kernel finds its parameter servers and continues from its checkpoint."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import tfd_notebook as tfd
from tests.coordinator._programs import Programs
from tfd_notebook.launchers.client import orphans

pytestmark = [pytest.mark.integration, pytest.mark.timeout(170)]

#: Bytes of the variable that each kernel creates. A leak of five of them would be visible.
MEGABYTES = 40

KERNEL = f"""
import json, os, signal, sys
import tfd_notebook as tfd
cluster = tfd.attach("lasting")
import tensorflow as tf
coordinator = cluster.coordinator()
with coordinator.strategy.scope():
    steps = tf.Variable(0, dtype=tf.int64)
    weights = tf.Variable(tf.zeros([{MEGABYTES} * 250_000]))
checkpoint = tf.train.Checkpoint(steps=steps, weights=weights)
manager = tf.train.CheckpointManager(checkpoint, sys.argv[1], max_to_keep=1)
if manager.latest_checkpoint:
    checkpoint.restore(manager.latest_checkpoint)

@tf.function
def step():
    weights.assign_add(tf.ones_like(weights))
    return steps.assign_add(1)

before = int(steps.numpy())
for _ in range(5):
    coordinator.schedule(step)
coordinator.join()
manager.save()
result = {{"before": before, "after": int(steps.numpy()), "weight": float(weights[0].numpy())}}
print("RESULT" + json.dumps(result), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def cluster() -> Iterator[tfd.Cluster]:
    cluster = tfd.Cluster(workers=1, ps=1, name="lasting")
    try:
        cluster.detach(1.0)
        yield cluster
    finally:
        cluster.stop()
        orphans.sweep()  # removes the sockets of the killed process


def written(pid: int) -> float:
    """Return the private written memory of a process in MB, without mapped files."""
    return float(sum(part.private_dirty for part in psutil.Process(pid).memory_maps()) / 1e6)


def test_five_restarts_continue_from_the_checkpoint(
    no_coordinator: None, cluster: tfd.Cluster, programs: Programs, tmp_path: Path
) -> None:
    used = []
    for life in range(5):
        kernel = programs.run(KERNEL, str(tmp_path), timeout=90)
        assert "RESULT" in kernel.stdout, kernel.stderr
        data = json.loads(kernel.stdout.split("RESULT")[1])
        assert data == {"before": 5 * life, "after": 5 * life + 5, "weight": 5.0 * life + 5}
        used.append(sum(written(task.pid) for task in cluster.tasks))
    # The first kernel restores nothing. A buffer of the last step may still be allocated. Only a
    # leak of each kernel makes a slope.
    slope = statistics.linear_regression(range(4), used[1:]).slope
    assert slope < 0.6 * MEGABYTES, used
    assert cluster.state == "ready"
