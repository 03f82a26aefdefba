"""Datasets that remain a ``tf.data.Dataset`` and are observed while this process iterates them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tfd_notebook import errors
from tfd_notebook._compat.tf_data import autograph
from tfd_notebook._compat.tf_data.meter import IteratorMetrics, without_traceback
from tfd_notebook._compat.tf_data.source_locations import warn
from tfd_notebook.data.bottleneck.usage import Delivery
from tfd_notebook.data.consume.consumers import Consumers, DatasetConsumer
from tfd_notebook.data.consume.memory_datasets import check_transfer
from tfd_notebook.data.op_errors import combine


def watch(
    dataset: Any,
    consumers: Consumers,
    name: str | None = None,
    before: Callable[[], object] | None = None,
) -> Any:
    """Return `dataset`, observed by `consumers` whenever Python or Keras iterates it.

    Iterators are counted. While they block, Ctrl-C or the end of the cluster cancels them. Their
    errors name the cause. Datasets derived from the result are observed too. Loops inside a
    ``tf.function`` remain unchanged, except over an iterator that is passed to the function, as
    Keras does. A Python function that the pipeline calls in this process must return before a
    cancellation takes effect.

    Parameters
    ----------
    dataset : tf.data.Dataset
    consumers : Consumers
    name : str, optional
        Display name. Default ``"dataset"``.
    before : callable, optional
        Called before each iterator is opened. Its errors propagate to the consumer. Default: the
        function with which `dataset` was observed before.

    Returns
    -------
    tf.data.Dataset
        Elements, options, cardinality and ``element_spec`` are those of `dataset`. With an
        unsupported version of TensorFlow, the result is `dataset`, and a warning is issued.
    """
    check_dataset(dataset)
    compat = load_compat()
    if compat is None:
        return dataset
    if isinstance(dataset, compat.WatchedDataset):
        before, dataset = dataset.watcher.before, dataset.bare
    check_transfer(dataset)
    return compat.WatchedDataset(dataset, _Watcher(consumers, name or "dataset", before))


def check_dataset(dataset: Any) -> None:
    """Raise UsageError unless `dataset` is a ``tf.data.Dataset``."""
    import tensorflow as tf

    if not isinstance(dataset, tf.data.Dataset):
        raise errors.UsageError(
            f"expected a tf.data.Dataset, got {type(dataset).__name__}",
            fix="create one, for example with tf.data.Dataset.from_tensor_slices",
        )


def load_compat() -> ModuleType | None:
    """Return the module for TensorFlow's internals. None if this version is unsupported."""
    try:
        # Imports TensorFlow.
        from tfd_notebook._compat.tf_data import iterator as tf_data_iterator
    except (ImportError, AttributeError) as error:
        import tensorflow as tf

        warn(
            f"TensorFlow {tf.__version__} is not supported ({error}): datasets are not observed, "
            "and Ctrl-C waits for the next element",
        )
        return None
    return tf_data_iterator


def open_iterator(dataset: Any, consumers: Consumers) -> tuple[Any, IteratorMetrics]:
    """Return an iterator of `dataset` that is not registered as a consumer, and its metrics."""
    check_dataset(dataset)
    compat = load_compat()
    if compat is None:
        plain = _PlainIterator(dataset)
        return plain, plain.meter
    before = None
    if isinstance(dataset, compat.WatchedDataset):
        before, dataset = dataset.watcher.before, dataset.bare
    check_transfer(dataset)
    iterator = compat.WatchedIterator(dataset, _ErrorTranslator(consumers, before))
    return iterator, iterator.meter


class _PlainIterator:
    """Replacement of an observed iterator for an unsupported version of TensorFlow."""

    def __init__(self, dataset: Any) -> None:
        self.meter = IteratorMetrics()
        self.element_spec = dataset.element_spec
        self._dataset = dataset
        self._iterator: Any = None

    def __iter__(self) -> _PlainIterator:
        return self

    def __next__(self) -> Any:
        if self.meter.error is not None:
            raise without_traceback(self.meter.error)
        start = time.perf_counter()
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        element = next(self._iterator)
        self.meter.waited += time.perf_counter() - start
        self.meter.elements += 1
        return element

    def close(self) -> None:
        self._iterator = None


class _ErrorTranslator:
    """Translates the errors of an iterator. The caller registers its consumer."""

    def __init__(self, consumers: Consumers, before: Callable[[], object] | None = None) -> None:
        self._consumers = consumers
        self.before = before

    def opened(self, meter: IteratorMetrics) -> None:
        if self.before is not None:
            self.before()

    def ended(self) -> None:
        pass

    def failure(self, error: Any, meter: IteratorMetrics) -> BaseException:
        return translate(error, self._consumers, meter.use)


class _Watcher(_ErrorTranslator):
    """Registers the iterators of one dataset as one consumer."""

    def __init__(
        self, consumers: Consumers, name: str, before: Callable[[], object] | None
    ) -> None:
        super().__init__(consumers, before)
        self._name = name
        self._consumer = DatasetConsumer()

    def opened(self, meter: IteratorMetrics) -> None:
        super().opened(meter)
        self._consumer.add(meter)
        self._consumers.add(self._consumer, self._name)

    def ended(self) -> None:
        self._consumers.measure(self._consumer)


