"""Fed rows as arrays and as tf.data.Dataset."""

from __future__ import annotations

import collections
import datetime
import itertools
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tests.spark._feeding import SECRET, fed_inbox
from tfd_notebook.errors import NodeFailed, UsageError
from tfd_notebook.spark.feed.chunks import pack
from tfd_notebook.spark.feed.datafeed import DataFeed
from tfd_notebook.spark.feed.inbox import Inbox
from tfd_notebook.spark.feed.sender import InboxAddress, feed_chunks, infer_chunks, infer_partition

Row = pytest.importorskip("pyspark.sql.types").Row
pa = pytest.importorskip("pyarrow")
feed_batches = pytest.importorskip("tfd_notebook.spark.feed.arrow").feed_batches
pytestmark = pytest.mark.integration


def test_rows_of_numbers_become_one_array(tmp_path: Path) -> None:
    rows = [[float(n), float(2 * n)] for n in range(25)]
    with fed_inbox(tmp_path, rows) as inbox:
        feed = DataFeed(inbox)
        batches = []
        while not feed.should_stop():
            batches.append(feed.next_numpy(10))
    assert [batch.shape for batch in batches] == [(10, 2), (10, 2), (5, 2)]
    np.testing.assert_array_equal(np.concatenate(batches), rows)


def test_arrays_span_chunks(tmp_path: Path) -> None:
    rows = [(np.full((4,), n, np.float32), n) for n in range(10)]
    with fed_inbox(tmp_path, rows[:7], rows[7:]) as inbox:
        images, labels = DataFeed(inbox).next_numpy(10)
    assert images.dtype == np.float32
    np.testing.assert_array_equal(images[:, 0], range(10))
    np.testing.assert_array_equal(labels, range(10))


def test_rows_of_several_types_give_an_array_of_objects(tmp_path: Path) -> None:
    with fed_inbox(tmp_path, [1, 2], ["a"]) as inbox:
        array = DataFeed(inbox).next_numpy(3)
    assert array.dtype == object
    assert array.tolist() == [1, 2, "a"]


def test_an_input_mapping_gives_a_dict_of_arrays(tmp_path: Path) -> None:
    with fed_inbox(tmp_path, [(1, 2.5), (3, 4.5)]) as inbox:
        feed = DataFeed(inbox, input_mapping={"a": "x", "b": "y"})
        arrays, rest = feed.next_numpy(2), feed.next_numpy(2)
    assert {name: column.tolist() for name, column in arrays.items()} == {
        "x": [1, 3],
        "y": [2.5, 4.5],
    }
    assert [len(column) for column in rest.values()] == [0, 0]


