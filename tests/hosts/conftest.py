"""Hosts that the tests of a module share. They are repaired before and checked after each test."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts._hosts import Host, Hosts
from tests.hosts._jupyter import Jupyters
from tests.hosts._slurm import Slurm
from tests.hosts._sshd import Sshds

_SETTLE_SECONDS = 60.0
#: Files of libraries, which a killed process leaves behind.
_FOREIGN_FILES = ("__autograph_generated_file", "__pycache__")
_hosts = pytest.StashKey[Hosts]()


@pytest.fixture(scope="module")
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Return three hosts. Faults end with the test, and killed hosts are booted for the next."""
    with Hosts() as hosts:
        request.config.stash[_hosts] = hosts
        yield hosts
        del request.config.stash[_hosts]


@pytest.fixture(scope="module")
def sshd(hosts: Hosts, _directory: Path) -> Iterator[Sshds]:
    """Return the ssh servers of all hosts."""
    with Sshds(hosts, _directory / "ssh") as sshds:
        yield sshds


@pytest.fixture(scope="module")
def jupyter(hosts: Hosts, _directory: Path) -> Iterator[Jupyters]:
    """Return the Jupyter servers of ``north`` and ``east``."""
    with Jupyters(hosts, _directory / "jupyter", "north", "east") as jupyters:
        yield jupyters


@pytest.fixture(scope="module")
def slurm(hosts: Hosts, _directory: Path) -> Iterator[Slurm]:
    """Return a Slurm with its controller on ``north`` and a Slurm node on each host."""
    with Slurm(hosts, _directory / "slurm") as slurm:
        yield slurm


@pytest.fixture(scope="module")
def _directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="services-")).resolve()
    for service in ("ssh", "jupyter", "slurm"):
        (path / service).mkdir()
    yield path
    shutil.rmtree(path)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Repair the hosts before the test's other fixtures use them."""
    if hosts := item.config.stash.get(_hosts, None):
        hosts.mend()


@pytest.fixture(autouse=True)
def _hosts_are_left_as_they_were(request: pytest.FixtureRequest) -> Iterator[None]:
    """Heal the hosts after a test, and fail a test that left processes or files on a host."""
    if "hosts" not in request.fixturenames:
        yield
        return
    hosts: Hosts = request.getfixturevalue("hosts")
    before = {host: _contents(host) for host in hosts}
    yield
    hosts.heal()
    deadline = time.monotonic() + _SETTLE_SECONDS
    while left := [
        f"{host.name}: {text}"
        for host in hosts
        if not host.died
        for key, text in _contents(host).items()
        if key not in before[host]
    ]:
        if time.monotonic() > deadline:
            pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)
        time.sleep(0.05)


def _contents(host: Host) -> dict[object, str]:
    processes: dict[object, str] = {
        _owner(pid): f"process {pid}: {_command(pid)[:160]}" for pid in host.pids()
    }
    return processes | {
        path: f"file {path.relative_to(host.directory)}"
        for directory in (host.runtime, host.tmp)
        for path in directory.iterdir()
        if not path.name.startswith(_FOREIGN_FILES)
    }


def _owner(pid: int) -> object:
    """Return the agent of a task, which may be restarted, or the process itself."""
    command = _command(pid)
    if command.startswith("sshd: "):
        return "a session of ssh, which ends with the agent's relay"
    if "org.apache.spark" in command or "pyspark.daemon" in command:
        return "Spark, whose executors come and go"
    if "ipykernel_launcher" in command:
        return "a kernel; the server lists those that must run"
    try:
        text = Path(f"/proc/{pid}/environ").read_text() + command
    except OSError:
        return pid
    result = re.search(r"TFD_AGENT=(\w{12})\b|\b(\w{12}) (?:start|reconnect)\b", text)
    return result[1] or result[2] if result else pid


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return "(gone by now)"
