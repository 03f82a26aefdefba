"""Lines that arrive in messages of any size."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from tfd_notebook.launchers.client.lines import LineBuffer
from tfd_notebook.net import validation


@hypothesis.given(st.lists(st.text("a\n").map(str.encode)))
def test_messages_can_divide_lines_anywhere(messages: list[bytes]) -> None:
    buffer = LineBuffer()
    lines = [line for message in messages for line in buffer.feed(message)]
    expected = b"".join(messages).splitlines(keepends=True)
    assert lines == [line for line in expected if line.endswith(b"\n")]


def test_line_without_an_end_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MAX_MESSAGE_BYTES", 10)
    buffer = LineBuffer()
    assert buffer.feed(b"12345678\n1234567890") == [b"12345678\n"]
    with pytest.raises(validation.InvalidMessage):
        buffer.feed(b"1\n")
    with pytest.raises(validation.InvalidMessage):
        buffer.feed(b"1")
