"""Modules, threads and connections of a new process after an import or a load of the extension."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfd_notebook.net import secure_channel

LOAD = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="nocolor")
before = set(sys.modules)
shell.run_line_magic("load_ext", "tfd_notebook")
assert "tfd_cluster" in shell.magics_manager.magics["line"]
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


def words(program: str, **variables: str) -> list[str]:
    """Run `program` in a new process with these variables; return the words that it prints."""
    completed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TFD_PRELOAD": "off", **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.split()


def test_import_is_light() -> None:
    loaded = set(words("import sys, tfd_notebook; print(*sys.modules)"))
    assert not loaded & {"tensorflow", "keras", "pandas", "grpc", "ipywidgets"}


def test_import_changes_nothing_until_the_first_use() -> None:
    words("""
import sys, threading, IPython
finders, threads = list(sys.meta_path), threading.enumerate()
import tfd_notebook
assert (list(sys.meta_path), threading.enumerate()) == (finders, threads)
modules = {name for name in sys.modules if name.startswith("tfd_notebook")}
assert modules == {"tfd_notebook", "tfd_notebook._lazy", "tfd_notebook._version"}
assert tfd_notebook.Policy().restarts >= 0
assert list(sys.meta_path) != finders  # patches TensorFlow at its import
""")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["errors", "cluster.registry", "bus.comm", "launchers.base"])
def test_any_module_can_be_the_first_import_in_a_kernel(module: str) -> None:
    # With these modules, the first use attaches the panels.
    program = f"import IPython, ipykernel, sys, tfd_notebook.{module}; print(*sys.modules)"
    assert "tfd_notebook.ui.extension" not in words(program)


def test_first_use_prepares_once_and_again_after_an_error() -> None:
    assert words("""
from tfd_notebook import _lazy
calls = []
def prepare():
    calls.append(1)
    _lazy.first_use()
    if len(calls) == 1: raise OSError
_lazy.on_first_use(prepare)
import tfd_notebook.launchers
try: tfd_notebook.launchers.Local
except OSError: pass
tfd_notebook.launchers.Local, tfd_notebook.Policy
print(len(calls))
""") == ["2"]


def test_loading_imports_only_what_it_registers() -> None:
    imported = set(words(LOAD))
    heavy = {"tensorflow", "keras", "pandas", "grpc", "ipywidgets"}
    assert not imported & (heavy | {"psutil", "asyncio", "ssl", "argparse"})
    assert "tfd_notebook.ui.magics" in imported
    assert (
        not {f"tfd_notebook.{name}" for name in ("bus.hub", "launchers", "model", "net")} & imported
    )
    assert len(imported) < 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preload", "then", "seconds", "starts"),
    [("on", "", 60, "True"), ("on", UNLOAD, 0.5, "False"), ("off", "", 0.5, "False")],
)
def test_preload_starts_the_agent_after_loading(
    preload: str, then: str, seconds: float, starts: str
) -> None:
    program = LOAD + then + PRELOADS.format(seconds=seconds)
    assert words(program, TFD_PRELOAD=preload)[-1] == starts


#: Program that ends if it contacts another host.
ALONE = """
import os, sys

def guard(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        address = arguments[1] if event != "socket.getaddrinfo" else arguments
        print("network access", event, address, file=sys.stderr)
        os._exit(3)

sys.addaudithook(guard)
import tfd_notebook as tfd

resolution = tfd.resolve()
print(resolution.rule, bool(resolution.cell))
print(*{"pyspark", "ray", "tensorflow", "kubernetes", "google.auth"} & set(sys.modules))
"""


@pytest.mark.parametrize(
    ("variables", "rule"),
    [
        ({}, "local"),
        ({"TPU_NAME": "mine"}, "tpu"),
        ({"RAY_ADDRESS": "ray://h:10001"}, "ray"),
    ],
)
def test_rules_send_no_requests_and_import_nothing(
    tmp_path: Path, plain_environment: None, variables: dict[str, str], rule: str
) -> None:
    for name in ("pyspark", "ray"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(4)\n")
    assert words(ALONE, **variables, PYTHONPATH=str(tmp_path)) == [rule, "True"]


def test_connecting_needs_only_the_standard_library() -> None:
    secret = secure_channel.Secret.new()

    def echo(channel: secure_channel.AuthenticatedChannel) -> None:
        channel.send(*channel.receive())

    with secure_channel.serve(secret, echo) as server:
        words(
            f"""
import os, sys
from tfd_notebook.net import secure_channel
with secure_channel.connect({server.address!r}, bytes.fromhex(os.environ["SECRET"])) as channel:
    channel.send({{"n": 1}})
    assert channel.receive(60)[0]["n"] == 1
assert "cryptography" not in sys.modules
""",
            SECRET=secret.hex(),
        )
