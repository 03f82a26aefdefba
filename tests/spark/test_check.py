"""What is said of a Spark before anything starts there."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import threading
import venv
from pathlib import Path
from typing import Any

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
def seen(spark: Any) -> SparkFacts:
    """What a Spark says with which nothing is wrong."""
    return check.inspect_spark(spark, 2)[0]


def codes(seen: SparkFacts) -> set[str]:
    return {one.code for one in diagnostics.look("spark", seen)}


def with_executor(seen: SparkFacts, **values: Any) -> SparkFacts:
    first, *rest = seen.executors
    return dataclasses.replace(seen, executors=(dataclasses.replace(first, **values), *rest))


def with_settings(seen: SparkFacts, **values: Any) -> SparkFacts:
    settings = {**seen.settings, **{f"spark.{k.replace('_', '.')}": v for k, v in values.items()}}
    return dataclasses.replace(seen, settings=settings)


def test_nothing_is_found_where_nothing_is_wrong(
    spark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(tfd.spark.check(spark, 2)) == []
    printed = capsys.readouterr().out
    assert "2 slots, 2 nodes requested" in printed
    assert "No problem found." in printed
    assert tfd.__version__ in printed
    check.needed(spark, 2)
    check.needed(spark.sparkContext, 1)


def test_it_can_be_a_future(spark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    looking = tfd.spark.check(spark, 3, wait=False)
    assert [one.code for one in looking.result(120)] == ["TFD870"]
    assert "2 slots, 3 nodes requested" in capsys.readouterr().out


def test_every_executor_is_heard(seen: SparkFacts) -> None:
    assert len(seen.executors) == 2
    assert {one.executable for one in seen.executors} == {sys.executable}
    assert all(one.tensorflow and one.free_bytes and not one.unreachable for one in seen.executors)
    assert codes(seen) == set()


def test_too_few_slots_are_an_error_at_once_with_the_lines_that_mend_it(
    spark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = tfd.spark.check(spark, 3)
    assert found.code == "TFD870"
    assert "3 nodes" in found.what
    assert "2 tasks at once" in found.what
    assert "--conf spark.master=local-cluster[3,1,1024]" in capsys.readouterr().out
    with pytest.raises(errors.NotEnoughSlots, match=r"3 nodes must run.*2 tasks at once"):
        check.needed(spark.sparkContext, 3)


def test_slots_of_other_masters(seen: SparkFacts) -> None:
    few = dataclasses.replace(seen, master="spark://host:7077", needed=5)
    few = with_settings(few, executor_cores="2")
    assert "TFD870" in codes(few)
    lines = fixes.settings(few, codes(few))
    assert lines["spark.executor.instances"] == "3"
    assert lines["spark.cores.max"] == "6"
    assert "TFD870" not in codes(dataclasses.replace(few, slots=6))
    assert "TFD870" in codes(dataclasses.replace(seen, slots=0, needed=None))


def test_dynamic_allocation(seen: SparkFacts) -> None:
    found = with_settings(seen, dynamicAllocation_enabled="true")
    assert codes(found) == {"TFD871"}
    assert fixes.settings(found, codes(found))["spark.dynamicAllocation.enabled"] == "false"
    assert codes(with_settings(seen, dynamicAllocation_enabled="false")) == set()


@pytest.mark.parametrize(
    ("conf", "code"), [({}, "TFD872"), ({"spark.dynamicAllocation.enabled": "true"}, "TFD871")]
)
def test_what_can_be_said_of_connect(seen: SparkFacts, conf: dict[str, str], code: str) -> None:
    members = {"__module__": "pyspark.sql.connect.session", "conf": conf}
    session = type("SparkSession", (), members)()
    assert code in [one.code for one in tfd.spark.check(session)]
    if conf:
        with pytest.raises(errors.Unsupported, match="dynamic"):
            check.needed(session, 1)
    else:
        check.needed(session, 1)


@pytest.mark.parametrize(
    ("values", "code", "said"),
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
def test_an_executor_that_is_unlike_this_process(
    seen: SparkFacts, values: dict[str, Any], code: str, said: str
) -> None:
    (found,) = diagnostics.look("spark", with_executor(seen, **values))
    assert found.code == code
    assert said in found.what
    assert found.what.startswith(seen.executors[0].host)
    assert "Next: " in str(found)


def test_a_spark_that_anybody_may_join(seen: SparkFacts) -> None:
    far = dataclasses.replace(seen, master="spark://host:7077")
    far = with_settings(far, driver_host="192.0.2.1", authenticate="false")
    assert codes(far) == {"TFD878"}
    assert codes(with_settings(far, authenticate="true")) == {"TFD878"}
    encrypted = with_settings(far, authenticate="true", network_crypto_enabled="true")
    assert codes(encrypted) == set()


def test_a_manager_that_nobody_tried(seen: SparkFacts) -> None:
    assert codes(dataclasses.replace(seen, master="yarn")) == {"TFD879"}
    assert codes(dataclasses.replace(seen, master="local[4]")) == {"TFD879"}
    assert codes(dataclasses.replace(seen, master="spark://host:7077")) == set()


@pytest.fixture
def other_python(sc: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have executors run another Python, as where PYSPARK_PYTHON names it."""
    return lambda path: monkeypatch.setattr(sc, "pythonExec", str(path))


