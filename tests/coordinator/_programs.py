"""Programs that share one import of TensorFlow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Runs each requested program in a fork of itself, and prints its pid and its exit status.
#: Importing TensorFlow initializes no device and starts no server, so a fork behaves like a new
#: process.
_SERVER = """
import json, os, sys
for request in map(json.loads, sys.stdin):
    import tensorflow
    pid = os.fork()
    if pid == 0:
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
os.environ.clear()
os.environ.update(request["environment"])
for target, path in enumerate((os.devnull, *request["output"])):
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.dup2(descriptor, target)
    os.close(descriptor)
sys.argv = ["-c", *request["arguments"]]
exec(compile(request["code"], "<string>", "exec"), globals())
"""


class Programs:
    """Runs programs that import TensorFlow, each in a separate process."""

    def __init__(self, server: subprocess.Popen[str], directory: Path) -> None:
        self._server = server
        self._output = [directory / "stdout", directory / "stderr"]

    def run(
        self, code: str, *arguments: str, timeout: float, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `code`, and return its exit status and its output."""
        request = {
            "code": code,
            "arguments": arguments,
            "environment": dict(os.environ) if env is None else env,
            "output": [str(path) for path in self._output],
        }
        for path in self._output:
            path.unlink(missing_ok=True)
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        pid = int(self._server.stdout.readline())
        timer = threading.Timer(timeout, os.kill, (pid, signal.SIGKILL))
        timer.start()
        try:
            status = int(self._server.stdout.readline())
        except BaseException:  # a timeout of pytest, or Ctrl-C
            os.kill(pid, signal.SIGKILL)
            # The next program would read this status as its pid.
            self._server.stdout.readline()
            raise
        finally:
            timer.cancel()
            timer.join()
        return subprocess.CompletedProcess(code, status, *(p.read_text() for p in self._output))


def logging_environment() -> dict[str, str]:
    """Return the environment without the level that hides TensorFlow's log."""
    return {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}


@contextmanager
def serve(directory: Path) -> Iterator[Programs]:
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        # The level applies from TensorFlow's first log line, in the program.
        env=logging_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        yield Programs(server, directory)
