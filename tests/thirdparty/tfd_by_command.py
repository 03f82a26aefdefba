"""``launcher="command"``: tasks wherever a command can run Python.

The command is put before that of Python: ``nice -n 10`` and ``taskset -c 0-3`` keep the tasks from
being in the way of others on this host, ``ip netns exec blue`` and ``docker exec -i box`` run them
in another network or container, each with an agent of its own.
"""

from __future__ import annotations

import contextlib
import shlex
import socket
import subprocess
import sys
from typing import Any, ClassVar

from tfd_notebook.errors import LaunchError, UsageError
from tfd_notebook.launchers import Channel, RemoteHost, RemoteLauncher, SocketChannel, join_agent


class ByCommand(RemoteLauncher):
    """Hosts that commands reach.

    Parameters
    ----------
    commands : str or list of str
        What stands before ``python`` there, one for each host.
    addresses : dict of str to str
        By command, the address at which tasks there are reached. Default: ``"localhost"``.
    python : str
        The Python there. Default: this one.
    **options
        Those of every `RemoteLauncher`.
    """

    name: ClassVar[str] = "command"
    summary: ClassVar[str] = "wherever a command runs Python: nice, taskset, ip netns exec, docker"

    def __init__(
        self,
        commands: str | list[str] = "nice -n 10",
        *,
        addresses: dict[str, str] | None = None,
        python: str = sys.executable,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._commands = [commands] if isinstance(commands, str) else list(commands)
        if not all(map(shlex.split, self._commands)):
            raise UsageError("commands= has an empty one", fix='commands="nice -n 10"')
        self._addresses = dict(addresses or {})
        self._python = python

    @property
    def options(self) -> dict[str, Any]:
        return {
            **super().options,
            "commands": self._commands,
            "addresses": self._addresses,
            "python": self._python,
        }

    def hosts(self) -> list[RemoteHost]:
        return [CommandHost(command, self._python) for command in self._commands]

    def address_of(self, host: RemoteHost) -> str:
        return self._addresses.get(host.label, "localhost")


class CommandHost(RemoteHost):
    """What one command leads to."""

    def __init__(self, command: str, python: str) -> None:
        super().__init__(command)
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None

    def connect(self, agent: str, start: bool) -> Channel:
        self.close()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*shlex.split(self.label), self._python, *join_agent(agent, start)],
                    stdin=theirs,
                    stdout=theirs,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise LaunchError(f"{self.label}: {error}") from None
        channel = SocketChannel(ours)
        try:
            self.greet(channel, again=not start)
        except BaseException:
            channel.close()
            self.close()
            raise
        return channel

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            # It only joins this process to the agent, which goes on.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
            process.kill()
            process.wait()
