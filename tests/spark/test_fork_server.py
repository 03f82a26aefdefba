"""The process that nodes are forked from: what it says when it cannot, and who may not end it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests._waiting import until
from tests.spark._unauthenticated import junk, knock, members, unix_sockets
from tfd_notebook.errors import LaunchError, TensorFlowMissing
from tfd_notebook.spark.executor import executor
from tfd_notebook.spark.executor.fork_server import ForkServerClient

pytestmark = pytest.mark.integration

#: Seconds for what takes one on an idle machine.
LONG = 60.0


@pytest.fixture
def tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that is run when a process of this test imports TensorFlow; it is empty."""
    package = tmp_path / "tensorflow"
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    # Nobody else's process has this environment.
    monkeypatch.setenv("TF_TEST", str(tmp_path))
    file = package / "__init__.py"
    file.touch()
    before = set(members())
    yield file
    until(lambda: not any(map(is_zygote, set(members()) - before)), LONG)


def is_zygote(process: psutil.Process) -> bool:
    try:
        return "tfd_notebook.spark.executor.fork_server" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def forked() -> int:
    zygote = ForkServerClient(executor.of_driver(), dict(os.environ))
    try:
        return zygote.fork({}, [0, 2])
    finally:
        zygote.close()


def test_there_is_no_tensorflow(tensorflow: Path) -> None:
    tensorflow.write_text("raise ImportError('libcuda.so is not there')")
    with pytest.raises(TensorFlowMissing, match=r"executor driver on .*libcuda\.so is not there"):
        forked()


def test_threads_are_not_a_tensorflow_that_is_missing(tensorflow: Path) -> None:
    tensorflow.write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    with pytest.raises(
        LaunchError, match="has started 1 threads, which a fork would lose"
    ) as caught:
        forked()
    assert type(caught.value) is LaunchError


def test_what_strangers_say_ends_nothing(tensorflow: Path) -> None:
    before = unix_sockets()
    zygote = ForkServerClient(executor.of_driver(), dict(os.environ))
    try:
        (address,) = (name for name in unix_sockets() - before if "zygote" in name)
        for words in junk(tensorflow.parent / "bomb"):
            knock(address, words)
        pid = zygote.fork({}, [0, 2])
        until(lambda: not psutil.pid_exists(pid), LONG)
    finally:
        zygote.close()
    assert not (tensorflow.parent / "bomb").exists()
