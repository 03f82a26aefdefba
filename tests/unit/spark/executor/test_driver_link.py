"""A node's connection to the driver: `update` never blocks, and no state or log is lost."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests._waiting import until
from tfd_notebook.net import secure_channel
from tfd_notebook.spark.executor.driver_link import MAX_LOG_CHARS, DriverConnection

#: Timeout of a channel for one message, in seconds. `update` must not wait for it.
STALL = secure_channel.STALL_SECONDS


class Driver:
    """A listener that passes each channel to the test until the test has finished with it."""

    def __init__(self) -> None:
        self.channels: queue.Queue[secure_channel.AuthenticatedChannel] = queue.Queue()
        self.orders: list[Any] = []
        self._through = threading.Event()
        self.state = 0
        secret = secure_channel.Secret.new()
        self._server = secure_channel.serve(secret, self._hold)
        self.connection = DriverConnection(
            self._server.address,
            secret,
            state=lambda: {"status": self.state},
            on_order=self.orders.append,
        )

    def _hold(self, channel: secure_channel.AuthenticatedChannel) -> None:
        self.channels.put(channel)
        self._through.wait()

    def next(self) -> secure_channel.AuthenticatedChannel:
        return self.channels.get(timeout=60)

    def update(self, state: Any) -> None:
        self.state = state
        self.connection.update()

    def close(self) -> None:
        self.connection.close(0)
        self._through.set()
        self._server.close()
        until(lambda: not any(t.name == "tfd-driver-link" for t in threading.enumerate()))


def receive(channel: secure_channel.AuthenticatedChannel) -> dict[str, Any]:
    """Return the next message, and acknowledge it."""
    message: dict[str, Any] = channel.receive(20)[0]
    channel.send({"order": "acknowledge", "seq": message["seq"]})
    return message


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


def receive_state(channel: secure_channel.AuthenticatedChannel, state: Any) -> dict[str, Any]:
    """Return the first update with this state."""
    while (message := receive(channel))["status"] != state:
        pass
    return message


def test_last_state_and_whole_log_are_sent_in_order(driver: Driver) -> None:
    channel = driver.next()
    messages = [receive(channel)]
    driver.connection.log("a line\n")
    for number in (1, 2, 3):
        driver.update(number)
    while messages[-1]["status"] != 3:
        messages.append(receive(channel))
    states = [message["status"] for message in messages]
    assert states == sorted(states)
    assert "".join(message["log"] for message in messages) == "a line\n"
    channel.send({"order": "stop"})
    until(lambda: driver.orders == [{"order": "stop"}])


def test_unresponsive_driver_does_not_block_update(driver: Driver) -> None:
    driver.next()
    for number in range(2_000):
        driver.connection.log("x" * MAX_LOG_CHARS)
        driver.update(number)
    driver.connection.close(0.1)
    # The node would have connected again after the timeout of a message.
    assert driver.channels.empty()


@pytest.mark.slow
def test_state_without_a_channel_is_sent_on_the_next(driver: Driver) -> None:
    driver.next().close()
    driver.update("ended")
    message: dict[str, Any] = {}
    while not message:
        with contextlib.suppress(EOFError, OSError):
            message = receive_state(driver.next(), "ended")
    assert message["status"] == "ended"


@pytest.mark.slow
def test_unacknowledged_log_is_sent_on_the_next_channel(driver: Driver) -> None:
    with driver.next() as channel:
        receive(channel)
        driver.connection.log("a line\n")
        driver.update(1)
        while not (first := channel.receive(20)[0])["log"]:
            channel.send({"order": "acknowledge", "seq": first["seq"]})
    driver.state = 2  # changes while no channel is open
    channel = driver.next()
    again = receive(channel)
    assert (again["seq"], again["log"]) == (first["seq"], "a line\n")
    following = receive_state(channel, 2)
    assert (following["seq"], following["log"]) == (first["seq"] + 1, "")


@pytest.mark.slow
def test_unresponsive_channel_is_replaced(driver: Driver) -> None:
    silent = driver.next()
    silent.receive(20)  # without an acknowledgement
    assert receive(driver.next())["seq"] == 1


@pytest.mark.parametrize("invalid", [object(), "x" * (1 << 21)])
def test_unsendable_state_does_not_end_the_connection(driver: Driver, invalid: Any) -> None:
    channel = driver.next()
    receive(channel)
    driver.update(invalid)
    driver.update("ended")
    assert receive_state(channel, "ended")["status"] == "ended"


@pytest.mark.slow
def test_updates_without_news_are_heartbeats(driver: Driver) -> None:
    channel = driver.next()
    assert [receive(channel)["seq"] for _ in range(3)] == [1, 2, 3]


def test_close_waits_for_the_last_state_with_a_timeout(driver: Driver) -> None:
    channel = driver.next()
    driver.update("ended")
    closing = threading.Thread(target=driver.connection.close, args=(20,))
    closing.start()
    receive_state(channel, "ended")
    closing.join(60)
    with pytest.raises((EOFError, OSError)):
        channel.receive(20)
