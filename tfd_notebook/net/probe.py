"""Who is at this address, and is it alive: asked by plain gRPC, without TensorFlow."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import grpc
from google.protobuf.message import DecodeError

from tfd_notebook.errors import DataError, DispatcherLost, NoWorkers, TfdError, TimeLimit
from tfd_notebook.model.spec import Endpoint
from tfd_notebook.net import tf_messages

State = Literal["alive", "hung", "refused", "unreachable", "foreign"]
Kind = Literal["dispatcher", "data_worker", "server", "grpc"]

_STATUS = "/tensorflow.WorkerService/GetStatus"
_VERSION = "/tensorflow.data.DispatcherService/GetVersion"
_WORKERS = "/tensorflow.data.DispatcherService/GetWorkers"
_UPDATE = "/tensorflow.data.DispatcherService/WorkerUpdate"
_TASKS = "/tensorflow.data.WorkerService/GetWorkerTasks"

_QUESTIONS: dict[Kind, str] = {
    "server": _STATUS,
    "dispatcher": _VERSION,
    "data_worker": _TASKS,
}

_FOREIGN = ("parsing HTTP/2", "http1.x", "Socket closed", "Connection reset")
#: What grpcio says to calls over a channel that another thread closes: CANCELLED or ValueError.
_CLOSED = "the prober was closed meanwhile"


@dataclass(frozen=True)
class Device:
    """A device of a tf.distribute server; ``memory_bytes`` is the limit TensorFlow set itself."""

    name: str
    type: str
    memory_bytes: int
    incarnation: int
    description: str


@dataclass(frozen=True)
class WorkerTask:
    """A task of the tf.data service: what one data worker does for one iteration."""

    task_id: int
    iteration_id: int


@dataclass(frozen=True)
class Probe:
    """What one address answered.

    Parameters
    ----------
    address : str
        ``"host:port"``.
    state : {"alive", "hung", "refused", "unreachable", "foreign"}
        ``alive`` is a TensorFlow server that answered; ``hung`` accepts connections but does not
        answer in time; ``refused`` has no listener; ``unreachable`` gives no connection at all;
        ``foreign`` is something else than a TensorFlow server.
    kind : {"dispatcher", "data_worker", "server", "grpc"}, optional
        ``server`` is a tf.distribute server (ps, worker, chief), ``grpc`` another gRPC server.
    latency_ms : float
        Milliseconds from the first question to the verdict.
    reason : str
        Why it is not alive, in words; empty for a live one.
    version : int, optional
        The dispatcher's protocol version.
    devices : tuple of Device
        The devices of a tf.distribute server; their names carry its job and task.
    tasks : tuple of WorkerTask
        What a data worker works on.
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
        """Whether a TensorFlow server answered."""
        return self.state == "alive"

    @property
    def task(self) -> str | None:
        """The name that a tf.distribute server gives itself, such as ``"worker:0"``."""
        for device in self.devices:
            parts = dict(part.split(":", 1) for part in device.name.split("/") if ":" in part)
            if "job" in parts and "task" in parts:
                return f"{parts['job']}:{parts['task']}"
        return None


