"""What a task of Spark does to have something started beside its executor.

It is sent there as it stands, and imports Python's own and pyspark only: what is missing there is
said by what it starts.
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

#: How the variables begin by which Spark hands secrets to its own processes.
SECRETS = (
    "PYTHON_WORKER_FACTORY",
    "PYSPARK_GATEWAY",
    "_SPARK_AUTH_SECRET",
    "SPARK_AUTH_SOCKET",
)


def starter(code: str, given: dict[str, Any], seconds: float) -> Callable[..., Iterator[Any]]:
    """Return what the tasks of a barrier stage run: one process beside each executor.

    Parameters
    ----------
    code : str
        What Python is to run; it answers with a line.
    given : dict
        JSON values for its standard input; nothing of it is on a command line.
    seconds : float
        For the answer.
    """

    def start(_: Iterable[Any]) -> Iterator[dict[str, Any]]:
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        mine = executor()
        said = [json.loads(one) for one in context.allGather(json.dumps(mine))]
        if mine in said[: context.partitionId()]:
            return  # another task of the same executor does it
        host = context.getTaskInfos()[context.partitionId()].address.partition(":")[0]
        yield {**mine, "host": host or mine["host"], "line": started(mine["jvm"])}

    def executor() -> dict[str, Any]:
        """Return which executor this is: Java's process among those above this one."""
        pid = os.getpid()
        while pid > 1:
            with open(f"/proc/{pid}/stat") as file:
                rest = file.read().rpartition(")")[2].split()
            with open(f"/proc/{pid}/comm") as file:
                if file.read().strip() == "java":
                    break
            pid = int(rest[1])
        with open(f"/proc/{pid}/cmdline") as file:
            words = file.read().split("\0")
        name = "driver"
        if "--executor-id" in words:
            name = words[words.index("--executor-id") + 1]
        return {"host": os.uname().nodename, "executor": name, "jvm": pid}

    def started(jvm: int) -> str:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(SECRETS)}
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin, process.stdout:
            process.stdin.write(json.dumps({**given, "jvm": jvm}).encode() + b"\n")
            process.stdin.flush()
            line = b""
            deadline = time.monotonic() + seconds
            # select() would fail with descriptors above 1023.
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                while not line.endswith(b"\n") and (left := deadline - time.monotonic()) > 0:
                    if selector.select(left):
                        if not (data := os.read(process.stdout.fileno(), 1 << 16)):
                            break
                        line += data
        process.returncode = 0  # it outlives this task, which never waits for it
        return line.decode(errors="replace")

    return start
