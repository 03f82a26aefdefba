"""CPU and speed of a data service through encrypted tunnels, against open connections.

One data worker on another host sends noise to this process, 1 MB per element, without compression.
The connection uses ssh (``secure=True``), stunnel (``"tls"``), or no encryption (``False``). The
hosts are network namespaces of this machine with one sshd each, so that the network has no cost.
The CPU is the sum of this process, the tunnels and the tasks. Tunnels of ssh between two remote
hosts pass through this host, and cost twice as much.

Needs root, ``ip``, ``nft``, ``sshd`` and ``stunnel``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[1]))

import _pairs
import psutil
import tensorflow as tf

import tfd_notebook as tfd
from tests.hosts._hosts import Hosts
from tests.hosts._sshd import Sshds

BYTES = 1_000_000
#: Outstanding requests of a reader. They limit its transfer while other readers are measured.
WAITING = 16
#: The argument ``secure=`` by connection.
CONNECTIONS = {"ssh": True, "stunnel": "tls", "open": False}


class Reader:
    """Measurement that reads the noise of a cluster.

    Attributes
    ----------
    speeds : list of float
        MB/s of each round, including the warm-up round.
    """

    def __init__(self, cluster: tfd.Cluster, elements: int, hosts: Hosts) -> None:
        noise = tf.random.Generator.from_seed(1).uniform((BYTES,), 0, 256, tf.int32)
        dataset = tf.data.Dataset.from_tensors(tf.cast(noise, tf.uint8)).repeat()
        through = cluster.distribute("off", compression=None, max_outstanding_requests=WAITING)
        options = tf.data.Options()
        options.autotune.enabled = False
        options.experimental_optimization.inject_prefetch = False
        self._iterator = iter(dataset.apply(through).with_options(options))
        self._elements = elements
        self._hosts = hosts
        self.speeds: list[float] = []

    def __call__(self) -> float:
        """Return the seconds of CPU per GB."""
        for _ in range(WAITING):
            next(self._iterator)
        used, began = spent(self._hosts), time.perf_counter()
        for _ in range(self._elements):
            next(self._iterator)
        gigabytes = self._elements * BYTES / 1e9
        self.speeds.append(1e3 * gigabytes / (time.perf_counter() - began))
        return (spent(self._hosts) - used) / gigabytes


def spent(hosts: Hosts) -> float:
    """Return the CPU time of this process, its children, and all processes of the hosts."""
    own = psutil.Process()
    remote = (psutil.Process(pid) for host in hosts for pid in host.pids())
    total = 0.0
    for process in (own, *own.children(), *remote):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def main() -> None:
    quick = _pairs.arguments(__doc__).quick
    rounds, elements = (5, 100) if quick else (15, 500)
    if os.geteuid():
        sys.exit("tunnel_cost needs root to create network namespaces")
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts())
        hosts.full_speed()
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sshd = stack.enter_context(Sshds(hosts, directory))
        place = {"dispatcher": sshd.label("north"), "data_worker": sshd.label("east")}
        readers = {}
        for name, secure in CONNECTIONS.items():
            launcher = sshd.launcher("north", "east", place=place, secure=secure)
            cluster = tfd.Cluster(data_workers=1, name=name, launcher=launcher)
            stack.enter_context(cluster)
            readers[name] = Reader(cluster, elements, hosts)
        figures = _pairs.interleave(readers, rounds)
        for name in ("stunnel", "ssh"):
            speed = _pairs.compare(readers[name].speeds[1:], readers["open"].speeds[1:])
            cpu = _pairs.compare(figures[name], figures["open"])
            print(f"{name}, MB/s, against an open connection: {speed}")
            print(f"{name}, CPU seconds per GB: {cpu}")
            _pairs.report(f"tunnel_cost, {name}, speed", speed, "MB/s")
            _pairs.report(f"tunnel_cost, {name}", cpu, "seconds of CPU per GB")
        sys.stdout.flush()
        stack.close()
    # The threads of the iterators would crash at the interpreter's exit.
    os._exit(0)


if __name__ == "__main__":
    main()
