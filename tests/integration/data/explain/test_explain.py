"""Bottlenecks of real pipelines, each with a known cause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._stopping import stopping
from tests._waiting import until
from tfd_notebook._compat.tf_data.pipeline_model import stages_of
from tfd_notebook.data.bottleneck.usage import processors
from tfd_notebook.data.explain import experiments, measurement
from tfd_notebook.data.explain import explain as explanation
from tfd_notebook.data.explain.measurement import measure
from tfd_notebook.errors import PipelineError, StateError, UnknownName, UsageError

pytestmark = pytest.mark.integration

ENDLESS = 1 << 40
Range = tf.data.Dataset.range


def heavy(number: Any) -> Any:
    """Spend some milliseconds. The random op keeps TensorFlow from running it in parallel."""
    return tf.cast(number, tf.float32) + 0 * tf.reduce_sum(tf.random.normal([600, 600]))


def in_python(number: Any) -> Any:
    total = 0
    for step in range(40_000):
        total += step & 3
    return np.int64(total)


class Clock:
    """The time in `explain`, which passes in two steps once it `runs`.

    At first, the measurement has just ended. After some readings by `explain`, it is `end`.
    """

    process_time = staticmethod(time.process_time)
    sleep = staticmethod(time.sleep)

    def __init__(self, measured: float, end: float) -> None:
        self.runs = False
        #: Set long after the end, so that a test does not wait without an end.
        self.released = threading.Event()
        self._measured, self._end = measured, end
        self._caller, self._readings = threading.get_ident(), 0

    def perf_counter(self) -> float:
        if not self.runs:
            return 0.0
        if threading.get_ident() == self._caller:
            self._readings += 1
        if self._readings > 200:
            self.released.set()
        return self._measured if self._readings < 30 else self._end

    monotonic = perf_counter


def process(cluster: tfd.Cluster, task: str) -> psutil.Process:
    """Return the process of a task."""
    row = cluster.snapshot().task(task)
    assert row is not None
    return psutil.Process(row.pid)


def slow_workers(cluster: tfd.Cluster) -> list[str]:
    """Return the tasks that the doctor reports as slow."""
    whats = [each.what for each in tfd.doctor(cluster) if each.code == "TFD856"]
    return [re.search(r"waits for (\S+), which", what)[1] for what in whats]  # type: ignore[index]


@pytest.fixture
def burners() -> Iterator[None]:
    """Processes that use all cores."""
    processes = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(2 * processors())
    ]
    yield
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def cluster() -> Iterator[tfd.Cluster]:
    with tfd.Cluster(data_workers=2, name="explain") as cluster:
        yield cluster


def test_element_after_the_end_counts_from_the_start() -> None:
    """Otherwise the measurement takes no time, and a rate in it is zero or enormous."""
    measured = measure(Range(ENDLESS), 0.0, warm_up=0.0)
    assert measured.elements >= 1
    assert measured.seconds >= measured.first
    assert measured.cpu < 1000


class TestStages:
    def test_stages_are_named_by_the_user_code(self) -> None:
        assert callable(tfd.explain)  # the first use records source locations from now on
        dataset = Range(9).shuffle(3).map(heavy).batch(2).prefetch(1)
        names = [stage.label for stage in stages_of(dataset).walk()]
        assert names == ["prefetch(1)", "batch(2)", "map(heavy)", "shuffle(3)", "range()"]
        sites = {stage.site for stage in stages_of(dataset).walk()}
        assert len(sites) == 1
        assert re.fullmatch(r"test_explain\.py:\d+", sites.pop())

    def test_stages_with_python_functions_are_marked(self) -> None:
        def wrapped(number: Any) -> Any:
            return tf.numpy_function(in_python, [number], tf.int64)

        def numbers() -> Iterator[int]:
            yield 1

        generated = tf.data.Dataset.from_generator(
            numbers, output_signature=tf.TensorSpec((), tf.int64)
        )
        stages = list(stages_of(generated.map(wrapped).map(lambda x: x + 1)).walk())
        assert [(s.label, s.python) for s in stages] == [
            ("map(lambda)", False),
            ("map(wrapped)", True),
            ("from_generator(numbers)", True),
        ]

    def test_stages_of_files_and_several_inputs_are_named(self, tmp_path: Path) -> None:
        file = str(tmp_path / "a.tfrecord")
        with tf.io.TFRecordWriter(file) as writer:
            writer.write(b"x")
        records = tf.data.TFRecordDataset([file])
        both = tf.data.Dataset.zip((records.repeat(), Range(5)))
        kinds = [stage.label for stage in stages_of(both).walk()]
        assert kinds[:3] == ["zip()", "repeat()", "TFRecordDataset()"]
        assert kinds[-1] == "range()"


class TestExperiments:
    def check(self, before: Any, after: Any) -> None:
        assert after is not None
        assert after.element_spec == before.element_spec
        assert list(after.as_numpy_iterator()) == list(before.as_numpy_iterator())

    def stage(self, dataset: Any, kind: str) -> Any:
        return next(stage for stage in stages_of(dataset).walk() if stage.kind == kind)

    def test_parallel_map_keeps_the_elements(self) -> None:
        dataset = Range(20).map(lambda x: x + 1).map(lambda x: x * 2).batch(3)
        for stage in stages_of(dataset).walk():
            if stage.kind == "Map":
                changed = experiments.parallel(dataset, stage)
                after = [batch.tolist() for batch in changed.as_numpy_iterator()]
                assert after == [batch.tolist() for batch in dataset.as_numpy_iterator()]

    def test_parallel_interleave_keeps_the_elements(self) -> None:
        spread = Range(4).interleave(lambda x: Range(x, x + 3), cycle_length=2).map(lambda x: x)
        self.check(spread, experiments.parallel(spread, self.stage(spread, "Interleave")))
        flat = Range(4).flat_map(lambda x: Range(x, x + 3))
        changed = experiments.parallel(flat, self.stage(flat, "FlatMap"))
        assert sorted(changed.as_numpy_iterator()) == sorted(flat.as_numpy_iterator())

    def test_smaller_shuffle_buffer_of_one_keeps_the_order(self) -> None:
        dataset = Range(50).shuffle(50, seed=1).map(lambda x: x)
        changed = experiments.smaller_buffer(dataset, self.stage(dataset, "Shuffle"), 1)
        assert list(changed.as_numpy_iterator()) == list(range(50))

    def test_stage_without_a_change_returns_none(self) -> None:
        dataset = Range(5).batch(2)
        assert experiments.parallel(dataset, self.stage(dataset, "Batch")) is None


class TestExplain:
    def test_slow_stage_has_advice_and_expected_gain(self) -> None:
        limit = tfd.explain(Range(ENDLESS).map(heavy).prefetch(2), seconds=4)
        assert limit.kind == "stage"
        assert limit.stage.startswith("map(heavy) (test_explain.py:")
        assert limit.share is not None
        assert limit.share > 0.7
        assert "num_parallel_calls" in limit.advice
        assert limit.expected_gain is not None
        assert limit.expected_gain > 1.1

    def test_python_function_under_the_gil_is_the_bottleneck(self) -> None:
        def wrapped(number: Any) -> Any:
            return tf.numpy_function(in_python, [number], tf.int64)

        dataset = Range(ENDLESS).map(wrapped, num_parallel_calls=2).batch(4)
        limit = tfd.explain(dataset, seconds=3)
        assert limit.kind == "python"
        assert limit.stage.startswith("map(wrapped)")
        assert "it would help" in limit.service

    def test_service_on_this_host_is_recommended_only_with_a_free_core(self, burners: None) -> None:
        def wrapped(number: Any) -> Any:
            return tf.numpy_function(in_python, [number], tf.int64)

        limit = tfd.explain(Range(ENDLESS).map(wrapped, num_parallel_calls=2), seconds=3)
        assert "no free core" in limit.advice
        assert limit.service == "it would help, with data workers on other hosts"

    def test_waiting_generator_is_a_slow_source(self) -> None:
        def slow() -> Iterator[int]:
            while True:
                time.sleep(0.01)
                yield 1

        dataset = tf.data.Dataset.from_generator(slow, output_signature=tf.TensorSpec((), tf.int64))
        limit = tfd.explain(dataset.map(lambda x: x + 1), seconds=2)
        assert limit.kind == "source"
        assert limit.stage.startswith("from_generator(slow)")

    def test_slow_consumer_and_met_target_are_detected(self) -> None:
        dataset = Range(ENDLESS).map(lambda x: x + 1).batch(4)
        limit = tfd.explain(dataset, seconds=2, step=lambda batch: time.sleep(0.02))
        assert limit.kind == "consumer"
        assert limit.expected_gain is not None
        assert limit.expected_gain > 2
        assert tfd.explain(dataset, seconds=1, step_time=0.02).kind == "none"

    def test_filling_shuffle_buffer_is_the_bottleneck(self) -> None:
        shuffled = Range(ENDLESS).map(heavy, num_parallel_calls=2).shuffle(1_000)
        limit = tfd.explain(shuffled, seconds=5)
        assert limit.kind == "stage"
        assert limit.stage.startswith("shuffle(1000)")

    def test_finite_dataset_is_repeated(self) -> None:
        limit = tfd.explain(Range(200).map(heavy), seconds=3)
        assert limit.figures["elements_per_s"] > 20
        assert limit.stage.startswith("map(heavy)")

    def test_source_without_elements_is_the_bottleneck(self) -> None:
        def never() -> Iterator[int]:
            time.sleep(3)
            yield from ()

        dataset = tf.data.Dataset.from_generator(
            never, output_signature=tf.TensorSpec((), tf.int64)
        )
        limit = tfd.explain(dataset, seconds=1)
        assert (limit.kind, limit.figures["elements_per_s"]) == ("source", 0)
        assert limit.stage.startswith("from_generator(never)")

    @pytest.mark.parametrize("step", [None, lambda element: None])
    @pytest.mark.parametrize("last", [lambda each: each, lambda each: each.batch(2)])
    def test_function_that_never_returns_is_named(self, last: Any, step: Any) -> None:
        released = threading.Event()

        def stuck(number: Any) -> Any:
            if number == 2:
                released.wait()
            return number

        dataset = last(Range(9).map(lambda n: tf.numpy_function(stuck, [n], tf.int64)))
        try:
            limit = tfd.explain(dataset, seconds=1, step=step)
            assert not released.is_set()
            assert limit.kind == "stage"
            assert limit.stage.startswith("map(")
            line = stuck.__code__.co_firstlineno + 2
            assert f"stuck (test_explain.py:{line}), which has not returned" in repr(limit)
        finally:
            released.set()

    @pytest.mark.parametrize("has_step", [False, True])
    @pytest.mark.parametrize("last", [lambda each: each, lambda each: each.batch(2)])
    def test_function_that_never_returns_does_not_delay_the_end(
        self, monkeypatch: pytest.MonkeyPatch, last: Any, has_step: bool
    ) -> None:
        clock = Clock(measured=400.2, end=1002.0)
        monkeypatch.setattr(measurement, "time", clock)
        monkeypatch.setattr(explanation, "time", clock)
        consumed: list[Any] = []

        def stuck(number: Any) -> Any:
            if number == 4:
                # The time of the first step does not count.
                until(lambda: not has_step or len(consumed) >= 2)
                clock.runs = True
                clock.released.wait(60)
            return number

        options = tf.data.Options()  # no element is requested before the one before it is used
        options.experimental_optimization.inject_prefetch = False
        dataset = last(Range(9).map(lambda n: tf.numpy_function(stuck, [n], tf.int64)))
        dataset = dataset.with_options(options)
        step = consumed.append if has_step else None
        try:
            limit = tfd.explain(dataset, seconds=1000, step=step)
            assert not clock.released.is_set(), "explain waits longer than its time and 2 s"
            assert "stuck (" in repr(limit)
        finally:
            clock.released.set()

    @pytest.mark.parametrize("last", [lambda each: each, lambda each: each.batch(2)])
    @pytest.mark.parametrize(
        ("apply", "stage", "text"),
        [
            (lambda each, endless: each.map(endless), "map(", "a loop without an end"),
            (lambda each, endless: each.map(endless, 2), "map(", "a loop without an end"),
            (
                lambda each, endless: each.flat_map(lambda x: Range(1).map(endless)),
                "flat_map(",
                "a loop without an end",
            ),
            (lambda each, endless: each.filter(lambda x: x < 0), "filter(", "accepted no element"),
        ],
        ids=["map", "parallel map", "flat_map", "filter"],
    )
    def test_stage_that_returns_no_element_is_named(
        self, apply: Any, stage: str, text: str, last: Any
    ) -> None:
        def endless(x: Any) -> Any:
            return tf.while_loop(lambda i: i >= 0, lambda i: (i + 1) % 9, [x])[0]

        limit = tfd.explain(last(apply(Range(ENDLESS), endless)), seconds=1)
        assert limit.stage.startswith(stage)
        assert text in limit.advice
        assert limit.service == ""

    @pytest.mark.parametrize("first", [0, 3])
    def test_function_of_a_data_worker_that_never_returns_is_reported(self, first: int) -> None:
        released = threading.Event()

        def stuck(number: Any) -> Any:
            if number >= first:
                released.wait()
            return number

        dataset = Range(9).map(lambda n: tf.numpy_function(stuck, [n], tf.int64))
        with tfd.Cluster(data_workers=1, launcher="inprocess", name="stuck") as inside:
            try:
                read = dataset.apply(inside.distribute("dynamic", semantics="tensorflow"))
                assert "stuck (" in repr(tfd.explain(read, seconds=2))
            finally:
                released.set()

    def test_function_of_another_pipeline_is_not_reported_as_the_cause(
        self, tmp_path: Path
    ) -> None:
        """It blocks a thread of the same data worker. Here the pipeline waits for a file."""
        entered, released = threading.Event(), threading.Event()
        file = tmp_path / "fifo"
        os.mkfifo(file)

        def stuck(number: Any) -> Any:
            entered.set()
            released.wait()
            return number

        earlier = Range(9).map(lambda n: tf.numpy_function(stuck, [n], tf.int64))
        lines = tf.data.TextLineDataset(str(file)).map(
            lambda line: tf.numpy_function(lambda each: each, [line], tf.string)
        )
        with tfd.Cluster(data_workers=1, launcher="inprocess", name="earlier") as inside:
            try:
                blocked = tfd.explain(earlier.apply(inside.distribute("off")), seconds=1)
                assert "stuck (" in blocked.advice
                assert entered.is_set()
                limit = tfd.explain(lines.apply(inside.distribute("off")), seconds=1)
                again = tfd.explain(earlier.apply(inside.distribute("off")), seconds=1)
            finally:
                released.set()
                file.write_text("last\n")
        assert "stuck (test_explain.py" in limit.advice
        assert "of another pipeline has not returned" in limit.advice
        assert "add a timeout" not in limit.advice
        assert again.advice == blocked.advice

    def test_stopped_data_worker_is_reported(self) -> None:
        with tfd.Cluster(data_workers=1, name="silent") as silent:
            read = Range(9).apply(silent.distribute("dynamic"))
            suspended = process(silent, "data_worker:0")
            suspended.suspend()
            try:
                limit = tfd.explain(read, seconds=1)
            finally:
                suspended.resume()
        assert limit.kind == "workers"
        assert "No element has arrived" in repr(limit)

    def test_explanation_of_a_blocked_function_is_interrupted(self) -> None:
        entered, released = threading.Event(), threading.Event()

        def stuck(number: Any) -> Any:
            entered.set()
            released.wait()
            return number

        def interrupt() -> None:
            entered.wait(60)
            signal.raise_signal(signal.SIGINT)

        dataset = Range(9).map(lambda n: tf.numpy_function(stuck, [n], tf.int64))
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                tfd.explain(dataset, seconds=1000)
        finally:
            released.set()
            thread.join()

    def test_empty_dataset_is_reported(self) -> None:
        limit = tfd.explain(Range(0), seconds=1)
        assert limit.figures["elements_per_s"] == 0
        assert "is empty" in repr(limit)

    def test_ragged_elements_and_disabled_autotuning_are_supported(self) -> None:
        ragged = Range(ENDLESS).map(lambda n: tf.ragged.range([n % 3, n % 5])).map(lambda r: r)
        assert (
            tfd.explain(ragged, seconds=4).figures["elements_per_s"] > 0
        )  # the seconds include tracing
        options = tf.data.Options()
        options.autotune.enabled = False
        limit = tfd.explain(
            Range(ENDLESS).map(heavy).with_options(options), seconds=1, step_time=0.001
        )
        assert limit.kind in ("none", "stage")  # without its model, TensorFlow reports few figures
        assert "keeps up" not in repr(limit)

    def test_generator_may_be_a_built_in_method(self) -> None:
        dataset = tf.data.Dataset.from_generator(
            {1: 2, 3: 4}.values, output_signature=tf.TensorSpec((), tf.int64)
        )
        assert tfd.explain(dataset.repeat(), seconds=1).figures["elements_per_s"] > 0

    def test_compilation_of_the_first_step_does_not_count(self) -> None:
        calls = []

        def step(batch: Any) -> None:
            time.sleep(0.05 if calls else 1.5)
            calls.append(batch)

        assert tfd.explain(Range(ENDLESS).batch(4), seconds=3, step=step).kind == "consumer"

    def test_error_of_the_pipeline_is_raised(self) -> None:
        dataset = Range(9).map(
            lambda x: tf.debugging.check_numerics(1 / tf.cast(x - 5, tf.float32), "five")
        )
        with pytest.raises(PipelineError, match="five"):
            tfd.explain(dataset, seconds=1)

    @pytest.mark.parametrize(
        ("options", "what"),
        [
            ({"seconds": 0}, "more than 0"),
            ({"step_time": -1.0}, "0 or more"),
            ({"step": 0.05}, "step_time="),
            ({"step_time": 1.0, "step": print}, "step and step_time"),
        ],
    )
    def test_invalid_arguments_are_refused(self, options: dict[str, Any], what: str) -> None:
        with pytest.raises(UsageError, match=what):
            tfd.explain(Range(5), **options)

    def test_values_other_than_datasets_are_refused(self) -> None:
        with pytest.raises(UsageError, match="got list"):
            tfd.explain([1, 2])


class TestThroughACluster:
    def test_transfer_of_small_elements_is_the_bottleneck(self, cluster: tfd.Cluster) -> None:
        dataset = Range(ENDLESS).map(lambda x: x * 2).apply(cluster.distribute("off"))
        limit = tfd.explain(dataset, seconds=5)
        assert limit.kind == "transfer"
        assert "batch() before distribute" in limit.advice
        assert limit.expected_gain is not None
        assert limit.expected_gain > 1.5
        assert "not worth it here" in limit.service

    def test_slow_workers_are_the_bottleneck_despite_a_later_batch(
        self, cluster: tfd.Cluster
    ) -> None:
        dataset = Range(ENDLESS).map(heavy).apply(cluster.distribute("off")).batch(8)
        limit = tfd.explain(dataset, seconds=3)
        assert limit.kind == "workers"
        assert "not worth it" not in repr(limit)

    def test_slow_stage_after_the_service_is_the_bottleneck(self, cluster: tfd.Cluster) -> None:
        dataset = (
            Range(ENDLESS)
            .batch(64)
            .apply(cluster.distribute("off"))
            .map(lambda x: heavy(tf.reduce_sum(x)))
        )
        limit = tfd.explain(dataset, seconds=4)
        assert (limit.kind, limit.stage.split(" ")[0]) == ("stage", "map(lambda)")

    def test_running_stream_has_a_bottleneck_and_a_forecast(self, cluster: tfd.Cluster) -> None:
        dataset = Range(ENDLESS).map(heavy).batch(2).apply(cluster.distribute("off"))
        with cluster.stream(dataset, name="live").start() as stream:

            def shown() -> str:
                rows = {row.name: row for row in cluster.snapshot().streams}
                return rows["live"].limit if "live" in rows else ""

            until(shown)
            limit = stream.limit
            assert limit.kind == "workers"
            assert limit.figures["elements_per_s"] > 0
            # The limit may change between two reads.
            until(lambda: cluster.limit.kind == stream.limit.kind)
            until(lambda: shown() == stream.limit.sentence())
            assert {task.limit.kind for task in cluster.tasks} <= {"workers", "none"}
            now, predicted = cluster.what_if(4).records()
            assert now["data_workers"] == 2
            assert predicted["low"] <= predicted["elements_per_s"] <= predicted["high"]
            assert predicted["data_workers"] == 4
            assert tfd.compare(limit, stream).gain > 0

    def test_source_with_one_split_gets_no_advice_to_scale(self, cluster: tfd.Cluster) -> None:
        """One generator is read by one data worker, several generators by both."""

        def slow(_: int = 0) -> Iterator[int]:
            for number in range(10_000):
                time.sleep(0.05)
                yield number

        def generator(*args: Any) -> Any:
            signature = tf.TensorSpec((), tf.int64)
            return tf.data.Dataset.from_generator(slow, output_signature=signature, args=args)

        def advised(dataset: Any, name: str) -> tuple[str, str, str]:
            read = dataset.apply(cluster.distribute("dynamic"))
            with cluster.stream(read, name=name).start() as stream:
                until(lambda: stream.limit.kind == "workers")
                live, table = stream.limit.advice, cluster.what_if(4)
                because = table.records()[-1]["because"]
            return live, f"{because}: {table}", tfd.explain(read, seconds=3).advice

        for text in advised(generator(), "single"):
            assert "More data workers cannot help: from_generator(slow)" in text
            assert "has one split" in text
            assert "interleave" in text
            assert "scale(" not in text
        several = Range(100).interleave(lambda i: generator(i), cycle_length=1)
        for text in advised(several, "several"):
            assert "cannot help" not in text
            assert "splits" not in text

    def test_single_file_gets_no_advice_to_scale(
        self, cluster: tfd.Cluster, tmp_path: Path
    ) -> None:
        files = [str(tmp_path / f"{name}.tfrecord") for name in "abc"]
        for file in files:
            with tf.io.TFRecordWriter(file) as writer:
                for _ in range(2_000):
                    writer.write(b"x")

        def wait(record: Any) -> Any:
            time.sleep(0.05)
            return record

        def advised(names: list[str]) -> str:
            records = tf.data.TFRecordDataset(names)
            slow = records.map(lambda x: tf.numpy_function(wait, [x], tf.string))
            limit = tfd.explain(slow.apply(cluster.distribute("dynamic")), seconds=3)
            assert limit.kind == "workers"
            return limit.advice

        advice = advised(files[:1])
        assert "More data workers cannot help: TFRecordDataset()" in advice
        assert "several files" in advice
        assert "cannot help" not in advised(files)

    def test_advice_counts_cores_used_by_other_processes(
        self, cluster: tfd.Cluster, burners: None
    ) -> None:
        computing = Range(ENDLESS).map(lambda x: tf.numpy_function(in_python, [x], tf.int64))
        with cluster.stream(computing.apply(cluster.distribute("off"))).start() as stream:
            until(lambda: stream.limit.advice.endswith("all cores are busy"))

    def test_slow_worker_of_coordinated_reads_is_named(self, tmp_path: Path) -> None:
        """It sleeps twice as long, so all workers send the same and use the same processor time."""
        marks = str(tmp_path)

        def wait(number: Any) -> Any:
            time.sleep(0.04 if os.path.exists(f"{marks}/{os.getpid()}") else 0.02)
            return number

        def wrapped(number: Any) -> Any:
            number = tf.ensure_shape(tf.numpy_function(wait, [number], tf.int64), ())
            return tf.zeros([1_000], tf.int64) + number

        with tfd.Cluster(data_workers=3, name="rounds") as cluster:
            endless = Range(ENDLESS).map(wrapped).repeat()
            streams = [
                cluster.stream(
                    endless.apply(
                        cluster.distribute(
                            "off", job_name="rounds", consumer_index=i, num_consumers=2
                        )
                    )
                )
                for i in range(2)
            ]
            slow = tmp_path / str(cluster.snapshot().task("data_worker:1").pid)  # type: ignore[union-attr]
            slow.touch()
            for stream in streams:
                stream.start()
            named = set()

            def stage() -> str:
                named.add(streams[0].limit.stage)
                return streams[0].limit.stage

            until(lambda: stage() == "data_worker:1")
            until(
                lambda: (
                    [t.name for t in cluster.tasks if t.limit.kind == "workers"]
                    == ["data_worker:1"]
                ),
                30,
            )
            assert named <= {"", "data_worker:1"}
            assert "data_worker:1" in streams[0].limit.advice
            slow.unlink()
            # After the repair, the figures of five seconds name no worker.
            name = streams[0].name
            before = len(cluster.limits(name))
            until(lambda: len(cluster.limits(name)) >= before + 3, 60)
            assert cluster.limits(name)[-1][1].stage == ""
            for stream in streams:
                stream.stop()

    def test_worker_that_stops_again_and_again_is_named(self) -> None:
        """It sends as much as the others, which serve their rounds at once and wait for it."""
        with tfd.Cluster(data_workers=3, name="stops") as cluster:
            numbers = Range(ENDLESS).map(lambda x: x + tf.zeros([1_000], tf.int64)).repeat()
            options = {"job_name": "stops", "num_consumers": 2}
            streams = [
                cluster.stream(
                    numbers.apply(cluster.distribute("off", consumer_index=index, **options))
                ).start()
                for index in range(2)
            ]
            streams[0].wait(elements=1, timeout=60)
            with stopping(process(cluster, "data_worker:1")):
                until(lambda: streams[0].limit.stage == "data_worker:1")
                assert "replace data_worker:1" in streams[0].limit.advice
                until(lambda: slow_workers(cluster) == ["data_worker:1"])

    def test_worker_of_mode_off_that_stops_again_and_again_is_named(self) -> None:
        """All workers are busy all the time, and too few rates are measured in five seconds."""

        def wait(number: Any) -> Any:
            time.sleep(0.01)
            return number

        with tfd.Cluster(data_workers=3, name="halts") as cluster:
            waiting = Range(ENDLESS).map(lambda x: tf.numpy_function(wait, [x], tf.int64))
            read = waiting.batch(8).apply(cluster.distribute("off"))
            with stopping(process(cluster, "data_worker:1")):
                limit = tfd.explain(read, seconds=5)
                assert (limit.kind, limit.stage) == ("workers", "data_worker:1"), limit
                assert "scale(" not in limit.advice
                with cluster.stream(read, name="halts").start() as stream:
                    until(lambda: stream.limit.stage == "data_worker:1")
                    table = cluster.what_if(2, 12)
            fewer, now, more = table.records()
            assert fewer["because"] == "workers"
            assert now["because"] == more["because"] == "slow_worker"
            assert more["elements_per_s"] == now["elements_per_s"]
            cause = "More data workers cannot help: the consumer waits for data_worker:1"
            assert cause in " ".join(str(table).split())

    def test_missing_consumer_of_coordinated_reads_is_named(self) -> None:
        with tfd.Cluster(data_workers=2, name="missing") as cluster:
            numbers = Range(ENDLESS).repeat()

            def read(index: int, job_name: str = "pair") -> Any:
                options = {"consumer_index": index, "num_consumers": 2, "job_name": job_name}
                return numbers.apply(cluster.distribute("off", **options))

            first, second = (cluster.stream(read(index)) for index in range(2))
            text = "reads with consumer_index=0, but not with consumer_index=1"
            with first.start():
                until(lambda: text in first.limit.advice)
                assert "job 'pair'" in first.limit.advice
                until(lambda: any(text in str(each) for each in cluster.snapshot().notices))
                findings = tfd.doctor(cluster)
                (finding,) = [f for f in findings if f.code == "TFD819"]
                assert "1 open pass, journal" in findings.checked[0]
                assert text in finding.fix
                with second.start():
                    first.wait(elements=1, timeout=60)
                    until(lambda: first.limit.figures["elements_per_s"] > 0)
                    assert "consumers" not in first.limit.advice
                    assert not [f for f in tfd.doctor() if f.code == "TFD819"]
                    second.pause()
                    until(lambda: text in first.limit.advice)
            limit = tfd.explain(read(0, "alone"), seconds=2)
            assert text in limit.advice
            assert "job 'alone'" in limit.advice

    def test_slow_loop_is_the_bottleneck(self, cluster: tfd.Cluster) -> None:
        dataset = Range(ENDLESS).batch(2).apply(cluster.distribute("off"))
        live = None
        deadline = time.monotonic() + 60
        for _ in cluster.observe(dataset, name="loop"):
            time.sleep(0.02)
            live = cluster.limit
            if live.kind == "consumer":
                break
            assert time.monotonic() < deadline
        assert live is not None
        assert live.share is not None
        assert live.share > 0.8

    def test_comparison_needs_measured_datasets(self, cluster: tfd.Cluster) -> None:
        dataset = Range(5).apply(cluster.distribute("dynamic"))
        with pytest.raises(UsageError, match="it has no limit"):
            tfd.compare(dataset, dataset)  # type: ignore[arg-type]

    def test_idle_cluster_has_no_bottleneck(self) -> None:
        with tfd.Cluster(name="idle") as idle:
            assert idle.limit.kind == "none"
            with pytest.raises(StateError, match="no consumer reads"):
                idle.what_if(2)
            assert idle.limits() == ()
            with pytest.raises(UnknownName, match="unknown consumer 'train'"):
                idle.limits("train")
            assert len(idle.jobs()) == 0


class TestAccounting:
    def test_repeated_deliveries_of_mode_off_are_reported(self, cluster: tfd.Cluster) -> None:
        dataset = Range(50).apply(cluster.distribute("off"))
        assert len(list(cluster.observe(dataset, name="twice"))) == 100
        row = next(row for row in cluster.snapshot().streams if row.name == "twice")
        assert "delivered 100 elements of a dataset of 50" in row.epoch
        assert "each of the 2 data workers" in row.epoch

    def test_epochs_are_counted_through_one_to_one_stages(self, cluster: tfd.Cluster) -> None:
        dataset = Range(50).apply(cluster.distribute("off", job_name="shared-job"))
        behind = {
            "one-to-one": dataset.map(lambda x: x + 1).prefetch(2),
            "batched": dataset.batch(7),
        }
        epochs = {}
        for name, each in behind.items():
            list(cluster.observe(each, name=name))
            row = next(row for row in cluster.snapshot().streams if row.name == name)
            assert row.job == "shared-job"
            epochs[name] = row.epoch
        assert "delivered 100 elements of a dataset of 50" in epochs["one-to-one"]
        assert epochs["batched"] == ""

    def test_epochs_of_a_registered_dataset_are_counted(self, cluster: tfd.Cluster) -> None:
        known = cluster.register(Range(20))
        dataset = cluster.from_dataset_id("off", known, job_name="by-id")
        assert len(list(dataset)) == 40
        row = next(row for row in cluster.snapshot().streams if row.job == "by-id")
        assert "40 elements of a dataset of 20" in row.epoch
        assert tfd.explain(cluster.from_dataset_id("off", known), 2.0).kind in (
            "none",
            "workers",
            "transfer",
        )

    def test_unfinished_epoch_is_not_reported(self, cluster: tfd.Cluster) -> None:
        dataset = cluster.observe(Range(50).apply(cluster.distribute("dynamic")), name="half")
        iterator = iter(dataset)
        for _ in range(10):
            next(iterator)
        del iterator
        row = next(row for row in cluster.snapshot().streams if row.name == "half")
        assert row.epoch == ""

    def test_dropped_remainder_of_batches_is_not_reported(self, cluster: tfd.Cluster) -> None:
        dataset = Range(1_000).batch(32, drop_remainder=True)
        with pytest.warns(UserWarning, match="drops its incomplete last batch"):
            dataset = dataset.apply(cluster.distribute("dynamic"))
        list(cluster.observe(dataset, name="batched"))
        row = next(row for row in cluster.snapshot().streams if row.name == "batched")
        assert row.epoch == ""

    def test_complete_epoch_is_not_reported(self, cluster: tfd.Cluster) -> None:
        dataset = Range(50).apply(cluster.distribute("dynamic"))
        assert len(list(cluster.observe(dataset, name="once"))) == 50
        row = next(row for row in cluster.snapshot().streams if row.name == "once")
        assert row.epoch == ""

    def test_jobs_list_their_readers(self, cluster: tfd.Cluster) -> None:
        both = [
            Range(ENDLESS).apply(cluster.distribute("dynamic", job_name="shared")) for _ in range(2)
        ]
        streams = [
            cluster.stream(dataset, name=f"reader-{number}").start()
            for number, dataset in enumerate(both)
        ]
        for stream in streams:
            stream.wait(elements=20, timeout=60)
        job = next(row for row in cluster.jobs().records() if row["job"] == "shared")
        assert (job["mode"], job["pass"], job["state"]) == ("dynamic", 1, "running")
        assert job["readers"] == 2
        assert job["read_here_by"] == "reader-0, reader-1"
        assert job["splits"] >= 40
        assert job["splits_total"] == ENDLESS
        assert job["workers_done"] == "0 of 2"
        for stream in streams:
            stream.stop()

    def test_jobs_show_the_progress_of_an_epoch(self, cluster: tfd.Cluster) -> None:
        files = tf.data.Dataset.from_tensor_slices(np.arange(30)).concatenate(Range(10))
        dataset = files.batch(4).apply(cluster.distribute("dynamic", job_name="far"))
        assert len(list(dataset)) >= 10
        jobs = cluster.jobs()
        job = next(row for row in jobs.records() if row["job"] == "far")
        assert (job["splits"], job["splits_total"]) == (40, 40)
        assert "40 of 40 (100%)" in str(jobs)

    def test_repeated_source_has_no_total_of_splits(self, cluster: tfd.Cluster) -> None:
        dataset = Range(4).repeat(3).apply(cluster.distribute("dynamic", job_name="again"))
        assert len(list(dataset)) == 12
        job = next(row for row in cluster.jobs().records() if row["job"] == "again")
        assert job["splits_total"] is None

    def test_jobs_need_a_journal(self) -> None:
        service = tfd.Service(fault_tolerant=False)
        with tfd.Cluster(name="plain", service=service) as plain, pytest.raises(StateError):
            plain.jobs()
