"""The driver's end of the channels to nodes, which also receives missed messages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests._waiting import until
from tfd_notebook.net import secure_channel
from tfd_notebook.net.host import address_towards
from tfd_notebook.spark import roles
from tfd_notebook.spark.driver import node_registry
from tfd_notebook.spark.driver.node_registry import Node, NodeServer

STATUS = {
    "state": "running",
    "reason": "",
    "ended": False,
    "numbers": {},
    "path": "some/socket",
    "board": "",
    "board_error": "",
    "board_pid": 0,
    "open_to": "this host",
    "error": "",
}


class Driver:
    """A `NodeServer` of workers, and its received messages."""

    def __init__(
        self,
        limit: float = 30.0,
        nodes: int = 1,
        host: str = "127.0.0.1",
        listen_at: str = "127.0.0.1",
    ) -> None:
        self.changes: list[str] = []
        self.requests: list[Any] = []
        self.server = NodeServer(
            host,
            listen_at,
            roles.assign(nodes, 0, None, False, False),
            limit,
            lambda node, kind: self.changes.append(kind),
            self._answer,
        )

    def _answer(self, message: Any) -> dict[str, Any]:
        self.requests.append(message)
        return {"answer": 1}

    @property
    def node(self) -> Node:
        return self.server.nodes[0]

    def connect(self, host: str = "") -> secure_channel.AuthenticatedChannel:
        own, _, port = self.server.address.rpartition(":")
        return secure_channel.connect(f"{host or own}:{port}", self.server.secret)


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.server.close()


def update(seq: int = 0, log: str = "", **status: Any) -> dict[str, Any]:
    status = {**STATUS, **status}
    return {"type": "update", "node": 0, "pid": 7, "seq": seq, "log": log, "status": status}


def acknowledged(seq: int) -> dict[str, Any]:
    return {"order": "acknowledge", "seq": seq}


def test_first_update_has_the_missed_state(driver: Driver) -> None:
    with driver.connect() as channel:
        channel.send(update(seq=5))
        until(lambda: driver.node.state == "running")
        assert (driver.node.path, driver.node.pid) == ("some/socket", 7)


def test_each_update_has_the_whole_state(driver: Driver) -> None:
    with driver.connect() as channel:
        channel.send(update(state="starting", path="", open_to=""))
        until(lambda: driver.node.state == "starting")
        assert channel.receive(60)[0] == acknowledged(0)
        channel.send(update(1, "a\nb", numbers={"rows": 3}))
        until(lambda: driver.node.state == "running")
        assert driver.node.open_to == "this host"
        assert driver.node.last_lines(2) == ("a", "b")
        assert node_registry.node_row(driver.node).rows == 3
        assert channel.receive(60)[0] == acknowledged(1)


def test_repeated_update_counts_once(driver: Driver) -> None:
    for _ in range(2):  # the answer may be lost in transit
        with driver.connect() as channel:
            channel.send(update(log="once\n"))
            assert channel.receive(60)[0] == acknowledged(0)
    assert driver.node.last_lines(5) == ("once",)
    until(lambda: driver.changes)
    assert driver.changes == ["update"]


def test_end_of_a_node_is_final(driver: Driver) -> None:
    with driver.connect() as channel:
        channel.send(update(state="finished"))
        until(lambda: driver.node.function_ended)
        channel.send(update(1, state="lost", ended=True))
        until(lambda: driver.node.ended)
        assert driver.node.state == "finished"


def test_error_of_a_function_is_recorded(driver: Driver) -> None:
    with driver.connect() as channel:
        channel.send(update(state="failed", error="worker:0: the function raised"))
        until(lambda: driver.node.error)
        assert driver.node.state == "failed"


def test_command_waits_for_a_disconnected_node(driver: Driver) -> None:
    driver.server.order("finish")
    for _ in range(2):  # the message may be lost in transit
        with driver.connect() as channel:
            channel.send(update())
            assert channel.receive(60)[0] == {"order": "finish"}
    driver.server.order("stop", reason="the cluster has failed")
    driver.server.order("finish")
    with driver.connect() as channel:
        channel.send(update())
        assert channel.receive(60)[0] == {"order": "stop", "reason": "the cluster has failed"}


@pytest.mark.slow
def test_disconnected_node_is_lost_after_the_timeout() -> None:
    driver = Driver(limit=2.0)
    try:
        with driver.connect() as channel:
            channel.send(update())
            until(lambda: driver.node.state == "running")
        until(lambda: driver.node.channel is None)
        until(lambda: driver.node.ended)
        assert time.monotonic() - driver.node.last_message_at > 2.0
        assert driver.node.state == "lost"
        assert "connection to it is broken" in driver.node.reason
    finally:
        driver.server.close()


def test_reconnected_node_uses_its_new_channel(driver: Driver) -> None:
    with driver.connect() as old, driver.connect() as new:
        old.send(update())
        until(lambda: driver.node.channel)
        assert old.receive(60)[0] == acknowledged(0)
        new.send(update(1, state="finished"))
        with pytest.raises((EOFError, OSError)):
            old.receive(60)
        assert new.receive(60)[0] == acknowledged(1)
        driver.server.order("finish")
        assert new.receive(60)[0] == {"order": "finish"}


# Messages of a node are validated before anything is stored.


@pytest.mark.parametrize(
    "wrong",
    [
        {"status": {**STATUS, "numbers": [1]}},
        {"status": {**STATUS, "numbers": {"rows": "x"}}},
        {"status": {**STATUS, "numbers": {"queue_depth": "<b>"}}},
        {"status": {**STATUS, "numbers": {"batch_age_s": float("inf")}}},
        {"status": {**STATUS, "board": "no address"}},
        {"status": {**STATUS, "state": "<b>"}},
        {"status": {**STATUS, "ended": "no"}},
        {"status": None},
        {"seq": None},
        {"type": "start_failed"},
        {"type": "repeat"},
    ],
)
def test_node_is_lost_after_an_invalid_message(driver: Driver, wrong: Any) -> None:
    with driver.connect() as channel:
        channel.send(update())
        assert channel.receive(60)[0] == acknowledged(0)
        channel.send({**update(1), **wrong})
        with pytest.raises((EOFError, OSError)):
            channel.receive(60)
    until(lambda: driver.changes == ["update", "ended"])
    assert driver.node.state == "lost"
    assert "invalid message" in driver.node.reason
    row = node_registry.node_row(driver.node)
    assert (row.rows, row.queue_depth, driver.node.board) == (0, None, "")


@pytest.mark.parametrize("wrong", [{"pid": "7"}, {"status": {}}, {"status": [1]}, {"more": 1}])
def test_node_is_lost_after_an_invalid_first_update(driver: Driver, wrong: Any) -> None:
    with driver.connect() as channel:
        channel.send({**update(), **wrong})
        with pytest.raises((EOFError, OSError)):
            channel.receive(60)
    until(lambda: driver.changes == ["ended"])
    assert (driver.node.state, driver.node.pid) == ("lost", None)
    assert "invalid message" in driver.node.reason


RESERVED = {
    "type": "reserved", "node": 0, "address": "10.0.0.5:4000", "executor": "1", "host": "h",
    "jvm": 5, "gpu": "", "attempt": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong", [{"address": "h"}, {"jvm": "x"}, {"attempt": None}, {"host": ["<b>"]}]
)
def test_invalid_reservation_is_not_stored(driver: Driver, wrong: Any) -> None:
    with driver.connect() as channel:
        channel.send({**RESERVED, **wrong})
        with pytest.raises((EOFError, OSError)):
            channel.receive(60)
    until(lambda: driver.changes == ["ended"])
    assert (driver.node.state, driver.node.address) == ("lost", "")


def test_reservation_is_stored(driver: Driver) -> None:
    with driver.connect() as channel:
        channel.send(RESERVED)
        assert channel.receive(60)[0] == {"addresses": {"0": "10.0.0.5:4000"}}
    until(lambda: driver.changes)
    assert (driver.node.state, driver.node.address) == ("reserved", "10.0.0.5:4000")
    with driver.connect() as channel:
        channel.send({**RESERVED, "attempt": 1})
        assert channel.receive(60)[0] == {}
    until(lambda: driver.changes == ["reserved", "reserved_again"])


def test_node_states_only_the_port_of_its_tensorboard(driver: Driver) -> None:
    with driver.connect() as channel:
        channel.send(update(board="http://203.0.113.9:80"))
        until(lambda: driver.node.state == "running")
        assert driver.node.board == ""  # it has not reserved an address
    with driver.connect() as channel:
        channel.send(RESERVED)
        assert channel.receive(60)[0] == {"addresses": {"0": "10.0.0.5:4000"}}
    with driver.connect() as channel:
        channel.send(update(1, board="http://203.0.113.9:80"))
        until(lambda: driver.node.board == "http://10.0.0.5:80")


def test_tasks_get_the_addresses_after_the_last_reservation() -> None:
    driver = Driver(nodes=2)
    try:
        with driver.connect() as first, driver.connect() as second:
            first.send(RESERVED)
            until(lambda: driver.changes == ["reserved"])
            second.send({**RESERVED, "node": 1, "address": "10.0.0.6:4000"})
            addresses = {"0": "10.0.0.5:4000", "1": "10.0.0.6:4000"}
            assert first.receive(60)[0] == second.receive(60)[0] == {"addresses": addresses}
    finally:
        driver.server.close()


# Attacks by an executor that states another address than its own.


@pytest.mark.parametrize("stated", ["203.0.113.9", "10.253.9.3", "127.0.0.1", "localhost", "[::1]"])
def test_node_has_the_address_of_its_connection(stated: str) -> None:
    own = address_towards("10.253.9.2")
    driver = Driver(host=own, listen_at=own)
    try:
        with driver.connect() as channel:
            channel.send({**RESERVED, "address": f"{stated}:4000"})
            assert channel.receive(60)[0] == {"addresses": {"0": f"{own}:4000"}}
    finally:
        driver.server.close()


@pytest.mark.parametrize(
    ("stated", "used"),
    [
        ("10.253.9.3", "10.253.9.3"),
        ("[fd00:253:9::3]", "[fd00:253:9::3]"),
        ("localhost", "driver.example"),
        ("127.0.0.2", "driver.example"),
    ],
)
def test_node_behind_a_forwarded_port_states_a_private_address(stated: str, used: str) -> None:
    """A node on the driver's host has the name that executors use for it."""
    driver = Driver(host="driver.example")
    try:
        with driver.connect("127.0.0.1") as channel:
            channel.send({**RESERVED, "address": f"{stated}:4000"})
            assert channel.receive(60)[0] == {"addresses": {"0": f"{used}:4000"}}
    finally:
        driver.server.close()


