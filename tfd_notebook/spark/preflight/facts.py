"""What a Spark says of itself, gathered before anything is judged."""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfd_notebook._compat import pyspark as private
from tfd_notebook.launchers import spark_slots
from tfd_notebook.spark.driver import application
from tfd_notebook.spark.driver.jobs import Job
from tfd_notebook.spark.preflight import executor_probe

_REACH_SECONDS = 5.0


@dataclass(frozen=True)
class Executor:
    """What one executor says of itself; the fields are those of `onlooker`.

    Parameters
    ----------
    host, python, executable : str
    package, tensorflow : str, optional
        Versions; None where it has none.
    free_bytes : int
        Room where it works.
    unreachable : str
        Why it cannot connect to this process; empty where it can.
    gpus : int
        NVIDIA's GPUs of its host.
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
    """A Spark, as its checks see it.

    Parameters
    ----------
    master : str
        Such as ``"local-cluster[2,1,1024]"``; empty for one behind Spark Connect.
    connect : bool
        Whether it is behind Spark Connect.
    settings : mapping of str to str
    slots : int
        Tasks that can run at once.
    held : mapping of str to int
        Slots that nodes keep while they live, by the names of our clusters.
    needed : int, optional
        Nodes that shall run at once; None where nobody said.
    executors : tuple of Executor
        One for each slot that answered.
    silent : str
        Why there are none; empty where they were not asked, or answered.
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
        """Return a setting, in small letters."""
        return str(self.settings.get(name, default)).strip().lower()

    @property
    def cores(self) -> int:
        """How many cores each executor has; 1 where that cannot be known."""
        found = re.fullmatch(r"local-cluster\[\s*\d+\s*,\s*(\d+).*", self.master)
        return int(found[1] if found else self.setting("spark.executor.cores") or 1)

    @property
    def free(self) -> int:
        """How many slots no node of ours keeps; other jobs of Spark give theirs back."""
        return spark_slots.left(self.slots, self.held)

    @property
    def dynamic(self) -> bool:
        """Whether executors come and go with the load."""
        return self.setting("spark.dynamicAllocation.enabled") == "true"

    @property
    def manager(self) -> str:
        """What gives out executors: ``local``, ``local-cluster``, ``standalone``, ``yarn``..."""
        if self.connect:
            return "connect"
        if self.master.startswith("local-cluster"):
            return "local-cluster"
        if self.master.startswith("spark://"):
            return "standalone"
        return re.split(r"[\[:]", self.master)[0]


def of(spark: Any, needed: int | None = None) -> SparkFacts:
    """Return what can be said of a session or context without running anything."""
    if application.is_connect(spark):
        names = ("spark.dynamicAllocation.enabled", "spark.speculation")
        settings = {name: str(spark.conf.get(name, "false")) for name in names}
        return SparkFacts(connect=True, settings=settings, needed=needed)
    context = application.context_of(spark)
    settings = dict(context.getConf().getAll())
    return SparkFacts(
        context.master, False, settings, private.slots(context), spark_slots.slots_held(), needed
    )


def executors(spark: Any, slots: int, timeout: float) -> tuple[tuple[Executor, ...], str]:
    """Run a task in every slot that tells of its executor.

    Returns
    -------
    tuple of Executor
    str
        Why there are none.
    """
    from pyspark import cloudpickle

    context = application.context_of(spark)
    settings = context.getConf()
    listening = settings.get("spark.driver.bindAddress") or settings.get("spark.driver.host")
    with _listener(listening) as port:
        host = settings.get("spark.driver.host", "localhost")
        # By value: they may have none of this package, or another version.
        cloudpickle.register_pickle_by_value(executor_probe)
        try:
            look = executor_probe.executor_probe(host, port, _REACH_SECONDS)
            tasks = context.parallelize(range(slots), slots).barrier().mapPartitions(look)
            job = Job(application.of(context), "what the executors have", tasks.collect)
            try:
                return tuple(Executor(**one) for one in job.future.result(timeout)), ""
            except concurrent.futures.TimeoutError:
                job.cancel()
                return (), f"they did not answer within {timeout:g} s"
            except Exception as error:
                return (), _reason(error)
            except BaseException:
                job.cancel()
                raise
        finally:
            cloudpickle.unregister_pickle_by_value(executor_probe)


@contextlib.contextmanager
def _listener(host: str | None) -> Any:
    """Listen where a launch would; who connects is hung up on."""
    listener = socket.create_server((host or "127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    thread = threading.Thread(target=accept, name="tfd-spark-reached", daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(5.0)
        listener.close()


def _reason(error: Exception) -> str:
    """Return what matters of an error of Spark, whose text is a page long."""
    text = str(error)
    for pattern in (
        r"PYTHON_VERSION_MISMATCH\][^\n]*",
        r"Cannot run program [^\n]*",
        r"\n(\w+(?:Error|Exception): [^\n]+)",
    ):
        if found := re.search(pattern, text):
            return found[found.lastindex or 0].strip()
    return text.strip().partition("\n")[0] or type(error).__name__
