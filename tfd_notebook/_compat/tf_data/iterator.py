"""TensorFlow iterators and datasets that count elements and can be cancelled while they block."""

from __future__ import annotations

import functools
import inspect
import re
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import tensorflow as tf
from tensorflow.core.framework import model_pb2
from tensorflow.python.data.ops import dataset_ops, iterator_ops
from tensorflow.python.data.util import structure
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import ops

from tfd_notebook._compat import sigint
from tfd_notebook._compat.tf_coordinator import cancellation
from tfd_notebook._compat.tf_data import iterator_cleanup, pipeline_model
from tfd_notebook._compat.tf_data.meter import (
    Blocked,
    IteratorMetrics,
    MetricTotals,
    without_traceback,
)
from tfd_notebook.errors import StateError
from tfd_notebook.model.handle import Handle

# Read these names here, so that an unsupported TensorFlow fails at this import.
CancellationManager = cancellation.CancellationManager
execute_with_cancellation = execute.execute_with_cancellation
init_scope = ops.init_scope
_call_function = context.Context.call_function
_from_tensors = structure.from_compatible_tensor_list
_raw = tf.raw_ops
_raw_iterator = _raw.AnonymousIteratorV3
_stats = (
    _raw.StatsAggregatorHandle,
    _raw.StatsAggregatorSummary,
    _raw.LatencyStatsDataset,
    _raw.SetStatsAggregatorDataset,
)
_model_op = getattr(_raw, "IteratorGetModelProto", None)
OpError = tf.errors.OpError
_END = tf.errors.OutOfRangeError

#: Last stages after which TensorFlow inserts no prefetch. A prefetch after the clock would hide the
#: consumer's waiting. `_clocked` therefore inserts it before the clock.
_ASYNCHRONOUS = (
    "_PrefetchDataset",
    "_ParallelMapDataset",
    "_ParallelBatchDataset",
    "_ParallelInterleaveDataset",
    "_MapAndBatchDataset",
)
_TRANSPARENT = ("_OptionsDataset", "_IgnoreErrorsDataset", "WatchedDataset")
_TAG = "tfd-wait"

#: Matches errors of functions whose failing op reads an iterator.
_FROM_DATA = re.compile(
    r"\[\[(?:\{\{node )?[^\[\]{}]*IteratorGetNext(?:AsOptional)?(?:_\d+)?(?:\}\})?\]\]"
)


class Watcher(Protocol):
    """Receiver of an iterator's events."""

    def opened(self, meter: IteratorMetrics) -> None:
        """Handle a new iterator with its metrics."""

    def ended(self) -> None:
        """Handle the end of an iterator while it exists. Its deletion does not call this."""

    def failure(self, error: Any, meter: IteratorMetrics) -> BaseException:
        """Return the error that the consumer gets for TensorFlow's `error`."""


