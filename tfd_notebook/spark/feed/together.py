"""Batches for workers that take every step together, however unevenly Spark deals out the rows.

A worker without rows that waits for some would have its peers wait in their next collective, and
the feeder of their rows with them: nobody could go on. So each worker says before each step, by a
collective too, how many rows it has, and one that has none takes part with an empty batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tfd_notebook.spark.feed import dataset

if TYPE_CHECKING:
    from tfd_notebook.spark.feed.datafeed import DataFeed

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
