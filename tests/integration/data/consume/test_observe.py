"""Observed datasets of a real service: counts, cancellation, interrupts and error texts."""

import gc
import pickle
import signal
import threading
import time

import pytest
import tensorflow as tf

from tests._waiting import until
from tests.integration._service import Service, end, read_line, run_python
from tfd_notebook import errors
from tfd_notebook.agent.error_server import ErrorServer
from tfd_notebook.data.consume.consumers import Consumers
from tfd_notebook.data.consume.observe import watch

pytestmark = pytest.mark.integration


def distributed(dataset, service, mode="distributed_epoch"):
    return dataset.apply(tf.data.experimental.service.distribute(mode, service.target))


def examples(count):
    return tf.data.Dataset.range(count).map(lambda i: (tf.fill([4], i), tf.constant([1.0])))


def in_thread(function):
    """Call `function` in a thread; return the thread and the list that receives its error."""
    raised = []

    def run():
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_next_epoch_continues_the_count_of_the_row(service):
    consumers = Consumers()
    dataset = watch(distributed(examples(50).batch(4), service), consumers, "train").prefetch(2)
    assert sum(1 for _ in dataset) == 13
    assert len(list(dataset.as_numpy_iterator())) == 13
    (row,) = consumers.rows()
    assert (row.name, row.kind, row.state) == ("train", "dataset", "finished")
    assert row.elements == 26
    assert row.bytes == 2 * 50 * (4 * 8 + 4)
    assert 0 < row.wait_fraction <= 1
    assert consumers.idle()


def blocked_dataset(service):
    """Return a dataset that blocks after its first element, because its service will be killed."""
    return distributed(examples(10**6).batch(4), service)


def test_cancel_all_ends_a_blocked_loop_with_the_given_error(tasks):
    consumers = Consumers()
    with Service(tasks) as service:
        dataset = watch(blocked_dataset(service), consumers, "lost")
        thread, raised = in_thread(lambda: [None for _ in dataset])
        until(lambda: any(row.elements for row in consumers.rows()))
        service.kill_workers()
        until(lambda: consumers.stuck(0.5) == ("lost",))
        (row,) = consumers.rows()
        assert row.state == "running"
        assert not consumers.idle()
        consumers.cancel_all(errors.Interrupted("the cluster stopped"))
        thread.join(60)
        assert not thread.is_alive()
    (error,) = raised
    assert type(error) is errors.Interrupted
    assert isinstance(error.__cause__, tf.errors.CancelledError)
    (row,) = consumers.rows()
    assert row.state == "stopped"


def test_loop_that_waits_for_a_dead_dispatcher_can_be_cancelled(tasks):
    consumers = Consumers()
    with Service(tasks, workers=0) as service:
        dataset = watch(blocked_dataset(service), consumers)
        service.kill_dispatcher()
        thread, raised = in_thread(lambda: next(iter(dataset)))
        until(lambda: consumers.stuck(0.3))
        consumers.cancel_all(errors.DispatcherLost("the dispatcher is gone"))
        thread.join(60)
        assert type(raised[0]) is errors.DispatcherLost
        until(lambda: consumers.rows()[0].state == "failed")
        # TensorFlow's thread polls for the dispatcher until a server answers.
        port = int(service.target.split(":")[-1])
        with ErrorServer(port, "[TFD306] gone"):
            until(lambda: "tfd-open-iterator" not in [t.name for t in threading.enumerate()])


def model(**options):
    import keras

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return model


def slow_examples(count, seconds):
    def wait(value):
        time.sleep(seconds)
        return value

    def example(i):
        x = tf.numpy_function(wait, [tf.ones([4, 8])], tf.float32)
        return tf.ensure_shape(x, [4, 8]), tf.ones([4, 1])

    return tf.data.Dataset.range(count).map(example)


@pytest.mark.filterwarnings("ignore:Your input ran out of data", "ignore:.shuffle=True.")
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_keras_datasets_are_counted_with_their_wait_fraction(service, steps_per_execution):
    consumers = Consumers()
    train = watch(slow_examples(16, 0.03), consumers, "train")
    check = watch(
        distributed(
            tf.data.Dataset.from_tensors((tf.ones([4, 8]), tf.ones([4, 1]))).repeat(8), service
        ),
        consumers,
        "check",
    )
    network = model(steps_per_execution=steps_per_execution)
    network.fit(train, epochs=2, validation_data=check, verbose=0)
    network.evaluate(check, verbose=0)
    assert network.predict(check, verbose=0).shape == (32, 1)
    gc.collect()
    until(lambda: {row.state for row in consumers.rows()} == {"finished"})
    rows = {row.name: row for row in consumers.rows()}
    assert rows["train"].state == "finished"
    assert rows["train"].elements == 32
    assert rows["train"].bytes == 32 * (4 * 8 + 4) * 4
    assert rows["check"].elements == 4 * 8
    assert consumers.named("train").reading().waited > 0.1


