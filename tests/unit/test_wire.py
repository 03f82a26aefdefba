"""The messages, against bytes written by TensorFlow 2.21 itself."""

import pytest

from tfd_notebook import wire

RECORDS = [
    (b"\x2a\x11\x0a\x0flocalhost:12345", "register_worker", {"worker_address": "localhost:12345"}),
    (
        b"B\x05\x08\xd0\x0f\x10\x01",
        "produce_split",
        {"iteration_id": 2000, "repetition": 1, "finished": False},
    ),
    (b'"\x03\x08\xa0\x1f', "finish_task", {"task_id": 4000}),
]


@pytest.mark.parametrize(("record", "kind", "fields"), RECORDS, ids=[r[1] for r in RECORDS])
def test_journal_records(record: bytes, kind: str, fields: dict[str, object]) -> None:
    (described, update), *others = wire.Update.FromString(record).ListFields()
    assert described.name == kind
    assert not others
    assert {name: getattr(update, name) for name in fields} == fields


def test_unknown_fields_are_kept() -> None:
    record = b"\x7a\x03\x0a\x01x"  # field 15, which nobody here reads
    assert wire.Update.FromString(record).SerializeToString() == record


def test_a_pool_of_its_own() -> None:
    from google.protobuf import descriptor_pool

    with pytest.raises(KeyError):
        descriptor_pool.Default().FindFileByName("tfd_notebook/wire.proto")