ROWS: dict[str, tuple[list[Any], Any]] = {
    "floats": ([[0.5, 1.5]] * 5, tf.TensorSpec([None, 2], tf.float32)),
    "an int": ([7] * 5, tf.TensorSpec([None], tf.int64)),
    "images": ([np.ones((3, 2), np.uint8)] * 5, tf.TensorSpec([None, 3, 2], tf.uint8)),
    "bytes": ([b"abc"] * 5, tf.TensorSpec([None], tf.string)),
    "text": (["ä"] * 5, tf.TensorSpec([None], tf.string)),
    "image and label": (
        [(np.ones((2,), np.int16), 3)] * 5,
        (tf.TensorSpec([None, 2], tf.int16), tf.TensorSpec([None], tf.int64)),
    ),
    "dicts": (
        [{"x": 1.0, "y": [1, 2]}] * 5,
        {"x": tf.TensorSpec([None], tf.float32), "y": tf.TensorSpec([None, 2], tf.int64)},
    ),
    "nested": (
        [((1.0, 2), True)] * 5,
        (
            (tf.TensorSpec([None], tf.float32), tf.TensorSpec([None], tf.int64)),
            tf.TensorSpec([None], tf.bool),
        ),
    ),
    "numpy scalars": ([np.float64(2)] * 5, tf.TensorSpec([None], tf.float64)),
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_dataset_has_the_spec_and_values_of_its_rows(tmp_path: Path, kind: str) -> None:
    rows, spec = ROWS[kind]
    with fed_inbox(tmp_path, rows[:2], rows[2:]) as inbox:
        dataset = DataFeed(inbox).as_dataset(2)
        batches = list(dataset)
    assert dataset.element_spec == spec
    sizes = [int(tf.shape(tf.nest.flatten(batch)[0])[0]) for batch in batches]
    assert sizes == [2, 2, 1]
    first = tf.nest.flatten(tf.nest.map_structure(lambda tensor: tensor[0].numpy(), batches[0]))
    expected = tf.nest.flatten(rows[0]) if kind not in ("floats", "images") else [rows[0]]
    if kind == "dicts":
        expected = [1.0, [1, 2]]
    for value, row in zip(first, expected, strict=True):
        np.testing.assert_array_equal(value, row.encode() if isinstance(row, str) else row)


def test_each_of_many_rows_arrives_once_and_in_order(tmp_path: Path) -> None:
    with fed_inbox(tmp_path, range(100_000), range(100_000, 300_000)) as inbox:
        numbers = np.concatenate(list(DataFeed(inbox).as_dataset(999).as_numpy_iterator()))
    np.testing.assert_array_equal(numbers, np.arange(300_000))


def test_an_explicit_signature_sets_types(tmp_path: Path) -> None:
    spec = (tf.TensorSpec([], tf.float16), tf.TensorSpec([], tf.int32))
    with fed_inbox(tmp_path, [[1, 2], [3, 4]], [(5.0, 6)]) as inbox:
        batches = list(DataFeed(inbox).as_dataset(3, spec).as_numpy_iterator())
    assert batches[0][0].dtype == np.float16
    assert [part.tolist() for part in batches[0]] == [[1, 3, 5], [2, 4, 6]]


def test_batches_have_the_names_of_tensors_as_keys(tmp_path: Path) -> None:
    with fed_inbox(tmp_path, [(1.0, 2.0), (3.0, 4.0)]) as inbox:
        feed = DataFeed(inbox, input_mapping={"a": "x", "b": "y"})
        dataset = feed.as_dataset(5, drop_remainder=False)
        (batch,) = dataset.as_numpy_iterator()
    assert batch["x"].tolist() == [1, 3]
    assert batch["y"].tolist() == [2, 4]


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_dicts_are_read_by_the_names_of_the_input_mapping(tmp_path: Path, names: str) -> None:
    def rows() -> Any:
        first = {name: {"a": 1, "b": 2}[name] for name in names}
        return fed_inbox(tmp_path, [first], [{"b": 4, "a": 3, "c": 5}])

    mapping = {"b": "y", "a": "x"}
    with rows() as inbox:
        assert DataFeed(inbox, input_mapping=mapping).next_batch(2) == {"x": [1, 3], "y": [2, 4]}
    with rows() as inbox:
        batch = DataFeed(inbox, input_mapping=mapping).next_numpy(2)
        assert {name: array.tolist() for name, array in batch.items()} == {"x": [1, 3], "y": [2, 4]}
    with rows() as inbox:
        (batch,) = DataFeed(inbox, input_mapping=mapping).as_dataset(2).as_numpy_iterator()
        assert {name: array.tolist() for name, array in batch.items()} == {"x": [1, 3], "y": [2, 4]}


def test_columns_keep_their_order_for_a_signature_without_names(tmp_path: Path) -> None:
    spec = (tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int32))
    with fed_inbox(tmp_path, [{"a": 1, "b": 2}], [{"b": 4, "a": 3}]) as inbox:
        (batch,) = DataFeed(inbox).as_dataset(2, spec).as_numpy_iterator()
    assert [part.tolist() for part in batch] == [[1, 3], [2, 4]]
    with fed_inbox(tmp_path, [{"a": 1, "b": 2}], [{"b": 4, "c": 3}]) as inbox:
        dataset = DataFeed(inbox).as_dataset(2, spec)
        with pytest.raises(tf.errors.OpError, match="the rows from 1 are dicts of b, c"):
            list(dataset)


@pytest.mark.parametrize("method", ["next_batch", "next_numpy"])
def test_other_columns_are_not_taken_for_those_of_the_mapping(tmp_path: Path, method: str) -> None:
    with fed_inbox(tmp_path, [{"a": 1, "b": 2}], [{"b": 4, "c": 3}]) as inbox:
        feed = DataFeed(inbox, input_mapping={"p": "x", "q": "y"})
        read = getattr(feed, method)
        assert {name: list(part) for name, part in read(1).items()} == {"x": [1], "y": [2]}
        with pytest.raises(UsageError, match="row 1 has the columns b, c, and the first rows"):
            read(1)


def test_nested_columns_keep_their_order_for_a_signature_without_names(tmp_path: Path) -> None:
    number = tf.TensorSpec([], tf.int64)
    spec = (number, ((number, number), number))
    first, later = {"p": {"a": 1, "b": 2}, "q": 3}, {"q": 6, "p": {"b": 5, "a": 4}}
    with fed_inbox(tmp_path / "a", [(0, first)], [(0, later)]) as inbox:
        (batch,) = DataFeed(inbox).as_dataset(2, spec).as_numpy_iterator()
    assert [part.tolist() for part in tf.nest.flatten(batch)] == [[0, 0], [1, 4], [2, 5], [3, 6]]
    later = {"q": 6, "p": {"b": 5, "c": 4}}
    with fed_inbox(tmp_path / "b", [(0, first)], [(0, later)]) as inbox:
        dataset = DataFeed(inbox).as_dataset(2, spec)
        with pytest.raises(tf.errors.OpError, match=r"from 1, column 1\.0, are dicts of b, c"):
            list(dataset)