class Prober:
    """Asks the same addresses again and again, over connections that it keeps.

    Safe to use from several threads. An address that does not answer is connected to afresh the
    next time, so a task that came back on its port is seen at once.

    Parameters
    ----------
    via_proxy : bool
        Whether to obey ``http_proxy`` and ``https_proxy``, as TensorFlow does. Default false.
    """

    def __init__(self, via_proxy: bool = False) -> None:
        self._via_proxy = via_proxy
        self._channels: dict[str, Any] = {}

    def probe(self, address: str, timeout: float = 1.0, expect: Kind | None = None) -> Probe:
        """Ask who is at `address`.

        Parameters
        ----------
        address : str
            ``"host:port"`` or ``"grpc://host:port"``.
        timeout : float
            Seconds for the whole answer. Default 1.
        expect : str, optional
            The kind that should be there; asked for first, which makes it one call.
        """
        address = str(Endpoint.parse(address))
        start = time.monotonic()
        kept = address in self._channels
        found = self._ask(address, start, timeout, expect)
        if kept and found.state in ("refused", "unreachable", "foreign"):
            found = self._ask(address, start, timeout, expect)
        return found

    def close(self) -> None:
        """Close all connections; the next `probe` opens new ones."""
        while self._channels:
            self._channels.popitem()[1].close()

    def __enter__(self) -> Prober:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, address: str, start: float, timeout: float, expect: Kind | None) -> Probe:
        channel: Any = self._channels.get(address)
        fresh = channel is None
        if fresh:
            channel = self._channels.setdefault(address, _channel(address, self._via_proxy))
        # A fresh connection that hangs is looked at once more by plain TCP, within the limit.
        reserve = min(0.1, timeout / 5) if fresh else 0.0
        limit = start + timeout - reserve

        def verdict(state: State, reason: str = "", **more: Any) -> Probe:
            if state not in ("alive", "hung"):
                if self._channels.get(address) is channel:
                    self._channels.pop(address, None)
                channel.close()
            milliseconds = (time.monotonic() - start) * 1000
            return Probe(address, state, latency_ms=milliseconds, reason=reason, **more)

        for kind in sorted(_QUESTIONS, key=lambda kind: kind != expect):
            try:
                answer = _call(channel, _QUESTIONS[kind], limit - time.monotonic())
            except ValueError:
                return verdict("unreachable", _CLOSED)
            except grpc.RpcError as error:
                code, text = error.code(), error.details() or ""
                if code is grpc.StatusCode.CANCELLED:
                    return verdict("unreachable", _CLOSED)
                if code is grpc.StatusCode.UNIMPLEMENTED:
                    if "http2 header" in text:
                        return verdict("foreign", f"an HTTP server or proxy answers: {text}")
                    continue
                if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    if fresh and not _connects(address, max(reserve, 0.02)):
                        return verdict("unreachable", f"no connection within {timeout:g} s")
                    return verdict("hung", f"accepts connections, no answer within {timeout:g} s")
                if code is grpc.StatusCode.UNAVAILABLE:
                    return verdict(*_unavailable(text))
                return verdict("foreign", text or str(code), kind="grpc")
            try:
                details = _details(kind, answer)
            except DecodeError:
                return verdict("foreign", f"its answer is not that of a {kind}", kind="grpc")
            return verdict("alive", kind=kind, **details)
        return verdict("foreign", "a gRPC server that is not TensorFlow's", kind="grpc")


def probe(
    address: str,
    timeout: float = 1.0,
    via_proxy: bool = False,
    expect: Kind | None = None,
) -> Probe:
    """Ask once who is at `address`; see `Prober.probe`.

    Parameters
    ----------
    address : str
        ``"host:port"`` or ``"grpc://host:port"``.
    timeout : float
        Seconds for the whole answer. Default 1.
    via_proxy : bool
        Whether to obey ``http_proxy``, as TensorFlow does. Default false.
    expect : {"dispatcher", "data_worker", "server"}, optional
        What should be there; asked for first.
    """
    with Prober(via_proxy) as prober:
        return prober.probe(address, timeout, expect)


def probe_many(
    addresses: Iterable[str], timeout: float = 1.0, parallel: int = 32
) -> tuple[Probe, ...]:
    """Ask all `addresses`, at most `parallel` at a time; the answers come in the same order."""
    wanted = tuple(addresses)
    if not wanted:
        return ()
    with ThreadPoolExecutor(min(parallel, len(wanted)), "tfd-probe") as pool:
        return tuple(pool.map(lambda address: probe(address, timeout), wanted))


def dispatcher_workers(address: str, timeout: float = 1.0) -> tuple[str, ...]:
    """Return the addresses of all workers a dispatcher ever registered, dead ones included.

    Raises
    ------
    DispatcherLost
        Nobody, or no dispatcher, answers at `address`.
    TimeLimit
        No answer within `timeout` seconds.
    """
    answer = _request(address, _WORKERS, tf_messages.Empty(), timeout, "dispatcher", DispatcherLost)
    try:
        workers = tf_messages.GetWorkersResponse.FromString(answer).workers
    except DecodeError:
        raise _not_understood(address, "dispatcher", DispatcherLost) from None
    return tuple(worker.address for worker in workers)


def worker_tasks(address: str, timeout: float = 1.0) -> tuple[WorkerTask, ...]:
    """Return what the data worker at `address` works on.

    Raises
    ------
    NoWorkers
        Nobody, or no data worker, answers at `address`.
    TimeLimit
        No answer within `timeout` seconds.
    """
    answer = _request(address, _TASKS, tf_messages.Empty(), timeout, "data worker", NoWorkers)
    try:
        return _worker_tasks(answer)
    except DecodeError:
        raise _not_understood(address, "data worker", NoWorkers) from None


