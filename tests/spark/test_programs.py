"""Programs for TensorFlowOnSpark run after a change of their import lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from tfd_notebook.spark.local_session import java

PROGRAMS = Path(__file__).parent / "programs"
#: Timeout in seconds of Spark, two clusters and a training, on a busy machine.
LONG = 280.0

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_a_program_trains_on_fed_rows_and_infers(tmp_path: Path) -> None:
    text = (PROGRAMS / "digits_spark.py").read_text()
    program = tmp_path / "digits_spark.py"
    assert "from tensorflowonspark import" in text
    program.write_text(text.replace("tensorflowonspark import", "tfd_notebook.spark import"))
    home = tmp_path / "spark"  # Spark writes executors' files into its home
    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        if entry.name != "work":
            (home / entry.name).symlink_to(entry)
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "JAVA_HOME": str(java.choose().prepared(tmp_path)),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_SUBMIT_ARGS": "--master local-cluster[2,1,1024] "
        "--conf spark.ui.enabled=false pyspark-shell",
    }
    completed = subprocess.run(
        [
            *(sys.executable, str(program)),
            *("--export_dir", str(tmp_path / "export"), "--output", str(tmp_path / "right")),
        ],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    # Omit the lines of Java stack traces.
    lines = [line for line in completed.stderr.splitlines() if not line.lstrip().startswith("at ")]
    assert completed.returncode == 0, "\n".join(lines[-80:])
    shares = [float(file.read_text()) for file in sorted(tmp_path.glob("right-*"))]
    assert len(shares) == 2
    assert min(shares) > 0.75
    assert "executor_id" not in {path.name for path in tmp_path.iterdir()}
