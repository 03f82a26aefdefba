"""Tables are read before a connection and created again after it, without a connection here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.ops import lookup_ops
from tensorflow.python.trackable import resource

from tfd_notebook._compat.tf_coordinator import tables, thread_parking
from tfd_notebook.errors import StateError

VERSION = f"TensorFlow {tf.__version__}"


def static() -> Any:
    keys, values = tf.constant(["a", "b"]), tf.constant([1, 2], tf.int64)
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), -1)


def filled(table: Any) -> Any:
    table.insert(tf.constant(["a", "b"]), tf.constant([1, 2], tf.int64))
    return table


def mutable(**options: Any) -> Any:
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1, **options)
    return filled(table)


def dense() -> Any:
    return filled(tf.lookup.experimental.DenseHashTable(tf.string, tf.int64, -1, "", "$"))


def delete(table: Any) -> None:
    """Delete the resource of a table, as a connection does."""
    tf.raw_ops.DestroyResourceOp(resource=table.resource_handle, ignore_lookup_error=False)


@pytest.mark.parametrize("make", [static, mutable, dense], ids=lambda make: str(make.__name__))
def test_deleted_table_has_its_content_again(make: Callable[[], Any]) -> None:
    table = make()
    look_up = tf.function(lambda: table.lookup(tf.constant(["a", "b", "c"])))
    assert look_up().numpy().tolist() == [1, 2, -1]
    with tables.kept(thread_parking.own_job()):
        delete(table)
        with pytest.raises(tf.errors.NotFoundError):
            look_up()
    assert look_up().numpy().tolist() == [1, 2, -1], VERSION


@pytest.mark.slow
def test_table_of_a_saved_model_has_its_content_again(tmp_path: Path) -> None:
    module = tf.Module()
    module.static, module.mutable = static(), mutable()
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    with tables.kept(thread_parking.own_job()):
        delete(loaded.static)
        delete(loaded.mutable)
    for table in (loaded.static, loaded.mutable):
        size = tf.raw_ops.LookupTableSizeV2(table_handle=table.resource_handle)
        assert int(size) == 2, VERSION


@pytest.mark.parametrize("make", [static, mutable, dense], ids=lambda make: str(make.__name__))
def test_table_that_still_exists_is_not_changed(make: Callable[[], Any]) -> None:
    """A connection can fail before it deletes a table."""
    table = make()
    with pytest.raises(StateError), tables.kept(thread_parking.own_job()):
        raise StateError("failed", fix="none")
    assert table.lookup(tf.constant(["a", "b", "c"])).numpy().tolist() == [1, 2, -1]
    assert int(table.size()) == 2


class Null(lookup_ops.TableInitializerBase):
    """Keras creates tables like this for layers without a vocabulary."""

    def initialize(self, table: Any) -> None:
        """Leave the table uninitialized."""


def test_tables_without_content_are_created_again() -> None:
    empty = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    uninitialized = tf.lookup.StaticHashTable(Null(tf.string, tf.int64), -1)
    with tables.kept(thread_parking.own_job()):
        delete(empty)
        delete(uninitialized)
    assert empty.lookup(tf.constant(["a"])).numpy().tolist() == [-1]
    assert int(uninitialized.size()) == 0


def test_tables_without_a_name_are_left_alone() -> None:
    unnamed, named = mutable(experimental_is_anonymous=True), mutable()
    owners = [content.owner for content in tables.read(thread_parking.own_job())]
    assert any(owner is named for owner in owners)
    assert not any(owner is unnamed for owner in owners)


def test_tables_of_another_job_are_left_alone() -> None:
    table = mutable()
    assert tables.read("ps") == []
    assert int(table.size()) == 2


class Renamed(resource.TrackableResource):
    """A table with a new name for each resource."""

    def _create_resource(self) -> Any:
        self.number = getattr(self, "number", 0) + 1
        return tf.raw_ops.MutableHashTableV2(
            key_dtype=tf.string, value_dtype=tf.int64, shared_name=f"{id(self)}-{self.number}"
        )


@pytest.mark.slow
def test_table_that_cannot_be_created_again_is_named() -> None:
    """TensorFlow cannot create it again under the name in its handle."""
    table = Renamed()
    assert table.resource_handle is not None
    with pytest.raises(StateError, match=r"'words', a Renamed of this process.*\s*Next: delete"):
        tables.read(thread_parking.own_job(), lambda owner: "words" * (owner is table))
