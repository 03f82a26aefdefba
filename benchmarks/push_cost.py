"""CPU of the kernel for live views of 32 tasks and 100,000 values, against no views.

Both sides schedule 200 closures per second. In A a view receives ten updates per second. In B no
view is open. The messages are packed, signed and sent as by the kernel of Jupyter.
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


def main() -> None:
    quick = _pairs.arguments(__doc__).quick
    rounds, seconds, values = (2, 2.0, 5_000) if quick else (15, 4.0, 100_000)
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

        def used(view: bool) -> float:
            if view:
                hub.receive(session, {"kind": "hello", "client": "page"})
                hub.receive(
                    session, {"kind": "subscribe", "client": "page", "clusters": ["pushed"]}
                )
                time.sleep(1)  # the first message has all rows, and does not count
            wall, cpu = time.perf_counter(), _training.cpu()
            while (left := wall + seconds - time.perf_counter()) > 0:
                coordinator.schedule(_training.nothing)
                time.sleep(min(1 / _PER_SECOND, left))
            coordinator.join()
            share = (_training.cpu() - cpu) / (time.perf_counter() - wall)
            hub.receive(session, {"kind": "bye", "client": "page"})
            time.sleep(0.3)
            return 100 * share

        figures = _pairs.interleave(
            {"ours": lambda: used(True), "theirs": lambda: used(False)}, rounds
        )
        result = _pairs.compare(figures["ours"], figures["theirs"])
        more = [a - b for a, b in zip(figures["ours"], figures["theirs"], strict=True)]
        more.sort()
        print(f"{sent[0]:,} messages, {sent[1]:,} bytes of columns; percent of a core: {result}")
        print(f"the views cost {more[len(more) // 2]:.2f} percent of a core")
        _pairs.report("push_cost", result, "percent of a core")
        hub.leave(session)
    _training.end()


if __name__ == "__main__":
    main()
