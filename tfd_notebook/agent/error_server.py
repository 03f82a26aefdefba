"""What stands at the port of a task that is gone for good: an answer, instead of silence.

TensorFlow's consumers repeat a refused call to a worker or a dispatcher for ever. A status that
does not mean "try again" reaches whoever iterates, at once, with the text that is given here.
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
_EVERYWHERE = ("0.0.0.0", "[::]")

#: With these, a worker that joins late or not at all has no share of the data that others lack.
_SHARED_OUT_AT_RUN_TIME = ("off", "dynamic")


class ErrorServer:
    """Answers every call at the ports of lost tasks with an error; a context manager.

    Listens beside a socket that holds the port (`sockets.hold_port`). Every call gets `code` and
    the port's text; TensorFlow's consumers pass both on, except for ``UNAVAILABLE``, ``ABORTED``
    and ``CANCELLED``, which they repeat for ever.

    A dispatcher never forgets a worker, and gives it work in every later iteration, which then
    waits for ever. With `dispatcher`, the tombstone of a data worker therefore accepts new work
    as a worker without data would: where the source is not divided beforehand (``"off"`` and
    ``"dynamic"``) nothing is missing, and the consumer gets everything from the workers that
    live. With ``on_loss="warn"`` all work ends like that, the part that was lost included;
    somebody should say so.

    Parameters
    ----------
    ports : mapping of int to str
        The text for each port.
    code : str
        Name of the gRPC status. Default ``"DATA_LOSS"``, a ``tf.errors.DataLossError``.
    dispatcher : str, optional
        ``"host:port"`` of the dispatcher that the lost data workers belonged to.
    on_loss : {"raise", "warn"}
        Whether consumers of the work that was lost get the error or the end of the data. The
        latter needs `dispatcher`.
    workers : mapping of int to str, optional
        The address that the dispatcher knows the worker of each port by. Default
        ``"localhost:PORT"``.
    allow : iterable of str, optional
        Networks that are answered besides this host, at all of its addresses; None: at loopback
        only.

    Raises
    ------
    PortInUse
        By `start`: somebody else listens there.
    """

    def __init__(
        self,
        ports: Mapping[int, str],
        code: str = "DATA_LOSS",
        *,
        dispatcher: str | None = None,
        on_loss: str = "raise",
        workers: Mapping[int, str] | None = None,
        allow: Iterable[str] | None = None,
    ) -> None:
        self._ports = dict(ports)
        self._code = grpc.StatusCode[code]
        self._dispatcher = dispatcher
        self._on_loss = on_loss
        self._workers = dict(workers or {})
        self._allow = None if allow is None else tuple(allow)
        self._servers: list[Any] = []
        self._pool: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Begin to answer."""
        if self._pool is not None:
            raise StateError("this tombstone stands already")
        self._pool = ThreadPoolExecutor(2, "tfd-tombstone")
        try:
            for port, text in self._ports.items():
                self._serve(port, text)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop answering and free the ports; may be called twice."""
        for stopped in [server.stop(grace=None) for server in self._servers]:
            stopped.wait(5.0)
        self._servers.clear()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def __enter__(self) -> ErrorServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, port: int, text: str) -> None:
        accept = self._accept(self._workers.get(port, f"localhost:{port}"))
        answers = _Answers(self._code, text, accept, self._on_loss == "warn")
        server = grpc.server(self._pool, handlers=(answers,), options=(("grpc.so_reuseport", 1),))
        bound = 0
        for host in _LOOPBACK if self._allow is None else _EVERYWHERE:
            with contextlib.suppress(RuntimeError):  # no IPv6 here, or the port is taken
                bound += bool(server.add_insecure_port(f"{host}:{port}"))
        if not bound:
            raise PortInUse(f"nothing can answer for the lost task at port {port}: it is taken")
        self._servers.append(server)  # from here on `close` stops it, whatever fails
        server.start()
        if self._allow is not None:
            net_ports.restrict_port(port, self._allow)

    def _accept(self, worker: str) -> Callable[[int], None] | None:
        """Return what tells the dispatcher that `worker` has done a task."""
        dispatcher, pool = self._dispatcher, self._pool
        if dispatcher is None or pool is None:
            return None

        def done(task_id: int) -> None:
            # A dispatcher that is gone, too, is for its own tombstone to tell.
            with contextlib.suppress(TfdError):
                probe.complete_tasks(dispatcher, worker, (task_id,), 2.0)

        def accept(task_id: int) -> None:
            # Afterwards: the dispatcher waits for the answer to the call that hands out work.
            pool.submit(done, task_id)

        return accept


class _Answers(grpc.GenericRpcHandler):  # type: ignore[misc, unused-ignore]
    """The answers at one port, whatever the method."""

    def __init__(
        self,
        code: grpc.StatusCode,
        text: str,
        accept: Callable[[int], None] | None,
        accept_all: bool,
    ) -> None:
        self._code = code
        self._text = text
        self._accept = accept
        self._accept_all = accept_all
        self._accepted: set[int] = set()

    def service(self, call: Any) -> Any:
        answer = {_PROCESS_TASK: self._process_task, _GET_ELEMENT: self._get_element}
        return grpc.unary_unary_rpc_method_handler(answer.get(call.method, self._refuse))

    def _refuse(self, _: bytes, context: Any) -> bytes:
        context.abort(self._code, self._text)
        raise AssertionError("abort() raises")

    def _process_task(self, request: bytes, context: Any) -> bytes:
        task = tf_messages.ProcessTaskRequest.FromString(request).task
        mode = tf_messages.SHARDING_POLICIES[task.processing_mode_def.sharding_policy]
        nothing_lost = mode in _SHARED_OUT_AT_RUN_TIME and not task.num_consumers
        if not self._take(task.task_id, nothing_lost):
            # Any other status would fail the job here; the consumer shall hear the reason.
            context.abort(grpc.StatusCode.UNAVAILABLE, self._text)
        return b""

    def _get_element(self, request: bytes, context: Any) -> bytes:
        if not self._take(tf_messages.GetElementRequest.FromString(request).task_id, False):
            return self._refuse(request, context)
        end: bytes = tf_messages.GetElementResponse(end_of_sequence=True).SerializeToString()
        return end

    def _take(self, task_id: int, nothing_lost: bool) -> bool:
        """Return whether the task counts as done here; tell the dispatcher the first time."""
        if task_id in self._accepted:
            return True
        if self._accept is None or not (nothing_lost or self._accept_all):
            return False
        self._accepted.add(task_id)
        self._accept(task_id)
        return True
