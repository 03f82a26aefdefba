"""``launcher="ssh"``: tasks on hosts that ssh reaches, talking to each other through it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib.util
import ipaddress
import os
import queue
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from tfd_notebook.agent import interpreter
from tfd_notebook.errors import AgentLost, LaunchError, TfdError, TimeLimit, Unsupported, UsageError
from tfd_notebook.launchers.client.agent_client import AgentClient
from tfd_notebook.launchers.client.multi_host import Tunnels
from tfd_notebook.launchers.client.session import Channel, SocketChannel
from tfd_notebook.launchers.remote import RemoteHost, RemoteLauncher, RemoteNode, join_agent
from tfd_notebook.net.bounded_write import write_to_pipe

if TYPE_CHECKING:
    from tfd_notebook.launchers.base import OnEvent
    from tfd_notebook.model.spec import ClusterConfig

T = TypeVar("T")

#: Seconds that the process with the connections has for one of them, and a little more.
CONNECT_SECONDS = 45.0
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
    secure : bool or "tls"
        Whether all that tasks say to each other goes through the encrypted connections, so that
        nothing listens for other hosts. Default true. With ``"tls"`` it goes from host to host
        through tunnels of stunnel, and not by way of this one. With false the tasks' ports are open
        to exactly the cluster's hosts.
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
        secure: bool | str = True,
        grace: float = 600.0,
        place: Mapping[str, str | Sequence[str]] | None = None,
        host: str | Mapping[str, str] = "",
        allow: Iterable[str] = (),
    ) -> None:
        if secure not in (True, False, "tls"):
            raise UsageError(f"secure={secure!r} is none of True, False and 'tls'")
        super().__init__(secure=bool(secure), grace=grace, place=place, host=host, allow=allow)
        self._by_tls = secure == "tls"
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
            **({"secure": "tls"} if self._by_tls else {}),
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

    def tunnels(
        self, nodes: Sequence[RemoteNode], config: ClusterConfig, on_event: OnEvent
    ) -> Tunnels:
        if self._by_tls:
            return super().tunnels(nodes, config, on_event)
        return _SSHTunnels(nodes, config.name, on_event)


class _Client:
    """The kernel's end of the process that holds the connections."""

    def __init__(self, users: int) -> None:
        self._users = users
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: AgentClient
        self._fds: socket.socket
        #: What leads to which host, by its label: a process that takes the place of one that died
        #: has to be told.
        self._tunnels: dict[str, set[tuple[str, int]]] = {}

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
            asked = self._requests.submit(
                "connect",
                label=label,
                where=where,
                command=command,
                tunnels=sorted(self._tunnels.get(label, ())),
            )
        try:
            failed = asked.result(CONNECT_SECONDS)
            if failed:
                raise OSError(failed)
        except concurrent.futures.TimeoutError:
            ours.close()
            raise OSError(f"silent for {CONNECT_SECONDS:g} s") from None
        except AgentLost as error:  # of this process: another one can be started
            ours.close()
            raise OSError(error.what) from None
        except BaseException:
            ours.close()
            raise
        return ours

    def tunnel(self, label: str, kind: str, port: int) -> None:
        """Have a tunnel to a host, now and over each connection that comes after this one."""
        with self._lock:
            self._tunnels.setdefault(label, set()).add((kind, port))
        self._requests.request("tunnel", CONNECT_SECONDS, label=label, kind=kind, port=port)

    def reopened(self, label: str) -> list[int]:
        """Return the ports of the host's own tunnels, once a new connection has opened them."""
        self._requests.request("reopened", CONNECT_SECONDS, label=label)
        with self._lock:
            return sorted(port for kind, port in self._tunnels.get(label, ()) if kind == "there")

    def let_go(self, label: str, port: int) -> None:
        """End the tunnels to a host at `port`."""
        with self._lock:
            self._tunnels.get(label, set()).difference_update({("here", port), ("there", port)})
        self._requests.request("let_go", CONNECT_SECONDS, label=label, port=port)

    def close(self) -> None:
        """Need it no more; when no host does, all connections end."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._end()

    def _end(self) -> None:
        """Have no process, after one that may have died."""
        process, self._process = self._process, None
        if process is None:
            return
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
        self._end()
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
                    interpreter.command("tfd_notebook.launchers.client.ssh_connections"),
                    env=dict(
                        interpreter.environment(),
                        TFD_OWNER=str(os.getpid()),
                        TFD_SSH_FD=str(theirs.fileno()),
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
                requests.handle_line(line)
        requests.lost("the process that holds the connections has ended")

    def _send(self, data: bytes) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise OSError("the connections are closed")
        write_to_pipe(process.stdin, data)


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
        #: Runs in a thread of its own after each reconnect.
        self.on_reconnect: Callable[[], None] | None = None

    def connect(self, agent: str, start: bool) -> Channel:
        words = [*self._command, *join_agent(agent, start), "ssh"]
        channel = SocketChannel(self.client.connect(self.label, self._where, words))
        # A host that never says anything is not waited for.
        watch = threading.Timer(_GREETING_SECONDS, channel.close)
        watch.start()
        try:
            self.greet(channel, again=not start)
        except BaseException:
            channel.close()
            raise
        finally:
            watch.cancel()
        if self.on_reconnect is not None:
            # The session resumes over the channel that this returns, and the check uses it.
            threading.Thread(target=self.on_reconnect, name="tfd-ssh-check", daemon=True).start()
        return channel

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.client.close()


class _SSHTunnels:
    """Tunnels from every host to the one that has a port, by way of this one."""

    def __init__(self, nodes: Sequence[RemoteNode], cluster: str, on_event: OnEvent) -> None:
        self._nodes = nodes
        self._hosts = [node.remote for node in nodes if isinstance(node.remote, _SSHHost)]
        self._cluster = cluster
        self._on_event = on_event
        for node, host in zip(nodes, self._hosts, strict=True):
            host.on_reconnect = functools.partial(self._check_again, node, host)

    def _check_again(self, node: RemoteNode, host: _SSHHost) -> None:
        """Close the tunnels that sshd opens to other hosts after a reconnect."""
        try:
            for port in _until_answered(lambda: host.client.reopened(host.label)):
                try:
                    _until_answered(functools.partial(_check_loopback, node, port))
                except AgentLost:
                    return
                except LaunchError as error:
                    host.client.let_go(host.label, port)
                    self._on_event(
                        {
                            "event": "notice",
                            "cluster": self._cluster,
                            "severity": "error",
                            "what": f"the tunnel at port {port} was closed: {error.what}",
                            "task": None,
                            "fix": error.fix,
                        }
                    )
        except TfdError:
            pass  # the connection is lost again, and the next one is checked

    def open(self, port: int, host: int) -> None:
        target = self._hosts[host]
        assert target.greeting is not None
        try:
            # Here comes first: the others' tunnels lead through it.
            if not target.greeting.is_here:
                target.client.tunnel(target.label, "here", port)
            for node, other in zip(self._nodes, self._hosts, strict=True):
                assert other.greeting is not None
                shares = other.greeting.identity == target.greeting.identity
                if not shares and not other.greeting.is_here:
                    other.client.tunnel(other.label, "there", port)
                    _check_loopback(node, port)
        except BaseException:
            self.close(port)
            raise

    def close(self, port: int) -> None:
        for host in self._hosts:
            with contextlib.suppress(TfdError):
                host.client.let_go(host.label, port)

    def end(self) -> None:
        """Nothing is left: they ended with the connections."""


def _until_answered(request: Callable[[], T]) -> T:
    """Repeat a request until it is answered in time: an old session may still hold a port."""
    while True:
        try:
            return request()
        except TimeLimit:
            continue


def _check_loopback(node: RemoteNode, port: int) -> None:
    """Raise LaunchError if sshd lets other hosts connect to a tunnel, whatever was asked for."""
    listening = node.request("listeners", port=port)
    opened = [one for one in listening if not ipaddress.ip_address(one).is_loopback]
    if opened:
        raise LaunchError(
            f"{node.label}: its sshd opens the tunnel at port {port} to other hosts (it listens at "
            f"{', '.join(opened)}): GatewayPorts is set to yes",
            fix='set GatewayPorts no, or clientspecified, in its sshd_config, or use secure="tls"',
        )