Point = collections.namedtuple("Point", "b a")
MAPPING = {"b": "y", "a": "x"}
READERS: dict[str, Any] = {
    "next_batch": lambda feed: feed.next_batch(9),
    "next_numpy": lambda feed: feed.next_numpy(9),
    "as_dataset": lambda feed: next(
        iter(feed.as_dataset(9, dict.fromkeys("xy", tf.TensorSpec([], tf.int64))))
    ),
}


@pytest.mark.parametrize("method", READERS)
@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([[(1, 2), (3,)]], "row 1: (3,) has 1 values, but the input_mapping has 2 columns (a, b)"),
        ([[(1, 2)], [(4, 5), (3,)]], "row 2: (3,) has 1 values"),
        ([[(1, 2)], [(3,)]], "1 values, but the input_mapping has 2 columns (a, b)"),
        ([[(1, 2, 3)]], "has 3 values, but the input_mapping has 2 columns"),
        ([[(1, "a", None)]], "has 3 values, but"),
        ([[(1, 2)], [[1, 2], (1, 2, 3)]], "row 2: (1, 2, 3) has 3 values"),
        ([[{"a": 1, "b": 2}], [{"b": 3}]], "row 1 has the columns b, and the first"),
        ([[Point(1, 2)], [(1,)]], "1 values, but the input_mapping has 2 columns (a, b)"),
        ([["ab"]], "row 0: 'ab' (str) is not a sequence of values"),
        ([[5]], "row 0: 5 (int) is not a sequence of values"),
        ([[None]], "row 0: None (NoneType) is not a sequence of values"),
    ],
)
def test_a_row_with_other_columns_than_the_mapping_is_named(
    tmp_path: Path, method: str, chunks: list[Any], message: str
) -> None:
    with fed_inbox(tmp_path, *chunks) as inbox:
        feed = DataFeed(inbox, input_mapping=MAPPING)
        with pytest.raises((UsageError, tf.errors.OpError), match=re.escape(message)):
            READERS[method](feed)


@pytest.mark.parametrize("method", READERS)
@pytest.mark.parametrize(
    "chunks", [[[Row(b=2, a=1), Row(b=4, a=3)]], [[Row(b=2, a=1)], [Row(a=3, b=4)]]]
)
def test_rows_are_read_by_the_names_of_the_input_mapping(
    tmp_path: Path, method: str, chunks: list[Any]
) -> None:
    with fed_inbox(tmp_path, *chunks) as inbox:
        batch = READERS[method](DataFeed(inbox, input_mapping=MAPPING))
    assert {name: np.asarray(part).tolist() for name, part in batch.items()} == {
        "x": [1, 3],
        "y": [2, 4],
    }


@pytest.mark.parametrize("method", ["next_batch", "next_numpy"])
def test_named_tuples_are_read_by_name_too(tmp_path: Path, method: str) -> None:
    with fed_inbox(tmp_path, [Point(2, 1)], [Point(4, 3)]) as inbox:
        batch = READERS[method](DataFeed(inbox, input_mapping=MAPPING))
    assert {name: list(part) for name, part in batch.items()} == {"x": [1, 3], "y": [2, 4]}


def test_two_columns_with_one_tensor_are_refused(tmp_path: Path) -> None:
    with (
        Inbox(tmp_path, SECRET) as inbox,
        pytest.raises(UsageError, match="invalid input_mapping: several columns have the tensor x"),
    ):
        DataFeed(inbox, input_mapping={"a": "x", "b": "x"})


def test_columns_of_several_types_become_arrays_of_objects(tmp_path: Path) -> None:
    with fed_inbox(tmp_path, [(1, 2)], [("a", 3), [None, 4]]) as inbox:
        batch = DataFeed(inbox, input_mapping=MAPPING).next_numpy(3)
    assert batch["x"].tolist() == [1, "a", None]
    assert batch["y"].tolist() == [2, 3, 4]


def test_a_date_does_not_become_a_datetime(tmp_path: Path) -> None:
    rows = [datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 3)]
    with fed_inbox(tmp_path, rows[:1], rows[1:]) as inbox:
        assert DataFeed(inbox).next_numpy(2).tolist() == rows


def test_columns_with_the_same_name_are_all_kept(tmp_path: Path) -> None:
    rows = [Row("a", "a")(n, 2.5) for n in range(2)]
    with fed_inbox(tmp_path / "a", rows) as inbox:
        assert [part.tolist() for part in DataFeed(inbox).next_numpy(2)] == [[0, 1], [2.5, 2.5]]
    with fed_inbox(tmp_path / "b", rows) as inbox:
        (batch,) = DataFeed(inbox).as_dataset(2).as_numpy_iterator()
        assert [part.tolist() for part in batch] == [[0, 1], [2.5, 2.5]]


