"""Arguments of the stepper's commands."""

from __future__ import annotations

import pytest

from tfd_notebook import errors
from tfd_notebook.ui.magics.stepper import number_and_name


def test_number_and_name_may_have_any_order() -> None:
    assert number_and_name([], "") == (None, None)
    assert number_and_name(["3", "train"], "") == (3, "train")
    assert number_and_name(["train", "3"], "") == (3, "train")
    assert number_and_name(["-3"], "") == (-3, None)
    with pytest.raises(errors.UsageError, match="write NAME N"):
        number_and_name(["1", "2"], "NAME N")
