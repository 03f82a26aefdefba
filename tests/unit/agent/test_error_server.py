"""Replies of error servers. For their effect on TensorFlow, see integration/agent."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import grpc
import pytest

from tests._grpc import Server
from tfd_notebook.agent.error_server import ErrorServer
from tfd_notebook.errors import FilterFailed, PortInUse, StateError
from tfd_notebook.net import tf_messages
from tfd_notebook.net.ports import reserve_port
from tfd_notebook.net.probe import probe

PROCESS_TASK = "/tensorflow.data.WorkerService/ProcessTask"
GET_ELEMENT = "/tensorflow.data.WorkerService/GetElement"
HEARTBEAT = "/tensorflow.data.DispatcherService/ClientHeartbeat"
WORKERS = "/tensorflow.data.DispatcherService/GetWorkers"
WORKER_HEARTBEAT = "/tensorflow.data.DispatcherService/WorkerHeartbeat"
UPDATE = "/tensorflow.data.DispatcherService/WorkerUpdate"
OFF, DYNAMIC, FILE = range(3)
SECONDS = 60.0


@pytest.fixture
def port() -> Iterator[int]:
    with reserve_port() as held:
        yield held.getsockname()[1]


class FakeDispatcher(grpc.GenericRpcHandler):
    """Fake dispatcher that records the completed tasks."""

    def __init__(self) -> None:
        self.completed: Queue[tuple[str, int]] = Queue()

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self._update)

    def _update(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        update = tf_messages.WorkerUpdateRequest.FromString(request)
        self.completed.put((update.worker_address, update.updates[0].task_id))
        return b""


@pytest.fixture
def dispatcher() -> Iterator[tuple[str, FakeDispatcher]]:
    with ThreadPoolExecutor(1) as pool:
        fake = FakeDispatcher()
        server = grpc.server(pool, handlers=(fake,))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield address, fake
        server.stop(None).wait()


def call(port: int, method: str, request: bytes = b"", host: str = "localhost") -> bytes:
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
    with grpc.insecure_channel(f"{host}:{port}", options) as channel:
        answer: bytes = channel.unary_unary(method)(request, timeout=SECONDS)
        return answer


def code_of(port: int, method: str, request: bytes = b"") -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call(port, method, request)
    return caught.value.code()


def work(task_id: int, mode: int, consumers: int = 0) -> bytes:
    request = tf_messages.ProcessTaskRequest()
    request.task.task_id = task_id
    request.task.num_consumers = consumers
    request.task.processing_mode_def.sharding_policy = mode
    return request.SerializeToString()


def element(task_id: int, *consumer: int) -> bytes:
    request = tf_messages.GetElementRequest(task_id=task_id, consumer_index=consumer)
    return bytes(request.SerializeToString())


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
@pytest.mark.parametrize("method", [GET_ELEMENT, HEARTBEAT])
def test_error_server_answers_with_its_text(port: int, host: str, method: str) -> None:
    with (
        ErrorServer(port, "[TFD302] gone\nNext: déjà vu"),
        pytest.raises(grpc.RpcError) as caught,
    ):
        call(port, method, host=host)
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    assert caught.value.details() == "[TFD302] gone\nNext: déjà vu"


def test_error_server_starts_and_stops(port: int) -> None:
    threads = set(threading.enumerate())
    server = ErrorServer(port, "gone")
    for _ in range(2):
        server.start()
        with pytest.raises(StateError):
            server.start()
        assert code_of(port, HEARTBEAT) is grpc.StatusCode.DATA_LOSS
        server.close()
        server.close()
        assert probe(f"localhost:{port}").state == "refused"
    new = [t for t in set(threading.enumerate()) - threads if t.name.startswith("tfd-")]
    assert not new


def test_port_in_use_is_an_error() -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = taken.getsockname()[1]
        for allow in (None, ()):
            with pytest.raises(PortInUse), ErrorServer(port, "gone", allow=allow):
                pass


@pytest.mark.slow
def test_open_port_is_not_served(port: int) -> None:
    # More networks than a packet filter can have, which cannot be merged.
    many = [f"10.{i // 128}.{i % 128 * 2}.0/24" for i in range(2000)]
    server = ErrorServer(port, "gone", allow=many)
    with pytest.raises(FilterFailed):
        server.start()
    assert probe(f"localhost:{port}").state == "refused"


def test_error_server_listens_on_the_tasks_addresses(port: int) -> None:
    def answers(address: str) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((address, port), 5):
            return True
        return False

    with ErrorServer(port, "gone"):
        assert [answers("127.0.0.1"), answers("127.0.0.2")] == [True, False]
    with ErrorServer(port, "gone", allow=()):
        assert [answers("127.0.0.1"), answers("127.0.0.2")] == [True, True]


def test_new_work_does_not_fail_the_job(port: int) -> None:
    with ErrorServer(port, "gone"):
        assert code_of(port, PROCESS_TASK, work(1, OFF)) is grpc.StatusCode.UNAVAILABLE
        assert code_of(port, GET_ELEMENT, element(1)) is grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_new_work_ends_empty(port: int, mode: int, dispatcher: tuple[str, FakeDispatcher]) -> None:
    address, fake = dispatcher
    with ErrorServer(port, "gone", dispatcher=address, worker="host-a:5"):
        assert call(port, PROCESS_TASK, work(7, mode)) == b""
        assert fake.completed.get(timeout=SECONDS) == ("host-a:5", 7)
        answer = tf_messages.GetElementResponse.FromString(call(port, GET_ELEMENT, element(7)))
        assert answer.end_of_sequence
        assert code_of(port, GET_ELEMENT, element(6)) is grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize("request_", [work(7, FILE), work(7, DYNAMIC, consumers=2)])
def test_missing_share_is_not_an_empty_share(
    port: int, request_: bytes, dispatcher: tuple[str, FakeDispatcher]
) -> None:
    with ErrorServer(port, "gone", dispatcher=dispatcher[0]):
        assert code_of(port, PROCESS_TASK, request_) is grpc.StatusCode.UNAVAILABLE
        assert code_of(port, GET_ELEMENT, element(7)) is grpc.StatusCode.DATA_LOSS


def test_warning_ends_all_reads(port: int, dispatcher: tuple[str, FakeDispatcher]) -> None:
    address, fake = dispatcher
    with ErrorServer(port, "gone", dispatcher=address, on_loss="warn"):
        assert call(port, PROCESS_TASK, work(7, FILE)) == b""
        for _ in range(2):
            answer = tf_messages.GetElementResponse.FromString(call(port, GET_ELEMENT, element(6)))
            assert answer.end_of_sequence
        received = {fake.completed.get(timeout=SECONDS) for _ in range(2)}  # each from a thread
        assert received == {(f"localhost:{port}", 7), (f"localhost:{port}", 6)}
        assert code_of(port, HEARTBEAT) is grpc.StatusCode.DATA_LOSS
    assert fake.completed.empty()  # each once


def test_coordinated_reads_continue_with_the_remaining_workers(
    port: int, dispatcher: tuple[str, FakeDispatcher]
) -> None:
    """Their consumers remove a task after UNAVAILABLE; the end of one task ends the read."""
    address, fake = dispatcher
    with ErrorServer(port, "gone", dispatcher=address, on_loss="warn", workers_remain=True):
        request = work(7, OFF, consumers=2)
        assert code_of(port, PROCESS_TASK, request) is grpc.StatusCode.UNAVAILABLE
        for consumer in range(2):
            request = element(7, consumer)
            assert code_of(port, GET_ELEMENT, request) is grpc.StatusCode.UNAVAILABLE
    assert fake.completed.empty()


def test_unfinished_tasks_end_if_consumers_are_in_process(port: int) -> None:
    worker = f"localhost:{port}"
    workers = tf_messages.GetWorkersResponse()
    workers.workers.add(address=worker)
    tasks = tf_messages.WorkerHeartbeatResponse()
    tasks.new_tasks.add(task_id=7)
    tasks.new_tasks.add(task_id=8, num_consumers=2)
    completed: Queue[int] = Queue()

    def update(request: bytes, context: grpc.ServicerContext) -> bytes:
        progress = tf_messages.WorkerUpdateRequest.FromString(request).updates
        completed.put(progress[0].task_id)
        return b""

    answers = {
        WORKERS: workers.SerializeToString(),
        WORKER_HEARTBEAT: tasks.SerializeToString(),
        UPDATE: update,
    }
    with Server(answers) as server:
        options = {"dispatcher": server.address, "on_loss": "warn", "in_process": True}
        with ErrorServer(port, "gone", **options):
            assert completed.get(timeout=60) == 7
        assert completed.empty()


def test_unregistered_worker_stays_unregistered(port: int) -> None:
    """A heartbeat would register it."""
    listed, heartbeats = threading.Event(), Queue[bytes]()

    def workers(request: bytes, context: grpc.ServicerContext) -> bytes:
        listed.set()
        return b""

    def heartbeat(request: bytes, context: grpc.ServicerContext) -> bytes:
        heartbeats.put(request)
        return b""

    with Server({WORKERS: workers, WORKER_HEARTBEAT: heartbeat}) as server:
        options = {"dispatcher": server.address, "on_loss": "warn", "in_process": True}
        with ErrorServer(port, "gone", **options):
            assert listed.wait(60)
    assert heartbeats.empty()


def test_missing_dispatcher_is_ignored(port: int) -> None:
    with reserve_port() as reserved:
        address = f"localhost:{reserved.getsockname()[1]}"
        with ErrorServer(port, "gone", dispatcher=address):
            assert call(port, PROCESS_TASK, work(7, OFF)) == b""
