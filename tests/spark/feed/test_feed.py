"""Feeding between processes without Spark: the tests play the roles of Spark's tasks and nodes."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import pickle
import subprocess
import sys
import threading
import weakref
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
from tfd_notebook.spark.executor.context import TFNodeContext
from tfd_notebook.spark.feed.datafeed import DataFeed
from tfd_notebook.spark.feed.inbox import Inbox
from tfd_notebook.spark.feed.sender import InboxAddress, choose, feed_partition, infer_partition

pytestmark = pytest.mark.integration


def test_rows_arrive_unchanged_and_in_order(tmp_path: Path) -> None:
    with node(tmp_path, "collect") as running:
        fed = feed_partition(iter(range(25)), running.address)
        batches = running.end()
    assert [len(batch) for batch in batches] == [10, 10, 5]
    assert list(itertools.chain(*batches)) == [repr(row) for row in range(25)]
    assert (fed.rows, fed.stopped, fed.node) == (25, None, "worker:0")


def test_copies_of_a_feed_and_its_node_are_the_same_object(tmp_path: Path) -> None:
    with Inbox(tmp_path, _feeding.SECRET) as inbox:
        ctx = TFNodeContext(mgr=inbox)
        for each in (inbox, ctx, ctx.get_data_feed()):
            assert copy.copy(each) is copy.deepcopy({"ctx": each})["ctx"] is each
            assert {each: 1}[each] == 1
            assert _feeding.SECRET.hex() not in repr(each)
            assert repr(_feeding.SECRET)[2:-1] not in repr(each)
            with pytest.raises(UsageError, match=f"this {type(each).__name__} cannot be sent"):
                pickle.dumps(each)
        feed = weakref.ref(ctx.get_data_feed())
        gc.collect()
        assert feed() is None


def test_empty_partitions_and_an_empty_feed(tmp_path: Path) -> None:
    with node(tmp_path, "collect") as running:
        assert feed_partition(iter([]), running.address).rows == 0
        assert list(infer_partition(iter([]), running.address)) == []
        assert running.end() == [[]]


def test_an_input_mapping_maps_columns_to_tensors(tmp_path: Path) -> None:
    with node(tmp_path, "map_columns") as running:
        feed_partition([(1, "a"), (2, "b"), (3, "c")], running.address)
        batches = running.end()
    assert batches == [{"x": [1, 2], "y": ["a", "b"]}, {"x": [3], "y": ["c"]}]


def test_results_are_in_order_and_a_partition_ends_a_batch(tmp_path: Path) -> None:
    with node(tmp_path, "double") as running:
        assert list(infer_partition(range(10), running.address)) == list(range(0, 20, 2))
        assert list(infer_partition("ab", running.address)) == ["aa", "bb"]
        assert running.end() == [7, 3, 2]


def test_many_rows_and_results_at_the_same_time(tmp_path: Path) -> None:
    """Send more than the socket buffers hold, in both directions."""
    rows = [bytes([number % 256]) * 300_000 for number in range(100)]
    with node(tmp_path, "echo") as running:
        assert list(infer_partition(iter(rows), running.address)) == rows
        running.end()


def test_results_of_concurrent_partitions_are_not_mixed(tmp_path: Path) -> None:
    results: dict[int, list[int]] = {}

    def infer(begin: int) -> None:
        results[begin] = list(infer_partition(range(begin, begin + 50), running.address))

    with node(tmp_path, "double") as running:
        threads = [threading.Thread(target=infer, args=(n * 1000,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        sizes = running.end()
    assert results == {
        n * 1000: [2 * row for row in range(n * 1000, n * 1000 + 50)] for n in range(8)
    }
    assert sizes == [7, 7, 7, 7, 7, 7, 7, 1] * 8


def test_a_consumer_that_stops_early_does_not_block_others(tmp_path: Path) -> None:
    with node(tmp_path, "double") as running:
        results = infer_partition(iter(range(10_000_000)), running.address)
        assert [next(results) for _ in range(3)] == [0, 2, 4]
        results.close()
        assert list(infer_partition(range(3), running.address)) == [0, 2, 4]
        running.end()


def test_many_feeders_use_one_inbox(tmp_path: Path) -> None:
    with node(tmp_path, "count") as running:
        threads = [
            threading.Thread(target=feed_partition, args=(range(n * 1000), running.address))
            for n in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert running.numbers()["rows"] == 66_000
        assert running.end() == 66_000


def test_rows_go_to_the_named_queue(tmp_path: Path) -> None:
    with node(tmp_path, "two_queues") as running:
        feeder = threading.Thread(target=feed_partition, args=([1, 2, 3], running.address))
        feeder.start()
        feed_partition("abc", running.address, qname="other")
        with pytest.raises(UnknownName, match="no queue 'nonsense'") as caught:
            feed_partition([1], running.address, qname="nonsense")
        assert caught.value.task == "worker:0"
        until(lambda: running.numbers()["queues"]["other"]["rows"] == 3)
        assert running.end() == [["a", "b", "c"], [1, 2, 3]]
        feeder.join(60)


def test_an_error_of_the_function_is_raised_in_the_feeder(tmp_path: Path) -> None:
    with node(tmp_path, "fail") as running:
        with pytest.raises(NodeFailed, match="that row is wrong") as caught:
            feed_partition(iter(range(10_000_000)), running.address)
        assert "in fail\n" in str(caught.value)
        assert caught.value.task == "worker:0"
        # A later feeder gets the same error at once.
        with pytest.raises(NodeFailed, match="ArithmeticError"):
            list(infer_partition([1], running.address))


def test_time_without_progress_is_limited(tmp_path: Path) -> None:
    with node(tmp_path, "stop_reading") as running:
        with pytest.raises(FeedTimeout) as caught:
            feed_partition(range(10), running.address, feed_timeout=3)
        message = str(caught.value)
        assert "worker:0" in message
        assert "the last batch was" in message
        assert "1 chunks of this partition and 0 in its queue wait" in message
        running.kill()


def test_feeding_a_node_that_reads_nothing_times_out(tmp_path: Path) -> None:
    with node(tmp_path, "idle") as running:
        with pytest.raises(FeedTimeout, match=r"8 in its queue wait, no batch was taken"):
            feed_partition([bytes(1 << 20)] * 50, running.address, feed_timeout=3)
        # The rows of a disconnected feeder are removed.
        until(lambda: running.numbers()["queue_depth"] == 0)
        running.kill()


def test_slow_progress_does_not_time_out(tmp_path: Path) -> None:
    """One chunk takes longer than the timeout, but rows are read from it all the time."""
    with node(tmp_path, "read_slowly") as running:
        assert feed_partition(range(8), running.address, feed_timeout=3).rows == 8
        assert running.end() == 8


def test_terminate_ends_all_feeders(tmp_path: Path) -> None:
    with node(tmp_path, "terminate_early") as running:
        fed = feed_partition(iter(range(10_000_000)), running.address)
        assert fed.stopped == "the function called terminate()"
        assert fed.rows < 10_000_000
        assert feed_partition(range(10), running.address).stopped
        with pytest.raises(SparkError, match="results of a partition"):
            list(infer_partition(range(10), running.address))
        assert running.result() == [5, True, []]


def test_feeding_ends_if_the_function_returns(tmp_path: Path) -> None:
    with node(tmp_path, "return_early") as running:
        fed = feed_partition(iter(range(10_000_000)), running.address)
        assert fed.stopped == "the function returned"
        assert running.result() == 2


def test_missing_results_are_an_error(tmp_path: Path) -> None:
    with (
        node(tmp_path, "short_of_results") as running,
        pytest.raises(SparkError, match="the function returned, but 9 results"),
    ):
        list(infer_partition(range(10), running.address))


@pytest.mark.parametrize(
    ("function", "lacking"),
    [
        ("drop_a_result", 3),
        ("return_no_results", 10),
        ("drop_a_result_of_a_dataset", 3),
        ("return_no_results_of_a_dataset", 10),
    ],
)
def test_a_function_with_too_few_results_fails_at_the_end_of_a_partition(
    tmp_path: Path, function: str, lacking: int
) -> None:
    with (
        node(tmp_path, function) as running,
        pytest.raises(NodeFailed, match=f"{lacking} rows of the last partition have no result"),
    ):
        list(infer_partition(range(10), running.address))


@pytest.mark.parametrize(
    ("function", "lacking"),
    [
        ("count", 10),
        ("collect", 10),
        ("infer_like_training", 2),
        ("infer_like_training_with_a_dataset", 2),
        ("wait_for_a_first_batch", 10),
    ],
)
def test_inference_with_batches_for_training_fails_at_the_end_of_a_partition(
    tmp_path: Path, function: str, lacking: int
) -> None:
    with node(tmp_path, function) as running, pytest.raises(NodeFailed) as failed:
        list(infer_partition(range(10), running.address, feed_timeout=120.0))
    assert f"{lacking} rows of the last partition have no result" in str(failed.value)
    assert "Next: create the DataFeed with train_mode=False" in str(failed.value)


@pytest.mark.parametrize("function", ["infer_like_training", "infer_like_training_with_a_dataset"])
def test_partitions_of_whole_batches_get_results_like_training(
    tmp_path: Path, function: str
) -> None:
    with node(tmp_path, function) as running:
        for _ in range(2):
            assert list(infer_partition(range(12), running.address)) == list(range(12))
        assert running.end() is None


@pytest.mark.parametrize(
    "function", ["return_results_of_a_dataset_later", "read_a_dataset_behind_a_slow_stage"]
)
def test_slow_results_of_a_dataset_are_awaited(tmp_path: Path, function: str) -> None:
    with node(tmp_path, function) as running:
        assert list(infer_partition(range(4), running.address)) == [0, 1, 2, 3]
        assert running.end() is None


def test_results_are_never_taken_for_rows_of_another_partition(tmp_path: Path) -> None:
    def infer(begin: int) -> None:
        with contextlib.suppress(NodeFailed):
            completed.append(list(infer_partition(range(begin, begin + 10), address)))

    completed: list[list[int]] = []
    with Inbox(tmp_path, _feeding.SECRET) as inbox:
        own, secret = os.uname().nodename, _feeding.SECRET
        address = InboxAddress("c", "worker", 0, own, "0", 0, inbox.address, secret)
        threads = [threading.Thread(target=infer, args=(n * 100,)) for n in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: inbox.numbers()["queue_depth"] == 2)
        feed = DataFeed(inbox, train_mode=False)
        feed.batch_results(feed.next_batch(20)[:-1])
        batch = feed.next_batch(20)
        with pytest.raises(UsageError, match="1 rows of the partition before it have no result"):
            feed.batch_results(batch)
        assert inbox.numbers()["results"] == 9  # none was sent
        inbox.fail({"what": "the results are wrong"})
        for thread in threads:
            thread.join(60)
    assert completed == []


def test_another_thread_may_return_the_results(tmp_path: Path) -> None:
    with node(tmp_path, "return_results_later") as running:
        for _ in range(3):
            assert list(infer_partition(range(6), running.address)) == list(range(6))
        assert running.end() is None


def test_feeding_a_killed_node_raises_node_lost(tmp_path: Path) -> None:
    with node(tmp_path, "idle") as running:
        killer = threading.Timer(1, running.kill)
        killer.start()
        with pytest.raises(NodeLost, match="worker:0"):
            feed_partition(iter([bytes(1 << 20)] * 100), running.address)
        killer.join()
        with pytest.raises(NodeLost, match="does not answer"):
            feed_partition([1], running.address)


def test_only_unread_rows_of_a_killed_feeder_are_lost(tmp_path: Path) -> None:
    with node(tmp_path, "idle") as running:
        feeder = subprocess.Popen(
            [sys.executable, _feeding.__file__, "feed", running.address.path],
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
    with (
        Inbox(tmp_path, _feeding.SECRET) as inbox,
        pytest.raises(UsageError, match="2 more results"),
    ):
        DataFeed(inbox, train_mode=False).batch_results([1, 2])


def test_rows_that_cannot_be_pickled_are_refused(tmp_path: Path) -> None:
    with (
        node(tmp_path, "collect") as running,
        pytest.raises(UsageError, match="rows of Condition cannot be sent"),
    ):
        feed_partition([threading.Condition()], running.address)


def test_only_clients_with_the_secret_can_feed(tmp_path: Path) -> None:
    with node(tmp_path, "collect") as running:
        address = InboxAddress(
            "c", "worker", 0, running.address.host, "0", 0, running.address.path, b"x" * 32
        )
        with pytest.raises(NodeLost, match="secret"):
            feed_partition([1], address)
        assert repr(_feeding.SECRET) not in repr(running.address)
        assert running.end() == [[]]


def test_a_task_feeds_the_node_of_its_executor(tmp_path: Path) -> None:
    host = os.uname().nodename

    def address(index: int, jvm: int, path: Path, node_host: str = host) -> InboxAddress:
        return InboxAddress(
            "c", "worker", index, node_host, str(index), jvm, str(path), _feeding.SECRET
        )

    with Inbox(tmp_path, _feeding.SECRET) as inbox:
        path = Path(inbox.address)
        local, sibling = address(0, os.getppid(), path), address(1, 1, path)
        assert choose([sibling, local]) == local
        assert choose([sibling]) == sibling
        assert choose([sibling, address(2, 2, path)]) == sibling
        with pytest.raises(SparkError, match=r"worker:1 on remote"):
            choose([address(1, 1, path, "remote")])
        with pytest.raises(SparkError, match=r"have ended: worker:1"):
            choose([address(1, 1, tmp_path / "missing")])


def test_the_idle_node_of_an_executor_is_fed(tmp_path: Path) -> None:
    host = os.uname().nodename

    def address(index: int, inbox: Inbox) -> InboxAddress:
        path, jvm = str(inbox.address), os.getppid()
        return InboxAddress("c", "worker", index, host, str(index), jvm, path, _feeding.SECRET)

    with (
        Inbox(tmp_path / "a", _feeding.SECRET) as busy,
        Inbox(tmp_path / "b", _feeding.SECRET) as idle,
    ):
        inboxes = [address(0, busy), address(1, idle)]
        feeder = threading.Thread(target=feed_partition, args=([1, 2], inboxes[0]))
        feeder.start()
        until(lambda: busy.numbers()["queue_depth"])
        assert choose(inboxes) == inboxes[1]
        assert choose(inboxes[::-1]) == inboxes[1]
        busy.terminate()
        feeder.join(60)
        assert not feeder.is_alive()
