"""Shared parts of all tests: separate directories, no skips in CI, and the check for leftovers.

A test run has its own temporary and runtime directories. It neither lists nor changes the clusters
of the user. A variable in its environment marks every process that descends from it, orphans too.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests._gpus import keep_gpus_visible
from tests._waiting import SERVER_STOP_SECONDS

#: With ``TFD_REQUIRE_ALL=1``, a skipped test fails.
REQUIRE_ALL = os.environ.get("TFD_REQUIRE_ALL") == "1"
#: Seconds after a test in which stopped processes and threads may still end.
SETTLE_SECONDS = 60.0
#: Seconds before garbage is collected, and between collections, which take 0.2 s with TensorFlow.
#: Most leftovers are processes, which end without one.
_COLLECT_AFTER_SECONDS = 0.25
_COLLECT_EVERY_SECONDS = 1.0

_MARK = "TFD_TEST_RUN"
_BASE = Path(tempfile.mkdtemp(prefix="tfd-tests-"))
_WATCHED = (_BASE / "tmp", _BASE / "run")
_OUTER_ENVIRONMENT = dict(os.environ)
#: Directory for the Python stacks of processes that crash. xdist's processes inherit it.
_CRASHES = Path(os.environ.setdefault("TFD_TEST_CRASHES", str(_BASE)))
#: Classes of the threads of pyzmq and IPython that run until the process ends.
_FOREIGN_THREADS = ("GarbageCollectorThread", "HistorySavingThread")
#: Name prefixes of threads that outlast a test: of agents, of the browser's driver, and for Ctrl-C.
#: If an iterator ends in a background thread, the one for Ctrl-C stays until the next iterator.
_LASTING_THREADS = ("tfd-agent", "asyncio_", "tfd-ctrl-c")
#: Name prefixes of threads that a shared cluster may start again: of its coordinator, and of
#: connections from executors.
_RENEWED_THREADS = (
    "WorkerClosureProcessingLoop",
    "WorkerPreemptionHandler",
    "tfd-secure-channel",
    "tfd-heartbeat",
)
_failed = pytest.StashKey[bool]()

if sys.platform != "linux":  # the port filter and network namespaces exist on Linux only
    collect_ignore = [
        "hosts",
        "unit/net/test_ports.py",
        "integration/net/test_port_filter.py",
        "spark/feed/test_decode.py",
    ]


def pytest_configure() -> None:
    # A shell ignores SIGINT for a background program, and the processes of tests inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("tmp", "run", "ipython", "jupyter"):
        (_BASE / name).mkdir(mode=0o700)
    # At exit, because IPython writes to its history there. Later handlers run earlier.
    atexit.register(shutil.rmtree, _BASE, ignore_errors=True)
    os.environ.update(
        {
            _MARK: uuid.uuid4().hex,
            "TMPDIR": str(_BASE / "tmp"),
            "TFD_RUNTIME_DIR": str(_BASE / "run"),
            "IPYTHONDIR": str(_BASE / "ipython"),
            "JUPYTER_RUNTIME_DIR": str(_BASE / "jupyter"),
            # Hides one log line per op library. Errors are still printed.
            "TF_CPP_MIN_LOG_LEVEL": "2",
            # Spark on these tests runs for a minute, half of it in the JIT compiler.
            "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        }
    )
    tempfile.tempdir = None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that no process waits for one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_sessionstart() -> None:
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        faulthandler.enable(os.open(_CRASHES / worker, os.O_CREAT | os.O_WRONLY))


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: pytest.TestReport) -> None:
    """Add the Python stacks of a crash to its report, the thread that crashed first."""
    text = (_CRASHES / report.node.gateway.id).read_text()
    stacks = text.partition("\nExtension modules:")[0].split("\n\n")
    stacks.sort(key=lambda stack: not stack.startswith(("Fatal", "Current")))
    report.longrepr = f"{report.longrepr}\n" + "\n\n".join(stacks)[:6000]


def pytest_unconfigure() -> None:
    os.environ.clear()
    os.environ.update(_OUTER_ENVIRONMENT)
    tempfile.tempdir = None


@pytest.fixture(scope="session")
def leftovers() -> type[Leftovers]:
    """Return the class that records the current resources and reports later leftovers."""
    return Leftovers


@pytest.fixture(scope="module")
def no_coordinator() -> Iterator[None]:
    """Keep clusters with workers and ps from importing TensorFlow."""
    with pytest.MonkeyPatch.context() as patch:
        keep_gpus_visible(patch.setattr)
        yield


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of jobs, clouds and proxies from the environment."""
    systems = ("SLURM", "SM_", "TF_CONFIG", "TPU_", "KUBE", "GCE_", "CUDA", "GOOGLE", "CLOUDSDK")
    for name in list(os.environ):
        if name.startswith(systems) or name.lower() in ("http_proxy", "https_proxy"):
            monkeypatch.delenv(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"TFD_REQUIRE_ALL=1 allows no skipped test: {_reason(report.longrepr)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    report = yield
    if REQUIRE_ALL and report.outcome == "skipped":
        report.outcome = "failed"
        report.longrepr = f"TFD_REQUIRE_ALL=1 allows no skipped file: {_reason(report.longrepr)}"
    return report


def _reason(longrepr: object) -> object:
    return longrepr[2] if isinstance(longrepr, tuple) else longrepr


@pytest.fixture(scope="module", autouse=True)
def _module_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a module that leaves resources behind."""
    before = Leftovers()
    yield
    before.check(f"the module {request.node.name}")


@pytest.fixture(autouse=True)
def _test_leaves_nothing(
    _module_leaves_nothing: None, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Fail an integration test that leaves resources behind, except its module's fixtures."""
    if request.node.get_closest_marker("integration") is None:
        yield
        return
    before = Leftovers()
    yield
    # The traceback of a failed test keeps references to its objects.
    if not request.node.stash.get(_failed, False):
        before.check("the test", shared=True)


class Leftovers:
    """Snapshot of the threads, processes, ports and files that a test could leave behind."""

    #: True if ports of this process count. TensorFlow may keep one for each connection.
    own_ports = True

    def __init__(self) -> None:
        self._threads = _threads()
        self._processes = _processes()
        self._sockets = _sockets()
        self._files = _files()

    def check(self, scope: str, shared: bool = False, settle: float = SETTLE_SECONDS) -> None:
        """Fail if new resources still exist after `settle` seconds.

        While servers stop, the limit is `SERVER_STOP_SECONDS`. With `shared`, descendants of
        processes in the snapshot do not count. The agent of a shared cluster may restart a task.
        """
        began = time.monotonic()
        collect_at = began + _COLLECT_AFTER_SECONDS
        limit = settle
        while left := self._left(shared):
            if any(thread.name == "tfd-server-stop" for thread in _threads()):
                limit = SERVER_STOP_SECONDS
            if time.monotonic() > began + limit:
                pytest.fail(f"{scope} left behind:\n  " + "\n  ".join(left), pytrace=False)
            time.sleep(0.05)
            if time.monotonic() > collect_at:
                gc.collect()
                collect_at = time.monotonic() + _COLLECT_EVERY_SECONDS

    def _left(self, shared: bool) -> list[str]:
        return [
            *(
                f"thread {t.name}{_position(t)}"
                for t in _threads() - self._threads
                if not (shared and t.name.startswith(_RENEWED_THREADS))
            ),
            *(f"process {p.pid}: {_command(p)}" for p in self._new_processes(shared)),
            *(f"port {port}" for port in sorted(self._ports()) if self.own_ports),
            *(f"file {path}" for path in sorted(_files() - self._files)),
        ]

    def _ports(self) -> set[int]:
        # The connection of a coordinator keeps its port open until the process ends.
        connecting = sys.modules.get("tfd_notebook._compat.tf_coordinator.connection")
        return _sockets() - self._sockets - {connecting.server_port() if connecting else None}

    def _new_processes(self, shared: bool) -> Iterator[psutil.Process]:
        for process in _processes() - self._processes:
            try:
                parents = set(process.parents())
            except psutil.Error:
                continue
            known = {p for p in parents if p in self._processes or p.pid in _agent_pids()}
            if not (shared and known):
                yield process


def _agent_pids() -> tuple[int, ...]:
    """Return the pids of this process's agent, which runs until the end of the test run."""
    local = sys.modules.get("tfd_notebook.launchers.local")
    return local.agent_pids() if local else ()


def _threads() -> set[threading.Thread]:
    return {
        thread
        for thread in threading.enumerate()
        if not thread.name.startswith(_LASTING_THREADS)
        and type(thread).__name__ not in _FOREIGN_THREADS
    }


def _position(thread: threading.Thread) -> str:
    """Return the innermost calls of a thread, which show what it waits for."""
    from tfd_notebook._compat import frames

    calls = frames.stacks().get(thread.ident or 0, [])[:4]
    return "".join(f" < {call.f_code.co_name}:{call.f_lineno}" for call in calls)


def _processes() -> set[psutil.Process]:
    """Return the running processes of this test run, including orphans."""
    mark, permanent = os.environ[_MARK], {os.getpid(), *_agent_pids()}
    children = set(psutil.Process().children(recursive=True))
    processes = set()
    for process in psutil.process_iter():
        try:
            marked = process in children or process.environ().get(_MARK) == mark
            zombie = process.status() == psutil.STATUS_ZOMBIE
            if marked and not zombie and process.pid not in permanent:
                processes.add(process)
        except psutil.Error:
            continue
    return processes


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:160] or process.name()
    except psutil.Error:
        return "(ended)"


