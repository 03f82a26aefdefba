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


def test_line_of_a_rewritten_function_is_the_users() -> None:
    codes: list[Any] = []

    def prepare(number: Any) -> Any:
        def inner(value: Any) -> Any:
            if value > 1:
                value += 1
            return value

        codes.append(inner.__code__)
        return tf.numpy_function(inner, [number], tf.int64)

    tf.data.Dataset.range(3).map(prepare)
    (code,) = codes
    assert code.co_filename != __file__
    condition = prepare.__code__.co_firstlineno + 2
    assert autograph.definition(code) == (__file__, condition, "inner"), VERSION
    # The body of a condition is a function of the generated code.
    (*_, (file, line, name)) = (
        autograph.original(each.co_filename, each.co_firstlineno + 2, each.co_name)
        for each in code.co_consts
        if inspect.iscode(each) and each.co_name == "if_body"
    )
    assert (file, line, name) == (__file__, condition + 1, "inner"), VERSION
    here = (__file__, 1, "name")
    assert autograph.original(*here) == here
    assert autograph.definition(prepare.__code__)[1:] == (condition - 2, "prepare")
    unknown = (code.co_filename.replace(".py", "_other.py"), 1, "name")
    assert autograph.original(*unknown) == unknown


def test_function_that_is_kept_is_marked_as_by_tensorflow() -> None:
    marked = tf.autograph.experimental.do_not_convert(lambda: None)

    def kept() -> None:
        pass

    autograph.keep_unconverted(kept)
    assert vars(kept) == {"autograph_info__": marked.autograph_info__}, VERSION
