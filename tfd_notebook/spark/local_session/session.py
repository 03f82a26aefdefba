"""A Spark of one's own on this host, with the settings that TensorFlow's tasks need."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tfd_notebook._compat import pyspark as private
from tfd_notebook.agent import interpreter
from tfd_notebook.errors import LaunchError, StartTimeout, StateError, Unsupported, UsageError
from tfd_notebook.net.runtime_dir import variables
from tfd_notebook.spark.driver import jobs, preload
from tfd_notebook.spark.local_session import java, spark_home
from tfd_notebook.spark.local_session.spark_home import WritableSparkHome

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_START_SECONDS = 180.0
_END_SECONDS = 20.0
_UNITS = {"": 1 << 20, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

_lock = threading.RLock()
_home: WritableSparkHome | None = None
_wished: dict[str, Any] | None = None


def session(
    executors: int = 2,
    cores: int = 1,
    memory: str | int = "1g",
    name: str = "tfd",
    config: Mapping[str, Any] | None = None,
    *,
    timeout: float = _START_SECONDS,
    warm: bool = True,
    wait: bool = True,
) -> Any:
    """Return a Spark session of this process, with executors that are processes of this host.

    Starting takes some ten seconds. It is there for the next call with the same arguments, until
    ``spark.stop()``. All of it listens on loopback, where who connects has to know a secret.

    Parameters
    ----------
    executors : int
        How many. Default 2.
    cores : int
        Tasks that each runs at a time. Default 1.
    memory : str or int
        Of each executor's Java, such as ``"1g"``; a number counts MiB. The Python processes beside
        it, TensorFlow among them, take more. Default ``"1g"``.
    name : str
        Of the application. Default ``"tfd"``.
    config : mapping of str to object, optional
        Settings of Spark; they come before those that are made here.
    timeout : float
        Seconds for the start. Default 180.
    warm : bool
        Whether executors import TensorFlow at once, in the background, so that the first cluster
        starts sooner. Each keeps a process that has it, for ten minutes after its last use.
        Default true.
    wait : bool
        Whether to wait (default), or return the future of it. Where Spark starts in the background
        Ctrl-C does not cancel jobs of yours: pyspark sees to that in the main thread only.

    Returns
    -------
    pyspark.sql.SparkSession or concurrent.futures.Future of it

    Raises
    ------
    UsageError
        An argument that cannot be meant.
    StateError
        A Spark with other settings lives in this process.
    Unsupported
        There is no pyspark here, or no Java that it runs on.
    LaunchError
        Java or the executors did not come up.
    """
    global _wished
    for what, number in (("executors", executors), ("cores", cores)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise UsageError(f"{what}={number!r} must be 1 or more")
    megabytes = _megabytes(memory)
    if not wait:
        return jobs.in_background(
            lambda: session(executors, cores, memory, name, config, timeout=timeout, warm=warm),
            "session",
        )
    wished = {
        "executors": executors,
        "cores": cores,
        "memory": megabytes,
        "name": name,
        "config": {key: _text(value) for key, value in (config or {}).items()},
    }
    with _lock:
        if (living := private.active_context()) is not None:
            return _living(living, wished)
        made = _start(wished, timeout)
        _wished = wished
        if warm:
            preload.warm(made.sparkContext)
        return made


def end(timeout: float = _END_SECONDS) -> None:
    """End Spark in this process, its Java included, and remove its files.

    The next session starts a new Java. Also done where this process ends.

    Parameters
    ----------
    timeout : float
        Seconds until what does not end is killed. Default 20.
    """
    global _home, _wished
    with _lock:
        process = private.java_process()
        below = _below(process.pid) if process is not None else []
        if (living := private.active_context()) is not None:
            with contextlib.suppress(Exception):  # its Java may be gone
                living.stop()
        _wished = None
        if process is not None:
            private.forget_java()
            _await_end(process.pid, below, timeout)
            with contextlib.suppress(Exception):
                process.wait(1.0)
        if _home is not None:
            _home.remove()
            _home = None


def _living(context: Any, wished: Mapping[str, Any]) -> SparkSession:
    from pyspark.sql import SparkSession

    if wished != _wished:
        raise StateError(
            f"a SparkContext lives in this process, with master {context.master!r} and "
            "other settings",
            fix="use it, with SparkSession.builder.getOrCreate(); or end it, with spark.stop()",
        )
    return SparkSession.builder.getOrCreate()


def _start(wished: dict[str, Any], timeout: float) -> SparkSession:
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise Unsupported(
            f"pyspark cannot be imported: {error}", fix='pip install "tfd-notebook[spark]"'
        ) from None
    private.java_process()  # raises where Spark could be started and not ended
    spark_home.remove_leftovers()
    home = _made_home()
    builder = SparkSession.builder
    if hasattr(builder, "classic"):  # where there is Spark Connect, too
        builder = builder.classic
    builder = builder.appName(wished["name"]).master(
        f"local-cluster[{wished['executors']},{wished['cores']},{wished['memory']}]"
    )
    settings = {**_settings(wished, home.path), **wished["config"]}
    for key, value in settings.items():
        builder = builder.config(key, value)
    with _environment(home.path):
        try:
            made = builder.getOrCreate()
        except Exception as error:
            end()
            raise LaunchError(
                f"Spark did not start: {str(error).strip() or type(error).__name__}",
                fix="what its Java said is above, or in the log of the Jupyter server",
            ) from error
    if (process := private.java_process()) is not None:
        home.note_java(process.pid)
    try:
        _await_executors(made, wished["executors"], timeout)
    except BaseException:
        end()
        raise
    return made


def _settings(wished: Mapping[str, Any], home: Path) -> dict[str, str]:
    """Return the settings that may stand on a command line."""
    slots = wished["executors"] * wished["cores"]
    options = f"-Djava.io.tmpdir={home / 'tmp'} -XX:-UsePerfData"
    return {
        "spark.executor.memory": f"{wished['memory']}m",
        "spark.executor.cores": str(wished["cores"]),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": options,
        "spark.executor.extraJavaOptions": options,
        "spark.local.dir": str(home / "tmp"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.warehouse.dir": str(home / "warehouse"),
        # Two hundred small tasks for a few rows are for other clusters.
        "spark.sql.shuffle.partitions": str(max(slots, 2)),
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.dynamicAllocation.enabled": "false",
        "spark.python.worker.reuse": "true",
        # Too few slots is an error at once, not after several minutes.
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "1",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
        # Modules that lie beside the notebook.
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(_path()),
    }


def _path() -> list[str]:
    """Return what this process imports from, less what its Python has anyway."""
    own = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    path = interpreter.import_path()
    entries = [one for one in path if not any(_within(one, prefix) for prefix in own)]
    names = {
        name.partition(".")[0] for one in entries if os.path.isdir(one) for name in os.listdir(one)
    }
    # These precede Python's own modules in PYTHONPATH, and a notebook may lie next to a random.py.
    first = interpreter.standard_library() if names & sys.stdlib_module_names else ()
    return [*dict.fromkeys([*first, *entries])]


def _after_fork() -> None:
    """Leave Spark to the parent: the end of a forked child does not end it."""
    atexit.unregister(end)


os.register_at_fork(after_in_child=_after_fork)


def _within(entry: str, prefix: str) -> bool:
    return os.path.commonpath([entry, os.path.abspath(prefix)]) == os.path.abspath(prefix)


def _made_home() -> WritableSparkHome:
    """Return the directory of this process's Spark, which is made where there is none."""
    global _home
    if _home is None:
        _home = WritableSparkHome(Path(private.spark_home()))
        atexit.register(end)
    return _home