@pytest.mark.parametrize("stated", ["203.0.113.9", "8.8.8.8", "169.254.1.1", "[2001:db8::1]"])
def test_node_behind_a_forwarded_port_cannot_state_other_addresses(
    driver: Driver, stated: str
) -> None:
    with driver.connect() as channel:
        channel.send({**RESERVED, "address": f"{stated}:4000"})
        with pytest.raises(EOFError):
            channel.receive(60)
    until(lambda: driver.changes == ["start_failed"])
    assert driver.node.address == ""
    assert f"worker:0 states the address {stated}:4000" in str(driver.server.problem)


@pytest.mark.parametrize("liar_is_first", [True, False])
def test_node_behind_a_forwarded_port_cannot_state_the_address_of_another(
    liar_is_first: bool,
) -> None:
    own = address_towards("10.253.9.2")
    driver = Driver(nodes=2, host=own, listen_at="0.0.0.0")
    attempts = [("127.0.0.1", 0, 4001), (own, 1, 4000)]
    try:
        with contextlib.ExitStack() as stack:
            for host, node, port in attempts if liar_is_first else reversed(attempts):
                channel = stack.enter_context(driver.connect(host))
                channel.send({**RESERVED, "node": node, "address": f"{own}:{port}"})
                until(lambda: driver.changes)
            until(lambda: driver.changes == ["reserved", "start_failed"])
        error = f"worker:0 states the address {own}:4001, which belongs to worker:1"
        assert error in str(driver.server.problem)
    finally:
        driver.server.close()


