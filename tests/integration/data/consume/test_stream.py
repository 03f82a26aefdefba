"""Streams in background threads, from a real service and from local pipelines."""

import functools
import threading
import time

import pytest
import tensorflow as tf

from tests._waiting import until
from tests.integration._service import Service
from tfd_notebook import errors
from tfd_notebook.data.consume.consumers import Consumers
from tfd_notebook.data.consume.observe import watch
from tfd_notebook.data.consume.stream import Stream

pytestmark = pytest.mark.integration


@pytest.fixture
def consumers():
    return Consumers()


def numbers(count=10**9):
    return tf.data.Dataset.range(count)


def distributed(dataset, service):
    return dataset.apply(
        tf.data.experimental.service.distribute("distributed_epoch", service.target)
    )


def threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("tfd-stream-")]


def test_stream_without_a_reader_makes_progress(service, consumers):
    stream = Stream(watch(distributed(numbers(), service), consumers), consumers, "train")
    assert stream.state == "new"
    with stream.start():
        assert stream.wait(elements=1000, timeout=60) is True
        assert stream.elements >= 1000
        assert stream.bytes >= 8000
        assert stream.throughput() > 0
        assert 0 <= stream.wait_fraction <= 1
        (row,) = consumers.rows()
        assert (row.name, row.kind, row.state) == ("train", "stream", "running")
        assert not consumers.idle()
    assert stream.state == "stopped"
    assert consumers.rows()[0].state == "stopped"
    assert consumers.idle()
    until(lambda: threads() == [])


def test_the_main_thread_reads_everything_in_order(consumers):
    stream = Stream(numbers(500), consumers, buffer=3)
    assert [int(x) for x in stream] == list(range(500))
    assert stream.state == "finished"
    assert stream.wait() is True
    assert list(stream) == []


def test_slow_reader_limits_the_stream(consumers):
    received = []
    with Stream(
        numbers(), consumers, buffer=4, sinks=[lambda x: received.append(int(x))]
    ) as stream:
        reader = iter(stream)
        first = int(next(reader))
        taken = until(lambda: len(received) > first + 3 and len(received))  # a full buffer holds 4
        time.sleep(0.1)
        assert len(received) <= taken + 1
        assert [int(next(reader)) for _ in range(3)] == [first + 1, first + 2, first + 3]


MEGABYTE = 10**6
LIMIT = 128 * MEGABYTE


def ragged(size):
    return tf.RaggedTensor.from_row_lengths(tf.zeros([size], tf.uint8), [size - 5, 5])


