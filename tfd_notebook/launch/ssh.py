"""``launcher="ssh"``: tasks on hosts that ssh reaches, talking to each other through it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import os
import queue
import shlex
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from tfd_notebook.errors import LaunchError, PortInUse, Unsupported, UsageError
from tfd_notebook.launch import relay
from tfd_notebook.launch.link import Channel
from tfd_notebook.launch.remote import RemoteHost, RemoteLauncher, read_greeting
from tfd_notebook.launch.several import Tunnels

_CONNECT_SECONDS = 20.0
_GREETING_SECONDS = 60.0
#: Seconds between two signs of life, and how many may be missed.
_ALIVE_SECONDS, _ALIVE_MISSED = 5.0, 3
_CLOSE_SECONDS = 5.0

_T = TypeVar("_T")


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
        _asyncssh()
        python = self._python
        pythons = {
            label: python if isinstance(python, str) else python.get(label, "python3")
            for label in self._hosts
        }
        return [
            _SSHHost(label, pythons[label], self._keys, self._known_hosts, self._variables)
            for label in self._hosts
        ]

    def surroundings(self, config: Any) -> dict[str, Any]:
        return {**super().surroundings(config), "directory": self._directory}

    def tunnels(self, hosts: Sequence[RemoteHost]) -> Tunnels:
        return _SSHTunnels([host for host in hosts if isinstance(host, _SSHHost)])


def _asyncssh() -> Any:
    try:
        import asyncssh
    except ImportError:
        raise Unsupported(
            'launcher "ssh" needs the package asyncssh', fix='pip install "tfd-notebook[ssh]"'
        ) from None
    return asyncssh


class _Loop:
    """A thread with the loop that all connections of this process share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread
        self._users = 0

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), name="tfd-ssh", daemon=True
                )
                self._thread.start()

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._loop is not None:
                loop, self._loop = self._loop, None
                loop.call_soon_threadsafe(loop.stop)
                if self._thread is not threading.current_thread():
                    self._thread.join(_CLOSE_SECONDS)

    def call(self, work: Coroutine[Any, Any, _T], timeout: float) -> _T:
        """Have the loop do `work` and return its result; raise TimeoutError after a while."""
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, timeout), self._loop)
        try:
            return future.result(timeout + 1.0)
        except (concurrent.futures.TimeoutError, asyncio.TimeoutError):
            future.cancel()
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {timeout:g} s") from None

    def soon(self, work: Any, *arguments: Any) -> None:
        loop = self._loop
        if loop is None:
            raise OSError("the connection is closed")
        try:
            loop.call_soon_threadsafe(work, *arguments)
        except RuntimeError as error:
            raise OSError(str(error)) from None

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()


_loop = _Loop()


