"""One Spark for all tests here: two executors of one core, which are processes of this host."""

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

#: Seconds in which what Spark looks after has ended.
_SETTLE_SECONDS = 30.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # pyspark says that of every pandas that is newer than itself.
        item.add_marker(pytest.mark.filterwarnings("ignore:PySpark does not yet fully support"))


@pytest.fixture(scope="session")
def spark(leftovers: type[Any]) -> Iterator[Any]:
    """A SparkSession on ``local-cluster[2,1,1024]``."""
    from pyspark import java_gateway

    from tfd_notebook.spark import sessions

    before = leftovers()
    session = sessions.session(executors=2, cores=1, memory="1024m", name="tests")
    # Java calls Python for streams, through a port and threads that stay as long as Java does.
    java_gateway.ensure_callback_server_started(session.sparkContext._gateway)
    yield session
    sessions.end()
    before.check("Spark", settle=_SETTLE_SECONDS)


@pytest.fixture
def sc(spark: Any) -> Any:
    """Its SparkContext, with both executors there: a test before may have killed one."""
    from tfd_notebook._compat import spark as private

    until(lambda: len(private.executors(spark.sparkContext)) == 2, 60.0)
    return spark.sparkContext


@pytest.fixture
def ended() -> Iterator[list[Any]]:
    """Give a list of clusters that are ended with the test."""
    from tfd_notebook import errors
    from tfd_notebook.spark.living import living

    made: list[Any] = []
    yield made
    for cluster in made:
        cluster.fail(errors.SparkError("the test is over"))
    until(lambda: not living(), 120.0)


@pytest.fixture(scope="module", autouse=True)
def _module_leaves_nothing(request: pytest.FixtureRequest, leftovers: type[Any]) -> Iterator[None]:
    """Fail a module that leaves anything behind; what Spark needs while it lives is Spark's."""
    module = request.node
    items = [item for item in request.session.items if module in item.listchain()]
    if any("spark" in getattr(item, "fixturenames", ()) for item in items):
        request.getfixturevalue("spark")

    before = _beside_spark(leftovers)()
    yield
    before.check(f"the module {module.name}", settle=_SETTLE_SECONDS)


@pytest.fixture(autouse=True)
def _test_leaves_nothing(_module_leaves_nothing: None, leftovers: type[Any]) -> Iterator[None]:
    """Fail a test that leaves anything behind; a failed one says enough."""
    before = _beside_spark(leftovers)()
    yield
    before.check("the test", settle=_SETTLE_SECONDS)


def _beside_spark(leftovers: type[Any]) -> type[Any]:
    class Leftovers(leftovers):  # type: ignore[misc]
        def _new_processes(self, shared: bool) -> Iterator[psutil.Process]:
            for process in super()._new_processes(False):
                if not _of_spark(process):
                    yield process

        def _left(self, shared: bool) -> list[str]:
            # Where Java has called Python, py4j keeps the connection, and a thread without a name.
            calls = re.compile(r"thread Thread-\d+ \(run\)")
            return [left for left in super()._left(shared) if not calls.fullmatch(left)]

    return Leftovers


def _of_spark(process: psutil.Process) -> bool:
    """Whether it is Spark's own: Java, what forks its Python workers, and those.

    What such a worker has started is not, but for the one process for each executor that has
    TensorFlow ready.
    """
    with contextlib.suppress(psutil.Error, OSError):
        if process.cmdline()[-2:-1] == ["tfd-spark-guard"]:
            home = Path(process.cmdline()[-1])
            return json.loads((home / "state.json").read_text())["process"]["pid"] == os.getpid()
        if "java" in process.name():
            return any(parent.pid == os.getpid() for parent in process.parents())
        chain = [process, *process.parents()]
        if _is_zygote(process):
            return not any(map(_is_zygote, chain[1:]))
        daemons = [one for one in chain[:2] if "pyspark.daemon" in " ".join(one.cmdline())]
        return bool(daemons) and daemons[-1].parent().name() == "java"
    return False


def _is_zygote(process: psutil.Process) -> bool:
    return "tfd_notebook.spark.zygote" in " ".join(process.cmdline())