def test_rows_that_cannot_be_tensors_are_refused(tmp_path: Path) -> None:
    for number, (row, second, message) in enumerate(
        [
            ([1.0], [1.0, 2.0], "several lengths"),
            (None, 1, "None"),
            (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2), "cannot become tensors"),
            (np.longdouble(1), np.longdouble(2), "longdouble|float128"),
            (np.ones(2, tf.bfloat16.as_numpy_dtype),) * 2 + ("array of bfloat16",),
            (np.array([None]), np.array([None]), "array of object"),
        ]
    ):
        with (
            fed_inbox(tmp_path / str(number), [row, second]) as inbox,
            pytest.raises(UsageError, match=message),
        ):
            DataFeed(inbox).as_dataset(2)


def test_a_row_that_does_not_fit_the_signature_is_an_error(tmp_path: Path) -> None:
    with fed_inbox(tmp_path, [1, 2], ["a"]) as inbox:
        dataset = DataFeed(inbox).as_dataset(2)
        with pytest.raises(tf.errors.OpError, match="row 2: 'a' \\(str\\) does not fit int64"):
            list(dataset)


#: First rows, later rows, and how the error names the value that the inferred type cannot hold.
CHANGED: dict[str, tuple[list[Any], list[Any], str]] = {
    "fraction": ([1, 2, 3], [2.5, 3.5], "row 3: 2.5 (float64) does not fit int64"),
    "NaN": ([1], [float("nan")], "row 1: nan (float64) does not fit int64"),
    "whole number": ([0.5], [1.0, 16777217.0], "row 2: 16777217.0 (float64) does not fit float32"),
    "int": ([0.5], [16777217], "row 1: 16777217 (int64) does not fit float32"),
    "large float": ([0.5], [1e300], "row 1: 1e+300 (float64) does not fit float32"),
    "large int": (
        [np.int8(1)],
        [np.int8(2), np.int64(300)],
        "row 2: 300 (int64) does not fit int8",
    ),
    "negative": ([np.uint64(1)], [-1], "row 1: -1 (int64) does not fit uint64"),
    "truth": ([True], [1, 2], "row 2: 2 (int64) does not fit bool"),
    "long int": ([np.float64(1)], [2**53 + 1], f"row 1: {2**53 + 1} (int64) does not fit float64"),
    "huge int": ([1], [2**70], f"row 1: {2**70} (int) does not fit int64"),
    "None": ([1], [2, None], "row 2: None (NoneType) does not fit int64"),
    "text": (["a"], ["b", 1], "row 2: 1 (int) does not fit string"),
    "column": ([{"x": 1, "y": 1}], [{"x": 1, "y": 0.5}], "row 1, column y: 0.5 (float64)"),
    "nested": ([(1, (2, 3.5))], [(1, (0.5, 2.0))], "row 1, column 1.0: 0.5 (float64)"),
    "list": ([[1, 2]], [[3, 4], [5, 6.5]], "row 2, column 1: 6.5 (float)"),
    "array": ([np.zeros((2, 2), "i4")], [np.eye(2) / 2], "row 1, column 0.0: 0.5 (float64)"),
    "date": ([1], [np.datetime64(1, "D")], "row 1: datetime.date(1970, 1, 2) (datetime64[D])"),
    "more columns": ([{"x": 1}], [{"x": 1, "y": 2}], "the rows from 1 are dicts of x, y"),
    "fewer columns": ([{"x": 1, "y": 2}], [{"x": 1}], "the rows from 1 are dicts of x"),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_a_value_that_the_type_of_the_first_rows_cannot_hold(tmp_path: Path, kind: str) -> None:
    first, later, message = CHANGED[kind]
    with fed_inbox(tmp_path, first, later) as inbox:
        dataset = DataFeed(inbox).as_dataset(len(first))
        with pytest.raises(tf.errors.OpError, match=re.escape(message)):
            list(dataset)


#: Chunks of a first batch, and the types that hold all of its rows.
WIDENED: dict[str, tuple[list[list[Any]], Any]] = {
    "fraction": ([[1, 2, 3], [2.5, 3.5, 4.25]], "float32"),
    "whole float": ([[1, 2], [3.0]], "float32"),
    "truth": ([[True], [2]], "int64"),
    "whole number": ([[0.5], [1.0, 16777217.0]], "float64"),
    "int": ([[0.5], [16777217]], "float64"),
    "large float": ([[0.5], [1e300]], "float64"),
    "complex": ([[1], [0.5], [2j]], "complex128"),
    "large int": ([[np.int8(1)], [np.int8(2), np.int64(300)]], "int64"),
    "negative": ([[np.uint64(1)], [-1]], "int64"),
    "small ints": ([[np.uint8(200)], [np.int8(-1)]], "int16"),
    "precision": ([[np.float32(1)], [np.float64(0.1)]], "float64"),
    "column": ([[{"x": 1, "y": 1}], [{"y": 0.5, "x": 2}]], {"x": "int64", "y": "float32"}),
    "Row": ([[Row(x=1, y=1)], [Row(x=1, y=0.5)]], {"x": "int64", "y": "float32"}),
    "nested": ([[(1, (2, 3.5))], [(1, (0.5, 2.0))]], ("int64", ("float32", "float32"))),
    "list": ([[[1, 2]], [[3.5, 4.5]]], "float32"),
    "part of a list": ([[[1, 2]], [[3, 4], [5, 6.5]]], ("int64", "float32")),
    "array": ([[np.zeros((2, 2), "i4")], [np.eye(2) / 2]], "float64"),
    "several chunks": ([[1], [2], [3], [4], [5], [6], [7], [8], [9], [0.5]], "float32"),
}


@pytest.mark.parametrize("kind", WIDENED)
def test_the_inferred_type_holds_all_rows_of_the_first_batch(tmp_path: Path, kind: str) -> None:
    chunks, types = WIDENED[kind]
    rows = list(itertools.chain.from_iterable(chunks))
    with fed_inbox(tmp_path, *chunks) as inbox:
        dataset = DataFeed(inbox).as_dataset(len(rows))
        (batch,) = dataset.as_numpy_iterator()
    assert tf.nest.map_structure(lambda spec: spec.dtype.name, dataset.element_spec) == types
    for number, row in enumerate(rows):
        values = row.asDict() if isinstance(row, Row) else row
        if isinstance(types, dict):
            assert {name: part[number] for name, part in batch.items()} == values
        elif isinstance(types, tuple):
            arrived = [part[number] for part in tf.nest.flatten(batch)]
            assert arrived == tf.nest.flatten(values)
        else:
            np.testing.assert_array_equal(batch[number], values)


@pytest.mark.parametrize("chunks", [[[(1, 2)], [(0.5, 3)]], [[Row(b=2, a=1)], [Row(a=0.5, b=3)]]])
def test_the_type_of_a_tensor_holds_the_first_batch(tmp_path: Path, chunks: list[Any]) -> None:
    with fed_inbox(tmp_path, *chunks) as inbox:
        (batch,) = DataFeed(inbox, input_mapping=MAPPING).as_dataset(2).as_numpy_iterator()
    assert {name: (part.dtype.name, part.tolist()) for name, part in batch.items()} == {
        "x": ("float32", [1.0, 0.5]),
        "y": ("int64", [2, 3]),
    }


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([[1], [2**70]], f"row 1: {2**70} (int) does not fit int64"),
        ([[1], [2, None]], "row 2: None (NoneType) does not fit int64"),
        ([[0.5], [2**53 + 1]], f"row 1: {2**53 + 1} (int64) does not fit float32"),
        ([["a"], ["b", 1]], "row 2: 1 (int) does not fit string"),
        ([[{"x": 1}], [{"x": 1, "y": 2}]], "the rows from 1 are dicts of x, y"),
        ([[{"x": np.ones(2)}], [{"x": np.ones(3)}]], "the rows from 1, column x, have the shape"),
    ],
)
def test_a_value_of_the_first_batch_that_no_type_can_hold(
    tmp_path: Path, chunks: list[Any], message: str
) -> None:
    with fed_inbox(tmp_path, *chunks) as inbox:
        dataset = DataFeed(inbox).as_dataset(9)
        with pytest.raises(tf.errors.OpError, match=re.escape(message)):
            list(dataset)


