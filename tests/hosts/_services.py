"""Servers on hosts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from tests._waiting import until
from tests.hosts._hosts import Host, Hosts

if TYPE_CHECKING:
    from typing_extensions import Self


class Server:
    """A server process on a host.

    Parameters
    ----------
    host : Host
    command : sequence of str
    log : Path
        File for its output. A restarted process appends to it.
    env : mapping, optional
        Variables in addition to the host's environment.

    Attributes
    ----------
    host : Host
    log : Path
    """

    #: Timeout for the start, in seconds.
    start_seconds = 20.0

    def __init__(
        self,
        host: Host,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.host = host
        self.log = log
        self._command = list(command)
        self._env = dict(env or {})
        self._process: subprocess.Popen[str] | None = None

    def launch(self) -> None:
        """Start it without waiting for its answer."""
        with self.log.open("ab") as log:
            self._process = self.host.start(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until it answers."""
        until(self._ready, self.start_seconds)

    def _ready(self) -> bool:
        assert self.alive(), self.log.read_text()[-4_000:]
        return self.answers()

    def answers(self) -> bool:
        """Return True if it serves. A subclass overrides this method."""
        return True

    def alive(self) -> bool:
        """Return True if the process runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End it."""
        if self._process:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


AnyServer = TypeVar("AnyServer", bound=Server)


class Servers(Generic[AnyServer]):
    """Servers by the names of their hosts.

    A context manager that runs them until its end, and restarts those that a test ended.
    """

    def __init__(self, hosts: Hosts, servers: Mapping[str, AnyServer]) -> None:
        self._hosts = hosts
        self._all = dict(servers)

    def __iter__(self) -> Iterator[AnyServer]:
        return iter(self._all.values())

    def __getitem__(self, name: str) -> AnyServer:
        return self._all[name]

    def __enter__(self) -> Self:
        for server in self:
            server.launch()
        self._hosts.services.extend(self)
        try:
            for server in self:
                server.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self:
            self._hosts.services.remove(server)
            server.stop()
