"""A node's connection to the driver: `send` never blocks, and no message is lost."""

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

#: Timeout of a channel for one message, in seconds. `send` must not wait for it.
STALL = secure_channel.STALL_SECONDS


class Driver:
    """A listener that passes each channel to the test until the test has finished with it."""

    def __init__(self) -> None:
        self.channels: queue.Queue[secure_channel.AuthenticatedChannel] = queue.Queue()
        self.orders: list[Any] = []
        self._through = threading.Event()
        secret = secure_channel.Secret.new()
        self._server = secure_channel.serve(secret, self._hold)
        self.connection = DriverConnection(
            self._server.address,
            secret,
            hello=lambda: {"type": "hello"},
            fields=lambda: {"status": "all"},
            on_order=self.orders.append,
        )

    def _hold(self, channel: secure_channel.AuthenticatedChannel) -> None:
        self.channels.put(channel)
        self._through.wait()

    def next(self) -> secure_channel.AuthenticatedChannel:
        channel = self.channels.get(timeout=20)
        assert channel.receive(20)[0] == {"type": "hello"}
        return channel

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


def test_messages_and_commands_keep_their_order(driver: Driver) -> None:
    channel = driver.next()
    driver.connection.log("a line\n")
    for number in range(3):
        driver.connection.send({"type": number})
    messages = [receive(channel) for _ in range(3)]
    assert [message["type"] for message in messages] == [0, 1, 2]
    assert all(message["status"] == "all" for message in messages)
    assert "".join(message["log"] for message in messages) == "a line\n"
    channel.send({"order": "stop"})
    until(lambda: driver.orders == [{"order": "stop"}])


def test_unresponsive_driver_does_not_block_send(driver: Driver) -> None:
    driver.next()
    for number in range(2_000):
        driver.connection.log("x" * MAX_LOG_CHARS)
        driver.connection.send({"type": number})
    driver.connection.close(0.1)
    # The node would have connected again after the timeout of a message.
    assert driver.channels.empty()


def test_message_without_a_channel_is_sent_on_the_next(driver: Driver) -> None:
    driver.next().close()
    driver.connection.send({"type": "ended"})
    message: dict[str, Any] = {}
    while not message:
        with contextlib.suppress(EOFError, OSError):
            message = receive(driver.next())
    assert message["type"] == "ended"


def test_unacknowledged_message_is_sent_on_the_next_channel(driver: Driver) -> None:
    driver.connection.log("a line\n")
    for number in range(2):
        driver.connection.send({"type": number})
    with driver.next() as channel:
        first = channel.receive(20)[0]
    channel = driver.next()
    assert [receive(channel), receive(channel)["type"]] == [first, 1]
    assert (first["type"], first["log"]) == (0, "a line\n")


def test_unresponsive_channel_is_replaced(driver: Driver) -> None:
    silent = driver.next()
    driver.connection.send({"type": "ended"})
    assert silent.receive(20)[0]["type"] == "ended"  # without an acknowledgement

    replaced = threading.Event()

    def send_heartbeats() -> None:
        while not replaced.is_set():  # without a pause: the next channel must not be closed as well
            driver.connection.send_heartbeat()

    heartbeats = threading.Thread(target=send_heartbeats)
    heartbeats.start()
    try:
        assert receive(driver.next())["type"] == "ended"
    finally:
        replaced.set()
        heartbeats.join()


@pytest.mark.parametrize("invalid", [object(), "x" * (1 << 21)])
def test_unsendable_message_does_not_end_the_connection(driver: Driver, invalid: Any) -> None:
    channel = driver.next()
    driver.connection.send({"type": invalid})
    driver.connection.send({"type": "ended"})
    assert receive(channel)["type"] == "ended"


def test_heartbeat_does_not_wait_for_messages(driver: Driver) -> None:
    channel = driver.next()
    driver.connection.send_heartbeat()
    assert channel.receive(20)[0]["type"] == "heartbeat"


def test_close_waits_for_the_last_message_with_a_timeout(driver: Driver) -> None:
    channel = driver.next()
    driver.connection.send({"type": "ended"})
    closing = threading.Thread(target=driver.connection.close, args=(20,))
    closing.start()
    assert receive(channel)["type"] == "ended"
    closing.join(20)
    with pytest.raises(EOFError):
        channel.receive(20)
