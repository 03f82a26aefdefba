"""Tests of process identities, agents' locks and the files of other hosts."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook.cluster import control_socket
from tfd_notebook.launchers import Fake
from tfd_notebook.launchers.client.detached import detached
from tfd_notebook.launchers.client.orphans import sweep
from tfd_notebook.net import clock, control_calls, runtime_dir
from tfd_notebook.spark.local_session import spark_home
from tfd_notebook.ui.cli import main


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def ended() -> dict[str, Any]:
    """Return the identity of a process that has ended."""
    with subprocess.Popen(["sleep", "60"]) as process:
        identity = runtime_dir.process_identity(process.pid)
        process.kill()
    assert identity is not None
    return identity


@pytest.mark.slow
def test_a_process_identity_ignores_the_wall_clock(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, created = runtime_dir.process_identity(sleeper.pid), psutil.Process(sleeper.pid)
    real = psutil.boot_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: real + 3600)
    assert created.create_time() > real + 3600, "the step was not seen"
    assert runtime_dir.process_identity(sleeper.pid) == before
    assert runtime_dir.is_running(before)
    assert not runtime_dir.has_ended(before)


@pytest.mark.slow
def test_ended_process_or_reused_pid_is_not_running() -> None:
    assert runtime_dir.has_ended(ended())
    this = runtime_dir.process_identity(os.getpid())
    assert this is not None
    assert runtime_dir.has_ended({**this, "start": this["start"] - 1})


@pytest.mark.slow
def test_a_zombie_process_has_ended() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert runtime_dir.process_start(process.pid) is None
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "over"),
    [
        ({"pid_namespace": "1"}, False),
        ({"host": "another", "boot": "another"}, False),
        ({"boot": "an earlier one"}, True),
        ({"host": "renamed since"}, True),
    ],
)
def test_state_of_invisible_processes_is_unknown(change: dict[str, str], over: bool) -> None:
    identity = {**ended(), **change}
    assert runtime_dir.has_ended(identity) is over
    assert not runtime_dir.is_running(identity)
    path, lock = runtime_dir.new_agent_dir("0123456789ab")
    runtime_dir.write_state(path, {"agent": "0123456789ab", "process": identity, "owner": identity})
    lock.close()
    assert [left.what for left in sweep()] == ([str(path)] if over else [])
    assert path.exists() is not over


@pytest.mark.slow
@pytest.mark.parametrize("state", [None, {}, {"starter": None}, {"pid": 1, "owner_pid": 1}])
def test_directory_of_a_locked_agent_is_kept(state: dict[str, Any] | None) -> None:
    path, lock = runtime_dir.new_agent_dir("0123456789ab")
    if state is not None:
        runtime_dir.write_state(path, {name: value or ended() for name, value in state.items()})
    with lock:
        assert sweep() == ()
        assert path.exists()


@pytest.mark.slow
def test_directory_without_an_agent_is_removed_with_its_starter() -> None:
    path, lock = runtime_dir.new_agent_dir("0123456789ab")
    lock.close()
    assert sweep() == ()
    runtime_dir.write_state(path, {"starter": ended()})
    assert [left.what for left in sweep()] == [str(path)]
    assert not path.exists()


@pytest.mark.slow
def test_agent_with_a_lease_is_not_ended(sleeper: subprocess.Popen[bytes]) -> None:
    path, lock = runtime_dir.new_agent_dir("0123456789ab")
    state = {
        "agent": "0123456789ab",
        "process": runtime_dir.process_identity(sleeper.pid),
        "owner": ended(),
        "clusters": {"stays": 1e9},
    }
    runtime_dir.write_state(path, state)
    with lock:
        assert sweep() == ()
        assert sweep(dry_run=True) == ()
        runtime_dir.write_state(path, {**state, "clusters": {"ends": None}})
        assert [left.what for left in sweep(dry_run=True)] == [str(path)]


@pytest.fixture
def rename(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that gives this host another name, as DHCP does."""
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop")
    return lambda: monkeypatch.setattr(socket, "gethostname", lambda: "dhcp-198-51-100-7")


def test_clusters_are_found_after_the_host_got_another_name(rename: Callable[[], None]) -> None:
    with (
        tfd.Cluster(data_workers=1, launcher=Fake(), name="images"),
        tfd.Cluster(data_workers=1, launcher=Fake(), name="texts"),
    ):
        rename()
        assert control_calls.processes() == (os.getpid(),)
        rows = control_calls.clusters()
        assert [row["name"] for row in rows] == ["images", "texts"]
        request = {"command": "snapshot", "name": "texts", "width": 60}
        assert control_calls.call(os.getpid(), request)["snapshot"]["name"] == "texts"
    control_socket.stop()
    assert list(runtime_dir.own_files("sock")) == []


