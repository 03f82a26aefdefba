"""The loop that reconnects with backoff, and heartbeats."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest

from tests._waiting import until
from tfd_notebook.errors import LaunchError
from tfd_notebook.net.reconnect import reconnect, send_heartbeats


class Peer:
    """A peer that fails some times; records the time of each attempt."""

    def __init__(self, failures: int) -> None:
        self.attempts: list[float] = []
        self._failures = failures

    def connect(self) -> str:
        self.attempts.append(time.monotonic())
        if len(self.attempts) <= self._failures:
            raise ConnectionRefusedError(f"attempt {len(self.attempts)}")
        return "connected"


@pytest.fixture
def closed() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.slow
def test_pauses_double_until_the_peer_answers(closed: threading.Event) -> None:
    peer = Peer(failures=3)
    began = time.monotonic()
    assert reconnect(peer.connect, closed) == "connected"
    times = [began, *peer.attempts]
    for number, least in enumerate((0.1, 0.1, 0.2, 0.4)):
        assert times[number + 1] - times[number] >= least


def test_first_attempt_can_be_immediate_and_pauses_are_limited(closed: threading.Event) -> None:
    peer = Peer(failures=40)
    assert reconnect(peer.connect, closed, first_delay=0.0, max_delay=0.001) == "connected"
    assert len(peer.attempts) == 41


@pytest.mark.slow
def test_last_error_is_raised_when_no_retry_is_left(closed: threading.Event) -> None:
    peer = Peer(failures=10)
    with pytest.raises(ConnectionRefusedError, match="attempt 3"):
        reconnect(peer.connect, closed, lambda: len(peer.attempts) < 3)


def test_other_errors_are_final(closed: threading.Event) -> None:
    def refuse() -> None:
        raise LaunchError("invalid token")

    with pytest.raises(LaunchError, match="invalid token"):
        reconnect(refuse, closed)


def test_close_ends_the_wait(closed: threading.Event) -> None:
    peer = Peer(failures=1000)
    results: queue.Queue[object] = queue.Queue()
    thread = threading.Thread(target=lambda: results.put(reconnect(peer.connect, closed)))
    thread.start()
    until(lambda: bool(peer.attempts))
    closed.set()
    assert results.get(timeout=30) is None
    thread.join()


def test_heartbeats_continue_after_an_error_until_the_end(closed: threading.Event) -> None:
    sent: queue.Queue[int] = queue.Queue()

    def send() -> None:
        sent.put(1)
        raise BrokenPipeError

    send_heartbeats(send, closed, 0.01)
    for _ in range(3):
        assert sent.get(timeout=30)
    closed.set()
    until(lambda: not any(t.name == "tfd-heartbeat" for t in threading.enumerate()))
