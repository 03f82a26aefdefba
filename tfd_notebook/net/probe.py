"""Probes of an address by plain gRPC, without TensorFlow: kind of server and state."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import grpc
from google.protobuf.message import DecodeError

from tfd_notebook.errors import DataError, DispatcherLost, TimeLimit
from tfd_notebook.model.spec import Endpoint
from tfd_notebook.net import tf_messages

State = Literal["alive", "hung", "refused", "unreachable", "foreign"]
Kind = Literal["dispatcher", "data_worker", "server", "grpc"]

_STATUS = "/tensorflow.WorkerService/GetStatus"
_VERSION = "/tensorflow.data.DispatcherService/GetVersion"
_WORKERS = "/tensorflow.data.DispatcherService/GetWorkers"
_DATASET = "/tensorflow.data.DispatcherService/GetDatasetDef"
_UPDATE = "/tensorflow.data.DispatcherService/WorkerUpdate"
_HEARTBEAT = "/tensorflow.data.DispatcherService/WorkerHeartbeat"
_TASKS = "/tensorflow.data.WorkerService/GetWorkerTasks"

_METHODS: dict[Kind, str] = {
    "server": _STATUS,
    "dispatcher": _VERSION,
    "data_worker": _TASKS,
}

_FOREIGN = ("parsing HTTP/2", "http1.x", "Socket closed", "Connection reset")
#: Limit of a reply, in bytes: about 50,000 addresses of workers or tasks.
_MAX_REPLY_BYTES = 4 << 20
#: Limit of the reply to a heartbeat. A dispatcher without a journal adds the graphs of datasets.
_MAX_HEARTBEAT_BYTES = 2**31 - 1
#: Limit of the graph of a dataset, in bytes.
_MAX_GRAPH_BYTES = 64_000_000
#: The error of a call over a channel that another thread closes (CANCELLED or ValueError).
_CLOSED = "the prober was closed in the meantime"


@dataclass(frozen=True)
class Device:
    """A device of a tf.distribute server; ``memory_bytes`` is TensorFlow's own limit."""

    name: str
    type: str
    memory_bytes: int
    incarnation: int
    description: str


@dataclass(frozen=True)
class WorkerTask:
    """A task of the tf.data service: the work of one data worker for one iteration."""

    task_id: int
    iteration_id: int


@dataclass(frozen=True)
class Probe:
    """The result of probing one address.

    Parameters
    ----------
    address : str
        ``"host:port"``.
    state : {"alive", "hung", "refused", "unreachable", "foreign"}
        ``alive``: a TensorFlow server replied. ``hung``: it accepts connections, but does not reply
        in time. ``refused``: no process listens. ``unreachable``: no connection is possible.
        ``foreign``: it is not a TensorFlow server.
    kind : {"dispatcher", "data_worker", "server", "grpc"}, optional
        ``server`` is a tf.distribute server (ps, worker, chief), ``grpc`` another gRPC server.
    latency_ms : float
        Milliseconds from the first request to the result.
    reason : str
        The reason if it is not alive; empty otherwise.
    version : int, optional
        The dispatcher's protocol version.
    devices : tuple of Device
        The devices of a tf.distribute server. Their names contain its job and task.
    tasks : tuple of WorkerTask
        The current tasks of a data worker.
    """

    address: str
    state: State
    kind: Kind | None = None
    latency_ms: float = 0.0
    reason: str = ""
    version: int | None = None
    devices: tuple[Device, ...] = ()
    tasks: tuple[WorkerTask, ...] = ()

    @property
    def alive(self) -> bool:
        """True if a TensorFlow server replied."""
        return self.state == "alive"

    @property
    def task(self) -> str | None:
        """The task name that a tf.distribute server reports, such as ``"worker:0"``."""
        for device in self.devices:
            parts = dict(part.split(":", 1) for part in device.name.split("/") if ":" in part)
            if "job" in parts and "task" in parts:
                return f"{parts['job']}:{parts['task']}"
        return None


