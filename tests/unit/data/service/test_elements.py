"""The compression of elements by their types, within a host and between hosts."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tfd_notebook.data.service.elements import Transfer, check_compression, transfer_of
from tfd_notebook.errors import NotSerializable, UnknownName, UsageError

TENSOR = tf.TensorSpec((), tf.int64)
RAGGED = tf.RaggedTensorSpec((2, None), tf.int64)
ROW = tf.RaggedTensorSpec((None,), tf.int64, ragged_rank=0)
DATASET = tf.data.DatasetSpec(TENSOR)
NOTHING = tf.data.Dataset.from_tensors((1, None)).element_spec[1]

#: Types that TensorFlow can only send compressed.
SINGLE = [
    RAGGED,
    (RAGGED,),
    {"a": (RAGGED, NOTHING)},
    tf.OptionalSpec(TENSOR),
    tf.TensorArraySpec((), tf.int64),
    tf.TensorSpec((), tf.variant),
    tf.TensorSpec(None, tf.variant),
]
#: Types that TensorFlow can also send without compression.
PLAIN = [
    TENSOR,
    (RAGGED, TENSOR),
    (tf.OptionalSpec(TENSOR), tf.TensorArraySpec((), tf.int64)),
    tf.SparseTensorSpec((2, 2), tf.int64),
    tf.TensorSpec((None,), tf.variant),
]


@pytest.mark.parametrize("spec", SINGLE, ids=str)
def test_a_single_variant_is_compressed_for_grpc(spec: Any) -> None:
    for host in (True, False):
        transfer = transfer_of("auto", spec, on_this_host=host, by_reference=False)
        assert transfer == Transfer("AUTO", optional=False)
        assert not transfer.compressed_by_choice
    assert transfer_of("snappy", spec, True, by_reference=False).compression == "SNAPPY"
    with pytest.raises(UsageError, match=r"(?s)compression=None: .*Spec\(.*omit compression"):
        transfer_of(None, spec, True, by_reference=False)
    for compression in ("auto", None):
        assert transfer_of(compression, spec, True, by_reference=True) == Transfer(None, True)


@pytest.mark.parametrize("spec", PLAIN, ids=str)
def test_other_types_are_compressed_between_hosts(spec: Any) -> None:
    assert transfer_of("auto", spec, True, by_reference=False) == Transfer(None, True)
    assert transfer_of("auto", spec, False, by_reference=False) == Transfer("AUTO", True)
    assert transfer_of("AUTO", spec, True, by_reference=False).compressed_by_choice
    assert transfer_of(None, spec, False, by_reference=False) == Transfer(None, True)


def test_rows_are_never_compressed() -> None:
    for spec, by_reference in (((ROW, TENSOR), False), (ROW, True)):
        assert transfer_of("auto", spec, False, by_reference).compression is None
        with pytest.raises(UsageError, match=r"(?s)'AUTO'.* RaggedTensorSpec\(.*omit compression"):
            transfer_of("AUTO", spec, False, by_reference)
    for compression in ("auto", None):
        with pytest.raises(NotSerializable, match=r"map\(lambda row: row\)"):
            transfer_of(compression, ROW, True, by_reference=False)


@pytest.mark.parametrize("spec", [DATASET, (DATASET, TENSOR), tf.OptionalSpec(DATASET)], ids=str)
def test_datasets_stay_in_the_process(spec: Any) -> None:
    assert transfer_of("auto", spec, True, by_reference=True).compression is None
    with pytest.raises(UsageError, match=r"(?s)'AUTO'.* DatasetSpec\(.*omit compression"):
        transfer_of("AUTO", spec, True, by_reference=True)
    with pytest.raises(NotSerializable, match="elements are datasets"):
        transfer_of("auto", spec, True, by_reference=False)


def test_compression_has_a_valid_name() -> None:
    with pytest.raises(UnknownName, match="zip"):
        check_compression("zip")
