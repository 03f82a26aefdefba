"""A task costs a fork: it shares the imports of the fork server and has little own memory."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

#: Imports TensorFlow as a fork server does, forks tasks, and prints what each of them added.
PROGRAM = """
import importlib.machinery, json, os, socket, sys

find_spec = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = lambda name, *arguments: (
    None if name in {missing!r} else find_spec(name, *arguments)
)

from tfd_notebook.agent import fork_server, task_process
from tfd_notebook.net import ports
import psutil

imported = fork_server.import_tensorflow("tfd_notebook.agent.task_process")
fork_server.check_import(imported, "", "")
before = set(sys.modules)
request = {{
    "name": "task:0", "parent": os.getpid(), "directory": os.getcwd(), "path": sys.path,
    "defaults": {{}}, "environment": dict(os.environ), "preload": [],
}}

def call(lines, method, **arguments):
    lines.write(json.dumps({{"id": 1, "method": method, "arguments": arguments}}) + "\\n")
    lines.flush()
    reply = json.loads(lines.readline())
    assert reply.get("ok"), reply

def start(role, **settings):
    with ports.reserve_port() as reserved:
        port = reserved.getsockname()[1]
        agent, task = socket.socketpair()
        read, write = os.pipe()
        if not os.fork():
            agent.close()
            task_process.run(request, task, os.dup(2))  # returns when the agent's end is closed
            uss = psutil.Process().memory_full_info().uss
            os.write(write, json.dumps([sorted(set(sys.modules) - before), uss]).encode())
            os._exit(0)
        os.close(write)
        task.close()
        lines = agent.makefile("rw")
        call(lines, "inspect")
        call(lines, "start", role=role, port=port, host="127.0.0.1", allow=[], settings=settings)
        call(lines, "stats")
    return agent, read, port

def end(agent, read):
    agent.shutdown(socket.SHUT_WR)
    with os.fdopen(read) as result:
        print(result.read())
    os.wait()

*dispatcher, port = start("dispatcher")
*worker, _ = start("data_worker", dispatcher_address=f"127.0.0.1:{{port}}")
end(*worker)
end(*dispatcher)
"""
#: The modules that a task may import itself.
EXPECTED = {"tensorflow.data", "tensorflow.data.experimental"}
#: Keras imports the first two if they are installed, and pandas imports the third.
OPTIONAL = ("sklearn", "pandas", "pyarrow")


@pytest.mark.parametrize("missing", [(), OPTIONAL], ids=["installed", "missing"])
def test_fork_imports_nothing(missing: tuple[str, ...]) -> None:
    assert all(map(importlib.util.find_spec, OPTIONAL))
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(missing=missing)],
        # As in a fork server: OpenBLAS would start threads at its import.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr
    lines = completed.stdout.splitlines()
    assert len(lines) == 2  # of a data worker and a dispatcher
    for line in lines:
        imported, private = json.loads(line)
        assert set(imported) <= EXPECTED
        assert private < 60e6
