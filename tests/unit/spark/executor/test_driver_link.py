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
        self.line = DriverConnection(
            self._server.address,
            secret,
            greeting=lambda: {"say": "hello"},
            fields=lambda: {"known": "all"},
            on_order=self.orders.append,
        )

    def _hold(self, channel: secure_channel.AuthenticatedChannel) -> None:
        self.channels.put(channel)
        self._through.wait()

    def next(self) -> secure_channel.AuthenticatedChannel:
        channel = self.channels.get(timeout=20)
        assert channel.receive(20)[0] == {"say": "hello"}
        return channel

    def close(self) -> None:
        self.line.close(0)
        self._through.set()
        self._server.close()
        until(lambda: not any(t.name == "tfd-line" for t in threading.enumerate()))


def hear(channel: secure_channel.AuthenticatedChannel) -> dict[str, Any]:
    """Return the next message, and acknowledge it."""
    word: dict[str, Any] = channel.receive(20)[0]
    channel.send({"order": "heard", "word": word["word"]})
    return word


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


def test_messages_and_commands_keep_their_order(driver: Driver) -> None:
    channel = driver.next()
    driver.line.log("a line\n")
    for number in range(3):
        driver.line.send({"say": number})
    words = [hear(channel) for _ in range(3)]
    assert [word["say"] for word in words] == [0, 1, 2]
    assert all(word["known"] == "all" for word in words)
    assert "".join(word["log"] for word in words) == "a line\n"
    channel.send({"order": "stop"})
    until(lambda: driver.orders == [{"order": "stop"}])


def test_unresponsive_driver_does_not_block_send(driver: Driver) -> None:
    driver.next()
    for number in range(2_000):
        driver.line.log("x" * MAX_LOG_CHARS)
        driver.line.send({"say": number})
    driver.line.close(0.1)
    # The node would have connected again after the timeout of a message.
    assert driver.channels.empty()


def test_message_without_a_channel_is_sent_on_the_next(driver: Driver) -> None:
    driver.next().close()
    driver.line.send({"say": "ended"})
    word: dict[str, Any] = {}
    while not word:
        with contextlib.suppress(EOFError, OSError):
            word = hear(driver.next())
    assert word["say"] == "ended"


def test_unacknowledged_message_is_sent_on_the_next_channel(driver: Driver) -> None:
    driver.line.log("a line\n")
    for number in range(2):
        driver.line.send({"say": number})
    with driver.next() as channel:
        first = channel.receive(20)[0]
    channel = driver.next()
    assert [hear(channel), hear(channel)["say"]] == [first, 1]
    assert (first["say"], first["log"]) == (0, "a line\n")


def test_unresponsive_channel_is_replaced(driver: Driver) -> None:
    deaf = driver.next()
    driver.line.send({"say": "ended"})
    assert deaf.receive(20)[0]["say"] == "ended"  # without an acknowledgement

    def is_given_up() -> bool:
        driver.line.send_heartbeat()
        return not driver.channels.empty()

    until(is_given_up)
    assert hear(driver.next())["say"] == "ended"


@pytest.mark.parametrize("bad", [object(), "x" * (1 << 21)])
def test_unsendable_message_does_not_end_the_connection(driver: Driver, bad: Any) -> None:
    channel = driver.next()
    driver.line.send({"say": bad})
    driver.line.send({"say": "ended"})
    assert hear(channel)["say"] == "ended"


def test_heartbeat_does_not_wait_for_messages(driver: Driver) -> None:
    channel = driver.next()
    driver.line.send_heartbeat()
    assert channel.receive(20)[0]["say"] == "beat"


def test_close_waits_for_the_last_message_with_a_timeout(driver: Driver) -> None:
    channel = driver.next()
    driver.line.send({"say": "ended"})
    closing = threading.Thread(target=driver.line.close, args=(20,))
    closing.start()
    assert hear(channel)["say"] == "ended"
    closing.join(20)
    with pytest.raises(EOFError):
        channel.receive(20)
