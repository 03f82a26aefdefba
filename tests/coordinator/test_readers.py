"""Readers and objects created before a connection stay usable, or the connection is refused."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator._programs import Programs, logging_environment

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
#: Number of processes that run the snippets of the README and of the tour.
PROCESSES = int(os.environ.get("TFD_TEST_README_PROCESSES", "1"))

#: The additional sink limits the stream's use of the processors.
AROUND = """
import faulthandler
import time
import warnings

faulthandler.enable()
warnings.simplefilter("ignore", ResourceWarning)
import tensorflow as tf
import tfd_notebook as tfd

step = tf.function(lambda batch: 2 * batch)
batches = [tf.constant(number) for number in range(20)]
with tfd.Cluster(data_workers=1, name="earlier") as cluster:
    earlier = tf.data.Dataset.range(10).map(lambda x: 2 * x).apply(cluster.distribute("off"))
    assert len(list(earlier)) == 10
slow_sink = lambda batch: time.sleep(0.01)
images, labels = tf.zeros((64, 8, 8)), tf.zeros(64, tf.int64)
smooth = lambda image: image + 1
model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(2)])
model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
{snippets}
assert coordinator.fetch(results) == [2 * number for number in range(20)]
stream.wait(elements=stream.elements + 100, timeout=60)
for cluster in tfd.clusters().values():
    cluster.stop()
print("ended")
"""


def run(programs: Programs, code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    completed = programs.run(code, timeout=170, **options)
    assert completed.returncode == 0, completed.stderr[-4_000:]
    return completed


@pytest.mark.parametrize("process", range(PROCESSES))
def test_snippets_of_readme_and_tour_run_in_order(programs: Programs, process: int) -> None:
    """The readers before the coordinator also cause no warning."""
    pages = "".join((ROOT / page).read_text() for page in ("README.md", "docs/index.md"))
    blocks = re.findall(r"```python\n(.*?)```", pages, re.DOTALL)
    assert len(blocks) == 5
    snippets = "".join(blocks).replace("%load_ext tfd_notebook\n", "")
    assert snippets.count('name="images"') == 1
    snippets = snippets.replace('name="images"', 'name="images", sinks=[slow_sink]')
    completed = run(programs, AROUND.format(snippets=snippets), env=logging_environment())
    assert completed.stdout.splitlines()[-1] == "ended"
    assert "Started server" in completed.stderr  # the log is captured, so a warning would appear
    assert "'__wrapped__" not in completed.stderr


#: Each reader counts its numbered elements. Each connection belongs to a different strategy.
READERS = """
import threading
import time

import tensorflow as tf
import tfd_notebook as tfd
from tfd_notebook.errors import StateError


def numbers():
    options = tf.data.Options()
    options.autotune.enabled = False  # with it, the end of an iterator can take 60 s
    numbers = tf.data.Dataset.range(10**9).map(lambda x: x + 1, num_parallel_calls=2)
    return numbers.with_options(options)


before = tf.Variable(1.0)
twice = tf.function(lambda x: x + x)
following = tf.function(lambda: before + 1.0)
assert (float(twice(before)), float(following())) == (2.0, 2.0)
data = tfd.Cluster(data_workers=1, name="data")
served = numbers().batch(10).apply(data.distribute("off"))
python = numbers().map(lambda x: tf.py_function(lambda v: tf.add(v, 0), [x], tf.int64)).prefetch(4)
counts = {"plain": 0, "observed": 0, "served": 0, "function": 0, "python": 0, "stream": 0}
errors = []


def check(name, element):
    element = int(tf.reshape(element, [-1])[0])
    expected = counts[name] * (10 if name in ("served", "stream") else 1) + 1
    assert element == expected, (name, element, expected)
    counts[name] += 1
    time.sleep(0.02)  # at full speed, the readers would slow down the start of the tasks


def read(name, elements):
    try:
        for element in elements:
            check(name, element)
            if stopping.is_set():
                return
        raise AssertionError(f"{name} ended")
    except BaseException as error:
        errors.append((name, error))


