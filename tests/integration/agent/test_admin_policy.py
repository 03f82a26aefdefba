"""Limits of the administrator that the agent enforces."""

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

#: Makes a worker allocate more and more memory, and prints the result.
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
        message = error.what
    reason = cluster.snapshot().task("data_worker:0").reason
    cluster.restart("data_worker:0")
    read(10)
    notices = [notice.what for notice in cluster.snapshot().notices]
    print("result " + json.dumps([modest, message, reason, notices]))
"""


def test_task_above_the_memory_limit_is_ended(tmp_path: Path) -> None:
    """The program runs in a mount namespace with its own /etc, which has a policy."""
    etc = tmp_path / "etc"
    shutil.copytree("/etc", etc, symlinks=True, ignore_dangling_symlinks=True)
    (etc / "tfd_notebook").mkdir()
    file = etc / "tfd_notebook/policy.toml"
    file.write_text(POLICY)
    file.chmod(0o644)
    enter = 'mount --bind "$1" /etc && shift && exec "$@"'
    completed = subprocess.run(
        ["unshare", "--mount", "sh", "-c", enter, "sh", etc, sys.executable, "-c", GREEDY],
        capture_output=True,
        text=True,
        timeout=160,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    modest, message, reason, notices = json.loads(completed.stdout.split("result ")[1])
    assert modest
    limit_line = "/etc/tfd_notebook/policy.toml, line 2: memory_gb = 1.2"
    assert any("each task may use 1.2 GB" in what and limit_line in what for what in notices)
    assert "GB of memory, more than a task may" in reason
    assert limit_line in reason
    assert limit_line in message


#: Joins a control group with a limit. A large shuffle buffer exceeds it, a smaller one does not.
SHUFFLE = """
import json, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write("0")
import tensorflow as tf, tfd_notebook as tfd

def read(buffer):
    images = tf.data.Dataset.range(4_000).map(lambda x: tf.zeros([125_000], tf.int64) + x)
    shuffled = images.shuffle(buffer).map(lambda x: x[0])
    return sum(1 for _ in shuffled.apply(cluster.distribute("off")))

policy = tfd.Policy(restarts=0)
with tfd.Cluster(data_workers=1, name="shuffled", policy=policy) as cluster:
    pid = cluster.snapshot().task("data_worker:0").pid
    with open(f"/proc/{pid}/oom_score_adj", "w") as file:
        file.write("900")  # makes the kernel choose it before this process
    try:
        read(4_000)
    except tfd.errors.DataLoss as error:
        message = str(error)
    (finding,) = (item for item in tfd.doctor(cluster) if item.code == "TFD854")
    notices = [str(notice) for notice in cluster.snapshot().notices if notice.severity == "error"]
    cluster.restart("data_worker:0")
    count = read(10)
    codes = tfd.doctor(cluster).codes
    print("result " + json.dumps([message, finding.what, finding.fix, notices, count, codes]))
"""


def test_data_worker_killed_for_memory_is_explained() -> None:
    """The limit belongs to the parent of the control group of the task."""
    root = Path("/sys/fs/cgroup/memory")
    version_1 = root.is_dir()
    outer = (root if version_1 else root.parent) / f"tfd-limit-{os.getpid()}"
    inner = outer / "inner"
    outer.mkdir()
    try:
        limit = outer / ("memory.limit_in_bytes" if version_1 else "memory.max")
        limit.write_text(str(2_500_000_000))
        if version_1:
            (outer / "memory.use_hierarchy").write_text("1")
        inner.mkdir()
        completed = subprocess.run(
            [sys.executable, "-c", SHUFFLE, inner], capture_output=True, text=True, timeout=160
        )
        assert completed.returncode == 0, completed.stderr[-3000:]
    finally:
        if inner.exists():
            inner.rmdir()
        outer.rmdir()
    message, what, fix, notices, count, codes = json.loads(completed.stdout.split("result ")[1])
    for text in (message, what, notices[0]):
        assert "data_worker:0" in text
        assert f"2.50 GB, was reached (peak 2.50 GB, {outer})" in text
        assert "restart" not in text
    for text in (what, notices[0]):
        assert "The likely cause is shuffle(4000)" in text
        assert "it holds 4,000 elements, 4 GB" in text
    assert "raise the limit" in fix
    assert count == 4_000
    assert "TFD854" not in codes
