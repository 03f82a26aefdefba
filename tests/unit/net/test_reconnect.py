"""The loop that reconnects with backoff, and heartbeats."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from tests._waiting import until
from tfd_notebook.errors import LaunchError
from tfd_notebook.net.reconnect import reconnect, send_heartbeats


class Closed(threading.Event):
    """An event that records the waits for it, which take no time.

    Parameters
    ----------
    set_by : int
        Number of the wait during which it is set. Default: never.
    """

    def __init__(self, set_by: int = 0) -> None:
        super().__init__()
        self.waits: list[float | None] = []
        self._set_by = set_by

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        if len(self.waits) == self._set_by:
            self.set()
        return self.is_set()


class Peer:
    """A peer that refuses some connections."""

    def __init__(self, failures: int) -> None:
        self.attempts = 0
        self._failures = failures

    def connect(self) -> str:
        self.attempts += 1
        if self.attempts <= self._failures:
            raise ConnectionRefusedError(f"attempt {self.attempts}")
        return "connected"


@pytest.mark.parametrize("failures", range(9))
def test_pauses_double_up_to_the_maximum_until_the_peer_answers(failures: int) -> None:
    peer, closed = Peer(failures), Closed()
    assert reconnect(peer.connect, closed) == "connected"
    assert closed.waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0][: failures + 1]
    assert peer.attempts == failures + 1


@pytest.mark.parametrize(("first", "largest", "pauses"), [
    (0.0, 5.0, [0.0, 0.1, 0.2, 0.4]),
    (0.0, 0.001, [0.0, 0.001, 0.001, 0.001]),
    (2.0, 3.0, [2.0, 3.0, 3.0, 3.0]),
])  # fmt: skip
def test_first_and_largest_pause_can_be_chosen(
    first: float, largest: float, pauses: list[float]
) -> None:
    peer, closed = Peer(failures=3), Closed()
    assert reconnect(peer.connect, closed, first_delay=first, max_delay=largest) == "connected"
    assert closed.waits == pauses


@pytest.mark.parametrize("failures", range(5))
@pytest.mark.parametrize("allowed", range(1, 5))
def test_last_error_is_raised_when_no_retry_is_left(failures: int, allowed: int) -> None:
    peer, closed = Peer(failures), Closed()
    if failures < allowed:
        assert reconnect(peer.connect, closed, lambda: peer.attempts < allowed) == "connected"
    else:
        with pytest.raises(ConnectionRefusedError, match=f"attempt {allowed}"):
            reconnect(peer.connect, closed, lambda: peer.attempts < allowed)
    assert len(closed.waits) == peer.attempts == min(failures + 1, allowed)


@pytest.mark.parametrize("failures", range(3))
def test_other_errors_are_final(failures: int) -> None:
    peer = Peer(failures)

    def refuse() -> None:
        raise LaunchError(f"invalid token, {peer.connect()}")

    with pytest.raises(LaunchError, match="invalid token"):
        reconnect(refuse, Closed())
    assert peer.attempts == failures + 1


@pytest.mark.parametrize("wait", range(1, 5))
def test_close_ends_the_wait(wait: int) -> None:
    peer = Peer(failures=1000)
    assert reconnect(peer.connect, Closed(set_by=wait)) is None
    assert peer.attempts == wait - 1


@pytest.fixture
def closed() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_heartbeats_continue_after_an_error_until_the_end(closed: threading.Event) -> None:
    sent: queue.Queue[int] = queue.Queue()

    def send() -> None:
        sent.put(1)
        raise BrokenPipeError

    send_heartbeats(send, closed, 0.01)
    for _ in range(3):
        assert sent.get(timeout=60)
    closed.set()
    until(lambda: not any(t.name == "tfd-heartbeat" for t in threading.enumerate()))
