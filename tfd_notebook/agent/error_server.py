"""Servers that return an error on the ports of failed tasks, so that consumers fail fast.

TensorFlow's consumers retry a refused call to a worker or a dispatcher without a limit. A status
that is not retryable ends the iteration at once, with the text given here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from tfd_notebook.errors import PortInUse, StateError, TfdError
from tfd_notebook.net import ports as net_ports
from tfd_notebook.net import probe, tf_messages

_WORKER = "/tensorflow.data.WorkerService/"
_PROCESS_TASK = f"{_WORKER}ProcessTask"
_GET_ELEMENT = f"{_WORKER}GetElement"

_LOOPBACK = ("127.0.0.1", "[::1]")
_ALL_INTERFACES = ("0.0.0.0", "[::]")

#: In these modes a worker that joins late, or never, has no exclusive share of the data.
_DYNAMIC_MODES = ("off", "dynamic")


class ErrorServer:
    """Answers every call on the ports of failed tasks with an error; a context manager.

    It listens in addition to the socket that reserves the port (`ports.reserve_port`). Every call
    gets `code` and the port's text. TensorFlow's consumers raise both, except for ``UNAVAILABLE``,
    ``ABORTED`` and ``CANCELLED``, which they retry without a limit.

    A dispatcher never removes a worker. It assigns a task to it in every later iteration, which
    then waits forever. With `dispatcher`, the error server of a data worker therefore accepts new
    tasks like a worker without data. The modes ``"off"`` and ``"dynamic"`` do not divide the source
    in advance, so no data is missing. The consumer gets all elements from the remaining workers.
    With ``on_loss="warn"`` all tasks end like that, including the lost share of the data. The
    caller must report this loss.

    Parameters
    ----------
    ports : mapping of int to str
        The text for each port.
    code : str
        Name of the gRPC status. Default ``"DATA_LOSS"``, which raises ``tf.errors.DataLossError``.
    dispatcher : str, optional
        ``"host:port"`` of the dispatcher of the failed data workers.
    on_loss : {"raise", "warn"}
        Whether consumers of a lost task get the error, or the end of the data. The latter needs
        `dispatcher`.
    in_process : bool
        Whether consumers run in the worker's process, where they never call its port. The tasks
        that the worker left unfinished then end at the start. Default false.
    workers_remain : bool
        Whether coordinated reads continue with other workers, even with ``on_loss="warn"``.
        Otherwise the end of one task would end the whole read. Default false.
    workers : mapping of int to str, optional
        The address of each port's worker as registered with the dispatcher. Default
        ``"localhost:PORT"``.
    allow : iterable of str, optional
        Networks that may connect in addition to this host, on all its addresses. None: loopback
        only.

    Raises
    ------
    PortInUse
        By `start`: another process listens on the port.
    """

    def __init__(
        self,
        ports: Mapping[int, str],
        code: str = "DATA_LOSS",
        *,
        dispatcher: str | None = None,
        on_loss: str = "raise",
        in_process: bool = False,
        workers_remain: bool = False,
        workers: Mapping[int, str] | None = None,
        allow: Iterable[str] | None = None,
    ) -> None:
        self._ports = dict(ports)
        self._code = grpc.StatusCode[code]
        self._dispatcher = dispatcher
        self._on_loss = on_loss
        self._in_process = in_process
        self._workers_remain = workers_remain
        self._workers = dict(workers or {})
        self._allow = None if allow is None else tuple(allow)
        self._servers: list[Any] = []
        self._pool: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Start listening."""
        if self._pool is not None:
            raise StateError("this error server is already running")
        self._pool = ThreadPoolExecutor(2, "tfd-errors")
        try:
            for port, text in self._ports.items():
                self._serve(port, text)
            if self._in_process and self._dispatcher is not None:
                self._pool.submit(self._complete_assigned, self._dispatcher)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the servers and release the ports; may be called twice."""
        for stopped in [server.stop(grace=None) for server in self._servers]:
            stopped.wait(5.0)
        self._servers.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def __enter__(self) -> ErrorServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, port: int, text: str) -> None:
        accept = self._accept(self._worker(port))
        accept_all = self._on_loss == "warn"
        handler = _ErrorHandler(self._code, text, accept, accept_all, self._workers_remain)
        server = grpc.server(self._pool, handlers=(handler,), options=(("grpc.so_reuseport", 1),))
        bound = 0
        for host in _LOOPBACK if self._allow is None else _ALL_INTERFACES:
            with contextlib.suppress(RuntimeError):  # no IPv6, or the port is in use
                bound += bool(server.add_insecure_port(f"{host}:{port}"))
        if not bound:
            raise PortInUse(f"starting an error server on port {port} failed: it is in use")
        self._servers.append(server)  # `close` stops it if a later step fails
        server.start()
        if self._allow is not None:
            net_ports.restrict_port(port, self._allow)

    def _complete_assigned(self, dispatcher: str) -> None:
        """Report the unfinished tasks of the failed workers to the dispatcher as done."""
        with contextlib.suppress(TfdError):  # `close` waits, so stop at the first failure
            registered = probe.dispatcher_workers(dispatcher, 2.0)
            for worker in map(self._worker, self._ports):
                if worker in registered:
                    tasks = probe.assigned_tasks(dispatcher, worker, 2.0)
                    probe.complete_tasks(dispatcher, worker, tasks, 2.0)

    def _worker(self, port: int) -> str:
        """Return the address of the worker on `port` as registered with the dispatcher."""
        return self._workers.get(port, f"localhost:{port}")

    def _accept(self, worker: str) -> Callable[[int], None] | None:
        """Return a callable that reports a task of `worker` to the dispatcher as done."""
        dispatcher, pool = self._dispatcher, self._pool
        if dispatcher is None or pool is None:
            return None

        def report_done(task_id: int) -> None:
            # If the dispatcher failed, too, its own error server answers consumers.
            with contextlib.suppress(TfdError):
                probe.complete_tasks(dispatcher, worker, (task_id,), 2.0)

        def accept(task_id: int) -> None:
            # Later: the dispatcher first waits for the reply to the call that assigns the task.
            pool.submit(report_done, task_id)

        return accept


class _ErrorHandler(grpc.GenericRpcHandler):  # type: ignore[misc, unused-ignore]
    """The handler of all methods on one port."""

    def __init__(
        self,
        code: grpc.StatusCode,
        text: str,
        accept: Callable[[int], None] | None,
        accept_all: bool,
        workers_remain: bool,
    ) -> None:
        self._code = code
        self._text = text
        self._accept = accept
        self._accept_all = accept_all
        self._workers_remain = workers_remain
        self._accepted: set[int] = set()

    def service(self, call: Any) -> Any:
        handlers = {_PROCESS_TASK: self._process_task, _GET_ELEMENT: self._get_element}
        return grpc.unary_unary_rpc_method_handler(handlers.get(call.method, self._refuse))

    def _refuse(self, _: bytes, context: Any) -> bytes:
        context.abort(self._code, self._text)
        raise AssertionError("abort() raises")

    def _process_task(self, request: bytes, context: Any) -> bytes:
        task = tf_messages.ProcessTaskRequest.FromString(request).task
        mode = tf_messages.SHARDING_POLICIES[task.processing_mode_def.sharding_policy]
        removable = bool(task.num_consumers) and self._workers_remain
        nothing_lost = mode in _DYNAMIC_MODES and not task.num_consumers
        if removable or not self._accept_task(task.task_id, nothing_lost):
            # Any other status would fail the job here, without the reason for the consumer.
            context.abort(grpc.StatusCode.UNAVAILABLE, self._text)
        return b""

    def _get_element(self, request: bytes, context: Any) -> bytes:
        element = tf_messages.GetElementRequest.FromString(request)
        if element.consumer_index and self._workers_remain:
            # The consumers of the coordinated read then remove the task.
            context.abort(grpc.StatusCode.UNAVAILABLE, self._text)
        if not self._accept_task(element.task_id, False):
            return self._refuse(request, context)
        response: bytes = tf_messages.GetElementResponse(end_of_sequence=True).SerializeToString()
        return response

    def _accept_task(self, task_id: int, nothing_lost: bool) -> bool:
        """Return True if the task counts as done; report it to the dispatcher the first time."""
        if task_id in self._accepted:
            return True
        if self._accept is None or not (nothing_lost or self._accept_all):
            return False
        self._accepted.add(task_id)
        self._accept(task_id)
        return True