def complete_tasks(
    dispatcher: str, worker_address: str, task_ids: Iterable[int], timeout: float = 1.0
) -> None:
    """Tell the dispatcher that tasks of a worker which is gone are complete.

    Tasks that the dispatcher has forgotten count as complete. Consumers that wait for those
    tasks then end as if all data had come: whoever calls this must tell them what is missing.

    Parameters
    ----------
    dispatcher : str
        Its ``"host:port"``.
    worker_address : str
        The worker's address as the dispatcher knows it.
    task_ids : iterable of int
    timeout : float
        Seconds. Default 1.

    Raises
    ------
    DispatcherLost
        Nobody, or no dispatcher, answers at `dispatcher`.
    TimeLimit
        No answer within `timeout` seconds.
    """
    limit = time.monotonic() + timeout
    # The dispatcher stops at the first task that it has forgotten: one request for each.
    for task_id in task_ids:
        request = tf_messages.WorkerUpdateRequest(worker_address=worker_address)
        request.updates.add(task_id=task_id, completed=True)
        left = limit - time.monotonic()
        _request(dispatcher, _UPDATE, request, left, "dispatcher", DispatcherLost, forgotten=True)


def _channel(address: str, via_proxy: bool = False) -> Any:
    options = (
        ("grpc.enable_http_proxy", int(via_proxy)),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", -1),
    )
    return grpc.insecure_channel(address, options)


def _call(channel: Any, method: str, timeout: float, request: bytes = b"") -> bytes:
    answer: bytes = channel.unary_unary(method)(request, timeout=max(timeout, 0.001))
    return answer


def _request(
    address: str,
    method: str,
    request: Any,
    timeout: float,
    who: str,
    lost: Callable[..., TfdError],
    forgotten: bool = False,
) -> bytes:
    address = str(Endpoint.parse(address))
    with _channel(address) as channel:
        try:
            return _call(channel, method, timeout, request.SerializeToString())
        except grpc.RpcError as error:
            code, text = error.code(), error.details() or ""
    if code is grpc.StatusCode.NOT_FOUND and forgotten:
        return b""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        raise TimeLimit(
            f"the {who} at {address} did not answer within {timeout:g} s",
            fix="it may be hung or unreachable: look at its state and log",
        )
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED):
        why = (
            "something else answers there" if code is grpc.StatusCode.UNIMPLEMENTED else _last(text)
        )
        raise lost(f"no {who} answers at {address}: {why}", fix="look at its state and log")
    raise DataError(f"the {who} at {address} answered {code.name}: {text}")


def _not_understood(address: str, expected: str, lost: Callable[..., TfdError]) -> TfdError:
    return lost(
        f"no {expected} answers at {address}: something else answers there",
        fix="look at its state and log",
    )


def _unavailable(text: str) -> tuple[State, str]:
    if any(sign in text for sign in _FOREIGN):
        return "foreign", f"something that is no gRPC server answers: {_last(text)}"
    if "Connection refused" in text:
        return "refused", "connection refused: nothing listens there"
    if "lookup failed" in text:
        why = text.rpartition(": ")[2].rstrip("]")
        return "unreachable", f"the address of the host is not known: {why}"
    return "unreachable", _last(text)


def _last(text: str) -> str:
    return text.rpartition("last error: ")[2]


def _connects(address: str, timeout: float) -> bool:
    endpoint = Endpoint.parse(address)
    try:
        socket.create_connection((endpoint.host, endpoint.port), timeout).close()
    except OSError:
        return False
    return True


def _details(kind: Kind, answer: bytes) -> dict[str, Any]:
    if kind == "dispatcher":
        return {"version": tf_messages.GetVersionResponse.FromString(answer).version}
    if kind == "server":
        found = tf_messages.GetStatusResponse.FromString(answer).device_attributes
        return {
            "devices": tuple(
                Device(d.name, d.device_type, d.memory_limit, d.incarnation, d.physical_device_desc)
                for d in found
            )
        }
    return {"tasks": _worker_tasks(answer)}


def _worker_tasks(answer: bytes) -> tuple[WorkerTask, ...]:
    tasks = tf_messages.GetWorkerTasksResponse.FromString(answer).tasks
    return tuple(WorkerTask(task.task_id, task.iteration_id) for task in tasks)
