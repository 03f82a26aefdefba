"""`shutdown(stop_spark=True)` in a separate Spark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SCRIPT = """
import json
from tfd_notebook import errors
from tfd_notebook.spark import TFCluster, session

def function(args, ctx):
    import threading
    threading.Event().wait()

def outcome(**options):
    cluster = TFCluster.run(sc, function, None, 1)
    try:
        cluster.shutdown(timeout=1, **options)
    except errors.TimeLimit as error:
        return str(error), str(cluster.phase), sc._jsc is not None
    return "", "", True

if __name__ == "__main__":
    spark = session(executors=1, cores=1, memory="1g", name="stops")
    sc = spark.sparkContext
    print(json.dumps([outcome(), outcome(stop_spark=False), outcome(stop_spark=True)]), flush=True)
"""


def test_spark_stops_only_with_stop_spark_true(tmp_path: Path) -> None:
    script = tmp_path / "stops.py"
    script.write_text(SCRIPT)
    completed = subprocess.run(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        timeout=280,
        env={
            **os.environ,
            "TMPDIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        },
    )
    assert completed.returncode == 0
    outcomes = json.loads(completed.stdout.splitlines()[-1])
    assert ["within 1 s" in text for text, _, _ in outcomes] == [True] * 3
    assert [phase for _, phase, _ in outcomes] == ["failed"] * 3
    assert [is_running for _, _, is_running in outcomes] == [True, True, False]
