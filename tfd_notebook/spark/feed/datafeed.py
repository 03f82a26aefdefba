"""Reader of the rows for the user's function."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfd_notebook.agent.rank_context import no_rows
from tfd_notebook.errors import UsageError
from tfd_notebook.model.handle import Handle
from tfd_notebook.spark.feed import dataset
from tfd_notebook.spark.feed.chunks import Chunk, by_name, pack
from tfd_notebook.spark.feed.inbox import Inbox, Source

#: Interval in seconds of the checks if a loop over a dataset lacks results.
_CHECK_SECONDS = 1.0
_ONE_RESULT = "pass batch_results() exactly one result for each row of a batch"


class DataFeed(Handle):
    """Rows that Spark feeds to this node. Follows ``tensorflowonspark.TFNode.DataFeed``.

    Parameters
    ----------
    mgr : Inbox
        ``ctx.mgr``.
    train_mode : bool
        True (default) for training. False if results are returned with `batch_results`; the end of
        a partition then ends a batch.
    qname_in : str
        Queue to read. Default ``"input"``.
    qname_out : str
        Not used: results go to the task that fed the rows. Default ``"output"``.
    input_mapping : mapping of str to str, optional
        From names of columns to names of tensors. Rows with these names are read by name: dicts,
        Rows and named tuples. Any other row is a sequence of values, in the order of the sorted
        column names. A batch is a dict of lists by tensor.

    Attributes
    ----------
    done_feeding : bool
        True after the end of the feed.

    Raises
    ------
    Unsupported
        `mgr` is None, because `Cluster.run` calls the function.
    UsageError
        `input_mapping` has the same tensor for several columns.
    """

    def __init__(
        self,
        mgr: Inbox,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> None:
        if mgr is None:
            raise no_rows()
        self.mgr = mgr
        self.train_mode = train_mode
        self.qname_in = qname_in
        self.qname_out = qname_out
        self.done_feeding = False
        self.input_tensors = (
            None
            if input_mapping is None
            else [tensor for _, tensor in sorted(input_mapping.items())]
        )
        self._mapped = sorted(input_mapping or ())
        tensors = list((input_mapping or {}).values())
        repeated = next((tensor for tensor in tensors if tensors.count(tensor) > 1), None)
        if repeated is not None:
            raise UsageError(
                f"invalid input_mapping: several columns have the tensor {repeated}",
                fix="give each column its own tensor",
            )
        #: By the path of a column: the order of its names in the first chunk with names there.
        self.orders: dict[dataset.Path, tuple[str, ...]] = {}
        self._source: Source | None = None
        self._chunk: Chunk | None = None
        self._position = 0
        #: Whether the task may already send another chunk instead of this one.
        self._is_acknowledged = False
        #: Items received before the function reads them, of which the task was notified.
        self._ahead: deque[tuple[Source, Chunk | None] | None] = deque()
        #: Number of rows that were read.
        self.rows_read = 0
        #: Sources of consumed rows without results and the number of these rows, in their order.
        self._unanswered: deque[list[Any]] = deque()
        #: The thread that returned the latest results.
        self._answering: int | None = None
        #: The iterators of `as_dataset`, unless in `train_mode`.
        self.readers: dataset.Readers | None = None

    def next_batch(self, batch_size: int) -> list[Any] | dict[str, list[Any]]:
        """Wait for the next rows, and return them as Python values.

        The list is shorter at the end of the feed. With ``train_mode=False`` it is also shorter at
        the end of a partition.

        Parameters
        ----------
        batch_size : int

        Returns
        -------
        list, or dict of lists with an `input_mapping`

        Raises
        ------
        UsageError
            A row has another number of values than the `input_mapping`, or lacks a column.
        """
        rows: list[Any] = []
        by_tensor: dict[str, list[Any]] = {name: [] for name in self.input_tensors or ()}
        for chunk, start, stop in self._spans(batch_size):
            if self.input_tensors is None:
                rows += chunk.rows(start, stop)
                continue
            first = self.rows_read - (stop - start)
            columns = chunk.column.by_name(start, stop)
            part = (
                self._by_tensor(chunk.rows(start, stop), first)
                if columns is None
                else self.named(columns, first)
            )
            for name, values in part.items():
                by_tensor[name] += values
        return rows if self.input_tensors is None else by_tensor

    def next_numpy(self, batch_size: int) -> Any:
        """Return the next rows as arrays, with the batch as first dimension.

        Rows that are lists or tuples of numbers, or arrays of one shape, become one array. Other
        tuples and lists become a tuple of arrays, dicts and Rows a dict of arrays. Other values
        become an array of objects. The arrays may be views of received buffers.

        Parameters
        ----------
        batch_size : int

        Returns
        -------
        numpy.ndarray, or tuple or dict of them
            By tensor with an `input_mapping`. An empty array at the end of the feed.

        Raises
        ------
        UsageError
            A row has another number of values than the `input_mapping`, or lacks a column.
        """
        first = self.rows_read
        spans = list(self._spans(batch_size))
        if not spans:
            empty = np.empty(0, object)
            return empty if self.input_tensors is None else dict.fromkeys(self.input_tensors, empty)

        def rows() -> list[Any]:
            return [row for chunk, start, stop in spans for row in chunk.rows(start, stop)]

        parts, at = [], first
        for chunk, start, stop in spans:
            parts.append(self.named(chunk.arrays(start, stop), at))
            at += stop - start
        if self.input_tensors is None:
            return dataset.join_chunks(parts, rows)
        return {
            name: dataset.join_chunks(
                [part[name] for part in parts],
                lambda name=name: self._by_tensor(rows(), first)[name],  # type: ignore[misc]
            )
            for name in self.input_tensors
        }

    def as_dataset(
        self, batch_size: int, output_signature: Any = None, *, drop_remainder: bool = False
    ) -> Any:
        """Return a dataset of batches of the rows.

        The dataset can be iterated once, and ends with the feed. With ``train_mode=False`` the end
        of a partition ends a batch.

        Parameters
        ----------
        batch_size : int
            Number of rows in a batch.
        output_signature : nested structure of tf.TypeSpec, optional
            Signature of *one row*, as for `tf.data.Dataset.from_generator`. Numbers are cast to its
            types. Default: inferred from the rows of the first batch, which the call waits for.
            Python's floats then become float32, its ints int64. Floats become float64 if float32
            would change a number of 2**24 or more. Ints and floats at the same position become
            floats.
        drop_remainder : bool
            Whether to drop a smaller last batch. Default False.

        Returns
        -------
        tf.data.Dataset

        Raises
        ------
        UsageError
            The rows cannot become tensors: their lengths differ, or they have None among numbers.
            Or a type cannot hold a value. Only floats are rounded: all to a type of
            `output_signature`, and those below 2**24 to an inferred float32. Within the dataset
            TensorFlow raises it as an error of its generator.
        """
        return dataset.as_dataset(self, batch_size, output_signature, drop_remainder)

    def together(
        self, strategy: Any, batch_size: int, output_signature: Any
    ) -> Iterator[tuple[Any, int]]:
        """Yield a batch for each step that all workers of `strategy` run together.

        All workers must call it, and run all of its steps. A worker without rows gets an empty
        batch, so that no worker blocks a collective while it waits for rows. It ends at the same
        step for all workers, when the feeds of all have ended.

        Parameters
        ----------
        strategy : tf.distribute.MultiWorkerMirroredStrategy
        batch_size : int
            Maximum number of rows of this worker per step.
        output_signature : nested structure of tf.TypeSpec
            Signature of one row, with a known shape.

        Yields
        ------
        batch : nested structure of tf.Tensor
            0 to `batch_size` rows. Use ``reduce_retracing=True`` in the `tf.function` of the step.
        total : int
            Number of rows of all workers in this step, at least 1. Divide sums over rows by it.

        Raises
        ------
        UsageError
            The rows do not match the signature.
        """
        return together(self, strategy, batch_size, output_signature)

    def rows_left(self, held: int = 0) -> int:
        """Wait for rows; return the number of rows left in their chunk, 0 at the end.

        `held` is the number of read rows that wait for the rest of their batch.
        """
        while self._chunk is None and not self.done_feeding:
            self._receive(held)
        return 0 if self._chunk is None else self._chunk.count - self._position

    def collect(self, count: int) -> list[tuple[Chunk, int]]:
        """Wait for the next `count` rows, or the end of the batch, without reading them.

        Returns
        -------
        list of (Chunk, int)
            The chunks of these rows, and the position of the first unread row in each.
        """
        rows, at = self.rows_left(), 0
        if self._chunk is None:
            return []
        chunks = [(self._chunk, self._position)]
        while rows < count:
            if at == len(self._ahead):
                # The task sends no more than its window without an acknowledgment.
                self._acknowledge()
                item = self._next_item()
                self._ahead.append(item)
                if item is not None and item[1] is not None:
                    self.mgr.acknowledge(item[0])
            item = self._ahead[at]
            at += 1
            if item is None or (item[1] is None and not self.train_mode):
                break
            if item[1] is None and item[0].infer:
                raise self._no_result(rows)
            if item[1] is not None:
                chunks.append((item[1], 0))
                rows += item[1].count
        return chunks

    def parts(self, count: int, wait: float | None = None) -> Iterator[tuple[int, Any]]:
        """Yield the next `count` rows as arrays, one per chunk, with the number of the first row.

        With an `input_mapping`, the arrays are in a dict by tensor.
        Yield fewer rows if none arrive for `wait` seconds. Default: wait without a timeout.
        """
        for chunk, start, stop in self._spans(count, wait):
            first = self.rows_read - (stop - start)
            yield first, self.named(chunk.arrays(start, stop), first)

    def named(self, parts: Any, first: int) -> Any:
        """Return the columns of a chunk by tensor if there is an `input_mapping`.

        Parameters
        ----------
        parts : numpy.ndarray or tf.TensorSpec, or tuple or dict of them
            The arrays of a chunk, or the signature of its rows. A dict may have lists.
        first : int
            Number of the first row.

        Raises
        ------
        UsageError
            A row has another number of values than the `input_mapping`, or lacks a column.
        """
        columns = self._in_order(parts, first) if isinstance(parts, dict) else parts
        if self.input_tensors is None:
            return columns
        if isinstance(parts, np.ndarray) and parts.ndim == 1:
            # Rows of several types or lengths, or values that are not rows.
            by_tensor = self._by_tensor(parts.tolist(), first)
            return {name: dataset.objects(column) for name, column in by_tensor.items()}
        if isinstance(parts, np.ndarray):
            columns = [parts[:, at] for at in range(parts.shape[1])]
        elif isinstance(columns, dict):
            columns = list(columns.values())
        elif not isinstance(parts, tuple):  # one signature for all columns
            sizes = parts.shape.as_list()[:1]
            columns = [type(parts)(parts.shape[1:], parts.dtype)] * (sizes[0] if sizes else 0)
        if len(columns) != len(self.input_tensors):
            raise self._misfit(f"row {first} has {len(columns)} values")
        return dict(zip(self.input_tensors, columns, strict=True))

    def _in_order(self, columns: dict[str, Any], row: int) -> dict[str, Any]:
        """Return columns in the order of the `input_mapping`, or of the first columns."""
        if self._mapped and set(self._mapped) <= set(columns):
            self.orders.setdefault((), tuple(self._mapped))
            return {name: columns[name] for name in self._mapped}
        names = self.orders.setdefault((), tuple(columns))
        if set(columns) == set(names):
            return {name: columns[name] for name in names}
        if self.input_tensors is not None:
            raise UsageError(
                f"row {row} has the columns {', '.join(columns)}, and the first rows have "
                f"{', '.join(names)}",
                task=self.mgr.node,
                fix="give all rows the same columns",
            )
        return columns

    def _by_tensor(self, rows: list[Any], first: int) -> dict[str, list[Any]]:
        """Return the values of rows by tensor. `first` is the number of the first row."""
        assert self.input_tensors is not None
        count = len(self.input_tensors)
        if not set(map(type, rows)) <= {list, tuple}:
            rows = [self._values(row, first + at) for at, row in enumerate(rows)]
        if set(map(len, rows)) - {count}:
            at, row = next((at, row) for at, row in enumerate(rows) if len(row) != count)
            raise self._misfit(f"row {first + at}: {row!r:.80} has {len(row)} values")
        columns = zip(*rows, strict=True) if rows else [()] * count
        return dict(zip(self.input_tensors, map(list, columns), strict=True))

    def _values(self, row: Any, number: int) -> Any:
        """Return a row as a sequence."""
        columns = by_name(row)
        if columns is not None:
            return tuple(self._in_order(columns, number).values())
        if isinstance(row, (list, tuple)) or (isinstance(row, np.ndarray) and row.ndim):
            return row
        kind = type(row).__name__
        raise self._misfit(f"row {number}: {row!r:.80} ({kind}) is not a sequence of values")

    def _misfit(self, what: str) -> UsageError:
        count, names = len(self._mapped), ", ".join(self._mapped)
        return UsageError(
            f"{what}, but the input_mapping has {count} columns ({names})",
            task=self.mgr.node,
            fix="feed rows with one value for each column of the input_mapping",
        )

    def should_stop(self) -> bool:
        """Return True after the end of the feed."""
        return self.done_feeding

    def batch_results(self, results: Sequence[Any]) -> None:
        """Return the results of consumed rows, one per row, in their order.

        Parameters
        ----------
        results : sequence
            Results for all rows of a batch or for a part. The next call continues after them.

        Raises
        ------
        UsageError
            There are more results than consumed rows, or an earlier partition has rows without
            results.
        """
        at, count = 0, len(results)
        self._answering = threading.get_ident()
        known = list(self._unanswered)  # another thread may read more rows
        if not self.train_mode and known:
            # Before any result is sent, since a task must not complete with one of another.
            first = known[0][0]
            own = sum(rows for source, rows in known if source is first)
            is_last = known[-1][0] is first
            if count > own and not is_last and not first.disconnected:
                raise UsageError(
                    f"batch_results() got {count} results for a batch, but {own} rows of the "
                    "partition before it have no result yet",
                    task=self.mgr.node,
                    fix=_ONE_RESULT,
                )
        while at < count:
            if not self._unanswered:
                raise UsageError(
                    f"batch_results() got {count - at} more results than consumed rows",
                    task=self.mgr.node,
                    fix=_ONE_RESULT,
                )
            unanswered = self._unanswered[0]
            source, rows = unanswered
            part_count = min(rows, count - at)
            if not source.disconnected:
                part = results[at : at + part_count]
                self.mgr.send_results(source, pack(part if isinstance(part, list) else list(part)))
            at += part_count
            unanswered[1] -= part_count
            if not unanswered[1]:
                self._unanswered.popleft()

    def terminate(self) -> None:
        """Stop the feed: drop waiting rows, and stop tasks that feed now or later."""
        self.mgr.terminate()
        self._ahead.clear()
        self._finish_chunk()
        self.done_feeding = True

    def _spans(self, count: int, wait: float | None = None) -> Iterator[tuple[Chunk, int, int]]:
        """Yield spans of chunks, up to `count` rows or the end of the batch."""
        spanned = 0
        while spanned < count and not self.done_feeding:
            if self._chunk is None:
                if wait is not None and not self._wait_for_item(wait):
                    return
                if not spanned:
                    self._check_results()
                ended_partition = self._receive(spanned if wait is None else 0)
                if ended_partition and spanned and not self.train_mode:
                    return
                continue
            source, chunk = self._source, self._chunk
            assert source is not None
            start, stop = self._position, min(self._position + count - spanned, chunk.count)
            spanned += stop - start
            self.rows_read += stop - start
            self._position = stop
            self.mgr.count_rows(source, stop - start)
            if source.infer:
                self._unanswered.append([source, stop - start])
            yield chunk, start, stop
            if stop == chunk.count:
                self._finish_chunk()

    def _check_results(self, readers: dataset.Readers | None = None) -> None:
        """Raise UsageError if rows lack results that nothing can return.

        The thread that waits for more rows is this one, or one of `readers`.
        """
        own = threading.get_ident()
        # First, because a thread returns no results after it has begun to wait.
        waiting = own if readers is None else readers.waiting()
        unanswered = list(self._unanswered)  # another thread may return results
        lacking = sum(
            rows for source, rows in unanswered if source.ended and not source.disconnected
        )
        if waiting is None or not lacking or self._wait_for_item(0.0):
            return
        if self._answering is None:
            threads = threading.enumerate()
            others = {each.ident for each in threads if not each.name.startswith("tfd-")}
            is_alone = others <= {own, waiting}
        else:
            is_alone = self._answering == waiting
        if is_alone:
            raise self._no_result(lacking)

    def _no_result(self, rows: int) -> UsageError:
        """Return the error for rows of an ended partition that cannot get a result."""
        mode = "create the DataFeed with train_mode=False, and " if self.train_mode else ""
        return UsageError(
            f"the function waits for more rows, but {rows} rows of the last partition have no "
            "result",
            task=self.mgr.node,
            fix=mode + _ONE_RESULT,
        )

    def _receive(self, held: int = 0) -> bool:
        """Wait for the next chunk; return True if the end of a partition arrived instead.

        With `held` rows in an unfinished batch, the end of a partition for inference is an error in
        `train_mode`. Its task waits for their results, and feeds no more rows.
        """
        self._is_acknowledged = bool(self._ahead)
        item = self._ahead.popleft() if self._ahead else self._next_item()
        self._position = 0
        if item is None:
            self.done_feeding = True
            return False
        self._source, self._chunk = item
        self._source.ended = self._chunk is None
        if self._source.ended and self._source.infer and self.train_mode and held:
            raise self._no_result(held)
        return self._source.ended

    def _wait_for_item(self, timeout: float) -> bool:
        """Return True if `_receive` has an item, now or within `timeout` seconds."""
        return bool(self._ahead) or self.mgr.wait_for_chunk(self.qname_in, timeout)

    def _next_item(self) -> tuple[Source, Chunk | None] | None:
        while self.readers is not None and not self.mgr.wait_for_chunk(
            self.qname_in, _CHECK_SECONDS
        ):
            self._check_results(self.readers)
        return self.mgr.next_chunk(self.qname_in)

    def _acknowledge(self) -> None:
        if self._source is not None and not self._is_acknowledged:
            self._is_acknowledged = True
            self.mgr.acknowledge(self._source)

    def _finish_chunk(self) -> None:
        if self._chunk is not None:
            self._acknowledge()
        self._chunk = None


#: Timeouts in seconds for the first row of a step, after a step with rows and after one without.
_WAIT_AFTER_ROWS, _WAIT_AFTER_EMPTY = 0.1, 0.01


def together(
    feed: DataFeed, strategy: Any, batch_size: int, output_signature: Any
) -> Iterator[tuple[Any, int]]:
    """Yield batches; see `DataFeed.together`."""
    import tensorflow as tf

    def summed(counts: Any) -> Any:
        def replica(counts: Any) -> Any:
            # An argument has no device, which all_reduce requires.
            return tf.distribute.get_replica_context().all_reduce("sum", tf.identity(counts))

        return strategy.run(replica, (counts,))

    vote = tf.function(summed)
    empty = tf.nest.map_structure(
        lambda spec: np.zeros([0, *spec.shape], spec.dtype.as_numpy_dtype), output_signature
    )
    rows = batch_size
    while True:
        wait = _WAIT_AFTER_ROWS if rows else _WAIT_AFTER_EMPTY
        arrays = dataset.take_rows(feed, batch_size, output_signature, wait)
        if arrays is None:
            arrays = empty
        rows = len(tf.nest.flatten(arrays)[0])
        counts = tf.constant([rows, not feed.done_feeding], tf.int64)
        counted = strategy.experimental_local_results(vote(counts))
        total, feeding = (int(number) // len(counted) for number in counted[0])
        if total:
            yield (
                tf.nest.map_structure(
                    lambda spec, array: tf.convert_to_tensor(array, spec.dtype),
                    output_signature,
                    arrays,
                ),
                total,
            )
        elif not feeding:
            return
