"""Simulated hosts: network namespaces with separate files and processes."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from tests._waiting import until
from tests.hosts._network import Network, Peer, inhabitants

NAMES = ("north", "east", "west")
#: Environment variables that a host's processes inherit from the test.
_INHERITED = ("PATH", "LANG", "LC_", "PYTHON", "COVERAGE", "TFD_TEST_", "TF_CPP_")
#: Program that mounts the host's files and then executes the command. ``ip netns exec`` creates a
#: mount namespace for each process.
_BECOME = """
mount --bind "$1" /run && hostname "$2" || exit 125
for file in hosts passwd resolv.conf; do
  if [ -e "/etc/$file" ]; then mount --bind "/run/etc/$file" "/etc/$file" || exit 125; fi
done
shift 2
exec "$@"
"""


class Service(Protocol):
    """A service of a host, which is started again after the host's restart."""

    def alive(self) -> bool: ...
    def launch(self) -> None: ...
    def wait_ready(self) -> None: ...


class Host(Peer):
    """A host with a separate address, name, ``/run``, home, runtime and temporary directory.

    Parameters
    ----------
    name, address, namespace : str
    directory : Path
        Mounted as ``/run`` of the host. It shares all other files with ``home``.

    Attributes
    ----------
    env : dict of str to str
        The environment of its processes, such as ``TFD_RUNTIME_DIR=/run/tfd``.
    runtime, tmp, home : Path
        Paths of these directories of the host for the test.
    died : bool
        True if it was killed and has not been booted since.
    """

    def __init__(self, name: str, address: str, namespace: str, directory: Path) -> None:
        super().__init__(name, address)
        self.namespace = namespace
        self.directory = directory
        self.runtime, self.tmp, self.home = (directory / d for d in ("tfd", "tmp", "home"))
        self.env = {
            name: value for name, value in os.environ.items() if name.startswith(_INHERITED)
        } | {"HOME": "/run/home", "TMPDIR": "/run/tmp", "TFD_RUNTIME_DIR": "/run/tfd"}
        self.died = False
        self._asleep = False
        self.boot()

    def boot(self) -> None:
        """Boot the host without processes and without files of an earlier boot."""
        self._end()
        for directory in (self.runtime, self.tmp, self.home):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(mode=0o700, parents=True)
        self.died = self._asleep = False

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command line that executes `command` on this host, without a child process."""
        become = ("unshare", "--uts", "sh", "-c", _BECOME, "sh", str(self.directory), self.name)
        return ["ip", "netns", "exec", self.namespace, *become, *command]

    def start(
        self, command: Sequence[str], env: dict[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[str]:
        """Start a process on this host with additional variables `env` and options of ``Popen``."""
        process = subprocess.Popen(
            self.command(command), env=self.env | (env or {}), **{"text": True, **popen}
        )
        # From now on, `kill` and `sleep` apply to the process.
        until(lambda: process.pid in self.pids() or process.poll() is not None)
        return process

    def run(
        self, command: Sequence[str], env: dict[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Execute a command on this host; `options` are those of ``subprocess.run``.

        By default, the timeout is 30 s, and the output is captured as text.
        """
        if not {"stdout", "stderr"} & set(options):
            options["capture_output"] = True
        return subprocess.run(
            self.command(command),
            env=self.env | (env or {}),
            **{"text": True, "timeout": 30, **options},
        )

    def pids(self) -> set[int]:
        """Return the ids of the host's processes, without zombies."""
        return inhabitants(self.namespace)

    def kill(self) -> None:
        """Kill the host: send SIGKILL to all of its processes.

        Its address still answers with resets. To simulate a power failure, call `Hosts.down`
        before.
        """
        self.died = True
        self._signal(signal.SIGSTOP)  # so that no process reacts to the death of another
        self._end()

    def sleep(self) -> None:
        """Stop all processes, to simulate a suspended host."""
        self._asleep = True
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Continue all processes."""
        if self._asleep:
            self._asleep = False
            self._signal(signal.SIGCONT)

    def _signal(self, what: signal.Signals) -> None:
        """Send a signal to all processes, including those that start in the meantime."""
        signaled: set[int] = set()

        def all_signaled() -> bool:
            new = self.pids() - signaled
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, what)
            signaled.update(new)
            return not new

        until(all_signaled)

    def _end(self) -> None:
        """Kill all processes, and wait until their sockets are closed.

        `pids` is not sufficient, because a process leaves its namespace before its sockets close.
        """
        while pids := self.pids():
            with contextlib.ExitStack() as stack:
                dying = []
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        dying.append(fd := os.pidfd_open(pid))
                        stack.callback(os.close, fd)
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
                for fd in dying:
                    assert select.select([fd], [], [], 20)[0], "a process did not die in time"


class Hosts(Network):
    """Three hosts, ``north``, ``east`` and ``west``. The test's process is on ``home``.

    A context manager that removes all hosts at the end.

    Attributes
    ----------
    north, east, west : Host
        The hosts, also as ``hosts["north"]`` and so on. Iteration yields all three.
    home : Peer
        The host of the test. Faults apply to it, too.
    services : list of Service
        Services that `mend` starts again after they ended.
    """

    def __init__(self) -> None:
        super().__init__(*NAMES)
        # Without links, because all hosts must resolve the bind mounts in the same manner.
        self._directory = Path(tempfile.mkdtemp(prefix="hosts-")).resolve()
        self.services: list[Service] = []
        self._all: dict[str, Host] = {}
        try:
            for name in NAMES:
                directory = self._directory / name
                self._furnish(directory)
                self._all[name] = Host(name, self.addresses[name], self.namespace(name), directory)
        except BaseException:
            self.close()
            raise
        self.north, self.east, self.west = self._all.values()

    def _furnish(self, directory: Path) -> None:
        """Write a host's own files for ``/etc``, and create the directories of services."""
        (directory / "sshd").mkdir(parents=True, mode=0o755)  # the chroot of sshd
        etc = directory / "etc"
        etc.mkdir()
        names = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
        # A query for an unknown name fails at once, because no server listens at its own address.
        (etc / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        users = Path("/etc/passwd").read_text()
        (etc / "passwd").write_text(users.replace(":/root:", ":/run/home:"))

    def __iter__(self) -> Iterator[Host]:
        return iter(self._all.values())

    def __getitem__(self, name: str) -> Host:
        return self._all[name]

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        try:
            for host in self:
                host.kill()
        finally:
            super().close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def heal(self) -> None:
        """Remove every fault and continue stopped hosts. Killed hosts stay dead."""
        super().heal()
        for host in self:
            host.wake()

    def mend(self) -> None:
        """Heal the network, boot dead hosts, and start stopped services."""
        self.heal()
        for host in self:
            if host.died:
                host.boot()
        stopped = [service for service in self.services if not service.alive()]
        for service in stopped:
            service.launch()
        for service in stopped:
            service.wait_ready()