@pytest.mark.parametrize("message", [update(state="failed"), {"type": "update", "node": 0}])
@pytest.mark.parametrize("is_forwarded", [True, False])
def test_node_cannot_update_a_node_of_another_host(is_forwarded: bool, message: Any) -> None:
    own = address_towards("10.253.9.2")
    driver = Driver(host=own, listen_at="0.0.0.0")
    ends = ("127.0.0.1", own) if is_forwarded else (own, "127.0.0.1")
    try:
        with driver.connect(ends[0]) as victim, driver.connect(ends[1]) as attacker:
            victim.send({**RESERVED, "address": "10.253.9.3:4000"})
            until(lambda: driver.changes == ["reserved"])
            attacker.send(message)
            with pytest.raises((EOFError, OSError)):
                attacker.receive(60)
            with driver.connect(ends[0]) as node:
                node.send(update())
                assert node.receive(60)[0] == acknowledged(0)
            assert driver.node.state == "running"
            until(lambda: len(driver.changes) > 1)
            assert driver.changes == ["reserved", "update"]
    finally:
        driver.server.close()


START_FAILED: dict[str, Any] = {
    "type": "start_failed", "node": 0,
    "error": {"code": "TFD890", "what": "no free port", "task": None, "fix": "f"},
}  # fmt: skip