def called():
    iterator = iter(data.observe(numbers(), name="called"))
    following = tf.function(lambda: next(iterator), autograph=False)
    while True:
        yield following()


stopping = threading.Event()
stream = data.stream(served, sinks=[lambda element: check("stream", element)]).start()
readers = [
    threading.Thread(target=read, args=arguments)
    for arguments in (
        ("plain", iter(numbers())),
        ("observed", data.observe(numbers(), name="observed")),
        ("served", served),
        ("function", called()),
        ("python", python),
    )
]
for reader in readers:
    reader.start()


def await_progress():
    before = dict(counts)
    deadline = time.monotonic() + 60
    while any(counts[name] < before[name] + 5 for name in counts):
        assert not errors, errors
        assert stream.error is None, stream.error
        assert time.monotonic() < deadline, (before, counts)
        time.sleep(0.01)


await_progress()
cluster = tfd.Cluster(workers=1, ps=1, name="training")
later = tf.Variable(2.0)
for connection in range(3):
    coordinator = cluster.coordinator(cluster.strategy())
    values = [coordinator.schedule(twice, args=(tf.constant(float(i)),)) for i in range(5)]
    assert coordinator.fetch(values) == [0.0, 2.0, 4.0, 6.0, 8.0]
    await_progress()
own = cluster.coordinator(tf.distribute.ParameterServerStrategy(cluster.resolver))
assert own.schedule(twice, args=(tf.constant(3.0),)).fetch() == 6.0
await_progress()
assert (float(before.numpy()), float(twice(before))) == (1.0, 2.0)
before.assign_add(later)
assert (float(before), float(following())) == (3.0, 4.0)
assert "chief" in cluster.resolver.cluster_spec().jobs

# Replacing the devices would break their readers, so the call is refused.
def check_refusal():
    try:
        spec = tf.train.ClusterSpec({"chief": ["localhost:1"]})
        tf.config.experimental_connect_to_cluster(spec, job_name="chief")
        raise AssertionError("the coordinator connected")
    except StateError as error:
        assert "replaces the devices of this process" in str(error), error
        assert "reads a dataset" in str(error), error


check_refusal()
await_progress()
stopping.set()
for reader in readers:
    reader.join(60)
stream.stop()

# The only reader is rarely at its iterator: it computes between its elements.
def run_operations():
    element = tf.constant(0)
    for _ in range(20):
        element = element + 1


@tf.function(autograph=False)
def run_long_operation():
    end = tf.timestamp() + 0.5
    return tf.while_loop(lambda i: tf.timestamp() < end, lambda i: [i + 1], [tf.constant(0)])


def read_slowly(compute, started, ended):
    for _ in tf.data.Dataset.range(10**9):  # it delivers in less than 0.1 ms
        started.set()
        compute()
        if ended.is_set():
            return


run_long_operation()  # its tracing would delay the reader further
for compute in (run_operations, lambda: time.sleep(0.5), run_long_operation):
    started, ended = threading.Event(), threading.Event()
    reader = threading.Thread(target=read_slowly, args=(compute, started, ended), daemon=True)
    reader.start()
    assert started.wait(60)
    check_refusal()
    ended.set()
    reader.join(60)
    assert not reader.is_alive()
cluster.stop()
data.stop()
assert not errors, errors
"""


def test_every_reader_continues_with_its_iterator(programs: Programs) -> None:
    run(programs, READERS)


REFUSED = """
import os
import signal
import threading

import tensorflow as tf
import tfd_notebook as tfd
from tfd_notebook._compat.tf_coordinator import thread_parking as parking
from tfd_notebook.errors import StateError

waiting, proceed = threading.Event(), threading.Event()


def slow():
    yield 1
    waiting.set()
    assert proceed.wait(120)
    yield 2
    yield 3


