"""What the user's function reads its rows from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfd_notebook.errors import UsageError
from tfd_notebook.spark.feed import dataset
from tfd_notebook.spark.feed.chunks import Chunk, pack
from tfd_notebook.spark.feed.inbox import Inbox, Source

if TYPE_CHECKING:
    pass


class DataFeed:
    """Rows that Spark feeds to this node. Follows ``tensorflowonspark.TFNode.DataFeed``.

    Parameters
    ----------
    mgr : Inbox
        ``ctx.mgr``.
    train_mode : bool
        False: results are expected, and a partition's end ends a batch. Default True.
    qname_in : str
        Queue that is read. Default ``"input"``.
    qname_out : str
        Kept for programs that name it: results go to who fed the rows. Default ``"output"``.
    input_mapping : mapping of str to str, optional
        From names of columns to names of tensors. A row is then a sequence of values in the order
        of the sorted columns, and a batch a dict of lists by tensor.

    Attributes
    ----------
    done_feeding : bool
        The end of the feed was reached.
    """

    def __init__(
        self,
        mgr: Inbox,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> None:
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
        self._source: Source | None = None
        self._chunk: Chunk | None = None
        self._at = 0
        #: Whose rows have no results yet, and how many, in the order in which they were taken.
        self._owed: deque[list[Any]] = deque()

    def next_batch(self, batch_size: int) -> list[Any] | dict[str, list[Any]]:
        """Return the next rows, as Spark had them.

        Waits for them. Fewer come at the end of the feed, and at a partition's end where results
        are expected.

        Parameters
        ----------
        batch_size : int

        Returns
        -------
        list, or dict of lists where there is an `input_mapping`
        """
        rows: list[Any] = []
        for chunk, start, stop in self._spans(batch_size):
            rows += chunk.rows(start, stop)
        if self.input_tensors is None:
            return rows
        columns = zip(*rows, strict=False) if rows else [()] * len(self.input_tensors)
        return dict(zip(self.input_tensors, map(list, columns), strict=False))

    def next_numpy(self, batch_size: int) -> Any:
        """Return the next rows as arrays, with the first dimension of the batch.

        Rows that are lists or tuples of numbers, or arrays of one shape, give one array; other
        tuples and lists a tuple of arrays, dicts and Rows a dict of them; what has no better array
        gives one of objects. They may be views of what was received.

        Parameters
        ----------
        batch_size : int

        Returns
        -------
        numpy.ndarray, or tuple or dict of them
            By tensor where there is an `input_mapping`. An empty array at the end of the feed.
        """
        import numpy as np

        from tfd_notebook.spark.feed import dataset

        spans = list(self._spans(batch_size))
        if not spans:
            nothing = np.empty(0, object)
            return (
                nothing
                if self.input_tensors is None
                else dict.fromkeys(self.input_tensors, nothing)
            )
        arrays = dataset.joined(
            [chunk.arrays(start, stop) for chunk, start, stop in spans],
            lambda: [row for chunk, start, stop in spans for row in chunk.rows(start, stop)],
        )
        return dataset.named(self.input_tensors, arrays)

    def as_dataset(
        self, batch_size: int, output_signature: Any = None, *, drop_remainder: bool = False
    ) -> Any:
        """Return a dataset of batches of the rows.

        It can be iterated once, and ends where the feed ends. Where results are expected
        (``train_mode=False``) a partition's end ends a batch.

        Parameters
        ----------
        batch_size : int
            Rows in a batch.
        output_signature : nested structure of tf.TypeSpec, optional
            Of *one row*, as `tf.data.Dataset.from_generator` takes it; numbers are cast to its
            types. Default: that of the first rows, which are waited for; Python's floats are then
            float32, its ints int64.
        drop_remainder : bool
            Leave out a last batch that is smaller. Default False.

        Returns
        -------
        tf.data.Dataset

        Raises
        ------
        UsageError
            The rows have no tensors: several lengths, or None among numbers. Within the dataset
            TensorFlow raises it as an error of its generator.
        """
        from tfd_notebook.spark.feed import dataset

        return dataset.as_dataset(self, batch_size, output_signature, drop_remainder)

    def together(
        self, strategy: Any, batch_size: int, output_signature: Any
    ) -> Iterator[tuple[Any, int]]:
        """Yield a batch for each step that all workers of `strategy` take together.

        All of them have to call it, and take as many steps: a worker that has no rows at the
        moment gets an empty batch, so that nobody waits in a collective for one that waits for
        rows. It ends for all at the same step, when the feed of all has ended.

        Parameters
        ----------
        strategy : tf.distribute.MultiWorkerMirroredStrategy
        batch_size : int
            Most rows of this worker in a step.
        output_signature : nested structure of tf.TypeSpec
            Of one row, with a known shape.

        Yields
        ------
        batch : nested structure of tf.Tensor
            From 0 to `batch_size` rows. Have the step, a `tf.function`, reduce its retracing.
        total : int
            Rows of all workers in this step, at least 1: divide sums over rows by it.

        Raises
        ------
        UsageError
            The rows do not fit the signature.
        """
        return together(self, strategy, batch_size, output_signature)

    def first(self) -> Chunk | None:
        """Wait for rows, and return the chunk that the next batch begins in; None at the end."""
        while self._chunk is None and not self.done_feeding:
            self._receive()
        return self._chunk

    def rows_in_hand(self) -> int:
        """Wait for rows, and return how many are left of their chunk; 0 at the end."""
        chunk = self.first()
        return 0 if chunk is None else chunk.count - self._at

    def parts(self, count: int, wait: float | None = None) -> Iterator[Any]:
        """Yield the next rows, up to a batch, as arrays: in as many parts as they came.

        Fewer where none come for `wait` seconds. Default: they are waited for.
        """
        for chunk, start, stop in self._spans(count, wait):
            yield chunk.arrays(start, stop)

    def should_stop(self) -> bool:
        """Whether the end of the feed was reached."""
        return self.done_feeding

    def batch_results(self, results: Sequence[Any]) -> None:
        """Give the results of the rows that were taken, one for each row, in their order.

        Parameters
        ----------
        results : sequence
            For all rows of a batch, or for some: the next call goes on behind them.

        Raises
        ------
        UsageError
            More results than rows.
        """
        at, count = 0, len(results)
        while at < count:
            if not self._owed:
                raise UsageError(
                    f"{count - at} results more than rows were taken",
                    task=self.mgr.node,
                    fix="give exactly one result for each row of a batch",
                )
            owed = self._owed[0]
            source, rows = owed
            some = min(rows, count - at)
            if not source.gone:
                part = results[at : at + some]
                self.mgr.give(source, pack(part if isinstance(part, list) else list(part)))
            at += some
            owed[1] -= some
            if not owed[1]:
                self._owed.popleft()

    def terminate(self) -> None:
        """Take no more rows: what waits is dropped, and who feeds now or later ends at once."""
        self.mgr.terminate()
        self._release()
        self.done_feeding = True

    def _spans(self, count: int, wait: float | None = None) -> Iterator[tuple[Chunk, int, int]]:
        """Yield parts of chunks, until there are `count` rows or the batch ends."""
        found = 0
        while found < count and not self.done_feeding:
            if self._chunk is None:
                if wait is not None and not self.mgr.arrived(self.qname_in, wait):
                    return
                ended_partition = self._receive()
                if ended_partition and found and not self.train_mode:
                    return
                continue
            source, chunk = self._source, self._chunk
            assert source is not None
            start, stop = self._at, min(self._at + count - found, chunk.count)
            found += stop - start
            self._at = stop
            self.mgr.took(source, stop - start)
            if source.infer:
                self._owed.append([source, stop - start])
            yield chunk, start, stop
            if stop == chunk.count:
                self._release()

    def _receive(self) -> bool:
        """Wait for the next chunk; True where a partition's end came instead."""
        item = self.mgr.take(self.qname_in)
        self._at = 0
        if item is None:
            self.done_feeding = True
            return False
        self._source, self._chunk = item
        return self._chunk is None

    def _release(self) -> None:
        if self._chunk is not None and self._source is not None:
            self.mgr.consumed(self._source)
        self._chunk = None


