"""Time to probe 1,000 tasks, of which some refuse connections or do not answer.

Three TensorFlow servers listen on all of 127.0.0.0/8, so that each has hundreds of addresses. Of
1,000 tasks, 850 are such servers, 50 refuse connections, and 100 accept connections but never
answer. A is one probe of `tfd.resolve`, with the right state of every task. B is the probe of
`Resolver.check`, with 32 threads, which wait for the silent tasks one after another. In seconds; A
is limited to 5 s.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import _pairs

import tfd_notebook as tfd
from tfd_notebook.net.probe import probe_many

SERVERS, TASKS, REFUSED, SILENT = 3, 1_000, 50, 100
LIMIT = 5.0

SERVER = """
import sys
import tensorflow as tf

server = tf.distribute.Server({"worker": ["localhost:" + sys.argv[1]]}, "worker", 0)
print("up", flush=True)
sys.stdin.read()
"""

#: Accepts every connection until the client closes it, and sends nothing.
SILENT_SERVER = """
import asyncio

async def take(reader, writer):
    try:
        await reader.read()
    except OSError:
        pass
    writer.close()

async def main():
    server = await asyncio.start_server(take, "0.0.0.0", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@contextmanager
def silent_server() -> Iterator[int]:
    """Run a server that never answers in a separate process; yield its port."""
    process = subprocess.Popen(
        [sys.executable, "-c", SILENT_SERVER], stdout=subprocess.PIPE, text=True
    )
    try:
        if not process.stdout or not (port := process.stdout.readline()):
            sys.exit("the silent server did not start")
        yield int(port)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def servers() -> Iterator[list[int]]:
    """Run TensorFlow servers in separate processes; yield their ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(SERVERS)]
        for reserved in sockets:
            reserved.bind(("", 0))
        ports = [reserved.getsockname()[1] for reserved in sockets]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SERVER, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
        )
        for port in ports
    ]
    try:
        for process in processes:
            if not process.stdout or process.stdout.readline() != "up\n":
                sys.exit("a server did not start")
        yield ports
    finally:
        for process in processes:
            # TensorFlow's Server has no method to stop it.
            process.kill()
            process.communicate()


def addresses(ports: list[int], silent: int, refused: int) -> list[str]:
    """Return the addresses of all tasks, in which responding and other tasks alternate."""
    addresses = []
    for number in range(TASKS):
        port = ports[number % len(ports)]
        if number % 10 == 3:
            port = silent
        elif number % 20 == 7:
            port = refused
        addresses.append(f"127.1.{number // 250}.{number % 250 + 1}:{port}")
    return addresses


def resolution_seconds(resolution: tfd.Resolution) -> float:
    """Return the seconds of one probe by a `Resolution`, after a check of its counts."""
    began = time.perf_counter()
    counts = resolution.probe().counts
    seconds = time.perf_counter() - began
    # Each server reports worker:0, so that most of its addresses are a mismatch.
    answered = counts.get("alive", 0) + counts.get("mismatch", 0)
    if (answered, counts.get("refused"), counts.get("hung")) != (
        TASKS - REFUSED - SILENT,
        REFUSED,
        SILENT,
    ):
        sys.exit(f"wrong counts: {counts}")
    return seconds


def probe_seconds(addresses: list[str]) -> float:
    """Return the seconds for probing all addresses, 32 at a time."""
    began = time.perf_counter()
    probe_many(addresses)
    return time.perf_counter() - began


def main() -> None:
    options = _pairs.arguments(__doc__)
    rounds = 3 if options.quick else 15
    with servers() as ports, silent_server() as silent, socket.socket() as refused:
        refused.bind(("", 0))  # and never listens
        tasks = addresses(ports, silent, refused.getsockname()[1])
        resolution = tfd.resolve({"worker": tasks})
        figures = _pairs.interleave(
            {
                "ours": lambda: resolution_seconds(resolution),
                "theirs": lambda: probe_seconds(tasks),
            },
            rounds,
        )
    worst = max(figures["ours"])
    print(f"{TASKS:,} tasks, {REFUSED} refused and {SILENT} silent: {worst:.2f} s at worst")
    if worst > LIMIT:
        sys.exit(f"{worst:.2f} s is more than {LIMIT:g} s")
    result = _pairs.compare(figures["ours"], figures["theirs"])
    print(result)
    _pairs.report("resolve_1000", result, "seconds")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="tfd-") as directory:
        os.environ["TFD_RUNTIME_DIR"] = directory
        main()
