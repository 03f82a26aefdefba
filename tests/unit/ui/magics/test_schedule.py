"""Cells that become functions of closures."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tfd_notebook import errors
from tfd_notebook.ui.magics.schedule import as_function


def test_cell_becomes_a_function() -> None:
    names: dict[str, Any] = {"__name__": "__main__", "factor": 3}
    function = as_function(
        "'''a\n  b'''\nx = 2\nfor _ in range(2):\n    x *= factor\nx", "cell_4", names
    )
    assert function() == 18
    assert "cell_4" not in names
    assert "x *= factor" in inspect.getsource(function)
    names["factor"] = 1
    assert function() == 2
    assert as_function("x = 1", "cell_5", names)() is None
    assert as_function("return 7", "cell_6", names)() == 7
    with pytest.raises(errors.UsageError, match="empty"):
        as_function("# nothing\n", "cell_7", names)
    with pytest.raises(SyntaxError):
        as_function("x +", "cell_8", names)
