"""Stand-in for Slurm's commands."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest

from tfd_notebook.net import slurm_queue


class Commands:
    """Stand-in for Slurm's commands: output and errors by name, calls and scripts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(slurm_queue, "run", self.run)
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
        for variable in ("SLURM_JOB_ID", "SLURM_STEP_ID"):
            monkeypatch.delenv(variable, raising=False)
        self.output = {"sinfo": "cpu|cpu*|up|1:00:00|3|0/12/0/12\n"}
        self.errors: dict[str, str] = {}
        self.calls: list[list[str]] = []
        #: The batch scripts of the jobs 7, 8, and so on.
        self.scripts: list[str] = []

    def run(self, command: list[str], timeout: float, **options: Any) -> Any:
        self.calls.append(command)
        name = command[0]
        if name == "sbatch":
            self.scripts.append(options["input"])
        # Of one command with different arguments, such as the number of a job.
        output = [self.output[k] for a in command if (k := f"{name} {a}") in self.output]
        output.append(self.output.get(name, f"{6 + len(self.scripts)}\n"))
        if name not in ("sinfo", "squeue", "sbatch", "scancel"):
            raise FileNotFoundError(name)
        error = self.errors.get(name, "")
        return subprocess.CompletedProcess(command, bool(error), output[0], error)
