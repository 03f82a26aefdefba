"""Nodes and feeders in separate processes, without Spark.

``python _feeding.py node DIRECTORY SECRET FUNCTION`` runs a function of `FUNCTIONS` like a node,
and prints its result as JSON. ``... feed DIRECTORY SECRET`` feeds rows without end.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tfd_notebook.spark.feed.datafeed import DataFeed
from tfd_notebook.spark.feed.inbox import Inbox
from tfd_notebook.spark.feed.sender import InboxAddress, feed_partition

ROOT = Path(__file__).parents[2]
SECRET = bytes(range(32))


def collect(inbox: Inbox) -> Any:
    """Return all rows until the end of the feed as text, in batches of 10."""
    feed, batches = DataFeed(inbox), []
    while not feed.should_stop():
        batches.append([repr(row) for row in feed.next_batch(10)])
    return batches


def count(inbox: Inbox) -> Any:
    feed, rows = DataFeed(inbox), 0
    while not feed.should_stop():
        rows += len(feed.next_batch(1000))
    return rows


def map_columns(inbox: Inbox) -> Any:
    feed = DataFeed(inbox, input_mapping={"b_column": "y", "a_column": "x"})
    batches = []
    while not feed.should_stop():
        batches.append(feed.next_batch(2))
    return batches


def double(inbox: Inbox) -> Any:
    """Send each row doubled as its result, and return the sizes of the batches."""
    feed, sizes = DataFeed(inbox, train_mode=False), []
    while not feed.should_stop():
        batch = feed.next_batch(7)
        if batch:
            sizes.append(len(batch))
            feed.batch_results([row * 2 for row in batch])
    return sizes


def echo(inbox: Inbox) -> Any:
    feed = DataFeed(inbox, train_mode=False)
    while not feed.should_stop():
        feed.batch_results(feed.next_batch(64))
    return None


def fail(inbox: Inbox) -> Any:
    DataFeed(inbox).next_batch(3)
    raise ArithmeticError("that row is wrong")


def stop_reading(inbox: Inbox) -> Any:
    """Read one batch, then block."""
    DataFeed(inbox).next_batch(1)
    signal.pause()


def idle(inbox: Inbox) -> Any:
    signal.pause()


def read_slowly(inbox: Inbox) -> Any:
    """Read one row every half second."""
    feed, rows = DataFeed(inbox), 0
    while not feed.should_stop():
        rows += len(feed.next_batch(1))
        time.sleep(0.5)
    return rows


def terminate_early(inbox: Inbox) -> Any:
    feed = DataFeed(inbox)
    rows = len(feed.next_batch(5))
    feed.terminate()
    return [rows, feed.should_stop(), feed.next_batch(5)]


def two_queues(inbox: Inbox) -> Any:
    first, second = DataFeed(inbox, qname_in="input"), DataFeed(inbox, qname_in="other")
    rows_by_queue: list[list[Any]] = [[], []]
    for feed, rows in zip((second, first), rows_by_queue, strict=True):
        while not feed.should_stop():
            rows += feed.next_batch(4)
    return rows_by_queue


def return_early(inbox: Inbox) -> Any:
    return len(DataFeed(inbox).next_batch(2))


def drop_a_result(inbox: Inbox) -> Any:
    """Return a result for each row but the last of a batch."""
    feed = DataFeed(inbox, train_mode=False)
    while not feed.should_stop():
        feed.batch_results(feed.next_batch(4)[:-1])
    return None


def drop_a_result_of_a_dataset(inbox: Inbox) -> Any:
    feed = DataFeed(inbox, train_mode=False)
    for batch in feed.as_dataset(4).map(lambda rows: rows + 1):
        feed.batch_results(batch.numpy()[:-1])
    return None


def return_no_results_of_a_dataset(inbox: Inbox) -> Any:
    feed = DataFeed(inbox, train_mode=False)
    for _ in feed.as_dataset(4).prefetch(2):
        pass
    return None


def infer_like_training(inbox: Inbox) -> Any:
    """Return results for batches that do not end with a partition."""
    feed = DataFeed(inbox)
    while not feed.should_stop():
        feed.batch_results(feed.next_batch(4))
    return None


def infer_like_training_with_a_dataset(inbox: Inbox) -> Any:
    feed = DataFeed(inbox)
    for batch in feed.as_dataset(4):
        feed.batch_results(batch.numpy())
    return None


def wait_for_a_first_batch(inbox: Inbox) -> Any:
    return DataFeed(inbox).as_dataset(20)


def return_results_of_a_dataset_later(inbox: Inbox) -> Any:
    """Return the results of a batch in two parts, the second one long after the batch was read."""
    feed = DataFeed(inbox, train_mode=False)
    for batch in feed.as_dataset(4):
        feed.batch_results(batch.numpy()[:-1])
        time.sleep(3.0)
        feed.batch_results(batch.numpy()[-1:])
    return None


def read_a_dataset_behind_a_slow_stage(inbox: Inbox) -> Any:
    """Return all results, although no row arrives for a long time while a stage computes."""
    import tensorflow as tf

    def slow(rows: Any) -> Any:
        time.sleep(3.0)
        return rows

    feed = DataFeed(inbox, train_mode=False)
    dataset = (
        feed.as_dataset(4)
        .prefetch(4)
        .map(lambda rows: tf.numpy_function(slow, [rows], rows.dtype), num_parallel_calls=2)
    )
    for batch in dataset:
        feed.batch_results(batch.numpy())
    return None


def return_no_results(inbox: Inbox) -> Any:
    feed = DataFeed(inbox, train_mode=False)
    while not feed.should_stop():
        feed.next_batch(4)
    return None


def return_results_later(inbox: Inbox) -> Any:
    """Read in one thread, and return each row as its result in another."""
    feed = DataFeed(inbox, train_mode=False)
    batches: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

    def answer() -> None:
        while batch := batches.get():
            time.sleep(0.1)  # the reader waits for rows in the meantime
            feed.batch_results(batch)

    thread = threading.Thread(target=answer)
    thread.start()
    while not feed.should_stop():
        batches.put(feed.next_batch(4))
    thread.join()
    return None


def short_of_results(inbox: Inbox) -> Any:
    feed = DataFeed(inbox, train_mode=False)
    feed.batch_results(feed.next_batch(2)[:1])
    return None


FUNCTIONS: dict[str, Callable[[Inbox], Any]] = {
    function.__name__: function
    for function in (
        collect,
        count,
        map_columns,
        double,
        echo,
        fail,
        stop_reading,
        idle,
        read_slowly,
        terminate_early,
        two_queues,
        return_early,
        short_of_results,
        drop_a_result,
        drop_a_result_of_a_dataset,
        return_no_results_of_a_dataset,
        infer_like_training,
        infer_like_training_with_a_dataset,
        wait_for_a_first_batch,
        return_results_of_a_dataset_later,
        read_a_dataset_behind_a_slow_stage,
        return_no_results,
        return_results_later,
    )
}


class Node:
    """A node in a separate process."""

    def __init__(self, directory: Path, function: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "node", str(directory), function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=dict(os.environ, PYTHONPATH=str(ROOT)),
        )
        address = self._line()
        self.pid = self._process.pid
        self.address = InboxAddress("c", "worker", 0, os.uname().nodename, "0", 0, address, SECRET)

    def end(self) -> Any:
        """Signal the end of the feed, and return the result of the function."""
        self._send("end")
        return self.result()

    def result(self) -> Any:
        """Return the result of the function."""
        return json.loads(self._line())

    def numbers(self) -> dict[str, Any]:
        self._send("numbers")
        return json.loads(self._line())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=60)

    def _send(self, message: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{message}\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextlib.contextmanager
def fed_inbox(directory: Path | str, *partitions: Any) -> Iterator[Inbox]:
    """Yield an inbox to which partitions are fed one after another, then the end of the feed."""
    with Inbox(directory, SECRET) as inbox:
        address = InboxAddress("c", "worker", 0, os.uname().nodename, "0", 0, inbox.address, SECRET)

        def feed() -> None:
            for rows in partitions:
                feed_partition(rows, address)
            inbox.end_of_feed()

        thread = threading.Thread(target=feed)
        thread.start()
        try:
            yield inbox
        finally:
            inbox.finish()
            thread.join(60)


@contextlib.contextmanager
def node(directory: Path, function: str) -> Iterator[Node]:
    new_node = Node(directory, function)
    try:
        yield new_node
    finally:
        new_node.close()


def run_node(directory: str, name: str) -> None:
    inbox = Inbox(directory, SECRET, queues=("input", "output", "error", "other"))
    print(inbox.address, flush=True)

    def work() -> None:
        try:
            result = FUNCTIONS[name](inbox)
        except Exception as error:
            text = traceback.format_exc()
            inbox.fail({"what": f"{type(error).__name__}: {error}", "traceback": text})
        else:
            inbox.finish()
            print(json.dumps(result), flush=True)

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() == "end":
                inbox.end_of_feed()
            else:
                print(json.dumps(inbox.numbers()), flush=True)
        inbox.close()
        os._exit(0)

    threading.Thread(target=listen, name="tfd-test", daemon=True).start()
    work()
    signal.pause()


def run_feeder(path: str) -> None:
    address = InboxAddress("c", "worker", 0, os.uname().nodename, "0", 0, path, SECRET)

    def rows() -> Iterator[int]:
        for number in range(1 << 40):
            yield number
            if number == 400_000:
                print("fed", flush=True)
                time.sleep(600)

    feed_partition(rows(), address)


if __name__ == "__main__":
    if sys.argv[1] == "node":
        run_node(*sys.argv[2:])
    else:
        run_feeder(*sys.argv[2:])