@pytest.mark.parametrize("kind", ["rdd", "frame"])
def test_a_slow_source_is_awaited_up_to_the_first_batch(tmp_path: Path, kind: str) -> None:
    """Each row is a chunk, and there are more chunks than a task may have in flight."""
    created = threading.Event()

    def rows() -> Iterator[Any]:
        for number in range(20):
            yield [number] if number < 19 else [0.5]
        assert created.wait(60)
        yield [0.25]

    with Inbox(tmp_path, SECRET) as inbox:
        address = InboxAddress("c", "worker", 0, os.uname().nodename, "0", 0, inbox.address, SECRET)

        def feed() -> None:
            if kind == "rdd":
                feed_chunks(map(pack, rows()), address, "input", 60.0)
            else:
                batches = (pa.record_batch([pa.array(row, pa.float64())], ["x"]) for row in rows())
                feed_batches(batches, address)
            inbox.end_of_feed()

        thread = threading.Thread(target=feed)
        thread.start()
        data_feed = DataFeed(inbox)
        dataset = data_feed.as_dataset(20)
        created.set()
        assert data_feed.rows_read == 0
        batches = list(dataset.as_numpy_iterator())
        thread.join(60)
    batches = [batch["x"] if kind == "frame" else batch for batch in batches]
    assert [batch.tolist() for batch in batches] == [[*range(19), 0.5], [0.25]]
    assert {batch.dtype.name for batch in batches} == {"float32" if kind == "rdd" else "float64"}


