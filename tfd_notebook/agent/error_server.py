"""Servers that return an error on the ports of failed tasks, so that consumers fail fast.

TensorFlow's consumers retry a refused call to a worker or a dispatcher without a limit. A status
that is not retryable ends the iteration at once, with the text given here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from tfd_notebook.errors import PortInUse, StateError, TfdError
from tfd_notebook.net import ports, probe, tf_messages

_WORKER = "/tensorflow.data.WorkerService/"
_PROCESS_TASK = f"{_WORKER}ProcessTask"
_GET_ELEMENT = f"{_WORKER}GetElement"

_LOOPBACK = ("127.0.0.1", "[::1]")
_ALL_INTERFACES = ("0.0.0.0", "[::]")

#: In these modes a worker that joins late, or never, has no exclusive share of the data.
_DYNAMIC_MODES = ("off", "dynamic")


class ErrorServer(grpc.GenericRpcHandler):  # type: ignore[misc, unused-ignore]
    """Answers every call on the port of a failed task with an error; a context manager.

    It listens in addition to the socket that reserves the port (`ports.reserve_port`). Every call
    gets ``DATA_LOSS`` and the text, which TensorFlow's consumers raise.

    A dispatcher never removes a worker. It assigns a task to it in every later iteration, which
    then waits forever. With `dispatcher`, the error server of a data worker therefore accepts new
    tasks like a worker without data. The modes ``"off"`` and ``"dynamic"`` do not divide the source
    in advance, so no data is missing. The consumer gets all elements from the remaining workers.
    With ``on_loss="warn"`` all tasks end like that, including the lost share of the data. The
    caller must report this loss.

    Parameters
    ----------
    port : int
    text : str
    dispatcher : str, optional
        ``"host:port"`` of the dispatcher of a failed data worker.
    on_loss : {"raise", "warn"}
        Whether consumers of a lost task get the error, or the end of the data. The latter needs
        `dispatcher`.
    in_process : bool
        Whether consumers run in the worker's process, where they never call its port. The tasks
        that the worker left unfinished then end at the start. Default false.
    workers_remain : bool
        Whether coordinated reads continue with other workers, even with ``on_loss="warn"``.
        Otherwise the end of one task would end the whole read. Default false.
    worker : str, optional
        The address of the worker as registered with the dispatcher. Default ``"localhost:PORT"``.
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
        port: int,
        text: str,
        *,
        dispatcher: str | None = None,
        on_loss: str = "raise",
        in_process: bool = False,
        workers_remain: bool = False,
        worker: str | None = None,
        allow: Iterable[str] | None = None,
    ) -> None:
        self._port = port
        self._text = text
        self._dispatcher = dispatcher
        self._accept_all = on_loss == "warn"
        self._in_process = in_process
        self._workers_remain = workers_remain
        self._worker = worker or f"localhost:{port}"
        self._allow = None if allow is None else tuple(allow)
        self._accepted: set[int] = set()
        self._server: Any = None
        self._pool: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Start listening."""
        if self._pool is not None:
            raise StateError("this error server is already running")
        self._pool = ThreadPoolExecutor(2, "tfd-errors")
        try:
            self._serve()
            if self._in_process:
                self._pool.submit(self._complete_assigned)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the server and release the port; may be called twice."""
        if self._server is not None:
            self._server.stop(grace=None).wait(5.0)
            self._server = None
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def __enter__(self) -> ErrorServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        server = grpc.server(self._pool, handlers=(self,), options=(("grpc.so_reuseport", 1),))
        bound = 0
        for host in _LOOPBACK if self._allow is None else _ALL_INTERFACES:
            with contextlib.suppress(RuntimeError):  # no IPv6, or the port is in use
                bound += bool(server.add_insecure_port(f"{host}:{self._port}"))
        if not bound:
            raise PortInUse(f"starting an error server on port {self._port} failed: it is in use")
        self._server = server  # `close` stops it if a later step fails
        server.start()
        if self._allow is not None:
            ports.restrict_port(self._port, self._allow)

    def _complete_assigned(self) -> None:
        """Report the unfinished tasks of the failed worker to the dispatcher as done."""
        if self._dispatcher is None:
            return
        with contextlib.suppress(TfdError):
            if self._worker in probe.dispatcher_workers(self._dispatcher, 2.0):
                self._complete(probe.assigned_tasks(self._dispatcher, self._worker, 2.0))

    def _complete(self, task_ids: Iterable[int]) -> None:
        assert self._dispatcher is not None
        # If the dispatcher failed, too, its own error server answers consumers.
        with contextlib.suppress(TfdError):
            probe.complete_tasks(self._dispatcher, self._worker, task_ids, 2.0)

    # Handlers of calls

    def service(self, call: Any) -> Any:
        handlers = {_PROCESS_TASK: self._process_task, _GET_ELEMENT: self._get_element}
        return grpc.unary_unary_rpc_method_handler(handlers.get(call.method, self._refuse))

    def _refuse(self, _: bytes, context: Any) -> bytes:
        context.abort(grpc.StatusCode.DATA_LOSS, self._text)
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
        pool = self._pool
        if pool is None or self._dispatcher is None or not (nothing_lost or self._accept_all):
            return False
        self._accepted.add(task_id)
        # Later: the dispatcher first waits for the reply to the call that assigns the task.
        pool.submit(self._complete, (task_id,))
        return True
