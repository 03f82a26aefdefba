"""TensorFlow servers in separate processes, forked from a process that has imported TensorFlow.

For tests of the parts below the launchers, so this module does not use tfd_notebook. Tests load it
with ``runpy.run_path``. As a script, it is the process that forks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any


class Tasks:
    """Context manager that starts servers, and ends them at its exit."""

    def __enter__(self) -> Tasks:
        self._forks = subprocess.Popen(
            [sys.executable, __file__],
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

    def start(self, role: str, port: int, **settings: Any) -> int:
        """Start a server, wait until its constructor has returned, and return its pid."""
        self._forks.stdin.write(json.dumps({"role": role, "port": port, **settings}) + "\n")
        answer = json.loads(self._forks.stdout.readline())
        assert "pid" in answer, answer
        return answer["pid"]

    def dispatcher(self, port: int, work_dir: str = "") -> int:
        return self.start("dispatcher", port, work_dir=work_dir)

    def worker(self, port: int, dispatcher: int) -> int:
        return self.start("worker", port, dispatcher=dispatcher)


def make_server(role: str, port: int, work_dir: str = "", dispatcher: int = 0) -> object:
    import tensorflow as tf

    service = tf.data.experimental.service
    if role == "dispatcher":
        return service.DispatchServer(
            service.DispatcherConfig(
                port=port, work_dir=work_dir or None, fault_tolerant_mode=bool(work_dir)
            )
        )
    if role == "worker":
        return service.WorkerServer(
            service.WorkerConfig(
                port=port,
                dispatcher_address=f"localhost:{dispatcher}",
                worker_address=f"localhost:{port}",
                heartbeat_interval_ms=200,
            )
        )
    return tf.distribute.Server({role: [f"localhost:{port}"]}, job_name=role, task_index=0)


def main() -> None:
    import ctypes

    import tensorflow  # noqa: F401 - imported before the first fork

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork():
            continue
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        try:
            server = make_server(**json.loads(line))
            print(json.dumps({"pid": os.getpid()}), flush=True)
            while server:
                signal.pause()
        except BaseException as error:
            print(json.dumps({"error": repr(error)}), flush=True)
        finally:
            os._exit(1)


if __name__ == "__main__":
    main()
