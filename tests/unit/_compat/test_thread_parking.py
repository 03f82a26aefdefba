"""Threads are blocked from TensorFlow's operations while the eager context is replaced."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tensorflow as tf

from tests._waiting import until
from tfd_notebook._compat import frames
from tfd_notebook._compat.tf_coordinator import thread_parking
from tfd_notebook.errors import StateError


def waits_at_a_gate(thread: threading.Thread) -> bool:
    stack = frames.stacks().get(thread.ident or 0, [])
    return any(frame.f_code.co_filename == thread_parking.__file__ for frame in stack)


def test_operation_that_has_waited_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has passed a gate runs its operation in the frame in which it waited."""
    running, proceed = threading.Event(), threading.Event()

    def block(x: Any) -> Any:
        running.set()
        assert proceed.wait(60)
        return x

    value = tf.constant(1)
    function = tf.function(lambda: tf.py_function(block, [value], tf.int32)).get_concrete_function()
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(int(function())), name="runner")
    with thread_parking.parked():
        thread.start()
        until(lambda: waits_at_a_gate(thread))
    assert running.wait(60)
    monkeypatch.setattr(thread_parking, "SECONDS", 0.2)
    try:
        with (
            pytest.raises(StateError, match="thread 'runner' runs an operation"),
            thread_parking.parked(),
        ):
            pass
    finally:
        proceed.set()
        thread.join()
    assert results == [1]
