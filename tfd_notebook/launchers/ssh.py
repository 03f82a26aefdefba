"""``launcher="ssh"``: tasks on hosts that ssh reaches, which communicate through ssh tunnels."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import ipaddress
import os
import queue
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from tfd_notebook.agent import interpreter
from tfd_notebook.errors import AgentLost, LaunchError, TfdError, TimeLimit, UsageError
from tfd_notebook.launchers.client.agent_client import AgentClient
from tfd_notebook.launchers.client.multi_host import Tunnels
from tfd_notebook.launchers.client.session import Channel, SocketChannel
from tfd_notebook.launchers.remote import RemoteHost, RemoteLauncher, RemoteTaskHost, join_agent
from tfd_notebook.model.events import Notice
from tfd_notebook.net import optional_packages
from tfd_notebook.net.bounded_write import write_to_pipe

if TYPE_CHECKING:
    from tfd_notebook.launchers.base import OnEvent
    from tfd_notebook.model.spec import ClusterConfig

T = TypeVar("T")

#: Timeout of a connection in the connection process, plus a margin in seconds.
CONNECT_SECONDS = 45.0
_HANDSHAKE_SECONDS = 60.0
_CLOSE_SECONDS = 5.0


class SSH(RemoteLauncher):
    """Hosts that ssh reaches. Each runs an agent, which keeps running if the connection is lost.

    Keys come from files, an ssh agent and ``~/.ssh/config``, as for ``ssh`` itself. A host must be
    in ``known_hosts``. Needs the extra ``ssh``.

    Parameters
    ----------
    hosts : str or sequence of str
        ``"name"``, ``"user@name"`` or ``"user@name:port"``. Names of ``~/.ssh/config`` are valid.
    python : str or mapping of str to str
        Path of a Python with tfd-notebook and TensorFlow: one for all hosts, or by host. Default
        ``"python3"``.
    key : str or sequence of str, optional
        Files with private keys. Default: the keys that ssh uses.
    known_hosts : str, optional
        File with the host keys. Default: ``~/.ssh/known_hosts``.
    directory : str, optional
        Working directory of the tasks. Default: the initial directory of a login session.
    variables : mapping of str to str, optional
        Environment variables for the agent itself, such as ``TFD_RUNTIME_DIR``. They appear on its
        command line, where other users can see them. Do not put secrets there.
    secure : bool or "tls"
        True (the default): all traffic between tasks goes through the encrypted ssh connections. No
        port is open to other hosts. ``"tls"``: it goes through stunnel tunnels from host to host,
        without passing this host. False: the tasks' ports are open to exactly the cluster's hosts.
    grace, place, host, allow
        See `RemoteLauncher` and `Launcher`.
    """

    name: ClassVar[str] = "ssh"
    summary: ClassVar[str] = "hosts that ssh reaches, with encrypted tunnels (extra: ssh)"

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
            raise UsageError(f"invalid secure {secure!r}: expected True, False or 'tls'")
        super().__init__(secure=bool(secure), grace=grace, place=place, host=host, allow=allow)
        self._by_tls = secure == "tls"
        self._hosts = tuple(hosts.split(",")) if isinstance(hosts, str) else tuple(hosts)
        if not self._hosts or not all(self._hosts):
            raise UsageError(
                'launcher "ssh" needs hosts', fix='tfd.launchers.SSH(["user@one", "user@two"])'
            )
        if len(set(self._hosts)) < len(self._hosts):
            raise UsageError(
                f"invalid hosts {list(self._hosts)!r}: duplicate entries", fix="list each host once"
            )
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
        optional_packages.load("asyncssh", 'launcher "ssh"', "ssh")
        client = _Client(users=len(self._hosts))
        return [
            _SSHHost(client, label, self._connect_arguments(label), self._command(label))
            for label in self._hosts
        ]

    def _connect_arguments(self, label: str) -> dict[str, Any]:
        """Return asyncssh's connection arguments for a host."""
        user, _, rest = label.rpartition("@")
        name, _, port = rest.partition(":")
        arguments: dict[str, Any] = {"host": name}
        if user:
            arguments["username"] = user
        if port:
            if not port.isdecimal() or not 0 < int(port) < 65536:
                raise UsageError(f"invalid port {port!r} in host {label!r}: expected 1 to 65535")
            arguments["port"] = int(port)
        if self._keys:
            arguments["client_keys"] = list(self._keys)
        if self._known_hosts is not None:
            arguments["known_hosts"] = os.path.expanduser(self._known_hosts)
        return arguments

    def _command(self, label: str) -> list[str]:
        """Return the command that runs Python on a host."""
        python = self._python
        python = python if isinstance(python, str) else python.get(label, "python3")
        return ["env", *(f"{name}={value}" for name, value in self._variables.items()), python]

    def task_environment(self, config: Any) -> dict[str, Any]:
        return {**super().task_environment(config), "directory": self._directory}

    def tunnels(
        self, task_hosts: Sequence[RemoteTaskHost], config: ClusterConfig, on_event: OnEvent
    ) -> Tunnels:
        if self._by_tls:
            return super().tunnels(task_hosts, config, on_event)
        return _SSHTunnels(task_hosts, config.name, on_event)


