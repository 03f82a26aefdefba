"""Reading the frames of other threads, which run meanwhile."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

#: Frames of many sizes end in other threads while a garbage collection waits in this thread.
ENDING_FRAMES = """
import gc, random, sys, threading, time
from tfd_notebook._compat import frames

functions = []
for count in (0, 1, 2, 3, 5, 7, 11, 13):
    assigned = "".join(f"v{number} = " for number in range(count)) + "depth"
    namespace = {"functions": functions}
    exec(
        f"def call(depth):\\n    {assigned}\\n"
        f"    return depth and functions[depth * {count + 1} % 8](depth - 1)",
        namespace,
    )
    functions.append(namespace["call"])


def work():
    while not ended:
        random.choice(functions)(random.randrange(30))


def collected(phase, details):
    if phase == "stop" and threading.current_thread() is threading.main_thread():
        time.sleep(0.0001)  # the others run


ended = False
threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
gc.callbacks.append(collected)
gc.freeze()
sys.setswitchinterval(0.0001)
gc.set_threshold(7, 1_000_000)
for _ in range(200):
    for stack in frames.stacks().values():
        assert all(frame.f_code.co_name for frame in stack)
ended = True
"""


def test_frames_that_end_meanwhile_do_not_crash_the_process() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", ENDING_FRAMES], capture_output=True, timeout=60
    )
    assert completed.returncode == 0, completed.stderr[-2_000:]
