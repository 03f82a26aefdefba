"""A standalone master with two workers: TFCluster and the launcher, with invalid clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests._waiting import until
from tests.spark._standalone import Standalone
from tests.spark._unauthenticated import forms, junk, knock, listening, members
from tfd_notebook.launchers.client import orphans

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROGRAM = """
import json, sys
from tfd_notebook.net import secure_channel

secrets = []
new = secure_channel.Secret.new.__func__

def record(kind):
    secrets.append(new(kind))
    return secrets[-1]

secure_channel.Secret.new = classmethod(record)

import tensorflow as tf
import tfd_notebook as tfd
from pyspark.sql import SparkSession
from tfd_notebook.spark import TFCluster
from tfd_notebook.spark.preflight import check

def train(directory, ctx):
    feed = ctx.get_data_feed()
    total = 0
    while not feed.should_stop():
        total += sum(row[0] for row in feed.next_batch(10))
    with open(f"{directory}/{ctx.task_index}", "w") as file:
        file.write(str(total))

config, directory = json.loads(sys.argv[1]), sys.argv[2]
builder = SparkSession.builder.appName("standalone")
for name, value in config.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
sc = spark.sparkContext
check.needed(sc, 2)
findings = tfd.spark.check(spark, 2)
cluster = TFCluster.run(sc, train, directory, 2, 0, input_mode=TFCluster.InputMode.SPARK)
data = tfd.Cluster(data_workers=2, name="data", launcher=tfd.launchers.Spark(spark))
print("ready", flush=True)
sys.stdin.readline()
cluster.train(sc.parallelize([[number] for number in range(1000)], 4), 1)
cluster.shutdown()
dataset = tf.data.Dataset.range(100).apply(data.distribute("dynamic"))
numbers = sorted(int(x) for x in dataset)
data.stop()
total = sc.parallelize(range(10)).sum()
spark.stop()
print(json.dumps({
    "codes": list(findings.codes), "numbers": numbers, "total": total,
    "secrets": [bytes(secret).hex() for secret in secrets],
}), flush=True)
"""


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with Standalone(tmp_path_factory.mktemp("standalone")) as spark:
        yield spark


def test_invalid_clients_change_nothing_and_logs_have_no_secret(
    standalone: Standalone, tmp_path: Path
) -> None:
    bomb, results = tmp_path / "bomb", tmp_path / "results"
    results.mkdir()
    errors = tmp_path / "errors"
    command = [sys.executable, "-c", PROGRAM, json.dumps(standalone.config()), str(results)]
    with errors.open("wb") as file:
        program = subprocess.Popen(
            command,
            env={**os.environ, **standalone.environment("driver")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    try:
        assert program.stdout
        assert program.stdin
        lines: list[str] = []
        while not lines or lines[-1] != "ready\n":
            lines.append(program.stdout.readline())
            assert lines[-1], errors.read_text()[-5_000:]
        assert any("2 slots, 2 nodes requested" in line for line in lines)
        ports = listening()
        assert "java" in ports.values()
        assert len([port for port, name in ports.items() if name != "java"]) >= 4
        for port in ports:
            for message in junk(bomb):
                knock(port, message)
        output, _ = program.communicate("go on\n", timeout=300)
    finally:
        program.kill()
        program.wait()
    assert output, errors.read_text()[-5_000:]
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert not bomb.exists()
    assert sum(int(path.read_text()) for path in results.iterdir()) == sum(range(1000))
    assert report["numbers"] == list(range(100))
    assert report["total"] == sum(range(10))
    assert report["codes"] == []
    assert len(report["secrets"]) >= 2
    logs = [errors, *standalone.files(), *_files(Path(os.environ["TFD_RUNTIME_DIR"]))]
    assert len(logs) > 6
    output_bytes = "".join(lines).encode() + b"".join(path.read_bytes() for path in logs)
    for secret in map(bytes.fromhex, report["secrets"]):
        assert not any(form in output_bytes for form in forms(secret))
    assert standalone.secret.encode() not in output_bytes


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_a_killed_driver_leaves_nothing_behind(standalone: Standalone, tmp_path: Path) -> None:
    before = {process.pid for process in members()}
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(standalone.config()), str(tmp_path)],
        env={**os.environ, **standalone.environment("killed")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert program.stdout
        lines = iter(program.stdout.readline, "")
        assert any(line == "ready\n" for line in lines)
        assert len(members()) > len(before) + 6
    finally:
        program.kill()
        program.communicate()
    until(lambda: not [process for process in members() if process.pid not in before], 120.0)
    orphans.sweep()  # remove the runtime files of the killed process
