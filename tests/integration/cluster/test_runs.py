"""`Cluster.run`: functions in new processes next to the training workers."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

import tfd_notebook as tfd
from tests._waiting import until
from tests.integration._kernel import Notebook
from tfd_notebook import views
from tfd_notebook.errors import (
    RankFailed,
    RankLost,
    StateError,
    TimeLimit,
    Unsupported,
    UsageError,
)
from tfd_notebook.launchers.client.agent_host import AgentTaskHost

pytestmark = pytest.mark.integration

TESTS = Path(__file__).parents[2]
PROGRAM = TESTS / "spark" / "programs" / "digits_spark.py"
DOCS = TESTS.parent / "docs" / "coordinator.md"


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> Iterator[None]:
    """Send the functions of this module like those of a notebook."""
    import sys

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def cluster() -> Iterator[tfd.Cluster]:
    policy = tfd.Policy(restarts=1)
    with tfd.Cluster(workers=2, name="ranks", policy=policy) as cluster:
        yield cluster


def all_reduce(value: float, ctx: Any) -> Any:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def total() -> Any:
        return strategy.run(
            lambda: tf.distribute.get_replica_context().all_reduce(
                tf.distribute.ReduceOp.SUM, tf.constant(value + ctx.worker_num)
            )
        )

    return total()


def train(directory: str, marker: str | None = None) -> Any:
    """Train with Keras 2. The first process of rank 1 is killed after its first epoch."""
    import json

    import tensorflow as tf
    import tf_keras

    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]

    class Kill(tf_keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            print("epoch", epoch, flush=True)
            if epoch == 2 and rank == 1 and marker is not None and not os.path.exists(marker):
                open(marker, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    backup = tf_keras.callbacks.BackupAndRestore(directory)
    data = tf.data.Dataset.from_tensors((tf.ones((4, 3)), tf.ones((4, 1)))).repeat(8).batch(2)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    fitted = model.fit(
        data.unbatch().with_options(options), epochs=4, verbose=0, callbacks=[backup, Kill()]
    )
    return fitted.history["loss"]


class TestResults:
    def test_strategy_of_several_workers_needs_no_argument(self, cluster: tfd.Cluster) -> None:
        assert cluster.run(all_reduce, 1.0) == [3.0, 3.0]

    def test_function_for_tfcluster_runs_unchanged(self, cluster: tfd.Cluster) -> None:
        def map_fun(args: Any, ctx: Any) -> Any:
            path = ctx.absolute_path("data")
            return args["n"], ctx.job_name, ctx.task_index, ctx.num_workers, path

        results = cluster.run(map_fun, {"n": 5})
        assert [result[:4] for result in results] == [(5, "worker", 0, 2), (5, "worker", 1, 2)]
        assert results[0][4] == "file:" + f"//{os.getcwd()}/data"

    def test_port_is_released_for_the_server_of_a_strategy(self, cluster: tfd.Cluster) -> None:
        def map_fun(args: Any, ctx: Any) -> Any:
            ctx.release_port()
            total = all_reduce(args, ctx)
            return total, ctx.port, ctx.cluster_spec[ctx.job_name][ctx.task_index], ctx.tmp_socket

        for total, port, address, reserved in cluster.run(map_fun, 1.0):
            assert total == 3.0
            assert address.endswith(f":{port}")
            assert reserved is None

    def test_feed_without_spark_is_an_error(self, cluster: tfd.Cluster) -> None:
        def by_context(args: Any, ctx: Any) -> None:
            ctx.get_data_feed()

        def by_queues(args: Any, ctx: Any) -> None:
            from tfd_notebook.spark import TFNode

            TFNode.DataFeed(ctx.mgr, True)

        for function in (by_context, by_queues):
            with pytest.raises(RankFailed, match="feeds no rows to the function"):
                cluster.run(function, None)

    def test_program_for_spark_runs_unchanged(self, cluster: tfd.Cluster, tmp_path: Path) -> None:
        """Its inference reads no rows. The model predicts 0 for each image."""
        program = runpy.run_path(str(PROGRAM), run_name="digits_spark")
        images = tf.TensorSpec([None, 64], tf.float32)
        model = tf.Module()
        model.serve = tf.function(
            lambda images: {"logits": tf.one_hot(tf.zeros(len(images), tf.int32), 10)},
            input_signature=[images],
        )
        tf.saved_model.save(model, str(tmp_path / "model"), {"serving_default": model.serve})
        args = argparse.Namespace(
            export_dir=str(tmp_path / "model"), output=str(tmp_path / "right")
        )
        assert cluster.run(program["inference"], args) == [None, None]
        labels = load_digits(return_X_y=True)[1]
        for rank in range(2):
            right = float((tmp_path / f"right-{rank}").read_text())
            assert right == float(np.mean(labels[rank::2] == 0))

    def test_values_of_all_kinds_are_returned(self, cluster: tfd.Cluster) -> None:
        def values() -> Any:
            import tensorflow as tf

            array = np.arange(6, dtype=np.int16).reshape(2, 3)
            return [
                None,
                True,
                2**70,
                float("inf"),
                b"\x00",
                {"a": (1, "ü")},
                {3},
                array,
            ], tf.constant(["x"])

        for first, text in cluster.run(values):
            assert first[:7] == [None, True, 2**70, float("inf"), b"\x00", {"a": (1, "ü")}, {3}]
            assert first[7].dtype == np.int16
            assert first[7].tolist() == [[0, 1, 2], [3, 4, 5]]
            assert text == [b"x"]

    def test_output_is_shown_with_its_rank(
        self, cluster: tfd.Cluster, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def speak(ctx: Any) -> None:
            print("first\nfrom", ctx.worker_num, end="")

        assert cluster.run(speak) == [None, None]
        lines = capsys.readouterr().out.splitlines()
        for rank in range(2):
            assert [x for x in lines if x.startswith(f"[{rank}]")] == [
                f"[{rank}] first",
                f"[{rank}] from {rank}",
            ]

    def test_each_run_has_new_processes_and_a_row_for_each(self, cluster: tfd.Cluster) -> None:
        first, second = cluster.run(os.getpid), cluster.run(os.getpid)
        assert len({*first, *second}) == 4
        snapshot = cluster.snapshot()
        assert [(row.task, row.state, row.function) for row in snapshot.ranks] == [
            ("worker:0", "finished", "getpid"),
            ("worker:1", "finished", "getpid"),
        ]
        assert re.search(r"0  ✓ finished +getpid +worker:0", views.text(snapshot))

    def test_examples_of_the_documentation_train(
        self, cluster: tfd.Cluster, tmp_path: Path
    ) -> None:
        section = DOCS.read_text().partition("## Functions on every worker")[2]
        names: dict[str, Any] = {"__name__": "examples"}
        for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
            exec(block.partition("\n\nwith tfd.Cluster")[0], names)
        first, last = cluster.run(names["train"], 1), cluster.run(names["train"], 50)
        assert len({*first}) == len({*last}) == 1
        assert last[0] < first[0]
        losses, others = cluster.run(names["fit"], str(tmp_path), timeout=150)
        assert losses == others
        assert losses[-1] < losses[0]


class TestErrors:
    def test_first_error_has_its_rank_and_traceback(self, cluster: tfd.Cluster) -> None:
        def fail(ctx: Any) -> None:
            if ctx.worker_num == 1:
                raise ValueError("wrong shape")
            time.sleep(600)

        with pytest.raises(
            RankFailed, match=r"rank 1 \(worker:1\) on localhost: ValueError: wrong"
        ):
            cluster.run(fail)
        assert [row.state for row in cluster.snapshot().ranks] == ["stopped", "failed"]

    def test_timeout_ends_output_without_end(
        self, cluster: tfd.Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def endless(self: Any, task: str, size: int, offset: int, **_: Any) -> tuple[str, int]:
            return "x" * size, 0

        monkeypatch.setattr(AgentTaskHost, "rank_output", endless)
        with pytest.raises(TimeLimit, match="rank 0, rank 1"):
            cluster.run(time.sleep, 600, timeout=1)

    def test_timeout_and_ctrl_c_end_all_processes(
        self, cluster: tfd.Cluster, tmp_path: Path
    ) -> None:
        def block(ctx: Any) -> None:
            (tmp_path / str(ctx.worker_num)).write_text(str(os.getpid()))
            time.sleep(600)

        def pids() -> list[int]:
            return [int(path.read_text() or 0) for path in tmp_path.iterdir()]

        with pytest.raises(TimeLimit, match="rank 0, rank 1"):
            cluster.run(time.sleep, 600, timeout=1)
        assert [row.state for row in cluster.snapshot().ranks] == ["stopped", "stopped"]

        def interrupt() -> None:
            until(lambda: len(pids()) == 2 and all(pids()), 60)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            cluster.run(block)
        thread.join()
        assert not [pid for pid in pids() if os.path.exists(f"/proc/{pid}")]
        assert cluster.run(lambda: 1) == [1, 1]

    def test_run_continues_from_a_backup_after_a_lost_process(
        self, cluster: tfd.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        losses = cluster.run(train, str(tmp_path), str(tmp_path / "killed"), timeout=150)
        assert losses[0] == losses[1]
        assert len(losses[0]) < 4  # it did not repeat the first epochs
        assert (tmp_path / "killed").exists()
        assert [row.attempt for row in cluster.snapshot().ranks] == [2, 2]
        assert any("all ranks start again" in notice.what for notice in cluster.snapshot().notices)

    def test_process_that_is_lost_too_often_is_an_error(self, cluster: tfd.Cluster) -> None:
        def die() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        with pytest.raises(RankLost, match=r"killed by signal 9(?s:.*)all 1 restarts"):
            cluster.run(die)

    def test_unusable_results_and_functions_are_named(self, cluster: tfd.Cluster) -> None:
        with pytest.raises(RankFailed, match="a result of type lock cannot be returned"):
            cluster.run(threading.Lock)
        with pytest.raises(RankFailed, match="the result has at least 11 MB, the limit is 8 MB"):
            cluster.run(lambda: b"x" * 8_000_000)
        with pytest.raises(RankFailed, match="the result has at least 4000 MB"):
            # A copy of the array would take 3 GB for each rank.
            cluster.run(lambda: np.broadcast_to(np.int8(0), (3_000_000_000,)))

        def fail() -> None:
            raise ValueError("x" * 100_000_000)

        with pytest.raises(RankFailed, match="ValueError: xx") as caught:
            cluster.run(fail)
        assert len(str(caught.value)) < 50_000
        with pytest.raises(UsageError, match="cannot be sent to the workers"):
            cluster.run(lambda lock: None, threading.Lock())
        with pytest.raises(UsageError, match="expected a callable"):
            cluster.run(5)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="timeout"):
            cluster.run(os.getpid, timeout=-1)

    def test_keras_3_is_refused(self, cluster: tfd.Cluster) -> None:
        def fit() -> None:
            import keras
            import tensorflow as tf

            with tf.distribute.MultiWorkerMirroredStrategy().scope():
                model = keras.Sequential([keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)

        with pytest.raises(RankFailed, match="Keras 3 does not support MultiWorkerMirrored"):
            cluster.run(fit)

    def test_cluster_without_workers_or_in_use_is_an_error(self, cluster: tfd.Cluster) -> None:
        with (
            tfd.Cluster(data_workers=1, name="data", launcher="fake") as data,
            pytest.raises(StateError, match="has no training worker"),
        ):
            data.run(os.getpid)
        with (
            tfd.Cluster(workers=1, name="simulated", launcher="fake") as fake,
            pytest.raises(Unsupported, match="functions cannot run"),
        ):
            fake.run(os.getpid)
        thread = threading.Thread(target=lambda: cluster.run(time.sleep, 3))
        thread.start()
        until(lambda: cluster.snapshot().ranks[0].state == "running")
        row = cluster.snapshot().ranks[0]
        assert row.started is not None
        assert row.ended is None
        with pytest.raises(StateError, match="already runs a function"):
            cluster.run(os.getpid)
        thread.join()
        row = cluster.snapshot().ranks[0]
        assert row.started is not None
        assert row.ended is not None
        assert row.ended - row.started >= 3


def test_functions_run_next_to_a_kernel_with_workers() -> None:
    with Notebook() as notebook:  # TensorFlow cannot stop the workers of a process
        notebook.run("import tfd_notebook as tfd\nimport os", timeout=150)
        notebook.run("inside = tfd.Cluster(workers=2, launcher='inprocess', name='inside')")
        notebook.run(
            "def report(ctx):\n    print('rank', ctx.worker_num)\n    return os.getpid()\n"
            "lines = []\n"
            "pids = inside.run(report, output=lambda rank, text: lines.append((rank, text)))"
        )
        output = notebook.run("sorted(lines), len({*pids, os.getpid()})")
        assert "([(0, 'rank 0'), (1, 'rank 1')], 3)" in output
        assert "[2, 2]" in notebook.run("inside.run(len, 'ab')")
        assert "invalid output 1: expected a callable" in notebook.run("inside.run(len, output=1)")
        notebook.run("inside.stop()")


def test_cell_runs_on_all_workers() -> None:
    with Notebook() as notebook:
        notebook.run("import tfd_notebook as tfd\n%load_ext tfd_notebook\nfactor = 10", timeout=150)
        notebook.run("cluster = tfd.Cluster(workers=2, name='cells')")
        output = notebook.run(
            "%%tfd_run --timeout 100\nimport json, os\n"
            "rank = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
            "print('rank', rank)\nfactor * rank"
        )
        assert "[1] rank 1" in output
        assert "[0, 10]" in output
        notebook.run(
            "import tensorflow as tf\n@tf.function\ndef count(n):\n"
            "    i = 0\n    while i < n:\n        i += 1\n    return i"
        )
        output = notebook.run("%%tfd_run\nint(count(tf.constant(5)))")
        assert "[5, 5]" in output  # AutoGraph has its source
        folded = notebook.run("%%tfd_run --fold\nprint('<b>')\n1")
        assert "[1] <b>" in folded
        assert "[1, 1]" in folded
        pages = notebook.run(
            "from IPython.utils.capture import capture_output\n"
            "with capture_output() as captured:\n"
            "    get_ipython().run_cell_magic('tfd_run', '--fold', 'print(\"<b>\" * 30_000)')\n"
            "begin, end = [output.data for output in captured.outputs]\n"
            "begin['text/html'], end['text/html'].count('<details'), '<b>' in end['text/html'], "
            "len(end['text/plain']), 'application/vnd.jupyter.widget-view+json' in end"
        )
        assert "('', 2, False, 100007, True)" in pages
        assert "[4, 4]" in notebook.run("size, text = len, 'four'\n%tfd_run size --args text")
        notebook.run("cluster.stop()")