received = []
iterator = iter(tf.data.Dataset.from_generator(slow, output_signature=tf.TensorSpec((), tf.int64)))


def reading():
    for element in iterator:
        received.append(int(element))


cluster = tfd.Cluster(workers=1, ps=1, name="training")
reader = threading.Thread(target=reading, name="my-reader")
reader.start()
assert waiting.wait(60)
parking.SECONDS = 1.5
try:
    cluster.coordinator()
    raise AssertionError("the coordinator connected")
except StateError as error:
    assert "thread 'my-reader' reads a dataset at <string>:" in str(error), error
    assert "Next: " in str(error)

parking.SECONDS = 120.0
timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
timer.start()
try:
    cluster.coordinator()
    raise AssertionError("the coordinator connected")
except KeyboardInterrupt:
    pass
timer.join()

timer = threading.Timer(1.0, proceed.set)
timer.start()
coordinator = cluster.coordinator()  # waits for the element
assert coordinator.schedule(tf.function(lambda: tf.constant(7))).fetch() == 7
reader.join(60)
assert received == [1, 2, 3], received
cluster.stop()
"""


def test_blocking_reader_is_named(programs: Programs) -> None:
    code = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + REFUSED
    run(programs, code)


#: Objects with tables, each made before the first connection.
TABLES = """
import os
import sys
import warnings

warnings.simplefilter("ignore", ResourceWarning)
import tensorflow as tf
import tfd_notebook as tfd


def static():
    keys, values = tf.constant(["a", "b"]), tf.constant([1, 2], tf.int64)
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), -1)


def mutable():
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    table.insert(tf.constant(["a", "b"]), tf.constant([1, 2], tf.int64))
    return table


class Model(tf.Module):
    def __init__(self):
        self.static, self.mutable, self.variable = static(), mutable(), tf.Variable(1.0)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def look_up(self, words):
        return self.static.lookup(words) + 10 * self.mutable.lookup(words)

    @tf.function(input_signature=[])
    def read(self):
        return self.variable + 1.0


words = tf.constant(["b", "c", "a"])
tf.saved_model.save(Model(), sys.argv[1])
loaded = tf.saved_model.load(sys.argv[1])
path = sys.argv[1] + "/words.txt"
with open(path, "w") as file:
    file.write("a\\nb\\n")
line, number = tf.lookup.TextFileIndex.WHOLE_LINE, tf.lookup.TextFileIndex.LINE_NUMBER
in_file = tf.lookup.TextFileInitializer(path, tf.string, line, tf.int64, number)
from_file = tf.lookup.StaticVocabularyTable(in_file, 1)
os.remove(path)
changing = mutable()
string_lookup = tf.keras.layers.StringLookup()
vectorization = tf.keras.layers.TextVectorization()
for layer in (string_lookup, vectorization):
    layer.adapt(tf.constant(["a", "b", "b"]))
normalization = tf.keras.layers.Normalization()
normalization.adapt(tf.constant([[1.0], [3.0]]))
generator = tf.random.Generator.from_seed(1)
objects = {
    "static": static().lookup,
    "changing": changing.lookup,
    "file": from_file.lookup,
    "loaded": loaded.look_up,
    "string": string_lookup,
    "text": vectorization,
}
functions = {name: tf.function(lambda x, f=f: tf.identity(f(x))) for name, f in objects.items()}
expected = {name: function(words).numpy().tolist() for name, function in functions.items()}
assert expected["loaded"] == [22, -11, 11]
datasets = {
    name: tf.data.Dataset.from_tensors(words).repeat(500).map(lambda x, f=f: f(x))
    for name, f in objects.items()
}
iterators = {name: iter(dataset) for name, dataset in datasets.items()}
opened = {name: next(iterator).numpy().tolist() for name, iterator in iterators.items()}
assert opened == expected


