"""Closures through an observed coordinator, against TensorFlow's own.

A process can use only one cluster at a time. Each side is a process with its own cluster of two
workers. The sides alternate, lap by lap. A lap runs 1,000 closures that do nothing, or 100 of about
5 ms. The figures are wall time, and CPU time of the coordinating process.

The second comparison has the live table open. A session of the bus sends tasks and closures to a
browser. It packs, signs and sends the messages as the kernel of Jupyter does.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import _pairs
from _sides import Side

#: The function and the number of closures of a lap, and the number of laps.
LAPS = (("nothing", 1_000, 60), ("five_ms", 100, 15))


def child(kind: str) -> None:
    import _training
    import tensorflow as tf

    import tfd_notebook as tfd

    name = kind.partition("+")[0]
    with tfd.Cluster(workers=2, ps=1, name=f"overhead-{kind.replace('+', '-')}") as cluster:
        if name == "bare":
            strategy = tf.distribute.ParameterServerStrategy(cluster.resolver)
            coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        else:
            coordinator = cluster.coordinator()
        if kind.endswith("+gate"):
            coordinator.break_on(failure=True, function="never")
            coordinator.pause()
            coordinator.resume()
        with live_table(cluster) if kind.endswith("+table") else contextlib.nullcontext():
            print("ready", flush=True)
            for line in sys.stdin:
                function, count = line.split()
                wall, used = _training.run(coordinator, getattr(_training, function), int(count))
                print(wall, used, flush=True)
    _training.end()


@contextlib.contextmanager
def live_table(cluster: Any) -> Iterator[None]:
    """Publish a cluster with its closures to a simulated browser with the live table."""
    import threading

    import zmq
    from jupyter_client.session import Session as Wire

    from tfd_notebook.bus import hub
    from tfd_notebook.bus.session import Session

    socket = zmq.Context().socket(zmq.PUB)
    socket.bind_to_random_port("tcp://127.0.0.1")
    wire, received = Wire(key=b"secret"), threading.Event()

    def send(data: dict[str, Any], buffers: list[bytes]) -> None:
        wire.send(socket, "comm_msg", {"comm_id": "x", "data": data}, buffers=buffers)
        if data["kind"] == "values":
            received.set()

    session = Session(send, cluster)
    hub.join(session)
    hub.receive(session, {"kind": "hello", "client": "page"})
    hub.receive(session, {"kind": "subscribe", "client": "page", "clusters": [cluster.name]})
    if not received.wait(30):
        sys.exit("the bus published no values")
    yield
    hub.leave(session)


def compare(name: str, ours: str, quick: bool) -> dict[str, _pairs.Result]:
    """Run the laps of one comparison with plain TensorFlow, and report them.

    Returns
    -------
    dict of str to Result
        By unit: wall time and CPU time of the closures that do nothing, which are the claim.
    """
    sides = {"ours": Side(__file__, ours), "bare": Side(__file__, "bare")}
    results = {}
    for function, count, laps in reversed(LAPS):
        figures = _pairs.interleave(
            {
                kind: functools.partial(side.request, f"{function} {count}")
                for kind, side in sides.items()
            },
            max(laps // 5, 3) if quick else laps,
            warm_up=3,
        )
        for column, unit in enumerate(("seconds", "seconds of CPU")):
            result = results[unit] = _pairs.compare(
                *([figure[column] for figure in figures[kind]] for kind in sides)
            )
            claim = f"{name} ({count:,} x {function}, {unit})"
            print(f"{claim}: {result}", flush=True)
            if function != "nothing":
                _pairs.report(claim, result, unit)
    for side in sides.values():
        side.close()
    return results


def report(name: str, results: dict[str, _pairs.Result]) -> None:
    """Print the last lines of a comparison, with the wall time last."""
    _pairs.report(f"{name}, CPU", results["seconds of CPU"], "seconds of CPU")
    _pairs.report(name, results["seconds"], "seconds")


def main() -> None:
    parser = _pairs.parser(__doc__)
    parser.add_argument("--child", metavar="KIND", help="run as this side")
    parser.add_argument("--table", action="store_true", help="only with the live table")
    parser.add_argument("--closed", action="store_true", help="only without the live table")
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    if not options.closed:
        report(
            "coordinator_overhead, with the live table",
            compare("coordinator_overhead, with the live table", "ours+table", options.quick),
        )
    if not options.table:
        report("coordinator_overhead", compare("coordinator_overhead", "ours", options.quick))


if __name__ == "__main__":
    main()
