"""Main process of a pod of ``launcher="kubernetes"``.

The kernel starts the agent with an exec request of the API, by `stdio`. The agent outlives that
connection. This process ends with the agent, and the pod with this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from tfd_notebook.net import runtime_dir

_POLL_SECONDS = 0.5
#: Seconds that the pod still exists after its agents were killed, so that the kernel can read why.
_LINGER_SECONDS = 3.0


def main(first_seconds: str) -> None:
    """Wait for the first agent, `first_seconds` at most, then for the end of all agents."""
    # The first process of a container ignores signals without a handler.
    signal.signal(signal.SIGTERM, _end)
    # It is also the parent of all orphans, and has no other children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    deadline = time.monotonic() + float(first_seconds)
    started = False
    while True:
        agents = [directory for directory, _ in runtime_dir.agent_states()]
        # Without locks on the file system, the directory is the only sign of a running agent.
        if any(runtime_dir.is_locked(directory) is not False for directory in agents):
            started = True
        elif agents and started:
            sys.exit("the agent was killed")
        elif started:
            return
        elif time.monotonic() > deadline:
            sys.exit(f"no kernel connected within {first_seconds} s")
        time.sleep(_POLL_SECONDS)


def _end(*_signal: object) -> None:
    """Kill the agents at the request of Kubernetes, and end."""
    for _, state in runtime_dir.agent_states():
        with contextlib.suppress(OSError, TypeError):
            os.kill(state.get("pid"), signal.SIGKILL)  # type: ignore[arg-type]
    time.sleep(_LINGER_SECONDS)
    os._exit(0)
