"""`tfd.spark.check`: findings before a cluster starts."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import threading
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.model import diagnostics
from tfd_notebook.spark import TFCluster
from tfd_notebook.spark.driver import registry
from tfd_notebook.spark.preflight import check, executor_probe, facts, fixes
from tfd_notebook.spark.preflight.facts import SparkFacts
from tfd_notebook.views.diagnostics import Findings

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def spark_facts(spark: Any) -> SparkFacts:
    """Return the facts of a Spark application without problems."""
    return check.inspect_spark(spark, 2)[0]


def codes(spark_facts: SparkFacts) -> set[str]:
    return {finding.code for finding in diagnostics.run_checks("spark", spark_facts)}


def with_executor(spark_facts: SparkFacts, **values: Any) -> SparkFacts:
    first, *rest = spark_facts.executors
    return dataclasses.replace(spark_facts, executors=(dataclasses.replace(first, **values), *rest))


def with_settings(spark_facts: SparkFacts, **values: Any) -> SparkFacts:
    settings = {
        **spark_facts.settings,
        **{f"spark.{k.replace('_', '.')}": v for k, v in values.items()},
    }
    return dataclasses.replace(spark_facts, settings=settings)


def test_a_good_spark_has_no_findings(spark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(tfd.spark.check(spark, 2)) == []
    printed = capsys.readouterr().out
    assert "2 slots, 2 nodes requested" in printed
    assert "No problems found." in printed
    assert tfd.__version__ in printed
    check.require_slots(spark, 2)
    check.require_slots(spark.sparkContext, 1)


def test_check_can_return_a_future(spark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    future = tfd.spark.check(spark, 3, wait=False)
    assert [finding.code for finding in future.result(120)] == ["TFD870"]
    assert "2 slots, 3 nodes requested" in capsys.readouterr().out


def test_each_executor_reports(spark_facts: SparkFacts) -> None:
    assert len(spark_facts.executors) == 2
    assert {executor.executable for executor in spark_facts.executors} == {sys.executable}
    assert all(
        executor.tensorflow and executor.free_bytes and not executor.unreachable
        for executor in spark_facts.executors
    )
    assert codes(spark_facts) == set()


def test_missing_slots_are_an_error_with_settings_that_fix_it(
    spark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (finding,) = tfd.spark.check(spark, 3)
    assert finding.code == "TFD870"
    assert "3 nodes" in finding.what
    assert "2 tasks at once" in finding.what
    assert "--conf spark.master=local-cluster[3,1,1024]" in capsys.readouterr().out
    with pytest.raises(errors.NotEnoughSlots, match=r"3 nodes must run.*2 tasks at once"):
        check.require_slots(spark.sparkContext, 3)


def test_slots_are_counted_for_other_masters(spark_facts: SparkFacts) -> None:
    changed = dataclasses.replace(spark_facts, master="spark://host:7077", needed=5)
    changed = with_settings(changed, executor_cores="2")
    assert "TFD870" in codes(changed)
    lines = fixes.settings(changed, codes(changed))
    assert lines["spark.executor.instances"] == "3"
    assert lines["spark.cores.max"] == "6"
    assert "TFD870" not in codes(dataclasses.replace(changed, slots=6))
    assert "TFD870" in codes(dataclasses.replace(spark_facts, slots=0, needed=None))


def test_dynamic_allocation_is_an_error(spark_facts: SparkFacts) -> None:
    changed = with_settings(spark_facts, dynamicAllocation_enabled="true")
    assert codes(changed) == {"TFD871"}
    assert fixes.settings(changed, codes(changed))["spark.dynamicAllocation.enabled"] == "false"
    assert codes(with_settings(spark_facts, dynamicAllocation_enabled="false")) == set()


@pytest.mark.parametrize(
    ("conf", "code"), [({}, "TFD872"), ({"spark.dynamicAllocation.enabled": "true"}, "TFD871")]
)
def test_findings_for_spark_connect(
    spark_facts: SparkFacts, conf: dict[str, str], code: str
) -> None:
    members = {"__module__": "pyspark.sql.connect.session", "conf": conf}
    session = type("SparkSession", (), members)()
    assert code in [finding.code for finding in tfd.spark.check(session)]
    if conf:
        with pytest.raises(errors.Unsupported, match="dynamic"):
            check.require_slots(session, 1)
    else:
        check.require_slots(session, 1)


@pytest.mark.parametrize(
    ("values", "code", "message"),
    [
        ({"python": "3.9.1"}, "TFD873", "has Python 3.9.1"),
        ({"package": None}, "TFD874", "has tfd-notebook none"),
        ({"package": "0.0.1"}, "TFD874", "has tfd-notebook 0.0.1"),
        ({"tensorflow": None}, "TFD875", "has no TensorFlow"),
        ({"tensorflow": "2.3.0"}, "TFD875", "has TensorFlow 2.3.0"),
        ({"unreachable": "timed out"}, "TFD876", "cannot connect to 127.0.0.1: timed out"),
        ({"free_bytes": 10_000_000}, "TFD877", "has 10 MB free"),
    ],
)
def test_differences_of_an_executor_are_findings(
    spark_facts: SparkFacts, values: dict[str, Any], code: str, message: str
) -> None:
    (finding,) = diagnostics.run_checks("spark", with_executor(spark_facts, **values))
    assert finding.code == code
    assert message in finding.what
    assert finding.what.startswith(spark_facts.executors[0].host)
    assert "Next: " in str(finding)


def test_missing_authentication_is_a_finding(spark_facts: SparkFacts) -> None:
    remote = dataclasses.replace(spark_facts, master="spark://host:7077")
    remote = with_settings(remote, driver_host="192.0.2.1", authenticate="false")
    assert codes(remote) == {"TFD878"}
    assert codes(with_settings(remote, authenticate="true")) == {"TFD878"}
    encrypted = with_settings(remote, authenticate="true", network_crypto_enabled="true")
    assert codes(encrypted) == set()


def test_an_untested_cluster_manager_is_a_finding(spark_facts: SparkFacts) -> None:
    assert codes(dataclasses.replace(spark_facts, master="yarn")) == {"TFD879"}
    assert codes(dataclasses.replace(spark_facts, master="local[4]")) == {"TFD879"}
    assert codes(dataclasses.replace(spark_facts, master="spark://host:7077")) == set()


@pytest.fixture
def other_python(sc: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the Python of the executors, like PYSPARK_PYTHON."""
    return lambda path: monkeypatch.setattr(sc, "pythonExec", str(path))


