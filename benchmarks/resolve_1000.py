"""How long does a look at 1,000 tasks take, some of which are gone or silent?

Three real servers listen at all of 127.0.0.0/8, so that each has hundreds of addresses. Of 1,000
tasks 850 are such, at 50 nothing listens, and 100 accept connections and never answer. A: one look
of `tfd.resolve`, every task told right. B: the same tasks asked by 32 threads, which wait for those
that are silent in turns, as `Resolver.check` does. In seconds; less than 5 is promised.
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

#: Takes every connection, as long as its other end keeps it, and never says a word.
MUTE = """
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
def mute() -> Iterator[int]:
    """Have a server that never answers, in a process of its own; yields its port."""
    process = subprocess.Popen([sys.executable, "-c", MUTE], stdout=subprocess.PIPE, text=True)
    try:
        if not process.stdout or not (port := process.stdout.readline()):
            sys.exit("the silent server did not start")
        yield int(port)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def servers() -> Iterator[list[int]]:
    """Have real servers in processes of their own; yields their ports."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(SERVERS)]
        for one in held:
            one.bind(("", 0))
        ports = [one.getsockname()[1] for one in held]
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
            # A server cannot be stopped, only ended.
            process.kill()
            process.communicate()


def addresses(ports: list[int], silent: int, refused: int) -> list[str]:
    """Return the addresses of all tasks, those that answer and those that do not mixed."""
    found = []
    for number in range(TASKS):
        port = ports[number % len(ports)]
        if number % 10 == 3:
            port = silent
        elif number % 20 == 7:
            port = refused
        found.append(f"127.1.{number // 250}.{number % 250 + 1}:{port}")
    return found


def looked(found: tfd.Resolution) -> float:
    """Return the seconds of one look, in which every task is told right."""
    began = time.perf_counter()
    counts = found.look().counts
    seconds = time.perf_counter() - began
    # Each server takes itself for worker:0, and all are asked as many.
    answered = counts.get("alive", 0) + counts.get("mismatch", 0)
    if (answered, counts.get("refused"), counts.get("hung")) != (
        TASKS - REFUSED - SILENT,
        REFUSED,
        SILENT,
    ):
        sys.exit(f"told wrong: {counts}")
    return seconds


def asked(at: list[str]) -> float:
    """Return the seconds of asking each, 32 at a time."""
    began = time.perf_counter()
    probe_many(at)
    return time.perf_counter() - began


def main() -> None:
    options = _pairs.arguments(__doc__)
    rounds = 3 if options.quick else 15
    with servers() as ports, mute() as silent, socket.socket() as refused:
        refused.bind(("", 0))  # and never listens
        at = addresses(ports, silent, refused.getsockname()[1])
        found = tfd.resolve({"worker": at})
        figures = _pairs.interleave(
            {"ours": lambda: looked(found), "theirs": lambda: asked(at)}, rounds
        )
    worst = max(figures["ours"])
    print(f"{TASKS:,} tasks, {REFUSED} gone and {SILENT} silent: {worst:.2f} s at worst")
    if worst > LIMIT:
        sys.exit(f"{worst:.2f} s is more than {LIMIT:g} s")
    result = _pairs.compare(figures["ours"], figures["theirs"])
    print(result)
    _pairs.report("resolve_1000", result, "seconds")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="tfd-") as directory:
        os.environ["TFD_RUNTIME_DIR"] = directory
        main()
