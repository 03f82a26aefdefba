"""A standalone master with two workers: TFCluster and the launcher, with invalid clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests._waiting import SERVER_STOP_SECONDS, until
from tests.spark._standalone import Standalone
from tests.spark._unauthenticated import forms, junk, knock, listening, members
from tfd_notebook.launchers.client import orphans

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300 + 2 * SERVER_STOP_SECONDS)]

#: Timeout in seconds of the end of processes whose driver was killed.
_END_SECONDS = 120.0

#: After a line on stdin, uses both clusters, stops Spark, starts all again, and prints a report.
PROGRAM = """
import faulthandler, json, os, sys
faulthandler.dump_traceback_later(360)
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

def start(spark, name):
    results = os.path.join(directory, name)
    os.mkdir(results)
    sc = spark.sparkContext
    cluster = TFCluster.run(sc, train, results, 2, 0, input_mode=TFCluster.InputMode.SPARK)
    data = tfd.Cluster(data_workers=2, name="data", launcher=tfd.launchers.Spark(spark))
    return cluster, data

spark = builder.getOrCreate()
sc = spark.sparkContext
check.require_slots(sc, 2)
findings = tfd.spark.check(spark, 2)
cluster, data = start(spark, "results")
print("ready", flush=True)
sys.stdin.readline()
cluster.train(sc.parallelize([[number] for number in range(1000)], 4), 1)
cluster.shutdown()
dataset = tf.data.Dataset.range(100).apply(data.distribute("dynamic"))
numbers = sorted(int(x) for x in dataset)
data.stop()
total = sc.parallelize(range(10)).sum()
spark.stop()
running = start(builder.getOrCreate(), "unused")
print(json.dumps({
    "codes": list(findings.codes), "numbers": numbers, "total": total,
    "secrets": [bytes(secret).hex() for secret in secrets],
}), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with Standalone(tmp_path_factory.mktemp("standalone")) as spark:
        yield spark


@dataclass
class Run:
    """A run of `PROGRAM`, which is killed after its report while its clusters run."""

    lines: list[str]
    report: dict[str, Any]
    errors: Path
    bomb: Path
    results: Path
    #: Processes of this run before the program, and those that it had started at its report.
    before: set[psutil.Process]
    started: set[psutil.Process]

    def ended(self) -> bool:
        """Return True if all processes of the program have ended."""
        return self.before.issuperset(members())


@pytest.fixture(scope="module")
def run(standalone: Standalone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Yield a run of the program with invalid messages to each port."""
    directory = tmp_path_factory.mktemp("run")
    bomb, results, errors = (directory / name for name in ("bomb", "results", "errors"))
    before = set(members())
    with errors.open("wb") as file:
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(standalone.config()), str(directory)],
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
            assert lines[-1]
        ports = listening()
        assert "java" in ports.values()
        assert len([port for port, name in ports.items() if name != "java"]) >= 4
        for port in ports:
            for message in junk(bomb):
                knock(port, message)
        program.stdin.write("go on\n")
        program.stdin.flush()
        output = next((line for line in program.stdout if line.startswith("{")), "")
        assert output
        started = {*members()} - before
    finally:
        program.kill()
        program.communicate()
        print(errors.read_text()[-10_000:])  # shown if the test fails
    run = Run(lines, json.loads(output), errors, bomb, results, before, started)
    yield run
    until(run.ended, _END_SECONDS)
    orphans.sweep()  # remove the runtime files of the killed process


def test_invalid_clients_change_nothing(run: Run) -> None:
    assert any("2 slots, 2 nodes requested" in line for line in run.lines)
    assert not run.bomb.exists()
    assert sum(int(path.read_text()) for path in run.results.iterdir()) == sum(range(1000))
    assert run.report["numbers"] == list(range(100))
    assert run.report["total"] == sum(range(10))
    assert run.report["codes"] == []


def test_logs_have_no_secret(standalone: Standalone, run: Run) -> None:
    assert len(run.report["secrets"]) >= 2
    until(run.ended, _END_SECONDS)  # no file is removed any more
    logs = [run.errors, *standalone.files(), *_files(Path(os.environ["TFD_RUNTIME_DIR"]))]
    assert len(logs) > 6
    output = "".join(run.lines).encode() + b"".join(path.read_bytes() for path in logs)
    for secret in map(bytes.fromhex, run.report["secrets"]):
        assert not any(form in output for form in forms(secret))
    assert standalone.secret.encode() not in output


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_a_killed_driver_leaves_nothing_behind(run: Run) -> None:
    assert len(run.started) > 6
    until(run.ended, _END_SECONDS)