_MARKER = re.compile(r"\[(TFD\d{3})\](.*?)(?=\[Op:|\[\[|\Z)", re.S)
_WORKER = re.compile(r"Failed to get element from worker (\S+?):? ")
_STAGE = re.compile(
    r"Error in user-defined function passed to (\w+?)(?:Dataset)?(?:V\d)?:\d+ transformation "
    r"with iterator: \S+?: "
)
_UNLISTED_WORKER = re.compile(r"Worker (\S+) is not in the workers list")
_TOO_FEW = re.compile(r"expected to contain (\d+) elements but contained only (\d+)")
#: TensorFlow names files also if elements are divided. Its number does not include all of them.
_TOO_FEW_SHARES = re.compile(r"only has \d+ file.*?required (\d+) shards")
_NO_DIRECTORY = re.compile(r"(\S+)/[^\s/]*_\d+\.(?:data-|index|lockfile)\S*; No such file")
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
_PYTHON_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
#: Files that do not belong to the user, on this host or a worker's. These are frozen modules, the
#: standard library, installed packages, and the code that AutoGraph generates.
_NOT_USERS = re.compile(
    r"<frozen |/python3\.\d+t?/|[/\\](?:site|dist)-packages[/\\]|__autograph_generated_file"
)
_INTERNAL_TEXT = re.compile(
    r"\{\{function_node [^}]*\}\}\s*|Failed to get element from worker \S+ "
    r"|Failed to get an element, with a nonretryable error: |Failed to get (?:element|tasks): "
    r"|\[\[.*?\]\]|\[Op:\w+\](?: name:.*)?|Traceback \(most recent call last\):.*",
    re.S,
)
#: Messages with the error that replaces them: class, problem with the match and its groups, task
#: and fix.
_KNOWN: tuple[tuple[re.Pattern[str], type[errors.TfdError], str, str | None, str], ...] = (
    (
        re.compile(r"[^\s;]*; No space left on device"),
        errors.WorkDirError,
        "a disk is full, probably the one with the dispatcher's journal ({0})",
        "dispatcher:0",
        "free disk space, or start the cluster with another Service(work_dir=...)",
    ),
    (
        re.compile("Iteration client id not found"),
        errors.DispatcherLost,
        "the dispatcher has ended this read, because this process sent no heartbeat for about two "
        "minutes. It was suspended, or had no connection",
        "dispatcher:0",
        "start a new loop, which reads a complete epoch",
    ),
    (
        # Two iterators that begin together replace the files of each other.
        re.compile(
            r"(?:cache lockfile already exists \('|Existing cache files found:\s+|"
            r"(?=\S+_\d+\.(?:data-|index|lockfile)\S*; No such file))([^'\s;]+)"
        ),
        errors.DataError,
        "cache(file) failed, because another iterator writes the file, or has not completed it "
        "({1}). Each data worker has its own iterator, and a loop that is left early leaves one",
        None,
        "delete the file if no other process writes the cache. Then call cache(file) after "
        "distribute, and read it to the end once",
    ),
    (
        re.compile(r"Resource \S+ does not exist"),
        errors.PipelineError,
        "a table, or another resource, that the dataset uses was deleted ({0})",
        None,
        "create the resource and the dataset again",
    ),
    (
        re.compile(r"[^\s;]+_\d+\.\w+; (?:Permission denied|Not a directory)"),
        errors.DataError,
        "cache(file) failed, because its file cannot be created ({0})",
        None,
        "use a directory in which this user, on the host of each data worker, can create files",
    ),
    (
        re.compile(r"Splitting is not implemented for (\w+) datasets"),
        errors.DataError,
        'mode "dynamic" cannot split a dataset of {1}()',
        None,
        'use processing_mode="data", or read this dataset without a service',
    ),
    (
        re.compile(
            r"[Cc]annot create split providers for dataset of type (\w+?)(?:Dataset)?(?:V\d)?\b"
        ),
        errors.DataError,
        'mode "dynamic" cannot split a source of type {1}',
        None,
        'use processing_mode="data", or read this dataset without a service',
    ),
    (
        re.compile(
            r"(?:an un|not find a )shardable source.*?op: \"(\w+?)(?:Dataset)?(?:V\d)?\"", re.S
        ),
        errors.DataError,
        'mode "file" needs a source that reads files, and the pipeline reads from {1}',
        None,
        'use processing_mode="data", which divides the results, or "dynamic"',
    ),
    (
        re.compile(
            r"larger than cache size in bytes\. Got element size: (\d+) and cache size: (\d+)"
        ),
        errors.DataError,
        "an element has {1} bytes, and the cache of cross_trainer_cache= only {2}",
        None,
        "start the cluster with a larger Service(cross_trainer_cache_size_bytes=...), which has "
        "room for all elements that trainers read at different times",
    ),
)


#: The next step if a dataset has fewer files or elements than data workers.
FEWER_WORKERS = (
    "use fewer data workers, or read a dataset this small without a service. For files, or "
    'another source that can be split, use processing_mode="dynamic"'
)


