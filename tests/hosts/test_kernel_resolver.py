"""`KernelResolver`: tasks in kernels of two hosts, coordinated from a third."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import tfd_notebook as tfd
from tests.hosts._hosts import Hosts
from tests.hosts._jupyter import Jupyters
from tfd_notebook import errors

pytestmark = [pytest.mark.integration, pytest.mark.root, pytest.mark.timeout(170)]

#: Starts clusters in the kernels of two hosts and coordinates them, in a separate process.
COORDINATE = """
import json, sys
import tensorflow as tf
import tfd_notebook as tfd
from tfd_notebook import errors

servers, network = json.loads(sys.argv[1]), sys.argv[2]
results = {}
with tfd.RemoteKernel(**servers[0]) as north, tfd.RemoteKernel(**servers[1]) as east:
    resolver = tfd.resolvers.KernelResolver(north, east)
    try:
        resolver.cluster_spec()
    except errors.NoTasks as error:
        results["before"] = str(error)
    local = "tfd.launchers.Local(allow=[%r])" % network
    start = "import tfd_notebook as tfd; cluster = tfd.Cluster(name='it', launcher=%s, %s)"
    north.run(start % (local, "workers=1, ps=1"))
    east.run(start % (local, "workers=1"))
    resolver.check()
    results["spec"] = resolver.cluster_spec().as_dict()
    results["accelerators"] = resolver.num_accelerators()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variable = tf.Variable(20.0)
    add = tf.function(lambda: variable.assign_add(1.0))
    for _ in range(10):
        coordinator.schedule(add)
    coordinator.join()
    results["value"] = float(variable)
    east.run("cluster.stop()")
    # The kernel tells of it a moment later.
    for spec in resolver.watch(seconds=20, every=0.05):
        results["after"] = spec.num_tasks("worker")
        if results["after"] == 1:
            break
try:
    resolver.cluster_spec()
except errors.NoAnswer as error:
    results["closed"] = str(error)
print(json.dumps(results), flush=True)
"""


def test_strategy_uses_kernels_of_two_hosts(hosts: Hosts, jupyter: Jupyters) -> None:
    servers = [
        {"server": server.url, "token": server.token, "ca": str(server.ca)}
        for server in (jupyter["north"], jupyter["east"])
    ]
    network = f"{hosts.home.address.rpartition('.')[0]}.0/24"
    completed = subprocess.run(
        [sys.executable, "-c", COORDINATE, json.dumps(servers), network],
        env={**os.environ, "TFD_PRELOAD": "off"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert completed.returncode == 0, completed.stderr[-4_000:]
    data = json.loads(completed.stdout.splitlines()[-1])
    assert "[TFD703]" in data["before"]
    assert "no worker and no parameter server" in data["before"]
    places = {job: [a.rpartition(":")[0] for a in listed] for job, listed in data["spec"].items()}
    north, east = (hosts[name].address for name in ("north", "east"))
    assert places == {"ps": [north], "worker": [north, east]}
    assert data["accelerators"] == {}
    assert data["value"] == 30.0
    assert data["after"] == 1
    assert "[TFD705]" in data["closed"]
    assert "is closed" in data["closed"]


def test_invalid_kernels_are_rejected() -> None:
    with pytest.raises(errors.UsageError, match="invalid kernels: expected at least 1"):
        tfd.resolvers.KernelResolver()
    with pytest.raises(errors.UsageError, match="invalid kernel 'north'"):
        tfd.resolvers.KernelResolver("north")
