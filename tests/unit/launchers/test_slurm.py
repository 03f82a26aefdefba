"""Start of Slurm's nodes, which connect to this process, with a stand-in for Slurm's commands."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests._waiting import until
from tests.unit.launchers._slurm_commands import Commands
from tfd_notebook import launchers
from tfd_notebook.errors import LaunchError
from tfd_notebook.launchers import engine
from tfd_notebook.launchers.client import slurm_jobs
from tfd_notebook.model.events import Event, ExpiryChanged, Notice, TaskChanged
from tfd_notebook.model.spec import ClusterConfig, Role
from tfd_notebook.net import secure_channel

CONFIG = ClusterConfig("mine", launcher="slurm", counts={Role.DISPATCHER: 1, Role.DATA_WORKER: 1})


class Starting:
    """The start of a cluster in a thread."""

    def __init__(self, output: Path, nodes: Any, begin: bool = True, **options: Any) -> None:
        self.events: list[Event] = []
        self.hosts: list[Any] = []
        self.error: LaunchError | None = None
        launcher = launchers.Slurm(nodes, address="127.0.0.1", output=str(output), **options)
        self.start = launcher.new_start(CONFIG, self.events.append)
        self._thread = threading.Thread(target=self._run)
        if begin:
            self.begin()

    def begin(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self.hosts = self.start.start()
        except LaunchError as error:
            self.error = error

    def of(self, kind: Any) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def connect(
    commands: Commands, number: int, node: str, job: int = 0
) -> secure_channel.AuthenticatedChannel:
    """Connect like the bridge of a node of a job, by default the first one."""
    payload = json.loads(commands.scripts[job].splitlines()[-2])
    secret = secure_channel.Secret(bytes.fromhex(payload["secret"]))
    channel = secure_channel.connect(payload["address"], secret)
    channel.send({"host": payload["part"], "process": number, "node": node})
    return channel


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(slurm_jobs, "POLL_SECONDS", -1.0)  # each state is read
    commands = Commands(monkeypatch)
    commands.output["squeue --format=%r|%P"] = "Priority|cpu\n"
    return commands


def test_nodes_connect_and_the_missing_ones_are_dropped(commands: Commands, tmp_path: Path) -> None:
    commands.output["squeue"] = "PENDING|Priority|N/A|1:00:00|1-3\n"
    starting = Starting(tmp_path, 3, minimum=1)
    until(lambda: starting.of(TaskChanged), 60)
    assert "Slurm job 7 is pending: Priority" in starting.of(TaskChanged)[0].reason
    commands.output["squeue"] = "RUNNING|None|N/A|59:00|2\n"
    with connect(commands, 1, "n2"), connect(commands, 0, "n1"):
        starting.join()
        assert [host.label for host in starting.hosts] == ["n1", "n2"]
        (notice,) = starting.of(Notice)
        assert notice.what == "the cluster has 2 of 3 nodes: Slurm job 7 gets no more nodes"
        assert starting.of(ExpiryChanged)[0].seconds_left == 59 * 60
        commands.output["squeue"] = "CANCELLED|None|N/A|0:00|2\n"
        assert "was cancelled" in starting.start.end_reason()
        assert list(tmp_path.iterdir())
        for host in starting.hosts:
            host.close()
    assert commands.calls[-1] == ["scancel", "7"]
    assert not list(tmp_path.iterdir())


def test_other_jobs_request_the_missing_nodes(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LATE_POLL_SECONDS", 0.01)
    commands.output["squeue --jobs=7"] = "RUNNING|None|N/A|59:00|1\n"
    commands.output["squeue --jobs=8"] = "PENDING|Priority|N/A|1:00:00|1-2\n"
    commands.output["squeue --jobs=9"] = "PENDING|Resources|N/A|1:00:00|1\n"
    extra = ("--exclude=n4",)
    starting = Starting(tmp_path, 3, begin=False, minimum=1, extra=extra)
    starting.start.may_join = True
    starting.begin()
    until(lambda: commands.scripts, 60)
    with connect(commands, 0, "n1"):
        starting.join()
        assert [host.label for host in starting.hosts] == ["n1"]
        assert "#SBATCH --nodes=1-2" in commands.scripts[1]
        assert commands.scripts[1].index("--exclude=n4,n1") > commands.scripts[1].index("=n4\n")
        joined: list[str] = []
        shown: list[list[str]] = []

        def join(host: Any) -> bool:
            joined.append(host.label)
            return True

        thread = threading.Thread(target=starting.start.await_late, args=(join, shown.append))
        thread.start()
        until(lambda: shown and all("8 is pending" in reason for reason in shown[-1]), 60)
        commands.output["squeue --jobs=8"] = "RUNNING|None|N/A|59:00|1\n"
        with connect(commands, 0, "n2", job=1):
            until(lambda: joined == ["n2"], 60)
            until(lambda: "9 is pending" in str(shown[-1]), 60)
            assert "#SBATCH --nodes=1" in commands.scripts[2].splitlines()
            assert "--exclude=n4,n1,n2" in commands.scripts[2]
            starting.start.close_late()
            thread.join(60)
            assert not thread.is_alive()
            for host in starting.start.hosts:
                host.close()
    cancelled = [call[1] for call in commands.calls if call[0] == "scancel"]
    assert cancelled == ["7", "8", "9"]
    assert not list(tmp_path.iterdir())


def test_job_that_ends_is_an_error_with_its_missing_nodes(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(1000))
    clock = SimpleNamespace(monotonic=lambda: next(seconds))
    monkeypatch.setattr(engine, "time", clock)
    commands.output["squeue"] = "FAILED|NonZeroExitCode|N/A|0:00|2\n"
    starting = Starting(tmp_path, {"data_worker": 1, "ps": 1})
    starting.join()
    error = starting.error
    assert error is not None
    assert "7 failed (NonZeroExitCode): 1 of its 1 nodes cannot be reached" in error.what
    assert starting.start.hosts[0].kernel_address in str(error.fix)
    assert {change.task for change in starting.of(TaskChanged)} == {"data_worker:0"}
    starting.start.stop()
    assert [call[0] for call in commands.calls].count("sbatch") == 2
    assert [call[0] for call in commands.calls].count("scancel") == 2


def test_job_that_ends_while_another_one_is_pending_is_an_error(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.output["squeue --jobs=7"] = "RUNNING|None|N/A|59:00|1\n"
    commands.output["squeue"] = "PENDING|Priority|N/A|1:00:00|1\n"
    starting = Starting(tmp_path, {"data_worker": 1, "ps": 1})
    until(lambda: commands.scripts, 60)
    with connect(commands, 0, "n1"):
        until(lambda: starting.start.hosts[0].label == "n1/data_worker", 60)
        seconds = iter(range(1000))
        monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
        commands.output["squeue --jobs=7"] = "TIMEOUT|TimeLimit|N/A|0:00|1\n"
        starting.join()
        assert starting.error is not None
        assert starting.error.what == "Slurm job 7 reached its time limit (TimeLimit)"
        starting.start.stop()


def test_stop_of_a_pending_job_cancels_it(commands: Commands, tmp_path: Path) -> None:
    commands.output["squeue"] = "PENDING|Priority|N/A|1:00:00|2\n"
    starting = Starting(tmp_path, 2)
    until(lambda: starting.of(TaskChanged), 60)
    starting.start.stop()
    starting.join()
    assert "was stopped" in str(starting.error)
    assert commands.calls[-1] == ["scancel", "7"]