class WatchedIterator(iterator_ops.OwnedIterator, Handle):
    """A ``tf.data.Iterator`` with metrics, whose ``next`` another thread can cancel.

    The first use creates TensorFlow's resource. For Python's ``next`` it is a plain one. For a
    ``tf.function`` it includes a clock, because Python cannot observe the function's waiting.
    """

    def __init__(self, dataset: Any, watcher: Watcher) -> None:
        self.meter = IteratorMetrics()
        self.meter.iterator = weakref.ref(self)
        self.meter.use = pipeline_model.delivery_of(dataset)
        self._watcher = watcher
        self._manager = CancellationManager()
        self._resource_handle = iterator_cleanup.IteratorHandle(dataset)
        self._rearm = 0.0
        self._listed = self._clocked = False
        super().__init__(dataset)
        finalizer = weakref.finalize(self, _on_deleted, self.meter, self._resource_handle)
        finalizer.atexit = False

    def _create_iterator(self, dataset: Any) -> None:
        self._dataset = dataset
        self._element_spec = spec = dataset.element_spec
        self._flat_output_types = structure.get_flat_tensor_types(spec)
        self._flat_output_shapes = structure.get_flat_tensor_shapes(spec)
        self._outputs = len(self._flat_output_types)
        self._attrs = (
            "output_types",
            [dtype.as_datatype_enum for dtype in self._flat_output_types],
            "output_shapes",
            [None if s.rank is None else s.as_list() for s in self._flat_output_shapes],
        )
        self._static_bytes, self._sizes = _sizes(self._flat_output_types, self._flat_output_shapes)
        self._counts_all = all(self._sizes)
        self._unpack = getattr(spec, "_from_compatible_tensor_list", None) or functools.partial(
            _from_tensors, spec
        )

    @property
    def _iterator_resource(self) -> Any:
        """The resource, for other callers than `__next__`, usually a tf.function."""
        if self._resource_handle.resource is None:
            with init_scope():
                self._open(clocked=True)
        elif self.meter.clock is None and id(self._resource_handle.resource) not in _exposed:
            # Python has read it so far. Without a clock, TensorFlow's model still counts.
            self.meter.clock = _Clock(self)
        _expose(self)
        return self._resource_handle.resource

    @property
    def opened(self) -> Any:
        """The resource, or None before the first use."""
        return self._resource_handle.resource

    @property
    def dataset(self) -> Any:
        """The dataset that is iterated, without the observing wrapper."""
        return self._dataset

    def _open(self, clocked: bool = False) -> None:
        """Create the resource. Blocks while the dispatcher does not answer."""
        self._raise_if_cancelled()
        if not self._listed:
            self._listed = True
            self._watcher.opened(self.meter)
        dataset, stats = self._dataset._apply_debug_options(), None
        if clocked:
            stats = _raw.StatsAggregatorHandle(container="", shared_name=f"tfd-{uuid.uuid4()}")
            dataset = _clocked(dataset, stats)
        resource = _raw_iterator(
            output_types=self._flat_output_types, output_shapes=self._flat_output_shapes
        )
        # TensorFlow cannot cancel MakeIterator while it connects to the dispatcher. It therefore
        # runs in a thread that this call can abandon.
        result: list[BaseException | None] = []
        opened = threading.Event()
        handle = self._resource_handle

        def make_iterator() -> None:
            try:
                handle.await_earlier()
                _raw.MakeIterator(dataset=dataset._variant_tensor, iterator=resource)
                result.append(None)
            except BaseException as error:
                result.append(error)
            opened.set()

        start = time.perf_counter()
        thread = threading.get_ident()
        self.meter.blocked[thread] = (start, opened.set, False)
        try:
            threading.Thread(target=make_iterator, name="tfd-open-iterator", daemon=True).start()
            opened.wait()
        finally:
            del self.meter.blocked[thread]
            self.meter.waited += time.perf_counter() - start
        self._raise_if_cancelled()
        if result[0] is not None:
            self.fail(result[0])
        if handle.resource is not None:  # restored from an iterator with or without a clock
            iterator_cleanup.IteratorHandle(self._dataset, handle.resource).end_later()
        handle.resource, self._clocked = resource, clocked
        if clocked:
            self.meter.clock = _Clock(self, stats)

    def __next__(self) -> Any:
        if not context.executing_eagerly():
            return super().__next__()
        try:
            return self._next_internal()
        except _END:
            raise StopIteration from None

    def _next_internal(self) -> Any:
        if not context.executing_eagerly():
            return super()._next_internal()
        if self._resource_handle.resource is None:
            self._open()
        meter = self.meter
        if meter.error is not None or meter.interrupted:
            self._raise_if_cancelled()
        thread = threading.get_ident()
        start = time.perf_counter()
        if start > self._rearm and thread == sigint.MAIN_THREAD:
            sigint.arm(meter)
            self._rearm = start + sigint.REARM
        meter.blocked[thread] = (start, self._manager.start_cancel, False)
        try:
            tensors = execute_with_cancellation(
                b"IteratorGetNext",
                self._outputs,
                [self._resource_handle.resource],
                self._attrs,
                context.context(),
                self._manager,
            )
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they refer to the resource
            self.fail(error)
        finally:
            del meter.blocked[thread]
            meter.waited += time.perf_counter() - start
        meter.elements += 1
        if self._static_bytes is not None:
            meter.bytes += self._static_bytes
        else:
            total = sum(
                tensor._num_elements() * size
                for tensor, size in zip(tensors, self._sizes, strict=True)
                if size
            )
            meter.bytes += total
            if self._counts_all:
                meter.latest = total
        return self._unpack(tensors)

    def enter(self, thread: int, call: Blocked) -> None:
        """Record that `thread` calls a function that reads this iterator."""
        self._raise_if_cancelled()
        if thread == sigint.MAIN_THREAD and call[0] > self._rearm:
            sigint.arm(self.meter)
            self._rearm = call[0] + sigint.REARM
        self.meter.blocked[thread] = call

    def close(self) -> None:
        """Delete TensorFlow's resource, although an error may still refer to this iterator."""
        self._resource_handle.end_later(early=not self.meter.complete)

    def _raise_if_cancelled(self) -> None:
        """Raise the error with which this iterator was cancelled, if any."""
        if self.meter.error is not None:
            raise without_traceback(self.meter.error)
        if self.meter.interrupted:  # Ctrl-C cancelled a call that succeeded nevertheless
            self.meter.interrupted = False
            self._manager = CancellationManager()

    def fail(self, error: BaseException) -> NoReturn:
        """Record the end of the iteration, and raise the consumer's error for `error`."""
        try:
            self._fail(error)
        finally:
            self._watcher.ended()

    def _fail(self, error: BaseException) -> NoReturn:
        meter = self.meter
        if isinstance(error, _END):
            meter.finish()
            raise error
        if meter.interrupted and meter.error is None:
            # A RuntimeError if Python's handler raised while TensorFlow created its error.
            meter.cancel(
                StateError(
                    "this iterator was interrupted by Ctrl-C and cannot continue",
                    fix="start a new loop over the dataset",
                )
            )
            raise KeyboardInterrupt from error
        if meter.error is not None:
            raise without_traceback(meter.error) from error
        raised = self._watcher.failure(error, meter) if isinstance(error, OpError) else error
        meter.failure = str(raised)
        meter.end()
        raise raised from (error if raised is not error else error.__cause__)

    def _serialize_to_tensors(self) -> Any:
        if self._resource_handle.resource is None:
            self._open()
        return super()._serialize_to_tensors()

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        if self._resource_handle.resource is None:
            self._open()
        try:
            return super()._restore_from_tensors(restored_tensors)
        except OpError:
            # The checkpoint is from an iterator with a clock, or without.
            self._open(clocked=not self._clocked)
            return super()._restore_from_tensors(restored_tensors)


