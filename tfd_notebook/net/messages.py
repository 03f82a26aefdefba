"""Schemas of the messages from other hosts. Each field has one check; others are rejected."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from typing import Any

from tfd_notebook.errors import UsageError
from tfd_notebook.model import spec
from tfd_notebook.model.events import (
    ClusterEnded,
    GpusMeasured,
    LeaseChanged,
    Notice,
    TaskChanged,
    TaskMeasured,
)
from tfd_notebook.model.snapshot import (
    SPARK_PHASES,
    AdaptationRow,
    CoordinatedRow,
    CoordinatorRow,
    NodeRow,
    RankRow,
    Snapshot,
    SparkRow,
    StreamRow,
    TaskRow,
)
from tfd_notebook.model.spec import MAX_TASKS_PER_ROLE, Policy, Role, TaskState
from tfd_notebook.net import shared_loopback
from tfd_notebook.net.validation import (
    Check,
    address,
    boolean,
    certificate,
    checks_of,
    cluster_name,
    either,
    file_path,
    from_json,
    integer,
    invalid,
    ip_address,
    journal_file,
    json_value,
    listing,
    mapping,
    matching,
    nothing,
    number,
    one_of,
    optional,
    output,
    pair,
    pid,
    port,
    record,
    record_with,
    short_text,
    signing_request,
    task_name,
    text,
    tunnel_name,
)

# Messages of agents

_memory = optional(integer())
_gpu = {"index": integer(0, 1023), "name": text, "memory": _memory}
#: An error that an agent raises. Its kind is a class of `tfd_notebook.errors`.
error = record({"code": text, "what": text}, task=optional(text), fix=optional(text))


def _event(kind: Any, **checks: Check) -> Check:
    """Return the check of an event: these checks, and the types of its other fields."""
    fields = {**checks_of(kind)[0], **checks}
    # The kernel sets the host and the time.
    optional_ = {"host": one_of("")} if fields.pop("host", None) else {}
    del fields["time"]
    return record({"event": one_of(kind.name), "cluster": cluster_name, **fields}, **optional_)


_gpu_use = record(
    {**_gpu, "task": either(one_of(""), task_name)}, used=_memory, use_percent=optional(number)
)
#: The events of an agent, by name.
EVENTS: dict[str, Check] = {
    "task": _event(
        TaskChanged,
        task=task_name,
        state=one_of(*map(str, TaskState)),
        address=either(one_of(""), address),
        pid=optional(pid),
        restarts=integer(0, 10**9),
        log=listing(text, 100),
    ),
    "measure": _event(TaskMeasured, task=task_name, bytes_sent=_memory),
    "gpus": _event(GpusMeasured, gpus=listing(_gpu_use, 1024)),
    "notice": _event(Notice, severity=one_of("info", "warning", "error"), task=optional(task_name)),
    "lease": _event(LeaseChanged),
    "ended": _event(ClusterEnded),
    "hello": record(
        {"event": one_of("hello"), "version": integer(), "full": boolean}, package=text, pid=pid
    ),
    "failed": record({"event": one_of("failed"), "reason": text}),
    "agent_detached": record({"event": one_of("agent_detached")}),
}

# The description of a detached cluster, which an agent stores for the next attach

_line = integer(0, 10**9)
_position = {"function": short_text, "file": short_text, "line": _line}
_frame = record({**_position, "users": boolean, "seconds": optional(number)})
_thread = record({"name": short_text, "pipeline": boolean, "frames": listing(_frame, 100)})
_stacks = record({"note": short_text, "threads": listing(_thread, 1000)})

_role = one_of(*(str(role) for role in Role))
_role_counts = mapping(_role, integer(0, MAX_TASKS_PER_ROLE))
_gpu_indices = listing(integer(0, 1023), 1024)
_launcher_name = matching(re.compile(r"[A-Za-z][\w.-]{0,63}", re.ASCII), "the name of a launcher")
_field_name = matching(re.compile(r"[a-z][a-z0-9_]{0,99}", re.ASCII), "the name of a field")
_server_fields = mapping(_field_name, either(boolean, number, listing(text), optional(text)), 100)


def _server_config(value: Any, path: str) -> dict[str, Any]:
    """Return the fields of a ``DispatcherConfig`` or ``WorkerConfig``."""
    config: dict[str, Any] = _server_fields(value, path)
    one_of(spec.PROTOCOL)(config.get("protocol"), f"{path}.protocol")
    return config


_config_fields = record(
    {
        "name": cluster_name,
        "launcher": _launcher_name,
        "counts": _role_counts,
        "policy": lambda value, path: vars(from_json(Policy, value, path)),
        "service": record(
            {
                "port": integer(0, 65535),
                "fault_tolerant": boolean,
                "work_dir": optional(text),
                "dispatcher_config": optional(_server_config),
                "worker_config": optional(_server_config),
                "worker_tags": listing(text),
                "cross_trainer_cache_size_bytes": optional(integer(1)),
                "snapshot_max_chunk_size_bytes": optional(integer(1)),
            }
        ),
        "env": mapping(text, one_of("")),
        "preload": listing(text),
        "allow": listing(text),
        "options": mapping(text, json_value),
        "gpus": either(
            one_of("auto"),
            _gpu_indices,
            mapping(one_of("worker", "evaluator"), integer(0, MAX_TASKS_PER_ROLE)),
        ),
    }
)


def _config(value: Any, path: str) -> dict[str, Any]:
    """Return a cluster's packed specification, which `spec.unpack` accepts."""
    try:
        config: dict[str, Any] = _config_fields(value, path)
        spec.unpack(config)
    except (UsageError, ValueError) as error:
        # A value out of its range, or a Python keyword as the name of a field.
        raise invalid(path, str(error), "the specification of a cluster") from None
    return config


