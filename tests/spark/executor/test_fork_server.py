"""The process that nodes are forked from: its errors and its protection from other clients."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests._waiting import until
from tests.spark._unauthenticated import junk, knock, members, unix_sockets
from tfd_notebook.errors import LaunchError, TensorFlowMissing
from tfd_notebook.spark.executor import executor, fork_server

pytestmark = pytest.mark.integration

#: Timeout in seconds of steps that take 1 s on an idle machine.
LONG = 60.0


@pytest.fixture
def tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the empty file that processes of this test import as TensorFlow."""
    package = tmp_path / "tensorflow"
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    # The fork server is identified by its environment, which no other process has.
    monkeypatch.setenv("TF_TEST", str(tmp_path))
    file = package / "__init__.py"
    file.touch()
    before = set(members())
    yield file
    until(lambda: not any(map(is_fork_server, set(members()) - before)), LONG)


def is_fork_server(process: psutil.Process) -> bool:
    try:
        return "tfd_notebook.spark.executor.fork_server" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def fork_node() -> int:
    return fork_server.fork(executor.on_driver(), dict(os.environ), {}, [0, 2])


def test_a_failed_import_of_tensorflow_is_reported(tensorflow: Path) -> None:
    tensorflow.write_text("raise ImportError('libcuda.so is not there')")
    with pytest.raises(TensorFlowMissing, match=r"executor driver on .*libcuda\.so is not there"):
        fork_node()


def test_threads_after_the_import_of_tensorflow_are_an_error(tensorflow: Path) -> None:
    tensorflow.write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    with pytest.raises(
        LaunchError, match="has started 1 threads, which a fork would lose"
    ) as caught:
        fork_node()
    assert type(caught.value) is LaunchError


def test_messages_of_unauthenticated_clients_are_ignored(tensorflow: Path) -> None:
    before = unix_sockets()
    fork_server.start(executor.on_driver(), dict(os.environ))
    (address,) = (name for name in unix_sockets() - before if "tfd-fork-server" in name)
    for message in junk(tensorflow.parent / "bomb"):
        knock(address, message)
    pid = fork_node()
    until(lambda: not psutil.pid_exists(pid), LONG)
    assert not (tensorflow.parent / "bomb").exists()


def test_clients_of_another_user_do_not_keep_it_running(tensorflow: Path) -> None:
    # In the fork server, all clients belong to another user.
    tensorflow.write_text("import os\nown = os.getuid()\nos.getuid = lambda: own + 1\n")
    before = unix_sockets()
    fork_server.start(executor.on_driver(), dict(os.environ))
    (address,) = (name for name in unix_sockets() - before if "tfd-fork-server" in name)

    def is_refused() -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect("\0" + address[1:])
            except ConnectionRefusedError:
                return True
            client.settimeout(LONG)
            with contextlib.suppress(ConnectionResetError):  # it has ended meanwhile
                assert client.recv(1) == b""
            return False

    # It ends after a second without a client. `until` connects more often.
    until(is_refused, LONG)
