"""Facts about a Spark application, the input of its checks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfd_notebook._compat import pyspark as compat_pyspark
from tfd_notebook.launchers import spark_slots
from tfd_notebook.spark.driver import application
from tfd_notebook.spark.driver.jobs import Job
from tfd_notebook.spark.preflight import executor_probe

_REACH_SECONDS = 5.0


@dataclass(frozen=True)
class Executor:
    """Facts about one executor, as `executor_probe` returns them.

    Parameters
    ----------
    host, python, executable : str
    package, tensorflow : str, optional
        Versions; None if not installed.
    free_bytes : int
        Free disk space in the working directory.
    unreachable : str
        Error of a connection to this process; empty if it works.
    gpus : int
        Number of NVIDIA GPUs of its host.
    """

    host: str
    python: str
    executable: str
    package: str | None
    tensorflow: str | None
    free_bytes: int
    unreachable: str
    gpus: int = 0


@dataclass(frozen=True)
class SparkFacts:
    """Facts about a Spark application.

    Parameters
    ----------
    master : str
        Master URL, such as ``"local-cluster[2,1,1024]"``; empty with Spark Connect.
    connect : bool
        Whether the session uses Spark Connect.
    settings : mapping of str to str
    slots : int
        Number of tasks that can run at the same time.
    held : mapping of str to int
        Slots that the nodes of running clusters hold, by name of the cluster.
    needed : int, optional
        Number of nodes that must run at the same time; None if unknown.
    executors : tuple of Executor
        One item for each slot that answered.
    silent : str
        Error of the probe of the executors; empty if they answered, or were not probed.
    """

    master: str = ""
    connect: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    slots: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    needed: int | None = None
    executors: tuple[Executor, ...] = ()
    silent: str = ""

    def setting(self, name: str, default: str = "") -> str:
        """Return a setting in lower case."""
        return str(self.settings.get(name, default)).strip().lower()

    @property
    def cores(self) -> int:
        """Number of cores per executor; 1 if unknown."""
        match = re.fullmatch(r"local-cluster\[\s*\d+\s*,\s*(\d+).*", self.master)
        return int(match[1] if match else self.setting("spark.executor.cores") or 1)

    @property
    def free(self) -> int:
        """Number of slots that no node holds. Other Spark jobs release their slots."""
        return spark_slots.left(self.slots, self.held)

    @property
    def dynamic(self) -> bool:
        """True if dynamic allocation is enabled."""
        return self.setting("spark.dynamicAllocation.enabled") == "true"

    @property
    def manager(self) -> str:
        """Type of the cluster manager: ``local``, ``local-cluster``, ``standalone``, ``yarn``..."""
        if self.connect:
            return "connect"
        if self.master.startswith("local-cluster"):
            return "local-cluster"
        if self.master.startswith("spark://"):
            return "standalone"
        return re.split(r"[\[:]", self.master)[0]


def of(spark: Any, needed: int | None = None) -> SparkFacts:
    """Return the facts about a session or context that are known without running a job."""
    if application.is_connect(spark):
        names = ("spark.dynamicAllocation.enabled", "spark.speculation")
        settings = {name: str(spark.conf.get(name, "false")) for name in names}
        return SparkFacts(connect=True, settings=settings, needed=needed)
    context = application.context_of(spark)
    settings = dict(context.getConf().getAll())
    return SparkFacts(
        context.master,
        False,
        settings,
        compat_pyspark.slots(context),
        spark_slots.slots_held(),
        needed,
    )


def executors(spark: Any, slots: int, timeout: float) -> tuple[tuple[Executor, ...], str]:
    """Probe the executor of every slot with a task.

    Returns
    -------
    tuple of Executor
    str
        The error; empty if the executors answered.
    """
    from pyspark import cloudpickle

    context = application.context_of(spark)
    settings = context.getConf()
    listening = settings.get("spark.driver.bindAddress") or settings.get("spark.driver.host")
    with _listener(listening) as port:
        host = settings.get("spark.driver.host", "localhost")
        # Pickle the module by value: executors may not have this package, or another version.
        cloudpickle.register_pickle_by_value(executor_probe)
        try:
            probe = executor_probe.executor_probe(host, port, _REACH_SECONDS)
            tasks = context.parallelize(range(slots), slots).barrier().mapPartitions(probe)
            job = Job(application.of(context), "probe of the executors", tasks.collect)
            try:
                return tuple(Executor(**fields) for fields in job.future.result(timeout)), ""
            except concurrent.futures.TimeoutError:
                job.cancel()
                return (), f"no answer within {timeout:g} s"
            except Exception as error:
                return (), _reason(error)
            except BaseException:
                job.cancel()
                raise
        finally:
            cloudpickle.unregister_pickle_by_value(executor_probe)


@contextlib.contextmanager
def _listener(host: str | None) -> Any:
    """Listen on the launch address and close every connection at once, as a reachability test."""
    listener = socket.create_server((host or "127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    thread = threading.Thread(target=accept, name="tfd-spark-facts", daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(5.0)
        listener.close()


def _reason(error: Exception) -> str:
    """Return the relevant line of Spark's error, whose text has many lines."""
    text = str(error)
    for pattern in (
        r"PYTHON_VERSION_MISMATCH\][^\n]*",
        r"Cannot run program [^\n]*",
        r"\n(\w+(?:Error|Exception): [^\n]+)",
    ):
        if match := re.search(pattern, text):
            return match[match.lastindex or 0].strip()
    return text.strip().partition("\n")[0] or type(error).__name__
