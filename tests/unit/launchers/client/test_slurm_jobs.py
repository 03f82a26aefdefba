"""States, scripts and errors of Slurm jobs, from the output of Slurm's commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.launchers._slurm_commands import Commands
from tfd_notebook import launchers
from tfd_notebook.errors import LaunchError, UsageError
from tfd_notebook.launchers.client import slurm_jobs
from tfd_notebook.launchers.client.slurm_jobs import Job


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(monkeypatch)


def job(role: str = "", count: int = 2, **options: Any) -> Job:
    return Job(launchers.Slurm(count, **options).options, "mine", role, count)


@pytest.mark.parametrize(
    ("line", "phase", "reason"),
    [
        ("RUNNING|None|2026-01-01T00:00:00|59:00|2", "starting", "7 is starting its agents"),
        ("CONFIGURING|None|N/A|1:00:00|2", "starting", "7 is configuring"),
        ("COMPLETING|None|N/A|0:00|2", "ending", "7 is ending"),
        ("CANCELLED|None|N/A|0:00|2", "ended", "7 was cancelled"),
        ("FAILED|NonZeroExitCode|N/A|0:00|2", "ended", "7 failed (NonZeroExitCode)"),
        ("BOOT_FAIL|None|N/A|0:00|2", "ended", "7 is boot_fail"),
    ],
)
def test_state_of_a_job(commands: Commands, line: str, phase: str, reason: str) -> None:
    commands.output["squeue"] = line + "\n"
    one = job()
    one.id = "7"
    state = one.state()
    assert (state.phase, state.reason) == (phase, f"Slurm job {reason}")
    assert state.nodes == (2 if line.startswith("RUNNING") else 0)
    assert one.state() is state
    assert len(commands.calls) == 1


def test_pending_job_has_its_reason_the_expected_start_and_the_changed_argument(
    commands: Commands,
) -> None:
    commands.output["squeue --format=%r|%P"] = "PartitionTimeLimit|cpu\n"
    commands.output["squeue"] = "PENDING|PartitionTimeLimit|2026-01-01T00:00:00|2:00:00|2\n"
    one = job()
    one.id = "7"
    state = one.state()
    assert state.phase == "queued"
    assert "longer than partition cpu allows (1:00:00); expected start 2026" in state.reason
    assert "time='1:00:00'" in state.fix


def test_job_keeps_its_state_while_slurm_does_not_answer(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_jobs, "POLL_SECONDS", -1.0)  # each state is read
    one = job()
    one.id = "7"
    assert one.state().phase == "starting"
    commands.output["squeue"] = "RUNNING|None|N/A|59:00|2\n"
    assert one.state().seconds_left == 59 * 60
    commands.errors["squeue"] = "Unable to contact slurm controller"
    assert one.state().seconds_left == 59 * 60
    commands.errors["squeue"] = "slurm_load_jobs error: Invalid job id specified"
    assert one.state().phase == "ended"


def test_script_has_the_options_and_a_range_of_nodes(commands: Commands) -> None:
    one = job("ps", 3, minimum=2, partition="cpu", cpus=4, prologue="module load x\n", python="py")
    lines = one.script("/out", "secret").splitlines()
    for option in ("--job-name=tfd-mine-ps", "--nodes=2-3", "--partition=cpu", "--cpus-per-task=4"):
        assert f"#SBATCH {option}" in lines
    assert "#SBATCH --ntasks-per-node=1" not in lines
    start = lines[lines.index("module load x") + 1]
    assert start.startswith('exec srun --nodes="$SLURM_JOB_NUM_NODES"')
    assert lines[-2:] == ["secret", "TFD_END"]
    assert "#SBATCH --ntasks-per-node=1" in job().script("/out", "").splitlines()


def test_refused_job_names_the_limits_of_the_partition(commands: Commands, tmp_path: Path) -> None:
    commands.errors["sbatch"] = "sbatch: error: invalid account\n"
    with pytest.raises(LaunchError, match="refused the job: invalid account") as caught:
        job().submit(tmp_path, "")
    assert "partition cpu allows 1:00:00 on 3 nodes" in str(caught.value.fix)
    commands.errors.clear()
    commands.output["sbatch"] = "12;cluster\n"
    one = job()
    one.submit(tmp_path, "")
    assert one.id == "12"
    (tmp_path / "job-12.log").write_text("the end\n")
    assert one.log() == b"the end\n"
    one.cancel(is_connected=True)
    assert commands.calls[-1] == ["scancel", "12"]


def test_allocation_with_too_few_nodes_is_an_error(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    with pytest.raises(LaunchError, match="allocation 5 has 1 nodes, and the cluster needs 2-3"):
        job(count=3, minimum=2).submit(tmp_path, "")


def test_missing_commands_are_named(commands: Commands) -> None:
    with pytest.raises(LaunchError, match="scontrol was not found") as caught:
        slurm_jobs.address_towards_controller()
    assert "install Slurm's commands" in str(caught.value.fix)


def test_options_of_the_launcher_itself_are_refused() -> None:
    slurm_jobs.check_extra(["--exclusive", "--exclude=n1"])
    for option in ("--output=/etc/passwd", "id; true", "--a\nb", 1):
        with pytest.raises(UsageError, match="invalid extra"):
            slurm_jobs.check_extra([option])
