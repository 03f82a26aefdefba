"""The packet filter on the port of a node: only hosts of the cluster can connect."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

NODE = """
import json, os, socket, sys, threading
from pathlib import Path

from tfd_notebook.net import ports
from tfd_notebook.spark.executor import node_process

node, driver = socket.socketpair()
with ports.reserve_port() as reserved:
    port = reserved.getsockname()[1]
    request = {"name": "worker:0", "host": "127.0.0.1", "peers": ["127.0.0.1"]}
    process = node_process.NodeProcess(request, os.dup(reserved.fileno()), node, Path())
    node_process._POLL_SECONDS = float(sys.argv[1])
    threading.Thread(target=process._restrict_port, args=(port,), daemon=True).start()

    def listen():
        sock = socket.socket(socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen()
        return sock

    exec(sys.stdin.read())
os._exit(0)
"""


def run_in_node(function: str, poll_seconds: float) -> list[Any]:
    """Run code like the function of a node, and return its printed lines, parsed as JSON."""
    completed = subprocess.run(
        [sys.executable, "-c", NODE, str(poll_seconds)],
        input=function,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return [json.loads(line) for line in completed.stdout.splitlines()]


def test_each_server_of_a_function_gets_the_filter() -> None:
    lines = run_in_node(
        """
messages = driver.makefile()
driver.settimeout(60)
for _ in range(2):
    with listen() as server:
        message = json.loads(messages.readline())
        options = (26, socket.SO_BINDTODEVICE)  # 26 is SO_GET_FILTER
        closed = any(server.getsockopt(socket.SOL_SOCKET, option, 1024) for option in options)
        print(json.dumps([message["open_to"], closed]), flush=True)
""",
        0.01,
    )
    assert lines == [["loopback, 127.0.0.1/32", True]] * 2


def test_a_server_closed_before_its_filter_ends_no_node() -> None:
    lines = run_in_node(
        """
restrict_port = ports.restrict_port

def close_later(*args):
    ports.restrict_port = restrict_port
    probe.close()
    return restrict_port(*args)

ports.restrict_port = close_later
messages = driver.makefile()
probe = listen()
while probe.fileno() >= 0:
    os.sched_yield()
driver.settimeout(60)
with listen():
    print(messages.readline(), end="", flush=True)
""",
        0.01,
    )
    assert [list(line) for line in lines] == [["open_to"]]


def test_a_server_without_a_filter_ends_its_node() -> None:
    lines = run_in_node(
        """
import queue
import psutil

def refuse(sock, program):
    raise PermissionError("refused")

def fail(kind):
    raise psutil.AccessDenied()

def end_thread(status):
    statuses.put(status)
    sys.exit()

ports._attach = refuse
psutil.net_connections = fail
statuses = queue.Queue()
end_process, os._exit = os._exit, end_thread
driver.settimeout(60)
with listen():
    print(driver.makefile().readline(), end="", flush=True)
    print(statuses.get(timeout=60), flush=True)
os._exit = end_process
""",
        0.01,
    )
    assert [lines[0]["state"], lines[1]] == ["failed", 1]