def translate(error: Any, consumers: Consumers, use: Delivery | None = None) -> BaseException:
    """Return the TfdError for TensorFlow's `error`. `use` is how a service is read, if known.

    The result is also an instance of the class of `error`, so that code that catches TensorFlow's
    errors still works. A message with an error code of tfd (``[TFD302] ...``) becomes the error of
    that code. The answer of a failed task is an example.
    """
    message = str(error.message)
    # An error of a tf.function begins with the location of the function's own ops.
    message = message[max(0, message.find("Failed to get element")) :]
    worker = _WORKER.search(message)
    task = consumers.task_of(worker[1]) if worker else None
    marked = _MARKER.search(message)
    if marked and marked[1] in errors.BY_CODE:
        what, _, fix = marked[2].partition("\nNext: ")
        fix = fix.partition("\n")[0].strip()
        return _combined(errors.BY_CODE[marked[1]], error, what.strip(), task, fix or None)
    where = "this process"
    if worker:
        where = f"{task} ({worker[1]})" if task else f"data worker {worker[1]}"
    text = plain(message)
    missing_op = re.search(r"Op type not registered '(\w+)'", message)
    if missing_op:
        what = f"{where} has no op {missing_op[1]}, which an additional library defines"
        fix = "start the cluster with preload=[the module or *.so that defines the op]"
        return _combined(errors.PipelineError, error, what, task, fix)
    if "Could not find callback with key=" in message:
        what = f"{where} does not have a Python function of the pipeline ({text})"
        fix = "create the dataset again, and call cluster.distribute(), which sends its functions"
        return _combined(errors.NotSerializable, error, what, task, fix)
    if undivided := _TOO_FEW_SHARES.search(message):
        workers = int(undivided[1])
        count = use.too_few(workers) if use is not None else ""
        what = (
            f"the dataset has too few files or elements{f' ({count})' if count else ''}: this mode "
            f"needs at least one for each of the {workers} data workers"
        )
        return _combined(errors.DataError, error, what, None, FEWER_WORKERS)
    if (absent := _NO_DIRECTORY.search(message)) and not os.path.isdir(absent[1]):
        what = f"cache(file) failed, because {where} has no directory {absent[1]}"
        return _combined(errors.DataError, error, what, task, "create it, or use another path")
    for pattern, kind, problem, concerned, fix in _KNOWN:
        if found := pattern.search(message):
            what = problem.format(found[0], *found.groups())
            return _combined(kind, error, what, concerned, fix)
    stray = _UNLISTED_WORKER.search(message)
    if stray:
        address = consumers.task_of(stray[1]) or "a data worker that has left"
        what = f"the dispatcher expects {address} ({stray[1]}), which has no share of the data"
        fix = 'use processing_mode="dynamic", restart that worker, or create a new cluster'
        return _combined(errors.DataError, error, what, None, fix)
    short = _TOO_FEW.search(message)
    if worker is None and short:
        what = (
            f"{short[2]} of {short[1]} elements arrived: a data worker stopped or restarted and "
            "lost the elements that it had prepared"
        )
        fix = "iterate again to get a complete epoch"
        return _combined(errors.DataLoss, error, what, None, fix)
    discarded = "Failed to get split: Iteration id" in message
    if discarded or (worker is None and "dispatcher" in message):
        what = f"the dispatcher has discarded this iteration ({text})"
        fix = "start a new loop. With Service(fault_tolerant=True), loops survive a restart"
        return _combined(errors.DispatcherLost, error, what, "dispatcher:0", fix)
    return _combined(errors.PipelineError, error, failure(message, where), task, None)


def failure(message: str, where: str) -> str:
    """Return a description of the error in a pipeline from TensorFlow's message."""
    return f"the pipeline failed in {where}{_stage(message)}: {plain(message)}"


def plain(message: str) -> str:
    """Return a message without locations and tracebacks, in one line."""
    return " ".join(_INTERNAL_TEXT.sub("", _STAGE.sub("", message)).split())


def _stage(message: str) -> str:
    """Return a description of the pipeline stage that `message` names."""
    parts = []
    stage = _STAGE.search(message)
    if stage:
        parts.append(f"stage {re.sub(r'(?<=[a-z])(?=[A-Z])', '_', stage[1]).lower()}")
    nodes = [node for node in _NODE.findall(message) if "IteratorGetNext" not in node]
    if nodes:
        parts.append(f"op {nodes[-1]}")
    found = (
        autograph.original(file, int(line), name)
        for file, line, name in _PYTHON_LINE.findall(message)
    )
    lines = [
        f"{name} ({file}:{line})" for file, line, name in found if "/tensorflow/python/" not in file
    ]
    users = [line for line in lines if not _NOT_USERS.search(line)]
    if lines:
        parts.append(f"in {(users or lines)[-1]}")
    return ", " + ", ".join(parts) if parts else ""


def _combined(
    kind: type[errors.TfdError], error: Any, what: str, task: str | None, fix: str | None
) -> BaseException:
    """Return an error of class `kind` that is also of TensorFlow's class of `error`."""
    return combine(kind(what, task=task, fix=fix), error)
