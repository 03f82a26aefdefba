"""Joins the agent beside an executor of Spark to the process that has the cluster.

It is what the ``spark`` launcher has a task start. It connects back, and keeps one connection ready
for each session that shall come; it ends with its executor, or when nobody has been there for the
grace time, and takes the agents that it has started along.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import psutil

from tfd_notebook.agent.bridges import stdio
from tfd_notebook.errors import TfdError
from tfd_notebook.net import agent_protocol, runtime_dir, secure_channel
from tfd_notebook.net.host import address_towards

_CHUNK_BYTES = 1 << 16
_CONNECT_SECONDS = 10.0
#: Each end says something that often.
PING_SECONDS = 5.0
#: A connection over which not even a ping came for so long is lost.
SILENT_SECONDS = 20.0
_PAUSES = (0.1, 0.5, 1.0, 2.0)
_END_SECONDS = 10.0
#: Nobody is waited for longer where no agent is.
_IDLE_SECONDS = 5.0


def main() -> None:
    """Read what is asked, say what this host is like, and connect back until all is over."""
    given = json.loads(sys.stdin.buffer.readline())
    host = given["address"].rpartition(":")[0].strip("[]")
    way = ""
    with contextlib.suppress(OSError):
        way = f"{address_towards(host)} 0"
        way = f"{host} 0 {way}"
    said = stdio.describe(way)
    sys.stdout.write(stdio.GREETING + json.dumps(said) + "\n")
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    ExecutorBridge(given, said).run()
    os._exit(0)


class ExecutorBridge:
    """The executor's end of all connections."""

    def __init__(self, given: dict[str, Any], said: dict[str, Any]) -> None:
        self._address: str = given["address"]
        self._secret = secure_channel.Secret(bytes.fromhex(given["secret"]))
        self._grace = float(given["grace"])
        self._jvm = int(given["jvm"])
        self._born = runtime_dir.process_start(self._jvm)
        self._said = said
        self._heard = time.monotonic()
        self._over = threading.Event()
        self._agents: set[str] = set()
        self._idle: secure_channel.AuthenticatedChannel | None = None

    def run(self) -> None:
        """Serve until the executor has ended, or nobody is there any more."""
        threading.Thread(target=self._stay, name="tfd-sparkend", daemon=True).start()
        with runtime_dir.watched(self._jvm) as gone:
            while not self._over.is_set():
                if gone(1.0) or not runtime_dir.runs(self._jvm, self._born):
                    self._farewell()
                    break
        self._end_agents()

    def _stay(self) -> None:
        """Keep a connection ready; a session takes it, and the next one is made."""
        attempt = 0
        while not self._over.is_set():
            try:
                channel = secure_channel.connect(self._address, self._secret, _CONNECT_SECONDS)
                channel.send({"executor": self._jvm, "host": self._said["identity"]})
            except OSError:
                limit = self._grace if self._has_agents() else min(_IDLE_SECONDS, self._grace)
                if time.monotonic() - self._heard > limit:
                    self._over.set()
                self._over.wait(_PAUSES[min(attempt, len(_PAUSES) - 1)])
                attempt += 1
                continue
            attempt, self._heard, self._idle = 0, time.monotonic(), channel
            try:
                self._await_session(channel)
            except (OSError, EOFError):
                channel.close()

    def _await_session(self, channel: secure_channel.AuthenticatedChannel) -> None:
        while True:
            header, _ = channel.receive(SILENT_SECONDS)
            self._heard = time.monotonic()
            if "end" in header:
                self._over.set()
                channel.close()
                return
            if "agent" in header:
                self._idle = None
                joint = threading.Thread(
                    target=self._join,
                    args=(channel, str(header["agent"]), header["how"] == "start"),
                    name="tfd-joint",
                    daemon=True,
                )
                joint.start()
                return

    def _join(self, channel: secure_channel.AuthenticatedChannel, agent: str, start: bool) -> None:
        """Join a connection to an agent."""
        with channel, contextlib.suppress(OSError, EOFError):
            said = dict(self._said)
            peer = None
            try:
                self._agents.add(agent)
                peer = stdio.reach(agent, start)
            except TfdError as error:
                said["error"] = agent_protocol.pack_error(error)
            channel.send({"said": said})
            if peer is None:
                return
            inward = threading.Thread(target=self._carry_in, args=(channel, peer), daemon=True)
            inward.start()
            threading.Thread(target=self._ping, args=(channel,), daemon=True).start()
            with peer:
                while data := peer.recv(_CHUNK_BYTES):
                    channel.send({}, data)

    def _ping(self, channel: secure_channel.AuthenticatedChannel) -> None:
        """Show the other end that this one can be heard, which a broken network might hide."""
        with contextlib.suppress(OSError):
            while not channel.closed:
                channel.send({})
                time.sleep(PING_SECONDS)

    def _carry_in(self, channel: secure_channel.AuthenticatedChannel, peer: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                peer.sendall(channel.receive(SILENT_SECONDS)[1])
                self._heard = time.monotonic()
        with contextlib.suppress(OSError):
            peer.shutdown(socket.SHUT_RDWR)

    def _has_agents(self) -> bool:
        return any(
            (runtime_dir.runtime_dir() / f"agent-{agent}").exists() for agent in self._agents
        )

    def _farewell(self) -> None:
        """Say that the executor has ended: nobody needs to try again."""
        self._over.set()
        if self._idle is not None:
            with contextlib.suppress(OSError):
                self._idle.send({"gone": "its executor has ended"})

    def _end_agents(self) -> None:
        """End the agents that were started from here and are still there."""
        ending = []
        for agent in self._agents:
            with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
                directory = runtime_dir.runtime_dir() / f"agent-{agent}"
                state = json.loads((directory / runtime_dir.STATE_FILE).read_text())
                if runtime_dir.is_running(state["process"]):
                    ending.append(psutil.Process(state["pid"]))
                    ending[-1].terminate()
        for process in psutil.wait_procs(ending, _END_SECONDS)[1]:
            with contextlib.suppress(psutil.Error):
                process.kill()