def _sockets() -> set[int]:
    """Return the TCP ports that this process listens on or reserves."""
    ports = set()
    for fd in _descriptors():
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            duplicate = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        with duplicate:
            if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if duplicate.type != socket.SOCK_STREAM or not duplicate.getsockname()[1]:
                continue
            listening = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            shared = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)
            try:
                duplicate.getpeername()
            except OSError:
                if listening or shared:
                    ports.add(duplicate.getsockname()[1])
    return ports


def _descriptors() -> list[int]:
    directory = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")
    return [int(entry) for entry in os.listdir(directory)]


def _files() -> set[Path]:
    """Return the entries of the temporary and runtime directories."""
    agents = {path.name for path in _WATCHED[1].glob("agent-*")} if _agent_pids() else set()
    entries: set[Path] = set()
    for directory in _WATCHED:
        for path in directory.iterdir():
            if path.name in agents:
                with contextlib.suppress(FileNotFoundError):  # an agent that has just ended
                    entries.update(entry for entry in path.iterdir() if entry.is_dir())
            # AutoGraph keeps its converted functions until the process ends, and pytest keeps
            # the directories of `tmp_path`.
            elif not path.name.startswith(
                ("__autograph_generated_file", "__pycache__", "pytest-of-")
            ):
                entries.add(path)
    return entries