def test_collected_rows_are_read_by_other_methods(tmp_path: Path) -> None:
    with fed_inbox(tmp_path, [1], [2.5], [3], [4]) as inbox:
        feed = DataFeed(inbox)
        feed.as_dataset(3)
        assert feed.next_batch(2) == [1, 2.5]
        assert [batch.tolist() for batch in feed.as_dataset(9).as_numpy_iterator()] == [[3, 4]]
        assert feed.should_stop()
    with fed_inbox(tmp_path, [1], [2], range(10_000_000)) as inbox:
        feed = DataFeed(inbox)
        feed.as_dataset(3)
        feed.terminate()
        assert feed.next_batch(2) == []


def test_next_numpy_keeps_the_types_of_each_batch(tmp_path: Path) -> None:
    with fed_inbox(tmp_path, [1, 2, 3], [2.5, 3.5, 4.25]) as inbox:
        feed = DataFeed(inbox)
        first, second = feed.next_numpy(4), feed.next_numpy(4)
    assert list(map(repr, first.tolist())) == ["1", "2", "3", "2.5"]
    assert (second.dtype, second.tolist()) == (np.float64, [3.5, 4.25])


NUMBERS = st.one_of(
    st.integers(-(2**65), 2**65),
    st.integers(-3, 3),
    st.sampled_from([2**24 + 1, 2**53 + 1, 0.1, 2.5, 1e300, float("inf"), True]),
    st.floats(allow_nan=False),
    st.sampled_from([np.int8(-1), np.uint64(2**63), np.float32(0.5), np.float64(2**24 + 1), None]),
)


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.lists(NUMBERS, min_size=1, max_size=4), min_size=1, max_size=4))
def test_numbers_in_random_chunks_arrive_unchanged_or_raise(chunks: list[list[Any]]) -> None:
    with tempfile.TemporaryDirectory() as directory, fed_inbox(Path(directory), *chunks) as inbox:
        try:
            dataset = DataFeed(inbox).as_dataset(3)
            arrived = [number for batch in dataset.as_numpy_iterator() for number in batch]
        except (tf.errors.OpError, UsageError):
            return
    for number, sent in zip(arrived, itertools.chain.from_iterable(chunks), strict=True):
        # Fractions of Python are rounded to float32, as documented.
        rounded = type(sent) is float and number.dtype == np.float32 and abs(sent) < 2**24
        assert number.item() == (np.float32(sent) if rounded else sent)


def _in_any_order(parts: dict[str, Any]) -> st.SearchStrategy[Any]:
    pairs = st.tuples(*(st.tuples(st.just(name), part) for name, part in parts.items()))
    return pairs.flatmap(st.permutations).map(dict)


INNER = _in_any_order({"a": st.integers(-9, 9), "b": st.integers(-9, 9)})
#: Numbers in dicts within dicts, whose keys have any order, or another name.
NESTED = st.tuples(
    st.integers(-9, 9),
    _in_any_order({"p": INNER, "q": st.sampled_from([0.5, 1.0])})
    | st.sampled_from([{"p": {"a": 1, "c": 2}, "q": 0.5}, {"p": {"a": None, "b": 1}, "q": 1.0}]),
)


