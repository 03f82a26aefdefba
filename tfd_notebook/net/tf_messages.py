"""The messages of TensorFlow's services that this package reads, without TensorFlow.

They are in a separate descriptor pool. They never clash with the types that TensorFlow registers
under the same names. Fields that this package does not read are omitted; protobuf keeps them as
unknown fields.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "tensorflow.data"

#: Message -> "[*]type name = number", as in the .proto files, with a star for a repeated field.
_SCHEMA: dict[str, tuple[str, ...]] = {
    # tensorflow/core/protobuf/worker.proto, tensorflow/core/framework/device_attributes.proto
    "DeviceAttributes": (
        "string name = 1",
        "string device_type = 2",
        "int64 memory_limit = 4",
        "fixed64 incarnation = 6",
        "string physical_device_desc = 7",
    ),
    "GetStatusResponse": ("*DeviceAttributes device_attributes = 1",),
    # tensorflow/core/data/service/{common,dispatcher,worker}.proto
    "Empty": (),
    "GetVersionResponse": ("int64 version = 1",),
    "GetDatasetDefRequest": ("string dataset_id = 1",),
    "DatasetDef": ("bytes graph = 1",),
    "GetDatasetDefResponse": ("DatasetDef dataset_def = 1",),
    "WorkerInfo": ("string address = 1",),
    "GetWorkersResponse": ("*WorkerInfo workers = 1",),
    "TaskInfo": ("string worker_address = 1", "int64 task_id = 2", "int64 iteration_id = 3"),
    "GetWorkerTasksResponse": ("*TaskInfo tasks = 1",),
    "TaskProgress": ("int64 task_id = 1", "bool completed = 2"),
    "WorkerUpdateRequest": ("string worker_address = 1", "*TaskProgress updates = 2"),
    "ProcessingModeDef": ("int32 sharding_policy = 1",),
    "TaskDef": (
        "int64 task_id = 4",
        "int64 iteration_id = 5",
        "int64 num_consumers = 7",
        "ProcessingModeDef processing_mode_def = 10",
    ),
    "WorkerHeartbeatRequest": ("string worker_address = 1",),
    "WorkerHeartbeatResponse": ("*TaskDef new_tasks = 1",),
    "ProcessTaskRequest": ("TaskDef task = 1",),
    # Repeated here, because a proto3 field has no presence and 0 is a valid index.
    "GetElementRequest": ("int64 task_id = 1", "*int64 consumer_index = 2"),
    "GetElementResponse": ("bool end_of_sequence = 2",),
    # tensorflow/core/data/service/journal.proto
    "DataServiceMetadata": ("int64 cardinality = 3",),
    "RegisterDatasetUpdate": ("string dataset_id = 1", "DataServiceMetadata metadata = 3"),
    "CreateIterationUpdate": (
        "int64 iteration_id = 1",
        "int64 job_id = 2",
        "int64 repetition = 3",
        "int64 num_split_providers = 4",
    ),
    "CreateTaskUpdate": (
        "int64 task_id = 1",
        "int64 iteration_id = 2",
        "string worker_address = 4",
    ),
    "FinishTaskUpdate": ("int64 task_id = 1",),
    "RegisterWorkerUpdate": ("string worker_address = 1",),
    "AcquireIterationClientUpdate": ("int64 iteration_id = 1", "int64 iteration_client_id = 2"),
    "ReleaseIterationClientUpdate": ("int64 iteration_client_id = 1", "int64 time_micros = 2"),
    "ProduceSplitUpdate": (
        "int64 iteration_id = 1",
        "int64 repetition = 2",
        "bool finished = 3",
        "int64 split_provider_index = 4",
    ),
    "CreatePendingTaskUpdate": (
        "int64 task_id = 1",
        "int64 iteration_id = 2",
        "string worker_address = 3",
    ),
    "RemoveTaskUpdate": ("int64 task_id = 1",),
    "GarbageCollectIterationUpdate": ("int64 iteration_id = 1",),
    "CreateJobUpdate": (
        "int64 job_id = 1",
        "string job_name = 2",
        "string dataset_id = 3",
        "ProcessingModeDef processing_mode_def = 4",
        "int64 num_consumers = 6",
        "bool use_cross_trainer_cache = 8",
    ),
    "Update": (
        "RegisterDatasetUpdate register_dataset = 1",
        "CreateIterationUpdate create_iteration = 2",
        "CreateTaskUpdate create_task = 3",
        "FinishTaskUpdate finish_task = 4",
        "RegisterWorkerUpdate register_worker = 5",
        "AcquireIterationClientUpdate acquire_iteration_client = 6",
        "ReleaseIterationClientUpdate release_iteration_client = 7",
        "ProduceSplitUpdate produce_split = 8",
        "CreatePendingTaskUpdate create_pending_task = 9",
        "RemoveTaskUpdate remove_task = 11",
        "GarbageCollectIterationUpdate garbage_collect_iteration = 12",
        "CreateJobUpdate create_job = 14",
    ),
}

#: Names of the values of ``ProcessingModeDef.sharding_policy``.
SHARDING_POLICIES = ("off", "dynamic", "file", "data", "file_or_data", "hint")


def _messages() -> dict[str, Any]:
    field_type = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="tfd_notebook/wire.proto", package=_PACKAGE, syntax="proto3"
    )
    for message, lines in _SCHEMA.items():
        descriptor = file.message_type.add(name=message)
        for line in lines:
            kind, name, _, number = line.split()
            field = descriptor.field.add(name=name, number=int(number))
            repeated, kind = kind.startswith("*"), kind.lstrip("*")
            field.label = field_type.LABEL_REPEATED if repeated else field_type.LABEL_OPTIONAL
            if kind in _SCHEMA:
                field.type = field_type.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{kind}"
            else:
                field.type = field_type.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        message: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{_PACKAGE}.{message}")
        )
        for message in _SCHEMA
    }


_built = _messages()


def __getattr__(name: str) -> Any:
    """Return the class of a message."""
    try:
        return _built[name]
    except KeyError:
        raise AttributeError(name) from None
