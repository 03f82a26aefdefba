"""Memory of each process, journal and open iterations after 10,000 short epochs (``--epochs``).

Readers share one dispatcher and two data workers. Each epoch is a new iteration of mode "dynamic"
over 8 elements. One epoch takes a second, because TensorFlow's consumers notice its end at their
next heartbeat. Three readers therefore run at a time. ``--left`` leaves each epoch after its first
element instead, and the dispatcher discards it a second later. The growth is that of the last half
of the epochs. The threads of a data worker are counted, too.

The datasets have no autotuning. With it (``--autotuned``), a data worker waits for TensorFlow's
tuning thread at the end of some epochs. It ends epochs one by one, so it can fall behind with three
readers, and does so with 16. Its threads and its memory then increase.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import _pairs
import psutil
import tensorflow as tf

import tfd_notebook as tfd
from tfd_notebook.cluster import data_service

READERS = 3
ELEMENTS = 8
POINTS = 10
#: Bytes that an epoch may leave in each process, and in the journal.
MAX_BYTES = 5_000
MAX_JOURNAL_BYTES = 1_000


def written_bytes(pid: int) -> int:
    """Return the memory that only this process has, and has written.

    The pages of TensorFlow's library are left out, because they are private until another process
    loads it.
    """
    (kibibytes,) = re.findall(
        r"^Private_Dirty: +(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE
    )
    return int(kibibytes) * 1024


def sizes(cluster: tfd.Cluster) -> dict[str, int]:
    """Return the memory of each process and the size of the journal in bytes."""
    pids = {row.task: row.pid for row in cluster.snapshot().tasks} | {"kernel": os.getpid()}
    threads = max(psutil.Process(pids[task]).num_threads() for task in pids if "worker" in task)
    figures = {task: written_bytes(pid) for task, pid in pids.items()}
    journal = data_service.of(cluster).journal
    assert journal is not None
    state = journal.read()
    counts = {"open iterations": state.open_iterations, "threads of a data worker": threads}
    return figures | {"journal": state.size_bytes} | counts


def read(cluster: tfd.Cluster, count: int, left: bool, autotuned: bool) -> None:
    """Read `count` epochs with several readers."""
    numbers = itertools.count()
    options = tf.data.Options()
    options.autotune.enabled = autotuned

    def reader(_: int) -> None:
        source = tf.data.Dataset.range(ELEMENTS).with_options(options)
        dataset = source.apply(cluster.distribute("dynamic"))
        while next(numbers) < count:
            iterator = iter(dataset)
            seen = len([next(iterator)] if left else list(iterator))
            assert seen == (1 if left else ELEMENTS), seen

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(reader, range(min(READERS, count))))


def main() -> None:
    parser = _pairs.parser(__doc__)
    parser.add_argument("--left", action="store_true", help="leave each epoch early")
    parser.add_argument("--autotuned", action="store_true", help="tune each epoch, as by default")
    parser.add_argument("--epochs", type=int, default=10_000, help="which take an hour")
    options = parser.parse_args()
    if options.epochs < POINTS:
        parser.error(f"invalid --epochs {options.epochs}: expected at least {POINTS}")
    count = 1_000 if options.quick else options.epochs
    config = tf.data.experimental.service.DispatcherConfig(
        job_gc_check_interval_ms=1000, job_gc_timeout_ms=1000
    )
    service = tfd.Service(dispatcher_config=config)
    with tfd.Cluster(data_workers=2, name="epochs", service=service) as cluster:
        points, began = [sizes(cluster)], time.monotonic()
        for point in range(1, POINTS + 1):
            read(cluster, count // POINTS, options.left, options.autotuned)
            points.append(sizes(cluster))
            megabytes = ", ".join(
                f"{name} {size}" if " " in name else f"{name} {size / 1e6:.1f} MB"
                for name, size in points[-1].items()
            )
            seconds = time.monotonic() - began
            print(f"{count // POINTS * point} epochs, {seconds:.0f} s: {megabytes}", flush=True)
    first, last = points[POINTS // 2], points[-1]
    name = "service_epochs" + " (left early)" * options.left + " (autotuned)" * options.autotuned
    for part in first:
        if " " in part:
            continue
        growth = (last[part] - first[part]) / (count / 2)
        limit = MAX_JOURNAL_BYTES if part == "journal" else MAX_BYTES
        print(f"{name}, {part}: ratio {growth / limit:.3f} (A {growth:.4g}, B {limit}, bytes each)")


if __name__ == "__main__":
    main()