@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.lists(NESTED, min_size=1, max_size=2), min_size=1, max_size=4))
def test_nested_columns_in_random_chunks_arrive_unchanged_or_raise(chunks: list[Any]) -> None:
    number, ratio = tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float32)
    rows = list(itertools.chain.from_iterable(chunks))
    first = rows[0][1]
    named = {"p": {"a": number, "b": number}, "q": ratio}
    unnamed = tuple(ratio if name == "q" else (number, number) for name in first)
    for signature in (named, unnamed):
        with tempfile.TemporaryDirectory() as directory, fed_inbox(directory, *chunks) as inbox:
            try:
                dataset = DataFeed(inbox).as_dataset(len(rows), (number, signature))
                ((numbers, batch),) = dataset.as_numpy_iterator()
            except tf.errors.OpError as error:
                assert re.search(r"rows? (from )?\d+", str(error))  # noqa: PT017
                continue
        inner = ["a", "b"]
        if signature is unnamed:
            inner = list(first["p"])
            batch = dict(zip(first, batch, strict=True))
            batch["p"] = dict(zip(inner, batch["p"], strict=True))
        arrived = zip(numbers, *(batch["p"][name] for name in inner), batch["q"], strict=True)
        assert list(arrived) == [
            (number, *(row["p"][name] for name in inner), row["q"]) for number, row in rows
        ]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([1, 2.5, 3], tf.float32),
        ([1, 16777217, 0.5], tf.float64),
        ([16777217.0], tf.float64),
        ([1e300], tf.float64),
        ([0.1, float("nan"), float("inf")], tf.float32),
        ([True, 2], tf.int64),
        ([1, 2j], tf.complex128),
        ([np.float32(1), 2], tf.float64),
        ([[0.1, 1], [2, 0.5]], (tf.float32, tf.float32)),
    ],
)
def test_the_inferred_type_holds_all_first_rows(
    tmp_path: Path, rows: list[Any], expected: Any
) -> None:
    with fed_inbox(tmp_path, rows) as inbox:
        dataset = DataFeed(inbox).as_dataset(len(rows))
        (batch,) = dataset.as_numpy_iterator()
    assert tf.nest.map_structure(lambda spec: spec.dtype, dataset.element_spec) == expected
    columns = list(zip(*rows, strict=True)) if isinstance(expected, tuple) else rows
    np.testing.assert_allclose(batch, columns, rtol=6e-8)


@pytest.mark.parametrize("signature", [None, (tf.TensorSpec([], tf.string),) * 2])
@pytest.mark.parametrize("text", ["a\ud800", np.array("\ud800a")])
def test_text_with_a_lone_surrogate_is_named(tmp_path: Path, text: Any, signature: Any) -> None:
    valid = "äa" if isinstance(text, str) else np.array("äa")
    rows = [(valid, "b"), (valid, "c"), (text, "d")]
    with fed_inbox(tmp_path / "a", rows[:1], rows[1:]) as inbox:
        dataset = DataFeed(inbox).as_dataset(1, signature)
        with pytest.raises(
            tf.errors.OpError,
            match=r"row 2, column 0: '.*' \(str with a lone surrogate\) does not fit string",
        ):
            list(dataset)
    with fed_inbox(tmp_path / "b", rows) as inbox:
        assert [str(row[0]) for row in DataFeed(inbox).next_batch(3)] == ["äa", "äa", str(text)]


@pytest.mark.parametrize("mapping", [None, {"a": "x", "b": "y"}])
@pytest.mark.parametrize(
    ("first", "later", "error"),
    [
        (np.float16(1), np.float32(2049), "2049.0 (float32) does not fit float16"),
        (np.float16(1), np.float64(1e-8), "1e-08 (float64) does not fit float16"),
        (np.float16(1), 1e-8, "1e-08 (float64) does not fit float16"),
        (np.float16(1), 0.1, "0.1 (float64) does not fit float16"),
        (np.float16(1), 65520.0, "65520.0 (float64) does not fit float16"),
        (np.float16(1), 2049, "2049 (int64) does not fit float16"),
        (np.float16(1), 2049 + 0j, "(2049+0j) (complex128) does not fit float16"),
        (np.float16(1), 2048.0, None),
        (np.float16(1), float("inf"), None),
        (np.float16(1), float("nan"), None),
        (np.float16(1), 1e300, "1e+300 (float64) does not fit float16"),
        (np.float32(1), 2.0**24 + 1, "16777217.0 (float64) does not fit float32"),
        (np.float32(1), 1e-8, None),
        (np.float32(1), float("-inf"), None),
        (np.float64(1), np.float32(0.1), None),
    ],
)
def test_a_later_number_is_kept_in_an_inferred_type_of_floats(
    tmp_path: Path, mapping: Any, first: Any, later: Any, error: str | None
) -> None:
    parts: list[list[Any]] = [[first] * 8, [later]]
    if mapping:
        parts = [[(number, 7) for number in part] for part in parts]
    place = "row 8, column x: " if mapping else "row 8: "
    with fed_inbox(tmp_path / "a", *parts) as inbox:
        batches = DataFeed(inbox, input_mapping=mapping).as_dataset(4).as_numpy_iterator()
        delivered = [next(batches), next(batches)]
        if error is None:
            last = next(batches)
            (number,) = last["x"] if mapping else last
            assert number.dtype == first.dtype
            np.testing.assert_array_equal(number, np.float32(later))
        else:
            with pytest.raises(tf.errors.OpError, match=re.escape(place + error)):
                next(batches)
    assert len(delivered) == 2
    with fed_inbox(tmp_path / "b", *parts) as inbox:  # the first batch has the later number, too
        feed = DataFeed(inbox, input_mapping=mapping)
        (batch,) = feed.as_dataset(9).as_numpy_iterator()
    number = (batch["x"] if mapping else batch)[-1]
    assert error is None or number.dtype != first.dtype
    np.testing.assert_array_equal(number, np.asarray(later).astype(number.dtype))