_task_address = either(one_of(""), address)
_description = record(
    {
        "config": _config,
        "task_manager": record(
            {
                "counts": _role_counts,
                "gpu_allocation": record(
                    {
                        "each": integer(0, 1024),
                        "shares": listing(
                            record(
                                {
                                    "on": text,
                                    "workers": _gpu_indices,
                                    "evaluator": _gpu_indices,
                                    "left": _gpu_indices,
                                }
                            )
                        ),
                    }
                ),
                "static_addresses": listing(_task_address),
                "removed_addresses": listing(_task_address),
                "work_dir": optional(text),
            },
            addresses=mapping(task_name, address),
        ),
        "used": boolean,
    }
)


def description(value: Any, path: str) -> dict[str, Any]:
    """Return the description of a detached cluster; it is empty before the cluster is detached."""
    fields: dict[str, Any] = {} if value == {} else _description(value, path)
    return fields


_listed_fields = record(
    {
        "name": cluster_name,
        "lease": optional(number),
        "description": description,
        "tasks": listing(one_of(*(str(state) for state in TaskState))),
        "has_listeners": boolean,
    }
)


def _listed(value: Any, path: str) -> dict[str, Any]:
    """Return a cluster as an agent lists it."""
    summary: dict[str, Any] = _listed_fields(value, path)
    if summary["description"]:
        name = summary["description"]["config"]["name"]
        one_of(summary["name"])(name, f"{path}.description.config.name")
    return summary


#: The value of a reply of an agent, or of the ssh connection process, by the request's name. The
#: replies to all other requests have no value.
REPLIES: dict[str, Check] = {
    "adopt": record(
        {
            "description": description,
            "directory": file_path,
            "lease": optional(number),
            "tasks": listing(EVENTS["task"]),
            "time_limit_left": optional(number),
        }
    ),
    "certify_tunnels": record({"port": port}),
    "check_reachability": mapping(task_name, pair(text, either(one_of(""), ip_address))),
    "clusters": listing(_listed),
    "connect": listing(text, 3),
    "free_disk_space": integer(),
    "gpus": record(
        {"gpus": listing(record({**_gpu, "uuid": text}), 1024), "reason": text, "hidden": boolean}
    ),
    "inspect": mapping(task_name, record({"stale": listing(text), "ops": listing(text)})),
    "journal": mapping(journal_file, pair(integer(), output)),
    "journal_size": integer(),
    "kill": optional(pid),
    "lease": number,
    "listening_addresses": listing(either(one_of("0.0.0.0", "::"), ip_address), 1000),
    "logs": pair(output, integer()),
    "open": file_path,
    "open_ranks": mapping(task_name, address),
    "open_tunnels": either(
        record({"request": signing_request}),
        record({"port": port, "name": tunnel_name, "authority": certificate}),
    ),
    "preload": listing(text),
    "rank_output": pair(output, integer()),
    "read_nonce": either(one_of(""), shared_loopback.nonce),
    "reserve_ports": mapping(task_name, address),
    "serve_nonce": port,
    "stacks": mapping(task_name, _stacks),
    "run_rank": either(
        record({"result": json_value}),
        record({"lost": text}),
        record({"kind": text, "text": output, "traceback": output}),
    ),
}

