"""The driver's end of the channels to nodes: what was said while nobody listened counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests._waiting import until
from tfd_notebook.launch import sealed
from tfd_notebook.spark import roles
from tfd_notebook.spark.steering import Node, Steering

KNOWN = {"state": "running", "path": "some/socket", "board": "", "open_to": "this host"}


class Driver:
    """A `Steering` of one worker, and what it heard."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.steering = Steering(
            "127.0.0.1",
            "127.0.0.1",
            roles.assign(1, 0, None, False, False),
            30.0,
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
        channel.send({"say": "beat", "known": KNOWN, "numbers": {"rows": 3}, "log": "a\nb"})
        until(lambda: driver.node.state == "running")
        assert driver.node.open_to == "this host"
        assert driver.node.last_lines(2) == ("a", "b")
        assert channel.receive(10)[0] == {"order": "beat"}


def test_an_end_is_final(driver: Driver) -> None:
    with driver.connect() as channel:
        channel.send(hello(state="finished"))
        until(lambda: driver.node.is_over)
        said = {"say": "ended", "state": "lost", "reason": "", "known": KNOWN}
        channel.send({**said, "numbers": {}, "log": ""})
        until(lambda: driver.node.ended)
        assert driver.node.state == "finished"
