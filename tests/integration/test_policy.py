"""What an administrator allows, where it is the agent that sees to it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.root, pytest.mark.timeout(170)]

POLICY = "# of this host\nmemory_gb = 1.2\n"

#: Has a worker hold more and more memory, and prints what becomes of it.
GREEDY = """
import json, tensorflow as tf, tfd_notebook as tfd

def grow(x):
    import sys, numpy
    held = sys.__dict__.setdefault("_held", [])
    held.append(numpy.ones(int(x), numpy.uint8))
    return x

def read(megabytes):
    greedy = tf.data.Dataset.from_tensors(tf.constant(megabytes * 1_000_000, tf.int64))
    greedy = greedy.map(lambda x: tf.numpy_function(grow, [x], tf.int64))
    return list(greedy.apply(cluster.distribute("off")))

policy = tfd.Policy(restarts=0)
with tfd.Cluster(data_workers=1, name="greedy", policy=policy) as cluster:
    pid = cluster.snapshot().task("data_worker:0").pid
    read(10)
    modest = cluster.snapshot().task("data_worker:0").pid == pid
    try:
        read(2_000)
    except tfd.errors.DataLoss as error:
        said = error.what
    reason = cluster.snapshot().task("data_worker:0").reason
    cluster.restart("data_worker:0")
    read(10)
    notices = [notice.what for notice in cluster.snapshot().notices]
    print("found " + json.dumps([modest, said, reason, notices]))
"""


def test_a_task_that_holds_too_much_memory_is_ended(tmp_path: Path) -> None:
    """In a mount namespace whose /etc has a policy; the machine's own has none."""
    etc = tmp_path / "etc"
    shutil.copytree("/etc", etc, symlinks=True, ignore_dangling_symlinks=True)
    (etc / "tfd_notebook").mkdir()
    file = etc / "tfd_notebook/policy.toml"
    file.write_text(POLICY)
    file.chmod(0o644)
    become = 'mount --bind "$1" /etc && shift && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", become, "sh", etc, sys.executable, "-c", GREEDY],
        capture_output=True,
        text=True,
        timeout=160,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    modest, said, reason, notices = json.loads(done.stdout.split("found ")[1])
    assert modest
    quoted = "/etc/tfd_notebook/policy.toml, line 2: memory_gb = 1.2"
    assert any("each task may hold 1.2 GB" in what and quoted in what for what in notices)
    assert "GB of memory, more than a task may" in reason
    assert quoted in reason
    assert quoted in said
