"""CPU of the kernel for live views of 32 tasks and 100,000 values, against no views.

Both sides schedule 200 closures per second. A view receives ten updates per second. Without a view,
the hub may use no CPU. The messages are packed, signed and sent as by the kernel of Jupyter.

The figure is the CPU clock of the hub's thread, which builds, compares, encodes and sends. The CPU
of the whole process includes the closures, whose cost varies more than the views cost.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import _pairs
import _training
import zmq
from jupyter_client.session import Session as Wire

import tfd_notebook as tfd
from tfd_notebook.bus import hub
from tfd_notebook.bus.session import Session

_PER_SECOND = 200
#: Target: percent of a core for the views.
_MAX_PERCENT = 2.0


def hub_clock() -> int:
    """Return the CPU clock of the hub's thread."""
    (thread,) = (each for each in threading.enumerate() if each.name == "tfd-bus")
    assert thread.ident is not None
    return time.pthread_getcpuclockid(thread.ident)


def main() -> None:
    quick = _pairs.arguments(__doc__).quick
    rounds, seconds, values = (2, 2.0, 5_000) if quick else (15, 2.0, 100_000)
    socket = zmq.Context().socket(zmq.PUB)
    socket.bind_to_random_port("tcp://127.0.0.1")
    wire, lock, sent = Wire(key=b"secret"), threading.Lock(), [0, 0]

    def send(data: dict[str, Any], buffers: list[bytes]) -> None:
        with lock:
            sent[0] += 1
            sent[1] += sum(map(len, buffers))
            wire.send(socket, "comm_msg", {"comm_id": "x", "data": data}, buffers=buffers)

    with tfd.Cluster(data_workers=28, workers=2, ps=1, name="pushed") as cluster:
        coordinator = cluster.coordinator()
        _training.run(coordinator, _training.nothing, values)
        session = Session(send, everything=True)
        hub.join(session)

        time.sleep(1)
        clock = hub_clock()
        of_hub: dict[bool, list[float]] = {True: [], False: []}

        def used(view: bool) -> float:
            if view:
                hub.receive(session, {"kind": "hello", "client": "page"})
                hub.receive(
                    session, {"kind": "subscribe", "client": "page", "clusters": ["pushed"]}
                )
                time.sleep(1)  # the first message has all rows, and does not count
            wall, cpu, busy = time.perf_counter(), _training.cpu(), time.clock_gettime(clock)
            while (left := wall + seconds - time.perf_counter()) > 0:
                coordinator.schedule(_training.nothing)
                time.sleep(min(1 / _PER_SECOND, left))
            coordinator.join()
            took = time.perf_counter() - wall
            share = (_training.cpu() - cpu) / took
            of_hub[view].append(100 * (time.clock_gettime(clock) - busy) / took)
            hub.receive(session, {"kind": "bye", "client": "page"})
            time.sleep(0.3)
            return 100 * share

        figures = _pairs.interleave(
            {"ours": lambda: used(True), "theirs": lambda: used(False)}, rounds
        )
        result = _pairs.compare(figures["ours"], figures["theirs"])
        print(f"{sent[0]:,} messages, {sent[1]:,} bytes of columns")
        print(f"CPU of the hub without a view: {max(of_hub[False]):.2f} percent of a core")
        _pairs.report("push_cost (whole process)", result, "percent of a core")
        views = _pairs.compare(of_hub[True], [_MAX_PERCENT] * len(of_hub[True]))
        print(f"CPU of the hub: {views}")
        _pairs.report("push_cost", views, "percent of a core for the views, at most")
        hub.leave(session)
    _training.end()


if __name__ == "__main__":
    main()
