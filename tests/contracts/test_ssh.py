"""Promises of docs/launching.md about hosts that ssh reaches, on this host and without root.

The server is asyncssh's, which needs no package of the system. `tests/hosts` uses OpenSSH.
"""

from __future__ import annotations

import getpass
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncssh
import psutil
import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tfd_notebook import errors

pytestmark = pytest.mark.integration

#: Runs the commands of clients with an authorized key, until its input ends.
SERVER = """
import asyncio, asyncssh, sys
from asyncio.subprocess import PIPE

async def run(session):
    child = await asyncio.create_subprocess_shell(
        session.command, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    await session.redirect(child.stdin, child.stdout, child.stderr)
    session.exit(await child.wait())

async def main(host_key, authorized):
    server = await asyncssh.listen(
        "127.0.0.1", 0, server_host_keys=[host_key], authorized_client_keys=authorized,
        process_factory=run, encoding=None,
    )
    print(server.get_port(), flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(*sys.argv[1:]))
"""

Launcher = Callable[..., tfd.launchers.SSH]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory with the keys of the host, of its user and of another user."""
    directory = tmp_path_factory.mktemp("keys")
    for name in ("host", "user", "stranger"):
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(directory / name)
        key.write_public_key(directory / f"{name}.pub")
    return directory


@pytest.fixture(scope="module")
def label(keys: Path) -> Iterator[str]:
    """Return the name of the host for launchers. Its key is in ``known_hosts``."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, keys / "host", keys / "user.pub"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin
        assert server.stdout
        port = int(server.stdout.readline())
        (keys / "known_hosts").write_text(f"[localhost]:{port} {(keys / 'host.pub').read_text()}")
        yield f"{getpass.getuser()}@localhost:{port}"
        server.stdin.close()


@pytest.fixture(scope="module")
def ssh(keys: Path, label: str) -> Launcher:
    def ssh(key: str = "user", known_hosts: str = "known_hosts") -> Any:
        return tfd.launchers.SSH(
            [label],
            python=sys.executable,
            key=str(keys / key),
            known_hosts=str(keys / known_hosts),
        )

    return ssh


def test_dataset_is_read_from_a_data_worker_on_the_host(ssh: Launcher, label: str) -> None:
    with tfd.Cluster(data_workers=1, name="by-ssh", launcher=ssh()) as cluster:
        frame = cluster.to_frame()
        assert set(frame["host"]) == {label}
        assert set(frame["open_to"]) == {"loopback"}
        squares = tf.data.Dataset.range(20).map(lambda number: number * number)
        distributed = squares.apply(cluster.distribute("dynamic"))
        assert sorted(int(number) for number in distributed) == [n * n for n in range(20)]
        tasks = [psutil.Process(task.pid) for task in cluster.tasks]
    assert cluster.state == "stopped"
    assert psutil.wait_procs(tasks, timeout=60)[1] == []


def test_wrong_key_is_an_error_with_host_and_next_step(ssh: Launcher, label: str) -> None:
    with pytest.raises(errors.LaunchError, match="rejected the login") as caught:
        tfd.Cluster(data_workers=1, name="wrong-key", launcher=ssh(key="stranger"))
    assert label in caught.value.what
    assert "set key= to another key" in caught.value.fix
    assert "wrong-key" not in tfd.clusters()


def test_unknown_host_key_is_refused(ssh: Launcher, label: str, keys: Path) -> None:
    (keys / "empty").touch()
    with pytest.raises(errors.LaunchError, match="not in known_hosts") as caught:
        tfd.Cluster(data_workers=1, name="unknown-host", launcher=ssh(known_hosts="empty"))
    assert label in caught.value.what
    assert f"ssh {label}" in caught.value.fix
