"""``launcher="command"``: tasks behind a command that runs Python.

The command is a prefix of the command line of Python. With ``nice -n 10`` or ``taskset -c 0-3``,
the tasks take less processor time from other processes. With ``ip netns exec blue`` or
``docker exec -i box``, they run in another network or container. Each command has its own agent.
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
    """Launcher for hosts that commands reach.

    Parameters
    ----------
    commands : str or list of str
        The prefix of ``python``, one for each host.
    addresses : dict of str to str
        By command, the address of the tasks on that host. Default: ``"localhost"``.
    python : str
        The Python of the hosts. Default: this Python.
    **options
        The options of every `RemoteLauncher`.
    """

    name: ClassVar[str] = "command"
    summary: ClassVar[str] = (
        "behind a command that runs Python: nice, taskset, ip netns exec, docker"
    )

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
            raise UsageError(
                f"invalid commands {commands!r}: expected non-empty commands",
                fix='commands="nice -n 10"',
            )
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
    """The host behind one command."""

    def __init__(self, command: str, python: str) -> None:
        super().__init__(command)
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None

    def connect(self, agent: str, start: bool) -> Channel:
        self.close()
        own_end, agent_end = socket.socketpair()
        with agent_end:
            try:
                self._process = subprocess.Popen(
                    [*shlex.split(self.label), self._python, *join_agent(agent, start)],
                    stdin=agent_end,
                    stdout=agent_end,
                    start_new_session=True,
                )
            except OSError as error:
                own_end.close()
                raise LaunchError(f"starting {self.label!r} failed: {error}") from None
        channel = SocketChannel(own_end)
        try:
            self.read_handshake(channel, reconnect=not start)
        except BaseException:
            channel.close()
            self.close()
            raise
        return channel

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            # The command only connects this process to the agent, which keeps running.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()
