"""Tests of the store of pickled functions that an agent keeps for data workers."""

import pytest

from tfd_notebook.agent import dataset_functions
from tfd_notebook.agent.dataset_functions import Functions
from tfd_notebook.errors import StateError


def kept(some):
    return [tokens for tokens, _ in some]


def test_set_is_removed_with_its_last_function():
    some = Functions()
    some.add(["a", "b"], b"ab")
    some.remove_unused(["a"])
    assert kept(some) == [("a", "b")]
    some.remove_unused(["b", "unknown"])
    assert kept(some) == []


def test_set_is_dropped_if_later_sets_have_its_functions():
    some = Functions()
    for number in range(100):
        some.add(["base", str(number)], b"x")
        if number:
            some.remove_unused([str(number - 1)])
    assert kept(some) == [("base", "99")]


def test_repeated_function_is_kept():
    some = Functions()
    some.add(["a", "b"], b"ab")
    some.remove_unused(["a"])
    some.add(["a"], b"a")
    assert kept(some) == [("a", "b"), ("a",)]
    some.remove_unused(["b"])
    assert kept(some) == [("a",)]


def test_repeated_set_replaces_itself():
    some = Functions()
    some.add(["a"], b"1")
    some.add(["b"], b"2")
    some.add(["a"], b"3")
    assert list(some) == [(("b",), b"2"), (("a",), b"3")]


def test_total_size_is_limited(monkeypatch):
    monkeypatch.setattr(dataset_functions, "LARGEST", 10)
    some = Functions()
    some.add(["a"], b"x" * 8)
    with pytest.raises(StateError, match="at most"):
        some.add(["b"], b"x" * 8)
    some.add(["a"], b"y" * 8)
    some.remove_unused(["a"])
    some.add(["b"], b"x" * 8)
    assert kept(some) == [("b",)]