def test_executors_with_a_bare_python(
    spark: Any, other_python: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    venv.create(bare, symlinks=True, with_pip=False)
    other_python(bare / "bin" / "python")
    found = tfd.spark.check(spark, 2)
    assert found.codes == ("TFD874", "TFD875")
    assert f"has no TensorFlow in {bare}" in found[1].what
    printed = capsys.readouterr().out
    assert all(str(one) in printed for one in found)
    # All of it is on this host, so that no environment has to be sent.
    assert f"Start this process with:\n  PYSPARK_PYTHON={sys.executable}\n" in printed
    assert "Start Spark with" not in printed


def test_executors_with_a_python_that_is_not_there(spark: Any, other_python: Any) -> None:
    other_python("/nowhere/python")
    (found,) = tfd.spark.check(spark, 2)
    assert found.code == "TFD873"
    assert "/nowhere/python" in found.what


def test_executors_with_another_version_of_python(
    spark: Any, sc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To executors this process is another one: what runs there refuses it."""
    monkeypatch.setattr(sc, "pythonVer", "3.9")
    (found,) = tfd.spark.check(spark, 2)
    assert found.code == "TFD873"
    assert "PYTHON_VERSION_MISMATCH" in found.what


def test_a_port_of_this_process_that_executors_do_not_reach(seen: SparkFacts, sc: Any) -> None:
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        look = executor_probe.executor_probe("127.0.0.1", nobody_listens.getsockname()[1], 5.0)
        (said,) = sc.parallelize(range(1), 1).mapPartitions(look).collect()
    unheard = dataclasses.replace(seen, executors=(facts.Executor(**said),))
    (found,) = diagnostics.look("spark", unheard)
    assert found.code == "TFD876"
    assert "refused" in found.what
    assert "spark.driver.host" in found.fix


@pytest.mark.root
def test_an_executor_on_a_disk_that_is_full(spark: Any, sc: Any) -> None:
    directories = sc.parallelize(range(2), 2).map(lambda _: os.getcwd()).collect()
    directory = directories[0]
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory], check=True)
    try:
        (found,) = tfd.spark.check(spark, 2)
    finally:
        subprocess.run(["umount", directory], check=True)
    assert found.code == "TFD877"
    assert "has 1 MB free" in found.what


def test_what_executors_elsewhere_need_is_printed_line_by_line(seen: SparkFacts) -> None:
    far = with_settings(seen, driver_host="192.0.2.1", authenticate="true")
    far = with_settings(far, network_crypto_enabled="true")
    far = dataclasses.replace(
        with_executor(far, package=None, tensorflow=None), master="spark://host:7077"
    )
    found = Findings(diagnostics.look("spark", far), [])
    assert found.codes == ("TFD874", "TFD875")
    printed = list(check.report_lines(far, found))
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


def test_speculative_execution(seen: SparkFacts) -> None:
    found = with_settings(seen, speculation="true")
    assert codes(found) == {"TFD881"}
    assert fixes.settings(found, codes(found)) == {"spark.speculation": "false"}


def test_speculation_is_refused_where_spark_feeds(sc: Any) -> None:
    """Rows of a task that runs twice would be fed twice, without an error."""
    sc._conf.set("spark.speculation", "true")
    try:
        with pytest.raises(errors.Unsupported, match=r"(?s)speculat.*spark.speculation=false"):
            TFCluster.run(sc, print, None, 2, input_mode=TFCluster.InputMode.SPARK)
        check.needed(sc, 2)  # a cluster that reads its data itself
    finally:
        sc._conf.set("spark.speculation", "false")
    assert not registry.running()


@pytest.mark.parametrize(
    ("cores", "amount", "share"), [(1, 2, "2"), (2, 2, "1"), (4, 2, "0.5"), (3, 1, "0.33")]
)
def test_gpus_that_no_task_is_given(seen: SparkFacts, cores: int, amount: int, share: str) -> None:
    master = f"local-cluster[2,{cores},1024]"
    wanted = {
        "spark.executor.resource.gpu.amount": str(amount),
        "spark.task.resource.gpu.amount": share,
    }
    there = dataclasses.replace(with_executor(seen, gpus=amount), master=master)
    assert codes(there) == {"TFD882"}
    assert fixes.settings(there, codes(there)) == wanted
    known = dataclasses.replace(seen, master=master)
    known = with_settings(known, executor_resource_gpu_amount=str(amount))
    assert codes(known) == {"TFD882"}
    given = with_settings(known, task_resource_gpu_amount=share)
    assert codes(given) == set()
    assert fixes.slots_per_executor(given) == cores


def test_executors_have_the_slots_that_their_gpus_allow(seen: SparkFacts) -> None:
    few = dataclasses.replace(seen, master="local-cluster[2,4,1024]", needed=5)
    few = with_settings(few, executor_resource_gpu_amount="2", task_resource_gpu_amount="1")
    assert fixes.settings(few, codes(few)) == {"spark.master": "local-cluster[3,4,1024]"}


def hold(path: str) -> Any:
    def holding(rows: Any) -> Any:
        import os
        import time

        open(f"{path}/{os.getpid()}", "w").close()
        while os.path.exists(path):
            time.sleep(0.05)
        return iter(())

    return holding


def test_executors_that_are_busy_are_not_waited_for(
    spark: Any, sc: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    busy = tmp_path_factory.mktemp("busy")
    job = threading.Thread(
        target=lambda: sc.parallelize(range(2), 2).mapPartitions(hold(str(busy))).collect()
    )
    job.start()
    try:
        until(lambda: len(list(busy.iterdir())) == 2, 60.0)
        (found,) = tfd.spark.check(spark, timeout=1.0)
        assert found.code == "TFD880"
        assert "within 1 s" in found.what
    finally:
        for file in busy.iterdir():
            file.unlink()
        busy.rmdir()
        job.join(60.0)
    assert list(tfd.spark.check(spark)) == []


def test_the_doctor_knows_spark(spark: Any) -> None:
    assert list(tfd.doctor(spark)) == []
    assert {f"TFD{number}" for number in range(870, 883)} <= set(diagnostics.kinds())
    assert not {one.code for one in tfd.doctor() if one.code.startswith("TFD87")}
    done = subprocess.run(
        [sys.executable, "-m", "tfd_notebook", "why", "TFD871"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "dynamic allocation (error)" in done.stdout


def test_what_cannot_be_meant(spark: Any) -> None:
    with pytest.raises(errors.UsageError, match="invalid num_executors 0"):
        check.needed(spark, 0)
    with pytest.raises(errors.UsageError, match="invalid Spark 3"):
        tfd.spark.check(3)


def test_a_reason_is_a_line() -> None:
    text = (
        "An error occurred\n at java\n[PYTHON_VERSION_MISMATCH] Python in worker has 3.9\n at java"
    )
    assert facts._reason(Exception(text)).endswith("Python in worker has 3.9")
    assert facts._reason(Exception("")) == "Exception"
    silent = SparkFacts(silent=facts._reason(Exception(text)), slots=1)
    assert codes(dataclasses.replace(silent, master="local-cluster[1,1,1024]")) == {"TFD873"}
