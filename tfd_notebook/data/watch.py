"""Datasets that stay ``tf.data.Dataset`` and are watched while this process iterates them."""

from __future__ import annotations

import re
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tfd_notebook import errors
from tfd_notebook.data.consumers import Consumers, DatasetSource

if TYPE_CHECKING:
    from tfd_notebook._compat.meter import Meter


def watch(dataset: Any, consumers: Consumers, name: str | None = None) -> Any:
    """Return `dataset`, watched by `consumers` whenever Python or Keras iterates it.

    Every iterator is counted, can be cancelled while it blocks (Ctrl-C, the end of the cluster),
    and raises errors that say what failed. What is made from the result by its methods is watched
    too. Loops inside a ``tf.function`` stay TensorFlow's own; an iterator that is passed into one,
    as Keras does, is watched.

    Parameters
    ----------
    dataset : tf.data.Dataset
    consumers : Consumers
    name : str, optional
        Its name in the views. Default ``"dataset"``.

    Returns
    -------
    tf.data.Dataset
        Elements, options, cardinality and ``element_spec`` are those of `dataset`. With a
        TensorFlow whose internals are unknown it is `dataset` itself, and a warning says so.
    """
    compat = load_compat()
    if compat is None:
        return dataset
    if isinstance(dataset, compat.WatchedDataset):
        dataset = dataset.bare
    return compat.WatchedDataset(dataset, _Watcher(consumers, name or "dataset"))


def load_compat() -> ModuleType | None:
    """Return the module that knows TensorFlow's internals, None where they are unknown."""
    try:
        from tfd_notebook._compat import tensorflow
    except (ImportError, AttributeError) as error:
        import tensorflow as tf

        warnings.warn(
            f"TensorFlow {tf.__version__} is not known here ({error}): datasets are not watched "
            "and Ctrl-C waits for the next element",
            UserWarning,
            stacklevel=3,
        )
        return None
    return tensorflow


class _Watcher:
    """Lists the iterators of one dataset as one consumer."""

    def __init__(self, consumers: Consumers, name: str) -> None:
        self._consumers = consumers
        self._name = name
        self._source = DatasetSource()

    def opened(self, meter: Meter) -> None:
        self._source.add(meter)
        self._consumers.add(self._source, self._name)

    def failure(self, error: Any) -> BaseException:
        return translate(error, self._consumers)


_BY_CODE = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.TfdError)
}

_MARKER = re.compile(r"\[(TFD\d{3})\]\s*(.*?)(?:\nNext: ([^\n\[]*))?(?=\s*\[Op:|\s*\[\[|$)", re.S)
_WORKER = re.compile(r"Failed to get element from worker (\S+?):? ")
_NOISE = re.compile(
    r"^(?:\{\{function_node [^}]*\}\}\s*)?(?:Failed to get element from worker \S+ )?"
    r"(?:Failed to get an element, with a nonretryable error: )?(?:Failed to get element: )?"
)
_TRANSFORMATION = re.compile(
    r"Error in user-defined function passed to (\w+?)(?:Dataset)?(?:V\d)?:\d+ transformation "
    r"with iterator: \S+?: "
)
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
_PYTHON = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def translate(error: Any, consumers: Consumers) -> BaseException:
    """Return the TfdError for TensorFlow's `error`.

    It is an instance of the class of `error` too, so that code which catches TensorFlow's
    errors goes on to work. Texts that carry a code of ours (``[TFD302] ...``, which is how a task
    that is gone for good answers) become the error of that code.
    """
    message = str(error.message)
    marked = _MARKER.search(message)
    worker = _WORKER.search(message)
    task = consumers.task_of(worker[1]) if worker else None
    if marked and marked[1] in _BY_CODE:
        return _both(_BY_CODE[marked[1]], error, marked[2].strip(), task, marked[3])
    where = f"data worker {worker[1]}" if worker else "this process"
    if task:
        where = f"{task} ({worker[1]})" if worker else task
    text = _cleaned(message)
    if "Could not find callback with key=" in message:
        return _both(
            errors.NotSerializable,
            error,
            f"{where} does not have a Python function of the pipeline: {text}",
            task,
            "run the cell that defines the dataset again, then cluster.distribute()",
        )
    missing = re.search(r"Op type not registered '(\w+)'", message)
    if missing:
        return _both(
            errors.PipelineError,
            error,
            f"{where} does not know the op {missing[1]}, which a library adds",
            task,
            "start the cluster with preload=[the module or *.so that has the op]",
        )
    if worker is None and "dispatcher" in message.lower():
        return _both(
            errors.DispatcherLost,
            error,
            f"the dispatcher does not serve this dataset any more: {text}",
            None,
            "distribute the dataset again and start a new loop",
        )
    return _both(errors.PipelineError, error, f"the pipeline failed in {where}{text}", task, None)


def _cleaned(message: str) -> str:
    """Return TensorFlow's text without the parts that name its own plumbing."""
    return message


def _both(
    kind: type[errors.TfdError], error: Any, what: str, task: str | None, fix: str | None
) -> BaseException:
    base = type(error)

    def __init__(self: Any, what: str, *, task: str | None = None, fix: str | None = None) -> None:
        base.__init__(self, error.node_def, error.op, error.message)
        kind.__init__(self, what, task=task, fix=fix)

    def __reduce__(self: Any) -> Any:
        return kind(self.what, task=self.task, fix=self.fix).__reduce__()

    body = {"__init__": __init__, "__reduce__": __reduce__, "__module__": kind.__module__}
    combined = type(kind.__name__, (kind, base), body)
    return combined(what, task=task, fix=fix)