@contextlib.contextmanager
def _environment(home: Path) -> Iterator[None]:
    """Have Java started with what it and its children need, and put back what was there."""
    # On a command line everybody could read it.
    properties = home / "secret.conf"
    descriptor = os.open(properties, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write("spark.authenticate true\n")
        file.write(f"spark.authenticate.secret {secrets.token_hex(32)}\n")
    wished = os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell")
    if "--properties-file" not in wished:
        head = f"--load-spark-defaults --properties-file {shlex.quote(str(properties))} "
        wished = head + wished
    values = {
        "JAVA_HOME": str(java.choose().prepared(home / "java")),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_SUBMIT_ARGS": wished,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    try:
        with variables(values):
            yield
    finally:
        properties.unlink(missing_ok=True)


def _await_executors(made: SparkSession, wished: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while (have := len(private.executors(made.sparkContext))) < wished:
        if time.monotonic() > deadline:
            raise StartTimeout(
                f"only {have} of {wished} executors came up within {timeout:g} s",
                fix="fewer executors, or less memory for each; timeout= gives them longer",
            )
        time.sleep(0.05)


def _below(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def _await_end(pid: int, below: list[psutil.Process], timeout: float) -> None:
    """Wait for Java and what it started, and kill what is still there then."""
    processes = list(below)
    with contextlib.suppress(psutil.Error):
        processes.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(processes, timeout)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, 5.0)


def _megabytes(memory: str | int) -> int:
    text = f"{memory}m" if isinstance(memory, int) else str(memory)
    found = re.fullmatch(r"(\d+)\s*([kmgt]?)b?", text.strip().lower())
    size = int(found[1]) * _UNITS[found[2]] >> 20 if found else 0
    if size < 512:
        raise UsageError(
            f"memory={memory!r} is not 512 MiB or more", fix='such as memory="1g" or memory=1024'
        )
    return size


def _text(value: object) -> str:
    """Return a setting as Spark writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