#: The handshake of a host; see `tfd_notebook.agent.bridges.stdio`.
_handshake = record(
    {"package": optional(text), "python": text, "executable": text},
    tensorflow=optional(text),
    identity=text,
    connection=lambda value, path: _connection(value, path),
    token=text,
    cull_seconds=optional(number),
    import_error=text,
    error=record({"code": text, "what": text}, task=nothing, fix=optional(text)),
)


def handshake(message: Any) -> dict[str, Any]:
    """Return the handshake of a host, or raise InvalidMessage."""
    fields: dict[str, Any] = _handshake(message, "handshake")
    if "import_error" not in fields and "error" not in fields:
        for name in ("package", "tensorflow", "identity", "connection"):
            if name not in fields or (fields[name] is None and name != "tensorflow"):
                raise invalid(f"handshake.{name}", None, "a value")
    return fields


def _connection(value: Any, path: str) -> str:
    """Return the two ends of a connection in the format of sshd, or an empty string."""
    parts = text(value, path).split()
    if not parts:
        return ""
    if len(parts) != 4:
        raise invalid(path, value, "two addresses and ports")
    for name in parts[::2]:
        ip_address(name, path)
    for port_number in parts[1::2]:
        if not re.fullmatch(r"\d{1,5}", port_number, re.ASCII):
            raise invalid(path, value, "two addresses and ports")
    return " ".join(parts)


_kernel_message = record_with(
    {
        "header": record_with({"msg_type": text}),
        "parent_header": record_with({}),
        "content": record_with({}),
    }
)


def _encodable(value: Any, path: str) -> dict[str, Any]:
    """Return an object whose text can be printed and sent as UTF-8."""
    fields = record_with({})(value, path)
    try:
        valid = json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")
        cleaned: dict[str, Any] = json.loads(valid)
    except RecursionError:
        raise invalid(path, "...", "fewer levels") from None
    return cleaned


_display = record_with({"data": _encodable, "metadata": optional(_encodable)})
#: The contents of used messages of a Jupyter kernel, by the type of the message.
_KERNEL_CONTENTS: dict[str, Check] = {
    "stream": record_with({"name": one_of("stdout", "stderr"), "text": output}),
    "status": record_with({"execution_state": text}),
    "display_data": _display,
    "execute_result": _display,
    "update_display_data": _display,
    "error": record_with(
        {"ename": output, "evalue": output, "traceback": optional(listing(output))}
    ),
    "comm_open": record_with({"comm_id": text, "target_name": text}),
    "comm_msg": record_with({"comm_id": text, "data": record_with({})}),
    "comm_close": record_with({"comm_id": text}),
}


_kernel_id = matching(re.compile(r"[A-Za-z0-9_-]{1,100}", re.ASCII), "the id of a kernel")


def kernel_id(model: Any) -> str:
    """Return the id in a Jupyter server's description of a kernel, or raise InvalidMessage."""
    return str(_kernel_id(record_with({})(model, "kernel").get("id"), "kernel.id"))


def kernel_message(message: Any) -> dict[str, Any]:
    """Return a message of a Jupyter kernel, or raise InvalidMessage."""
    fields: dict[str, Any] = _kernel_message(message, "message")
    kind = fields["header"]["msg_type"]
    content = _KERNEL_CONTENTS.get(kind, record_with({}))(fields["content"], kind)
    return {**fields, "content": content}


def event(body: Any) -> dict[str, Any]:
    """Return an event of an agent, or raise InvalidMessage."""
    name = body.get("event")
    if not isinstance(name, str) or name not in EVENTS:
        raise invalid("event", name, "the name of an event")
    fields: dict[str, Any] = EVENTS[name](body, name)
    return fields


_sequence = {"seq": integer(), "full": boolean}
_BUS: dict[str, Check] = {
    "state": record_with({**_sequence, "state": record_with({})}),
    "values": record_with(
        {
            **_sequence,
            "cluster": cluster_name,
            "columns": listing(pair(text, text), 100),
            "functions": listing(text),
            "errors": mapping(text, text),
            "lost": listing(listing(number, 4)),
            "paused": boolean,
        }
    ),
    "reply": record_with({"error": optional(error)}),
}