@pytest.mark.parametrize("message", [START_FAILED, {**RESERVED, "attempt": 1}])
@pytest.mark.parametrize("is_forwarded", [True, False])
@pytest.mark.parametrize("state", ["reserved", "running", "disconnected"])
def test_node_cannot_start_a_node_of_another_host(
    is_forwarded: bool, message: Any, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = address_towards("10.253.9.2")
    driver = Driver(host=own, listen_at="0.0.0.0")
    ends = ("127.0.0.1", own) if is_forwarded else (own, "127.0.0.1")
    try:
        with contextlib.ExitStack() as stack:
            victim = stack.enter_context(driver.connect(ends[0]))
            victim.send({**RESERVED, "address": "10.253.9.3:4000"})
            until(lambda: driver.changes == ["reserved"])
            if state != "reserved":
                node = stack.enter_context(driver.connect(ends[0]))
                node.send(update())
                assert node.receive(60)[0] == acknowledged(0)
            if state == "disconnected":
                node.close()
                until(lambda: driver.node.channel is None)
            before = node_registry.node_row(driver.node)
            attacker = stack.enter_context(driver.connect(ends[1]))
            attacker.send(message)
            with pytest.raises((EOFError, OSError)):
                attacker.receive(60)
            assert driver.server.problem is None
            assert node_registry.node_row(driver.node) == before
            assert set(driver.changes) <= {"reserved", "update"}
            assert f"of worker:0 from {ends[1]} was refused" in caplog.text
    finally:
        driver.server.close()


@pytest.mark.parametrize("message", [START_FAILED, {**RESERVED, "attempt": 1}])
@pytest.mark.parametrize("is_killed_first", [True, False])
def test_second_attempt_on_another_host_is_reported(is_killed_first: bool, message: Any) -> None:
    """Spark runs all tasks again after it has lost an executor, and kills the first ones."""
    own = address_towards("10.253.9.2")
    driver = Driver(nodes=2, host=own, listen_at="0.0.0.0")
    try:
        first, second = driver.connect(own), driver.connect("127.0.0.1")
        with first, second:
            first.send({**RESERVED, "address": "10.253.9.3:4000"})
            until(lambda: driver.changes == ["reserved"])
            if is_killed_first:
                first.close()
                until(lambda: driver.node.channel is None)
            second.send({**message, "address": "10.253.9.4:4000"} if "host" in message else message)
            with contextlib.suppress(EOFError, OSError):
                assert second.receive(60)[0] == {}
            first.close()
            until(lambda: len(driver.changes) == 2)
        is_reported = is_killed_first and message is START_FAILED
        assert driver.changes[1] == ("start_failed" if is_reported else "reserved_again")
    finally:
        driver.server.close()


def test_failure_of_a_node_is_recorded(driver: Driver) -> None:
    with driver.connect() as task:
        task.send(RESERVED)
        until(lambda: driver.changes == ["reserved"])
        with driver.connect() as channel:
            channel.send(START_FAILED)
            until(lambda: driver.changes == ["reserved", "start_failed"])
    assert "no free port" in str(driver.server.problem)


@pytest.mark.parametrize("task", ["worker:0", "worker:1", "kernel"])
def test_failure_of_a_node_names_only_this_node(task: str) -> None:
    driver = Driver(nodes=2)
    try:
        with driver.connect() as channel:
            channel.send({**START_FAILED, "error": {**START_FAILED["error"], "task": task}})
            with pytest.raises((EOFError, OSError)):
                channel.receive(60)
        until(lambda: driver.changes)
        if task == "worker:0":
            assert driver.changes == ["start_failed"]
            assert "worker:0" in str(driver.server.problem)
        else:
            assert driver.changes == ["ended"]
            assert driver.server.problem is None
            assert driver.node.state == "lost"
            assert f"invalid error.task {task!r}: expected worker:0" in driver.node.reason
    finally:
        driver.server.close()


def test_node_cannot_state_the_port_of_another() -> None:
    driver = Driver(nodes=2)
    try:
        with driver.connect() as honest, driver.connect() as liar:
            honest.send(RESERVED)
            until(lambda: driver.changes == ["reserved"])
            liar.send({**RESERVED, "node": 1})
            until(lambda: driver.changes == ["reserved", "start_failed"])
        error = "worker:1 states the address 10.0.0.5:4000, which belongs to worker:0"
        assert error in str(driver.server.problem)
    finally:
        driver.server.close()


def test_stopped_cluster_ends_the_wait_for_addresses() -> None:
    driver = Driver(nodes=2)
    try:
        with driver.connect() as channel:
            channel.send(RESERVED)
            until(lambda: driver.changes == ["reserved"])
            driver.server.order("stop")
            assert channel.receive(60)[0] == {"order": "stop"}
    finally:
        driver.server.close()


@pytest.mark.parametrize(
    "message",
    [
        {"type": "update", "node": "x"},
        {"type": "feed_failed", "stage": "x"},
        {"type": "feed_failed", "stage": 1, "error": "<b>"},
        {"type": "feed_repeated", "partition": [], "attempt": 1},
        {"type": []},
        {},
    ],
)
def test_invalid_message_without_a_node_closes_its_channel(driver: Driver, message: Any) -> None:
    with driver.connect() as channel:
        channel.send(message)
        with pytest.raises((EOFError, OSError)):
            channel.receive(60)
    assert driver.changes == driver.requests == []
    assert driver.node.state == ""


def test_feeding_task_gets_an_answer(driver: Driver) -> None:
    message = {"type": "feed_repeated", "partition": 2, "attempt": 1}
    with driver.connect() as channel:
        channel.send(message)
        assert channel.receive(60)[0] == {"answer": 1}
    assert driver.requests == [message]