def test_detached_cluster_is_found_after_the_host_got_another_name(
    rename: Callable[[], None],
) -> None:
    path, lock = runtime_dir.new_agent_dir("0123456789ab")
    this = runtime_dir.process_identity(os.getpid())
    state = {"agent": "0123456789ab", "pid": os.getpid(), "process": this, "owner": this}
    runtime_dir.write_state(path, {**state, "clusters": {"images": clock.now() + 1e6}})
    with lock:
        rename()
        assert [cluster.name for cluster in detached()] == ["images"]
        assert runtime_dir.is_running(this)
        assert not runtime_dir.has_ended(this)
        assert sweep() == ()


@pytest.fixture
def machine_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the machine id of this host."""
    path = tmp_path / "machine-id"
    path.write_text("0123456789abcdef0123456789abcdef\n")
    monkeypatch.setattr(runtime_dir, "MACHINE_ID", path)
    return path


@pytest.fixture
def earlier(machine_id: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return a socket and the directory of an agent, of an earlier boot of this host."""
    boot_id = tmp_path / "boot-id"
    monkeypatch.setattr(runtime_dir, "BOOT_ID", boot_id)
    boot_id.write_text("the first")
    socket_path = runtime_dir.own_file(os.getpid(), "sock")
    socket_path.touch()
    agent, lock = runtime_dir.new_agent_dir("0123456789ab")
    lock.close()
    boot_id.write_text("the second")
    return socket_path, agent


def test_files_of_an_earlier_boot_are_removed_after_the_host_got_another_name(
    rename: Callable[[], None], earlier: tuple[Path, Path]
) -> None:
    rename()
    assert {left.what for left in sweep()} == set(map(str, earlier))
    assert not any(path.exists() for path in earlier)


def test_files_of_an_earlier_boot_of_another_machine_are_kept(
    machine_id: Path, earlier: tuple[Path, Path]
) -> None:
    machine_id.write_text("f" * 32)
    assert sweep() == ()
    assert all(path.exists() for path in earlier)


def test_process_of_a_host_without_a_boot_id_runs_after_the_host_got_another_name(
    rename: Callable[[], None], machine_id: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_dir, "BOOT_ID", tmp_path / "boot-id")
    this = runtime_dir.process_identity(os.getpid())
    rename()
    assert runtime_dir.is_running(this)


