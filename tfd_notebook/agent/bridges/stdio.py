"""Joins this process's pipes to the agent of a host, started on demand.

It is what a remote launcher runs on a host. The agent outlives it: when the way to the host breaks,
another one joins the next way to the same agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from tfd_notebook._version import VERSION
from tfd_notebook.agent import interpreter, work_dir
from tfd_notebook.agent.sessions import SOCKET
from tfd_notebook.errors import AgentLost, LaunchError, TfdError, WorkDirError
from tfd_notebook.net import agent_protocol, runtime_dir, unix_socket
from tfd_notebook.net.host import identity, tensorflow_version

#: Begins the line that says what the host is like.
GREETING = "TFDHELLO "
_START_SECONDS = 30.0
_LEAST_BYTES = 50_000_000
#: How far above this process sshd may be: shells, and what they wrap around a command.
_PARENTS = 5

#: Runs a module's `main`, or says what is missing for that; see `bootstrap`.
_BOOTSTRAP = (
    interpreter.FIRST
    + """
import json
try:
    from tfd_notebook.agent.bridges.{module} import main
except ImportError as error:
    have = None
    try:
        from importlib.metadata import version
        have = version("tfd-notebook")
    except Exception:
        pass
    said = dict(missing=str(error), package=have, python=sys.version.split()[0],
                executable=sys.executable)
    print("TFDHELLO " + json.dumps(said), flush=True)
else:
    main({arguments})
"""
)


def bootstrap(module: str, *arguments: str) -> str:
    """Return code for the host's Python that runs ``main`` of one of the modules here."""
    return _BOOTSTRAP.format(module=module, arguments=", ".join(map(repr, arguments)))


def main() -> None:
    """Greet, then carry lines both ways until one side ends.

    The first argument is the agent's id, the second ``start`` or ``again``. A third one, ``ssh``,
    says that this process is what a session of ssh is for.
    """
    agent, how, *way = sys.argv[1:]
    by_ssh = way == ["ssh"]
    # What others print must not come between the lines.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    # Where no session was made for this, the variable is of whoever is logged in.
    said = describe(os.environ.get("SSH_CONNECTION", "") if by_ssh else "")
    try:
        peer, started = _reach(agent, start=how == "start")
    except TfdError as error:
        said["error"] = agent_protocol.pack_error(error)
        out.write(GREETING.encode() + json.dumps(said).encode() + b"\n")
        return
    out.write(GREETING.encode() + json.dumps(said).encode() + b"\n")
    inward = threading.Thread(target=_carry_in, args=(peer, started), daemon=True)
    inward.start()
    with contextlib.suppress(OSError):
        while data := peer.recv(1 << 16):
            view = memoryview(data)
            while view:
                view = view[out.write(view) :]
    if by_ssh:
        _end_way()
    os._exit(0)


def _end_way() -> None:
    """End the session of ssh that this process runs in, with what it forwards.

    The agent has done with it, perhaps because its other end has been silent: sshd would keep it
    for hours then, and the ports of its tunnels, which the next session needs.
    """
    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents()[:_PARENTS]:
            if parent.name().startswith("sshd"):  # its own session; further up is what listens
                parent.terminate()
                return


def _carry_in(peer: socket.socket, started: subprocess.Popen[bytes] | None) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(0, 1 << 16):
            peer.sendall(data)
            started = None
    if started is not None:
        # Not a word came after the greeting: this host is not as it should be.
        started.terminate()
        started.wait()
    # The way has ended; the agent counts from now on.
    os._exit(0)


def describe(way: str) -> dict[str, Any]:
    """Return what this host says of itself; `way` is how it is reached, as sshd writes it."""
    return {
        "package": VERSION,
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "tensorflow": tensorflow_version(),
        "identity": identity(),
        "way": way,
    }


def reach(agent: str, start: bool) -> socket.socket:
    """Return a connection to the agent, which is started if that is wished."""
    peer, process = _reach(agent, start)
    if process is not None:
        process.returncode = 0  # it outlives this process, which never waits for it
    return peer


def _reach(agent: str, start: bool) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    """Return a connection to the agent, and its process if that was wished and started here."""
    directory = runtime_dir.runtime_dir() / f"agent-{agent}"
    process = _start(agent) if start and not directory.exists() else None
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            peer = unix_socket.connect(directory / SOCKET, 10.0)
            peer.settimeout(None)
            return peer, process
        except OSError as error:
            gone = isinstance(error, (FileNotFoundError, ConnectionRefusedError))
            if not directory.exists() or (gone and not start):
                raise AgentLost(
                    f"the agent {agent} has ended on {socket.gethostname()}",
                    fix="start the cluster again",
                ) from None
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the agent on {socket.gethostname()} did not start within "
                    f"{_START_SECONDS:g} s: {error}",
                    fix=f"see {directory / 'agent.log'} there",
                ) from None
            time.sleep(0.02)


def _start(agent: str) -> subprocess.Popen[bytes]:
    try:
        _check_space(runtime_dir.runtime_dir())
        directory, lock = runtime_dir.new_agent_dir(agent)
        with lock, _checked_log(directory).open("ab") as log:
            return subprocess.Popen(
                interpreter.command("tfd_notebook.agent.agent"),
                env=dict(
                    interpreter.environment(),
                    TFD_AGENT_DIR=json.dumps(str(directory)),
                    TFD_TASK_DEFAULTS=json.dumps(
                        {"directory": os.getcwd(), "path": interpreter.task_path(True)}
                    ),
                    **{runtime_dir.AGENT_VARIABLE: agent},
                ),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock.fileno(),),
                start_new_session=True,
            )
    except OSError as error:
        raise WorkDirError(
            f"{socket.gethostname()} cannot hold what runs there: {error}",
            fix="make room there, or set TFD_RUNTIME_DIR for its sessions to another directory",
        ) from None


def _check_space(directory: Path) -> None:
    """Raise OSError if the disk of `directory` is nearly full."""
    free = shutil.disk_usage(directory).free
    if free < _LEAST_BYTES:
        raise OSError(f"only {free / 1e6:.0f} MB are free on the disk of {directory}")


def _checked_log(directory: Path) -> Path:
    """Return the path of the agent's log; raise OSError if its directory cannot be written."""
    try:
        work_dir.write_trial(directory)
    except OSError:
        runtime_dir.remove(directory)
        raise
    return directory / "agent.log"
