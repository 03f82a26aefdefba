"""A gRPC server with the replies that a test sets."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc

from tfd_notebook.net import tf_messages

STATUS = "/tensorflow.WorkerService/GetStatus"

Answer = Callable[[bytes, grpc.ServicerContext], bytes]


class Server(grpc.GenericRpcHandler):
    """A gRPC server with the given replies, which records the called methods."""

    def __init__(self, answers: dict[str, bytes | Answer], port: int = 0) -> None:
        self.answers = answers
        self.methods: list[str] = []
        self._pool = ThreadPoolExecutor(2)
        self._server = grpc.server(self._pool, handlers=(self,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{self.port}"
        self._server.start()

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        self.methods.append(call.method)
        answer = self.answers.get(call.method)
        if answer is None:
            return None
        return grpc.unary_unary_rpc_method_handler(
            answer if callable(answer) else lambda request, context: answer
        )

    def stop(self) -> None:
        self._server.stop(None).wait()
        self._pool.shutdown()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def fails(code: grpc.StatusCode, text: str) -> Answer:
    return lambda request, context: context.abort(code, text)


def status(task: str, *devices: str) -> dict[str, bytes | Answer]:
    """Return the replies of the tf.distribute server of a task, such as ``"worker:0"``."""
    job, _, index = task.partition(":")
    answer = tf_messages.GetStatusResponse()
    for number, kind in enumerate(devices):
        name = f"/job:{job}/replica:0/task:{index}/device:{kind}:{number}"
        answer.device_attributes.add(name=name, device_type=kind)
    return {STATUS: answer.SerializeToString()}