class _Client:
    """Typed requests to the process that holds the ssh connections. All are encoded here."""

    def __init__(self, users: int) -> None:
        self._users = users
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: AgentClient
        self._fds: socket.socket
        #: Tunnels of each host, by its label. A process that replaces a failed one needs them.
        self._tunnels: dict[str, set[tuple[str, int]]] = {}

    def connect(
        self, label: str, arguments: dict[str, Any], command: list[str]
    ) -> tuple[socket.socket, str, str]:
        """Return a socket that is connected to a command on a host, and the connection's ends.

        The ends are the addresses of the host and of this process; empty if unknown.

        Raises
        ------
        OSError
            The host cannot be reached now.
        TfdError
            The host rejects the connection.
        """
        with self._lock:
            if self._process is None or not self._requests.alive:
                self._start()
            local, remote = socket.socketpair()
            with remote:
                socket.send_fds(self._fds, [b"x"], [remote.fileno()])
            request = self._requests.submit(
                "connect",
                label=label,
                options=arguments,
                command=command,
                tunnels=sorted(self._tunnels.get(label, ())),
            )
        try:
            failed, peer, own = request.result(CONNECT_SECONDS)
            if failed:
                raise OSError(failed)
        except concurrent.futures.TimeoutError:
            local.close()
            raise OSError(f"no response for {CONNECT_SECONDS:g} s") from None
        except AgentLost as error:  # the connection process ended; the next call starts another
            local.close()
            raise OSError(error.what) from None
        except BaseException:
            local.close()
            raise
        return local, peer, own

    def open_tunnel(self, label: str, direction: str, port: int) -> None:
        """Open a tunnel to a host, now and after each reconnect."""
        with self._lock:
            self._tunnels.setdefault(label, set()).add((direction, port))
        self._requests.request(
            "open_tunnel", CONNECT_SECONDS, label=label, direction=direction, port=port
        )

    def await_tunnels(self, label: str) -> list[int]:
        """Return the ports of the host's tunnels, after a reconnect has opened them."""
        self._requests.request("await_tunnels", CONNECT_SECONDS, label=label)
        with self._lock:
            return sorted(
                port for direction, port in self._tunnels.get(label, ()) if direction == "from_host"
            )

    def close_tunnels(self, label: str, port: int) -> None:
        """Close the tunnels to a host at `port`."""
        with self._lock:
            self._tunnels.get(label, set()).difference_update(
                {("to_host", port), ("from_host", port)}
            )
        self._requests.request("close_tunnels", CONNECT_SECONDS, label=label, port=port)

    def close(self) -> None:
        """Release one use of the process. The last release ends all connections."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._end()

    def _end(self) -> None:
        """End the process, if any, and wait for it."""
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
        # The thread that starts the process must run as long as the process. When the thread ends,
        # the process receives its parent-death signal.
        self._thread = threading.Thread(
            target=self._serve, args=(started,), name="tfd-ssh", daemon=True
        )
        self._thread.start()
        error = started.get()
        if error is not None:
            raise error

    def _serve(self, started: queue.SimpleQueue[BaseException | None]) -> None:
        try:
            self._fds, process_end = socket.socketpair()
            with process_end:
                process = self._process = subprocess.Popen(
                    interpreter.command("tfd_notebook.launchers.client.ssh_connections"),
                    env=dict(
                        interpreter.environment(),
                        TFD_OWNER=str(os.getpid()),
                        TFD_SSH_FD=str(process_end.fileno()),
                    ),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=(process_end.fileno(),),
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
        requests.lost("the process of the ssh connections ended")

    def _send(self, data: bytes) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise OSError("the connections are closed")
        write_to_pipe(process.stdin, data)


class _SSHHost(RemoteHost):
    """A host connected by ssh."""

    def __init__(
        self, client: _Client, label: str, arguments: dict[str, Any], command: list[str]
    ) -> None:
        super().__init__(label)
        self.client = client
        self._connect_arguments = arguments
        self._command = command
        self._closed = False
        #: Runs in a separate thread after each reconnect.
        self.on_reconnect: Callable[[], None] | None = None

    def connect(self, agent: str, start: bool) -> Channel:
        command = [*self._command, *join_agent(agent, start), "ssh"]
        connected, self.peer_address, self.own_address = self.client.connect(
            self.label, self._connect_arguments, command
        )
        channel = SocketChannel(connected)
        # Close the channel of a host that sends no handshake.
        watch = threading.Timer(_HANDSHAKE_SECONDS, channel.close)
        watch.start()
        try:
            self.read_handshake(channel, reconnect=not start)
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
    """Tunnels from every host to the host of a port, through this host."""

    def __init__(
        self, task_hosts: Sequence[RemoteTaskHost], cluster: str, on_event: OnEvent
    ) -> None:
        self._task_hosts = task_hosts
        self._hosts = [known.remote for known in task_hosts if isinstance(known.remote, _SSHHost)]
        self._cluster = cluster
        self._on_event = on_event
        for task_host, host in zip(task_hosts, self._hosts, strict=True):
            host.on_reconnect = functools.partial(self._check_after_reconnect, task_host, host)

    def _check_after_reconnect(self, task_host: RemoteTaskHost, host: _SSHHost) -> None:
        """Close the tunnels that sshd opened to other hosts after a reconnect."""
        try:
            for port in _retry_until_reply(lambda: host.client.await_tunnels(host.label)):
                try:
                    _retry_until_reply(functools.partial(_check_loopback, task_host, port))
                except AgentLost:
                    return
                except LaunchError as error:
                    host.client.close_tunnels(host.label, port)
                    self._on_event(
                        Notice(
                            "error",
                            f"the tunnel at port {port} was closed: {error.what}",
                            fix=error.fix,
                        )
                    )
        except TfdError:
            pass  # the connection is lost again; the next reconnect repeats the check

    def open(self, port: int, host: int) -> None:
        target = self._hosts[host]
        try:
            # The tunnel to this host comes first: the others lead through it.
            if not target.is_local:
                target.client.open_tunnel(target.label, "to_host", port)
            for task_host, other in zip(self._task_hosts, self._hosts, strict=True):
                if other.identity != target.identity and not other.is_local:
                    other.client.open_tunnel(other.label, "from_host", port)
                    _check_loopback(task_host, port)
        except BaseException:
            self.close(port)
            raise

    def close(self, port: int) -> None:
        for host in self._hosts:
            with contextlib.suppress(TfdError):
                host.client.close_tunnels(host.label, port)

    def end(self) -> None:
        """Do nothing: the tunnels ended with the connections."""


def _retry_until_reply(request: Callable[[], T]) -> T:
    """Repeat a request until it is answered in time, since an old session may still hold a port."""
    while True:
        try:
            return request()
        except TimeLimit:
            continue


def _check_loopback(task_host: RemoteTaskHost, port: int) -> None:
    """Raise LaunchError if sshd lets other hosts connect to a tunnel in spite of the request."""
    listening = task_host.listening_addresses(port)
    exposed = [a for a in listening if not ipaddress.ip_address(a).is_loopback]
    if exposed:
        raise LaunchError(
            f"{task_host.label}: sshd opens the tunnel at port {port} to other hosts (it listens "
            f"at {', '.join(exposed)}), because GatewayPorts is set to yes",
            fix='set GatewayPorts no, or clientspecified, in its sshd_config, or use secure="tls"',
        )