#: Seconds to wait for a first row, after a batch that had some and after one that had none.
_WAIT, _WAIT_AGAIN = 0.1, 0.01


def together(
    feed: DataFeed, strategy: Any, batch_size: int, output_signature: Any
) -> Iterator[tuple[Any, int]]:
    """Yield what `DataFeed.together` documents."""
    import tensorflow as tf

    def voted(said: Any) -> Any:
        def replica(said: Any) -> Any:
            # An argument has no device, and all_reduce wants to know one.
            return tf.distribute.get_replica_context().all_reduce("sum", tf.identity(said))

        return strategy.run(replica, (said,))

    vote = tf.function(voted)
    nothing = tf.nest.map_structure(
        lambda spec: np.zeros([0, *spec.shape], spec.dtype.as_numpy_dtype), output_signature
    )
    rows = batch_size
    while True:
        wait = _WAIT if rows else _WAIT_AGAIN
        arrays = dataset.taken(feed, batch_size, output_signature, wait)
        if arrays is None:
            arrays = nothing
        rows = len(tf.nest.flatten(arrays)[0])
        said = tf.constant([rows, not feed.done_feeding], tf.int64)
        counted = strategy.experimental_local_results(vote(said))
        total, going = (int(number) // len(counted) for number in counted[0])
        if total:
            yield (
                tf.nest.map_structure(
                    lambda spec, array: tf.convert_to_tensor(array, spec.dtype),
                    output_signature,
                    arrays,
                ),
                total,
            )
        elif not going:
            return
