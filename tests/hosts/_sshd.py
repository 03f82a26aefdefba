"""A real OpenSSH server on each host."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tfd_notebook as tfd
from tests.hosts._hosts import Host, Hosts
from tests.hosts._services import Server, Servers

PORT = 22
_CONFIG = """\
ListenAddress {address}:{port}
HostKey {directory}/host_key
AuthorizedKeysFile {authorized}
PidFile {directory}/pid
AcceptEnv LANG LC_*
SetEnv {environment}
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
StrictModes no
PrintMotd no
AllowTcpForwarding yes
AllowStreamLocalForwarding yes
MaxStartups 100
MaxSessions 100
LogLevel VERBOSE
Subsystem sftp internal-sftp
"""
#: Options of every client, in addition to the host and the key.
_CLIENT = {
    "User": "root",
    "Port": str(PORT),
    "IdentitiesOnly": "yes",
    "GlobalKnownHostsFile": "/dev/null",
    "StrictHostKeyChecking": "yes",
    "BatchMode": "yes",
    "ConnectTimeout": "10",
}


class Sshd(Server):
    """The server of one host.

    Attributes
    ----------
    address : str
    port : int
    user : str
    """

    def __init__(self, host: Host, directory: Path, authorized: Path) -> None:
        sshd = shutil.which("sshd") or "/usr/sbin/sshd"
        command = [sshd, "-D", "-e", "-f", str(directory / "config")]
        super().__init__(host, command, directory / "log")
        self.address, self.port, self.user = host.address, PORT, "root"
        self._directory = directory
        directory.mkdir()
        self._key = directory / "host_key"
        make_key(self._key)
        # AcceptEnv has only the language, as in Debian. PATH is that of sshd, so that a session
        # does not find the test's environment.
        given = {name: value for name, value in host.env.items() if name != "PATH"}
        (directory / "config").write_text(
            _CONFIG.format(
                address=host.address,
                port=PORT,
                directory=directory,
                authorized=authorized,
                environment=" ".join(f'"{name}={value}"' for name, value in given.items()),
            )
        )

    @property
    def host_key(self) -> str:
        """The public key of the host, in the format of known_hosts."""
        return " ".join(Path(f"{self._key}.pub").read_text().split()[:2])

    @contextlib.contextmanager
    def changed_key(self) -> Iterator[None]:
        """Use another host key temporarily, to simulate a reinstalled host.

        Open sessions continue. The new key is not in any file of known keys.
        """
        kept = self._directory / "kept_key"
        for end in ("", ".pub"):
            os.rename(f"{self._key}{end}", f"{kept}{end}")
        make_key(self._key)
        self._read_again()
        try:
            yield
        finally:
            for end in ("", ".pub"):
                os.replace(f"{kept}{end}", f"{self._key}{end}")
            self._read_again()

    @contextlib.contextmanager
    def gateway_ports(self) -> Iterator[None]:
        """Forward ports of new sessions to all hosts, for every address that a client requests."""
        config = self._directory / "config"
        text = config.read_text()
        config.write_text(f"{text}GatewayPorts yes\n")
        self._read_again()
        try:
            yield
        finally:
            config.write_text(text)
            self._read_again()

    def _read_again(self) -> None:
        if self._process and self.alive():
            self._process.send_signal(signal.SIGHUP)
            self.wait_ready()

    def answers(self) -> bool:
        """Return True if it has the expected key."""
        try:
            socket.create_connection((self.address, self.port), 1).close()
        except OSError:
            return False
        scan = subprocess.run(
            ["ssh-keyscan", "-T", "5", "-t", "ed25519", "-p", str(self.port), self.address],
            capture_output=True,
            text=True,
            timeout=30,
        )
        return self.host_key in scan.stdout


class Sshds(Servers[Sshd]):
    """The ssh servers of all hosts by name, and the files of their clients.

    Attributes
    ----------
    client_key : Path
        The private key of the user ``root``. Its public key is ``client_key.pub``.
    stranger_key : Path
        A key that no host accepts.
    known_hosts : Path
        The hosts' keys by name and by address.
    config : Path
        Configuration for ``ssh -F`` and asyncssh, with which home can resolve the hosts' names.
    """

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.client_key = directory / "client_key"
        self.stranger_key = directory / "stranger_key"
        self.known_hosts = directory / "known_hosts"
        self.config = directory / "ssh_config"
        for key in (self.client_key, self.stranger_key):
            make_key(key)
        authorized = Path(f"{self.client_key}.pub")
        super().__init__(
            hosts, {host.name: Sshd(host, directory / host.name, authorized) for host in hosts}
        )
        self.known_hosts.write_text(
            "".join(f"{name},{s.address} {s.host_key}\n" for name, s in self._all.items())
        )
        sections = []
        for name, server in self._all.items():
            options = self._options(server, self.client_key)
            lines = (f"  {key} {value}\n" for key, value in options.items())
            sections.append(f"Host {name} {server.address}\n{''.join(lines)}")
        self.config.write_text("".join(sections))

    def label(self, host: str) -> str:
        """Return the name of a host for a launcher."""
        return f"root@{self[host].address}"

    def launcher(self, *hosts: str, **options: Any) -> tfd.launchers.SSH:
        """Return a launcher for these hosts, by default with this process's Python."""
        return tfd.launchers.SSH(
            [self.label(host) for host in hosts],
            key=str(self.client_key),
            known_hosts=str(self.known_hosts),
            **{"python": sys.executable, **options},
        )

    def command(self, host: str, *words: str, key: Path | None = None) -> list[str]:
        """Return the command line of ``ssh`` for a command on a host, with the key if given.

        It works on home and on the other hosts.
        """
        options = self._options(self[host], key or self.client_key)
        flags = [f"-o{name}={value}" for name, value in options.items()]
        # Without the file, because asyncssh would also try the key in it.
        return ["ssh", "-F", "/dev/null", *flags, host, *words]

    def _options(self, server: Sshd, key: Path) -> dict[str, str]:
        return _CLIENT | {
            "HostName": server.address,
            "IdentityFile": str(key),
            "UserKnownHostsFile": str(self.known_hosts),
        }


def make_key(path: Path) -> None:
    """Create a pair of keys without a passphrase."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path)],
        check=True,
        timeout=30,
    )