@pytest.mark.parametrize("unset", ["", "uninitialized"])
def test_host_without_a_machine_id_is_identified_by_its_name(
    rename: Callable[[], None],
    machine_id: Path,
    unset: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine_id.write_text(unset)
    monkeypatch.setattr(runtime_dir, "BOOT_ID", tmp_path / "boot-id")
    this = runtime_dir.process_identity(os.getpid())
    assert runtime_dir.is_running(this)
    # Another host that shares the runtime directory does not see the process.
    rename()
    assert not runtime_dir.is_running(this)
    assert not runtime_dir.has_ended(this)


def test_agent_directory_is_created_locked(directory: Path) -> None:
    path, lock = runtime_dir.new_agent_dir("0123456789ab")
    with lock:
        assert runtime_dir.is_locked(path)
        with pytest.raises(OSError, match="not empty"):
            runtime_dir.new_agent_dir("0123456789ab")
    assert runtime_dir.is_locked(path) is False
    assert [entry.name for entry in directory.iterdir()] == [path.name]
    (path / "agent.lock").unlink()
    assert runtime_dir.is_locked(path) is None
    os.mkfifo(path / "agent.lock")
    assert runtime_dir.is_locked(path) is False  # and no wait for the other end of the pipe


@pytest.mark.slow
def test_files_of_processes_have_unique_names(directory: Path) -> None:
    mine, gone = (
        runtime_dir.own_file(os.getpid(), "sock"),
        runtime_dir.own_file(ended()["pid"], "sock"),
    )
    host, boot, namespace = mine.name.split(".")[1].split("-")
    other_container = directory / f"{os.getpid()}.{host}-{boot}-1{namespace}.sock"
    other_host = directory / f"{os.getpid()}.00000000-00000000-{namespace}.sock"
    earlier_boot = directory / f"{os.getpid()}.{host}-00000000-{namespace}.sock"
    journal = runtime_dir.own_file(ended()["pid"], "journal-x")
    journal.mkdir()
    (directory / "0123.json").touch()
    for path in (mine, gone, other_container, other_host, earlier_boot):
        path.touch()
    assert {pid for pid, _ in runtime_dir.own_files("sock")} == {
        os.getpid(),
        int(gone.name.split(".")[0]),
    }
    assert {left.what for left in sweep()} == {str(gone), str(earlier_boot), str(journal)}
    assert not gone.exists()
    assert not earlier_boot.exists()
    assert not journal.exists()
    assert mine.exists()
    assert other_container.exists()
    assert other_host.exists()


@pytest.mark.slow
def test_ending_process_is_detected_before_its_parent_has_waited() -> None:
    assert not runtime_dir.is_ending(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not runtime_dir.is_ending(process.pid)
        process.kill()
        until(lambda: runtime_dir.is_ending(process.pid))
        assert psutil.pid_exists(process.pid)
    assert runtime_dir.is_ending(process.pid)


def test_directory_is_removed_while_a_file_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "agent"
    directory.mkdir()
    (directory / "log").touch()
    rmdir = os.rmdir

    def add_a_file_first(path: Any, **options: Any) -> None:
        monkeypatch.setattr(os, "rmdir", rmdir)
        (directory / "late").touch()
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", add_a_file_first)
    runtime_dir.remove(directory)
    assert not directory.exists()


def _states() -> Iterator[Any]:
    """Yield states with a wrong type or value, of an agent that seems to run."""
    this = runtime_dir.process_identity(os.getpid())
    assert this is not None
    whole = {"agent": "0123456789ab", "pid": os.getpid(), "process": this, "clusters": {}}
    yield from (None, [], "text", 1, True)
    yield from ({**whole, "clusters": clusters} for clusters in ([], "a", {"a": "b"}, {"a": 1e300}))
    yield {**whole, "clusters": {"\x1b[2J": 1e9}}
    yield from (
        {**whole, "process": identity} for identity in ([], "a", {"pid": {}}, {"pid": True})
    )
    yield from ({**whole, "pid": pid} for pid in (0, -1, True, "1", [], 2**80))
    yield from ({**whole, "agent": agent} for agent in ([], {}, 1))
    yield {"starter": []}
    yield {"process": {**this, "start": float("inf")}}


def _damaged() -> Iterator[bytes]:
    """Yield the contents of damaged files."""
    yield from (json.dumps(state).encode() for state in _states())
    yield from (b"", b"{", b"\xff\xfe\xfa", b"\0" * 100, b"9" * 10_000)
    yield b"[" * 100_000
    yield b'{"process": ' * 500 + b"1" + b"}" * 500
    yield b'{"agent": "' + b"a" * (20 << 20) + b'"}'


@pytest.mark.slow
def test_damaged_state_is_ignored_and_reported_once(
    directory: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, content in enumerate(_damaged()):
        for name in (f"agent-{number:012}/state.json", f"detached-{number:012}.json"):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)
    (directory / "agent-folder" / "state.json").mkdir(parents=True)
    (directory / "agent-pipe").mkdir()
    os.mkfifo(directory / "agent-pipe" / "state.json")
    (directory / "agent-file").touch()
    with caplog.at_level(logging.WARNING, "tfd_notebook"):
        assert all(state == {} for _, state in runtime_dir.agent_states())
        assert detached() == ()
        assert sweep() == ()
        with tfd.Cluster(data_workers=1, launcher=Fake(), name="images"):
            assert main(["list", "--json"]) == 0
        assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["images"]
    reported = [record.getMessage() for record in caplog.records]
    assert len(reported) == len(set(reported))
    for path in directory.glob("agent-0*"):
        assert sum(str(path) in message for message in reported) == 1


def test_other_files_do_not_prevent_a_sweep(directory: Path) -> None:
    own = runtime_dir.own_file(os.getpid(), "sock").name.split(".")[1]
    for name in (f"a.b.{own}.sock", f"1.2.{own}.sock", f".{own}.sock", "detached-.json", "agent-"):
        (directory / name).touch()
    runtime_dir.own_file(os.getpid(), "sock").mkdir()
    assert list(runtime_dir.orphaned_files()) == []
    assert control_calls.processes() in ((), (os.getpid(),))


@pytest.mark.slow
def test_damaged_state_does_not_prevent_a_local_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for number, content in enumerate(_damaged()):
        (tmp_path / f"tfd-spark-{number}").mkdir()
        (tmp_path / f"tfd-spark-{number}" / "state.json").write_bytes(content)
    (tmp_path / "tfd-spark-java").mkdir()
    runtime_dir.write_state(tmp_path / "tfd-spark-java", {"process": ended()})
    (tmp_path / "tfd-spark-java" / "java.pid").write_text("9" * 40)
    spark_home.remove_leftovers()
