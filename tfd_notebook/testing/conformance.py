"""The contract of launchers as checks that start real clusters.

They run without pytest (`check_launcher`), as a test class
(`tfd_notebook.testing.pytest_checks.LauncherConformance`), or from the command line
(``pytest -p tfd_notebook.testing.plugin --launcher NAME``).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tfd_notebook.cluster import registry
from tfd_notebook.cluster.attach import attach
from tfd_notebook.cluster.cluster import Cluster
from tfd_notebook.errors import TfdError, UnknownName, Unsupported
from tfd_notebook.launchers import base
from tfd_notebook.launchers.client.session import Channel
from tfd_notebook.launchers.remote import RemoteHost, RemoteLauncher
from tfd_notebook.model.events import HostReconnected, TaskChanged
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import Role, TaskState
from tfd_notebook.net.probe import probe

_NAME = re.compile(r"[A-Za-z][\w.-]{0,63}", re.ASCII)
_POLL_SECONDS = 0.05
#: Seconds that tasks keep running after the death of their owner, if the launcher has the option.
_GRACE_SECONDS = 2.0
#: A process with a cluster. It reads the launcher from its input, and prints the tasks.
_OWNER = """
import importlib, json, sys
given = json.loads(sys.stdin.readline())
sys.path[:] = given["path"]
import tfd_notebook as tfd
try:
    launcher = getattr(importlib.import_module(given["module"]), given["kind"])(**given["options"])
    cluster = tfd.Cluster(data_workers=1, name=given["name"], launcher=launcher)
    reply = {"tasks": [[task.address, task.pid] for task in cluster.tasks]}
except tfd.errors.TfdError as error:
    reply = {"error": str(error), "state": isinstance(error, tfd.errors.StateError)}