class WatchedDataset(dataset_ops.UnaryUnchangedStructureDataset, Handle):
    """The same dataset with the same variant, whose iterators in this process are observed."""

    _instead = "send the function that creates it, or the id from cluster.register(dataset)"

    def __init__(self, dataset: Any, watcher: Watcher) -> None:
        self.watcher = watcher
        super().__init__(dataset, dataset._variant_tensor)

    def __iter__(self) -> Any:
        # In a tf.function TensorFlow runs the loop. In asynchronous mode errors are raised later.
        if not context.executing_eagerly() or context.context().executor.is_async():
            return super().__iter__()
        return WatchedIterator(self._input_dataset, self.watcher)

    @property
    def bare(self) -> Any:
        """The dataset that is observed."""
        return self._input_dataset


def _keep_watched(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def transform(self: WatchedDataset, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if isinstance(result, tf.data.Dataset) and not isinstance(result, WatchedDataset):
            return WatchedDataset(result, self.watcher)
        return result

    return transform


for _name, _method in vars(dataset_ops.DatasetV2).items():
    if not _name.startswith("_") and inspect.isfunction(_method):
        setattr(WatchedDataset, _name, _keep_watched(_method))


def _sizes(types: Sequence[Any], shapes: Sequence[Any]) -> tuple[int | None, list[int]]:
    """Return the bytes of an element, or None if its shape varies, and of each tensor's items."""
    sizes = [0 if dtype in (tf.string, tf.variant, tf.resource) else dtype.size for dtype in types]
    items = [shape.num_elements() for shape in shapes]
    if any(size and count is None for size, count in zip(sizes, items, strict=True)):
        return None, sizes
    return sum(size * (count or 0) for size, count in zip(sizes, items, strict=True)), sizes


def _clocked(dataset: Any, handle: Any) -> Any:
    """Return `dataset` with TensorFlow's own clock, which sums the waiting of its consumer."""
    source = dataset
    while type(source).__name__ in _TRANSPARENT:
        source = source._input_dataset
    inject = dataset.options().experimental_optimization.inject_prefetch
    if inject is not False and type(source).__name__ not in _ASYNCHRONOUS:
        dataset = dataset.prefetch(tf.data.AUTOTUNE)
    spec = dataset.element_spec
    form = {
        "output_types": structure.get_flat_tensor_types(spec),
        "output_shapes": structure.get_flat_tensor_shapes(spec),
    }
    variant = _raw.LatencyStatsDataset(input_dataset=dataset._variant_tensor, tag=_TAG, **form)
    variant = _raw.SetStatsAggregatorDataset(
        input_dataset=variant, stats_aggregator=handle, tag="", counter_prefix="", **form
    )
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset_ops.UnaryUnchangedStructureDataset(dataset, variant).with_options(options)


class _Clock:
    """Reads the figures that TensorFlow counts for an iterator that a tf.function reads."""

    def __init__(self, iterator: WatchedIterator, handle: Any = None) -> None:
        self._iterator = weakref.ref(iterator)
        self._handle = handle
        self._element_bytes = iterator._static_bytes
        self.totals = MetricTotals()

    def sample(self) -> None:
        last = self.totals
        latencies = self._latencies()
        size = self._element_bytes
        if latencies is not None:
            elements, waited = latencies
            root = self._root() if size is None else None
        else:
            root = self._root()
            elements, waited = last.elements, last.waited
            if root is not None:
                elements = max(elements, root.elements)
        if size is not None:
            total = elements * size
        elif root is not None:
            total = root.bytes
        else:  # the iterator was deleted: estimate from the size of earlier elements
            total = last.bytes * elements // max(1, last.elements)
        self.totals = MetricTotals(elements, total, waited)

    def starved(self) -> bool:
        model = self._model()
        node = model.nodes[model.output] if model is not None else None
        while node is not None and not _is_async(node):
            node = model.nodes[node.inputs[0]] if len(node.inputs) == 1 else None
        return node is None or node.buffered_elements == 0

    def close(self) -> None:
        if self._handle is not None:
            _raw.DestroyResourceOp(resource=self._handle, ignore_lookup_error=True)

    def _latencies(self) -> tuple[int, float] | None:
        if self._handle is None:
            return None
        try:
            text = _raw.StatsAggregatorSummary(iterator=self._handle).numpy()
        except tf.errors.NotFoundError:  # connecting to a cluster deletes named resources
            self._handle = None
            return None
        for value in tf.compat.v1.Summary.FromString(text).value:
            if value.tag == _TAG:
                return int(value.histo.num), value.histo.sum / 1e6
        return 0, 0.0

    def _root(self) -> MetricTotals | None:
        """Return the elements that Python's ``next`` has not read, from TensorFlow's model."""
        model, iterator = self._model(), self._iterator()
        if model is None or iterator is None:
            return None
        root, counted = model.nodes[model.output], iterator.meter
        return MetricTotals(
            max(0, root.num_elements - counted.elements),
            max(0, root.bytes_produced - counted.bytes),
        )

    def _model(self) -> Any:
        iterator = self._iterator()
        if iterator is None or _model_op is None:
            return None
        try:
            text = _model_op(iterator=iterator.opened).numpy()
        except OpError:  # a pipeline without autotuning has no model
            return None
        return model_pb2.ModelProto.FromString(text)


def _is_async(node: Any) -> bool:
    return "ASYNC" in model_pb2.NodeClass.Name(node.node_class)


#: Iterators that a tf.function may use, by the identity of their resource tensor.
_exposed: dict[int, weakref.ref[WatchedIterator]] = {}


def _expose(iterator: WatchedIterator) -> None:
    key = id(iterator.opened)
    if key not in _exposed:
        _exposed[key] = weakref.ref(iterator, lambda _: _exposed.pop(key, None))


def _watched_call(self: Any, name: Any, tensor_inputs: Any, *rest: Any, **options: Any) -> Any:
    """Call a function as TensorFlow does. Calls that read an observed iterator are cancellable."""
    if _exposed.keys().isdisjoint(map(id, tensor_inputs)) or cancellation.current() is not None:
        return _call_function(self, name, tensor_inputs, *rest, **options)
    manager = CancellationManager()
    iterators = [
        iterator
        for tensor in tensor_inputs
        if (reference := _exposed.get(id(tensor))) is not None
        and (iterator := reference()) is not None
        and iterator.opened is tensor
    ]
    thread = threading.get_ident()
    start = time.perf_counter()
    for iterator in iterators:
        iterator.enter(thread, (start, manager.start_cancel, True))
    try:
        with cancellation.by(manager):
            return _call_function(self, name, tensor_inputs, *rest, **options)
    except Exception as error:
        concerned = [iterator for iterator in iterators if _concerns(iterator, error)]
        if not concerned or (isinstance(error, _END) and len(iterators) > 1):
            raise
        concerned[0].fail(error)
    finally:
        for iterator in iterators:
            iterator.meter.blocked.pop(thread, None)


def _concerns(iterator: WatchedIterator, error: Any) -> bool:
    """Return True if `error` of a function comes from `iterator`, not from the function."""
    if iterator.meter.interrupted:
        return True
    if iterator.meter.error is not None:
        return isinstance(error, tf.errors.CancelledError)
    return isinstance(error, OpError) and _FROM_DATA.search(error.message) is not None


def _on_deleted(meter: IteratorMetrics, handle: iterator_cleanup.IteratorHandle) -> None:
    if meter.clock is not None and meter.failure is None and meter.error is None:
        meter.finished = True  # a function does not report that it reached the end
    meter.end()
    sigint.release(meter)
    handle.end_later(early=not meter.complete)


context.Context.call_function = _watched_call
