"""Closures through an observed coordinator, against TensorFlow's own.

A process can use only one cluster at a time. Each side is a process with its own cluster, and the
sides alternate. They run 10,000 empty closures and 500 closures of about 5 ms on two workers. The
figures are wall time, and CPU time of the coordinating process.

The second comparison has the live table open. A session of the bus sends tasks and closures to a
browser. It packs, signs and sends the messages as the kernel of Jupyter does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import _pairs
from _sides import Side


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


def compare(name: str, ours: str, quick: bool) -> _pairs.Result:
    """Run the rounds of one comparison with plain TensorFlow, and report them.

    Returns
    -------
    Result
        Wall time of the empty closures, which is the claim.
    """
    rounds = 3 if quick else 15
    sides = {"ours": Side(__file__, ours), "bare": Side(__file__, "bare")}
    share = 10 if rounds == 3 else 1
    counts = (("nothing", 10_000 // share), ("five_ms", 500 // share))
    results = {}
    for function, count in counts:
        for side in sides.values():
            side.request(f"{function} {count // 10}")
        figures: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for number in range(rounds):
            order = list(sides) if number % 2 else list(sides)[::-1]
            for kind in order:
                wall, used = sides[kind].request(f"{function} {count}")
                figures[kind].append((wall, used))
        for column, unit in enumerate(("seconds", "seconds of CPU")):
            result = results[function, unit] = _pairs.compare(
                [each[column] for each in figures["ours"]],
                [each[column] for each in figures["bare"]],
            )
            claim = f"{name} ({count:,} x {function}, {unit})"
            print(f"{claim}: {result}", flush=True)
            _pairs.report(claim, result, unit)
    for side in sides.values():
        side.close()
    return results["nothing", "seconds"]


def main() -> None:
    parser = _pairs.parser(__doc__)
    parser.add_argument("--child", metavar="KIND", help="run as this side")
    parser.add_argument("--table", action="store_true", help="only with the live table")
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    if not options.table:
        alone = compare("coordinator_overhead, unseen", "ours", options.quick)
    viewed = compare("coordinator_overhead, with the live table", "ours+table", options.quick)
    _pairs.report("coordinator_overhead, with the live table", viewed, "seconds")
    if not options.table:
        _pairs.report("coordinator_overhead", alone, "seconds")


if __name__ == "__main__":
    main()
