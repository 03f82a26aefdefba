"""Rows that Spark feeds to the data workers of a tf.data service.

Each data worker opens an inbox when it begins to produce the dataset, in a directory that is known
from the source's id; tasks of Spark on the same host find it there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tfd_notebook.errors import FeedTimeout, TfdError
from tfd_notebook.launch import sealed
from tfd_notebook.spark.feed.place import Place, choose
from tfd_notebook.spark.feed.sending import feed_partition


class ServiceFeed:
    """Feeds rows to the data workers of a tf.data service, whose consumers read them as batches.

    The data workers have to be on the hosts of Spark's executors: `tfd.Cluster(launcher="spark")`,
    or a local cluster beside a local Spark. Rows go to a data worker of the host that they are on.
    The dataset is to be distributed with ``"off"`` or ``"parallel_epochs"``: each worker brings the
    rows that were fed to it, so that all of them come once.

    Parameters
    ----------
    batch_size : int
        Rows in a batch.
    output_signature : nested structure of tf.TensorSpec
        Of one row, as `DataFeed.as_dataset` takes it.

    Examples
    --------
    >>> feed = ServiceFeed(32, tf.TensorSpec([10], tf.float32))  # doctest: +SKIP
    >>> batches = feed.dataset().apply(cluster.distribute("off"))  # doctest: +SKIP
    >>> fed = threading.Thread(target=feed.train, args=(rdd,))  # doctest: +SKIP
    """

    def __init__(self, batch_size: int, output_signature: Any) -> None:
        self.batch_size = batch_size
        self.output_signature = output_signature
        self._id = uuid.uuid4().hex
        self._secret = sealed.Secret.new()

    def dataset(self) -> Any:
        """Return the dataset, which is to be given to ``cluster.distribute("off")``.

        Its elements are batches. It ends when `end` was called, and each worker has delivered what
        it had.
        """
        import tensorflow as tf

        specs = tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), self.output_signature
        )
        produce = functools.partial(
            _produce, self._id, bytes(self._secret), self.batch_size, self.output_signature
        )
        return tf.data.Dataset.from_generator(produce, output_signature=specs)

    def train(self, rdd: Any, num_epochs: int = 1, feed_timeout: float = 600.0) -> None:
        """Feed an RDD, and wait until the data workers have taken all of it.

        Somebody has to read the dataset meanwhile: in another thread, or another process.

        Parameters
        ----------
        rdd : pyspark.RDD
        num_epochs : int
            How often. Default 1.
        feed_timeout : float
            Seconds without progress, also until a data worker begins. Default 600.

        Raises
        ------
        FeedTimeout, NodeLost
        """
        feed = functools.partial(
            _feed, source=self._id, secret=bytes(self._secret), feed_timeout=feed_timeout
        )
        repeated = rdd if num_epochs == 1 else rdd.context.union([rdd] * num_epochs)
        for error in repeated.mapPartitions(feed).collect():
            raise error

    def end(self, sc: Any) -> None:
        """Let the dataset end: in a small job, that runs on the executors' hosts.

        It tells the data workers that have begun; one that begins later does not hear of it.

        Parameters
        ----------
        sc : pyspark.SparkContext
        """
        tasks = max(2, 2 * int(sc.defaultParallelism))
        work = functools.partial(_end, source=self._id, secret=bytes(self._secret))
        sc.parallelize(range(tasks), tasks).foreachPartition(work)


def _root(source: str) -> Path:
    return Path(tempfile.gettempdir()) / f"tfd-feed-{os.getuid()}-{source[:16]}"


def _places(source: str, secret: bytes) -> list[Place]:
    """Return the inboxes of this host's data workers, whose processes live."""
    found = []
    for path in sorted(_root(source).glob("*/feed-*.sock")):
        pid = int(path.parent.name)
        if os.path.exists(f"/proc/{pid}") or not os.path.isdir("/proc"):
            found.append(
                Place(source, "data_worker", pid, socket.gethostname(), "", 0, str(path), secret)
            )
    return found


def _produce(source: str, secret: bytes, batch_size: int, signature: Any) -> Iterator[Any]:
    """Yield batches in a data worker, of what is fed to it."""
    from tfd_notebook.spark.feed import dataset
    from tfd_notebook.spark.feed.datafeed import DataFeed
    from tfd_notebook.spark.feed.inbox import Inbox

    root = _root(source)
    root.mkdir(mode=0o700, exist_ok=True)
    directory = root / str(os.getpid())
    try:
        with Inbox(directory, secret, role="data_worker", index=os.getpid()) as inbox:
            feed = DataFeed(inbox)
            while not feed.done_feeding:
                parts = [dataset.fitted(arrays, signature) for arrays in feed.parts(batch_size)]
                if parts:
                    yield dataset.concatenated(parts)
            inbox.finish()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            root.rmdir()


def _feed(
    rows: Iterable[Any], source: str, secret: bytes, feed_timeout: float
) -> Iterator[TfdError]:
    """Feed a partition to a data worker of this host, as soon as there is one."""
    deadline = time.monotonic() + feed_timeout
    while not (places := _places(source, secret)):
        if time.monotonic() > deadline:
            yield FeedTimeout(
                f"no data worker on {socket.gethostname()} began within {feed_timeout:g} s",
                fix="read the dataset while it is fed, and run data workers on Spark's hosts",
            )
            return
        time.sleep(0.1)
    try:
        feed_partition(rows, choose(places), feed_timeout=feed_timeout)
    except TfdError as error:
        yield error


def _end(rows: Iterable[Any], source: str, secret: bytes) -> None:
    """Tell the data workers of this host that nothing more comes."""
    for place in _places(source, secret):
        with (
            contextlib.suppress(OSError, EOFError),
            sealed.connect(f"unix:{place.path}", secret) as channel,
        ):
            channel.send({"op": "end_of_feed"})
            channel.receive(10)
