"""The process that holds the connections of an ssh launcher, and the tunnels through them.

Tunnels must carry data while TensorFlow holds the kernel's GIL and waits for this data. They
therefore run in a separate process. It receives requests in the agent's protocol on standard input.
For each connection it receives a socket, and joins it to the command on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import sys
from collections.abc import Coroutine, Iterable
from typing import Any

import asyncssh

from tfd_notebook.agent.sessions import own_pipes
from tfd_notebook.errors import LaunchError, PortInUse
from tfd_notebook.net import agent_protocol
from tfd_notebook.net.process_control import end_with_parent

#: Seconds to log in, and the same again to start the command.
CONNECT_SECONDS = 20.0
#: Seconds between two keepalive messages, and the number that may be missed.
_ALIVE_SECONDS, _ALIVE_MISSED = 5.0, 3
_STDERR_BYTES = 4000
#: Seconds between two attempts to reopen a tunnel, whose port an old session may still hold.
_REOPEN_SECONDS = 1.0


class _Connection:
    """The connection to one host, and the tunnels through it."""

    def __init__(self, label: str, options: dict[str, Any]) -> None:
        self.label = label
        self._connect_arguments = options
        self._ssh: Any = None
        self._tunnels: dict[tuple[str, int], Any] = {}
        self._working: set[asyncio.Future[Any]] = set()
        #: Tasks that reopen the tunnels in the current connection.
        self._reopening: list[asyncio.Future[None]] = []

    async def connect(self, command: list[str], peer: socket.socket) -> str:
        """Connect, and join `peer` to a command on the host; return an error message or ""."""
        if self._ssh is not None:
            self._ssh.abort()
        try:
            self._ssh = await asyncio.wait_for(
                asyncssh.connect(
                    **self._connect_arguments,
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
                f"{self.label}: its host key is not in known_hosts, or differs from it: "
                f"{error.reason}",
                fix=f"verify the fingerprint with its administrator, then: ssh {self.label}",
            ) from None
        except asyncssh.PermissionDenied as error:
            raise LaunchError(
                f"{self.label} rejected the login: {error.reason}",
                fix=f"check that `ssh {self.label}` needs no password, or set key= to another key",
            ) from None
        except ValueError as error:  # a key with a passphrase, or an invalid ~/.ssh/config
            raise LaunchError(
                f"preparing the login on {self.label} failed: {error}",
                fix=f"check that `ssh {self.label}` needs no input, or set key= to another key",
            ) from None
        except (asyncssh.Error, OSError, asyncio.TimeoutError) as error:
            reason = getattr(error, "reason", "") or str(error)
            return reason or f"no response for {CONNECT_SECONDS:g} s"
        self._start(_copy(process, peer))
        self._reopening = [
            self._start(self._reopen(self._ssh, direction, port))
            for direction, port in self._tunnels
        ]
        return ""

    @property
    def ends(self) -> tuple[str, str]:
        """The addresses of the host and of this process in the connection; empty if unknown.

        Behind a jump host, that of the host is the one that ssh's configuration names.
        """
        peer, own = (self._ssh.get_extra_info(name) for name in ("peername", "sockname"))
        if peer and peer[0]:
            return str(peer[0]), str(own[0])
        jump = self._ssh.get_extra_info("remote_peername")
        return (str(jump[0]), "") if jump else ("", "")

    async def await_tunnels(self) -> None:
        """Wait until the tunnels of the last connection are open in the current one."""
        if self._reopening:
            await asyncio.wait(self._reopening)

    def add_tunnels(self, tunnels: Iterable[tuple[str, int]]) -> None:
        """Add tunnels to open once the host is connected."""
        for direction, port in tunnels:
            self._tunnels.setdefault((direction, port), None)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        working = asyncio.ensure_future(coroutine)
        self._working.add(working)
        working.add_done_callback(self._working.discard)
        return working

    async def _reopen(self, ssh: Any, direction: str, port: int) -> None:
        """Reopen a tunnel in a new connection, unless another connection replaces that."""
        while self._ssh is ssh and (direction, port) in self._tunnels:
            try:
                await self.open_tunnel(direction, port)
                return
            except PortInUse:
                await asyncio.sleep(_REOPEN_SECONDS)

    async def open_tunnel(self, direction: str, port: int) -> None:
        """Forward `port` of this host (``to_host``) or of the other host (``from_host``)."""
        forward = (
            self._ssh.forward_local_port
            if direction == "to_host"
            else self._ssh.forward_remote_port
        )
        self._tunnels[direction, port] = None  # the next connection reopens it, too
        try:
            listener = await forward("localhost", port, "localhost", port)
        except (asyncssh.Error, asyncssh.ChannelListenError, OSError) as error:
            raise PortInUse(
                f"opening a tunnel to {self.label} at port {port} failed: "
                f"{getattr(error, 'reason', '') or error}",
                fix="its sshd must allow forwarding (AllowTcpForwarding), or use secure=False",
            ) from None
        if (direction, port) in self._tunnels:
            self._tunnels[direction, port] = listener
        else:
            listener.close()  # closed by another request in the meantime

    def close_tunnels(self, port: int) -> None:
        """Close the tunnels at `port`."""
        for direction in ("to_host", "from_host"):
            listener = self._tunnels.pop((direction, port), None)
            if listener is not None:
                listener.close()

    async def close(self) -> None:
        ssh, self._ssh = self._ssh, None
        if ssh is not None:
            ssh.close()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ssh.wait_closed(), 3.0)


async def _copy(process: Any, peer: socket.socket) -> None:
    """Copy bytes between a command and a socket until one of them ends."""
    reader, writer = await asyncio.open_connection(sock=peer, limit=2**20)

    async def inward() -> None:
        while data := await reader.read(2**16):
            process.stdin.write(data)
            await process.stdin.drain()

    async def outward() -> None:
        while data := await process.stdout.read(2**16):
            writer.write(data)
            await writer.drain()
        writer.write(b"\n" + await process.stderr.read(_STDERR_BYTES))
        await writer.drain()

    copies = [asyncio.ensure_future(inward()), asyncio.ensure_future(outward())]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        process.close()
        writer.close()


class _Client:
    """Handler of the kernel's requests."""

    def __init__(self, fds: socket.socket) -> None:
        self._fds = fds
        self._hosts: dict[str, _Connection] = {}

    async def handle_connect(
        self,
        label: str,
        options: dict[str, Any],
        command: list[str],
        tunnels: list[tuple[str, int]],
    ) -> tuple[str, str, str]:
        # The kernel sent the descriptor before it wrote the request.
        _, descriptors, _, _ = socket.recv_fds(self._fds, 1, 1)
        peer = socket.socket(fileno=descriptors[0])
        host = self._hosts.setdefault(label, _Connection(label, options))
        host.add_tunnels(tunnels)
        try:
            failed = await host.connect(command, peer)
        except BaseException:
            peer.close()
            raise
        if failed:
            peer.close()
            return failed, "", ""
        return ("", *host.ends)

    async def handle_open_tunnel(self, label: str, direction: str, port: int) -> None:
        await self._hosts[label].open_tunnel(direction, port)

    async def handle_await_tunnels(self, label: str) -> None:
        await self._hosts[label].await_tunnels()

    async def handle_close_tunnels(self, label: str, port: int) -> None:
        self._hosts[label].close_tunnels(port)

    async def handle_close(self) -> None:
        await asyncio.gather(*(host.close() for host in self._hosts.values()))


async def _run() -> None:
    reader, writer = await own_pipes(asyncio.get_running_loop())
    client = _Client(socket.socket(fileno=int(os.environ["TFD_SSH_FD"])))
    working: set[asyncio.Future[None]] = set()

    def send(body: dict[str, Any]) -> None:
        writer.write(agent_protocol.encode(body))

    async def reply(body: dict[str, Any]) -> None:
        try:
            value = await getattr(client, f"handle_{body['method']}")(**body["arguments"])
            send({"reply_to": body["id"], "ok": True, "value": value})
        except Exception as error:
            send(agent_protocol.failure(body["id"], error))

    while line := await reader.readline():
        frame = agent_protocol.decode(line)
        if frame is not None:
            replying = asyncio.ensure_future(reply(frame.body))
            working.add(replying)
            replying.add_done_callback(working.discard)
    await client.handle_close()


def main() -> None:
    """Serve requests until the input or the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(int(os.environ["TFD_OWNER"]))
    asyncio.run(_run())
    sys.stdout.flush()
