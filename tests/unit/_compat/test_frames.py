"""The frames of other threads are read without a risk for this process."""

from __future__ import annotations

import gc
import sys
import threading

import pytest

from tfd_notebook._compat import frames


def test_the_frames_of_another_thread_are_listed() -> None:
    started, proceed = threading.Event(), threading.Event()

    def wait(local: str = "here") -> None:
        started.set()
        proceed.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    assert started.wait(60)
    stacks = frames.stacks()
    proceed.set()
    assert threading.get_ident() not in stacks
    stack = {frame.f_code.co_name: frame for frame in stacks[thread.ident or 0]}
    assert [*stack].index("wait") < [*stack].index("run")  # innermost first
    assert frames.variable_in(stack["wait"], "local") == "here"
    assert frames.variable_in(stack["wait"], "other") is None
    thread.join()


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_meanwhile(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    states = []
    monkeypatch.setattr(sys, "_current_frames", lambda: states.append(gc.isenabled()) or {})
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        assert frames.stacks() == {}
        assert (states, gc.isenabled()) == ([False], enabled)
    finally:
        (gc.enable if was_enabled else gc.disable)()
