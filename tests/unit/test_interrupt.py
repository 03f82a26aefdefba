"""The watch for Ctrl-C: what it cancels, what it leaves alone, and that it leaves no trace."""

import os
import signal
import socket
import threading
import time

import pytest

from tfd_notebook._compat import sigint
from tfd_notebook._compat.tf_data.meter import IteratorMetrics


@pytest.fixture(autouse=True)
def nobody_else():
    """An iterator that a test of another file left holds a watch of its own: begin without."""
    sigint.undo()


@pytest.fixture
def meter():
    meter = IteratorMetrics()
    sigint.arm(meter)
    yield meter
    sigint.release(meter)


def press():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)  # the handler runs at the latest here


def block(meter, function=False):
    """Make `meter` look blocked; return the event that its cancellation sets."""
    cancelled = threading.Event()
    meter.blocked[sigint.MAIN_THREAD] = (time.perf_counter(), cancelled.set, function)
    return cancelled


def test_a_blocked_call_is_cancelled_after_a_grace(meter):
    cancelled = block(meter)
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        press()
    assert cancelled.wait(2)
    assert sigint.GRACE <= time.perf_counter() - start < 1
    assert meter.interrupted


def test_a_call_that_ends_by_itself_stays_usable(meter):
    cancelled = block(meter)
    with pytest.raises(KeyboardInterrupt):
        press()
    meter.blocked.clear()
    assert not cancelled.wait(3 * sigint.GRACE)
    assert not meter.interrupted


def test_a_function_that_computes_is_cancelled_at_the_second_press_only(meter):
    class Clock:
        def starved(self):
            return False

    meter.clock = Clock()
    cancelled = block(meter, function=True)
    for last in (False, True):
        with pytest.raises(KeyboardInterrupt):
            press()
        assert cancelled.wait(3 * sigint.GRACE) is last
    meter.clock = None


def test_other_handlers_are_left_alone(meter):
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        cancelled = block(meter)
        press()
        assert not cancelled.wait(3 * sigint.GRACE)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [1]


def test_the_descriptor_of_an_event_loop_gets_its_bytes_and_is_put_back():
    ours, loops = socket.socketpair()
    loops.setblocking(False)
    outer = signal.set_wakeup_fd(loops.fileno())
    try:
        meter = IteratorMetrics()
        sigint.arm(meter)
        sigint.arm(meter)
        with pytest.raises(KeyboardInterrupt):
            press()
        ours.settimeout(2)
        assert ours.recv(1) == bytes([signal.SIGINT])
        sigint.release(meter)
        assert signal.set_wakeup_fd(-1) == loops.fileno()
    finally:
        signal.set_wakeup_fd(outer)
        ours.close()
        loops.close()


def test_the_last_release_ends_the_thread():
    first, second = IteratorMetrics(), IteratorMetrics()
    sigint.arm(first)
    sigint.arm(second)
    watch = [t for t in threading.enumerate() if t.name == "tfd-ctrl-c"]
    assert len(watch) == 1
    sigint.release(first)
    assert watch[0].is_alive()
    sigint.release(second)
    watch[0].join(2)
    assert not watch[0].is_alive()
    assert signal.set_wakeup_fd(-1) == -1
