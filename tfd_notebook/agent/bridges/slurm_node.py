"""Bridge between the agent on a Slurm node and the kernel.

``srun`` starts one on each node of a Slurm job. It connects to the kernel like the bridge of an
engine's worker. It ends with its Slurm step, which reports the end by SIGTERM, or after the grace
time without a connection. The Slurm job ends with its bridges.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from tfd_notebook.agent.bridges import rendezvous


def main() -> None:
    """Read the arguments from standard input, and serve connections until the bridge ends."""
    arguments = json.loads(sys.stdin.buffer.readline())
    handshake = rendezvous.describe(arguments["address"])
    key = {
        "host": arguments["part"],
        "token": handshake["token"],
        "process": int(os.environ["SLURM_NODEID"]),
        "node": os.environ.get("SLURMD_NODENAME", ""),
    }
    rendezvous.close_pipes()
    bridge = rendezvous.RendezvousBridge(
        arguments, handshake, key, os.getppid(), "its Slurm job ends"
    )
    signal.signal(signal.SIGTERM, lambda *_: bridge.report_end())
    bridge.run()
    os._exit(0)
