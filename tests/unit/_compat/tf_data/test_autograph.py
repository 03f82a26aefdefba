"""The functions that AutoGraph does not convert, for each public name of the package."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.autograph.core import config
from tensorflow.python.autograph.impl import conversion

import tfd_notebook as tfd
from tfd_notebook._compat.tf_data import autograph

VERSION = f"TensorFlow {tf.__version__}"


def public_functions() -> Iterator[Any]:
    """Yield the public functions of the package, and the methods of its public classes."""
    for module in (tfd, tfd.launchers, tfd.resolvers):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value):
                yield from (each for _, each in inspect.getmembers(value, inspect.isfunction))
            elif callable(value):
                yield value


def test_no_public_function_is_converted() -> None:
    functions = [each for each in public_functions() if each.__module__.startswith("tfd_")]
    assert {tfd.Cluster.observe, tfd.Stream.wait, tfd.explain} <= set(functions)
    assert [each for each in functions if not conversion.is_allowlisted(each)] == [], VERSION
    assert not conversion.is_allowlisted(lambda: None), VERSION


def test_package_is_excluded_once_until_that_is_undone() -> None:
    autograph.exclude_package()
    excluded = config.CONVERSION_RULES
    autograph.exclude_package()
    assert len(config.CONVERSION_RULES) == len(excluded)
    try:
        autograph.undo()
        autograph.undo()
        assert len(config.CONVERSION_RULES) == len(excluded) - 1
        assert not conversion.is_allowlisted(tfd.explain), VERSION
    finally:
        autograph.exclude_package()
    assert conversion.is_allowlisted(tfd.explain), VERSION


@pytest.mark.parametrize("names", [{}, {"CONVERSION_RULES": ()}])
def test_other_versions_of_tensorflow_are_not_changed(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SimpleNamespace(**names)
    monkeypatch.setitem(sys.modules, config.__name__, other)
    autograph.exclude_package()
    autograph.undo()
    assert vars(other) == names


def test_function_that_is_kept_is_marked_as_by_tensorflow() -> None:
    marked = tf.autograph.experimental.do_not_convert(lambda: None)

    def kept() -> None:
        pass

    autograph.keep_unconverted(kept)
    assert vars(kept) == {"autograph_info__": marked.autograph_info__}, VERSION
