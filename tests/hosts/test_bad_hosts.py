"""Hosts with problems: full disks, incompatible versions, and long suspension."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._waiting import until
from tests.hosts._conformance import numbers, pids_on
from tests.hosts._faulty import Reading
from tests.hosts._hosts import Host, Hosts
from tests.hosts._sshd import Sshds
from tfd_notebook import errors
from tfd_notebook._version import VERSION
from tfd_notebook.net.host import identity, tensorflow_version

pytestmark = [pytest.mark.integration, pytest.mark.root, pytest.mark.timeout(170)]

Make = Callable[..., tfd.launchers.SSH]
#: Mount point of a small disk on a host.
DISK = "/run/disk"


@pytest.fixture(scope="module")
def make(sshd: Sshds) -> Make:
    return functools.partial(sshd.launcher, "east")


@contextlib.contextmanager
def small_disk(host: Host, size: str) -> Iterator[Callable[..., None]]:
    """Mount a disk for sshd and its sessions; yield a function that runs a command there."""
    pids = host.pids()
    sshd = next(pid for pid in pids if psutil.Process(pid).parent().pid not in pids)  # type: ignore[union-attr]
    (host.directory / "disk").mkdir()

    def there(*command: str) -> None:
        subprocess.run(["nsenter", "-t", str(sshd), "-m", *command], check=True, timeout=30)

    there("mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", DISK)
    try:
        yield there
    finally:
        there("umount", "-l", DISK)
        (host.directory / "disk").rmdir()


def python_with(directory: Path, path: Path, python: str = sys.executable) -> str:
    """Return a Python that imports from `path` first."""
    script = directory / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {python} "$@"\n')
    script.chmod(0o755)
    return str(script)


def refused(make: Make, hosts: Hosts, **options: Any) -> str:
    """Return the error of a refused cluster; check that the host has no leftovers."""
    before = hosts.east.pids()
    with pytest.raises(errors.TfdError) as caught:
        tfd.Cluster(data_workers=1, name="refused", launcher=make(**options))
    assert "refused" not in tfd.clusters()
    until(lambda: not pids_on(hosts.east, before))
    text = str(caught.value)
    assert f"root@{hosts.east.address}" in text
    assert "Next: " in text
    return text


@pytest.mark.parametrize(("size", "free"), [("4k", 0), ("8m", 8)])
def test_full_disk_is_reported(make: Make, hosts: Hosts, size: str, free: int) -> None:
    with small_disk(hosts.east, size):
        error = refused(make, hosts, variables={"TFD_RUNTIME_DIR": f"{DISK}/tfd"})
    assert f"only {free} MB are free" in error
    assert "TFD_RUNTIME_DIR" in error


def test_disk_that_fills_up_is_reported(make: Make, hosts: Hosts) -> None:
    """Journal and logs cannot be written until the disk has space again."""

    def shout(x: Any) -> Any:
        print("received", "x" * 10_000, int(x), flush=True)
        return x

    noisy = tf.data.Dataset.range(20).map(lambda x: tf.numpy_function(shout, [x], tf.int64))
    launcher = make(variables={"TFD_RUNTIME_DIR": f"{DISK}/tfd"})
    with (
        small_disk(hosts.east, "80m") as there,
        tfd.Cluster(data_workers=1, name="filling", launcher=launcher) as cluster,
    ):
        distributed = noisy.apply(cluster.distribute("off"))
        there("sh", "-c", f"cat /dev/zero > {DISK}/filler 2>/dev/null || true")
        with pytest.raises(errors.WorkDirError) as caught:
            numbers(cluster)
        assert f"{DISK}/tfd" in str(caught.value)
        assert f"root@{hosts.east.address}" in str(caught.value)
        # Either the dispatcher cannot write its journal, or the function cannot print.
        with pytest.raises(errors.TfdError, match=r"No space left"):
            list(distributed)
        there("rm", f"{DISK}/filler")
        assert numbers(cluster) == list(range(100))
        assert sorted(int(x) for x in distributed) == list(range(20))


def test_incompatible_version_is_reported(make: Make, hosts: Hosts, tmp_path: Path) -> None:
    site = tmp_path / "other"
    package = Path(tfd.__file__).parent
    shutil.copytree(package, site / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    (site / package.name / "_version.py").write_text('VERSION = "0.0.1"\n')
    error = refused(make, hosts, python=python_with(tmp_path, site))
    assert f"has tfd-notebook 0.0.1 and this kernel {VERSION}" in error
    assert f"pip install tfd-notebook=={VERSION}" in error


def test_incompatible_tensorflow_is_reported(make: Make, hosts: Hosts, tmp_path: Path) -> None:
    metadata = tmp_path / "other" / "tensorflow-2.3.1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: tensorflow\nVersion: 2.3.1\n")
    error = refused(make, hosts, python=python_with(tmp_path, tmp_path / "other"))
    assert f"has TensorFlow 2.3.1 and this kernel {tensorflow_version()}" in error
    assert "install the same" in error


def test_host_that_claims_to_be_the_kernels_is_not(
    make: Make, hosts: Hosts, tmp_path: Path
) -> None:
    """This process would otherwise read from its own ports instead of the host's."""
    site = tmp_path / "other"
    package = Path(tfd.__file__).parent
    shutil.copytree(package, site / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    module = site / package.name / "net" / "host.py"
    forged = f"\n\ndef identity() -> str:\n    return {identity()!r}\n"
    module.write_text(module.read_text() + forged)
    launcher = make(python=python_with(tmp_path, site))
    with tfd.Cluster(data_workers=1, name="forged", launcher=launcher) as cluster:
        assert numbers(cluster) == list(range(100))
        assert cluster.tasks[0].pid in hosts.east.pids()


def test_stated_addresses_are_not_let_in(sshd: Sshds, hosts: Hosts, tmp_path: Path) -> None:
    """A host states other addresses of its connection than those of this process."""
    script = tmp_path / "python"
    stated = "198.51.100.7 1 203.0.113.9 2"
    script.write_text(f'#!/bin/sh\nSSH_CONNECTION="{stated}" exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    python = {f"root@{hosts.east.address}": str(script)}
    python[f"root@{hosts.north.address}"] = sys.executable
    launcher = sshd.launcher("east", "north", secure=False, python=python)
    with tfd.Cluster(data_workers=2, name="stated", launcher=launcher) as cluster:
        assert numbers(cluster) == list(range(100))
        for task in cluster.snapshot().tasks:
            assert "203.0.113.9" not in task.open_to
            assert ("198.51.100.7" in task.open_to) == (task.pid in hosts.east.pids())
            assert hosts.east.address in task.open_to
            assert hosts.north.address in task.open_to


def test_python_without_tensorflow_is_reported(make: Make, hosts: Hosts, tmp_path: Path) -> None:
    error = refused(make, hosts, python=bare_python(tmp_path, without="tensorflow"))
    assert "has no TensorFlow" in error
    assert "tfd-notebook[tensorflow]" in error


def test_python_without_tfd_notebook_is_reported(make: Make, hosts: Hosts, tmp_path: Path) -> None:
    error = refused(make, hosts, python=bare_python(tmp_path, without="tfd_notebook"))
    assert "has no tfd-notebook" in error
    assert f'pip install "tfd-notebook[tensorflow]=={VERSION}"' in error


def bare_python(directory: Path, without: str) -> str:
    """Return a Python with this one's packages except one."""
    site = directory / "other"
    site.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith((without, "_editable", "tfd_notebook", "__pycache__")):
            (site / path.name).symlink_to(path)
    if without != "tfd_notebook":
        (site / "tfd_notebook").symlink_to(Path(tfd.__file__).parent)
    base = Path(os.path.realpath(sys.executable))
    return python_with(directory, site, str(base))


def test_host_that_sleeps_too_long_stops_its_tasks(make: Make, hosts: Hosts) -> None:
    before = hosts.east.pids()
    launcher = make(grace=2)
    cluster = tfd.Cluster(data_workers=1, name="asleep", launcher=launcher)
    endless = tf.data.Dataset.range(10**9).apply(cluster.distribute("off"))
    reading = Reading(cluster)

    def story(reading: Reading) -> None:
        hosts.east.sleep()
        until(lambda: reading.over, 90)

    with pytest.raises(errors.AgentLost) as caught:
        reading.loop(endless, story)
    assert f"root@{hosts.east.address} could not be reached for 2 s" in str(caught.value)
    assert cluster.state == "lost"
    hosts.east.wake()
    until(lambda: not pids_on(hosts.east, before), 60)
