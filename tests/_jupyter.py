"""A Jupyter server on this host, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests._ports import free_port
from tests._waiting import until

_START_SECONDS = 90.0


@contextlib.contextmanager
def serving(application: str, home: Path, token: str, *options: str) -> Iterator[int]:
    """Start an application such as ``jupyterlab`` with its configuration in `home`; yield its port.

    Its kernels have the commands of this Python's environment.
    """
    port = free_port()
    log = home / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", application, "--no-browser", "--allow-root"),
                *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"),
                *("--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"),
                *options,
            ],
            env=dict(
                os.environ,
                PATH=os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"])),
                JUPYTER_CONFIG_DIR=str(home / "config"),
                JUPYTER_DATA_DIR=str(home / "data"),
                JUPYTER_RUNTIME_DIR=str(home / "runtime"),
            ),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until(lambda: process.poll() is not None or _listens(port), _START_SECONDS)
        assert process.poll() is None, log.read_text()[-4_000:]
        yield port
    finally:
        process.terminate()  # also ends its kernels
        process.wait(60)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
