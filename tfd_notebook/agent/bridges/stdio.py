"""Bridge between this process's pipes and the agent of its host, which it starts on demand.

A remote launcher runs it on a host. The agent outlives it. When the connection to the host breaks,
the next bridge joins the next connection to the same agent.
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

#: Prefix of the line with the handshake.
HANDSHAKE = "TFDHELLO "
_START_SECONDS = 30.0
_MIN_FREE_BYTES = 50_000_000
#: Number of ancestors among which sshd is searched: shells may be in between.
_MAX_PARENTS = 5

#: Runs a module's `main`, or reports the missing package; see `bootstrap`.
_BOOTSTRAP = (
    interpreter.FIRST
    + """
import json
try:
    from tfd_notebook.agent.bridges.{module} import main
except ImportError as error:
    installed = None
    try:
        from importlib.metadata import version
        installed = version("tfd-notebook")
    except Exception:
        pass
    handshake = dict(import_error=str(error), package=installed, python=sys.version.split()[0],
                     executable=sys.executable)
    print("TFDHELLO " + json.dumps(handshake), flush=True)
else:
    main({arguments})
"""
)


def bootstrap(module: str, *arguments: str) -> str:
    """Return code for the host's Python that runs ``main`` of a module in this package."""
    return _BOOTSTRAP.format(module=module, arguments=", ".join(map(repr, arguments)))


def main() -> None:
    """Print the handshake, then copy data in both directions until one side ends.

    The first argument is the agent's id, the second ``start`` or ``reconnect``. A third argument
    ``ssh`` means that the ssh session exists for this process only.
    """
    agent, mode, *launcher = sys.argv[1:]
    by_ssh = launcher == ["ssh"]
    # Other output must not get between the lines.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    # In other sessions the variable belongs to the login of the user.
    handshake = describe(os.environ.get("SSH_CONNECTION", "") if by_ssh else "")
    try:
        peer, started = _connect(agent, start=mode == "start")
    except TfdError as error:
        handshake["error"] = agent_protocol.pack_error(error)
        out.write(HANDSHAKE.encode() + json.dumps(handshake).encode() + b"\n")
        return
    out.write(HANDSHAKE.encode() + json.dumps(handshake).encode() + b"\n")
    inward = threading.Thread(target=_copy_input, args=(peer, started), daemon=True)
    inward.start()
    with contextlib.suppress(OSError):
        while data := peer.recv(1 << 16):
            view = memoryview(data)
            while view:
                view = view[out.write(view) :]
    if by_ssh:
        _end_ssh_session()
    os._exit(0)


def _end_ssh_session() -> None:
    """End the ssh session of this process, with its tunnels.

    The agent has closed the session, perhaps because the client was silent. sshd could keep the ssh
    session for hours, with the ports of its tunnels, which the next session needs.
    """
    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents()[:_MAX_PARENTS]:
            if parent.name().startswith("sshd"):  # of this session; its parent is the listener
                parent.terminate()
                return


def _copy_input(peer: socket.socket, started: subprocess.Popen[bytes] | None) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(0, 1 << 16):
            peer.sendall(data)
            started = None
    if started is not None:
        # No data came after the handshake: the client rejected this host.
        started.terminate()
        started.wait()
    # The connection has ended. From now on the agent counts its grace time.
    os._exit(0)


def describe(connection: str) -> dict[str, Any]:
    """Return the handshake of this host; `connection` is as in ``SSH_CONNECTION``."""
    return {
        "package": VERSION,
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "tensorflow": tensorflow_version(),
        "identity": identity(),
        "connection": connection,
    }


def connect(agent: str, start: bool) -> socket.socket:
    """Return a connection to the agent, which is started if `start` is true."""
    peer, process = _connect(agent, start)
    if process is not None:
        process.returncode = 0  # it outlives this process, which never waits for it
    return peer


def _connect(agent: str, start: bool) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    """Return a connection to the agent, and the agent's process if it was started here."""
    directory = runtime_dir.runtime_dir() / f"agent-{agent}"
    process = _start(agent) if start and not directory.exists() else None
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            peer = unix_socket.connect(directory / SOCKET, 10.0)
            peer.settimeout(None)
            return peer, process
        except OSError as error:
            refused = isinstance(error, (FileNotFoundError, ConnectionRefusedError))
            if not directory.exists() or (refused and not start):
                raise AgentLost(
                    f"the agent {agent} has ended on {socket.gethostname()}",
                    fix="start the cluster again",
                ) from None
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the agent on {socket.gethostname()} did not start within "
                    f"{_START_SECONDS:g} s: {error}",
                    fix=f"see {directory / 'agent.log'} on that host",
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
            f"starting an agent on {socket.gethostname()} failed: {error}",
            fix="free space there, or set TFD_RUNTIME_DIR for its sessions to another directory",
        ) from None


def _check_space(directory: Path) -> None:
    """Raise OSError if the disk of `directory` is nearly full."""
    free = shutil.disk_usage(directory).free
    if free < _MIN_FREE_BYTES:
        raise OSError(f"only {free / 1e6:.0f} MB are free on the disk of {directory}")


def _checked_log(directory: Path) -> Path:
    """Return the path of the agent's log; raise OSError if its directory cannot be written."""
    try:
        work_dir.write_trial(directory)
    except OSError:
        runtime_dir.remove(directory)
        raise
    return directory / "agent.log"
