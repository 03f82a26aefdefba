"""Promises of docs/spark.md, in the cells of a notebook with two executors on this host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration._kernel import Kernel

pytestmark = pytest.mark.integration

SETUP = """
import tfd_notebook as tfd
from tfd_notebook.spark import TFCluster

spark = tfd.spark.session(executors=2)
sc = spark.sparkContext
MODE = TFCluster.InputMode.SPARK
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as kernel:
        assert "Error" not in kernel.run(SETUP)
        yield kernel


def test_all_rows_arrive_once_in_each_epoch(kernel: Kernel, tmp_path: Path) -> None:
    output = kernel.run(f"""
def read(directory, ctx):
    feed = ctx.get_data_feed()
    with open(f"{{directory}}/{{ctx.job_name}}-{{ctx.task_index}}", "w") as file:
        while not feed.should_stop():
            for row in feed.next_batch(7):
                print(row, file=file)

cluster = TFCluster.run(spark, read, {str(tmp_path)!r}, 2, input_mode=MODE)
cluster.train(sc.parallelize(range(1000), 4), num_epochs=2)
cluster.shutdown(timeout=90)
print("phase", cluster.phase, [row.state for row in cluster.snapshot().spark.nodes])
""")
    assert "phase stopped ['finished', 'finished']" in output
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["worker-0", "worker-1"]
    rows = Counter(int(line) for file in files for line in file.read_text().split())
    assert rows == Counter(dict.fromkeys(range(1000), 2))


def test_error_of_a_node_is_raised_with_its_traceback(kernel: Kernel) -> None:
    output = kernel.run("""
def fail(args, ctx):
    feed = ctx.get_data_feed()
    feed.next_batch(10)
    if ctx.task_index == 1:
        raise RuntimeError("NaN in the loss")
    while not feed.should_stop():
        feed.next_batch(10)

cluster = TFCluster.run(spark, fail, None, 2, input_mode=MODE)
try:
    cluster.train(sc.parallelize(range(10**6), 8), num_epochs=1000)
except tfd.errors.NodeFailed as error:
    print(error)
    print("task", error.task, cluster.phase, sc.parallelize(range(4), 2).sum())
""")
    assert "Traceback (most recent call last)" in output
    assert "in fail" in output
    assert "RuntimeError: NaN in the loss" in output
    assert "task worker:1 failed 6" in output