@pytest.mark.parametrize(
    ("dtype", "row", "error"),
    [
        ("float16", 0.1, None),
        ("float32", 16777217, None),
        ("bfloat16", 0.1, None),
        ("float16", 1e-8, None),
        ("float16", float("inf"), None),
        ("bfloat16", float("nan"), None),
        ("float16", 65520.0, "65520.0 (float64) does not fit float16"),
        ("bfloat16", 3.38e38, None),
        ("bfloat16", 3.4e39, "3.4e+39 (float64) does not fit bfloat16"),
        ("float64", 2**53 + 1, None),
        ("complex64", 2.5, None),
        ("int32", 3.0, None),
        ("float32", 1e300, "1e+300 (float64) does not fit float32"),
        ("float16", 70_000, "70000 (int64) does not fit float16"),
        ("int64", 2.5, "2.5 (float64) does not fit int64, the type in output_signature"),
        ("uint8", 256, "256 (int64) does not fit uint8"),
        ("float32", 1j, "1j (complex128) does not fit float32"),
        ("int64", 2.0**63, "9.223372036854775808e+18"[:8]),
    ],
)
def test_numbers_are_cast_to_a_signature(
    tmp_path: Path, dtype: str, row: Any, error: str | None
) -> None:
    with fed_inbox(tmp_path, [row]) as inbox:
        dataset = DataFeed(inbox).as_dataset(1, tf.TensorSpec([], dtype))
        if error is None:
            (batch,) = dataset
            np.testing.assert_allclose(tf.cast(batch, tf.float64), [row], rtol=0.01, atol=1e-7)
        else:
            with pytest.raises(tf.errors.OpError, match=re.escape(error)):
                list(dataset)


def test_a_dataset_of_an_empty_feed(tmp_path: Path) -> None:
    with fed_inbox(tmp_path / "a") as inbox, pytest.raises(UsageError, match="no row arrived"):
        DataFeed(inbox).as_dataset(2)
    with fed_inbox(tmp_path / "b") as inbox:
        assert list(DataFeed(inbox).as_dataset(2, tf.TensorSpec([], tf.int64))) == []


def test_terminate_stops_a_dataset(tmp_path: Path) -> None:
    with fed_inbox(tmp_path, range(10_000_000)) as inbox:
        feed = DataFeed(inbox)
        for number, _ in enumerate(feed.as_dataset(10)):
            if number == 20:
                feed.terminate()
                break
        assert feed.should_stop()


def test_the_end_of_a_partition_ends_the_first_batch(tmp_path: Path) -> None:
    with Inbox(tmp_path, SECRET) as inbox:
        address = InboxAddress("c", "worker", 0, os.uname().nodename, "0", 0, inbox.address, SECRET)
        results: list[Any] = []

        def infer() -> None:
            chunks = iter([pack([1, 2]), pack([0.5])])
            for chunk in infer_chunks(chunks, address, "input", 60.0):
                results.extend(chunk.rows(0, chunk.count))
            with pytest.raises(NodeFailed):
                list(infer_partition([1e300], address))

        thread = threading.Thread(target=infer)
        thread.start()
        feed = DataFeed(inbox, train_mode=False)
        batches = iter(feed.as_dataset(9))
        feed.batch_results(next(batches).numpy())
        with pytest.raises(
            tf.errors.OpError, match=r"row 3: 1e\+300 \(float64\) does not fit float32"
        ):
            next(batches)
        inbox.fail({"what": "the dataset failed"})
        thread.join(60)
    assert results == [1, 2, 0.5]


def test_results_for_batches_of_a_dataset(tmp_path: Path) -> None:
    with Inbox(tmp_path, SECRET) as inbox:
        address = InboxAddress("c", "worker", 0, os.uname().nodename, "0", 0, inbox.address, SECRET)
        results: list[Any] = []
        sizes: list[int] = []

        def infer() -> None:
            for begin in (0, 100):
                results.extend(
                    infer_partition([float(n) for n in range(begin, begin + 5)], address)
                )
            inbox.end_of_feed()

        thread = threading.Thread(target=infer)
        thread.start()
        feed = DataFeed(inbox, train_mode=False)
        for batch in feed.as_dataset(3):
            sizes.append(len(batch))
            feed.batch_results((batch * 2).numpy())
        thread.join(60)
    assert sizes == [3, 2, 3, 2]
    assert results == [0, 2, 4, 6, 8, 200, 202, 204, 206, 208]
    assert all(isinstance(value, np.float32) for value in results)
