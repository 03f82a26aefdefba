"""Bridge between the agent next to a worker of an engine and the kernel, to which it connects.

Launchers for Spark, Dask, Ray and ipyparallel start it on a worker. It keeps one idle connection
ready for the next session. It ends with its worker, or after the grace time without a connection.
It then ends the agents that it has started.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from typing import Any

import psutil

from tfd_notebook.agent.bridges import stdio
from tfd_notebook.errors import TfdError
from tfd_notebook.net import agent_protocol, reconnect, runtime_dir, secure_channel
from tfd_notebook.net.host import address_towards

_CHUNK_BYTES = 1 << 16
_CONNECT_SECONDS = 10.0
_END_SECONDS = 10.0
#: Seconds in which the kernel must read the report of the end.
_REPORT_SECONDS = 5.0
#: Seconds to reconnect if no agent runs.
_IDLE_SECONDS = 5.0


def main() -> None:
    """Read the arguments, print the handshake, and serve connections until the bridge ends."""
    arguments = json.loads(sys.stdin.buffer.readline())
    handshake = describe(arguments["address"])
    sys.stdout.write(stdio.HANDSHAKE + json.dumps(handshake) + "\n")
    sys.stdout.flush()
    process = arguments["process"]
    key = {"host": handshake["token"], "process": process}
    close_pipes()
    RendezvousBridge(arguments, handshake, key, process, arguments["end_reason"]).run()
    os._exit(0)


def describe(address: str) -> dict[str, Any]:
    """Return the handshake of this host for a client at `address`."""
    host = address.rpartition(":")[0].strip("[]")
    connection = ""
    with contextlib.suppress(OSError):
        connection = f"{address_towards(host)} 0"
        connection = f"{host} 0 {connection}"
    # Other hosts have the secret of the channels. They cannot guess the key of this bridge.
    return {**stdio.describe(connection), "token": secrets.token_hex(16)}


def close_pipes() -> None:
    """Replace standard input and output, and ignore the signals of a terminal."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


class RendezvousBridge:
    """The worker's end of all connections to the kernel.

    Parameters
    ----------
    arguments : dict
        ``address``, ``secret`` and ``grace``.
    handshake : dict
        See `describe`.
    key : dict
        The first message of each connection. It identifies this process.
    process : int
        Pid of the process with which the bridge ends.
    end_reason : str
        The reason that the kernel shows when that process has ended.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        handshake: dict[str, Any],
        key: dict[str, Any],
        process: int,
        end_reason: str,
    ) -> None:
        self._address: str = arguments["address"]
        self._secret = secure_channel.Secret(bytes.fromhex(arguments["secret"]))
        self._grace = float(arguments["grace"])
        self._key = key
        self._process = process
        self._process_start = runtime_dir.process_start(process)
        self._end_reason = end_reason
        self._handshake = handshake
        self._last_received = time.monotonic()
        self._stopped = threading.Event()
        self._agents: set[str] = set()
        self._idle: secure_channel.AuthenticatedChannel | None = None

    def run(self) -> None:
        """Serve until the worker has ended, or the grace time has passed."""
        connected = threading.Thread(
            target=self._keep_connected, name="tfd-rendezvous-bridge", daemon=True
        )
        connected.start()
        with runtime_dir.watched(self._process) as ended:
            while not self._stopped.is_set():
                if ended(1.0) or not runtime_dir.runs(self._process, self._process_start):
                    self.report_end()
                    break
        # The kernel closes the connection after it has read the report.
        connected.join(_REPORT_SECONDS)
        self._end_agents()

    def _keep_connected(self) -> None:
        """Keep an idle connection ready; when a session takes it, open the next one."""
        connect = functools.partial(
            reconnect.reconnect,
            self._connect,
            self._stopped,
            self._may_retry,
            first_delay=0.0,
            max_delay=2.0,
        )
        with contextlib.suppress(OSError):
            while (channel := connect()) is not None:
                self._last_received, self._idle = time.monotonic(), channel
                try:
                    self._await_session(channel)
                except (OSError, EOFError):
                    channel.close()
        self._stopped.set()

    def _connect(self) -> secure_channel.AuthenticatedChannel:
        channel = secure_channel.connect(self._address, self._secret, _CONNECT_SECONDS)
        channel.send(self._key)
        return channel

    def _may_retry(self) -> bool:
        limit = self._grace if self._has_agents() else min(_IDLE_SECONDS, self._grace)
        return time.monotonic() - self._last_received <= limit

    def _await_session(self, channel: secure_channel.AuthenticatedChannel) -> None:
        while True:
            header, _ = channel.receive(reconnect.SILENT_SECONDS)
            self._last_received = time.monotonic()
            if "close" in header:
                self._stopped.set()
                channel.close()
                return
            if "agent" in header:
                self._idle = None
                bridge = threading.Thread(
                    target=self._bridge,
                    args=(channel, str(header["agent"]), header["mode"] == "start"),
                    name="tfd-bridge",
                    daemon=True,
                )
                bridge.start()
                return

    def _bridge(
        self, channel: secure_channel.AuthenticatedChannel, agent: str, start: bool
    ) -> None:
        """Copy data between a connection and an agent."""
        with channel, contextlib.suppress(OSError, EOFError):
            handshake = dict(self._handshake)
            peer = None
            try:
                self._agents.add(agent)
                peer = stdio.connect(agent, start)
            except TfdError as error:
                handshake["error"] = agent_protocol.pack_error(error)
            channel.send({"handshake": handshake})
            if peer is None:
                return
            inward = threading.Thread(target=self._copy_input, args=(channel, peer), daemon=True)
            inward.start()
            with peer:
                while data := peer.recv(_CHUNK_BYTES):
                    channel.send({}, data)

    def _copy_input(
        self, channel: secure_channel.AuthenticatedChannel, peer: socket.socket
    ) -> None:
        ended = threading.Event()
        reconnect.send_heartbeats(lambda: channel.send({}), ended)
        with contextlib.suppress(OSError, EOFError):
            while True:
                peer.sendall(channel.receive(reconnect.SILENT_SECONDS)[1])
                self._last_received = time.monotonic()
        with contextlib.suppress(OSError):
            peer.shutdown(socket.SHUT_RDWR)
        ended.set()

    def _has_agents(self) -> bool:
        return any(
            (runtime_dir.runtime_dir() / f"agent-{agent}").exists() for agent in self._agents
        )

    def report_end(self) -> None:
        """Report the end of the process, so that the kernel does not reconnect, and stop."""
        self._stopped.set()
        if self._idle is not None:
            with contextlib.suppress(OSError):
                self._idle.send({"ended": self._end_reason})

    def _end_agents(self) -> None:
        """End the agents that this process has started and that still run."""
        ending = []
        for agent in self._agents:
            with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
                directory = runtime_dir.runtime_dir() / f"agent-{agent}"
                state = runtime_dir.read_state(directory)
                if runtime_dir.is_running(state["process"]):
                    ending.append(psutil.Process(state["pid"]))
                    ending[-1].terminate()
        for process in psutil.wait_procs(ending, _END_SECONDS)[1]:
            with contextlib.suppress(psutil.Error):
                process.kill()
