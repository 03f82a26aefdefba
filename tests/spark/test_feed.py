"""Feeding between processes, as Spark's tasks and nodes do it; Spark itself has no part in it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests._waiting import until
from tests.spark import _feeding
from tests.spark._feeding import node
from tfd_notebook.errors import (
    FeedTimeout,
    NodeFailed,
    NodeLost,
    SparkError,
    UnknownName,
    UsageError,
)
from tfd_notebook.spark.feed import (
    DataFeed,
    Inbox,
    InboxAddress,
    choose,
    feed_partition,
    infer_partition,
)

pytestmark = pytest.mark.integration


def test_rows_arrive_as_they_were_in_their_order(tmp_path: Path) -> None:
    with node(tmp_path, "collect") as running:
        fed = feed_partition(iter(range(25)), running.place)
        batches = running.end()
    assert [len(batch) for batch in batches] == [10, 10, 5]
    assert list(itertools.chain(*batches)) == [repr(row) for row in range(25)]
    assert (fed.rows, fed.stopped, fed.node) == (25, None, "worker:0")


def test_partitions_without_rows_and_a_feed_without_any(tmp_path: Path) -> None:
    with node(tmp_path, "collect") as running:
        assert feed_partition(iter([]), running.place).rows == 0
        assert list(infer_partition(iter([]), running.place)) == []
        assert running.end() == [[]]


def test_columns_become_tensors(tmp_path: Path) -> None:
    with node(tmp_path, "mapped") as running:
        feed_partition([(1, "a"), (2, "b"), (3, "c")], running.place)
        batches = running.end()
    assert batches == [{"x": [1, 2], "y": ["a", "b"]}, {"x": [3], "y": ["c"]}]


def test_one_result_for_each_row_in_order_and_a_partition_ends_a_batch(tmp_path: Path) -> None:
    with node(tmp_path, "double") as running:
        assert list(infer_partition(range(10), running.place)) == list(range(0, 20, 2))
        assert list(infer_partition("ab", running.place)) == ["aa", "bb"]
        assert running.end() == [7, 3, 2]


def test_many_rows_and_results_at_the_same_time(tmp_path: Path) -> None:
    """More than fits on the way, in both directions."""
    rows = [bytes([number % 256]) * 300_000 for number in range(100)]
    with node(tmp_path, "echo") as running:
        assert list(infer_partition(iter(rows), running.place)) == rows
        running.end()


def test_partitions_whose_results_are_awaited_at_once(tmp_path: Path) -> None:
    found: dict[int, list[int]] = {}

    def infer(begin: int) -> None:
        found[begin] = list(infer_partition(range(begin, begin + 50), running.place))

    with node(tmp_path, "double") as running:
        threads = [threading.Thread(target=infer, args=(n * 1000,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        sizes = running.end()
    assert found == {
        n * 1000: [2 * row for row in range(n * 1000, n * 1000 + 50)] for n in range(8)
    }
    assert sizes == [7, 7, 7, 7, 7, 7, 7, 1] * 8


def test_who_takes_only_some_results_does_not_hold_up_others(tmp_path: Path) -> None:
    with node(tmp_path, "double") as running:
        some = infer_partition(iter(range(10_000_000)), running.place)
        assert [next(some) for _ in range(3)] == [0, 2, 4]
        some.close()
        assert list(infer_partition(range(3), running.place)) == [0, 2, 4]
        running.end()


def test_many_feeders_at_one_inbox(tmp_path: Path) -> None:
    with node(tmp_path, "count") as running:
        threads = [
            threading.Thread(target=feed_partition, args=(range(n * 1000), running.place))
            for n in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert running.numbers()["rows"] == 66_000
        assert running.end() == 66_000


def test_queues_of_other_names(tmp_path: Path) -> None:
    with node(tmp_path, "two_queues") as running:
        done = threading.Thread(target=feed_partition, args=([1, 2, 3], running.place))
        done.start()
        feed_partition("abc", running.place, qname="other")
        with pytest.raises(UnknownName, match="no queue 'nonsense'") as caught:
            feed_partition([1], running.place, qname="nonsense")
        assert caught.value.task == "worker:0"
        until(lambda: running.numbers()["queues"]["other"]["rows"] == 3)
        assert running.end() == [["a", "b", "c"], [1, 2, 3]]
        done.join(60)


def test_what_the_function_raises_is_raised_where_rows_are_fed(tmp_path: Path) -> None:
    with node(tmp_path, "fail") as running:
        with pytest.raises(NodeFailed, match="that row is wrong") as caught:
            feed_partition(iter(range(10_000_000)), running.place)
        assert "in fail\n" in str(caught.value)
        assert caught.value.task == "worker:0"
        # Who comes later learns it, too, and at once.
        with pytest.raises(NodeFailed, match="ArithmeticError"):
            list(infer_partition([1], running.place))


def test_time_without_progress_is_limited(tmp_path: Path) -> None:
    with node(tmp_path, "stuck") as running:
        with pytest.raises(FeedTimeout) as caught:
            feed_partition(range(10), running.place, feed_timeout=3)
        said = str(caught.value)
        assert "worker:0" in said
        assert "the last batch was" in said
        assert "1 chunks of this partition and 0 in its queue wait" in said
        running.kill()


def test_a_node_that_never_takes_anything(tmp_path: Path) -> None:
    with node(tmp_path, "idle") as running:
        with pytest.raises(FeedTimeout, match=r"8 in its queue wait, no batch was taken"):
            feed_partition([bytes(1 << 20)] * 50, running.place, feed_timeout=3)
        # Who fed it is gone, and so is what it sent.
        until(lambda: running.numbers()["queue_depth"] == 0)
        running.kill()


def test_slow_progress_is_progress(tmp_path: Path) -> None:
    """One chunk takes longer than the limit, but rows are taken from it all the time."""
    with node(tmp_path, "slow") as running:
        assert feed_partition(range(8), running.place, feed_timeout=3).rows == 8
        assert running.end() == 8


def test_terminate_lets_all_feeders_return(tmp_path: Path) -> None:
    with node(tmp_path, "enough") as running:
        fed = feed_partition(iter(range(10_000_000)), running.place)
        assert fed.stopped == "the function called terminate()"
        assert fed.rows < 10_000_000
        assert feed_partition(range(10), running.place).stopped
        with pytest.raises(SparkError, match="results of a partition"):
            list(infer_partition(range(10), running.place))
        assert running.result() == [5, True, []]


def test_a_function_that_returns_takes_no_more(tmp_path: Path) -> None:
    with node(tmp_path, "returns") as running:
        fed = feed_partition(iter(range(10_000_000)), running.place)
        assert fed.stopped == "the function returned"
        assert running.result() == 2


def test_results_that_never_come(tmp_path: Path) -> None:
    with (
        node(tmp_path, "short_of_results") as running,
        pytest.raises(SparkError, match="the function returned, but 9 results"),
    ):
        list(infer_partition(range(10), running.place))


def test_a_killed_node(tmp_path: Path) -> None:
    with node(tmp_path, "idle") as running:
        killer = threading.Timer(1, running.kill)
        killer.start()
        with pytest.raises(NodeLost, match="worker:0"):
            feed_partition(iter([bytes(1 << 20)] * 100), running.place)
        killer.join()
        with pytest.raises(NodeLost, match="does not answer"):
            feed_partition([1], running.place)


def test_a_killed_feeder_loses_what_nobody_took_of_it_and_nothing_else(tmp_path: Path) -> None:
    with node(tmp_path, "idle") as running:
        feeder = subprocess.Popen(
            [sys.executable, _feeding.__file__, "feed", running.place.path],
            stdout=subprocess.PIPE,
            env=dict(os.environ, PYTHONPATH=str(_feeding.ROOT)),
        )
        assert feeder.stdout is not None
        try:
            feeder.stdout.readline()
            until(lambda: running.numbers()["queue_depth"] > 0)
        finally:
            feeder.kill()
            feeder.communicate()
        until(lambda: running.numbers()["queue_depth"] == 0)
        until(lambda: running.numbers()["feeders"] == 0)
        running.kill()


def test_more_results_than_rows_are_refused(tmp_path: Path) -> None:
    with Inbox(tmp_path, _feeding.SECRET) as inbox, pytest.raises(UsageError, match="2 results"):
        DataFeed(inbox, train_mode=False).batch_results([1, 2])


def test_rows_that_cannot_be_sent(tmp_path: Path) -> None:
    with (
        node(tmp_path, "collect") as running,
        pytest.raises(UsageError, match="rows of Condition cannot be sent"),
    ):
        feed_partition([threading.Condition()], running.place)


def test_only_who_knows_the_secret_can_feed(tmp_path: Path) -> None:
    with node(tmp_path, "collect") as running:
        stranger = InboxAddress(
            "c", "worker", 0, running.place.host, "0", 0, running.place.path, b"x" * 32
        )
        with pytest.raises(NodeLost, match="secret"):
            feed_partition([1], stranger)
        assert repr(_feeding.SECRET) not in repr(running.place)
        assert running.end() == [[]]


def test_a_task_feeds_the_node_of_its_executor(tmp_path: Path) -> None:
    host = os.uname().nodename

    def place(index: int, jvm: int, path: Path, where: str = host) -> InboxAddress:
        return InboxAddress(
            "c", "worker", index, where, str(index), jvm, str(path), _feeding.SECRET
        )

    with Inbox(tmp_path, _feeding.SECRET) as inbox:
        path = Path(inbox.address)
        mine, other = place(0, os.getppid(), path), place(1, 1, path)
        assert choose([other, mine]) == mine
        assert choose([other]) == other
        assert choose([other, place(2, 2, path)]) == other
        with pytest.raises(SparkError, match=r"worker:1 on elsewhere"):
            choose([place(1, 1, path, "elsewhere")])
        with pytest.raises(SparkError, match="no node"):
            choose([place(1, 1, tmp_path / "gone")])


def test_of_several_nodes_of_an_executor_the_idle_one_is_fed(tmp_path: Path) -> None:
    host = os.uname().nodename

    def place(index: int, inbox: Inbox) -> InboxAddress:
        path, jvm = str(inbox.address), os.getppid()
        return InboxAddress("c", "worker", index, host, str(index), jvm, path, _feeding.SECRET)

    with (
        Inbox(tmp_path / "a", _feeding.SECRET) as busy,
        Inbox(tmp_path / "b", _feeding.SECRET) as idle,
    ):
        places = [place(0, busy), place(1, idle)]
        feeder = threading.Thread(target=feed_partition, args=([1, 2], places[0]))
        feeder.start()
        until(lambda: busy.numbers()["queue_depth"])
        assert choose(places) == places[1]
        assert choose(places[::-1]) == places[1]
        busy.terminate()
        feeder.join(60)
        assert not feeder.is_alive()
