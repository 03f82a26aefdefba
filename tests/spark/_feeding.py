"""Nodes and feeders in processes of their own, without Spark.

``python _feeding.py node DIRECTORY SECRET FUNCTION`` runs a function of `FUNCTIONS` as a node does,
and prints what it returns as JSON; ``... feed DIRECTORY SECRET`` feeds rows for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tfd_notebook.spark.feed import DataFeed, Inbox, InboxAddress, feed_partition

ROOT = Path(__file__).parents[2]
SECRET = bytes(range(32))


def collect(inbox: Inbox) -> Any:
    """All rows until the end of the feed, by batches of 10, as text."""
    feed, batches = DataFeed(inbox), []
    while not feed.should_stop():
        batches.append([repr(row) for row in feed.next_batch(10)])
    return batches


def count(inbox: Inbox) -> Any:
    feed, rows = DataFeed(inbox), 0
    while not feed.should_stop():
        rows += len(feed.next_batch(1000))
    return rows


def mapped(inbox: Inbox) -> Any:
    feed = DataFeed(inbox, input_mapping={"b_column": "y", "a_column": "x"})
    batches = []
    while not feed.should_stop():
        batches.append(feed.next_batch(2))
    return batches


def double(inbox: Inbox) -> Any:
    """Results twice the rows; returns the sizes of the batches."""
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


def stuck(inbox: Inbox) -> Any:
    """Takes one batch, then nothing more."""
    DataFeed(inbox).next_batch(1)
    signal.pause()


def idle(inbox: Inbox) -> Any:
    signal.pause()


def slow(inbox: Inbox) -> Any:
    """Makes some progress every half second."""
    feed, rows = DataFeed(inbox), 0
    while not feed.should_stop():
        rows += len(feed.next_batch(1))
        time.sleep(0.5)
    return rows


def enough(inbox: Inbox) -> Any:
    feed = DataFeed(inbox)
    rows = len(feed.next_batch(5))
    feed.terminate()
    return [rows, feed.should_stop(), feed.next_batch(5)]


def two_queues(inbox: Inbox) -> Any:
    first, second = DataFeed(inbox, qname_in="input"), DataFeed(inbox, qname_in="other")
    found: list[list[Any]] = [[], []]
    for feed, rows in zip((second, first), found, strict=True):
        while not feed.should_stop():
            rows += feed.next_batch(4)
    return found


def returns(inbox: Inbox) -> Any:
    return len(DataFeed(inbox).next_batch(2))


def short_of_results(inbox: Inbox) -> Any:
    feed = DataFeed(inbox, train_mode=False)
    feed.batch_results(feed.next_batch(2)[:1])
    return None


FUNCTIONS: dict[str, Callable[[Inbox], Any]] = {
    function.__name__: function
    for function in (
        collect,
        count,
        mapped,
        double,
        echo,
        fail,
        stuck,
        idle,
        slow,
        enough,
        two_queues,
        returns,
        short_of_results,
    )
}


class Node:
    """A node in a process of its own."""

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
        self.place = InboxAddress("c", "worker", 0, os.uname().nodename, "0", 0, address, SECRET)

    def end(self) -> Any:
        """Say that all was fed, and return what the function returned."""
        self._say("end")
        return self.result()

    def result(self) -> Any:
        """Return what the function returned."""
        return json.loads(self._line())

    def numbers(self) -> dict[str, Any]:
        self._say("numbers")
        return json.loads(self._line())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=60)

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextlib.contextmanager
def node(directory: Path, function: str) -> Iterator[Node]:
    made = Node(directory, function)
    try:
        yield made
    finally:
        made.close()


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

    threading.Thread(target=listen, daemon=True).start()
    work()
    signal.pause()


def run_feeder(path: str) -> None:
    place = InboxAddress("c", "worker", 0, os.uname().nodename, "0", 0, path, SECRET)

    def rows() -> Iterator[int]:
        for number in range(1 << 40):
            yield number
            if number == 400_000:
                print("fed", flush=True)
                time.sleep(600)

    feed_partition(rows(), place)


if __name__ == "__main__":
    if sys.argv[1] == "node":
        run_node(*sys.argv[2:])
    else:
        run_feeder(*sys.argv[2:])
