"""Bridge between a kernel's comm and the agent of its host, which it starts on demand.

The ``jupyter`` launcher runs it in a kernel on another host. Comm messages go to the agent, and the
agent's output goes into comm messages. The bridge ends the kernel when the agent's session ends, so
that disconnected clients leave no kernel behind.
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
from tfd_notebook.net import agent_protocol, reconnect
from tfd_notebook.net.host import address_towards

TARGET = "tfd_notebook-agent"
LEASE = "tfd_notebook-lease"
#: Bytes that may be sent before the other end acknowledges them.
WINDOW_BYTES = 1_000_000
_CHUNK_BYTES = 1 << 16
_ACK_SECONDS = 60.0
_LEAVE_SECONDS = 10.0
_CULL = re.compile(r"""^[^#\n]*\bcull_idle_timeout\b["']?\s*[=:]\s*(\d+)""", re.MULTILINE)
_VARIABLES = ("JPY_PARENT_PID", "JPY_SESSION_NAME", "JPY_INTERRUPT_EVENT")

_bridges: list[CommSocketBridge] = []
_leases: list[_Lease] = []


def main(agent: str, mode: str, towards: str) -> None:
    """Print the handshake, then copy data in both directions in threads.

    Parameters
    ----------
    agent : str
        Id of the agent.
    mode : {"start", "reconnect"}
        Whether to start the agent, or to reconnect to it.
    towards : str
        Address of the client. It selects the address of this host.
    """
    for name in _VARIABLES:  # they belong to this kernel, and tasks must not inherit them
        os.environ.pop(name, None)
    with contextlib.suppress(OSError):
        towards = f"{towards} 0 {address_towards(towards)} 0"
    handshake = {**stdio.describe(towards), "cull_seconds": cull_seconds()}
    try:
        peer = stdio.connect(agent, start=mode == "start")
    except TfdError as error:
        handshake["error"] = agent_protocol.pack_error(error)
        _print_handshake(handshake)
        return
    # A reference: the bridge ends with a message, not with this function.
    _bridges.append(
        CommSocketBridge(
            peer,
            max(0.5, min(reconnect.HEARTBEAT_SECONDS, (handshake["cull_seconds"] or 60.0) / 4)),
        )
    )
    _print_handshake(handshake)


def _print_handshake(handshake: dict[str, Any]) -> None:
    sys.stdout.write(stdio.HANDSHAKE + json.dumps(handshake) + "\n")
    sys.stdout.flush()


class CommSocketBridge:
    """A bridge between a comm and a socket."""

    def __init__(self, peer: socket.socket, alive_seconds: float) -> None:
        import comm

        self._peer = peer
        self._credit = WINDOW_BYTES
        self._window_changed = threading.Condition()
        self._end_request: dict[str, Any] = {}
        self._ended = threading.Event()
        self._comm = comm.create_comm(target_name=TARGET)
        self._comm.on_msg(self._handle_message)
        self._comm.on_close(lambda _: self._end())
        threading.Thread(target=self._copy_output, name="tfd-bridge", daemon=True).start()
        # Messages keep the server from culling this kernel and its tasks.
        reconnect.send_heartbeats(
            lambda: self._comm.send({"active": time.time()}), self._ended, alive_seconds
        )

    def _handle_message(self, message: dict[str, Any]) -> None:
        data = message["content"]["data"]
        if "text" in data:
            try:
                self._peer.sendall(data["text"].encode())
            except OSError:
                self._end()
        elif "acknowledged" in data:
            with self._window_changed:
                self._credit += int(data["acknowledged"])
                self._window_changed.notify_all()
        elif "end_request" in data:
            self._end_request = data["end_request"]

    def _copy_output(self) -> None:
        rest = b""
        with contextlib.suppress(OSError):
            while data := self._peer.recv(_CHUNK_BYTES):
                # Forward complete lines only, each of which is JSON in ASCII.
                lines, newline, rest_of = (rest + data).rpartition(b"\n")
                rest = rest_of
                if newline and not self._send((lines + newline).decode()):
                    break
        self._end()
        self._leave()

    def _send(self, text: str) -> bool:
        """Send text once the window has room; return False after a timeout."""
        with self._window_changed:
            if not self._window_changed.wait_for(lambda: self._credit > 0, _ACK_SECONDS):
                return False
            self._credit -= len(text)
        self._comm.send({"text": text})
        return True

    def _end(self) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)

    def _leave(self) -> None:
        with contextlib.suppress(Exception):
            self._comm.close()
        if self._end_request:
            _end_this_kernel(**self._end_request)