class _SSHHost(RemoteHost):
    """A host that ssh reaches, and the connection to it that is there now."""

    def __init__(
        self,
        label: str,
        python: str,
        keys: Sequence[str],
        known_hosts: str | None,
        variables: Mapping[str, str],
    ) -> None:
        super().__init__(label)
        user, _, rest = label.rpartition("@")
        name, _, port = rest.partition(":")
        self._where: dict[str, Any] = {"host": name}
        if user:
            self._where["username"] = user
        if port:
            if not port.isdecimal() or not 0 < int(port) < 65536:
                raise UsageError(f"{label!r}: {port!r} is no port")
            self._where["port"] = int(port)
        if keys:
            self._where["client_keys"] = list(keys)
        if known_hosts is not None:
            self._where["known_hosts"] = os.path.expanduser(known_hosts)
        self._python = python
        self._variables = dict(variables)
        self._connection: Any = None
        self._closed = False
        #: The ports that lead from here to this host, and from it to here.
        self.towards: dict[int, Any] = {}
        self.back: dict[int, Any] = {}
        _loop.enter()

    def connect(self, agent: str, start: bool) -> Channel:
        asyncssh = _asyncssh()
        try:
            channel = _loop.call(self._open(asyncssh, agent, start), _CONNECT_SECONDS)
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
        except (asyncssh.Error, ConnectionError) as error:
            raise OSError(getattr(error, "reason", "") or str(error)) from None
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

    async def _open(self, asyncssh: Any, agent: str, start: bool) -> _SSHChannel:
        before, self._connection = self._connection, None
        if before is not None:
            before.abort()
        connection = await asyncssh.connect(
            **self._where,
            keepalive_interval=_ALIVE_SECONDS,
            keepalive_count_max=_ALIVE_MISSED,
            connect_timeout=_CONNECT_SECONDS,
        )
        words = ["env", *(f"{name}={value}" for name, value in self._variables.items())]
        words += [self._python, "-u", "-c", relay.BOOTSTRAP, agent, "start" if start else "again"]
        process = await connection.create_process(shlex.join(words), encoding=None)
        self._connection = connection
        for ports, renew in ((self.towards, self._renew_towards), (self.back, self._renew_back)):
            for port in list(ports):
                with contextlib.suppress(asyncssh.Error, OSError):
                    ports[port] = await renew(port)
        return _SSHChannel(connection, process)

    # Tunnels

    def lead_here(self, port: int) -> None:
        """Have `port` of this process's host lead to `port` of that host."""
        self._tunnel(self.towards, port, self._renew_towards)

    def lead_back(self, port: int) -> None:
        """Have `port` of that host lead to `port` of this process's host."""
        self._tunnel(self.back, port, self._renew_back)

    def _tunnel(self, ports: dict[int, Any], port: int, renew: Any) -> None:
        asyncssh = _asyncssh()
        try:
            ports[port] = _loop.call(renew(port), _CONNECT_SECONDS)
        except (asyncssh.Error, OSError) as error:
            raise PortInUse(
                f"port {port} cannot be taken for a tunnel to {self.label}: "
                f"{getattr(error, 'reason', '') or error}",
                fix="its sshd must allow forwarding (AllowTcpForwarding), or use secure=False",
            ) from None

    async def _renew_towards(self, port: int) -> Any:
        before = self.towards.get(port)
        if before is not None:
            before.close()
        return await self._connection.forward_local_port("localhost", port, "localhost", port)

    async def _renew_back(self, port: int) -> Any:
        return await self._connection.forward_remote_port("localhost", port, "localhost", port)

    def let_go(self, port: int) -> None:
        """End the tunnels at `port`."""
        for ports in (self.towards, self.back):
            listener = ports.pop(port, None)
            if listener is not None:
                with contextlib.suppress(OSError):
                    _loop.soon(listener.close)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                _loop.call(_closed(connection), _CLOSE_SECONDS)
        _loop.leave()


async def _closed(connection: Any) -> None:
    connection.close()
    await connection.wait_closed()


class _SSHChannel:
    """The pipes of what runs on a host."""

    def __init__(self, connection: Any, process: Any) -> None:
        self._connection = connection
        self._process = process
        self._arrived: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reading = asyncio.ensure_future(self._read())
        self._ended = False

    async def _read(self) -> None:
        try:
            while line := await self._process.stdout.readline():
                self._arrived.put(line)
            said = await self._process.stderr.read(4000)
            for line in said.splitlines()[-3:]:
                self._arrived.put(line)
        except (Exception, asyncio.CancelledError):
            pass
        finally:
            self._ended = True
            self._arrived.put(None)

    def send(self, data: bytes) -> None:
        if self._ended:
            raise OSError("the connection is closed")
        _loop.soon(self._process.stdin.write, data)

    def lines(self) -> Iterator[bytes]:
        while (line := self._arrived.get()) is not None:
            yield line

    def close(self) -> None:
        self._ended = True
        self._arrived.put(None)
        with contextlib.suppress(OSError):
            _loop.soon(self._process.close)


class _SSHTunnels:
    """Tunnels from every host to the one that has a port, by way of this process."""

    def __init__(self, hosts: Sequence[_SSHHost]) -> None:
        self._hosts = hosts

    def open(self, port: int, host: int) -> None:
        target = self._hosts[host]
        assert target.greeting is not None
        try:
            # Here comes first: the others' tunnels lead through it.
            if not target.greeting.is_here:
                target.lead_here(port)
            for other in self._hosts:
                assert other.greeting is not None
                shares = other.greeting.identity == target.greeting.identity
                if other is not target and not shares and not other.greeting.is_here:
                    other.lead_back(port)
        except BaseException:
            self.close(port)
            raise

    def close(self, port: int) -> None:
        for host in self._hosts:
            host.let_go(port)
