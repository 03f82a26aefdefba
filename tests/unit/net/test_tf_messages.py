"""Messages from records that a dispatcher of TensorFlow 2.21 has written."""

import pytest
from google.protobuf import descriptor_pool

from tfd_notebook.net import tf_messages

RECORDS = [
    (
        b"*5\n\x0flocalhost:45241 \xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"
        b"*\x17\n\x04grpc\x12\x0flocalhost:45241",
        "register_worker",
        {"worker_address": "localhost:45241"},
    ),
    (
        b"\n$\n\x041000\x1a\x1c\n\x14\x8a\x02\x11\x12\r\x12\x0b\x08\xff\xff\xff\xff\xff\xff\xff\xff"
        b"\xff\x01\x18\t\x10\x02\x18\xa0\x9c\x01",
        "register_dataset",
        {"dataset_id": "1000"},
    ),
    (
        b"r\x14\x08\x88'\x12\x03abc\x1a\x041000\"\x02\x08\x018\x01",
        "create_job",
        {"job_id": 5000, "job_name": "abc", "dataset_id": "1000", "num_consumers": 0},
    ),
    (
        b"\x12\n\x08\xd0\x0f\x10\x88'\x18\x01 \x01",
        "create_iteration",
        {"iteration_id": 2000, "job_id": 5000, "repetition": 1, "num_split_providers": 1},
    ),
    (
        b'\x1a;\x08\xa0\x1f\x10\xd0\x0f"\x0flocalhost:45241@\xff\xff\xff\xff\xff\xff\xff\xff\xff'
        b"\x01J\x17\n\x04grpc\x12\x0flocalhost:45241",
        "create_task",
        {"task_id": 4000, "iteration_id": 2000, "worker_address": "localhost:45241"},
    ),
    (
        b"2\x06\x08\xd0\x0f\x10\xb8\x17",
        "acquire_iteration_client",
        {"iteration_id": 2000, "iteration_client_id": 3000},
    ),
    (b"B\x03\x08\xd0\x0f", "produce_split", {"iteration_id": 2000, "finished": False}),
    (b'"\x03\x08\xa1\x1f', "finish_task", {"task_id": 4001}),
    (
        b":\x0c\x08\xb8\x17\x10\xa5\xb9\x91\xf5\x94\x98\x98\x03",
        "release_iteration_client",
        {"iteration_client_id": 3000},
    ),
]


@pytest.mark.parametrize(("record", "kind", "fields"), RECORDS, ids=[r[1] for r in RECORDS])
def test_journal_records_are_parsed(record: bytes, kind: str, fields: dict[str, object]) -> None:
    [(described, update)] = tf_messages.Update.FromString(record).ListFields()
    assert described.name == kind
    assert {name: getattr(update, name) for name in fields} == fields


def test_data_job_has_its_mode() -> None:
    job = tf_messages.Update.FromString(RECORDS[2][0]).create_job
    assert tf_messages.SHARDING_POLICIES[job.processing_mode_def.sharding_policy] == "dynamic"


def test_unknown_fields_are_kept() -> None:
    record = b"\x82\x01\x06\n\x041000"  # field 16, which the parser ignores
    update = tf_messages.Update.FromString(record)
    assert not update.ListFields()
    assert update.SerializeToString() == record


def test_messages_use_a_separate_pool() -> None:
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindFileByName("tfd_notebook/wire.proto")
