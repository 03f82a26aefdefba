"""Loading of the IPython extension in a new process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LOAD = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
before = set(sys.modules)
shell.run_line_magic("load_ext", "tfd_notebook")
print(*sorted(set(sys.modules) - before))
"""
PRELOADS = """
import time
from tfd_notebook.launchers import local
deadline = time.monotonic() + {seconds}
while not local.agent_pids() and time.monotonic() < deadline:
    time.sleep(0.05)
print(bool(local.agent_pids()))
"""
UNLOAD = "shell.run_line_magic('unload_ext', 'tfd_notebook')\n"


def words(program: str, preload: str) -> list[str]:
    """Run `program` with this value of ``TFD_PRELOAD``; return the words that it prints."""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TFD_PRELOAD": preload},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return result.stdout.split()


def test_loading_imports_only_what_it_registers() -> None:
    imported = set(words(LOAD, preload="off"))
    heavy = {"tensorflow", "pandas", "grpc", "ipywidgets", "psutil", "asyncio", "ssl", "argparse"}
    assert not imported & heavy
    assert "tfd_notebook.ui.magics" in imported
    assert not {f"tfd_notebook.{name}" for name in ("launchers", "model", "net")} & imported
    assert len(imported) < 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preload", "then", "seconds", "starts"),
    [("on", "", 60, "True"), ("on", UNLOAD, 0.5, "False"), ("off", "", 0.5, "False")],
)
def test_preload_starts_the_agent_after_loading(
    preload: str, then: str, seconds: float, starts: str
) -> None:
    assert words(LOAD + then + PRELOADS.format(seconds=seconds), preload)[-1] == starts
