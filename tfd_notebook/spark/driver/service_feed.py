"""Rows that Spark feeds to the data workers of a tf.data service.

A data worker opens an inbox when it begins to produce the dataset, tells the driver where it is,
and holds that channel until it is through. Tasks of Spark ask the driver for the inboxes of their
host; the end of the feed is the driver's to say, to those that produce and to those that begin
later.
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
from tfd_notebook.net import secure_channel
from tfd_notebook.spark.driver import application, feeding, jobs, messages, startup
from tfd_notebook.spark.feed.datafeed import DataFeed
from tfd_notebook.spark.feed.inbox import Inbox
from tfd_notebook.spark.feed.sender import InboxAddress

#: Seconds between two looks of a task for a data worker of its host.
_LOOK_SECONDS = 0.2
#: Seconds for the driver to answer.
_ANSWER_SECONDS = 60.0
_END = {"order": "end"}


class ServiceFeed:
    """Feeds rows to the data workers of a tf.data service, whose consumers read them as batches.

    The data workers have to be on the hosts of Spark's executors: `tfd.Cluster(launcher="spark")`,
    or a local cluster beside a local Spark. Rows go to a data worker of the host that they are on.
    The dataset is to be distributed with ``"off"`` or ``"parallel_epochs"``: each worker brings the
    rows that were fed to it, so that all of them come once. A ``with`` statement closes it.

    Parameters
    ----------
    sc : pyspark.SparkContext or pyspark.sql.SparkSession
    batch_size : int
        Rows in a batch.
    output_signature : nested structure of tf.TensorSpec
        Of one row, as `DataFeed.as_dataset` takes it.

    Raises
    ------
    Unsupported
        A session of Spark Connect.

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
        self._producing: dict[secure_channel.AuthenticatedChannel, dict[str, Any]] = {}
        self._ended = False
        host, listen_at = self._application.addresses()
        self._server = secure_channel.serve(self._secret, self._serve, host=listen_at)
        self._address = f"{host}:{self._server.address.rpartition(':')[2]}"

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
        """Feed an RDD or DataFrame until the data workers have taken all of it.

        Somebody has to read the dataset meanwhile: in another thread, or another process. Ctrl-C
        ends the feeding.

        Parameters
        ----------
        data : pyspark.RDD or pyspark.sql.DataFrame
        num_epochs : int
            How often. Default 1.
        feed_timeout : float
            Seconds without progress, also until a data worker begins. Default 600.
        wait : bool
            Whether to wait (default), or return the future of it.

        Raises
        ------
        FeedTimeout, NodeLost
            What became of a data worker.
        SparkError
            The rows could not be made.
        """
        where = functools.partial(_workers_here, self._address, self._secret, feed_timeout)
        report_retry = feeding.retry_reporter(self._address, self._secret)
        work = feeding.training(data, num_epochs, where, feed_timeout, "input", report_retry)
        job = jobs.Job(self._application, "feeding a tf.data service", work)

        def follow() -> None:
            try:
                problem = job.future.result()
            except Exception as error:
                raise startup.why_feeding_failed(error, cancelled=job.cancelled) from error
            if problem is not None:
                raise problem

        future = jobs.in_background(follow, "feed")
        return jobs.wait(future, job.cancel) if wait else future

    def end(self) -> None:
        """Let the dataset end, in data workers that begin later as well."""
        with self._lock:
            self._ended = True
            producing = list(self._producing)
        for channel in producing:
            with contextlib.suppress(OSError):
                channel.send(_END)

    def close(self) -> None:
        """End the dataset, and listen no more: a data worker that begins later gets an error."""
        self.end()
        self._server.close()

    def __enter__(self) -> ServiceFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, channel: secure_channel.AuthenticatedChannel) -> None:
        said = _received(channel, "producing", "fed again", "where")
        if said["say"] == "producing":
            self._hold(channel, said)
        elif said["say"] == "fed again":
            warnings.warn(feeding.retry_message(said), RuntimeWarning, stacklevel=2)
            channel.send({})
        while said["say"] == "where":
            with self._lock:
                here = [one for one in self._producing.values() if one["host"] == said["host"]]
            channel.send({"producing": here})
            said = _received(channel, "where")

    def _hold(self, channel: secure_channel.AuthenticatedChannel, said: dict[str, Any]) -> None:
        """Know of a data worker that produces until its channel ends."""
        with self._lock:
            self._producing[channel] = {name: said[name] for name in ("host", "pid", "path")}
            ended = self._ended
        try:
            if ended:
                channel.send(_END)
            channel.receive()
        finally:
            with self._lock:
                del self._producing[channel]


def _received(channel: secure_channel.AuthenticatedChannel, *kinds: str) -> dict[str, Any]:
    return messages.spark_message(channel.receive(_ANSWER_SECONDS)[0], *kinds)


def _produce(driver: str, secret: bytes, batch_size: int, signature: Any) -> Iterator[Any]:
    """Yield batches in a data worker, of what is fed to it."""
    from tfd_notebook.spark.feed import dataset

    said = {"say": "producing", "host": socket.gethostname(), "pid": os.getpid()}
    # Each iteration has its own: there may be several in a process.
    directory = Path(tempfile.mkdtemp(prefix="tfd-feed-"))
    try:
        with (
            Inbox(directory, secret, role="data_worker", index=os.getpid()) as inbox,
            _connected(driver, secret) as channel,
        ):
            channel.send({**said, "path": inbox.address})
            threading.Thread(target=_follow, args=(channel, inbox), daemon=True).start()
            feed = DataFeed(inbox)
            try:
                while not feed.done_feeding:
                    batch = dataset.taken(feed, batch_size, signature)
                    if batch is not None:
                        yield batch
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                inbox.fail({"what": what, "traceback": traceback.format_exc()})
                raise
            if inbox.get("state") == "terminating":
                raise _gone(driver)
            inbox.finish()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _follow(channel: secure_channel.AuthenticatedChannel, inbox: Inbox) -> None:
    """Hear in a data worker that the feed has ended."""
    with contextlib.suppress(OSError, EOFError):
        if channel.receive()[0] == _END:
            inbox.end_of_feed()
            return
    inbox.terminate("the process that feeds is gone")


def _workers_here(driver: str, secret: bytes, feed_timeout: float) -> list[InboxAddress]:
    """Wait for data workers that produce on this host, and return where they take rows."""
    host = socket.gethostname()
    deadline = time.monotonic() + feed_timeout
    with _connected(driver, secret) as channel:
        while True:
            channel.send({"say": "where", "host": host})
            if found := channel.receive(_ANSWER_SECONDS)[0]["producing"]:
                break
            if time.monotonic() > deadline:
                raise FeedTimeout(
                    f"no data worker on {host} began within {feed_timeout:g} s",
                    fix="read the dataset while it is fed, and run data workers on Spark's hosts",
                )
            time.sleep(_LOOK_SECONDS)
    return [
        InboxAddress("", "data_worker", one["pid"], host, "", 0, one["path"], secret)
        for one in found
    ]


def _connected(driver: str, secret: bytes) -> secure_channel.AuthenticatedChannel:
    try:
        return secure_channel.connect(driver, secret)
    except (OSError, EOFError) as error:
        raise _gone(driver) from error


def _gone(driver: str) -> NodeLost:
    return NodeLost(
        f"the process that feeds the data service, at {driver}, is gone",
        fix="keep the ServiceFeed open until its dataset was read",
    )
