"""Several hosts on one machine: each a network namespace with files and processes of its own."""

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
#: What a host's processes inherit from the test's, besides what the host itself sets.
_INHERITED = ("PATH", "LANG", "LC_", "PYTHON", "COVERAGE", "TFD_TEST_", "TF_CPP_")
#: What a process does before it becomes the command: its host's files take their places, in a
#: mount namespace that ``ip netns exec`` made for this process alone.
_BECOME = """
mount --bind "$1" /run && hostname "$2" || exit 125
for file in hosts passwd resolv.conf; do
  if [ -e "/etc/$file" ]; then mount --bind "/run/etc/$file" "/etc/$file" || exit 125; fi
done
shift 2
exec "$@"
"""


class Service(Protocol):
    """What a host offers, and offers again after the host has been restarted."""

    def alive(self) -> bool: ...
    def launch(self) -> None: ...
    def wait_ready(self) -> None: ...


class Host(Peer):
    """A host: an address, a name, ``/run``, home, runtime and temporary directory of its own.

    Parameters
    ----------
    name, address, namespace : str
    directory : Path
        What the host sees as ``/run``. Everything else of the file system is as at home.

    Attributes
    ----------
    env : dict of str to str
        The environment of its processes: ``TFD_RUNTIME_DIR`` is ``/run/tfd``, and so on.
    runtime, tmp, home : Path
        Where those directories of the host are for the test.
    died : bool
        Whether it was killed, and has not been booted since.
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
        """Begin, or begin again: nothing runs, and no file is left from before."""
        self._end()
        for directory in (self.runtime, self.tmp, self.home):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(mode=0o700, parents=True)
        self.died = self._asleep = False

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command line that becomes `command` here, without a process in between."""
        become = ("unshare", "--uts", "sh", "-c", _BECOME, "sh", str(self.directory), self.name)
        return ["ip", "netns", "exec", self.namespace, *become, *command]

    def start(
        self, command: Sequence[str], env: dict[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[str]:
        """Start a process here; `env` adds to the host's, the rest is as for ``Popen``."""
        process = subprocess.Popen(
            self.command(command), env=self.env | (env or {}), **{"text": True, **popen}
        )
        # From now on it is one that `kill` and `sleep` hit.
        until(lambda: process.pid in self.pids() or process.poll() is not None)
        return process

    def run(
        self, command: Sequence[str], env: dict[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Execute a command here; `options` are of ``subprocess.run``.

        Unless they say something else, it has 30 s, and its output is kept as text.
        """
        if not {"stdout", "stderr"} & set(options):
            options["capture_output"] = True
        return subprocess.run(
            self.command(command),
            env=self.env | (env or {}),
            **{"text": True, "timeout": 30, **options},
        )

    def pids(self) -> set[int]:
        """Return which processes there are; those that wait to be reaped do not count."""
        return inhabitants(self.namespace)

    def kill(self) -> None:
        """Let the host die: SIGKILL to all, sessions and services.

        Its address still answers, with resets. For a host that falls silent as it dies, as one
        without power does, let it be `Hosts.down` before.
        """
        self.died = True
        self._tell(signal.SIGSTOP)  # so that nobody sees another one die, and acts upon it
        self._end()

    def sleep(self) -> None:
        """Stop all its processes, as the lid of a laptop does."""
        self._asleep = True
        self._tell(signal.SIGSTOP)

    def wake(self) -> None:
        """Let them go on."""
        if self._asleep:
            self._asleep = False
            self._tell(signal.SIGCONT)

    def _tell(self, what: signal.Signals) -> None:
        """Send a signal to all, to those too that are born meanwhile."""
        told: set[int] = set()

        def done() -> bool:
            new = self.pids() - told
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, what)
            told.update(new)
            return not new

        until(done)

    def _end(self) -> None:
        """Kill all, and wait until their sockets are closed, too.

        These are closed later than a process leaves its namespace, so `pids` does not tell.
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
    """Three hosts, ``north``, ``east`` and ``west``; the test's own process is at ``home``.

    A context manager: at its end everything is gone.

    Attributes
    ----------
    north, east, west : Host
        By name they are ``hosts["north"]`` and so on; iterating gives all three.
    home : Peer
        Faults hit it as they do the others.
    services : list of Service
        What `mend` starts again where it does not run any more.
    """

    def __init__(self) -> None:
        super().__init__(*NAMES)
        # Without links in its path: what a host binds there has to be the same for all.
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
        """Write what a host has of its own in ``/etc``, and make the directories of services."""
        (directory / "sshd").mkdir(parents=True, mode=0o755)  # where sshd locks itself in
        etc = directory / "etc"
        etc.mkdir()
        names = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
        # Asking itself, where nobody listens, it learns at once that there is no such name.
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
        """Remove every fault and wake who sleeps; who was killed stays dead."""
        super().heal()
        for host in self:
            host.wake()

    def mend(self) -> None:
        """Heal, boot the hosts that died, and start the services that stopped."""
        self.heal()
        for host in self:
            if host.died:
                host.boot()
        stopped = [service for service in self.services if not service.alive()]
        for service in stopped:
            service.launch()
        for service in stopped:
            service.wait_ready()
