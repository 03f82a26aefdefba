"""The function of a Spark task that starts a process on the executor's host.

It is pickled by value, and imports only the standard library and pyspark. The started process
reports missing packages.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

#: Prefixes of variables with which Spark passes secrets to its own processes.
SECRETS = (
    "PYTHON_WORKER_FACTORY",
    "PYSPARK_GATEWAY",
    "_SPARK_AUTH_SECRET",
    "SPARK_AUTH_SOCKET",
)

#: An engine may end the children of its workers, so the process that replies is not one of them.
_DETACH = "import os\nif os.fork():\n    os._exit(0)\n"


def executor() -> dict[str, Any]:
    """Return id and pid of this Python worker's executor, a Java process among its ancestors."""
    pid = os.getpid()
    while pid:
        with open(f"/proc/{pid}/comm") as file:
            is_java = file.read().strip() == "java"
        if is_java:
            with open(f"/proc/{pid}/cmdline") as file:
                arguments = file.read().split("\0")
            name = "driver"  # Spark runs in one process
            if "--executor-id" in arguments:
                name = arguments[arguments.index("--executor-id") + 1]
            return {"host": os.uname().nodename, "executor": name, "process": pid}
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    raise RuntimeError(f"process {os.getpid()} was not started by a Spark executor")


def starter(code: str, given: dict[str, Any], seconds: float) -> Callable[..., Iterator[Any]]:
    """Return the function of the tasks of a barrier stage: start one process per executor.

    Parameters
    ----------
    code : str
        Code for Python, which prints one line as its reply.
    given : dict
        JSON values for its standard input. They never appear on a command line.
    seconds : float
        Timeout for the reply.
    """

    def start(_: Iterable[Any]) -> Iterator[dict[str, Any]]:
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        local = executor()
        executors = [json.loads(text) for text in context.allGather(json.dumps(local))]
        if local in executors[: context.partitionId()]:
            return  # an earlier task of the same executor starts the process
        host = context.getTaskInfos()[context.partitionId()].address.partition(":")[0]
        line = start_process(code, {**given, "process": local["process"]}, seconds)
        yield {**local, "host": host or local["host"], "line": line}

    return start


def start_process(code: str, given: dict[str, Any], seconds: float) -> str:
    """Start Python on this host, detached from this process, and return its reply.

    Parameters
    ----------
    code : str
        Code for Python, which prints one line as its reply.
    given : dict
        JSON values for its standard input.
    seconds : float
        Timeout for the reply.

    Returns
    -------
    str
        Empty or incomplete if the process ended or did not reply in time.
    """
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", _DETACH + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if not k.startswith(SECRETS)},
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    line = b""
    with process.stdin, process.stdout:
        process.stdin.write(json.dumps(given).encode() + b"\n")
        process.stdin.flush()
        deadline = time.monotonic() + seconds
        # select() fails with descriptors above 1023.
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n") and (left := deadline - time.monotonic()) > 0:
                if selector.select(left):
                    if not (data := os.read(process.stdout.fileno(), 1 << 16)):
                        break
                    line += data
    try:
        process.wait(max(0.0, deadline - time.monotonic()) + 1.0)
    except subprocess.TimeoutExpired:
        process.kill()
    return line.decode(errors="replace")
