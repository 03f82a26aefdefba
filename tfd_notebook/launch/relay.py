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

from tfd_notebook.errors import LaunchError, TfdError, WorkDirError
from tfd_notebook.launch import processes, protocol, runtime, unixsocket
from tfd_notebook.launch.host import identity, tensorflow_version
from tfd_notebook.launch.sessions import SOCKET
from tfd_notebook.version import VERSION

#: Begins the line that says what the host is like.
GREETING = "TFDHELLO "
_START_SECONDS = 30.0
_LEAST_BYTES = 50_000_000

#: Runs `main`, or says what is missing for that; to be run by the host's Python.
BOOTSTRAP = """
import json, sys
try:
    from tfd_notebook.launch.relay import main
except ImportError as error:
    have = None
    try:
        from importlib.metadata import version
        have = version("tfd-notebook")
    except Exception:
        pass
    said = {"missing": str(error), "package": have, "python": sys.version.split()[0],
            "executable": sys.executable}
    print("TFDHELLO " + json.dumps(said), flush=True)
else:
    main()
"""


def main() -> None:
    """Greet, then carry lines both ways until one side ends.

    The first argument is the agent's id, the second ``start`` or ``again``.
    """
    agent, how = sys.argv[1:3]
    # What others print must not come between the lines.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    said: dict[str, Any] = {
        "package": VERSION,
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "tensorflow": tensorflow_version(),
        "identity": identity(),
        "way": os.environ.get("SSH_CONNECTION", ""),
    }
    try:
        peer = _reach(agent, start=how == "start")
    except TfdError as error:
        said["error"] = protocol.pack_error(error)
        out.write(GREETING.encode() + json.dumps(said).encode() + b"\n")
        return
    out.write(GREETING.encode() + json.dumps(said).encode() + b"\n")
    inward = threading.Thread(target=_carry_in, args=(peer,), daemon=True)
    inward.start()
    with contextlib.suppress(OSError):
        while data := peer.recv(1 << 16):
            view = memoryview(data)
            while view:
                view = view[out.write(view) :]
    os._exit(0)


def _carry_in(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(0, 1 << 16):
            peer.sendall(data)
    # The way has ended; the agent counts from now on.
    os._exit(0)


def _reach(agent: str, start: bool) -> socket.socket:
    """Return a connection to the agent, which is started if that is wished."""
    directory = runtime.runtime_dir() / f"agent-{agent}"
    if start and not directory.exists():
        _start(agent)
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            peer = unixsocket.connect(directory / SOCKET, 10.0)
            peer.settimeout(None)
            return peer
        except OSError as error:
            if not directory.exists() or not start:
                raise LaunchError(
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


def _start(agent: str) -> None:
    try:
        directory = runtime.new_agent_dir(agent)
        _check_room(directory)
        with (directory / "agent.log").open("ab") as log:
            process = subprocess.Popen(
                processes.python("agent"),
                env=dict(
                    os.environ,
                    TFD_AGENT_DIR=json.dumps(str(directory)),
                    TFD_SYS_PATH=json.dumps([os.path.abspath(entry) for entry in sys.path]),
                    **{runtime.AGENT_VARIABLE: agent},
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        process.returncode = 0  # it outlives this process, which never waits for it
    except OSError as error:
        raise WorkDirError(
            f"{socket.gethostname()} cannot hold what runs there: {error}",
            fix="make room there, or set TFD_RUNTIME_DIR for its sessions to another directory",
        ) from None


def _check_room(directory: Path) -> None:
    """Raise OSError where the disk is full, before half of the tasks find that out."""
    trial = directory / "trial"
    try:
        with trial.open("wb") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(directory).free
        if free < _LEAST_BYTES:
            raise OSError(f"only {free / 1e6:.0f} MB are free on the disk of {directory}")
    except OSError:
        runtime.remove(directory)
        raise
    trial.unlink()