class Prober:
    """Probes the same addresses repeatedly, over connections that it keeps open.

    It is thread-safe. It reconnects to an address that did not answer, so that it detects a
    restarted task at once.

    Parameters
    ----------
    via_proxy : bool
        True to use ``http_proxy`` and ``https_proxy``, as TensorFlow does. Default false.
    """

    def __init__(self, via_proxy: bool = False) -> None:
        self._via_proxy = via_proxy
        self._channels: dict[str, Any] = {}

    def probe(self, address: str, timeout: float = 1.0, expect: Kind | None = None) -> Probe:
        """Probe `address`.

        Parameters
        ----------
        address : str
            ``"host:port"`` or ``"grpc://host:port"``.
        timeout : float
            Seconds for the whole probe. Default 1.
        expect : str, optional
            The expected kind. It is tried first, so that one call suffices.
        """
        address = str(Endpoint.parse(address))
        start = time.monotonic()
        reused = address in self._channels
        result = self._probe_once(address, start, timeout, expect)
        if reused and result.state in ("refused", "unreachable", "foreign"):
            result = self._probe_once(address, start, timeout, expect)
        return result

    def close(self) -> None:
        """Close all connections; the next `probe` opens new ones."""
        while self._channels:
            self._channels.popitem()[1].close()

    def __enter__(self) -> Prober:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _probe_once(self, address: str, start: float, timeout: float, expect: Kind | None) -> Probe:
        channel: Any = self._channels.get(address)
        is_new = channel is None
        if is_new:
            channel = self._channels.setdefault(address, _channel(address, self._via_proxy))
        # If a new connection hangs, a plain TCP connection is tried, too, within the timeout.
        reserve = min(0.1, timeout / 5) if is_new else 0.0
        limit = start + timeout - reserve

        def result(state: State, reason: str = "", **more: Any) -> Probe:
            if state not in ("alive", "hung"):
                if self._channels.get(address) is channel:
                    self._channels.pop(address, None)
                channel.close()
            milliseconds = (time.monotonic() - start) * 1000
            return Probe(address, state, latency_ms=milliseconds, reason=reason, **more)

        for kind in sorted(_METHODS, key=lambda kind: kind != expect):
            try:
                reply = _call(channel, _METHODS[kind], limit - time.monotonic())
            except ValueError:
                return result("unreachable", _CLOSED)
            except grpc.RpcError as error:
                code, text = error.code(), error.details() or ""
                if code is grpc.StatusCode.CANCELLED:
                    return result("unreachable", _CLOSED)
                if code is grpc.StatusCode.UNIMPLEMENTED:
                    if "http2 header" in text:
                        return result("foreign", f"an HTTP server or proxy answers: {text}")
                    continue
                if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    if is_new and not _connects(address, max(reserve, 0.02)):
                        return result("unreachable", f"no connection within {timeout:.3g} s")
                    return result("hung", f"accepts connections, no answer within {timeout:.3g} s")
                if code is grpc.StatusCode.UNAVAILABLE:
                    return result(*_unavailable(text))
                return result("foreign", text or str(code), kind="grpc")
            try:
                details = _details(kind, reply)
            except DecodeError:
                return result("foreign", f"its reply is not that of a {kind}", kind="grpc")
            return result("alive", kind=kind, **details)
        return result("foreign", "a gRPC server that is not TensorFlow's", kind="grpc")


def probe(
    address: str,
    timeout: float = 1.0,
    via_proxy: bool = False,
    expect: Kind | None = None,
) -> Probe:
    """Probe `address` once; see `Prober` and `Prober.probe`."""
    with Prober(via_proxy) as prober:
        return prober.probe(address, timeout, expect)


def probe_many(
    addresses: Iterable[str], timeout: float = 1.0, parallel: int = 32
) -> tuple[Probe, ...]:
    """Probe all `addresses`, at most `parallel` at a time; return the results in the same order."""
    all_addresses = tuple(addresses)
    if not all_addresses:
        return ()
    with ThreadPoolExecutor(min(parallel, len(all_addresses)), "tfd-probe") as pool:
        return tuple(pool.map(lambda address: probe(address, timeout), all_addresses))


def dispatcher_workers(address: str, timeout: float = 1.0) -> tuple[str, ...]:
    """Return the addresses of all workers that a dispatcher ever registered, even failed ones.

    Raises
    ------
    DispatcherLost
        No dispatcher answers at `address`.
    TimeLimit
        No reply within `timeout` seconds.
    """
    request = tf_messages.Empty()
    reply = _request(address, _WORKERS, request, tf_messages.GetWorkersResponse, timeout)
    return tuple(worker.address for worker in reply.workers)


def assigned_tasks(dispatcher: str, worker_address: str, timeout: float = 1.0) -> tuple[int, ...]:
    """Return the ids of the unfinished tasks that a dispatcher has assigned to a dead worker.

    Tasks of coordinated reads are omitted, because the consumers remove those.

    The request is the heartbeat of a worker that processes no task, and changes the dispatcher:

    * It registers a worker that `dispatcher_workers` does not list.
    * It adds a pending task for each unfinished coordinated read without a task on the worker. Its
      consumers block for a round, and then call the worker's address.

    Raises
    ------
    DispatcherLost
        No dispatcher answers at `dispatcher`.
    TimeLimit
        No reply within `timeout` seconds.
    """
    request = tf_messages.WorkerHeartbeatRequest(worker_address=worker_address)
    response = tf_messages.WorkerHeartbeatResponse
    reply = _request(dispatcher, _HEARTBEAT, request, response, timeout, most=_MAX_HEARTBEAT_BYTES)
    return tuple(task.task_id for task in reply.new_tasks if not task.num_consumers)


