"""An agent's end of the encrypted tunnels between the hosts of a cluster, made by stunnel.

One process of stunnel takes what comes from other hosts at one port, and passes it on by the name
that the peer asks for: ``p40001.tfd`` is the task at port 40001 here. One more for each task of
another host listens at that task's port, on loopback, and leads to its host. The agent opens the
sockets at which they listen and hands them over, so that a port stays the cluster's, and peers wait
for a moment, when such a process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfd_notebook.agent.processes import Processes
from tfd_notebook.agent.task_process import end_with
from tfd_notebook.agent.task_supervisor import last_lines, trim_log, why_ended
from tfd_notebook.errors import LaunchError, PortInUse
from tfd_notebook.net import ports, validation

_FIRST_FD = 3  # of systemd's way to hand over sockets
_UP_SECONDS = 20.0
_PAUSES = (0.0, 0.1, 0.5, 2.0, 5.0)
#: A process that has lived for so long starts counting its deaths at zero again.
_STEADY_SECONDS = 60.0

#: Tells a severity and a sentence to whoever hears of the cluster.
Tell = Callable[[str, str], None]

_COMMON = """\
foreground = yes
pid =
syslog = no
debug = err
sslVersionMin = TLSv1.3
CAfile = {directory}/trust.pem
cert = {directory}/certificate.pem
key = {directory}/key.pem
verifyChain = yes
requireCert = yes
sessionResume = no
"""
# Whoever asks for no task of this host is led to where nobody is.
_DOOR = """\
[door]
accept = {port}
connect = {directory}/nobody
"""
_TASK = """\
[task-{port}]
sni = door:{name}
connect = 127.0.0.1:{port}
"""
_WAY = """\
[way-{number}]
client = yes
accept = {port}
connect = {to}
sni = {sni}
checkHost = {host}
"""


_REQUEST = """\
[req]
distinguished_name = name
prompt = no
[name]
commonName = {name}
"""


async def make_key(directory: Path, processes: Processes, name: str) -> str:
    """Make a private key in `directory`, and return a signing request for it in PEM.

    The key never leaves this host.

    Raises
    ------
    LaunchError
        A command is missing here, or fails.
    InvalidMessage
        The name could not be part of openssl's configuration as it is.
    """
    validation.tunnel_name(name, "name")
    for command in ("stunnel", "openssl"):
        if shutil.which(command) is None:
            raise LaunchError(
                f"encryption failed: {socket.gethostname()} has no {command}",
                fix="apt-get install stunnel4 openssl",
            )
    directory.mkdir(mode=0o700, exist_ok=True)
    config, request = directory / "request.conf", directory / "request.pem"
    config.write_text(_REQUEST.format(name=name))
    options = ["-config", config, "-keyout", directory / "key.pem", "-out", request]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command_line = ["openssl", "req", "-new", *curve, *map(str, options)]
    log = directory / "openssl.log"
    asked = json.dumps({"command": command_line, "listeners": []})
    _, ended = processes.run(
        "stunnel", {"TFD_OWNER": str(os.getpid()), "TFD_STUNNEL": asked}, log, ()
    )
    status = await ended
    try:
        return request.read_text()
    except FileNotFoundError:
        said = "; ".join(last_lines(log, 3)) or why_ended(status)
        raise LaunchError(f"openssl could not make a key: {said}") from None


def service_name(port: int) -> str:
    """Return the name by which a peer asks for the task at `port`."""
    return f"p{port}.tfd"


class TunnelEnd:
    """What one host does for the tunnels of one cluster.

    Parameters
    ----------
    directory : Path
        For its files, which are this user's alone.
    processes : Processes
    tell : callable
    name : str
        The name in the certificate.
    certificate : str
        In PEM, for the key that `make_key` made.

    Attributes
    ----------
    port : int
        At which other hosts come in.
    trust : list of str
        Certificates, in PEM, of those whose signature lets a peer in.
    """

    def __init__(
        self,
        directory: Path,
        processes: Processes,
        tell: Tell,
        name: str,
        certificate: str,
    ) -> None:
        self.name = name
        self.trust: list[str] = []
        self._directory = directory
        self._processes = processes
        self._tell = tell
        self._served: set[int] = set()
        self._ways: dict[int, tuple[str, _Stunnel]] = {}
        self._log = directory / "stunnel.log"
        self._write("certificate.pem", certificate)
        listener = _listen_everywhere()
        self.port: int = listener.getsockname()[1]
        self._door = _Stunnel(processes, "door", directory, [listener], tell)

    async def open(self, trust: Sequence[str]) -> None:
        """Let peers in whose certificates one of `trust` has signed; return when it is up.

        Raises
        ------
        LaunchError
            stunnel is not installed here, or does not come up.
        """
        self.let_in(trust)
        self._door.start()
        await self._is_up()

    def let_in(self, trust: Sequence[str]) -> None:
        """Trust those, too, whose certificates one of `trust` has signed."""
        new = [one for one in trust if one not in self.trust]
        if new:
            self.trust += new
            self._write("trust.pem", "".join(self.trust))
            self._describe()
            for _, way in self._ways.values():
                way.read_again()

    def serve(self, port: int) -> None:
        """Let peers come to `port` of this host."""
        validation.port(port, "port")
        self._served.add(port)
        self._describe()

    def lead(self, port: int, to: str, host: str) -> None:
        """Have `port` of this host, on loopback, lead to the same port of a peer.

        Parameters
        ----------
        port : int
        to : str
            Address and port at which the peer is reached.
        host : str
            The name in its certificate.

        Raises
        ------
        InvalidMessage
            A value could not be part of stunnel's configuration as it is.
        PortInUse
        """
        validation.port(port, "port")
        validation.address(to, "to")
        validation.tunnel_name(host, "host")
        had = self._ways.get(port)
        if had is not None and had[0] == host:
            return
        self.let_go(port)
        listeners = _listen_on_loopback(port)
        way = _Stunnel(self._processes, f"way-{port}", self._directory, listeners, self._tell)
        way.write(
            _COMMON.format(directory=self._directory)
            + "".join(
                _WAY.format(number=number, port=port, to=to, sni=service_name(port), host=host)
                for number in range(len(listeners))
            )
        )
        self._ways[port] = host, way
        way.start()

    def let_go(self, port: int) -> None:
        """End what leads to or from `port`."""
        if port in self._served:
            self._served.remove(port)
            self._describe()
        _, way = self._ways.pop(port, ("", None))
        if way is not None:
            way.close()

    def close(self) -> None:
        """End everything."""
        for port in list(self._ways):
            self.let_go(port)
        self._door.close()

    def trim(self) -> None:
        """Keep what stunnel says of strangers from filling the disk."""
        trim_log(self._log)

    def _describe(self) -> None:
        self._door.write(
            _COMMON.format(directory=self._directory)
            + _DOOR.format(directory=self._directory, port=self.port)
            + "".join(
                _TASK.format(port=port, name=service_name(port)) for port in sorted(self._served)
            )
        )

    def _write(self, name: str, text: str) -> None:
        descriptor = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)

    async def _is_up(self) -> None:
        """Wait until the door answers a peer of the cluster."""
        context = ssl.create_default_context(cafile=str(self._directory / "trust.pem"))
        context.load_cert_chain(self._directory / "certificate.pem", self._directory / "key.pem")
        asking = asyncio.ensure_future(
            asyncio.open_connection("127.0.0.1", self.port, ssl=context, server_hostname=self.name)
        )
        either: list[asyncio.Future[Any]] = [asking, self._door.ended]
        await asyncio.wait(either, timeout=_UP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if asking.done() and asking.exception() is None:
            asking.result()[1].transport.abort()
            return
        asking.cancel()
        said = "; ".join(last_lines(self._log, 3)) or f"nothing within {_UP_SECONDS:g} s"
        raise LaunchError(f"stunnel did not come up: {said}", fix="stunnel 5.60 or newer is needed")


class _Stunnel:
    """A process of stunnel that is started again when it dies."""

    def __init__(
        self,
        processes: Processes,
        name: str,
        directory: Path,
        listeners: Sequence[socket.socket],
        tell: Tell,
    ) -> None:
        self._processes = processes
        self._name = name
        self._config = directory / f"{name}.conf"
        self._log = directory / "stunnel.log"
        self._listeners = listeners
        self._tell = tell
        self._pid = 0
        self._life: asyncio.Future[None] | None = None
        self.ended: asyncio.Future[int]

    def write(self, text: str) -> None:
        """Set its configuration anew; what is connected stays so."""
        unborn = self._config.with_suffix(".new")
        unborn.write_text(text)
        unborn.replace(self._config)
        self.read_again()

    def read_again(self) -> None:
        """Have it read its configuration and the certificates."""
        if self._life is not None and not self.ended.done():
            # Before it has come so far this ends it, and it is started again.
            os.kill(self._pid, signal.SIGHUP)

    def start(self) -> None:
        self._run()
        self._life = asyncio.ensure_future(self._live())

    def close(self) -> None:
        if self._life is not None:
            self._life.cancel()
            if not self.ended.done():
                os.kill(self._pid, signal.SIGKILL)
        for listener in self._listeners:
            listener.close()

    def _run(self) -> None:
        descriptors = [listener.fileno() for listener in self._listeners]
        asked = {"command": ["stunnel", str(self._config)], "listeners": descriptors}
        self._pid, self.ended = self._processes.run(
            "stunnel",
            {"TFD_OWNER": str(os.getpid()), "TFD_STUNNEL": json.dumps(asked)},
            self._log,
            descriptors,
        )

    async def _live(self) -> None:
        deaths = 0
        while True:
            began = time.monotonic()
            status = await asyncio.shield(self.ended)
            deaths = 0 if time.monotonic() - began > _STEADY_SECONDS else deaths + 1
            # One that was told to read its configuration while it started is no news.
            if os.WIFEXITED(status) or os.WTERMSIG(status) != signal.SIGHUP:
                self._tell(
                    "warning", f"the tunnel {self._name} {why_ended(status)}; it is started again"
                )
            await asyncio.sleep(_PAUSES[min(deaths, len(_PAUSES)) - 1] if deaths else 0.0)
            self._run()


def _listen_everywhere() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _listen_on_loopback(port: int) -> list[socket.socket]:
    try:
        listeners = [socket.create_server(("127.0.0.1", port))]
    except OSError as error:
        raise PortInUse(
            f"port {port} cannot be taken for a tunnel ({error.strerror}): it is held by "
            f"{ports.port_owner(port)}"
        ) from None
    with contextlib.suppress(OSError):  # where there is no IPv6
        listeners.append(socket.create_server(("::1", port), family=socket.AF_INET6))
    return listeners


def main() -> None:
    """Become stunnel or openssl, with sockets of the agent, and end with the agent."""
    end_with(int(os.environ["TFD_OWNER"]))
    asked: dict[str, Any] = json.loads(os.environ["TFD_STUNNEL"])
    listeners = asked["listeners"]
    # Out of the way of the numbers that they get.
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_FD + 2 * len(listeners)) for fd in listeners]
    for number, descriptor in enumerate(moved, _FIRST_FD):
        os.dup2(descriptor, number, inheritable=True)
    name, *arguments = asked["command"]
    found = shutil.which(name)
    assert found is not None
    environment = dict(os.environ, LISTEN_FDS=str(len(moved)), LISTEN_PID=str(os.getpid()))
    os.execve(found, [found, *arguments], environment)
