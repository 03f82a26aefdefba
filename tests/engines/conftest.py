"""Engines on this host that the tests of a module share. They start before the module."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

_SETTLE_SECONDS = 60.0
#: Ray gives its first processes 30 s, which a busy machine may exceed.
_RAY_STARTS = 5
_CLUSTER_ID = "tests"

_DASK = """
import sys
from distributed import LocalCluster
with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
    print(cluster.scheduler_address, flush=True)
    sys.stdin.read()
"""
_IPYPARALLEL = f"""
import sys
import ipyparallel
cluster = ipyparallel.Cluster(n=3, cluster_id={_CLUSTER_ID!r})
cluster.start_cluster_sync()
print("started", flush=True)
sys.stdin.read()
cluster.stop_cluster_sync()
"""
#: Command lines of the processes of engines, which they start and end as they need them.
_ENGINE = re.compile(r"distributed|ipyparallel|/ray/|ray::")
#: Prefixes of the names of threads of their clients.
_CLIENT_THREADS = ("Dask-", "IO loop", "Profile", "TCP-Executor", "ThreadPoolExecutor", "ray_")


@pytest.fixture(scope="session")
def dask() -> Iterator[str]:
    """Yield the address of a Dask scheduler with two workers."""
    with _program(_DASK) as address:
        yield address


@pytest.fixture(scope="session")
def ipyparallel() -> Iterator[str]:
    """Yield the id of an ipyparallel cluster with three engines."""
    import ipyparallel

    with _program(_IPYPARALLEL):
        with contextlib.closing(ipyparallel.Client(cluster_id=_CLUSTER_ID, timeout=60)) as client:
            client.wait_for_engines(3, timeout=120, interactive=False)
        yield _CLUSTER_ID


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    """Initialize Ray with 8 CPUs in this process, and yield its module."""
    import ray

    # The path of a socket must be short.
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    for attempt in range(_RAY_STARTS):
        try:
            ray.init(num_cpus=8, include_dashboard=False, _temp_dir=directory, log_to_driver=False)
            break
        except Exception as error:
            if "timed out during startup" not in str(error) or attempt + 1 == _RAY_STARTS:
                raise
            ray.shutdown()
    yield ray
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _program(code: str) -> Iterator[str]:
    """Run a program until the end of the block, and yield its first line of output."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    try:
        line = process.stdout.readline().strip()
        assert line, "the engine did not start"
        yield line
    finally:
        process.communicate()


@pytest.fixture(scope="module", autouse=True)
def _module_leaves_nothing(request: pytest.FixtureRequest, leftovers: type[Any]) -> Iterator[None]:
    """Start the engine that the module names in `ENGINE`. Fail if the module leaves resources."""
    request.getfixturevalue(request.module.ENGINE)
    before = _leftovers_without_engines(leftovers)()
    yield
    before.check(f"the module {request.node.name}", settle=_SETTLE_SECONDS)


@pytest.fixture(autouse=True)
def _test_leaves_nothing(_module_leaves_nothing: None) -> None:
    """The tests of a module share a cluster, so the end of the module is checked."""


def _leftovers_without_engines(leftovers: type[Any]) -> type[Any]:
    class Leftovers(leftovers):  # type: ignore[misc]
        # Engines and their clients open ports at any time.
        own_ports = False

        def _new_processes(self, shared: bool) -> Iterator[psutil.Process]:
            for process in super()._new_processes(False):
                with contextlib.suppress(psutil.Error):
                    family = [process, *process.parents()]
                    if not any(_ENGINE.search(" ".join(p.cmdline())) for p in family):
                        yield process

        def _left(self, shared: bool) -> list[str]:
            names = tuple(f"thread {name}" for name in _CLIENT_THREADS)
            return [left for left in super()._left(shared) if not left.startswith(names)]

    return Leftovers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Without it, Ray warns about actors without GPUs.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
