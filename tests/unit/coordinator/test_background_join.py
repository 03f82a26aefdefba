"""Background join of a coordinator, without TensorFlow."""

from __future__ import annotations

import math
import threading

import pytest

from tests._coordinator import FakeCoordinator
from tfd_notebook import errors
from tfd_notebook.coordinator.background_join import BackgroundJoin


class Joined(FakeCoordinator):
    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error
        self.go = threading.Event()
        self.values = "values"

    def join(self, timeout: float | None) -> None:
        assert self.present == 1
        self.go.wait(60)
        if self.error:
            raise self.error


def test_background_join_reports_its_end() -> None:
    received: list[tuple[str, str]] = []
    coordinator = Joined()
    joining = BackgroundJoin(coordinator, None, lambda *words: received.append(words))  # type: ignore[arg-type]
    assert (joining.state, joining.error, received) == ("waiting", None, [])
    with pytest.raises(errors.TimeLimit):
        joining.wait(0.01)
    with pytest.raises(errors.UsageError, match="invalid timeout=nan: expected 0 or more seconds"):
        joining.wait(math.nan)
    coordinator.go.set()
    joining.wait(60)
    assert (joining.state, received[0][0]) == ("done", "info")
    failing = Joined(ValueError("no such thing"))
    failing.go.set()
    joining = BackgroundJoin(failing, 1.0, lambda *words: received.append(words))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no such thing"):
        joining.wait(60)
    assert repr(joining) == "<BackgroundJoin failed: ValueError: no such thing>"
    assert received[1] == (
        "error",
        "the background join failed: ValueError: no such thing",
    )