class _Lease:
    """Ends this kernel after some time without a message or running code."""

    def __init__(self, seconds: float) -> None:
        import comm

        self._seconds = seconds
        self._last_activity = time.monotonic()
        self._end_request: dict[str, Any] = {}
        self._busy = False
        events = sys.modules["IPython"].get_ipython().events
        events.register("pre_execute", lambda: self._set_busy(True))
        events.register("post_execute", lambda: self._set_busy(False))
        self._comm = comm.create_comm(target_name=LEASE)
        self._comm.on_msg(self._handle_message)
        threading.Thread(target=self._watch, name="tfd-lease", daemon=True).start()

    def _handle_message(self, message: dict[str, Any]) -> None:
        self._last_activity = time.monotonic()
        self._end_request = message["content"]["data"].get("end_request", self._end_request)

    def _set_busy(self, busy: bool) -> None:
        self._last_activity, self._busy = time.monotonic(), busy

    def _watch(self) -> None:
        while True:
            time.sleep(min(self._seconds / 4, reconnect.HEARTBEAT_SECONDS))
            silent = time.monotonic() - self._last_activity
            if silent > self._seconds and self._end_request and not self._busy:
                _end_this_kernel(**self._end_request)
                return


def lease(seconds: float) -> None:
    """End this kernel after this number of seconds without a message or running code."""
    _leases.append(_Lease(seconds))


def _end_this_kernel(url: str, headers: dict[str, str], ca: str | None) -> None:
    """Delete this kernel at the server, which would restart a kernel that exits by itself."""
    request = urllib.request.Request(url, headers=headers, method="DELETE")
    handlers: list[Any] = [urllib.request.ProxyHandler({})]
    if url.startswith("https:"):
        context = ssl.create_default_context(cadata=ca)
        handlers.append(urllib.request.HTTPSHandler(context=context))
    with contextlib.suppress(OSError):
        urllib.request.build_opener(*handlers).open(request, timeout=_LEAVE_SECONDS)


def cull_seconds() -> float | None:
    """Return the idle seconds after which this kernel's server ends a kernel; None if unknown.

    The value comes from the server's command line and configuration files, which are not executed.
    """
    timeouts: list[float] = []
    arguments: list[str] = []
    with contextlib.suppress(psutil.Error):
        arguments = psutil.Process(os.getppid()).cmdline()
    files = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, is_pair, value = argument.partition("=")
        if name == "--config":
            files.append(Path(value if is_pair else following))
        elif name.endswith(".cull_idle_timeout"):
            text = value if is_pair else following
            timeouts += [float(text)] if text.isdecimal() else []
    files += [
        Path(directory, f"{name}.{ending}")
        for directory in _config_directories()
        for name in ("jupyter_config", "jupyter_server_config", "jupyter_kernel_gateway_config")
        for ending in ("py", "json")
    ]
    for file in files:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            timeouts += [float(seconds) for seconds in _CULL.findall(file.read_text())]
    timeouts = [seconds for seconds in timeouts if seconds > 0]
    return min(timeouts) if timeouts else None


def _config_directories() -> list[str]:
    try:
        from jupyter_core.paths import jupyter_config_path
    except ImportError:
        return []
    return [*jupyter_config_path(), os.path.join(sys.prefix, "etc", "jupyter")]
