"""Arguments of the stepper's commands."""

from __future__ import annotations

import pytest

from tfd_notebook import errors
from tfd_notebook.ui.argparsing import CommandLine


def test_number_and_name_may_have_any_order() -> None:
    parser = CommandLine("%tfd_step").parser("step")
    for line, expected in (
        ([], (None, None)),
        (["3", "train"], (3, "train")),
        (["train", "3"], (3, "train")),
        (["-3"], (-3, None)),
    ):
        options = parser.read(line)
        assert (options.count, options.name) == expected
    with pytest.raises(errors.UsageError, match=r"write \[N\] \[NAME\]"):
        parser.read(["1", "2"])