def test_executors_without_packages_have_findings(
    spark: Any, other_python: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    venv.create(bare, symlinks=True, with_pip=False)
    other_python(bare / "bin" / "python")
    findings = tfd.spark.check(spark, 2)
    assert findings.codes == ("TFD874", "TFD875")
    assert f"has no TensorFlow in {bare}" in findings[1].what
    printed = capsys.readouterr().out
    assert all(str(finding) in printed for finding in findings)
    # All processes run on this host, so no environment must be sent.
    assert f"Start this process with:\n  PYSPARK_PYTHON={sys.executable}\n" in printed
    assert "Start Spark with" not in printed


def test_a_missing_python_of_executors_is_a_finding(spark: Any, other_python: Any) -> None:
    other_python("/nowhere/python")
    (finding,) = tfd.spark.check(spark, 2)
    assert finding.code == "TFD873"
    assert "/nowhere/python" in finding.what


def test_another_python_version_of_executors_is_a_finding(
    spark: Any, sc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each executor reports a version mismatch with this process."""
    monkeypatch.setattr(sc, "pythonVer", "3.9")
    (finding,) = tfd.spark.check(spark, 2)
    assert finding.code == "TFD873"
    assert "PYTHON_VERSION_MISMATCH" in finding.what


def test_an_unreachable_port_of_the_driver_is_a_finding(spark_facts: SparkFacts, sc: Any) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        probe = executor_probe.executor_probe("127.0.0.1", unused.getsockname()[1], 5.0)
        (report,) = sc.parallelize(range(1), 1).mapPartitions(probe).collect()
    unreachable = dataclasses.replace(spark_facts, executors=(facts.Executor(**report),))
    (finding,) = diagnostics.run_checks("spark", unreachable)
    assert finding.code == "TFD876"
    assert "refused" in finding.what
    assert "spark.driver.host" in finding.fix


@pytest.mark.root
def test_a_full_disk_of_an_executor_is_a_finding(spark: Any, sc: Any) -> None:
    directories = sc.parallelize(range(2), 2).map(lambda _: os.getcwd()).collect()
    directory = directories[0]
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory], check=True)
    try:
        (finding,) = tfd.spark.check(spark, 2)
    finally:
        subprocess.run(["umount", directory], check=True)
    assert finding.code == "TFD877"
    assert "has 1 MB free" in finding.what


def test_settings_for_remote_executors_are_printed_by_line(spark_facts: SparkFacts) -> None:
    remote = with_settings(spark_facts, driver_host="192.0.2.1", authenticate="true")
    remote = with_settings(remote, network_crypto_enabled="true")
    remote = dataclasses.replace(
        with_executor(remote, package=None, tensorflow=None), master="spark://host:7077"
    )
    findings = Findings(diagnostics.run_checks("spark", remote), [])
    assert findings.codes == ("TFD874", "TFD875")
    printed = list(check.report_lines(remote, findings))
    assert printed[-8:] == [
        "Create an environment for the executors:",
        "  python -m venv environment",
        "  environment/bin/pip install "
        f'"tfd-notebook[spark,tensorflow]=={tfd.__version__}" venv-pack',
        "  environment/bin/venv-pack -o environment.tar.gz",
        "Start this process with:",
        "  PYSPARK_PYTHON=./environment/bin/python",
        "Start Spark with:",
        "  --conf spark.archives=environment.tar.gz#environment",
    ]


def test_speculative_execution_is_a_finding(spark_facts: SparkFacts) -> None:
    changed = with_settings(spark_facts, speculation="true")
    assert codes(changed) == {"TFD881"}
    assert fixes.settings(changed, codes(changed)) == {"spark.speculation": "false"}


def test_speculation_is_refused_if_spark_feeds(sc: Any) -> None:
    """Spark would feed the rows of a task that runs twice two times, without an error."""
    sc._conf.set("spark.speculation", "true")
    try:
        with pytest.raises(errors.Unsupported, match=r"(?s)speculat.*spark.speculation=false"):
            TFCluster.run(sc, print, None, 2, input_mode=TFCluster.InputMode.SPARK)
        check.require_slots(sc, 2)  # a cluster whose nodes read their own data
    finally:
        sc._conf.set("spark.speculation", "false")
    assert not registry.running()


@pytest.mark.parametrize(
    ("cores", "amount", "share"), [(1, 2, "2"), (2, 2, "1"), (4, 2, "0.5"), (3, 1, "0.33")]
)
def test_gpus_without_a_task_resource_are_a_finding(
    spark_facts: SparkFacts, cores: int, amount: int, share: str
) -> None:
    master = f"local-cluster[2,{cores},1024]"
    expected = {
        "spark.executor.resource.gpu.amount": str(amount),
        "spark.task.resource.gpu.amount": share,
    }
    executor_gpus = dataclasses.replace(with_executor(spark_facts, gpus=amount), master=master)
    assert codes(executor_gpus) == {"TFD882"}
    assert fixes.settings(executor_gpus, codes(executor_gpus)) == expected
    configured = dataclasses.replace(spark_facts, master=master)
    configured = with_settings(configured, executor_resource_gpu_amount=str(amount))
    assert codes(configured) == {"TFD882"}
    requested = with_settings(configured, task_resource_gpu_amount=share)
    assert codes(requested) == set()
    assert fixes.slots_per_executor(requested) == cores


def test_gpus_limit_the_slots_of_executors(spark_facts: SparkFacts) -> None:
    changed = dataclasses.replace(spark_facts, master="local-cluster[2,4,1024]", needed=5)
    changed = with_settings(changed, executor_resource_gpu_amount="2", task_resource_gpu_amount="1")
    assert fixes.settings(changed, codes(changed)) == {"spark.master": "local-cluster[3,4,1024]"}


def hold(path: str) -> Any:
    def holding(rows: Any) -> Any:
        import os
        import time

        open(f"{path}/{os.getpid()}", "w").close()
        while os.path.exists(path):
            time.sleep(0.05)
        return iter(())

    return holding


@contextlib.contextmanager
def busy_executors(sc: Any, busy: Path) -> Iterator[None]:
    """Keep both executors busy."""
    job = threading.Thread(
        target=lambda: sc.parallelize(range(2), 2).mapPartitions(hold(str(busy))).collect()
    )
    job.start()
    try:
        until(lambda: len(list(busy.iterdir())) == 2, 60.0)
        yield
    finally:
        for file in busy.iterdir():
            file.unlink()
        busy.rmdir()
        job.join(60.0)


def test_check_does_not_wait_for_busy_executors(
    spark: Any, sc: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with busy_executors(sc, tmp_path_factory.mktemp("busy")):
        (finding,) = tfd.spark.check(spark, timeout=1.0)
        assert finding.code == "TFD880"
        assert "within 1 s" in finding.what
    assert list(tfd.spark.check(spark)) == []


def test_port_of_a_check_reads_nothing_and_is_closed_afterwards(
    spark: Any, sc: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with busy_executors(sc, tmp_path_factory.mktemp("busy")):
        before = ports_of_this_process()
        future = tfd.spark.check(spark, wait=False)  # it waits for the busy executors
        ((address, port),) = until(lambda: ports_of_this_process() - before)
        assert address == sc.getConf().get("spark.driver.host")
        with socket.create_connection((address, port), 60) as client:
            with contextlib.suppress(ConnectionError):  # it may be closed already
                client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
    assert list(future.result(60)) == []
    assert ports_of_this_process() == before


def ports_of_this_process() -> set[tuple[str, int]]:
    """Return the addresses at which this process listens."""
    return {
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def test_the_doctor_includes_the_findings_of_spark(spark: Any) -> None:
    assert list(tfd.doctor(spark)) == []
    assert {f"TFD{number}" for number in range(870, 883)} <= set(diagnostics.kinds())
    assert not {finding.code for finding in tfd.doctor() if finding.code.startswith("TFD87")}
    completed = subprocess.run(
        [sys.executable, "-m", "tfd_notebook", "why", "TFD871"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "dynamic allocation (error)" in completed.stdout


def test_invalid_arguments_of_check(spark: Any) -> None:
    with pytest.raises(errors.UsageError, match="invalid num_executors 0: "):
        check.require_slots(spark, 0)
    with pytest.raises(errors.UsageError, match="invalid spark=3: "):
        tfd.spark.check(3)


def test_the_reason_of_a_failed_probe_is_one_line() -> None:
    text = (
        "An error occurred\n at java\n[PYTHON_VERSION_MISMATCH] Python in worker has 3.9\n at java"
    )
    assert facts._reason(Exception(text)).endswith("Python in worker has 3.9")
    assert facts._reason(Exception("")) == "Exception"
    silent = SparkFacts(silent=facts._reason(Exception(text)), slots=1)
    assert codes(dataclasses.replace(silent, master="local-cluster[1,1,1024]")) == {"TFD873"}
