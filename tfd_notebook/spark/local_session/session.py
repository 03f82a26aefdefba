"""Local Spark session on this host, with the settings that TensorFlow's tasks need."""

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

from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook.agent import interpreter
from tfd_notebook.errors import LaunchError, StartTimeout, StateError, Unsupported, UsageError
from tfd_notebook.model.spec import check_seconds, check_timeout
from tfd_notebook.net.runtime_dir import variables
from tfd_notebook.spark.driver import jobs, startup
from tfd_notebook.spark.local_session import java, spark_home
from tfd_notebook.spark.local_session.spark_home import WritableSparkHome

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_START_SECONDS = 180.0
_END_SECONDS = 20.0
_UNITS = {"": 1 << 20, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

_lock = threading.RLock()
_home: WritableSparkHome | None = None
_requested: dict[str, Any] | None = None


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
    """Return a Spark session of this process, with executors as processes of this host.

    The start takes about 10 s. Later calls with the same arguments return the same session, until
    ``spark.stop()``. All processes listen on the loopback interface, and require a secret.

    Parameters
    ----------
    executors : int
        Number of executors. Default 2.
    cores : int
        Number of tasks that an executor runs at the same time. Default 1.
    memory : str or int
        Memory of each executor's JVM, such as ``"1g"``; a number is in MiB. Its Python processes,
        including TensorFlow, use additional memory. Default ``"1g"``.
    name : str
        Name of the application. Default ``"tfd"``.
    config : mapping of str to object, optional
        Settings of Spark. They override the settings of this function.
    timeout : float
        Timeout in seconds for the start. Default 180.
    warm : bool
        Whether executors import TensorFlow in the background, so that the first cluster starts
        sooner. Each keeps a process with TensorFlow, for ten minutes after its last use. Default
        true.
    wait : bool
        If true (default), wait; otherwise return a future. After a start in the background, Ctrl-C
        does not cancel your Spark jobs. pyspark only installs its handler in the main thread.

    Returns
    -------
    pyspark.sql.SparkSession or concurrent.futures.Future of it

    Raises
    ------
    UsageError
        An argument is invalid.
    StateError
        A Spark with other settings runs in this process.
    Unsupported
        pyspark is missing, or a Java version that it supports.
    LaunchError
        Java or the executors did not start.
    """
    global _requested
    for argument, number in (("executors", executors), ("cores", cores)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise UsageError(f"invalid {argument} {number!r}: expected 1 or more")
    megabytes = _megabytes(memory)
    check_seconds("timeout", timeout)
    if not wait:
        return jobs.in_background(
            lambda: session(executors, cores, memory, name, config, timeout=timeout, warm=warm),
            "session",
        )
    requested = {
        "executors": executors,
        "cores": cores,
        "memory": megabytes,
        "name": name,
        "config": {key: _text(value) for key, value in (config or {}).items()},
    }
    with _lock:
        if (running := compat_pyspark.active_context()) is not None:
            return _reuse(running, requested)
        spark = _start(requested, timeout)
        _requested = requested
        if warm:
            startup.import_tensorflow(spark.sparkContext)
        return spark


def end(timeout: float = _END_SECONDS) -> None:
    """Stop Spark in this process, including its JVM, and remove its files.

    The next session starts a new JVM. This function also runs at the exit of this process.

    Parameters
    ----------
    timeout : float
        Seconds until processes that still run are killed. Default 20.
    """
    global _home, _requested
    check_timeout(timeout)
    with _lock:
        process = compat_pyspark.java_process()
        descendants = _descendants(process.pid) if process is not None else []
        if (running := compat_pyspark.active_context()) is not None:
            with contextlib.suppress(Exception):  # the JVM may have ended
                running.stop()
        _requested = None
        if process is not None:
            compat_pyspark.close_java()
            _await_end(process.pid, descendants, timeout)
            with contextlib.suppress(Exception):
                process.wait(1.0)
        if _home is not None:
            _home.remove()
            _home = None


def _reuse(context: Any, requested: Mapping[str, Any]) -> SparkSession:
    from pyspark.sql import SparkSession

    if requested != _requested:
        raise StateError(
            f"a SparkContext with master {context.master!r} and other settings is running",
            fix="use it with SparkSession.builder.getOrCreate(), or stop it with spark.stop()",
        )
    return SparkSession.builder.getOrCreate()


def _start(requested: dict[str, Any], timeout: float) -> SparkSession:
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise Unsupported(
            f"importing pyspark failed: {error}", fix='pip install "tfd-notebook[spark]"'
        ) from None
    compat_pyspark.java_process()  # raises if this pyspark does not support `end`
    spark_home.remove_leftovers()
    home = _writable_home()
    builder = SparkSession.builder
    if hasattr(builder, "classic"):  # a pyspark that includes Spark Connect
        builder = builder.classic
    builder = builder.appName(requested["name"]).master(
        f"local-cluster[{requested['executors']},{requested['cores']},{requested['memory']}]"
    )
    settings = {**_settings(requested, home.path), **requested["config"]}
    for key, value in settings.items():
        builder = builder.config(key, value)
    with _environment(home.path):
        try:
            spark = builder.getOrCreate()
        except Exception as error:
            end()
            raise LaunchError(
                f"Spark did not start: {str(error).strip() or type(error).__name__}",
                fix="see the output of Java above, or the log of the Jupyter server",
            ) from error
    if (process := compat_pyspark.java_process()) is not None:
        home.note_java(process.pid)
    try:
        _await_executors(spark, requested["executors"], timeout)
    except BaseException:
        end()
        raise
    return spark


def _settings(requested: Mapping[str, Any], home: Path) -> dict[str, str]:
    """Return the settings that can appear on a command line, which other users can read."""
    slots = requested["executors"] * requested["cores"]
    options = f"-Djava.io.tmpdir={home / 'tmp'} -XX:-UsePerfData"
    return {
        "spark.executor.memory": f"{requested['memory']}m",
        "spark.executor.cores": str(requested["cores"]),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": options,
        "spark.executor.extraJavaOptions": options,
        "spark.local.dir": str(home / "tmp"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.warehouse.dir": str(home / "warehouse"),
        # Spark's default of 200 partitions is slow for few rows.
        "spark.sql.shuffle.partitions": str(max(slots, 2)),
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.dynamicAllocation.enabled": "false",
        "spark.python.worker.reuse": "true",
        # Report too few slots at once, instead of after several minutes.
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "1",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
        # Modules in the directory of the notebook.
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(executor_path()),
    }


def executor_path() -> list[str]:
    """Return the import path of this process without the directories of its Python."""
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    path = interpreter.import_path()
    entries = [entry for entry in path if not any(_within(entry, prefix) for prefix in prefixes)]
    names = {
        name.partition(".")[0]
        for entry in entries
        if os.path.isdir(entry)
        for name in os.listdir(entry)
    }
    # PYTHONPATH precedes the standard library, and a notebook's directory may have a random.py.
    first = interpreter.standard_library() if names & sys.stdlib_module_names else ()
    return [*dict.fromkeys([*first, *entries])]


def _after_fork() -> None:
    """Unregister `end` in a forked child, whose exit must not stop the parent's Spark."""
    atexit.unregister(end)


os.register_at_fork(after_in_child=_after_fork)


def _within(entry: str, prefix: str) -> bool:
    return os.path.commonpath([entry, os.path.abspath(prefix)]) == os.path.abspath(prefix)


def _writable_home() -> WritableSparkHome:
    """Return the SPARK_HOME of this process, and create it if necessary."""
    global _home
    if _home is None:
        _home = WritableSparkHome(Path(compat_pyspark.spark_home()))
        atexit.register(end)
    return _home


@contextlib.contextmanager
def _environment(home: Path) -> Iterator[None]:
    """Set the environment for Java and its child processes within the block."""
    # Secrets go into a file, because all users can read command lines.
    properties = home / "secret.conf"
    descriptor = os.open(properties, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write("spark.authenticate true\n")
        file.write(f"spark.authenticate.secret {secrets.token_hex(32)}\n")
    submit_args = os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell")
    if "--properties-file" not in submit_args:
        head = f"--load-spark-defaults --properties-file {shlex.quote(str(properties))} "
        submit_args = head + submit_args
    values = {
        "JAVA_HOME": str(java.choose().prepared(home / "java")),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_SUBMIT_ARGS": submit_args,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    try:
        with variables(values):
            yield
    finally:
        properties.unlink(missing_ok=True)


def _await_executors(spark: SparkSession, expected: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while (count := len(compat_pyspark.executors(spark.sparkContext))) < expected:
        if time.monotonic() > deadline:
            raise StartTimeout(
                f"only {count} of {expected} executors started within {timeout:g} s",
                fix="use fewer executors, less memory for each, or a longer timeout=",
            )
        time.sleep(0.05)


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def _await_end(pid: int, descendants: list[psutil.Process], timeout: float) -> None:
    """Wait until Java and its descendants have ended, then kill those that still run."""
    processes = list(descendants)
    with contextlib.suppress(psutil.Error):
        processes.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(processes, timeout)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, 5.0)


def _megabytes(memory: str | int) -> int:
    text = f"{memory}m" if isinstance(memory, int) else str(memory)
    match = re.fullmatch(r"(\d+)\s*([kmgt]?)b?", text.strip().lower())
    size = int(match[1]) * _UNITS[match[2]] >> 20 if match else 0
    if size < 512:
        raise UsageError(
            f"invalid memory {memory!r}: expected 512 MiB or more",
            fix='pass a value such as memory="1g" or memory=1024',
        )
    return size


def _text(value: object) -> str:
    """Return the value of a setting as text in Spark's format."""
    return str(value).lower() if isinstance(value, bool) else str(value)
