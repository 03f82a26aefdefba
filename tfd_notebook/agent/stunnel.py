"""An agent's end of the encrypted tunnels between the hosts of a cluster, by stunnel.

One stunnel process (the server) accepts connections of other hosts at one port. It forwards each by
the server name (SNI) that the peer requests. The name ``p40001.tfd`` is the task at port 40001 of
this host. Each task of another host has one more process (a client). It listens at that task's port
on loopback and connects to its host. The agent opens the listening sockets and passes them on. A
port therefore stays reserved while a crashed process is restarted, and peers wait for a moment.
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
from tfd_notebook.agent.task_supervisor import last_lines, trim_log, why_ended
from tfd_notebook.errors import LaunchError, PortInUse
from tfd_notebook.net import ports, validation
from tfd_notebook.net.process_control import end_with_parent

_FIRST_FD = 3  # of systemd's protocol for passing sockets (LISTEN_FDS)
_UP_SECONDS = 20.0
_BACKOFF_SECONDS = (0.0, 0.1, 0.5, 2.0, 5.0)
#: After this time without a crash, the count of crashes restarts at zero.
_STEADY_SECONDS = 60.0

#: Sends a notice, given its severity and text, to the cluster's listeners.
Notify = Callable[[str, str], None]

_COMMON = """\
foreground = yes
pid =
syslog = no
debug = err
sslVersionMin = TLSv1.3
CAfile = {directory}/{authorities}
cert = {directory}/certificate.pem
key = {directory}/key.pem
verifyChain = yes
requireCert = yes
sessionResume = no
"""
# A connection without the name of a task on this host goes to a socket that does not exist.
_SERVER = """\
[server]
accept = {port}
connect = {directory}/absent
"""
_TASK = """\
[task-{port}]
sni = server:{name}
connect = 127.0.0.1:{port}
"""
_CLIENT = """\
[client-{number}]
client = yes
accept = {port}
connect = {address}
sni = {sni}
checkHost = {name}
"""


_REQUEST = """\
[req]
distinguished_name = name
prompt = no
[name]
commonName = {name}
"""


async def make_key(directory: Path, processes: Processes, name: str) -> str:
    """Create a private key in `directory`, and return a signing request for it in PEM.

    The key never leaves this host.

    Raises
    ------
    LaunchError
        A command is missing on this host, or fails.
    InvalidMessage
        The name is invalid in openssl's configuration.
    """
    validation.tunnel_name(name, "name")
    for command in ("stunnel", "openssl"):
        if shutil.which(command) is None:
            raise LaunchError(
                f"encryption failed: {socket.gethostname()} has no {command}",
                fix="apt-get install stunnel4 openssl",
            )
    directory.mkdir(mode=0o700, exist_ok=True)
    config, request_path = directory / "request.conf", directory / "request.pem"
    config.write_text(_REQUEST.format(name=name))
    options = ["-config", config, "-keyout", directory / "key.pem", "-out", request_path]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command_line = ["openssl", "req", "-new", *curve, *map(str, options)]
    log = directory / "openssl.log"
    request = json.dumps({"command": command_line, "listeners": []})
    _, ended = processes.run(
        "stunnel", {"TFD_OWNER": str(os.getpid()), "TFD_STUNNEL": request}, log, ()
    )
    status = await ended
    try:
        return request_path.read_text()
    except FileNotFoundError:
        output = "; ".join(last_lines(log, 3)) or why_ended(status)
        raise LaunchError(f"creating a key with openssl failed: {output}") from None


def service_name(port: int) -> str:
    """Return the server name (SNI) of the task at `port`."""
    return f"p{port}.tfd"


class TunnelEnd:
    """One host's end of the tunnels of one cluster.

    Parameters
    ----------
    directory : Path
        Directory for its files, which only this user can read.
    processes : Processes
    notify : callable
    name : str
        The name in the certificate.
    certificate : str
        In PEM, for the key created by `make_key`.
    authority : str
        The certificate, in PEM, of the authority that signed it.

    Attributes
    ----------
    port : int
        Port for the connections of other hosts.
    authority : str
    """

    def __init__(
        self,
        directory: Path,
        processes: Processes,
        notify: Notify,
        name: str,
        certificate: str,
        authority: str,
    ) -> None:
        self.name = name
        self.authority = authority
        #: The authorities of the kernels that opened the tunnels or attached to the cluster.
        self._accepted: list[str] = []
        self._directory = directory
        self._processes = processes
        self._notify = notify
        self._served: set[int] = set()
        self._clients: dict[int, tuple[tuple[str, str], _Stunnel]] = {}
        self._log = directory / "stunnel.log"
        self._write("certificate.pem", certificate)
        listener = _listen_on_all_interfaces()
        self.port: int = listener.getsockname()[1]
        self._server_process = _Stunnel(processes, "server", directory, [listener], notify)

    async def open(self) -> None:
        """Accept peers with a certificate of the same authority; return when stunnel is ready.

        Raises
        ------
        LaunchError
            stunnel is not installed on this host, or does not start.
        """
        self.accept(self.authority)
        self._server_process.start()
        await self._wait_until_ready()

    def accept(self, authority: str) -> None:
        """Accept peers with a certificate signed by `authority`, too."""
        if authority not in self._accepted:
            self._accepted.append(authority)
            self._write("accepted.pem", "".join(self._accepted))
            self._describe()

    def serve(self, port: int) -> None:
        """Forward peers' connections to `port` of this host."""
        validation.port(port, "port")
        self._served.add(port)
        self._describe()

    def forward(self, port: int, address: str, name: str, authority: str) -> None:
        """Forward `port` of this host, on loopback, to the same port of a peer.

        Parameters
        ----------
        port : int
        address : str
            Address and port of the peer's server.
        name : str
            The name in the peer's certificate.
        authority : str
            The certificate, in PEM, of the only authority that is trusted for this peer.

        Raises
        ------
        InvalidMessage
            A value is invalid in stunnel's configuration.
        PortInUse
        """
        validation.port(port, "port")
        validation.address(address, "address")
        validation.tunnel_name(name, "name")
        validation.certificate(authority, "authority")
        current = self._clients.get(port)
        if current is not None and current[0] == (name, authority):
            return
        self.close_port(port)
        listeners = _listen_on_loopback(port)
        client = _Stunnel(
            self._processes, f"client-{port}", self._directory, listeners, self._notify
        )
        # Hosts choose their authorities, so that each one is trusted for its own host only.
        self._write(f"client-{port}.pem", authority)
        client.write(
            _COMMON.format(directory=self._directory, authorities=f"client-{port}.pem")
            + "".join(
                _CLIENT.format(
                    number=number, port=port, address=address, sni=service_name(port), name=name
                )
                for number in range(len(listeners))
            )
        )
        self._clients[port] = (name, authority), client
        client.start()

    def close_port(self, port: int) -> None:
        """Close the tunnels at `port`."""
        if port in self._served:
            self._served.remove(port)
            self._describe()
        _, client = self._clients.pop(port, (None, None))
        if client is not None:
            client.close()

    def close(self) -> None:
        """Close all tunnels."""
        for port in list(self._clients):
            self.close_port(port)
        self._server_process.close()

    def trim(self) -> None:
        """Limit the size of stunnel's log, which clients from other hosts can fill."""
        trim_log(self._log)

    def _describe(self) -> None:
        self._server_process.write(
            _COMMON.format(directory=self._directory, authorities="accepted.pem")
            + _SERVER.format(directory=self._directory, port=self.port)
            + "".join(
                _TASK.format(port=port, name=service_name(port)) for port in sorted(self._served)
            )
        )

    def _write(self, name: str, text: str) -> None:
        descriptor = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)

    async def _wait_until_ready(self) -> None:
        """Wait until the server accepts a connection of this cluster."""
        context = ssl.create_default_context(cadata=self.authority)
        context.load_cert_chain(self._directory / "certificate.pem", self._directory / "key.pem")
        connecting = asyncio.ensure_future(
            asyncio.open_connection("127.0.0.1", self.port, ssl=context, server_hostname=self.name)
        )
        futures: list[asyncio.Future[Any]] = [connecting, self._server_process.ended]
        await asyncio.wait(futures, timeout=_UP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if connecting.done() and connecting.exception() is None:
            connecting.result()[1].transport.abort()
            return
        connecting.cancel()
        output = "; ".join(last_lines(self._log, 3)) or f"no connection in {_UP_SECONDS:g} s"
        raise LaunchError(
            f"starting stunnel failed: {output}", fix="stunnel needs version 5.60 or newer"
        )


class _Stunnel:
    """A stunnel process that is restarted when it dies."""

    def __init__(
        self,
        processes: Processes,
        name: str,
        directory: Path,
        listeners: Sequence[socket.socket],
        notify: Notify,
    ) -> None:
        self._processes = processes
        self._name = name
        self._config = directory / f"{name}.conf"
        self._log = directory / "stunnel.log"
        self._listeners = listeners
        self._notify = notify
        self._pid = 0
        self._supervision: asyncio.Future[None] | None = None
        self.ended: asyncio.Future[int]

    def write(self, text: str) -> None:
        """Replace its configuration; existing connections stay open."""
        temporary = self._config.with_suffix(".new")
        temporary.write_text(text)
        temporary.replace(self._config)
        self.reload()

    def reload(self) -> None:
        """Reload its configuration and certificates."""
        if self._supervision is not None and not self.ended.done():
            # During its start SIGHUP ends the process, and it is restarted.
            os.kill(self._pid, signal.SIGHUP)

    def start(self) -> None:
        self._run()
        self._supervision = asyncio.ensure_future(self._supervise())

    def close(self) -> None:
        if self._supervision is not None:
            self._supervision.cancel()
            if not self.ended.done():
                os.kill(self._pid, signal.SIGKILL)
        for listener in self._listeners:
            listener.close()

    def _run(self) -> None:
        descriptors = [listener.fileno() for listener in self._listeners]
        request = {"command": ["stunnel", str(self._config)], "listeners": descriptors}
        self._pid, self.ended = self._processes.run(
            "stunnel",
            {"TFD_OWNER": str(os.getpid()), "TFD_STUNNEL": json.dumps(request)},
            self._log,
            descriptors,
        )

    async def _supervise(self) -> None:
        crashes = 0
        while True:
            started = time.monotonic()
            status = await asyncio.shield(self.ended)
            crashes = 0 if time.monotonic() - started > _STEADY_SECONDS else crashes + 1
            # SIGHUP ends a process that is starting; that is not worth a notice.
            if os.WIFEXITED(status) or os.WTERMSIG(status) != signal.SIGHUP:
                self._notify(
                    "warning", f"the tunnel {self._name} {why_ended(status)}; it is restarted"
                )
            await asyncio.sleep(
                _BACKOFF_SECONDS[min(crashes, len(_BACKOFF_SECONDS)) - 1] if crashes else 0.0
            )
            self._run()


def _listen_on_all_interfaces() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _listen_on_loopback(port: int) -> list[socket.socket]:
    try:
        listeners = [socket.create_server(("127.0.0.1", port))]
    except OSError as error:
        raise PortInUse(
            f"port {port} cannot be used for a tunnel ({error.strerror}): it is in use by "
            f"{ports.port_owner(port)}"
        ) from None
    with contextlib.suppress(OSError):  # no IPv6
        listeners.append(socket.create_server(("::1", port), family=socket.AF_INET6))
    return listeners


def main() -> None:
    """Replace this process by stunnel or openssl, with the agent's sockets, and end with it."""
    end_with_parent(int(os.environ["TFD_OWNER"]))
    request: dict[str, Any] = json.loads(os.environ["TFD_STUNNEL"])
    listeners = request["listeners"]
    # Duplicate the sockets first, to descriptors above those that they get.
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_FD + 2 * len(listeners)) for fd in listeners]
    for number, descriptor in enumerate(moved, _FIRST_FD):
        os.dup2(descriptor, number, inheritable=True)
    name, *arguments = request["command"]
    executable = shutil.which(name)
    assert executable is not None
    environment = dict(os.environ, LISTEN_FDS=str(len(moved)), LISTEN_PID=str(os.getpid()))
    os.execve(executable, [executable, *arguments], environment)
