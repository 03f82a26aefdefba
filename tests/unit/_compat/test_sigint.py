"""The watch for Ctrl-C: cancelled and ignored functions, and cleanup."""

import signal
import socket
import threading

import pytest

from tests._waiting import until
from tfd_notebook._compat import sigint
from tfd_notebook._compat.tf_data.meter import IteratorMetrics


@pytest.fixture(autouse=True)
def restore_handler():
    """Remove the watches of iterators that tests of other files have left."""
    sigint.undo()


@pytest.fixture
def meter():
    meter = IteratorMetrics()
    sigint.arm(meter)
    yield meter
    sigint.release(meter)


class Clock:
    """Stand-in for `time` in the watch, which reads it for each blocked call."""

    now = 1.0
    reads = 0

    def perf_counter(self):
        self.reads += 1
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(sigint, "time", clock)
    return clock


def press():
    signal.raise_signal(signal.SIGINT)


def block(meter, function=False):
    """Simulate a blocked `meter`; return the event that its cancellation sets."""
    cancelled = threading.Event()
    meter.blocked[sigint.MAIN_THREAD] = (sigint.time.perf_counter(), cancelled.set, function)
    return cancelled


def await_checks(clock):
    """Wait until the watch has checked a blocked call twice."""
    last = clock.reads + 3  # the first read may be of the press
    until(lambda: clock.reads >= last)


def test_blocked_call_is_cancelled_after_a_grace_period(meter, clock):
    cancelled = block(meter)
    with pytest.raises(KeyboardInterrupt):
        press()
    await_checks(clock)
    assert not cancelled.is_set()
    clock.now += 2 * sigint.GRACE
    assert cancelled.wait(60)
    assert meter.interrupted


def test_call_that_ends_in_time_stays_usable(meter, clock):
    cancelled = block(meter)
    with pytest.raises(KeyboardInterrupt):
        press()
    await_checks(clock)
    meter.blocked.clear()
    clock.now += 2 * sigint.GRACE
    sigint.undo()
    assert not cancelled.is_set()
    assert not meter.interrupted


def test_computing_function_is_cancelled_at_the_second_ctrl_c(meter, clock):
    class Buffer:
        def starved(self):
            return False

    meter.clock = Buffer()
    cancelled = block(meter, function=True)
    with pytest.raises(KeyboardInterrupt):
        press()
    clock.now += 2 * sigint.GRACE
    await_checks(clock)
    assert not cancelled.is_set()
    with pytest.raises(KeyboardInterrupt):
        press()
    assert cancelled.wait(60)
    meter.clock = None


def test_handler_of_a_spark_context_interrupts(meter, clock):
    def handler(*_):
        raise KeyboardInterrupt

    handler.__module__ = "pyspark.core.context"
    before = signal.signal(signal.SIGINT, handler)
    try:
        cancelled = block(meter)
        with pytest.raises(KeyboardInterrupt):
            press()
        await_checks(clock)
        clock.now += 2 * sigint.GRACE
        assert cancelled.wait(60)
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_signal_handlers_are_kept(meter, clock):
    received = []
    before = signal.signal(signal.SIGINT, lambda *_: received.append(1))
    try:
        cancelled = block(meter)
        press()
        until(lambda: received)
        sigint.undo()  # after the watch has read the signal
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [1]
    assert not cancelled.is_set()
    assert clock.reads == 1  # of `block`: the watch ignores the signal


def test_wakeup_descriptor_of_an_event_loop_is_restored():
    receiver, loops = socket.socketpair()
    loops.setblocking(False)
    outer = signal.set_wakeup_fd(loops.fileno())
    try:
        meter = IteratorMetrics()
        sigint.arm(meter)
        sigint.arm(meter)
        with pytest.raises(KeyboardInterrupt):
            press()
        receiver.settimeout(60)
        assert receiver.recv(1) == bytes([signal.SIGINT])
        sigint.release(meter)
        assert signal.set_wakeup_fd(-1) == loops.fileno()
    finally:
        signal.set_wakeup_fd(outer)
        receiver.close()
        loops.close()


def test_last_release_ends_the_thread():
    first, second = IteratorMetrics(), IteratorMetrics()
    sigint.arm(first)
    sigint.arm(second)
    watch = [t for t in threading.enumerate() if t.name == "tfd-ctrl-c"]
    assert len(watch) == 1
    sigint.release(first)
    assert watch[0].is_alive()
    sigint.release(second)
    watch[0].join(60)
    assert not watch[0].is_alive()
    assert signal.set_wakeup_fd(-1) == -1