def sparse(size):
    return tf.sparse.from_dense(tf.ones([size // 12]))


def optional(size):
    return tf.experimental.Optional.from_value((ragged(size), tf.constant(b"x" * size)))


def each(*values):
    """Return a dataset of `values`, which are a count and an element that share its memory."""
    first, *rest = (
        tf.data.Dataset.from_tensors(element).repeat(count) for count, element in values
    )
    return functools.reduce(tf.data.Dataset.concatenate, rest, first)


def array(number):
    """Return a TensorArray of 150 MB."""
    written = tf.TensorArray(tf.uint8, 2, element_shape=[None])
    for index in range(2):
        written = written.write(index, tf.zeros([75 * MEGABYTE], tf.uint8))
    return written


def varying(*sizes):
    """Return tensors of `sizes` bytes whose length is unknown."""
    return tf.data.Dataset.from_tensor_slices([*sizes]).map(lambda n: tf.zeros([n], tf.uint8))


#: A dataset of each kind, and the bytes of its elements.
KINDS = {
    "dense": lambda: (each((40, tf.zeros([2, 1_000_000]))), [8 * MEGABYTE] * 40),
    "larger than the limit": lambda: (
        each((4, tf.zeros([150 * MEGABYTE], tf.uint8))),
        [150 * MEGABYTE] * 4,
    ),
    "images": lambda: (each((200, tf.zeros([1000, 1000, 3], tf.uint8))), [3 * MEGABYTE] * 200),
    "small numbers": lambda: (numbers(500), [8] * 500),
    "short first element": lambda: (
        varying(*(sizes := [10, *[8 * MEGABYTE] * 40, *[10] * 70, 150 * MEGABYTE, 10])),
        sizes,
    ),
    "strings": lambda: (each((40, tf.constant([b"x" * MEGABYTE] * 8))), [8 * MEGABYTE] * 40),
    "small strings": lambda: (
        each((100, tf.constant(b"x")), (40, tf.constant(b"x" * 8 * MEGABYTE))),
        [1] * 100 + [8 * MEGABYTE] * 40,
    ),
    "ragged": lambda: (each((40, ragged(8 * MEGABYTE))), [8 * MEGABYTE] * 40),
    "sparse": lambda: (each((40, sparse(8 * MEGABYTE))), [8 * MEGABYTE] * 40),
    "array": lambda: (numbers(4).map(array), [150 * MEGABYTE] * 4),
    "optional": lambda: (each((40, optional(4 * MEGABYTE))), [8 * MEGABYTE] * 40),
    "nested": lambda: (
        each((40, {"a": (ragged(2 * MEGABYTE), tf.zeros([10**6])), "b": b"x" * 2 * MEGABYTE})),
        [8 * MEGABYTE] * 40,
    ),
}


def wait_until_full(stream):
    """Wait until `stream` reports a full buffer, or has ended."""

    def is_full():
        try:
            return stream.wait(timeout=0.01)
        except errors.TimeLimit as error:
            return "buffer is full" in str(error)

    until(is_full)


@pytest.mark.parametrize("kind", KINDS)
def test_buffer_holds_128_mb_and_one_element_at_most(consumers, kind):
    dataset, sizes = KINDS[kind]()
    with Stream(dataset, consumers) as stream:
        reader, read = iter(stream), 0
        while read < len(sizes):
            is_rest = read % 10 == 0
            if is_rest:
                wait_until_full(stream)
            count = stream.elements
            waiting = sizes[read:count]
            if is_rest:  # it is filled again when half of its elements are read
                many = sum(waiting) + sizes[count - 1] >= LIMIT // 2 or len(waiting) >= 32
                assert many or count == len(sizes), (read, count)
            assert sum(waiting) <= LIMIT + sizes[count - 1], (read, count)
            assert count <= read + 65  # the stream's thread may have the last one
            if read == 0:
                assert sum(waiting) >= LIMIT or count == 64
            next(reader)
            read += 1
        assert next(reader, None) is None


def test_elements_of_unknown_size_are_buffered_in_pairs(consumers):
    with Stream(numbers().window(3), consumers) as stream:
        reader = iter(stream)
        for read in range(5):
            wait_until_full(stream)
            assert 1 <= stream.elements - read <= 2
            next(reader)


def test_explicit_buffer_is_a_number_of_elements(consumers):
    with Stream(each((40, ragged(8 * MEGABYTE))), consumers, buffer=30) as stream:
        iter(stream)
        wait_until_full(stream)
        assert stream.elements == 30


def test_restored_elements_count(tmp_path, consumers):
    path = str(tmp_path / "position")
    dataset = each((40, tf.constant([b"x" * MEGABYTE] * 8)))
    with Stream(dataset, consumers) as stream:
        iter(stream)
        wait_until_full(stream)
        stream.checkpoint(path)
        full = stream.elements
    assert full == 16
    with Stream(dataset, consumers).restore(path) as rest:
        iter(rest)
        wait_until_full(rest)
        assert rest.elements == full


def test_discard_false_keeps_the_first_elements(consumers):
    with Stream(numbers(), consumers, discard=False) as stream:
        until(lambda: threads() and stream.elements >= 2)
        assert int(next(iter(stream))) == 0


def test_sinks_see_each_element_before_wait_returns(consumers):
    received = []
    with Stream(numbers(), consumers, sinks=[lambda x: received.append(int(x))]) as stream:
        stream.wait(elements=100, timeout=60)
        assert received[:100] == list(range(100))


def test_failing_sink_fails_the_stream(consumers):
    def sink(element):
        raise RuntimeError("the sink leaks")

    stream = Stream(numbers(), consumers, sinks=[sink]).start()
    with pytest.raises(RuntimeError, match="leaks"):
        stream.wait(timeout=60)
    assert stream.state == "failed"
    assert "leaks" in consumers.rows()[0].error
    with pytest.raises(RuntimeError, match="leaks"):
        next(iter(stream))


def test_each_change_of_its_state_is_an_event(consumers):
    states = []
    consumers.connect(lambda event: (states.append(event.state), consumers.apply(event)), tuple)
    stream = Stream(numbers(), consumers)
    assert states == ["new"]
    stream.start()
    assert states[-1] == "running"
    stream.pause()
    assert states[-1] == consumers.rows()[0].state == "paused"
    stream.resume()
    assert states[-1] == consumers.rows()[0].state == "running"
    stream.stop()
    assert states[-1] == consumers.rows()[0].state == "stopped"


def test_its_last_event_has_all_elements(consumers):
    stream = Stream(numbers(500), consumers)
    for count, _ in enumerate(stream, 1):
        last = count
    (row,) = consumers.rows()
    assert (row.state, row.elements, row.bytes) == ("finished", last, 8 * last)
    assert row.elements_per_s == stream.throughput() > 0


def test_stop_without_workers_is_prompt_and_final(tasks, consumers):
    with Service(tasks) as own:
        stream = Stream(distributed(numbers(), own), consumers).start()
        stream.wait(elements=10, timeout=60)
        own.kill_workers()
        until(lambda: consumers.stuck(0.5) == ("stream",))
        stream.stop()
    stream.stop()
    assert stream.state == "stopped"
    until(lambda: threads() == [])
    with pytest.raises(errors.StateError, match="create a new one"):
        stream.start()
    with pytest.raises(errors.Interrupted):
        stream.wait()
    assert list(stream) == []


def test_stop_of_the_cluster_ends_all_waits(service, consumers):
    def wait_for_all():
        try:
            stream.wait()
        except errors.TfdError as error:
            raised.append(error)

    raised = []
    stream = Stream(distributed(numbers(), service), consumers).start()
    waiting = threading.Thread(target=wait_for_all)
    waiting.start()
    stream.wait(elements=1, timeout=60)
    consumers.cancel_all(errors.Interrupted("cluster demo was stopped"))
    waiting.join(60)
    assert "cluster demo" in str(raised[0])
    assert stream.state == "stopped"
    with pytest.raises(errors.Interrupted, match="cluster demo"):
        next(iter(stream))


def test_pipeline_error_is_raised_in_the_caller(service):
    def check(i):
        with tf.control_dependencies([tf.debugging.assert_less(i, limit, message="too big")]):
            return tf.identity(i)

    limit = tf.constant(100, tf.int64)
    consumers = Consumers(task_of=lambda address: "data_worker:0")
    dataset = distributed(tf.data.Dataset.range(1000).map(check), service)
    stream = Stream(dataset, consumers).start()
    with pytest.raises(errors.PipelineError, match="too big") as caught:
        stream.wait(timeout=60)
    assert caught.value.task == "data_worker:0"
    assert stream.error is caught.value
    with pytest.raises(errors.PipelineError), Stream(dataset, consumers) as second:
        for _ in second:
            pass


@pytest.mark.parametrize("fails", ["pipeline", "sink"])
def test_failed_stream_ends_its_pipeline(consumers, fails):
    ended = threading.Event()

    def generate():
        try:
            yield from range(10**9)
        finally:
            ended.set()

    def check(value):
        raise ValueError("label 0 is invalid")

    dataset = tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec((), tf.int64))
    if fails == "pipeline":
        dataset = dataset.map(lambda x: tf.numpy_function(check, [x], tf.int64))
    options = tf.data.Options()
    options.autotune.enabled = False  # its thread may sleep for 60 s
    sinks = [check] if fails == "sink" else []
    stream = Stream(dataset.with_options(options), consumers, "failing", sinks=sinks).start()
    with pytest.raises((errors.PipelineError, ValueError), match="label 0 is invalid"):
        stream.wait(timeout=60)
    assert ended.wait(60)
    assert stream.error is not None


def test_wait_raises_the_reason_of_its_end(consumers):
    with pytest.raises(errors.StateError, match="not started"):
        Stream(numbers(), consumers).wait()
    with pytest.raises(errors.DataError, match="5 of 10"):
        Stream(numbers(5), consumers).start().wait(elements=10, timeout=60)
    with Stream(numbers(), consumers) as stream:
        iter(stream)
        with pytest.raises(errors.TimeLimit, match="no reader"):
            stream.wait(elements=10**6, timeout=0.5)


@pytest.mark.parametrize("options", [{"buffer": 0}, {"buffer": 1.5}, {"sinks": ["print"]}])
def test_invalid_options_are_refused(options, consumers):
    with pytest.raises(errors.UsageError):
        Stream(numbers(), consumers, **options)


def test_checkpoint_includes_buffered_elements(tmp_path, consumers):
    dataset = tf.data.Dataset.range(50).map(
        lambda i: {"x": i, "r": tf.RaggedTensor.from_row_lengths([i, i], [2, 0])}
    )
    with Stream(dataset, consumers, buffer=4) as stream:
        reader = iter(stream)
        begin = [int(next(reader)["x"]) for _ in range(10)]
        until(lambda: stream.elements > 10)
        stream.checkpoint(str(tmp_path / "position"))
        assert int(next(reader)["x"]) == begin[-1] + 1
    rest = Stream(dataset, consumers).restore(str(tmp_path / "position"))
    assert rest.elements > 10
    read = list(rest)
    assert [int(element["x"]) for element in read] == list(range(begin[-1] + 1, 50))
    assert read[0]["r"].to_list() == [[begin[-1] + 1] * 2, []]
    with pytest.raises(errors.StateError):
        rest.restore(str(tmp_path / "position"))
    with pytest.raises(errors.UsageError, match="not a checkpoint"):
        Stream(dataset, consumers).restore(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda each: each.map(lambda x: {"x": x}), "position in a dataset of elements TensorSpec"),
        (lambda each: each.map(lambda x: tf.cast(x, tf.float32)), "position in a dataset of"),
        (lambda each: each.shuffle(3), "position in another dataset"),
    ],
    ids=["structure", "dtype", "stages"],
)
def test_position_in_another_dataset_is_refused(tmp_path, consumers, change, text):
    path = str(tmp_path / "position")
    with Stream(numbers(20).batch(1).unbatch(), consumers, buffer=10) as stream:
        next(iter(stream))
        stream.checkpoint(path)
    other = Stream(change(numbers(20).batch(1).unbatch()), consumers)
    with pytest.raises(errors.UsageError, match=text) as caught:
        other.restore(path)
    assert "the dataset of the checkpoint" in caught.value.fix
    with pytest.raises(errors.UsageError, match="not a checkpoint of a stream"):
        other.restore(None)


