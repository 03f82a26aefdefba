"""Joins a kernel's channels to the agent of its host, started on demand.

It is what the ``jupyter`` launcher runs in a kernel elsewhere: what arrives in messages of a comm
goes to the agent, and what the agent says into messages. It ends the kernel when the agent has no
more to say, so that none is left behind by whoever went away.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import ssl
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from tfd_notebook.agent.bridges import stdio
from tfd_notebook.errors import TfdError
from tfd_notebook.net import agent_protocol
from tfd_notebook.net.host import address_towards

TARGET = "tfd_notebook-agent"
LEASE = "tfd_notebook-lease"
#: Bytes that may be under way before the other end says what it has read.
WINDOW_BYTES = 1_000_000
_CHUNK_BYTES = 1 << 16
_ACK_SECONDS = 60.0
_LEAVE_SECONDS = 10.0
#: What counts for the server as use of this kernel comes this often, in seconds.
_ALIVE_SECONDS = 5.0
_CULL = re.compile(r"""^[^#\n]*\bcull_idle_timeout\b["']?\s*[=:]\s*(\d+)""", re.MULTILINE)
_VARIABLES = ("JPY_PARENT_PID", "JPY_SESSION_NAME", "JPY_INTERRUPT_EVENT")

_joints: list[CommSocketBridge] = []
_leases: list[_Lease] = []


def main(agent: str, how: str, towards: str) -> None:
    """Greet, then carry lines both ways from a thread.

    Parameters
    ----------
    agent : str
        Its id.
    how : {"start", "again"}
    towards : str
        Address of whoever asks; this host's own is chosen towards it.
    """
    for name in _VARIABLES:  # they are this kernel's, and not the tasks'
        os.environ.pop(name, None)
    with contextlib.suppress(OSError):
        towards = f"{towards} 0 {address_towards(towards)} 0"
    said = {**stdio.describe(towards), "culls": cull_seconds()}
    try:
        peer = stdio.reach(agent, start=how == "start")
    except TfdError as error:
        said["error"] = agent_protocol.pack_error(error)
        _greet(said)
        return
    # Its end is told by a message, not by this name's.
    _joints.append(
        CommSocketBridge(peer, max(0.5, min(_ALIVE_SECONDS, (said["culls"] or 60.0) / 4)))
    )
    _greet(said)


def _greet(said: dict[str, Any]) -> None:
    sys.stdout.write(stdio.GREETING + json.dumps(said) + "\n")
    sys.stdout.flush()


class CommSocketBridge:
    """A comm and a socket, joined."""

    def __init__(self, peer: socket.socket, alive_seconds: float) -> None:
        import comm

        self._peer = peer
        self._alive_seconds = alive_seconds
        self._credit = WINDOW_BYTES
        self._more = threading.Condition()
        self._farewell: dict[str, Any] = {}
        self._ended = threading.Event()
        self._comm = comm.create_comm(target_name=TARGET)
        self._comm.on_msg(self._take)
        self._comm.on_close(lambda _: self._end())
        for work in (self._carry_out, self._stay_alive):
            threading.Thread(target=work, name="tfd-joint", daemon=True).start()

    def _take(self, message: dict[str, Any]) -> None:
        data = message["content"]["data"]
        if "text" in data:
            try:
                self._peer.sendall(data["text"].encode())
            except OSError:
                self._end()
        elif "read" in data:
            with self._more:
                self._credit += int(data["read"])
                self._more.notify_all()
        elif "farewell" in data:
            self._farewell = data["farewell"]

    def _carry_out(self) -> None:
        rest = b""
        with contextlib.suppress(OSError):
            while data := self._peer.recv(_CHUNK_BYTES):
                # Whole lines, each of which is JSON in ASCII.
                whole, newline, rest_of = (rest + data).rpartition(b"\n")
                rest = rest_of
                if newline and not self._tell((whole + newline).decode()):
                    break
        self._end()
        self._leave()

    def _tell(self, text: str) -> bool:
        """Send text when there is room for it; return whether there was."""
        with self._more:
            if not self._more.wait_for(lambda: self._credit > 0, _ACK_SECONDS):
                return False
            self._credit -= len(text)
        self._comm.send({"text": text})
        return True

    def _stay_alive(self) -> None:
        """Be in use: a kernel whose tasks work is not idle, though it looks so to a server."""
        while not self._ended.wait(self._alive_seconds):
            self._comm.send({"alive": time.time()})

    def _end(self) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)

    def _leave(self) -> None:
        with contextlib.suppress(Exception):
            self._comm.close()
        if self._farewell:
            _end_this_kernel(**self._farewell)


