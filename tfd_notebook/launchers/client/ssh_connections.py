"""The process that holds the connections of an ssh launcher, and the tunnels through them.

It is one of its own because tunnels must flow also while TensorFlow keeps the kernel's interpreter
lock and waits for what comes through them. It takes requests like an agent's on its standard input;
for each connection it is handed a socket whose bytes become those of the command on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import sys
import traceback
from collections.abc import Coroutine, Iterable
from typing import Any

import asyncssh

from tfd_notebook.agent.sessions import own_pipes
from tfd_notebook.agent.task_process import end_with
from tfd_notebook.errors import LaunchError, PortInUse, TfdError
from tfd_notebook.net import agent_protocol

#: Seconds to log in, and as many for the command.
CONNECT_SECONDS = 20.0
#: Seconds between two signs of life, and how many may be missed.
_ALIVE_SECONDS, _ALIVE_MISSED = 5.0, 3
_SAID_BYTES = 4000
#: Seconds between two attempts to have a tunnel again, whose port an old session may still hold.
_AGAIN_SECONDS = 1.0


class _Connection:
    """The way to one host, and the tunnels that lead through it."""

    def __init__(self, label: str, where: dict[str, Any]) -> None:
        self.label = label
        self._where = where
        self._ssh: Any = None
        self._tunnels: dict[tuple[str, int], Any] = {}
        self._working: set[asyncio.Future[Any]] = set()
        #: Opens the tunnels again in the present connection.
        self._reopening: list[asyncio.Future[None]] = []

    async def connect(self, command: list[str], peer: socket.socket) -> str:
        """Connect afresh, and join `peer` with a command there; return why it cannot be reached."""
        if self._ssh is not None:
            self._ssh.abort()
        try:
            self._ssh = await asyncio.wait_for(
                asyncssh.connect(
                    **self._where,
                    keepalive_interval=_ALIVE_SECONDS,
                    keepalive_count_max=_ALIVE_MISSED,
                ),
                CONNECT_SECONDS,
            )
            process = await asyncio.wait_for(
                self._ssh.create_process(shlex.join(command), encoding=None), CONNECT_SECONDS
            )
        except asyncssh.HostKeyNotVerifiable as error:
            raise LaunchError(
                f"{self.label}: its host key is not the one in known_hosts, or not there: "
                f"{error.reason}",
                fix=f"compare the fingerprint with its administrator's, then: ssh {self.label}",
            ) from None
        except asyncssh.PermissionDenied as error:
            raise LaunchError(
                f"{self.label} refuses the login: {error.reason}",
                fix=f"does `ssh {self.label}` work without a password? key= names another key",
            ) from None
        except ValueError as error:  # a key with a passphrase, ~/.ssh/config that is not understood
            raise LaunchError(
                f"{self.label}: the login cannot be prepared: {error}",
                fix=f"does `ssh {self.label}` work without a question? key= names another key",
            ) from None
        except (asyncssh.Error, OSError, asyncio.TimeoutError) as error:
            return getattr(error, "reason", "") or str(error) or f"silent for {CONNECT_SECONDS:g} s"
        self._beside(_carry(process, peer))
        self._reopening = [
            self._beside(self._again(self._ssh, kind, port)) for kind, port in self._tunnels
        ]
        return ""

    async def reopened(self) -> None:
        """Return when the tunnels of the last connection are open in the present one."""
        if self._reopening:
            await asyncio.wait(self._reopening)

    def want(self, tunnels: Iterable[tuple[str, int]]) -> None:
        """Have these tunnels, too, as soon as there is a connection."""
        for kind, port in tunnels:
            self._tunnels.setdefault((kind, port), None)

    def _beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        working = asyncio.ensure_future(work)
        self._working.add(working)
        working.add_done_callback(self._working.discard)
        return working

    async def _again(self, ssh: Any, kind: str, port: int) -> None:
        """Have a tunnel in a new connection, too, for as long as that is the present one."""
        while self._ssh is ssh and (kind, port) in self._tunnels:
            try:
                await self.tunnel(kind, port)
                return
            except PortInUse:
                await asyncio.sleep(_AGAIN_SECONDS)

    async def tunnel(self, kind: str, port: int) -> None:
        """Have `port` of this host lead to that of the other (``here``), or back (``there``)."""
        make = self._ssh.forward_local_port if kind == "here" else self._ssh.forward_remote_port
        self._tunnels[kind, port] = None  # wanted, also by the next connection
        try:
            listener = await make("localhost", port, "localhost", port)
        except (asyncssh.Error, asyncssh.ChannelListenError, OSError) as error:
            raise PortInUse(
                f"port {port} cannot be taken for a tunnel to {self.label}: "
                f"{getattr(error, 'reason', '') or error}",
                fix="its sshd must allow forwarding (AllowTcpForwarding), or use secure=False",
            ) from None
        if (kind, port) in self._tunnels:
            self._tunnels[kind, port] = listener
        else:
            listener.close()  # nobody wants it any more

    def let_go(self, port: int) -> None:
        """End the tunnels at `port`."""
        for kind in ("here", "there"):
            listener = self._tunnels.pop((kind, port), None)
            if listener is not None:
                listener.close()

    async def close(self) -> None:
        ssh, self._ssh = self._ssh, None
        if ssh is not None:
            ssh.close()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ssh.wait_closed(), 3.0)


async def _carry(process: Any, peer: socket.socket) -> None:
    """Carry bytes between a command and a socket until one of them ends."""
    reader, writer = await asyncio.open_connection(sock=peer, limit=2**20)

    async def inward() -> None:
        while data := await reader.read(2**16):
            process.stdin.write(data)
            await process.stdin.drain()

    async def outward() -> None:
        while data := await process.stdout.read(2**16):
            writer.write(data)
            await writer.drain()
        writer.write(b"\n" + await process.stderr.read(_SAID_BYTES))
        await writer.drain()

    ways = [asyncio.ensure_future(inward()), asyncio.ensure_future(outward())]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        process.close()
        writer.close()


class _Client:
    """Does what the kernel asks."""

    def __init__(self, fds: socket.socket) -> None:
        self._fds = fds
        self._hosts: dict[str, _Connection] = {}

    async def do_connect(
        self, label: str, where: dict[str, Any], command: list[str], tunnels: list[tuple[str, int]]
    ) -> str:
        # Handed over before the request was written.
        _, descriptors, _, _ = socket.recv_fds(self._fds, 1, 1)
        peer = socket.socket(fileno=descriptors[0])
        host = self._hosts.setdefault(label, _Connection(label, where))
        host.want(tunnels)
        try:
            failed = await host.connect(command, peer)
        except BaseException:
            peer.close()
            raise
        if failed:
            peer.close()
        return failed

    async def do_tunnel(self, label: str, kind: str, port: int) -> None:
        await self._hosts[label].tunnel(kind, port)

    async def do_reopened(self, label: str) -> None:
        await self._hosts[label].reopened()

    async def do_let_go(self, label: str, port: int) -> None:
        self._hosts[label].let_go(port)

    async def do_close(self) -> None:
        await asyncio.gather(*(host.close() for host in self._hosts.values()))


async def _run() -> None:
    reader, writer = await own_pipes(asyncio.get_running_loop())
    client = _Client(socket.socket(fileno=int(os.environ["TFD_SSH_FD"])))
    working: set[asyncio.Future[None]] = set()

    def say(body: dict[str, Any]) -> None:
        writer.write(agent_protocol.encode(agent_protocol.Frame("localhost", "ssh", 0, body)))

    async def answer(body: dict[str, Any]) -> None:
        try:
            value = await getattr(client, f"do_{body['do']}")(**body["arguments"])
            say({"re": body["id"], "ok": True, "value": value})
        except Exception as error:
            if not isinstance(error, TfdError):
                traceback.print_exc()
            say({"re": body["id"], "ok": False, "error": agent_protocol.pack_error(error)})

    while line := await reader.readline():
        frame = agent_protocol.decode(line)
        if frame is not None:
            answering = asyncio.ensure_future(answer(frame.body))
            working.add(answering)
            answering.add_done_callback(working.discard)
    await client.do_close()


def main() -> None:
    """Serve until the input ends, or the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(int(os.environ["TFD_OWNER"]))
    asyncio.run(_run())
    sys.stdout.flush()