def check(coordinator):
    for name, function in objects.items():
        assert function(words).numpy().tolist() == expected[name], name
        assert functions[name](words).numpy().tolist() == expected[name], name
        later = [next(iterators[name]) for _ in range(100)][-1]  # not in the iterator's buffer
        assert later.numpy().tolist() == opened[name], name
        assert next(iter(datasets[name])).numpy().tolist() == expected[name], name
        per_worker = iter(coordinator.create_per_worker_dataset(datasets[name]))
        element = coordinator.schedule(tf.function(lambda it: next(it)), args=(per_worker,)).fetch()
        assert element.tolist() == expected[name], name
        if name not in ("changing", "loaded"):  # TensorFlow does not return their results
            value = coordinator.schedule(functions[name], args=(words,)).fetch()
            assert value.tolist() == expected[name], name
    assert float(loaded.read()) == 2.0
    assert normalization(tf.constant([[3.0]])).numpy().tolist() == [[1.0]]
    assert generator.normal([3]).shape == [3]


first = tfd.Cluster(workers=1, ps=1, name="first")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", RuntimeWarning)
    coordinator = first.coordinator()
(text,) = {str(each.message) for each in caught}
assert "the variables of 'loaded'" in text and "in strategy.scope()" in text, text
check(coordinator)
with coordinator.strategy.scope():
    again = tf.saved_model.load(sys.argv[1])
assert coordinator.schedule(tf.function(lambda: again.read())).fetch() == 2.0
del again
changing.insert(tf.constant(["c"]), tf.constant([3], tf.int64))
expected["changing"] = [2, 3, 1]
first.stop()
second = tfd.Cluster(workers=1, ps=1, name="second")
coordinator = second.coordinator()
check(coordinator)

# A worker cannot use these, and the error explains it.
for name, function in (
    ("Variable/", tf.function(loaded.read)),
    ("StateVar/", tf.function(lambda: generator.normal([2]))),
):
    try:
        coordinator.schedule(function).fetch()
        raise AssertionError("the worker used it")
    except tf.errors.OpError as error:
        text = "".join((str(error), *getattr(error, "__notes__", ())))
        assert f"Anonymous/{name}" in text, text
        assert "before it connected to the cluster" in text, text
    try:
        coordinator.join()  # raises the error once more
    except tf.errors.OpError:
        pass
try:
    coordinator.create_per_worker_dataset(tf.data.Dataset.range(1).map(lambda x: loaded.read()))
    raise AssertionError("the dataset was sent")
except tf.errors.OpError as error:
    text = "".join((str(error), *getattr(error, "__notes__", ())))
    assert "before it connected to the cluster" in text, text
second.stop()
"""


def test_tables_stay_usable(programs: Programs, tmp_path: Path) -> None:
    completed = programs.run(TABLES, str(tmp_path), timeout=170)
    assert completed.returncode == 0, completed.stderr[-4_000:]


#: TensorFlow gives this object a new name each time.
NOT_RESTORABLE = """
import warnings

warnings.simplefilter("ignore", ResourceWarning)
import tensorflow as tf
import tfd_notebook as tfd
from tfd_notebook.errors import StateError


class Words(tf.saved_model.experimental.TrackableResource):
    names = iter("abcdef")

    def _create_resource(self):
        return tf.raw_ops.MutableHashTableV2(
            key_dtype=tf.string, value_dtype=tf.int64, shared_name=next(self.names)
        )


words = Words()
handle = words.resource_handle
cluster = tfd.Cluster(workers=1, ps=1, name="training")
try:
    cluster.coordinator()
    raise AssertionError("the coordinator connected")
except StateError as error:
    assert "'words', a Words" in str(error), error
    assert "Next: " in str(error)
assert int(tf.raw_ops.LookupTableSizeV2(table_handle=handle)) == 0
del words
coordinator = cluster.coordinator()
assert coordinator.schedule(tf.function(lambda: tf.constant(7))).fetch() == 7
cluster.stop()
"""


def test_object_that_a_connection_would_delete_is_named(programs: Programs) -> None:
    run(programs, NOT_RESTORABLE)