class _Lease:
    """Ends this kernel when no source runs and nobody has been here for a while."""

    def __init__(self, seconds: float) -> None:
        import comm

        self._seconds = seconds
        self._heard = time.monotonic()
        self._farewell: dict[str, Any] = {}
        self._busy = False
        events = sys.modules["IPython"].get_ipython().events
        events.register("pre_execute", lambda: self._run(True))
        events.register("post_execute", lambda: self._run(False))
        self._comm = comm.create_comm(target_name=LEASE)
        self._comm.on_msg(self._take)
        threading.Thread(target=self._watch, name="tfd-lease", daemon=True).start()

    def _take(self, message: dict[str, Any]) -> None:
        self._heard = time.monotonic()
        self._farewell = message["content"]["data"].get("farewell", self._farewell)

    def _run(self, busy: bool) -> None:
        self._heard, self._busy = time.monotonic(), busy

    def _watch(self) -> None:
        while True:
            time.sleep(min(self._seconds / 4, _ALIVE_SECONDS))
            silent = time.monotonic() - self._heard
            if silent > self._seconds and self._farewell and not self._busy:
                _end_this_kernel(**self._farewell)
                return


def lease(seconds: float) -> None:
    """Have this kernel end when nobody has been heard for so long."""
    _leases.append(_Lease(seconds))


def _end_this_kernel(url: str, headers: dict[str, str], ca: str | None) -> None:
    """Have the server end this kernel: it would start one that ended itself again."""
    request = urllib.request.Request(url, headers=headers, method="DELETE")
    handlers: list[Any] = [urllib.request.ProxyHandler({})]
    if url.startswith("https:"):
        context = ssl.create_default_context(cadata=ca)
        handlers.append(urllib.request.HTTPSHandler(context=context))
    with contextlib.suppress(OSError):
        urllib.request.build_opener(*handlers).open(request, timeout=_LEAVE_SECONDS)


def cull_seconds() -> float | None:
    """Return after how many idle seconds this kernel's server ends a kernel; None: not known to.

    It is read from the server's command line and from its files, which are not executed.
    """
    found: list[float] = []
    words: list[str] = []
    with contextlib.suppress(psutil.Error):
        words = psutil.Process(os.getppid()).cmdline()
    files = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, is_pair, value = word.partition("=")
        if name == "--config":
            files.append(Path(value if is_pair else following))
        elif name.endswith(".cull_idle_timeout"):
            text = value if is_pair else following
            found += [float(text)] if text.isdecimal() else []
    files += [
        Path(directory, f"{name}.{ending}")
        for directory in _config_directories()
        for name in ("jupyter_config", "jupyter_server_config", "jupyter_kernel_gateway_config")
        for ending in ("py", "json")
    ]
    for file in files:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found += [float(seconds) for seconds in _CULL.findall(file.read_text())]
    timeouts = [seconds for seconds in found if seconds > 0]
    return min(timeouts) if timeouts else None


def _config_directories() -> list[str]:
    try:
        from jupyter_core.paths import jupyter_config_path
    except ImportError:
        return []
    return [*jupyter_config_path(), os.path.join(sys.prefix, "etc", "jupyter")]
