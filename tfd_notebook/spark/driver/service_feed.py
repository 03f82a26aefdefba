"""Rows that Spark feeds to the data workers of a tf.data service.

A data worker opens an inbox when it begins to produce the dataset. It reports the address to the
driver and keeps that channel open until it has finished. Spark tasks request from the driver the
inboxes on their host. The driver sends the end of the feed to all data workers that produce, and
to those that begin later.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tfd_notebook.errors import FeedTimeout, NodeLost
from tfd_notebook.model.handle import Handle
from tfd_notebook.model.spec import check_seconds
from tfd_notebook.net import secure_channel
from tfd_notebook.spark.driver import application, feeding, jobs, messages, startup
from tfd_notebook.spark.feed import dataset
from tfd_notebook.spark.feed.datafeed import DataFeed
from tfd_notebook.spark.feed.inbox import Inbox
from tfd_notebook.spark.feed.sender import InboxAddress

#: Interval in seconds at which a task polls for a data worker on its host.
_POLL_SECONDS = 0.2
#: Timeout in seconds for a message of the other side.
_ANSWER_SECONDS = 60.0
_END = {"order": "end"}


class ServiceFeed(Handle):
    """A feed of rows to the data workers of a tf.data service.

    The data workers must run on the hosts of Spark's executors: `tfd.Cluster(launcher="spark")`,
    or a local cluster with a local Spark. Rows go to a data worker on their host. Distribute the
    dataset with ``"off"`` or ``"parallel_epochs"``. Each data worker then delivers the rows that
    it received, so that every row arrives once. Use it in a ``with`` statement to close it.

    Parameters
    ----------
    sc : pyspark.SparkContext or pyspark.sql.SparkSession
    batch_size : int
        Number of rows in a batch.
    output_signature : nested structure of tf.TensorSpec
        Signature of one row, as for `DataFeed.as_dataset`.

    Raises
    ------
    Unsupported
        The session uses Spark Connect.

    Examples
    --------
    >>> feed = ServiceFeed(spark, 32, tf.TensorSpec([10], tf.float32))  # doctest: +SKIP
    >>> batches = feed.dataset().apply(cluster.distribute("off"))  # doctest: +SKIP
    >>> fed = feed.train(rdd, wait=False)  # doctest: +SKIP
    """

    def __init__(self, sc: Any, batch_size: int, output_signature: Any) -> None:
        self.batch_size = batch_size
        self.output_signature = output_signature
        self._application = application.Application(application.context_of(sc, "ServiceFeed"))
        self._secret = secure_channel.Secret.new()
        self._lock = threading.Lock()
        self._producers: dict[secure_channel.AuthenticatedChannel, dict[str, Any]] = {}
        self._ended = False
        host, listen_at = self._application.addresses()
        self._server = secure_channel.serve(self._secret, self._serve, host=listen_at)
        self._address = f"{host}:{self._server.address.rpartition(':')[2]}"

    def dataset(self) -> Any:
        """Return the dataset to apply ``cluster.distribute("off")`` to.

        Its elements are batches. It ends after `end`, when each data worker has delivered its
        rows.
        """
        import tensorflow as tf

        specs = tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), self.output_signature
        )
        produce = functools.partial(
            _produce, self._address, self._secret, self.batch_size, self.output_signature
        )
        return tf.data.Dataset.from_generator(produce, output_signature=specs)

    def train(
        self,
        data: Any,
        num_epochs: int = 1,
        feed_timeout: float = 600.0,
        *,
        wait: bool = True,
    ) -> Future[None] | None:
        """Feed an RDD or DataFrame until the data workers have consumed all rows.

        Another thread or process must read the dataset meanwhile. Ctrl-C stops the feed.

        Parameters
        ----------
        data : pyspark.RDD or pyspark.sql.DataFrame
        num_epochs : int
            Number of passes over the rows. Default 1.
        feed_timeout : float
            Seconds without progress until the feed fails, even before the first data worker
            begins. Default 600.
        wait : bool
            If true (default), wait; otherwise return a future.

        Raises
        ------
        FeedTimeout, NodeLost
            A data worker made no progress, or was lost.
        SparkError
            Spark could not compute the rows.
        """
        check_seconds("feed_timeout", feed_timeout)
        inboxes = functools.partial(_local_workers, self._address, self._secret, feed_timeout)
        report_retry = feeding.retry_reporter(self._address, self._secret)
        work = feeding.training(data, num_epochs, inboxes, feed_timeout, "input", report_retry)
        job = jobs.Job(self._application, "feeding a tf.data service", work)

        def follow() -> None:
            try:
                problem = job.future.result()
            except Exception as error:
                raise startup.feeding_error(error, cancelled=job.cancelled) from error
            if problem is not None:
                raise problem

        future = jobs.in_background(follow, "feed")
        return jobs.wait(future, job.cancel) if wait else future

    def end(self) -> None:
        """End the dataset, also in data workers that begin later."""
        with self._lock:
            self._ended = True
            channels = list(self._producers)
        for channel in channels:
            with contextlib.suppress(OSError):
                channel.send(_END)

    def close(self) -> None:
        """End the dataset and close the server: a data worker that begins later gets an error."""
        self.end()
        self._server.close()

    def __enter__(self) -> ServiceFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, channel: secure_channel.AuthenticatedChannel) -> None:
        message = _received(channel, "register_worker", "feed_repeated", "list_workers")
        if message["type"] == "register_worker":
            self._register(channel, message)
        elif message["type"] == "feed_repeated":
            warnings.warn(feeding.retry_message(message), RuntimeWarning, stacklevel=2)
            channel.send({})
        while message["type"] == "list_workers":
            with self._lock:
                workers = [
                    worker
                    for worker in self._producers.values()
                    if worker["host"] == message["host"]
                ]
            channel.send({"workers": workers})
            message = _received(channel, "list_workers")

    def _register(
        self, channel: secure_channel.AuthenticatedChannel, message: dict[str, Any]
    ) -> None:
        """Keep a data worker registered until its channel closes."""
        with self._lock:
            self._producers[channel] = {name: message[name] for name in ("host", "pid", "path")}
            ended = self._ended
        try:
            if ended:
                channel.send(_END)
            channel.receive()
        finally:
            with self._lock:
                del self._producers[channel]


def _received(channel: secure_channel.AuthenticatedChannel, *kinds: str) -> dict[str, Any]:
    return messages.spark_message(channel.receive(_ANSWER_SECONDS)[0], *kinds)


def _produce(driver: str, secret: bytes, batch_size: int, signature: Any) -> Iterator[Any]:
    """Yield batches of the received rows in a data worker."""
    message = {"type": "register_worker", "host": socket.gethostname(), "pid": os.getpid()}
    # Each iteration has its own inbox: a process may run several at the same time.
    directory = Path(tempfile.mkdtemp(prefix="tfd-feed-"))
    try:
        with (
            Inbox(directory, secret, role="data_worker", index=os.getpid()) as inbox,
            _connected(driver, secret) as channel,
        ):
            channel.send({**message, "path": inbox.address})
            threading.Thread(target=_await_end, args=(channel, inbox), daemon=True).start()
            feed = DataFeed(inbox)
            try:
                while not feed.done_feeding:
                    batch = dataset.take_rows(feed, batch_size, signature)
                    if batch is not None:
                        yield batch
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                inbox.fail({"what": what, "traceback": traceback.format_exc()})
                raise
            if inbox.get("state") == "terminating":
                raise _driver_lost(driver)
            inbox.finish()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _await_end(channel: secure_channel.AuthenticatedChannel, inbox: Inbox) -> None:
    """Wait for the end of the feed in a data worker."""
    with contextlib.suppress(OSError, EOFError):
        if channel.receive()[0] == _END:
            inbox.end_of_feed()
            return
    inbox.terminate("the process that feeds has ended")


def _local_workers(driver: str, secret: bytes, feed_timeout: float) -> list[InboxAddress]:
    """Wait for data workers on this host, and return the addresses of their inboxes."""
    host = socket.gethostname()
    deadline = time.monotonic() + feed_timeout
    with _connected(driver, secret) as channel:
        while True:
            channel.send({"type": "list_workers", "host": host})
            if workers := channel.receive(_ANSWER_SECONDS)[0]["workers"]:
                break
            if time.monotonic() > deadline:
                raise FeedTimeout(
                    f"no data worker on {host} began within {feed_timeout:g} s",
                    fix="read the dataset during the feed, and run data workers on Spark's hosts",
                )
            time.sleep(_POLL_SECONDS)
    return [
        InboxAddress("", "data_worker", worker["pid"], host, "", 0, worker["path"], secret)
        for worker in workers
    ]


def _connected(driver: str, secret: bytes) -> secure_channel.AuthenticatedChannel:
    try:
        return secure_channel.connect(driver, secret)
    except (OSError, EOFError) as error:
        raise _driver_lost(driver) from error


def _driver_lost(driver: str) -> NodeLost:
    return NodeLost(
        f"lost the process that feeds the data service, at {driver}",
        fix="keep the ServiceFeed open until its dataset has been read",
    )
