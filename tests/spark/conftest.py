"""One Spark for all tests in this folder: two executors with one core each, on this host."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests._waiting import until

#: Timeout in seconds for the end of processes that Spark manages.
_SETTLE_SECONDS = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # pyspark warns about every pandas that is newer than pyspark itself.
        item.add_marker(pytest.mark.filterwarnings("ignore:PySpark does not yet fully support"))


@pytest.fixture(scope="session")
def spark(leftovers: type[Any]) -> Iterator[Any]:
    """Yield a SparkSession on ``local-cluster[2,1,1024]``."""
    from pyspark import java_gateway

    from tfd_notebook.spark.local_session import session as local_session_session

    before = leftovers()
    session = local_session_session.session(executors=2, cores=1, memory="1024m", name="tests")
    # For streams, Java calls Python. The port and the threads stay until Java ends.
    java_gateway.ensure_callback_server_started(session.sparkContext._gateway)
    yield session
    local_session_session.end()
    before.check("Spark", settle=_SETTLE_SECONDS)


@pytest.fixture
def sc(spark: Any) -> Any:
    """Return the SparkContext with both executors. An earlier test may have killed one."""
    from tfd_notebook._compat import pyspark as private

    until(lambda: len(private.executors(spark.sparkContext)) == 2, 60.0)
    return spark.sparkContext


@pytest.fixture
def clusters() -> Iterator[list[Any]]:
    """Yield a list of clusters that are stopped at the end of the test."""
    from tfd_notebook import errors
    from tfd_notebook.spark.driver.registry import running

    clusters: list[Any] = []
    yield clusters
    for cluster in clusters:
        cluster.fail(errors.SparkError("the test is over"))
    until(lambda: not running(), 120.0)


@pytest.fixture(scope="module", autouse=True)
def _module_leaves_nothing(request: pytest.FixtureRequest, leftovers: type[Any]) -> Iterator[None]:
    """Fail a module that leaves anything behind. Processes that Spark needs are allowed."""
    module = request.node
    items = [item for item in request.session.items if module in item.listchain()]
    if any("spark" in getattr(item, "fixturenames", ()) for item in items):
        request.getfixturevalue("spark")

    before = _leftovers_without_spark(leftovers)()
    yield
    before.check(f"the module {module.name}", settle=_SETTLE_SECONDS)


@pytest.fixture(autouse=True)
def _test_leaves_nothing(_module_leaves_nothing: None, leftovers: type[Any]) -> Iterator[None]:
    """Fail a test that leaves anything behind, except after a failure."""
    before = _leftovers_without_spark(leftovers)()
    yield
    before.check("the test", settle=_SETTLE_SECONDS)


def _leftovers_without_spark(leftovers: type[Any]) -> type[Any]:
    class Leftovers(leftovers):  # type: ignore[misc]
        def _new_processes(self, shared: bool) -> Iterator[psutil.Process]:
            for process in super()._new_processes(False):
                if not _belongs_to_spark(process):
                    yield process

        def _left(self, shared: bool) -> list[str]:
            # After a call from Java, py4j keeps the connection and a thread without a name.
            calls = re.compile(r"thread Thread-\d+ \(run\)(?: <|$)")
            return [leftover for leftover in super()._left(shared) if not calls.match(leftover)]

    return Leftovers


def _belongs_to_spark(process: psutil.Process) -> bool:
    """Return True if a process is Spark's Java, its fork daemon, or a Python worker.

    A process that such a worker starts does not count. The exception is the fork server of each
    executor.
    """
    with contextlib.suppress(psutil.Error, OSError):
        if process.cmdline()[-2:-1] == ["tfd-spark-guard"]:
            home = Path(process.cmdline()[-1])
            return json.loads((home / "state.json").read_text())["process"]["pid"] == os.getpid()
        if "java" in process.name():
            return any(parent.pid == os.getpid() for parent in process.parents())
        chain = [process, *process.parents()]
        if _is_fork_server(process):
            return not any(map(_is_fork_server, chain[1:]))
        daemons = [
            candidate
            for candidate in chain[:2]
            if "pyspark.daemon" in " ".join(candidate.cmdline())
        ]
        return bool(daemons) and daemons[-1].parent().name() == "java"
    return False


def _is_fork_server(process: psutil.Process) -> bool:
    return "tfd_notebook.spark.executor.fork_server" in " ".join(process.cmdline())