def test_checkpoint_after_the_end_includes_unread_elements(service, tmp_path, consumers):
    path = str(tmp_path / "position")
    for dataset in (numbers(6), distributed(numbers(6), service)):
        stream = Stream(dataset, consumers, buffer=10)
        reader = iter(stream)
        read = [int(next(reader)) for _ in range(2)]
        stream.wait(timeout=60)
        stream.checkpoint(path)
        rest = Stream(dataset, consumers).restore(path)
        assert (rest.state, rest.elements) == ("new", 6)
        rest.checkpoint(path)
        with Stream(dataset, consumers).restore(path) as again:
            assert again.wait(timeout=60) is True
        unread = [int(x) for x in reader]
        assert sorted(read + unread) == [*range(6)]
        assert [int(x) for x in rest] == [int(x) for x in again] == unread
        assert (rest.state, rest.elements, rest.bytes) == ("finished", 6, 0)
        with pytest.raises(errors.StateError, match="has ended"):
            stream.checkpoint(path)


@pytest.mark.parametrize("ending", ["stop", "sink"])
def test_stream_that_did_not_finish_has_no_checkpoint_after_its_end(tmp_path, consumers, ending):
    def sink(element):
        if ending == "sink" and element == 3:
            raise RuntimeError("the sink leaks")

    stream = Stream(numbers(), consumers, buffer=10, sinks=[sink])
    next(iter(stream))
    if ending == "stop":
        stream.stop()
    else:
        with pytest.raises(RuntimeError, match="leaks"):
            stream.wait(timeout=60)
    with pytest.raises(errors.StateError, match="has ended"):
        stream.checkpoint(str(tmp_path / "position"))


def test_checkpoint_of_a_distributed_dataset_is_refused(service, tmp_path, consumers):
    with Stream(distributed(numbers(), service), consumers) as stream:
        stream.wait(elements=5, timeout=60)
        with pytest.raises(errors.Unsupported, match="skip"):
            stream.checkpoint(str(tmp_path / "position"))
        stream.wait(elements=stream.elements + 100, timeout=60)


def test_frame_has_one_row_per_second(consumers):
    with Stream(numbers().map(lambda i: tf.fill([100], i)), consumers) as stream:
        stream.wait(elements=100, timeout=60)
        until(lambda: len(stream.to_frame()) >= 2)
        frame = stream.to_frame()
    assert list(frame.columns) == [
        "second", "elements", "bytes", "elements_per_s", "bytes_per_s", "wait_fraction",
    ]  # fmt: skip
    assert frame.second.tolist()[:2] == [1, 2]
    assert frame.elements.is_monotonic_increasing
    assert (frame.bytes - frame.elements * 800).abs().max() <= 800  # interpolated
    assert frame.wait_fraction.between(0, 1).all()