def bus_message(message: Any) -> dict[str, Any]:
    """Return a message of the bus of another kernel, or raise InvalidMessage."""
    fields: dict[str, Any] = record_with({"kind": text})(message, "message")
    kind = fields["kind"]
    checked: dict[str, Any] = _BUS.get(kind, record_with({}))(fields, kind)
    return checked


#: The checks of results that this process uses. It only passes on those of other commands.
_RESULTS: dict[str, Check] = {
    "kill": optional(pid),
    "logs": record_with({"text": output}),
    "stacks": listing(
        record(
            {
                **dict.fromkeys(("task", "thread", "function", "file", "note"), short_text),
                **{"line": optional(_line), "seconds": optional(number)},
                "stack": listing(record({**_position, "seconds": optional(number)}), 100),
            }
        )
    ),
}


def result(command: str, value: Any) -> Any:
    """Return the result of a command in another kernel, or raise InvalidMessage."""
    check = _RESULTS.get(command)
    return value if check is None else check(value, command)


def clusters(tree: Any) -> dict[str, Any]:
    """Return the clusters of a bus's tree, by name, or raise InvalidMessage."""
    by_name: dict[str, Any] = mapping(cluster_name, record_with({}), 256)(tree, "clusters")
    return by_name


#: An object whose fields are checked later.
_members = record_with({})
_rows = mapping(text, _members)
_workers = mapping(matching(re.compile(r"\d{1,6}", re.ASCII), "an index"), _members)
#: Fields without a default that may be omitted because they are empty.
_OMITTED = frozenset({"kind", "launcher", "name", "severity", "state", "what"})


def snapshot(tree: Any, version: int) -> Snapshot:
    """Return the snapshot of a cluster of another kernel, or raise InvalidMessage."""
    tree = _members(tree, "cluster")
    coordinator, spark = tree.get("coordinator"), tree.get("spark")
    if coordinator is not None:
        workers = _workers(_members(coordinator, "coordinator").get("workers") or {}, "workers")
        rows = [_row(CoordinatedRow, workers[index]) for index in sorted(workers, key=int)]
        coordinator = _row(CoordinatorRow, coordinator, workers=rows)
    if spark is not None:
        nodes = _ordered_rows(NodeRow, _members(spark, "spark"), "nodes")
        spark = _row(SparkRow, spark, nodes=nodes)
        one_of(*SPARK_PHASES)(spark.get("phase"), "spark.phase")
    adaptation = tree.get("adaptation")
    if adaptation is not None:
        adaptation = _row(AdaptationRow, _members(adaptation, "adaptation"))
    streams = _rows(tree.get("streams") or {}, "streams").values()
    ranks = _rows(tree.get("ranks") or {}, "ranks").values()
    notices = listing(_members)(tree.get("notices") or [], "notices")
    values = _row(
        Snapshot,
        tree,
        version=version,
        time=time.time(),
        tasks=_ordered_rows(TaskRow, tree, "tasks"),
        streams=[_row(StreamRow, stream) for stream in streams],
        ranks=[_row(RankRow, rank) for rank in ranks],
        gpus=[],
        events=[],
        coordinator=coordinator,
        spark=spark,
        adaptation=adaptation,
    )
    events = tuple(from_json(Notice, _row(Notice, notice), "notice") for notice in notices)
    return replace(from_json(Snapshot, values, "cluster"), events=events)


def _row(kind: Any, values: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Return the values of a dataclass's fields, without nulls and fields of later versions."""
    checks, needed = checks_of(kind)
    known = {name: value for name, value in values.items() if name in checks and value is not None}
    return {**dict.fromkeys(_OMITTED & needed, ""), **known, **others}


def _ordered_rows(kind: Any, tree: dict[str, Any], name: str) -> list[dict[str, Any]]:
    rows = _rows(tree.get(name) or {}, name)
    order = listing(text)(tree.get("order") or [], "order")
    return [_row(kind, rows[key]) for key in order if key in rows]


def reply_value(request: str, value: Any) -> Any:
    """Return the value of a reply to a request, or raise InvalidMessage."""
    check: Check = REPLIES.get(request, nothing)
    return check(value, f"reply to {request!r}")
