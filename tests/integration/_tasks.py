"""TensorFlow servers in separate processes, forked from a process that has imported TensorFlow.

For tests of the parts below the launchers, so this module does not use tfd_notebook. As a script,
it is the process that forks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any


class Tasks:
    """Context manager that starts servers, and ends them at its exit."""

    def __enter__(self) -> Tasks:
        #: The addresses of the servers by pid.
        self.addresses: dict[int, str] = {}
        self._forks = subprocess.Popen(
            [sys.executable, __file__],
            env=dict(os.environ, CUDA_VISIBLE_DEVICES=""),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        return self

    def __exit__(self, *_: object) -> None:
        with self._forks:  # the end of its input ends the process and all servers
            self._forks.stdin.close()

    def start(self, role: str, port: int = 0, **settings: Any) -> int:
        """Start a server, wait until its constructor has returned, and return its pid."""
        self._forks.stdin.write(json.dumps({"role": role, "port": port, **settings}) + "\n")
        answer = json.loads(self._forks.stdout.readline())
        assert "pid" in answer, answer
        self.addresses[answer["pid"]] = answer["address"]
        return answer["pid"]

    def end(self, pid: int) -> None:
        """Kill a server and wait until its parent has reaped it. No-op if it was killed before."""
        if self.addresses.pop(pid, None) is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            while True:
                os.kill(pid, 0)
                time.sleep(0.001)

    def dispatcher(self, port: int, work_dir: str = "") -> int:
        return self.start("dispatcher", port, work_dir=work_dir)

    def worker(self, port: int, dispatcher: int) -> int:
        return self.start("worker", port, dispatcher=f"localhost:{dispatcher}")


def make_server(
    role: str,
    port: int,
    work_dir: str = "",
    dispatcher: str = "",
    spec: dict[str, list[str]] | None = None,
    index: int = 0,
) -> tuple[object, str]:
    """Return a server and its address. With `spec`, it is a server for training."""
    import tensorflow as tf

    service = tf.data.experimental.service
    if spec is not None:
        server = tf.distribute.Server(spec, job_name=role, task_index=index)
        return server, server.target
    if role == "dispatcher":
        server = service.DispatchServer(
            service.DispatcherConfig(
                port=port,
                work_dir=work_dir or None,
                fault_tolerant_mode=bool(work_dir),
                job_gc_check_interval_ms=100,
            )
        )
        return server, server.target
    server = service.WorkerServer(
        service.WorkerConfig(port=port, dispatcher_address=dispatcher, heartbeat_interval_ms=100)
    )
    return server, server._address


def main() -> None:
    import ctypes

    import tensorflow  # noqa: F401 - imported before the first fork

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork():
            continue
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        try:
            server, address = make_server(**json.loads(line))
            print(json.dumps({"pid": os.getpid(), "address": address}), flush=True)
            while server:
                signal.pause()
        except BaseException as error:
            print(json.dumps({"error": repr(error)}), flush=True)
        finally:
            os._exit(1)


if __name__ == "__main__":
    main()