@pytest.mark.filterwarnings("ignore:.shuffle=True.")
def test_waiting_fit_is_detected_and_cancelled(tasks):
    consumers = Consumers()
    with Service(tasks) as service:
        examples = tf.data.Dataset.from_tensors((tf.ones([4, 8]), tf.ones([4, 1]))).repeat(10**6)
        dataset = watch(distributed(examples, service), consumers, "train")
        thread, raised = in_thread(lambda: model().fit(dataset, verbose=0))
        until(lambda: any(row.elements for row in consumers.rows()))
        service.kill_workers()
        until(lambda: consumers.stuck(0.5) == ("train",))
        waited = consumers.rows()[0].wait_fraction
        until(lambda: consumers.rows()[0].wait_fraction > waited)
        consumers.cancel_all(errors.NoWorkers("no data worker is left"))
        thread.join(60)
        assert not thread.is_alive()
    assert type(raised[0]) is errors.NoWorkers
    assert consumers.rows()[0].state == "failed"


def test_cancelled_iterator_keeps_raising_the_error(service):
    consumers = Consumers()
    iterator = iter(watch(distributed(examples(100), service), consumers))
    next(iterator)
    consumers.cancel_all(errors.Interrupted("enough"))
    with pytest.raises(errors.Interrupted, match="enough"):
        next(iterator)
    with pytest.raises(errors.Interrupted, match="enough"):
        tf.function(lambda it: next(it))(iterator)


def failing_in(number):
    def check(i):
        with tf.control_dependencies([tf.debugging.assert_less(i, limit, message="label too big")]):
            return tf.identity(i)

    limit = tf.constant(number, tf.int64)
    return tf.data.Dataset.range(10).map(check)


def test_pipeline_error_names_worker_and_stage(service):
    consumers = Consumers(task_of=lambda address: "data_worker:0")
    with pytest.raises(errors.PipelineError, match="label too big") as caught:
        for _ in watch(distributed(failing_in(5), service), consumers, "train"):
            pass
    error = caught.value
    assert isinstance(error, tf.errors.InvalidArgumentError)
    assert error.task == "data_worker:0"
    assert "stage map" in str(error)
    assert "localhost:" in str(error)
    assert isinstance(error.__cause__, tf.errors.InvalidArgumentError)
    assert type(pickle.loads(pickle.dumps(error))) is errors.PipelineError
    (row,) = consumers.rows()
    assert row.state == "failed"
    assert "label too big" in row.error


def test_missing_python_function_is_named(service):
    dataset = tf.data.Dataset.range(3).map(lambda i: tf.numpy_function(abs, [i], tf.int64))
    with pytest.raises(errors.NotSerializable, match="does not have a Python function"):
        next(iter(watch(distributed(dataset, service), Consumers())))


@pytest.mark.filterwarnings("ignore:.shuffle=True.")
def test_pipeline_error_in_fit_is_translated(service):
    dataset = failing_in(5).map(lambda i: (tf.fill([4], 1.0), tf.ones([1]))).batch(1)
    with pytest.raises(errors.PipelineError, match=r"data worker.*label too big") as caught:
        model().fit(watch(distributed(dataset, service), Consumers()), verbose=0)
    assert isinstance(caught.value, tf.errors.InvalidArgumentError)


_SCRIPT = """
import gc, os, sys, threading, time
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import tensorflow as tf, keras
from tfd_notebook.data.consume.consumers import Consumers
from tfd_notebook.data.consume.stream import Stream
from tfd_notebook.data.consume.observe import watch
from tfd_notebook.agent.error_server import ErrorServer

consumers = Consumers()
batch = (tf.ones([4, 8]), tf.ones([4, 1]))
dataset = tf.data.Dataset.from_tensors(batch).repeat(20_000)
dataset = watch(dataset.apply(
    tf.data.experimental.service.distribute("distributed_epoch", sys.argv[1])), consumers)
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
step = tf.function(lambda iterator: tf.reduce_sum(next(iterator)[0]))

def loop():
    for _ in dataset: pass

def fit(): model.fit(dataset.repeat(), steps_per_epoch=10**6, verbose=0)

def captured():
    iterator = iter(dataset)
    total = tf.function(lambda: tf.reduce_sum(next(iterator)[0]))
    while True: total()

def passed():
    iterator = iter(dataset)
    while True: step(iterator)

def stream():
    with Stream(dataset, consumers) as stream:
        for _ in stream: pass

def wait():
    with Stream(dataset, consumers) as stream: stream.wait()

def report_stuck():
    while not consumers.stuck(0.5): time.sleep(0.02)
    print("STUCK", flush=True)

next(iter(dataset))
print("MOVES", flush=True)
sys.stdin.readline()
for scenario in (loop, fit, captured, passed, stream, wait):
    threading.Thread(target=report_stuck, daemon=True).start()
    try:
        scenario()
        print("ended", flush=True)
    except KeyboardInterrupt:
        print(scenario.__name__, flush=True)
gc.collect()
until = time.monotonic() + 60
while time.monotonic() < until and "tfd" in str(threading.enumerate()): time.sleep(0.02)
print([t.name for t in threading.enumerate() if t.name.startswith("tfd")], flush=True)
"""


def test_ctrl_c_ends_every_consumer_without_workers(tasks):
    with Service(tasks) as own:
        script = run_python(_SCRIPT, own.target)
        try:
            assert read_line(script) == "MOVES"
            own.kill_workers()
            script.stdin.write("\n")
            script.stdin.flush()
            for scenario in ("loop", "fit", "captured", "passed", "stream", "wait"):
                assert read_line(script) == "STUCK", scenario
                script.send_signal(signal.SIGINT)
                assert read_line(script, 60) == scenario
            assert read_line(script) == "[]"
        finally:
            end(script)
