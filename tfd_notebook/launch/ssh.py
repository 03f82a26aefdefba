"""``launcher="ssh"``: tasks on hosts that ssh reaches, talking to each other through it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tfd_notebook.errors import TfdError, Unsupported, UsageError
from tfd_notebook.launch import processes, relay
from tfd_notebook.launch.client import AgentClient
from tfd_notebook.launch.link import Channel, SocketChannel
from tfd_notebook.launch.remote import RemoteHost, RemoteLauncher, read_greeting
from tfd_notebook.launch.several import Tunnels

#: Seconds that the process with the connections has for one of them, and a little more.
CONNECT_SECONDS = 25.0
_GREETING_SECONDS = 60.0
_CLOSE_SECONDS = 5.0


class SSH(RemoteLauncher):
    """Hosts that ssh reaches: each runs an agent, which goes on when the connection is lost.

    Keys come from files, from an agent and from ``~/.ssh/config``, as for ``ssh`` itself; a host
    must be in ``known_hosts``. Needs the extra ``ssh``.

    Parameters
    ----------
    hosts : str or sequence of str
        ``"name"``, ``"user@name"`` or ``"user@name:port"``; names of ``~/.ssh/config`` serve, too.
    python : str or mapping of str to str
        The Python that has tfd-notebook and TensorFlow; for all, or by host. Default ``"python3"``.
    key : str or sequence of str, optional
        Files with private keys. Default: those that ssh takes.
    known_hosts : str, optional
        File with the keys of the hosts. Default: ``~/.ssh/known_hosts``.
    directory : str, optional
        Working directory of the tasks. Default: where a session begins.
    variables : mapping of str to str, optional
        Environment variables for the agent itself, such as ``TFD_RUNTIME_DIR``. They stand on its
        command line: no secrets.
    secure : bool
        Whether all that tasks say to each other goes through the encrypted connections, so that
        nothing listens for other hosts. Default true. With false the tasks' ports are open to
        exactly the cluster's hosts.
    grace, place, host, allow
        See `RemoteLauncher` and `Launcher`.
    """

    name: ClassVar[str] = "ssh"
    summary: ClassVar[str] = "hosts that ssh reaches, encrypted between each other (extra: ssh)"

    def __init__(
        self,
        hosts: str | Sequence[str] = (),
        *,
        python: str | Mapping[str, str] = "python3",
        key: str | Sequence[str] = (),
        known_hosts: str | None = None,
        directory: str | None = None,
        variables: Mapping[str, str] | None = None,
        secure: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(secure=secure, **options)
        self._hosts = tuple(hosts.split(",")) if isinstance(hosts, str) else tuple(hosts)
        if not self._hosts or not all(self._hosts):
            raise UsageError(
                'launcher "ssh" needs hosts', fix='tfd.launchers.SSH(["user@one", "user@two"])'
            )
        if len(set(self._hosts)) < len(self._hosts):
            raise UsageError(f"hosts={list(hosts)!r} names one twice")
        self._python = python
        self._keys = (key,) if isinstance(key, str) else tuple(key)
        self._known_hosts = known_hosts
        self._directory = directory
        self._variables = dict(variables or {})

    @property
    def options(self) -> dict[str, Any]:
        return {
            **super().options,
            "hosts": list(self._hosts),
            "python": self._python if isinstance(self._python, str) else dict(self._python),
            "key": list(self._keys),
            "known_hosts": self._known_hosts,
            "directory": self._directory,
            "variables": self._variables,
        }

    def hosts(self) -> list[RemoteHost]:
        if importlib.util.find_spec("asyncssh") is None:
            raise Unsupported(
                'launcher "ssh" needs the package asyncssh', fix='pip install "tfd-notebook[ssh]"'
            )
        client = _Client(users=len(self._hosts))
        return [
            _SSHHost(client, label, self._where(label), self._command(label))
            for label in self._hosts
        ]

    def _where(self, label: str) -> dict[str, Any]:
        """Return what asyncssh needs to connect to a host."""
        user, _, rest = label.rpartition("@")
        name, _, port = rest.partition(":")
        where: dict[str, Any] = {"host": name}
        if user:
            where["username"] = user
        if port:
            if not port.isdecimal() or not 0 < int(port) < 65536:
                raise UsageError(f"{label!r}: {port!r} is no port")
            where["port"] = int(port)
        if self._keys:
            where["client_keys"] = list(self._keys)
        if self._known_hosts is not None:
            where["known_hosts"] = os.path.expanduser(self._known_hosts)
        return where

    def _command(self, label: str) -> list[str]:
        """Return what runs Python on a host."""
        python = self._python
        python = python if isinstance(python, str) else python.get(label, "python3")
        return ["env", *(f"{name}={value}" for name, value in self._variables.items()), python]

    def surroundings(self, config: Any) -> dict[str, Any]:
        return {**super().surroundings(config), "directory": self._directory}

    def tunnels(self, hosts: Sequence[RemoteHost]) -> Tunnels:
        return _SSHTunnels([host for host in hosts if isinstance(host, _SSHHost)])


class _Client:
    """The kernel's end of the process that holds the connections."""

    def __init__(self, users: int) -> None:
        self._users = users
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: AgentClient
        self._fds: socket.socket

    def connect(self, label: str, where: dict[str, Any], command: list[str]) -> socket.socket:
        """Return a socket joined to a command on a host.

        Raises
        ------
        OSError
            It cannot be reached now.
        TfdError
            It refuses.
        """
        with self._lock:
            if self._process is None or not self._requests.alive:
                self._start()
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self._fds, [b"x"], [theirs.fileno()])
            asked = self._requests.submit("connect", label=label, where=where, command=command)
        try:
            failed = asked.result(CONNECT_SECONDS)
            if failed:
                raise OSError(failed)
        except BaseException:
            ours.close()
            raise
        return ours

    def ask(self, do: str, **arguments: Any) -> None:
        """Have something done with the tunnels of a host."""
        self._requests.request(do, CONNECT_SECONDS, **arguments)

    def close(self) -> None:
        """Need it no more; when no host does, all connections end."""
        with self._lock:
            self._users -= 1
            if self._users > 0 or self._process is None:
                return
            process, self._process = self._process, None
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._thread.join(_CLOSE_SECONDS)
        self._fds.close()

    def _start(self) -> None:
        started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        # The thread that starts it lives as long as it does: with that thread it would end, too.
        self._thread = threading.Thread(
            target=self._serve, args=(started,), name="tfd-ssh", daemon=True
        )
        self._thread.start()
        error = started.get()
        if error is not None:
            raise error

    def _serve(self, started: queue.SimpleQueue[BaseException | None]) -> None:
        try:
            self._fds, theirs = socket.socketpair()
            with theirs:
                process = self._process = subprocess.Popen(
                    processes.python("sshclient"),
                    env=dict(
                        os.environ,
                        TFD_OWNER=str(os.getpid()),
                        TFD_SSH_FD=str(theirs.fileno()),
                        TFD_SYS_PATH=json.dumps([os.path.abspath(entry) for entry in sys.path]),
                    ),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            requests = self._requests = AgentClient("ssh", "localhost", self._send)
        except BaseException as error:
            started.put(error)
            return
        started.put(None)
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                requests.feed(line)
        requests.lost("the process that holds the connections has ended")

    def _send(self, data: bytes) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise OSError("the connections are closed")
        process.stdin.write(data)
        process.stdin.flush()


class _SSHHost(RemoteHost):
    """A host that ssh reaches."""

    def __init__(
        self, client: _Client, label: str, where: dict[str, Any], command: list[str]
    ) -> None:
        super().__init__(label)
        self.client = client
        self._where = where
        self._command = command
        self._closed = False

    def connect(self, agent: str, start: bool) -> Channel:
        words = [*self._command, "-u", "-c", relay.BOOTSTRAP, agent, "start" if start else "again"]
        channel = SocketChannel(self.client.connect(self.label, self._where, words))
        # A host that never says anything is not waited for.
        watch = threading.Timer(_GREETING_SECONDS, channel.close)
        watch.start()
        try:
            self.greeting = read_greeting(self.label, channel.lines())
        except BaseException:
            channel.close()
            raise
        finally:
            watch.cancel()
        return channel

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.client.close()


class _SSHTunnels:
    """Tunnels from every host to the one that has a port, by way of this one."""

    def __init__(self, hosts: Sequence[_SSHHost]) -> None:
        self._hosts = hosts

    def open(self, port: int, host: int) -> None:
        target = self._hosts[host]
        assert target.greeting is not None
        try:
            # Here comes first: the others' tunnels lead through it.
            if not target.greeting.is_here:
                target.client.ask("tunnel", label=target.label, kind="here", port=port)
            for other in self._hosts:
                assert other.greeting is not None
                shares = other.greeting.identity == target.greeting.identity
                if not shares and not other.greeting.is_here:
                    other.client.ask("tunnel", label=other.label, kind="there", port=port)
        except BaseException:
            self.close(port)
            raise

    def close(self, port: int) -> None:
        for host in self._hosts:
            with contextlib.suppress(TfdError):
                host.client.ask("let_go", label=host.label, port=port)
