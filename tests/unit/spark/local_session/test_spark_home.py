"""The directory of a local Spark."""

from pathlib import Path

import pytest

from tfd_notebook.errors import LaunchError
from tfd_notebook.spark.local_session import spark_home


@pytest.mark.slow
def test_guard_that_does_not_start_in_time_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = tmp_path / "sh"
    shell.write_text("#!/bin/sh\nPATH=/usr/bin:/bin exec sleep 100\n")
    shell.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(spark_home, "GUARD_SECONDS", 0.2)
    with pytest.raises(LaunchError, match=r"within 0\.2 s"):
        spark_home.WritableSparkHome(tmp_path)
    assert not list(tmp_path.glob("tfd-spark-*"))
