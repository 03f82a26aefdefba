"""What the user's function reads its rows from."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tfd_notebook.errors import UsageError
from tfd_notebook.spark.feed.chunks import Chunk, pack
from tfd_notebook.spark.feed.inbox import Inbox
from tfd_notebook.spark.feed.queues import Source


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

    def _spans(self, count: int) -> Any:
        """Yield parts of chunks, until there are `count` rows or the batch ends."""
        found = 0
        while found < count and not self.done_feeding:
            if self._chunk is None:
                item = self.mgr.take(self.qname_in)
                if item is None:
                    self.done_feeding = True
                    return
                self._source, self._chunk = item
                self._at = 0
                if self._chunk is None:
                    if found and not self.train_mode:
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

    def _release(self) -> None:
        if self._chunk is not None and self._source is not None:
            self.mgr.consumed(self._source)
        self._chunk = None
