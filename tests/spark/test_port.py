"""The port of a node, which only the hosts of its cluster reach, whatever its function does."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

NODE = """
import json, os, socket, sys, threading
from pathlib import Path

from tfd_notebook.net import ports as sockets
from tfd_notebook.spark.executor import node_process as body

node, driver = socket.socketpair()
with sockets.reserve_port() as held:
    port = held.getsockname()[1]
    request = {"name": "worker:0", "host": "127.0.0.1", "peers": ["127.0.0.1"]}
    one = body.NodeProcess(request, os.dup(held.fileno()), node, Path())
    body._POLL_SECONDS = float(sys.argv[1])
    threading.Thread(target=one._restrict_port, args=(port,), daemon=True).start()

    def listen():
        sock = socket.socket(socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen()
        return sock

    exec(sys.stdin.read())
os._exit(0)
"""


def in_node(function: str, look: float) -> list[Any]:
    """Run what a node's function does; return the lines that it prints, from JSON."""
    done = subprocess.run(
        [sys.executable, "-c", NODE, str(look)],
        input=function,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_server_of_a_function_is_closed() -> None:
    said = in_node(
        """
heard = driver.makefile()
driver.settimeout(20)
for _ in range(2):
    with listen() as server:
        told = json.loads(heard.readline())
        closed = bool(server.getsockopt(socket.SOL_SOCKET, 26, 1024))  # SO_GET_FILTER
        print(json.dumps([told["open_to"], closed]), flush=True)
""",
        0.01,
    )
    assert said == [["loopback, 127.0.0.1/32", True]] * 2


def test_a_listener_that_is_closed_before_its_filter_ends_no_node() -> None:
    said = in_node(
        """
restrict_port = sockets.restrict_port

def close_later(*args):
    sockets.restrict_port = restrict_port
    probe.close()
    return restrict_port(*args)

sockets.restrict_port = close_later
heard = driver.makefile()
probe = listen()
while probe.fileno() >= 0:
    os.sched_yield()
driver.settimeout(20)
with listen():
    print(heard.readline(), end="", flush=True)
""",
        0.01,
    )
    assert [one["say"] for one in said] == ["port"]
