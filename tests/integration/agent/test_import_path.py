"""Started processes run no file from directories that other users can write to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(170)]

#: Replaces a module of the standard library if the working directory is on the import path.
POISON = """
import sys
with open({log!r}, "a") as log:
    log.write(f"{{__file__}} ran in {{sys.orig_argv}}\\n")
raise ImportError("another user's file")
"""

#: The first lines of each program, which set the state of a notebook's kernel. The working
#: directory is first on the import path, which is worse than in IPython.
KERNEL = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import enum, json, os, re, subprocess, time
import cloudpickle
{imports}
sys.path.insert(0, "")
# Each kernel is a fork, so that all of them share the imports.
for variables in {kernels!r}:
    if os.fork() == 0:
        os.environ.update(variables)
        break
    assert os.wait()[1] == 0
else:
    sys.exit()
"""

CLUSTER = (
    "import psutil, tensorflow as tf, tfd_notebook as tfd\n"
    "from tfd_notebook.launchers import local",
    """
def function(value):
    import users_module
    return value + users_module.ONE

with tfd.Cluster(data_workers=1, name="poisoned", preload=["users_module"]) as cluster:
    ds = tf.data.Dataset.range(3).map(lambda x: tf.numpy_function(function, [x], tf.int64))
    print(sorted(int(x) for x in ds.apply(cluster.distribute("dynamic"))))
    for pid in local.agent_pids():
        for entry in json.loads(psutil.Process(pid).environ()["TFD_SYS_PATH"]):
            if os.path.isdir(entry) and os.stat(entry).st_mode & 0o002:
                print("writable:", entry)
""",
)
STDIO_BRIDGE = (
    "from tfd_notebook.launchers import remote",
    """
command = [sys.executable, *remote.join_agent("0123456789ab", start=True)]
bridge = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
handshake = json.loads(bridge.stdout.readline().removeprefix("TFDHELLO "))
assert "error" not in handshake and "import_error" not in handshake, handshake
print("connected")
bridge.communicate(timeout=60)
""",
)
EXECUTOR_BRIDGE = (
    "from tfd_notebook.agent.bridges import stdio",
    """
given = {"address": "127.0.0.1:9", "secret": "00" * 32, "grace": 0, "process": os.getpid()}
given["end_reason"] = "ended"
command = [sys.executable, "-u", "-c", stdio.bootstrap("rendezvous")]
completed = subprocess.run(command, input=json.dumps(given) + "\\n", capture_output=True, text=True)
print(completed.stdout.partition(" ")[0], completed.stderr)
""",
)
SSH = (
    "import asyncssh\nfrom tfd_notebook.launchers import ssh",
    """
client = ssh._Client(users=1)
client._start()
print(client._requests.request("close", 60))
client.close()
""",
)
TUNNEL = (
    "import asyncio, pathlib, psutil, shutil, socket\n"
    "from tfd_notebook.agent import processes; from tfd_notebook.net import runtime_dir as runtime",
    """
directory, lock = runtime.new_agent_dir("0123456789ab")
config, log = directory / "tunnel.conf", directory / "stunnel.log"

async def main():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    tunnel = ["client = yes", f"accept = {port}", "connect = 127.0.0.1:9"]
    config.write_text("\\n".join(["foreground = yes", "pid =", "[tunnel]", *tunnel, ""]))
    request = {"command": ["stunnel", str(config)], "listeners": [listener.fileno()]}
    variables = {"TFD_OWNER": str(os.getpid()), "TFD_STUNNEL": json.dumps(request)}
    started = processes.Processes("0123456789ab", directory)
    pid, ended = started.run("stunnel", variables, log, [listener.fileno()])
    while not ended.done() and not psutil.Process(pid).name().startswith("stunnel"):
        await asyncio.sleep(0.01)
    print("ended" if ended.done() else "stunnel runs", log.read_text() if ended.done() else "")
    if not ended.done():
        os.kill(pid, 9)
    await ended

asyncio.run(main())
shutil.rmtree(directory)
""",
)
SPARK_NODE = (
    "from tfd_notebook.spark.executor import executor, fork_server",
    """
print(fork_server.fork(executor.on_driver(), dict(os.environ), {}, [0, 2]) > 0)
""",
)
TENSORBOARD = (
    "import pathlib, queue, tempfile\nfrom tfd_notebook.spark.executor import tensorboard",
    """
messages = queue.Queue()
with tempfile.TemporaryDirectory() as temporary:
    request = {"tensorboard": "logs", "host": "127.0.0.1", "directory": os.getcwd()}
    board = tensorboard.start(request, pathlib.Path(temporary), messages.put)
    first = messages.get(timeout=120)
    print(first["board"][:17], first.get("no_board", ""))
    board.end()
    messages.get(timeout=60)
""",
)
LAB = (
    "import asyncio\nfrom tfd_notebook.ui import jupyter_server",
    """
print(asyncio.run(jupyter_server.tfd("list", "--json", limit=100)))
""",
)


@pytest.fixture
def poisoned(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return a working and a temporary directory with such files, and the path of their log."""
    log = tmp_path / "ran"
    for name in ("working", "temporary"):
        directory = tmp_path / name
        directory.mkdir()
        directory.chmod(0o1777)
        for module in ("json", "re", "enum", "psutil", "cloudpickle"):
            (directory / f"{module}.py").write_text(POISON.format(log=str(log)))
    (tmp_path / "working" / "users_module.py").write_text("ONE = 1\n")
    return tmp_path / "working", tmp_path / "temporary", log


#: The variables of a kernel.
FORK, SPAWN = {"TFD_START_METHOD": "fork"}, {"TFD_START_METHOD": "spawn"}
#: An empty entry means the working directory.
EMPTY_ENTRY = {"PYTHONPATH": os.pathsep}


@pytest.mark.parametrize(
    ("program", "kernels", "printed"),
    [
        pytest.param(CLUSTER, [FORK, SPAWN, EMPTY_ENTRY], "[1, 2, 3]", id="agent-task"),
        pytest.param(STDIO_BRIDGE, [FORK, EMPTY_ENTRY], "connected", id="stdio-bridge"),
        pytest.param(EXECUTOR_BRIDGE, [FORK, EMPTY_ENTRY], "TFDHELLO", id="spark-executor-bridge"),
        pytest.param(SSH, [FORK], "None", id="ssh-client"),
        pytest.param(TUNNEL, [FORK], "stunnel runs", id="tunnel", marks=pytest.mark.root),
        pytest.param(SPARK_NODE, [FORK], "True", id="spark-node"),
        pytest.param(TENSORBOARD, [FORK], "http://127.0.0.1:", id="tensorboard"),
        pytest.param(LAB, [FORK], "[]", id="jupyter-server"),
    ],
)
def test_writable_directories_are_not_on_the_import_path(
    poisoned: tuple[Path, Path, Path],
    program: tuple[str, str],
    kernels: list[dict[str, str]],
    printed: str,
) -> None:
    working, temporary, log = poisoned
    imports, code = program
    completed = subprocess.run(
        [sys.executable, "-c", KERNEL.format(imports=imports, kernels=kernels) + code],
        cwd=working,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=160,
    )
    assert not log.exists(), log.read_text()
    assert completed.returncode == 0, completed.stderr
    lines = [line for line in completed.stdout.splitlines() if line]
    assert len(lines) == len(kernels), completed.stdout
    for line in lines:
        assert f"{line} ".startswith(f"{printed} "), completed.stdout
