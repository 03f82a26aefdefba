"""Datasets that the functions of a pipeline capture. The service does not divide them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tfd_notebook.data.service import graph_inspection
from tfd_notebook.data.service.division import divide

D = tf.data.Dataset
MODES = ("DYNAMIC", "FILE", "DATA", "OFF", "HINT")


def found(dataset: Any, mode: str, in_process: bool = False) -> list[Any]:
    return list(graph_inspection.examine(dataset).semantics.changes(mode, 2, in_process))


def joined(inner: Any) -> Any:
    """Return a dataset whose function reads `inner` for each element."""
    return D.range(9).flat_map(lambda x: inner.map(lambda y: x * 10 + y))


def numbers(inner: Any, function: Callable[[Any, Any], Any]) -> Any:
    """Return numbers with a function that captures `inner`."""
    return D.range(9).map(lambda x: function(x, inner))


def selected(inner: Any) -> Any:
    return D.range(9).filter(lambda x: x > total(inner))


def whole(inner: Any) -> Any:
    return D.range(9).flat_map(lambda x: inner)


def total(inner: Any) -> Any:
    return inner.reduce(tf.constant(0, tf.int64), lambda a, b: a + b)


def table_of(values: Any) -> Any:
    return tf.data.experimental.table_from_dataset(
        values.map(lambda x: (x, x * 2)),
        1,
        default_value=tf.constant(-1, tf.int64),
        key_dtype=tf.int64,
    )


SOUND: dict[str, Callable[[], Any]] = {
    "map": lambda: joined(D.range(3).map(lambda x: x * 2)),
    "whole": lambda: whole(D.range(3).batch(2)),
    "counted": lambda: joined(D.range(9).skip(1).take(3).enumerate().map(lambda i, x: i + x)),
    "pairs": lambda: joined(D.zip((D.range(9), D.range(9))).map(lambda a, b: a - b)),
    "sum": lambda: numbers(D.range(3), lambda x, inner: x + total(inner)),
    "cached": lambda: joined(D.range(3).cache()),
    "seeded source": lambda: joined(D.random(1).take(2)),
    "nested": lambda: joined(joined(D.range(3).map(lambda x: x + 1))),
    "filter": lambda: selected(D.range(3).repeat(2)),
    "table": lambda: D.range(9).map(table_of(D.range(3).map(lambda x: x)).lookup),
}


@pytest.mark.parametrize("name", SOUND)
def test_dataset_that_each_call_reads_is_sound(name: str) -> None:
    dataset = SOUND[name]()
    for mode in MODES:
        assert found(dataset, mode) == []
        assert divide(dataset, mode, in_process=False) is None


def noisy() -> Any:
    return D.range(3).map(lambda x: x + tf.random.uniform((), 0, 9, tf.int64))


def shuffled() -> Any:
    return D.range(9).shuffle(9)


@pytest.mark.parametrize(
    ("create", "refused"),
    [
        (lambda: joined(shuffled()), True),
        (lambda: joined(D.range(9).map(lambda x: x, 2, deterministic=False)), True),
        (lambda: selected(noisy()), True),
        (lambda: joined(D.range(9).filter(lambda x: tf.random.uniform(()) > 0.5)), True),
        (
            lambda: numbers(noisy(), lambda x, inner: (x, total(inner))).filter(
                lambda x, number: number > 9
            ),
            False,
        ),
    ],
)
def test_random_order_or_selection_in_it_is_found(create: Any, refused: bool) -> None:
    order = [change for change in found(create(), "DATA") if change.kind == "order"]
    assert [change.refused for change in order] == [refused]
    assert "order" not in {change.kind for change in found(create(), "DYNAMIC")}


def test_seed_in_it_is_found() -> None:
    inner = D.range(3).map(lambda x: x + tf.random.uniform((), 0, 9, tf.int64, seed=1))
    assert [change.kind for change in found(joined(inner), "DYNAMIC")] == ["random"]


def test_state_in_it_is_found() -> None:
    number = tf.Variable(1, dtype=tf.int64)
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
    count = itertools.count()
    for function, kind in (
        (lambda x: x + number, "captured"),
        (table.lookup, "captured"),
        (lambda x: x + tf.numpy_function(lambda: next(count), [], tf.int64), "python"),
    ):
        inner = D.range(3).map(function)
        assert [change.kind for change in found(joined(inner), "DYNAMIC")] == [kind]


def test_one_that_keeps_another_state_is_not_covered(tmp_path: Path) -> None:
    for inner in (
        noisy().cache(),
        D.range(9).shuffle(9, seed=1),
        D.range(9).cache(str(tmp_path / "cache")),
        D.range(9).snapshot(str(tmp_path / "snapshot")),
    ):
        assert "unknown" in {change.kind for change in found(joined(inner), "DYNAMIC")}


@pytest.mark.parametrize(
    ("create", "depth", "kinds"), [(noisy, 40, set()), (shuffled, 500, {"order"})]
)
def test_many_nested_ones_are_examined_once(create: Any, depth: int, kinds: set[str]) -> None:
    dataset = create()
    for _ in range(depth):
        dataset = whole(dataset)
    pipeline = graph_inspection.examine(dataset).semantics
    assert {change.kind for change in pipeline.changes("DATA", 2)} == kinds
    assert pipeline.visited < 10_000
