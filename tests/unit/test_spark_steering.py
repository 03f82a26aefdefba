"""The driver's end of the channels to nodes: what was said while nobody listened counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests._waiting import until
from tfd_notebook.launch import sealed
from tfd_notebook.spark import roles
from tfd_notebook.spark.steering import Node, Steering

KNOWN = {
    "state": "running",
    "path": "some/socket",
    "board": "",
    "no_board": "",
    "board_pid": 0,
    "open_to": "this host",
    "error": "",
}


class Driver:
    """A `Steering` of one worker, and what it heard."""

    def __init__(self, limit: float = 30.0) -> None:
        self.heard: list[str] = []
        self.steering = Steering(
            "127.0.0.1",
            "127.0.0.1",
            roles.assign(1, 0, None, False, False),
            limit,
            lambda node, kind: self.heard.append(kind),
        )

    @property
    def node(self) -> Node:
        return self.steering.nodes[0]

    def connect(self) -> sealed.Channel:
        return sealed.connect(self.steering.address, self.steering.secret)


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.steering.close()


def hello(**known: Any) -> dict[str, Any]:
    return {"say": "hello", "node": 0, "pid": 7, "supervisor": 8, "known": {**KNOWN, **known}}


def test_a_hello_tells_what_was_missed(driver: Driver) -> None:
    with driver.connect() as channel:
        channel.send(hello())
        until(lambda: driver.node.state == "running")
        assert (driver.node.path, driver.node.pid) == ("some/socket", 7)


def test_each_beat_tells_all_that_is_known(driver: Driver) -> None:
    with driver.connect() as channel:
        channel.send(hello(state="starting", path="", open_to=""))
        until(lambda: driver.node.state == "starting")
        word = {"say": "beat", "word": 0, "known": KNOWN, "numbers": {"rows": 3}, "log": "a\nb"}
        channel.send(word)
        until(lambda: driver.node.state == "running")
        assert driver.node.open_to == "this host"
        assert driver.node.last_lines(2) == ("a", "b")
        assert channel.receive(10)[0] == {"order": "heard", "word": 0}


def test_what_is_said_again_counts_once(driver: Driver) -> None:
    word = {"say": "beat", "word": 0, "known": KNOWN, "numbers": {}, "log": "once\n"}
    for _ in range(2):  # the answer may be lost on the way
        with driver.connect() as channel:
            channel.send(hello())
            channel.send(word)
            assert channel.receive(10)[0] == {"order": "heard", "word": 0}
    assert driver.node.last_lines(5) == ("once",)
    assert driver.heard.count("beat") == 1


def test_an_end_is_final(driver: Driver) -> None:
    with driver.connect() as channel:
        channel.send(hello(state="finished"))
        until(lambda: driver.node.is_over)
        said = {"say": "ended", "word": 0, "state": "lost", "reason": "", "known": KNOWN}
        channel.send({**said, "numbers": {}, "log": ""})
        until(lambda: driver.node.ended)
        assert driver.node.state == "finished"


def test_an_error_that_was_missed_is_told_again(driver: Driver) -> None:
    with driver.connect() as channel:
        channel.send(hello(state="failed", error="worker:0: the function raised"))
        until(lambda: driver.node.error)
        assert driver.node.state == "failed"


def test_an_order_waits_for_a_node_that_is_away(driver: Driver) -> None:
    driver.steering.order("finish")
    for _ in range(2):  # it may have been lost on the way
        with driver.connect() as channel:
            channel.send(hello())
            assert channel.receive(10)[0] == {"order": "finish"}
    driver.steering.order("stop", reason="the cluster has failed")
    driver.steering.order("finish")
    with driver.connect() as channel:
        channel.send(hello())
        assert channel.receive(10)[0] == {"order": "stop", "reason": "the cluster has failed"}


def test_a_node_that_is_away_is_lost_after_the_limit_and_not_before() -> None:
    driver = Driver(limit=2.0)
    try:
        with driver.connect() as channel:
            channel.send(hello())
            until(lambda: driver.node.state == "running")
        until(lambda: driver.node.channel is None)
        assert not driver.node.ended
        until(lambda: driver.node.ended)
        assert time.monotonic() - driver.node.heard > 2.0
        assert driver.node.state == "lost"
        assert "connection to it is broken" in driver.node.reason
    finally:
        driver.steering.close()


def test_a_node_that_comes_back_has_its_new_channel(driver: Driver) -> None:
    with driver.connect() as old, driver.connect() as new:
        old.send(hello())
        until(lambda: driver.node.channel)
        new.send(hello(state="finished"))
        with pytest.raises((EOFError, OSError)):
            old.receive(10)
        driver.steering.order("finish")
        assert new.receive(10)[0] == {"order": "finish"}
