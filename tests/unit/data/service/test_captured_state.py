"""Variables and tables that have changed since a dataset was sent."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfd_notebook._compat.tf_data import captured
from tfd_notebook.data.service import captured_state, graph_inspection

Range = tf.data.Dataset.range


def states_of(dataset: Any) -> tuple[captured_state.CapturedState, ...]:
    return captured_state.states_of(dataset, graph_inspection.examine(dataset).semantics)


def table_of(keys: Any, values: Any, default: Any = -1) -> Any:
    keys, values = tf.constant(keys), tf.constant(values)
    table = tf.lookup.experimental.MutableHashTable(keys.dtype, values.dtype, default)
    table.insert(keys, values)
    return table


VALUES = [
    1.0,
    [1.0, float("nan")],
    True,
    ["a", "bc"],
    tf.bfloat16.as_numpy_dtype(1),
    np.arange(6).reshape(2, 3),
    1 + 2j,
    [],
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_changed_variables_of_each_type_are_found(value: Any) -> None:
    variable = tf.Variable(value, shape=tf.TensorShape(None))
    dataset = Range(2).map(lambda i: (i, tf.shape(variable.read_value())))
    (state,) = states_of(dataset)
    assert not captured_state.changed([state])
    variable.assign(tf.identity(variable))
    assert not captured_state.changed([state])
    variable.assign(tf.concat([tf.reshape(variable, [-1]), tf.reshape(variable, [-1])], 0))
    assert captured_state.changed([state]) == ([state] if np.size(value) else [])


@pytest.mark.parametrize(
    ("keys", "values", "default"),
    [
        (["a", "b"], [1, 2], -1),
        (np.array([1, 2]), ["a", "b"], ""),
        (np.array([1, 2]), [[1.0, 2.0], [3.0, 4.0]], [0.0, 0.0]),
    ],
    ids=str,
)
def test_changed_tables_of_each_type_are_found(keys: Any, values: Any, default: Any) -> None:
    table = table_of(keys, values, default)
    nested = tf.function(table.lookup)
    as_key = tf.as_string if table.key_dtype == tf.string else tf.identity
    dataset = Range(2).map(lambda i: nested(as_key([i])))
    (state,) = states_of(dataset)
    keys, values = table.export()
    assert not captured_state.changed([state])
    table.insert(keys[::-1], values[::-1])
    assert not captured_state.changed([state]), "the order is not content"
    table.insert(keys, values[::-1])
    assert captured_state.changed([state]) == [state]
    table.insert(keys, values)
    assert not captured_state.changed([state])
    table.remove(keys[:1])
    assert captured_state.changed([state]) == [state]


def test_only_what_can_change_and_matters_is_compared() -> None:
    scale = tf.Variable(2, dtype=tf.int64)
    constant = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.constant([0], tf.int64), tf.constant([1])), -1
    )
    generator = tf.random.Generator.from_seed(1)
    dataset = (
        Range(2)
        .map(lambda i: (i * scale, constant.lookup(i)))
        .map(lambda i, _: (i, generator.uniform([])))
    )
    assert [state.resource.kind for state in states_of(dataset)] == ["variable"]
    assert states_of(Range(2).map(lambda i: constant.lookup(i))) == ()
    assert states_of(Range(2).map(lambda i: (i, generator.uniform([])))) == ()
    assert states_of(Range(2).map(lambda i: i + 1)) == ()


def test_large_content_is_not_compared_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MOST_BYTES", 1_000)
    monkeypatch.setattr(captured, "MOST_ENTRIES", 1)
    large, small = tf.Variable(tf.zeros([500]), name="large"), tf.Variable(0.0, name="small")
    table = table_of(["a", "b"], [1, 2])
    dataset = Range(2).map(lambda i: (large[i] + small, table.lookup(tf.as_string(i))))
    states = states_of(dataset)
    large.assign_add(tf.ones([500]))
    assert not captured_state.changed(states)
    small.assign_add(1.0)
    (found,) = captured_state.changed(states)
    assert "the variable small has changed since" in str(found)
    names = captured_state.names_in(states, states[0].operation)
    assert "the variable small;" in names
    assert "the variable large, which is too large to be compared" in names
    assert "the table, which is too large to be compared" in names
    assert captured_state.names_in(states, "batch(2)") == ""


def test_names_are_those_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    variable, table = tf.Variable(1, dtype=tf.int64), table_of(["a"], [1])
    dataset = Range(2).flat_map(
        lambda i: Range(2).map(lambda j: (j * variable, table.lookup(tf.as_string(i))))
    )
    states = states_of(dataset)
    assert [state.name for state in states] == ["the variable Variable", "the table"]
    monkeypatch.setattr(main, "scale", variable, raising=False)
    monkeypatch.setattr(main, "vocabulary", table, raising=False)
    assert [state.name for state in states] == ["the variable scale", "the table vocabulary"]


def test_deleted_objects_are_not_kept_and_have_not_changed() -> None:
    def states_with_a_deleted_table() -> tuple[captured_state.CapturedState, ...]:
        table = table_of(["a"], [1])
        variable = tf.Variable(1, dtype=tf.int64)
        dataset = Range(2).map(lambda i: (i + variable, table.lookup(tf.as_string(i))))
        states = states_of(dataset)
        tf.raw_ops.DestroyResourceOp(resource=table.resource_handle)
        assert not captured_state.changed(states)
        return states

    states = states_with_a_deleted_table()
    gc.collect()
    assert [state.resource.handle() for state in states] == [None, None]
    assert not captured_state.changed(states)
    assert states[0].name == "the variable Variable"
