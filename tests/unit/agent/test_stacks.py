"""Stacks of threads that run Python functions of datasets, with a fake clock."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tests._waiting import until
from tfd_notebook.agent import stacks
from tfd_notebook.model.stacks import PythonFrame

SECONDS = 60.0


class Gate:
    """A point in a function of a dataset, at which the function waits for the test."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.leave = threading.Semaphore(0)

    def wait(self) -> None:
        self.arrived.release()
        assert self.leave.acquire(timeout=SECONDS)

    def await_call(self) -> None:
        assert self.arrived.acquire(timeout=SECONDS)

    def let_go(self) -> None:
        self.leave.release()


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stacks, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def gate() -> Gate:
    return Gate()


@contextlib.contextmanager
def reading(dataset: Any) -> Iterator[None]:
    """Iterate a dataset in a thread."""
    thread = threading.Thread(target=lambda: list(dataset), name="reader")
    thread.start()
    try:
        yield
    finally:
        thread.join(SECONDS)
        assert not thread.is_alive()


def mapped(function: Callable[[Any], Any], count: int = 1) -> Any:
    call = tf.autograph.experimental.do_not_convert(
        lambda x: tf.numpy_function(function, [x], tf.int64)
    )
    return tf.data.Dataset.range(count).map(call)


def call() -> list[PythonFrame]:
    """Return the frames of the only call of a function of a dataset."""
    (thread,) = stacks.threads(pipelines_only=True)
    assert (thread["name"], thread["pipeline"]) == ("tf.data", True)
    return thread["frames"]


def named(frames: list[PythonFrame], function: str) -> PythonFrame:
    (frame,) = (each for each in frames if each["function"] == function)
    return frame


def test_call_has_the_time_since_its_first_observation(clock: Clock, gate: Gate) -> None:
    def helper() -> None:
        gate.wait()

    def decode(x: Any) -> Any:
        helper()
        return x

    with reading(mapped(decode)):
        gate.await_call()
        stacks.observe()
        clock.now += 8.0
        stacks.observe()
        frames = call()
        gate.let_go()
    outer = named(frames, "decode")
    assert (outer["file"], outer["seconds"]) == (__file__, 8.0)
    assert outer["line"] == decode.__code__.co_firstlineno + 1
    users = [frame["function"] for frame in frames if frame["users"]]
    assert users[:2] == ["decode", "helper"]
    # The wait is in Python's own module.
    assert not frames[-1]["users"]
    assert frames[-1]["file"].endswith("threading.py")
    assert stacks.threads(pipelines_only=True) == []


def test_next_call_of_the_same_function_starts_at_zero(clock: Clock, gate: Gate) -> None:
    def decode(x: Any) -> Any:
        gate.wait()
        return x

    with reading(mapped(decode, 3)):
        for _ in range(3):
            gate.await_call()
            assert named(call(), "decode")["seconds"] == 0.0
            clock.now += 50.0
            assert named(call(), "decode")["seconds"] == 50.0
            gate.let_go()


def test_generator_has_the_time_of_its_element(clock: Clock, gate: Gate) -> None:
    def numbers() -> Iterator[int]:
        for number in range(2):
            gate.wait()
            yield number

    with reading(
        tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec((), tf.int64))
    ):
        for _ in range(2):
            gate.await_call()
            assert named(call(), "numbers")["seconds"] == 0.0
            clock.now += 50.0
            assert named(call(), "numbers")["seconds"] == 50.0
            gate.let_go()


def test_generator_that_the_users_function_iterates_has_no_time(clock: Clock, gate: Gate) -> None:
    def numbers() -> Iterator[int]:
        for number in range(2):
            gate.wait()
            yield number

    def decode(x: Any) -> Any:
        return x + sum(numbers()) - 1

    with reading(mapped(decode)):
        for waited in (0.0, 50.0):
            gate.await_call()
            frames = call()
            assert named(frames, "numbers")["seconds"] is None
            assert named(frames, "decode")["seconds"] == waited
            clock.now += 50.0
            gate.let_go()


def test_observed_call_keeps_none_of_its_variables(clock: Clock, gate: Gate) -> None:
    class Element:
        pass

    kept: list[weakref.ref[Element]] = []

    def decode(x: Any) -> Any:
        element = Element()
        kept.append(weakref.ref(element))
        gate.wait()
        return x

    with reading(mapped(decode)):
        gate.await_call()
        stacks.observe()
        call()
        gate.let_go()
    assert kept[0]() is None


def test_frame_that_a_debugger_traces_stays_unchanged(clock: Clock, gate: Gate) -> None:
    def trace(*_: Any) -> None:
        return None

    def decode(x: Any) -> Any:
        sys._getframe().f_trace = trace
        gate.wait()
        assert sys._getframe().f_trace is trace
        return x

    with reading(mapped(decode)):
        gate.await_call()
        stacks.observe()
        clock.now += 50.0
        assert named(call(), "decode")["seconds"] is None
        gate.let_go()


def test_deep_stack_is_cut_in_the_middle(gate: Gate) -> None:
    def descend(depth: int) -> None:
        if depth:
            descend(depth - 1)
        else:
            gate.wait()

    def decode(x: Any) -> Any:
        descend(300)
        return x

    with reading(mapped(decode)):
        gate.await_call()
        frames = call()
        gate.let_go()
    assert len(frames) == stacks.MAX_FRAMES
    assert "decode" in [frame["function"] for frame in frames]
    assert frames[-1]["file"].endswith("threading.py")


def test_other_threads_are_listed_after_those_of_datasets(gate: Gate) -> None:
    def decode(x: Any) -> Any:
        gate.wait()
        return x

    with reading(mapped(decode)):
        gate.await_call()
        threads = stacks.threads()
        gate.let_go()
    assert threads[0]["pipeline"]
    (reader,) = (thread for thread in threads if thread["name"] == "reader")
    assert not reader["pipeline"]
    assert all(frame["seconds"] is None for frame in reader["frames"])
    assert threading.current_thread().name not in [thread["name"] for thread in threads]


def test_library_function_is_named_if_it_is_the_function_of_the_dataset() -> None:
    rows: queue.Queue[int] = queue.Queue()

    # TensorFlow calls it, without code of the user.
    with reading(
        tf.data.Dataset.from_generator(
            lambda: iter(rows.get, None), output_signature=tf.TensorSpec((), tf.int64)
        )
    ):
        threads = until(lambda: stacks.threads(pipelines_only=True))
        rows.put(None)  # type: ignore[arg-type]
    users = [frame["function"] for frame in threads[0]["frames"] if frame["users"]]
    assert users == ["get"]