print(json.dumps(reply), flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Outcome:
    """The result of one check.

    Parameters
    ----------
    check : str
    state : {"passed", "refused", "failed"}
        ``refused``: the launcher raised Unsupported, as the contract permits.
    detail : str
        The reason of any other state than ``passed``.
    """

    check: str
    state: str
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """The outcomes of all checks of a launcher, in their order."""

    launcher: str
    outcomes: tuple[Outcome, ...]

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """The checks that failed."""
        return tuple(outcome for outcome in self.outcomes if outcome.state == "failed")

    def __str__(self) -> str:
        lines = [f"launcher {self.launcher!r}: {len(self.failed)} of {len(self.outcomes)} failed"]
        for outcome in self.outcomes:
            detail = f": {outcome.detail}" if outcome.detail else ""
            lines.append(f"  {outcome.state:8} {outcome.check}{detail}")
        return "\n".join(lines)


def check_launcher(
    launcher: str | base.Launcher | type[base.Launcher],
    *,
    timeout: float = 60.0,
) -> Report:
    """Run all checks on a launcher, and return their outcomes.

    Parameters
    ----------
    launcher : str, Launcher or type
        The name of an installed launcher, a launcher, or a class that needs no arguments.
    timeout : float
        Maximum seconds of each wait. Default 60.

    Raises
    ------
    AssertionError
        A check failed. The message is the report.
    """
    report = Conformance(launcher, timeout=timeout).run_all()
    if report.failed:
        raise AssertionError(str(report))
    return report


class Conformance:
    """The checks of one launcher. They share one cluster. See `check_launcher`."""

    def __init__(
        self,
        launcher: str | base.Launcher | type[base.Launcher],
        *,
        timeout: float = 60.0,
    ) -> None:
        if isinstance(launcher, type):
            launcher = launcher()
        self.launcher = base.launcher(launcher)
        self.timeout = timeout
        self._cluster: Cluster | None = None

    def run_all(self) -> Report:
        """Return the outcomes of all checks."""
        self.open()
        try:
            outcomes = tuple(self.run(name) for name in CHECKS)
        finally:
            self.close()
        return Report(self.launcher.name, outcomes)

    def run(self, name: str) -> Outcome:
        """Return the outcome of one check. Never raises, except at Ctrl-C."""
        try:
            CHECKS[name](self)
        except Unsupported as error:
            return Outcome(name, "refused", error.what)
        except AssertionError as error:
            return Outcome(name, "failed", str(error) or traceback.format_exc())
        except Exception as error:
            return Outcome(name, "failed", f"{type(error).__name__}: {error}")
        return Outcome(name, "passed")

    def open(self) -> None:
        """Start the shared cluster; a check reports the failure."""
        with contextlib.suppress(Exception):
            self.cluster  # noqa: B018

    def close(self) -> None:
        """Stop the shared cluster."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.stop()

    # For the checks

    def another(self) -> base.Launcher:
        """Return a launcher that is created from the options of the checked one."""
        return type(self.launcher)(**self.launcher.options)

    @property
    def cluster(self) -> Cluster:
        """The shared cluster, with two data workers."""
        if self._cluster is None or self._cluster.ended:
            self._cluster = self.start(data_workers=2)
        return self._cluster

    def start(self, launcher: base.Launcher | None = None, **counts: int) -> Cluster:
        """Start a cluster with another launcher object."""
        launcher = launcher or self.another()
        return Cluster(name=self.new_name(), launcher=launcher, **counts)  # type: ignore[arg-type]

    def new_name(self) -> str:
        """Return a name for a cluster."""
        return f"conformance-{uuid.uuid4().hex[:8]}"

    @contextlib.contextmanager
    def brief(self, launcher: base.Launcher | None = None, **counts: int) -> Iterator[Cluster]:
        """Start a cluster for a ``with`` block."""
        cluster = self.start(launcher, **counts)
        try:
            yield cluster
        finally:
            cluster.stop()

    def until(self, holds: Callable[[], Any], what: str) -> None:
        """Wait until `holds()` is true; fail with the sentence `what`."""
        deadline = time.monotonic() + self.timeout
        while not holds():
            assert time.monotonic() < deadline, f"not within {self.timeout:g} s: {what}"
            time.sleep(_POLL_SECONDS)

    def row(self, task: str) -> TaskRow:
        """Return the row of a task of the shared cluster."""
        row = self.cluster.snapshot().task(task)
        assert row is not None, f"{task} is missing"
        return row

    def is_ready(self, task: str) -> bool:
        """Return True if a task of the shared cluster is ready."""
        return self.row(task).state is TaskState.READY


def _attributes(kit: Conformance) -> None:
    launcher = kit.launcher
    assert _NAME.fullmatch(launcher.name), f"invalid name {launcher.name!r}"
    assert launcher.summary, "summary is empty"
    assert "\n" not in launcher.summary, "summary has several lines"
    assert launcher.roles, "roles is empty"
    assert launcher.roles <= set(Role), f"invalid roles {launcher.roles!r}"


def _options(kit: Conformance) -> None:
    options = kit.launcher.options
    assert json.loads(json.dumps(options)) == options, "options has values that JSON changes"
    assert kit.another().options == options, "a launcher created from options has other options"


def _start(kit: Conformance) -> None:
    cluster = kit.cluster
    assert cluster.state == "ready", f"the cluster is {cluster.state}"
    names = [task.name for task in cluster.tasks]
    assert names == ["dispatcher:0", "data_worker:0", "data_worker:1"], f"tasks are {names}"
    addresses = [task.address for task in cluster.tasks]
    assert all(addresses), f"tasks without an address: {addresses}"
    assert len(set(addresses)) == 3, f"tasks share an address: {addresses}"


def _events(kit: Conformance) -> None:
    order = (TaskState.PLANNED, TaskState.STARTING, TaskState.READY)
    for task in kit.cluster.tasks:
        states = [
            event.state
            for event in kit.cluster.snapshot().events
            if isinstance(event, TaskChanged) and event.task == task.name
        ]
        first = states[: states.index(TaskState.READY) + 1] if TaskState.READY in states else states
        assert first, f"no event of {task.name}"
        assert first[-1] is TaskState.READY, f"{task.name} was never reported ready: {states}"
        positions = [order.index(state) for state in first if state in order]
        assert positions == sorted(positions), f"events of {task.name} out of order: {states}"


def _data(kit: Conformance) -> None:
    if kit.launcher.simulated:
        raise Unsupported("its tasks are simulated")
    import tensorflow as tf

    dataset = tf.data.Dataset.range(100).apply(kit.cluster.distribute("dynamic"))
    numbers = sorted(int(number) for number in dataset)
    assert numbers == list(range(100)), f"the service delivered {len(numbers)} of 100 elements"


def _logs(kit: Conformance) -> None:
    assert isinstance(kit.cluster.logs("data_worker:0"), str)


def _restart(kit: Conformance) -> None:
    before = kit.row("data_worker:0")
    kit.cluster.restart("data_worker:0")
    kit.until(lambda: kit.is_ready("data_worker:0"), "the restarted task is ready")
    after = kit.row("data_worker:0")
    assert after.address == before.address, "the restarted task has another address"
    assert after.restarts > before.restarts, "the restart was not counted"


def _kill(kit: Conformance) -> None:
    if kit.launcher.in_process:
        raise Unsupported("a task in the calling process cannot be killed")
    before = kit.row("data_worker:1")
    kit.cluster.kill("data_worker:1")
    kit.until(lambda: kit.row("data_worker:1").restarts > before.restarts, "it is restarted")
    kit.until(lambda: kit.is_ready("data_worker:1"), "the killed task is ready again")
    assert kit.row("data_worker:1").address == before.address, "it has another address"


def _scale(kit: Conformance) -> None:
    for count in (3, 2):
        kit.cluster.scale(data_workers=count)
        names = [task.name for task in kit.cluster.tasks if task.role == Role.DATA_WORKER]
        assert len(names) == count, f"after scale(data_workers={count}): {names}"
    kit.until(lambda: kit.cluster.state == "ready", "the cluster is ready after scale")


def _adapt(kit: Conformance) -> None:
    def data_workers() -> int:
        return sum(task.role == Role.DATA_WORKER for task in kit.cluster.tasks)

    try:
        kit.cluster.adapt(3, 4)
        kit.until(lambda: data_workers() == 3, "adapt(3, 4) starts a third data worker")
        kit.cluster.adapt(1, 2)
        kit.until(lambda: data_workers() == 2, "adapt(1, 2) stops a data worker")
    finally:
        kit.cluster.adapt(None)
    assert kit.cluster.snapshot().adaptation is None, "adapt(None) did not end the adaptation"
    kit.until(lambda: kit.cluster.state == "ready", "the cluster is ready after adapt")


def _unknown_task(kit: Conformance) -> None:
    for operation in (kit.cluster.restart, kit.cluster.kill, kit.cluster.logs):
        try:
            operation("data_worker:99")
        except UnknownName:
            continue
        raise AssertionError(f"{operation.__name__}('data_worker:99') did not raise UnknownName")


def _two_clusters(kit: Conformance) -> None:
    with kit.brief(data_workers=1) as second:
        assert second.state == "ready", f"the second cluster is {second.state}"
        assert kit.cluster.state == "ready", f"the first cluster is {kit.cluster.state}"
        both = {t.address for t in second.tasks} & {t.address for t in kit.cluster.tasks}
        assert kit.launcher.simulated or not both, f"both clusters use {', '.join(sorted(both))}"
    assert kit.cluster.state == "ready", "the end of the second cluster changed the first"


def _training(kit: Conformance) -> None:
    if not {Role.WORKER, Role.PS} <= kit.launcher.roles:
        raise Unsupported("it runs no training workers and parameter servers")
    if kit.launcher.in_process:
        raise Unsupported("TensorFlow cannot stop these servers in the calling process")
    with kit.brief(workers=1, ps=1) as cluster:
        states = {task.name: str(task.state) for task in cluster.tasks}
        assert states == {"ps:0": "ready", "worker:0": "ready"}, f"tasks are {states}"


def _rank() -> list[int]:
    config = json.loads(os.environ["TF_CONFIG"])
    return [config["task"]["index"], len(config["cluster"]["worker"])]


def _run(kit: Conformance) -> None:
    if Role.WORKER not in kit.launcher.roles:
        raise Unsupported("it runs no training workers")
    if kit.launcher.in_process:
        raise Unsupported("TensorFlow cannot stop these servers in the calling process")
    with kit.brief(workers=2) as cluster:
        ranks = cluster.run(_rank, timeout=kit.timeout)
        assert ranks == [[0, 2], [1, 2]], f"index and number of the ranks are {ranks}"


def _connection(kit: Conformance) -> None:
    launcher = kit.another()
    if not isinstance(launcher, RemoteLauncher):
        raise Unsupported("it has no connections to hosts")
    channels: list[Channel] = []
    hosts_for = launcher.hosts_for

    def recorded(connect: Callable[[str, bool], Channel]) -> Callable[[str, bool], Channel]:
        def record(agent: str, start: bool) -> Channel:
            channels.append(connect(agent, start))
            return channels[-1]

        return record

    def record_all(*arguments: Any) -> list[RemoteHost]:
        hosts = hosts_for(*arguments)
        for host in hosts:
            setattr(host, "connect", recorded(host.connect))  # noqa: B010 - for mypy
        return hosts

    setattr(launcher, "hosts_for", record_all)  # noqa: B010
    with kit.brief(launcher, data_workers=1) as cluster:
        before = {task.name: (task.address, task.pid) for task in cluster.tasks}
        broken = list(channels)
        assert broken, "no host was connected"
        for channel in broken:
            channel.close()

        def reconnected() -> bool:
            events = cluster.snapshot().events
            return sum(isinstance(event, HostReconnected) for event in events) >= len(broken)

        kit.until(reconnected, "all hosts are connected again after their channels have ended")
        after = {task.name: (task.address, task.pid) for task in cluster.tasks}
        assert after == before, f"a lost connection changed the tasks from {before} to {after}"
        cluster.restart("data_worker:0")
        kit.until(lambda: cluster.state == "ready", "a task restarts over the new connection")


def _detach(kit: Conformance) -> None:
    if kit.launcher.simulated:
        raise Unsupported("its tasks are simulated")
    with kit.brief(data_workers=1) as cluster:
        # The lease ends a cluster that cannot be attached.
        cluster.detach(hours=10 * kit.timeout / 3600)
        if base.available_launchers().get(kit.launcher.name) is not type(kit.launcher):
            raise Unsupported("only an installed launcher can attach a detached cluster")
        before = {task.name: (task.address, task.pid) for task in cluster.tasks}
        cluster.leave()
        attached = attach(cluster.name, connect=False)
        try:
            after = {task.name: (task.address, task.pid) for task in attached.tasks}
            assert after == before, f"the attached tasks are {after}, not {before}"
            assert attached.state == "ready", f"the attached cluster is {attached.state}"
        finally:
            attached.stop()
        assert attached.state == "stopped", f"after stop() the cluster is {attached.state}"


def _owner_killed(kit: Conformance) -> None:
    if kit.launcher.simulated:
        raise Unsupported("its tasks are simulated")
    kind, options = type(kit.launcher), kit.launcher.options
    if "." in kind.__qualname__ or kind.__module__ == "__main__":
        raise Unsupported("another process cannot import its class")
    if "grace" in options:
        options = {**options, "grace": _GRACE_SECONDS}
    given = {"path": sys.path, "module": kind.__module__, "kind": kind.__name__}
    with (
        _directory(kit) as directory,
        subprocess.Popen(
            [sys.executable, "-c", _OWNER],
            env={**os.environ, "TFD_RUNTIME_DIR": directory},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as owner,
    ):
        assert owner.stdin is not None
        assert owner.stdout is not None
        timer = threading.Timer(3 * kit.timeout, owner.kill)
        timer.start()
        try:
            request = {**given, "options": options, "name": kit.new_name()}
            owner.stdin.write(json.dumps(request) + "\n")
            owner.stdin.flush()
            reply = json.loads(owner.stdout.readline() or '{"error": "it ended"}')
        finally:
            timer.cancel()
            owner.kill()
        owner.wait()
        _await_end_of_owned(kit, reply)


@contextlib.contextmanager
def _directory(kit: Conformance) -> Iterator[str]:
    """Create a directory, and remove it even if an agent still removes its files there."""
    directory = tempfile.mkdtemp(prefix="tfd-")

    def is_removed() -> bool:
        shutil.rmtree(directory, ignore_errors=True)
        return not os.path.exists(directory)

    try:
        yield directory
    finally:
        kit.until(is_removed, f"the directory {directory} can be removed")


def _await_end_of_owned(kit: Conformance, reply: dict[str, Any]) -> None:
    """Wait for the end of tasks whose process was killed; `reply` is its output."""
    if reply.get("state"):  # such as no session of the engine
        raise Unsupported(f"another process cannot start a cluster: {reply['error']}")
    assert "tasks" in reply, f"another process cannot start a cluster: {reply['error']}"
    if kit.launcher.on_this_host:
        kit.until(
            lambda: not any(os.path.exists(f"/proc/{pid}") for _, pid in reply["tasks"] if pid),
            "the tasks of a killed process have ended",
        )
    kit.until(
        lambda: not any(probe(address).alive for address, _ in reply["tasks"] if address),
        "the tasks of a killed process have closed their ports",
    )


def _stop(kit: Conformance) -> None:
    with kit.brief(data_workers=1) as cluster:
        name = cluster.name
        pids = [task.pid for task in cluster.tasks if task.pid and kit.launcher.on_this_host]
    assert cluster.state == "stopped", f"after stop() the cluster is {cluster.state}"
    assert name not in registry.clusters(), "the name of a stopped cluster is still in use"
    left = {pid for pid in pids if pid != os.getpid()}
    kit.until(
        lambda: not any(os.path.exists(f"/proc/{pid}") for pid in left), "its processes have ended"
    )
    cluster.stop()  # a second call changes nothing


def _failed_start(kit: Conformance) -> None:
    try:
        with kit.brief(data_workers=-1):
            pass
    except TfdError:
        return
    raise AssertionError("data_workers=-1 raised no error of tfd_notebook.errors")


#: The checks by name, in their order.
CHECKS: dict[str, Callable[[Conformance], None]] = {
    "attributes": _attributes,
    "options": _options,
    "start": _start,
    "events": _events,
    "data": _data,
    "logs": _logs,
    "restart": _restart,
    "kill": _kill,
    "scale": _scale,
    "adapt": _adapt,
    "unknown_task": _unknown_task,
    "two_clusters": _two_clusters,
    "training": _training,
    "run": _run,
    "connection": _connection,
    "detach": _detach,
    "owner_killed": _owner_killed,
    "stop": _stop,
    "failed_start": _failed_start,
}