def dataset_graph(dispatcher: str, dataset_id: str, timeout: float = 10.0) -> bytes:
    """Return the serialized ``GraphDef`` of a registered dataset. Empty for an unknown id.

    Raises
    ------
    DispatcherLost
        No dispatcher answers at `dispatcher`, or the graph has more than 64 MB.
    TimeLimit
        No reply within `timeout` seconds.
    """
    request = tf_messages.GetDatasetDefRequest(dataset_id=dataset_id)
    response = tf_messages.GetDatasetDefResponse
    reply = _request(dispatcher, _DATASET, request, response, timeout, True, _MAX_GRAPH_BYTES)
    return bytes(reply.dataset_def.graph)


def complete_tasks(
    dispatcher: str, worker_address: str, task_ids: Iterable[int], timeout: float = 1.0
) -> None:
    """Report tasks of a failed worker to the dispatcher as complete.

    Tasks that the dispatcher no longer has count as complete. Consumers that wait for the tasks
    then end as if they had received all data. The caller must report the missing data.

    Parameters
    ----------
    dispatcher : str
        Address as ``"host:port"``.
    worker_address : str
        The worker's address as registered with the dispatcher.
    task_ids : iterable of int
    timeout : float
        Seconds. Default 1.

    Raises
    ------
    DispatcherLost
        No dispatcher answers at `dispatcher`.
    TimeLimit
        No reply within `timeout` seconds.
    """
    limit = time.monotonic() + timeout
    # The dispatcher stops at the first unknown task, so send one request for each.
    for task_id in task_ids:
        request = tf_messages.WorkerUpdateRequest(worker_address=worker_address)
        request.updates.add(task_id=task_id, completed=True)
        left = limit - time.monotonic()
        _request(dispatcher, _UPDATE, request, tf_messages.Empty, left, unknown_ok=True)


def _channel(address: str, via_proxy: bool = False, most: int = _MAX_REPLY_BYTES) -> Any:
    options = (
        ("grpc.enable_http_proxy", int(via_proxy)),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", most),
        # gRPC applies the limit before it decompresses. Compressed replies are parsed as they are.
        ("grpc.per_message_decompression", 0),
    )
    return grpc.insecure_channel(address, options)


def _call(channel: Any, method: str, timeout: float, request: bytes = b"") -> bytes:
    reply: bytes = channel.unary_unary(method)(request, timeout=max(timeout, 0.001))
    return reply


def _request(
    address: str,
    method: str,
    request: Any,
    response: Any,
    timeout: float,
    unknown_ok: bool = False,
    most: int = _MAX_REPLY_BYTES,
) -> Any:
    """Return the dispatcher's reply as a `response`."""
    address = str(Endpoint.parse(address))
    with _channel(address, most=most) as channel:
        try:
            reply = _call(channel, method, timeout, request.SerializeToString())
            return response.FromString(reply)
        except DecodeError:
            raise _no_dispatcher(address, "another server answers") from None
        except grpc.RpcError as error:
            code, text = error.code(), error.details() or ""
    if code is grpc.StatusCode.NOT_FOUND and unknown_ok:
        return response()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        raise TimeLimit(
            f"the dispatcher at {address} did not reply within {timeout:g} s",
            fix="it may be hung or unreachable: check its state and log",
        )
    if code is grpc.StatusCode.UNAVAILABLE:
        raise _no_dispatcher(address, _last_error(text))
    # Without such a method, or with a reply above the limit.
    if code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED):
        raise _no_dispatcher(address, "another server answers")
    raise DataError(f"the dispatcher at {address} returned {code.name}: {text}")


def _no_dispatcher(address: str, cause: str) -> DispatcherLost:
    return DispatcherLost(
        f"no dispatcher answers at {address}: {cause}", fix="check its state and log"
    )


def _unavailable(text: str) -> tuple[State, str]:
    if any(sign in text for sign in _FOREIGN):
        return "foreign", f"the server does not use gRPC: {_last_error(text)}"
    if "Connection refused" in text:
        return "refused", "connection refused: nothing listens there"
    if "lookup failed" in text:
        why = text.rpartition(": ")[2].rstrip("]")
        return "unreachable", f"the address of the host is unknown: {why}"
    return "unreachable", _last_error(text)


def _last_error(text: str) -> str:
    return text.rpartition("last error: ")[2]


def _connects(address: str, timeout: float) -> bool:
    endpoint = Endpoint.parse(address)
    try:
        socket.create_connection((endpoint.host, endpoint.port), timeout).close()
    except OSError:
        return False
    return True


def _details(kind: Kind, reply: bytes) -> dict[str, Any]:
    if kind == "dispatcher":
        return {"version": tf_messages.GetVersionResponse.FromString(reply).version}
    if kind == "server":
        attributes = tf_messages.GetStatusResponse.FromString(reply).device_attributes
        return {
            "devices": tuple(
                Device(d.name, d.device_type, d.memory_limit, d.incarnation, d.physical_device_desc)
                for d in attributes
            )
        }
    tasks = tf_messages.GetWorkerTasksResponse.FromString(reply).tasks
    return {"tasks": tuple(WorkerTask(task.task_id, task.iteration_id) for task in tasks)}
