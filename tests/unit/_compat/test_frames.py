"""The frames of all threads."""

from __future__ import annotations

import gc
import sys
import threading

import pytest

from tfd_notebook._compat import frames


def test_the_frame_of_this_thread_is_listed() -> None:
    assert frames.current_frames()[threading.get_ident()].f_code.co_name == "current_frames"


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_meanwhile(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    states = []
    monkeypatch.setattr(sys, "_current_frames", lambda: states.append(gc.isenabled()) or {})
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        assert frames.current_frames() == {}
        assert (states, gc.isenabled()) == ([False], enabled)
    finally:
        (gc.enable if was_enabled else gc.disable)()
